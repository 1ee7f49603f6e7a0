"""The ground a handler stands on: a savepoint in the worker's transaction, opened when first used.

The handler may do to its session whatever it likes: commit, roll back, begin, break. The claim
lies below the savepoint and survives all of it. A handler that never touches its session never
pays for one.

To begin, commit and roll back in a transaction that is there already, a session uses savepoints of
its own. The first of them would lie directly on ours, and so ours is lent to it. And ours is
released together with making the next one, or by COMMIT. So a handler that writes costs one round
trip more than its statements.

What it may not do is end the transaction below its session. Four ways lead there, each with a guard
that refuses before anything has happened: ``COMMIT`` as text, ``session.connection().commit()``,
that connection's transaction, and ``commit()`` of the driver. Past them all are cursors of the
driver that are made by hand; that is noticed afterwards, by what the driver knows of the
transaction, and by the savepoint, which is not there in another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, event
from sqlalchemy.exc import DBAPIError
from typing_extensions import Self

from pgtask_sa.errors import TaskFailed
from pgtask_sa.failures import sqlstate
from pgtask_sa.pipeline import receive, send
from pgtask_sa.sql_reading import as_text, what_it_does

SAVEPOINT = "pgtask_ground"
OPEN = f"SAVEPOINT {SAVEPOINT}"
_LEAVE = f"RELEASE SAVEPOINT {SAVEPOINT}"
_RENEW = f"{_LEAVE}; {OPEN}"
_UNDO = f"ROLLBACK TO SAVEPOINT {SAVEPOINT}"
NO_SAVEPOINT = ("3B001", "25P01")  # there is none of that name, or not even a transaction
AS_BEFORE = ("SET LOCAL search_path TO DEFAULT", "SET LOCAL ROLE NONE")
# SAVEPOINT and RELEASE keep what was set in between, also for the transaction only.
AS_NEW = "SET SESSION AUTHORIZATION DEFAULT; RESET ALL"
ENDED = "the handler ended the worker's transaction; it may only commit or roll back its session"
ARMED, TROUBLE = "pgtask_armed", "pgtask_trouble"  # keys in the info of a connection
_SILENT = (type(None), DBAPIError, psycopg.Error)  # errors that may not tell why
FAREWELL = "pgtask_farewell"  # attribute of a driver's: why the server has ended the connection
LENDER = "pgtask_lender"  # the ground; also when the handler is through and its session ends
# The key of what each transaction must set for itself, on a connection through a pooler. The next
# transaction of the server process there is a stranger's, who must not meet what a handler set.
POOLED = "pgtask_pooled"
MADE = "pgtask_made"  # key of the settings that were made for a session of our own
FOR_STRANGERS = "RESET ALL; SET SESSION AUTHORIZATION DEFAULT; UNLISTEN *; DISCARD TEMP"


class Ground:
    """Watches one connection on behalf of the handler that is running on it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.armed = False
        self.open = False
        self.moved = False  # the handler changed the session's settings
        self.shifted = False  # or the transaction's
        self._ready = False  # the savepoint is there, and of nobody yet
        self._spent = False  # it is there, but of a task before, and kept
        self._written = False  # some handler of this transaction has needed it
        self.used = False  # the handler has needed it
        self.fell = False  # what was to be there is not: a task before has ended the transaction
        self._own = False  # a statement of ours is executed
        self._sent = False  # it has been asked for, and the answer not been read
        self._lent: str | None = None  # the name under which a session takes it for its own
        self._committed = False  # by that session: what follows is not to undo what was before
        self.driver: Any = None  # psycopg's connection
        self._pgconn: Any = None
        self._info: MutableMapping[Any, Any] = {}
        for name in ("before_cursor_execute", "commit", "rollback"):
            event.listen(connection, name, getattr(self, f"_{name}"))
        # The events come too late to leave SQLAlchemy's own transaction as it was.
        for name in ("commit", "rollback"):
            setattr(connection, name, self._guard(getattr(connection, name)))

    def __enter__(self) -> Self:
        """Stand guard while a handler runs."""
        self.armed, self.used, self.shifted = True, False, False
        self.open, self._ready = self._ready, False
        self._lent, self._committed = None, False
        self._info = self.connection.info
        self._info.pop(TROUBLE, None)
        self._info[ARMED] = self._info[LENDER] = self
        self.driver = self.connection.connection.driver_connection
        self._pgconn = getattr(self.driver, "pgconn", None)
        return self

    def expect(self) -> None:
        """Ask for the savepoint, as the handler will need it; by then the answer will be there."""
        if not self.open and self._pgconn is not None and not hasattr(self._dbapi(), "run_async"):
            send(self._pgconn, _RENEW if self._spent else OPEN)
            self._sent = True

    def _dbapi(self) -> Any:
        return self.connection.connection.dbapi_connection

    def _answer(self) -> None:
        """Read the answer to what `expect` has asked."""
        self._sent = False
        try:
            receive(self._pgconn)
        except psycopg.Error as error:
            self._info[TROUBLE] = error
            self._look_for_fall(error)
            raise
        self._spent, self.open = False, True

    def _look_for_fall(self, error: BaseException) -> None:
        self.fell = self.fell or (self._spent and sqlstate(error) in NO_SAVEPOINT)

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
        if what_it_does(statement).ends or self.status() == TransactionStatus.IDLE:
            raise TaskFailed(ENDED)
        self.stand()
        self.look_at(statement)

    def look_at(self, query: Any) -> None:
        """Refuse what ends the transaction; note what changes settings."""
        if self._own:
            return
        does = what_it_does(as_text(query))
        if does.ends:
            raise TaskFailed(ENDED)
        self.moved = self.moved or does.sets
        self.shifted = self.shifted or does.shifts

    def _commit(self, _conn: Connection) -> None:
        if self.armed:
            raise TaskFailed(ENDED)

    _rollback = _commit

    # -- the savepoint -----------------------------------------------------------------------

    def begin(self) -> None:
        """Note that a transaction begins, in which there is no savepoint yet."""
        self.open = self._ready = self._spent = self._written = self._sent = self.fell = False

    def opened(self) -> None:
        """Note that the savepoint was opened for the task that runs next."""
        self._ready = True

    def wrote(self) -> None:
        """Note that something of ours was written since then, which no handler's failure undoes."""
        self._ready, self._spent = False, self._ready or self._spent

    def is_in_vain(self) -> bool:
        """Say whether it was, but nothing was claimed: it must not lie above the next claim."""
        was_ready, self._ready = self._ready, False
        return was_ready

    def stand(self) -> None:
        """Open the savepoint, unless it is open."""
        self.used = True
        if self._sent:
            self._answer()
        if self.open:
            return
        self.open = True  # first: its own cursor comes by here again
        try:
            self._execute(_RENEW if self._spent else OPEN)
        except BaseException as error:
            self.open = False
            self._look_for_fall(error)
            raise
        self._spent = False

    async def stand_awaited(self) -> None:
        """Open the savepoint, for a handler that works with the async driver itself."""
        self.used = self.open = self._own = True
        try:
            await self.driver.execute(_RENEW if self._spent else OPEN, prepare=False)
        except BaseException as error:
            self.open = False
            self._look_for_fall(error)
            raise
        finally:
            self._own = False
        self._spent = False

    def undo(self) -> None:
        """Undo all that the handler did, also what it committed; the claim stays."""
        if self.open:
            self._execute(_UNDO)
            self._restore()
            self._execute(_LEAVE)
            self.open = False

    def keep(self) -> None:
        """Keep what the handler did, as part of the worker's transaction."""
        if self.open:
            self._restore()
            self._let_go()
            self.open = False

    def _restore(self) -> None:
        """Set what the handler may have set to what it was."""
        pooled = self._info.get(POOLED)
        if self.moved and pooled is not None:
            self._execute("; ".join(filter(None, (FOR_STRANGERS, pooled))))
        elif self.shifted and MADE in self._info:  # else it is somebody else's session
            self._execute(f"{AS_NEW}; {self._info[MADE]}")
        if self.shifted:  # in this order: RESET ALL passes over what was set to the default
            self._execute("; ".join(AS_BEFORE))  # the next of the batch, and our own statements

    def _let_go(self) -> None:
        self._spent = True
        self._written = self._written or self.used

    def commit(self, chain: Callable[[Sequence[str]], None] | None = None) -> None:
        """Check the constraints that were deferred, if a handler wrote anything, and commit then.

        A task that breaks one fails while its row is held; at COMMIT the row would be free before
        the attempt could be counted. With ``chain``, which sends the commands, it is committed in
        any case, and the next transaction begins at once.

        Raises:
            psycopg.Error: a constraint is broken, and `reopen` leads back; or COMMIT failed.
        """
        # COMMIT would release the savepoint as well; but if it is not there, this is not the
        # transaction that we began
        check = ["SET CONSTRAINTS ALL IMMEDIATE"] if self._written else []
        check += [_LEAVE] if self._written and self._spent else []
        if chain is not None:
            with self._heeding():
                chain([*check, "COMMIT AND CHAIN"])
        elif check or POOLED in self._info:
            # not by psycopg: a pooler first hands on why the server has ended the transaction, and
            # then says something of its own; psycopg's commit() tells of neither
            self._execute("; ".join([*check, "COMMIT"]))
            self.begin()

    def reopen(self) -> bool:
        """Go back to before the savepoint was kept, if that can be; then `undo` what was done."""
        self.open, self._spent = self._spent, False
        return self.open and self.status() == TransactionStatus.INERROR

    # -- a session's savepoints ----------------------------------------------------------------

    def do_savepoint(self, name: str) -> bool:
        """Lend the savepoint to a session; False: it needs one of its own."""
        if self._lent is not None or self._committed or not self.armed:
            return False
        self._lent = name
        return True

    def do_release_savepoint(self, name: str) -> bool:
        """Take it back from a session that commits; False: it is not ours."""
        if name != self._lent:
            return False
        self._lent, self._committed = None, self.open
        return True

    def do_rollback_to_savepoint(self, name: str) -> bool:
        """Take it back from a session that rolls back; False: it is not ours."""
        if name != self._lent:
            return False
        self._lent = None
        if self.open:
            self.connection.exec_driver_sql(_UNDO)
        return True

    # -- the connection ------------------------------------------------------------------------

    def _execute(self, statement: str) -> None:
        """Execute a statement, or several, past SQLAlchemy.

        Its own savepoints on this connection may be in any state by now.
        """
        dbapi = self._dbapi()
        with self._heeding(), self._by_us():
            if hasattr(dbapi, "run_async"):
                dbapi.run_async(lambda driver: driver.execute(statement, prepare=False))
            else:
                send(dbapi.pgconn, statement)
                receive(dbapi.pgconn)

    @contextmanager
    def _by_us(self) -> Iterator[None]:
        self._own = True
        try:
            yield
        finally:
            self._own = False

    @contextmanager
    def _heeding(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            self._info[TROUBLE] = self.reason(error)
            raise

    def status(self) -> TransactionStatus:
        """Ask the driver, without a round trip, what became of the transaction."""
        if self._sent:
            with suppress(psycopg.Error):  # the status will tell
                self._answer()
        if self.armed and self._pgconn is not None:
            return self._pgconn.transaction_status  # type: ignore[no-any-return]
        if self.connection.closed or self.connection.invalidated:
            return TransactionStatus.UNKNOWN
        driver: Any = self.connection.connection.driver_connection
        status: TransactionStatus = driver.info.transaction_status
        return status

    def reason(self, error: BaseException | None) -> BaseException | None:
        """Return why the server ended the connection, in place of an error that does not tell."""
        if sqlstate(error) is not None or not isinstance(error, _SILENT):
            return error
        found: BaseException | None = getattr(self.driver, FAREWELL, None)
        return found or error or self.trouble()

    def trouble(self) -> BaseException | None:
        """Return the last database error on this connection since the handler began."""
        found: BaseException | None = self._info.get(TROUBLE)
        return found
