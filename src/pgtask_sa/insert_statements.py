"""The inserts: one pure function per statement that adds tasks, in SQLAlchemy Core.

All are ``insert .. select``, so that params may hold SQL expressions, so that they compose as
CTEs, and so that a privilege to insert is all they need: nothing is returned unless asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    ClauseElement,
    Column,
    ColumnElement,
    DateTime,
    Interval,
    Select,
    Text,
    TypeDecorator,
    cast,
    column,
    exists,
    func,
    literal,
    literal_column,
    select,
    true,
    values,
)
from sqlalchemy.dialects.postgresql import HSTORE, JSONB, array
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.orm.attributes import set_committed_value
from sqlalchemy.types import NullType

from pgtask_sa.errors import ParamsError
from pgtask_sa.mapping import LOCK_CLASS, task_table
from pgtask_sa.params import path_of, snapshot, snapshot_hstore, snapshot_value

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from sqlalchemy import FromClause, RowMapping, Table
    from sqlalchemy.dialects.postgresql import Insert
    from sqlalchemy.orm import ColumnProperty, Mapper
    from sqlalchemy.types import TypeEngine

# A class apart from LOCK_CLASS: there the second key is a table's oid, and a sleeping worker holds
# it for minutes; a hash that happens to equal that oid must not wait for it.
COALESCE_LOCK_CLASS = LOCK_CLASS + 1

_PAIRS = 50  # a Postgres function takes at most 100 arguments


@dataclass(frozen=True)
class NewTask:
    """A task to be written; everything in it has been checked.

    Attributes:
        task_class: the mapped class.
        label: the type, by the text that the database knows.
        params: a JSON object; may hold SQL expressions at any depth.
        run_at: a timezone-aware moment, an SQL expression, or None for now.
        columns: values of the user's extra columns, by attribute name.
        priority: lower goes first; an integer, or an SQL expression.
    """

    task_class: type[Any]
    label: str
    params: Any
    run_at: datetime | ColumnElement[Any] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    priority: int | ColumnElement[Any] = 0

    def plan(self) -> dict[str, Any]:
        """Return the values that say when its turn is, without what is the default."""
        plan: dict[str, Any] = {}
        if type(self.priority) is not int or self.priority != 0:
            plan["priority"] = self.priority
        if self.run_at is not None:
            plan["run_at"] = self.run_at
        return plan


def is_hstore(task_class: type[Any]) -> bool:
    """Whether the params of a task class are kept as HSTORE rather than JSONB."""
    kind = task_table(task_class).c.params.type
    return isinstance(kind.impl if isinstance(kind, TypeDecorator) else kind, HSTORE)


def run_at_after(delay: float) -> ColumnElement[Any]:
    """Return the moment ``delay`` seconds from now, by the server's clock.

    Not ``now()``: that stands still from the start of the transaction. Not the client's clock: it
    may be wrong, and the worker compares with the server's.
    """
    return func.clock_timestamp(type_=DateTime(timezone=True)) + literal(
        timedelta(seconds=delay), Interval()
    )


def has_sql(value: Any) -> bool:
    """Whether a value is an SQL expression, or holds one.

    Example:
        >>> has_sql({"a": [1, {"b": func.now()}]}), has_sql({"a": [1]})
        (True, False)
    """
    if isinstance(value, Mapping):
        return any(has_sql(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(has_sql(item) for item in value)
    return is_sql(value)


def is_sql(value: Any) -> bool:
    """Whether a value is an SQL expression itself."""
    return isinstance(value, ClauseElement) or hasattr(value, "__clause_element__")


def insert_one(new: NewTask) -> Insert:
    """Return the insert of one task.

    Example:
        >>> from pgtask_sa.mapping import Task
        >>> from sqlalchemy.dialects.postgresql import psycopg2
        >>> print(insert_one(NewTask(Task, "A", {})).compile(dialect=psycopg2.dialect()))
        INSERT INTO task (task_type, params) SELECT CAST(%(param_1)s AS TEXT) AS task_type, \
CAST(%(param_2)s::JSONB AS JSONB) AS params
    """
    row = _row(new, params_expression(new.task_class, new.params))
    return pg_insert(new.task_class).from_select(list(row), _select(row))


def insert_unless_waiting(new: NewTask) -> Insert:
    """Return the insert of one task unless an equal one waits, which is then held.

    ``for key share skip locked`` is what decides. A task that runs is locked by its worker, so it
    is skipped, and a new one is written at once. A task that waits is locked by us until the
    caller commits: no worker can take it before, so it is sure to see what the caller wrote.
    Columns of the user's own, such as a tenant, are part of what is equal.
    """
    params = params_expression(new.task_class, new.params)
    key = _hash(new.task_class, params, literal(0, BigInteger))
    row = {**_row(new, params), "coalesce_key": key}
    c = task_table(new.task_class).c
    own = [c[name].is_not_distinct_from(row[name]) for name in row if name not in _LIBRARY_KEYS]
    waiting = (
        select(literal(1))
        .where(
            c.task_type == row["task_type"],
            c.coalesce_key == key,
            c.params == params,
            c.lease_token.is_(None),  # else it runs
            *own,
        )
        .with_for_update(key_share=True, read=True, skip_locked=True)
    )
    return pg_insert(new.task_class).from_select(list(row), _select(row).where(~exists(waiting)))


_LIBRARY_KEYS = {"task_type", "params", "run_at", "coalesce_key", "priority"}


def lock_key(new: NewTask, *, wait: bool) -> Select[Any]:
    """Return the statement that locks the key of a coalesced task until the transaction ends.

    It must come before `insert_unless_waiting`, as a statement of its own: a statement that waits
    for a lock goes on with the snapshot it took before, and would not see what its rival wrote.
    """
    seed = func.hashtextextended(literal(new.label, Text), literal(0, BigInteger))
    hashed = _hash(new.task_class, params_expression(new.task_class, new.params), seed)
    keys = (literal(COALESCE_LOCK_CLASS), func.hashint8(hashed))
    if wait:
        return select(func.pg_advisory_xact_lock(*keys))
    return select(func.pg_try_advisory_xact_lock(*keys, type_=Boolean()))


def insert_batch(new: NewTask, params: list[dict[str, Any]]) -> Insert:
    """Return the insert of many tasks that differ only in their params.

    All params travel as one JSON array: one bind parameter whatever the driver, and the fastest
    way that was measured short of COPY. Only where the column's type is the user's own, each is
    bound through it; `write_many` keeps such batches small.
    """
    batch = _typed_rows(new, params) if has_own_params_type(new.task_class) else _json_rows(params)
    row = _row(new, batch.c.value)
    if is_hstore(new.task_class) and not has_own_params_type(new.task_class):
        row["params"] = _hstore_of(batch.c.value)
    return pg_insert(new.task_class).from_select(list(row), _select(row).select_from(batch))


def has_own_params_type(task_class: type[Any]) -> bool:
    """Whether params pass through a `TypeDecorator` of the user's, which may encrypt them, say."""
    return isinstance(task_table(task_class).c.params.type, TypeDecorator)


def _json_rows(params: list[dict[str, Any]]) -> FromClause:
    texts = literal(json.dumps(params, ensure_ascii=False), Text)
    elements = func.jsonb_array_elements(cast(texts, JSONB))
    return elements.table_valued(column("value", JSONB), name="batch")


def _typed_rows(new: NewTask, params: list[dict[str, Any]]) -> FromClause:
    rows = [(params_expression(new.task_class, item),) for item in params]
    # NullType: what was bound through the type must not pass through it again
    return values(column("value", NullType()), name="batch").data(rows)


def silence_wakeup() -> Select[Any]:
    """Return the statement that keeps the wake-up trigger quiet for this transaction.

    A two-phase transaction that has notified cannot be prepared.
    """
    return select(func.set_config(_text("pgtask.notify"), _text("off"), true()))


def set_lock_timeout(value: str) -> Select[Any]:
    """Return the statement that sets ``lock_timeout`` until the transaction ends."""
    return select(func.set_config(_text("lock_timeout"), value, true()))


def _text(constant: str) -> ColumnElement[Any]:
    return literal_column(f"'{constant}'", Text)


def any_insert(task_class: type[Any]) -> Insert:
    """Return an insert to ask a session's ``get_bind()`` with, which tells where tasks go.

    Sessions that route by statement send what is no write to a replica.
    """
    return _any_insert(task_table(task_class))


@lru_cache
def _any_insert(table: Table) -> Insert:
    return pg_insert(table)


def all_columns(task_class: type[Any]) -> list[ColumnElement[Any]]:
    """Return the columns behind the attributes of a task class, which `fill_in` reads."""
    mapper: Mapper[Any] = task_class.__mapper__
    return [c for attribute in mapper.column_attrs for c in _column(attribute)]


def fill_in(task: Any, row: RowMapping) -> None:
    """Give an object the values of its row, as if a query had loaded it.

    A query would look at ``polymorphic_on`` first, and may know no class for this row.
    """
    for attribute in task.__mapper__.column_attrs:
        for source in _column(attribute):
            set_committed_value(task, attribute.key, row[source])


def _column(attribute: ColumnProperty[Any]) -> list[ColumnElement[Any]]:
    """Return the column behind an attribute; none for an expression (``column_property``)."""
    return [c for c in attribute.columns[:1] if isinstance(c, Column)]


def _row(new: NewTask, params: ColumnElement[Any]) -> dict[str, ColumnElement[Any]]:
    """Return the expressions to insert, by column key."""
    label_type = task_table(new.task_class).c.task_type.type
    row = {"task_type": cast(literal(new.label, Text), label_type), "params": params}
    given = {**new.columns, **new.plan()}
    mapper: Mapper[Any] = new.task_class.__mapper__
    kind = mapper.polymorphic_on
    if isinstance(kind, Column) and mapper.polymorphic_identity is not None:
        row.setdefault(kind.key, _typed(mapper.polymorphic_identity, kind.type))  # as a flush does
    for name, value in given.items():
        target = mapper.column_attrs[name].columns[0]
        row[target.key] = _typed(value, target.type)
    return row


def _typed(value: Any, kind: TypeEngine[Any]) -> Any:
    return value if is_sql(value) else cast(literal(value, kind), kind)


def _select(row: Mapping[str, ColumnElement[Any]]) -> Select[Any]:
    return select(*(expression.label(name) for name, expression in row.items()))


def _hash(task_class: type[Any], params: Any, seed: Any) -> ColumnElement[Any]:
    # Both hashes agree with ``=``: 1 and 1.0 are equal, and so are their hashes.
    hashed = func.hstore_hash_extended if is_hstore(task_class) else func.jsonb_hash_extended
    return hashed(params, seed)


def params_expression(task_class: type[Any], params: Any) -> ColumnElement[Any]:
    """Return params as an SQL expression; those that hold SQL are built by the server."""
    kind = task_table(task_class).c.params.type
    if is_sql(params):
        return cast(params, kind)
    if not has_sql(params):
        return cast(literal(params, kind), kind)
    if is_hstore(task_class):
        return _hstore(params)
    return _jsonb(params, ())


def _jsonb(value: Any, keys: tuple[str | int, ...]) -> ColumnElement[Any]:
    if is_sql(value):
        return value  # type: ignore[no-any-return]
    if not has_sql(value):
        return cast(literal(json.dumps(snapshot_value(value, keys)), Text), JSONB)
    return _jsonb_object(value, keys) if isinstance(value, Mapping) else _jsonb_array(value, keys)


def _jsonb_object(value: Mapping[str, Any], keys: tuple[str | int, ...]) -> ColumnElement[Any]:
    snapshot(dict.fromkeys(value), path=path_of("params", keys))  # judges the keys
    pairs = [
        (literal(key, Text), _jsonb(item, (*keys, key))) for key, item in value.items()
    ]  # fmt: skip
    parts = [
        func.jsonb_build_object(*(x for pair in pairs[i : i + _PAIRS] for x in pair), type_=JSONB)
        for i in range(0, len(pairs), _PAIRS)
    ]
    return _joined(parts)


def _jsonb_array(value: Any, keys: tuple[str | int, ...]) -> ColumnElement[Any]:
    if isinstance(value, tuple):
        raise ParamsError(path_of("params", keys), "tuple is not plain JSON")
    items = [_jsonb(item, (*keys, i)) for i, item in enumerate(value)]
    parts = [
        func.jsonb_build_array(*items[i : i + 2 * _PAIRS], type_=JSONB)
        for i in range(0, len(items), 2 * _PAIRS)
    ]
    return _joined(parts)


def _joined(parts: Sequence[ColumnElement[Any]]) -> ColumnElement[Any]:
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.concat(part)
    return whole


def _hstore(params: Mapping[str, Any]) -> ColumnElement[Any]:
    plain = {key: item for key, item in params.items() if not is_sql(item)}
    snapshot_hstore({**dict.fromkeys(params), **plain})
    values = [cast(item, Text) for item in params.values()]
    return func.hstore(array([literal(key, Text) for key in params]), array(values), type_=HSTORE)


def _hstore_of(element: Any) -> ColumnElement[Any]:
    pair = func.jsonb_each_text(element).table_valued("key", "value")
    keys, values = func.array_agg(pair.c.key), func.array_agg(pair.c.value)
    built = select(func.hstore(keys, values, type_=HSTORE)).select_from(pair).scalar_subquery()
    return func.coalesce(built, cast(literal("", Text), HSTORE), type_=HSTORE)
