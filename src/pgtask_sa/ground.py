"""The ground a handler stands on: a savepoint in the worker's transaction, opened when first used.

The handler may do to its session whatever it likes: commit, roll back, begin, break. The claim
lies below the savepoint and survives all of it. A handler that never touches its session never
pays for one.

What it may not do is end the transaction below its session. Four ways lead there, each with a guard
that refuses before anything has happened: ``COMMIT`` as text, ``session.connection().commit()``,
that connection's transaction, and ``commit()`` of the driver. Past them all is the driver's own
cursor; that is noticed afterwards, by what the driver knows of the transaction.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, MutableMapping
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, Engine, event
from typing_extensions import Self

from pgtask_sa.errors import TaskFailed

SAVEPOINT = "pgtask"
ENDS_TRANSACTION = re.compile(
    r"\s*(commit|end|abort|rollback(?!\s+(work\s+|transaction\s+)?to\b)|begin|start\s+transaction"
    r"|prepare\s+transaction)\b",
    re.IGNORECASE,
)
# What outlives the transaction, and would meet the lane's next task; and what outlives the handler.
SETS_SESSION = re.compile(
    r"\s*(set(?!\s+(local|transaction|constraints)\b)|reset|discard|listen|prepare(?!\s+transaction)"
    r"|create\s+((local|global)\s+)?temp)\b",
    re.IGNORECASE,
)
SETS_LOCAL = re.compile(r"\s*set\s+local\b", re.IGNORECASE)
AS_BEFORE = ("SET LOCAL search_path TO DEFAULT", "SET LOCAL ROLE NONE")
ENDED = "the handler ended the worker's transaction; it may only commit or roll back its session"
ARMED, TROUBLE = "pgtask_armed", "pgtask_trouble"  # keys in the info of a connection
# The key of what each transaction must set for itself, on a connection through a pooler. The next
# transaction of the server process there is a stranger's, who must not meet what a handler set.
POOLED = "pgtask_pooled"
FOR_STRANGERS = "RESET ALL; SET SESSION AUTHORIZATION DEFAULT; UNLISTEN *; DISCARD TEMP"


def watch_errors(engine: Engine) -> None:
    """Remember on each connection its last database error: a handler may swallow it."""

    @event.listens_for(engine, "handle_error")
    def _remember(context: Any) -> None:
        if context.connection is not None and not context.connection.invalidated:
            context.connection.info[TROUBLE] = context.original_exception


def guard_driver(driver: Any, info: MutableMapping[Any, Any]) -> None:
    """Refuse ``commit()`` and ``rollback()`` of a driver's connection while a handler runs.

    And open the savepoint for a handler that goes to the (sync) driver without its session.
    """
    for name in ("commit", "rollback"):
        setattr(driver, name, _guarded(getattr(driver, name), info))
    if not inspect.iscoroutinefunction(driver.commit):
        for name in ("cursor", "transaction"):
            setattr(driver, name, _standing(getattr(driver, name), info))


def _guarded(method: Callable[[], Any], info: MutableMapping[Any, Any]) -> Callable[[], Any]:
    def sync() -> Any:
        if _handler_on(method, info):
            raise TaskFailed(ENDED)
        return method()

    async def awaited() -> Any:
        return await sync()

    return awaited if inspect.iscoroutinefunction(method) else sync


def _standing(method: Callable[..., Any], info: MutableMapping[Any, Any]) -> Callable[..., Any]:
    def opened(*args: Any, **kw: Any) -> Any:
        ground = _handler_on(method, info)
        if ground is not None:
            ground.stand()
        return method(*args, **kw)

    return opened


def _handler_on(method: Any, info: MutableMapping[Any, Any]) -> Ground | None:
    """Return the ground of the handler that runs on the driver's connection of this method.

    One that was taken out of its pool shares the info with its successor there.
    """
    ground: Ground | None = info.get(ARMED)
    return ground if ground is not None and ground.driver is method.__self__ else None


class Ground:
    """Watches one connection on behalf of the handler that is running on it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.armed = False
        self.open = False
        self.moved = False  # the handler changed the session's settings
        self.shifted = False  # or the transaction's
        self._info: MutableMapping[Any, Any] = {}
        self.driver: Any = None  # of the connection while a handler runs
        for name in ("before_cursor_execute", "commit", "rollback"):
            event.listen(connection, name, getattr(self, f"_{name}"))
        # The events come too late to leave SQLAlchemy's own transaction as it was.
        for name in ("commit", "rollback"):
            setattr(connection, name, self._guard(getattr(connection, name)))

    def __enter__(self) -> Self:
        """Stand guard while a handler runs."""
        self.armed, self.open, self.shifted = True, False, False
        self._info = self.connection.info
        self.driver = self.connection.connection.driver_connection
        self._info.pop(TROUBLE, None)
        self._info[ARMED] = self
        return self

    def __exit__(self, *_: object) -> None:
        """Stand down; the savepoint, if there is one, stays open."""
        self.armed = False
        self._info.pop(ARMED, None)

    def close(self) -> None:
        """Stop watching the connection."""
        for name in ("before_cursor_execute", "commit", "rollback"):
            event.remove(self.connection, name, getattr(self, f"_{name}"))
        for name in ("commit", "rollback"):
            delattr(self.connection, name)

    def _guard(self, method: Callable[[], None]) -> Callable[[], None]:
        def guarded() -> None:
            if self.armed:
                raise TaskFailed(ENDED)
            method()

        return guarded

    def _before_cursor_execute(
        self, _conn: Any, _cursor: Any, statement: str, _params: Any, _context: Any, _many: bool
    ) -> None:
        if not self.armed:
            return
        if ENDS_TRANSACTION.match(statement) or self.status() == TransactionStatus.IDLE:
            raise TaskFailed(ENDED)
        self.stand()
        if SETS_SESSION.match(statement) or "set_config" in statement:
            self.moved = self.shifted = True
        elif SETS_LOCAL.match(statement):
            self.shifted = True

    def stand(self) -> None:
        """Open the savepoint, unless it is open."""
        if self.open:
            return
        self.open = True  # first: its own cursor comes by here again
        try:
            self._execute(f"SAVEPOINT {SAVEPOINT}")
        except BaseException:
            self.open = False
            raise

    def _commit(self, _conn: Connection) -> None:
        if self.armed:
            raise TaskFailed(ENDED)

    _rollback = _commit

    def undo(self) -> None:
        """Undo all that the handler did, also what it committed; the claim stays."""
        if self.open:
            self._execute(f"ROLLBACK TO SAVEPOINT {SAVEPOINT}")
            self.keep()

    def keep(self, *, check: bool = False) -> None:
        """Keep what the handler did, as part of the worker's transaction.

        With ``check`` its deferred constraints are checked now. A task that breaks one fails while
        its row is held; at COMMIT the row would be free before the attempt could be counted.
        """
        if not self.open:
            return
        release = f"RELEASE SAVEPOINT {SAVEPOINT}"
        settings = self._info.get(POOLED)
        if self.moved and settings is not None:
            self._execute("; ".join(filter(None, (FOR_STRANGERS, settings))))
        if self.shifted:
            for statement in AS_BEFORE:  # the next of the batch, and our own statements
                self._execute(statement)
        if check:
            self._execute_both("SET CONSTRAINTS ALL IMMEDIATE", release)
        else:
            self._execute(release)
        self.open = False

    def _execute(self, statement: str) -> None:
        # past SQLAlchemy, whose own savepoints on this connection may be in any state by now
        cursor = self.connection.connection.cursor()
        try:
            cursor.execute(statement)
        except psycopg.Error as error:
            self._info[TROUBLE] = error
            raise
        finally:
            cursor.close()

    def _execute_both(self, first: str, second: str) -> None:
        """Execute two statements in one round trip; with psycopg, and unprepared, that can be."""
        dbapi: Any = self.connection.connection.dbapi_connection
        both = f"{first}; {second}"
        try:
            if hasattr(dbapi, "run_async"):
                dbapi.run_async(lambda driver: driver.execute(both, prepare=False))
            else:
                dbapi.execute(both, prepare=False)
        except psycopg.Error as error:
            self._info[TROUBLE] = error
            raise

    def status(self) -> TransactionStatus:
        """Ask the driver, without a round trip, what became of the transaction."""
        if self.connection.closed or self.connection.invalidated:
            return TransactionStatus.UNKNOWN
        driver: Any = self.connection.connection.driver_connection
        status: TransactionStatus = driver.info.transaction_status
        return status

    def trouble(self) -> BaseException | None:
        """Return the last database error on this connection since the handler began."""
        found: BaseException | None = self._info.get(TROUBLE)
        return found
