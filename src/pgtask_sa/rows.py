"""A claimed row as one text: how a claim fetches it, and how it is read back, exactly.

Python cannot hold every value of every type: it has no infinity for dates, rounds numerics, and
knows one null where JSON columns know two. The text that Postgres itself writes for a row it can
read again. And it holds the columns that this program's mapping does not know yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Table,
    TableClause,
    Text,
    bindparam,
    cast,
    func,
    literal_column,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.types import UserDefinedType

WHOLE_ROW = "pgtask_row"  # the name under which it travels
# For its quotes. A paramstyle without per cent signs: text() and literal_column() double those in
# names by themselves.
POSTGRES = postgresql.dialect(paramstyle="named")  # type: ignore[no-untyped-call]


def whole_row(table: Table) -> ColumnElement[Any]:
    """Return the whole row as text, for a RETURNING clause."""
    return cast(literal_column(f"{quoted(table)}.*"), Text).label(WHOLE_ROW)


def quoted(table: Table) -> str:
    """Return the name of a table, without its schema, as it stands in a statement."""
    return quoted_name(table.name)


def quoted_name(name: str) -> str:
    """Return a name as it stands in a statement."""
    text: str = POSTGRES.identifier_preparer.quote(name)
    return text


def full_name(table: Table | TableClause) -> str:
    """Return the name of a table, with its schema if it has one, as it is looked up in the catalog.

    Example:
        >>> from sqlalchemy import MetaData
        >>> full_name(Table("100%", MetaData(), schema="shop"))
        'shop."100%"'
    """
    return POSTGRES.identifier_preparer.format_table(table)


class RowType(UserDefinedType[str]):
    """The composite type that Postgres has for the rows of a table."""

    cache_ok = True

    def __init__(self, name: str, schema: str | None) -> None:
        self.name = name
        self.schema = schema


@compiles(RowType)
def _compile_row_type(element: RowType, compiler: Any, **_: Any) -> str:
    quote = compiler.dialect.identifier_preparer.quote
    name: str = quote(element.name)
    return f"{quote(element.schema)}.{name}" if element.schema else name


def row_version(table: Table) -> ColumnElement[Any]:
    """Return which version of the row this is: the number of the transaction that wrote it."""
    return cast(cast(literal_column(f"{quoted(table)}.xmin"), Text), BigInteger)


def restored(table: Table, names: Sequence[str], **changes: Any) -> Any:
    """Read a claimed row, ``:pgtask_row``, back as a record with some columns changed."""
    pairs = [part for name, value in changes.items() for part in (_text(name), value)]
    record = cast(bindparam(WHOLE_ROW, type_=Text), RowType(table.name, table.schema))
    changed = func.jsonb_build_object(*pairs)
    return func.jsonb_populate_record(record, changed).table_valued(*names).alias("restored")


def _text(constant: str) -> ColumnElement[Any]:
    return literal_column(f"'{constant}'", Text)
