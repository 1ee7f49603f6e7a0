"""The flush of a single task, as the one statement that it comes to.

A unit of work sorts, groups and compares. Where one plain task is all that there is to write, as in
most transactions that hand work over, all of that finds nothing, and takes longer than the insert.
So then the row is written without it: through the same connection, in the same transaction, with
the same values, and the object is left as the ledger leaves any other.

Only where nobody could tell. Whoever listens to flushes or to the life of objects, routes or shards
the session, or maps the task class in a way of their own, gets the unit of work.
"""

from __future__ import annotations

import contextlib
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from sqlalchemy import Column, inspect
from sqlalchemy.orm import Session, make_transient_to_detached

from pgtask_sa.insert_statements import any_insert, is_sql
from pgtask_sa.intake import is_autocommit, task_connection
from pgtask_sa.mapping import TASK_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection
    from sqlalchemy.orm import Mapper

_Keys: TypeAlias = tuple[str, ...]


def is_all(session: Session, task: Any, flush: Callable[[], None]) -> bool:
    """Whether a flush would write this task, nothing else, and nobody looks on."""
    return (
        getattr(flush, "__func__", None) is Session.flush  # of all objects, and nobody's own
        and not session.twophase
        and session.connection_callable is None
        and type(session).get_bind is Session.get_bind
        and _is_all(session, task)
        and not _is_heard(session)
        and not _is_watched(inspect(task).mapper)
    )


def _is_all(session: Session, task: Any) -> bool:
    new = session.new
    if len(new) != 1 or task not in new:
        return False
    return not (len(session.identity_map) and (session.dirty or session.deleted))


def _is_heard(session: Session) -> bool:
    at = session.dispatch
    return bool(
        at.before_flush
        or at.after_flush
        or at.after_flush_postexec
        or at.pending_to_persistent
        or at.pending_to_transient
        or at.persistent_to_detached
    )


def _is_watched(mapper: Mapper[Any]) -> bool:
    at = mapper.dispatch
    # one listener is the ledger's own, which has nothing to say about params that are there
    is_watched = len(at.before_insert) > 1 or at.after_insert
    return bool(is_watched or mapper.class_manager.dispatch.refresh_flush)


def write(session: Session, task: Any, flush: Callable[[], None]) -> bool:
    """Write a task and let go of it; return False, with nothing done, if that takes a flush."""
    state = inspect(task)
    shape = _shape(state.mapper)
    if not shape.fits(state.mapper):
        return False
    connection = task_connection(session, type(task))
    if is_autocommit(connection):
        return False  # what has failed could not be made to fail again
    try:
        returned = shape.insert(connection, shape.values(state.dict))
    except Exception:
        # It fails, too, in a transaction that has failed. Thereby the session learns that it has,
        # and asks for rollback(), as after any flush.
        with contextlib.suppress(Exception):
            flush()
        raise
    if returned is None:  # for a trigger of the user's, say; a flush has something to say about it
        return False
    session.expunge(task)
    state.dict.update(returned)
    for key in shape.columns:
        state.dict.setdefault(key, None)
    make_transient_to_detached(task)
    # as a flush notes it: a rollback makes it transient again, for there is no such row then
    transaction: Any = session.get_nested_transaction() or session.get_transaction()
    transaction._new[state] = True  # noqa: SLF001 - there is no public way
    return True


class Shape:
    """How the rows of a task class are written.

    Attributes:
        columns: the column of each attribute.
    """

    def __init__(self, mapper: Mapper[Any]) -> None:
        properties = mapper.column_attrs
        self.columns = {p.key: p.columns[0] for p in properties if isinstance(p.columns[0], Column)}
        # as a flush does, whatever the server's own default is; ours have none
        self._nulls = {
            key
            for key, column in self.columns.items()
            if column.server_default is None and not column.type.should_evaluate_none
        } - TASK_COLUMNS
        self._insert = any_insert(mapper.class_)
        self._statements: dict[tuple[_Keys, _Keys], tuple[Any, _Keys]] = {}
        self._is_plain = (
            mapper.inherits is None
            and mapper.polymorphic_on is None
            and mapper.version_id_col is None
            and all(column.default is None for column in self.columns.values())
        )

    def fits(self, mapper: Mapper[Any]) -> bool:
        """Whether a flush comes to one insert into one table."""
        # an attribute may have been added since
        is_whole = len(mapper.column_attrs) == len(self.columns)
        return self._is_plain and is_whole and not mapper.relationships

    def values(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return what to insert, by column, as a flush would."""
        values: dict[str, Any] = {}
        for key, column in self.columns.items():
            value = given.get(key)
            if value is not None or (key in given and column.type.should_evaluate_none):
                values[column.key] = value
            elif key in self._nulls:
                values[column.key] = None
        return values

    def insert(self, connection: Connection, values: dict[str, Any]) -> dict[str, Any] | None:
        """Insert a row; return what the server chose of it, by attribute."""
        expressions = {key: value for key, value in values.items() if is_sql(value)}
        plain = {k: v for k, v in values.items() if k not in expressions} if expressions else values
        statement, returned = self._statement(tuple(plain), tuple(expressions))
        if expressions:
            statement = statement.values(expressions)
        rows = connection.execute(statement, plain).all()
        return dict(zip(returned, rows[0], strict=True)) if rows else None

    def _statement(self, plain: _Keys, expressions: _Keys) -> tuple[Any, _Keys]:
        """Return the insert of such columns, still without values, and the attributes it returns.

        No more than the server chooses or computes: a role may have no right to read the params.
        """
        if (plain, expressions) not in self._statements:
            chosen = {
                attribute: column
                for attribute, column in self.columns.items()
                if column.primary_key
                or column.key in expressions
                or (column.server_default is not None and column.key not in plain)
            }
            statement = self._insert.returning(*chosen.values())
            self._statements[plain, expressions] = statement, tuple(chosen)
        return self._statements[plain, expressions]


@lru_cache
def _shape(mapper: Mapper[Any]) -> Shape:
    return Shape(mapper)
