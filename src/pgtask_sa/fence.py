"""The fence of the leased mode: no transaction of a handler is committed without its lease.

It stands before ``commit()`` of the handler's session. What would end a transaction past it is
refused by the call itself: COMMIT as text, alone or among other statements, ``commit()`` of the
connection, of its transaction and of the driver, ``transaction()`` of the driver, and autocommit,
with which nothing is ever held back. That goes for the driver's own cursors, too.

What a handler sets for its session on the server must not meet the next task: the fence remembers
that it did, and the lane takes another connection.

It is no wall. Nobody looks below the driver's cursors, at ``pgconn``; and autocommit that is set on
the driver's connection is only noticed at the next commit.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, event
from sqlalchemy.orm import Session
from typing_extensions import Self

from pgtask_sa.errors import TaskFailed
from pgtask_sa.ground import (
    AS_BEFORE,
    ENDS_TRANSACTION,
    FOR_STRANGERS,
    LONG,
    POOLED,
    SETS_BY_FUNCTION,
    SETS_LOCAL,
    SETS_SESSION,
)

PAST_FENCE = (
    "a leased handler ends its transactions by commit() and rollback() of its session alone: "
    "these make sure that the lease still stands"
)
NO_OPTION = (
    "{} cannot be set for the connection of a leased handler, on which its worker goes on; begin "
    "the transaction with SET TRANSACTION .. instead"
)
# As options of a connection they change what a transaction is, for all that follow.
REFUSED_OPTIONS = ("isolation_level", "postgresql_readonly", "postgresql_deferrable")
LOOK = "pgtask_look"  # attribute of a driver's connection
# Literals, quoted names, bodies of functions, comments: what stands in there is no statement.
_QUOTED = re.compile(
    r"""\bE'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|"(?:[^"]|"")*"|\$(\w*)\$.*?\$\1\$"""
    r"""|--[^\n]*|/\*.*?\*/""",
    re.DOTALL | re.IGNORECASE,
)
# A body that is no literal: begin atomic ..; end
_DEFINES = re.compile(r"\s*create\s+(or\s+replace\s+)?(function|procedure)\b", re.IGNORECASE)


class Does(NamedTuple):
    """What a text of SQL does to the transaction and to the session on the server."""

    ends: bool
    sets: bool
    shifts: bool  # settings of the transaction, at least


def _does(text: str) -> Does:
    parts = _statements(text)
    sets = any(_sets(part) for part in parts)
    return Does(
        ends=any(ENDS_TRANSACTION.match(part) for part in parts),
        sets=sets,
        shifts=sets or any(SETS_LOCAL.match(part) or "set_config" in part for part in parts),
    )


def _sets(statement: str) -> bool:
    if SETS_SESSION.match(statement):
        return True
    return "set_config" in statement and not SETS_BY_FUNCTION.fullmatch(statement)


def _statements(text: str) -> list[str]:
    """Split a text into its statements, without what is quoted in them."""
    bare = _QUOTED.sub(_emptied, text)
    return [bare] if _DEFINES.match(bare) else bare.split(";")


def _emptied(quoted: re.Match[str]) -> str:
    return " " if quoted[0].startswith(("--", "/*")) else "''"


_does_cached = lru_cache(maxsize=1000)(_does)


def what_it_does(text: str) -> Does:
    """Say what a text of SQL, of one or several statements, does.

    Example:
        >>> what_it_does("insert into usr values (1); /* so */ commit")
        Does(ends=True, sets=False, shifts=False)
        >>> what_it_does("do $$ begin perform 1; end $$; select '; commit'")
        Does(ends=False, sets=False, shifts=False)
        >>> what_it_does("set search_path to shop").sets, what_it_does("set local x to 1").sets
        (True, False)
    """
    # the cache is not for the long texts of bulk inserts
    return _does_cached(text) if len(text) < LONG else _does(text)


def _as_text(query: Any) -> str:
    """Return what a cursor of the driver is given, as text."""
    if isinstance(query, str):
        return query
    return query.decode(errors="replace") if isinstance(query, bytes) else _composed(query)


def _composed(query: Any) -> str:
    as_string = getattr(query, "as_string", None)
    return "" if as_string is None else str(as_string(None))


class Fence:
    """Stands before each commit of a handler's session, but for those of savepoints.

    Args:
        session: of the handler.
        connection: on which it is.
        check: raises an error if the lease was lost; and else sees to it that it cannot be.
    """

    def __init__(self, session: Session, connection: Connection, check: Callable[[], None]) -> None:
        self.connection = connection
        self.check = check
        self.up = True
        self.moved = False  # the session on the server is not as it was
        self._shifted = False  # nor, at least, the transaction
        self._passed = False
        self._guarded: list[_GuardedDriver] = []
        self._events: list[tuple[Any, str, Callable[..., None]]] = [
            (session, "before_commit", self._before_commit),
            (connection, "before_cursor_execute", self._before_execute),
            (connection, "set_connection_execution_options", self._set_options),
            (connection, "begin", self._begin),
            (connection, "commit", self._commit),
            (connection, "rollback", self._rollback),
        ]

    def __enter__(self) -> Self:
        for target, name, heard in self._events:
            event.listen(target, name, heard)
        return self

    def __exit__(self, *_: object) -> None:
        for target, name, heard in self._events:
            event.remove(target, name, heard)
        for guarded in self._guarded:
            self.moved = self.moved or guarded.commits_by_itself()
            guarded.release()

    def _before_commit(self, session: Session) -> None:
        if session.in_nested_transaction():
            return
        if any(guarded.commits_by_itself() for guarded in self._guarded):
            raise TaskFailed(PAST_FENCE)
        self.come_back(session)
        if self.up:
            self.check()
        self._passed = True

    def come_back(self, session: Session) -> None:
        """See to it that our own statements find our tables.

        For this transaction only; but through a pooler the next one is a stranger's, perhaps. In
        this order: RESET ALL passes over what was set to the default.
        """
        if not self._shifted:
            return
        session.flush()  # where the handler wants it
        connection = session.connection()  # which begins the session's transaction, if need be
        strangers = self.moved and connection.info.get(POOLED) is not None
        for statement in ((FOR_STRANGERS,) if strangers else ()) + AS_BEFORE:
            connection.exec_driver_sql(statement)
        self.moved = self.moved and not strangers

    def _before_execute(self, _conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement != self.connection.info.get(POOLED):  # our own, at the beginning of each
            self.look_at(statement)

    def look_at(self, statement: Any) -> None:
        """Refuse a statement that ends the transaction; note one that changes the session."""
        does = what_it_does(_as_text(statement))
        if does.ends:
            raise TaskFailed(PAST_FENCE)
        self.moved = self.moved or does.sets
        self._shifted = self._shifted or does.shifts

    @staticmethod
    def _set_options(_connection: Connection, options: dict[str, Any]) -> None:
        for name in REFUSED_OPTIONS:
            if name in options:
                raise TaskFailed(NO_OPTION.format(name))

    def _begin(self, connection: Connection) -> None:
        """Guard the driver's connection, which may be another one after it was lost."""
        driver: Any = connection.connection.driver_connection
        if all(guarded.driver is not driver for guarded in self._guarded):
            self._guarded.append(_GuardedDriver(driver, self))

    def _commit(self, _connection: Connection) -> None:
        if not self._passed:
            raise TaskFailed(PAST_FENCE)

    def commit_driver(self, commit: Callable[[], Any]) -> Any:
        """Commit by the driver's connection, if the session has just asked for it."""
        if not self._passed:
            raise TaskFailed(PAST_FENCE)
        self._passed = False
        return commit()  # or what is to be awaited

    def _rollback(self, _connection: Connection) -> None:
        self._passed = False


class _GuardedDriver:
    """A connection of the driver while a leased handler runs on it."""

    def __init__(self, driver: Any, fence: Fence) -> None:
        self.driver = driver
        self.fence = fence
        self._before = (driver.commit, driver.transaction, driver.cursor_factory)
        driver.commit = self._commit
        driver.transaction = self._transaction
        driver.cursor_factory = _looking(driver.cursor_factory)
        setattr(driver, LOOK, fence.look_at)

    def release(self) -> None:
        """Leave it as it was."""
        driver = self.driver
        driver.commit, driver.transaction, driver.cursor_factory = self._before
        delattr(driver, LOOK)

    def commits_by_itself(self) -> bool:
        """Say whether autocommit was switched on, past SQLAlchemy."""
        return bool(self.driver.autocommit) and not self.driver.closed

    def _commit(self) -> Any:
        return self.fence.commit_driver(self._before[0])

    def _transaction(self, *args: Any, **kw: Any) -> Any:
        """Let it make a savepoint, but no transaction of its own."""
        if self.driver.info.transaction_status == TransactionStatus.IDLE:
            raise TaskFailed(PAST_FENCE)
        return self._before[1](*args, **kw)


@lru_cache
def _looking(factory: Any) -> Any:
    """Return the class of cursors that look at what they are given to execute."""

    class Looking(factory):  # type: ignore[misc]
        __slots__ = ()

        def execute(self, query: Any, *args: Any, **kw: Any) -> Any:
            look_at = getattr(self.connection, LOOK, None)
            if look_at is not None:  # it may be kept for longer than the handler runs
                look_at(query)
            return super().execute(query, *args, **kw)  # or what is to be awaited

    return Looking
