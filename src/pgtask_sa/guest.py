"""An `Execution` that is a guest in somebody else's transaction. `pgtask_sa.testing` drives it.

The worker owns its connection. A test owns its own, with a transaction that it will roll back, on
any driver. The guest works there in savepoints, takes the oldest task first, so that each run of a
test sees the same order, and hands errors back instead of only recording them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from weakref import WeakSet

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import ColumnElement, Connection, Engine, Executable, RowMapping
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from pgtask_sa.calls import T, remember_options
from pgtask_sa.claiming import Claiming
from pgtask_sa.enqueue import TaskSession
from pgtask_sa.enqueue_async import AsyncTaskSession
from pgtask_sa.errors import ConfigurationError, TaskFailed
from pgtask_sa.events import Events
from pgtask_sa.execution import Execution
from pgtask_sa.ground import SAVEPOINT, TROUBLE, Ground
from pgtask_sa.guards import watch_errors
from pgtask_sa.handlers import Handler, TaskRegistry
from pgtask_sa.reports import next_in_line
from pgtask_sa.retry import Verdict
from pgtask_sa.settle import Claimed, Settler, Tables
from pgtask_sa.turns import Claimer

if TYPE_CHECKING:
    from typing_extensions import Self

Now: TypeAlias = "ColumnElement[Any] | None"
MakeSession: TypeAlias = "Callable[..., Session] | None"
MakeAsyncSession: TypeAlias = "Callable[..., AsyncSession] | None"


class Guest:
    """Runs tasks one by one on a connection that belongs to somebody else.

    Args:
        connection: with a transaction in progress, which is neither committed nor rolled back.
        tasks: the registry with the handlers.
        now: the moment up to which tasks are due; None is the server's clock.
        make_session: makes the sessions of plain handlers.
        async_connection: the same connection, when async code runs all this within ``run_sync``;
            only then can async handlers be run.
        make_async_session: makes the sessions of async handlers.
    """

    def __init__(
        self,
        connection: Connection,
        tasks: TaskRegistry,
        now: Now = None,
        *,
        make_session: MakeSession = None,
        async_connection: AsyncConnection | None = None,
        make_async_session: MakeAsyncSession = None,
    ) -> None:
        faces = _Faces(
            connection, async_connection, *_makers(tasks, make_session, make_async_session)
        )
        tables, events = Tables(tasks.task_class), Events()
        self.claimer = _OldestFirst(connection, tables, tasks.handlers, faces, now)
        self.faces = faces
        self.settler = _Notes(connection, tables, tasks.handlers, events)
        self.execution = Execution(
            connection,
            faces,
            cast("Claimer", self.claimer),  # what the execution uses of one
            tasks.handlers,
            tables,
            events,
            begin=connection.begin_nested,
        )
        self.execution.settler = self.settler
        self.execution.ground.close()
        self.execution.ground = _AnyGround(connection)
        self.execution.claiming = _AnyClaiming(
            connection, self.execution.ground, self.execution.claimer, tables
        )
        _remember_errors(connection.engine)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """Leave the connection as it was found."""
        self.execution.ground.close()

    def step(self) -> tuple[Claimed, BaseException | None] | None:
        """Run the next task; return it and what went wrong with it, or None if there is none.

        Raises:
            ConfigurationError: its handler is async and there is no async connection.
            TaskFailed: the owner's transaction was lost.
        """
        self.settler.noted = None
        if not self.execution.sweep():
            return None
        if self.settler.noted is None:
            raise TaskFailed("the transaction was lost while a task ran") from self.faces.error
        return self.settler.noted

    def is_done(self) -> bool:
        """Say whether there is nothing left to run."""
        return not list(self.claimer.statements())


def _makers(
    tasks: TaskRegistry, make: MakeSession, make_async: MakeAsyncSession
) -> tuple[Callable[..., Session], Callable[..., AsyncSession]]:
    """Complete what makes the handlers' sessions: by default the same as in the worker."""
    kind = tasks.task_class
    return (
        make or sessionmaker(class_=TaskSession, task_class=kind),
        make_async or async_sessionmaker(class_=AsyncTaskSession, task_class=kind),
    )


class _Faces:
    """Calls handlers of both kinds, without time limits: the worker's cut the connection."""

    def __init__(
        self,
        connection: Connection,
        async_connection: AsyncConnection | None,
        make: Callable[..., Session],
        make_async: Callable[..., AsyncSession],
    ) -> None:
        self.connection = connection
        self.async_connection = async_connection
        self.make = make
        self.make_async = make_async
        self.is_async = False  # the handler whose turn it is
        self.error: BaseException | None = None

    def open(self, **options: Any) -> tuple[Session, Any]:
        if self.is_async:
            handed = self.make_async(bind=self.async_connection, **options)
            remember_options(handed.sync_session)
            return handed.sync_session, handed
        session = self.make(bind=self.connection, **options)
        remember_options(session)
        return session, session

    def aside(self, work: Callable[[], T]) -> T:
        return work()

    def call(self, handler: Handler, arguments: tuple[Any, ...], _claimed: Claimed) -> None:
        self.error = None
        try:
            self._call(handler, arguments)
        except BaseException as error:
            self.error = error
            raise

    def _call(self, handler: Handler, arguments: tuple[Any, ...]) -> None:
        result = handler.function(*arguments)
        if handler.is_async:
            dbapi: Any = self.connection.connection.dbapi_connection
            dbapi.run_async(lambda _driver: result)
        elif inspect.isawaitable(result):
            _close(result)
            raise TaskFailed("the handler returned something to be awaited; make it `async def`")


def _close(result: Any) -> None:
    if inspect.iscoroutine(result):
        result.close()


class _OldestFirst:
    """Stands in for the worker's Claimer, without its lottery."""

    options = SimpleNamespace(batch_size=1)

    def __init__(
        self,
        connection: Connection,
        tables: Tables,
        handlers: Mapping[str, Handler],
        faces: _Faces,
        now: Now,
    ) -> None:
        self.connection = connection
        self.handlers = handlers
        self.faces = faces
        self._next_in_line = next_in_line(tables.task, now)
        self._claim_by_id = tables.claim_by_id

    def statements(self) -> Iterator[tuple[Executable, dict[str, Any]]]:
        types = {"types": list(self.handlers)}
        row = self.connection.execute(self._next_in_line, types).first()
        if row is None:
            return
        handler = self.handlers[row.task_type]
        if handler.is_async and self.faces.async_connection is None:
            problem = f"{handler!r} is async: use `await drain_async(..)` with an AsyncSession"
            raise ConfigurationError(problem)
        self.faces.is_async = handler.is_async
        yield self._claim_by_id, {"task_id": row.task_id}

    def learn(self, rows: Sequence[RowMapping]) -> list[RowMapping]:
        return list(rows)


class _Notes(Settler):
    """Notes what ran and with what error, for whoever asked for it."""

    noted: tuple[Claimed, BaseException | None] | None = None

    def tell(
        self, claimed: Claimed, verdict: Verdict, error: BaseException | None, seconds: float
    ) -> None:
        self.noted = claimed, error
        super().tell(claimed, verdict, error, seconds)

    def _speaks_utf8(self) -> bool:
        driver: Any = self.connection.connection.driver_connection
        return not hasattr(driver, "info") or super()._speaks_utf8()  # asyncpg: nothing else


class _AnyClaiming(Claiming):
    """Works with every driver."""

    def _fetch(
        self, statement: Executable, parameters: Mapping[str, Any]
    ) -> Sequence[Mapping[Any, Any]]:
        return self.connection.execute(statement, parameters).mappings().all()


class _AnyGround(Ground):
    """Works with every driver, and asks the server for what asyncpg does not tell."""

    def __enter__(self) -> Self:
        super().__enter__()
        self._pgconn = None
        return self

    def _execute(self, statement: str) -> None:
        cursor = self.connection.connection.cursor()
        try:
            cursor.execute(statement)
        except psycopg.Error as error:
            self._info[TROUBLE] = error
            raise
        finally:
            cursor.close()

    def _let_go(self) -> None:
        self._execute(f"RELEASE SAVEPOINT {SAVEPOINT}")  # other savepoints lie below it

    def status(self) -> TransactionStatus:
        if self.connection.closed or self.connection.invalidated:
            return TransactionStatus.UNKNOWN
        driver: Any = self.connection.connection.driver_connection
        if hasattr(driver, "info"):
            return super().status()
        if driver.is_closed():
            return TransactionStatus.UNKNOWN
        return self._probe() if driver.is_in_transaction() else TransactionStatus.IDLE

    def _probe(self) -> TransactionStatus:
        try:
            self._execute("select 1")
        except Exception:  # noqa: BLE001 - all it can fail of is a transaction that failed before
            return TransactionStatus.INERROR
        return TransactionStatus.INTRANS


_WATCHED: WeakSet[Engine] = WeakSet()


def _remember_errors(engine: Engine) -> None:
    """Note the errors of the database, as on the worker's engine: a handler may swallow one."""
    if engine not in _WATCHED:
        _WATCHED.add(engine)
        watch_errors(engine)
