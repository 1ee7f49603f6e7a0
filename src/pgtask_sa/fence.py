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

from collections.abc import Callable
from typing import Any

from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, event
from sqlalchemy.orm import Session
from typing_extensions import Self

from pgtask_sa.errors import TaskFailed
from pgtask_sa.ground import AS_BEFORE, FOR_STRANGERS, POOLED
from pgtask_sa.guards import LOOK
from pgtask_sa.sql_reading import as_text, what_it_does

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
        does = what_it_does(as_text(statement))
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
        self._before = (driver.commit, driver.transaction, getattr(driver, LOOK))
        driver.commit = self._commit
        driver.transaction = self._transaction
        setattr(driver, LOOK, fence.look_at)

    def release(self) -> None:
        """Leave it as it was."""
        driver = self.driver
        driver.commit, driver.transaction, look_at = self._before
        setattr(driver, LOOK, look_at)

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
