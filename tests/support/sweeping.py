"""A lane without its worker: claims run one by one, in the test's own thread."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import sessionmaker

from pgtask_sa import AsyncTaskSession, Task, TaskRegistry, TaskSession
from pgtask_sa.claim_orders import ClaimOptions
from pgtask_sa.engines import database_url, worker_async_engine, worker_engine
from pgtask_sa.events import Event, Events
from pgtask_sa.execution import Execution
from pgtask_sa.faces import AsyncFace, SyncFace
from pgtask_sa.settle import Tables
from pgtask_sa.turns import Claimer
from pgtask_sa.vital_signs import VitalSigns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Connection

KINDS = ("sync", "async")


class Sweeper:
    """Runs handlers of one kind, sync or async, on a database with a table ``mark (i int)``.

    Handlers are written once, as ``body(session, params, task)`` over a synchronous Session.
    """

    def __init__(
        self,
        kind: str,
        url: str,
        *,
        task_class: type[Any] = Task,
        batch_size: int = 1,
        session: type[Any] = TaskSession,
    ) -> None:
        self.kind = kind
        self.url = database_url(url)
        self.tasks = TaskRegistry(task_class=task_class)
        self.tables = Tables(task_class)
        self.batch_size = batch_size
        self.session_class = session
        self.events: list[Event] = []
        self.owed: list[Any] = []
        self.blameless: dict[int, int] = {}
        self.admin = create_engine(self.url, connect_args={"client_encoding": "utf8"})
        self.execute("create table if not exists mark (i int)")

    def close(self) -> None:
        self.admin.dispose()

    # -- set up ------------------------------------------------------------------------------

    def handler(self, task_type: str = "A", **options: Any) -> Callable[[Any], Any]:
        """Register ``body(session, params, task)`` in the way of this kind."""
        options.setdefault("backoff", 0)

        def register(body: Any) -> Any:
            def sync(session, params, task):
                return body(session, params, task)

            async def awaited(session, params, task):
                await session.run_sync(body, params, task)

            self.tasks.handler(task_type, **options)(sync if self.kind == "sync" else awaited)
            return body

        return register

    def enqueue(self, *params: dict[str, Any], task_type: str = "A", **options: Any) -> None:
        with TaskSession(self.admin, task_class=self.tasks.task_class) as session:
            for each in params or ({},):
                session.enqueue(task_type, each, **options)
            session.commit()

    # -- run ---------------------------------------------------------------------------------

    def sweep(self, times: int = 1) -> list[int]:
        """Claim so many times on one connection, then settle accounts; return the counts."""
        return self.run(lambda execution: [execution.sweep() for _ in range(times)])

    def drain(self) -> int:
        """Claim until nothing is left; return how many tasks were claimed."""
        return self.run(lambda execution: sum(iter(execution.sweep, 0)))

    def run(self, work: Callable[[Execution], Any]) -> Any:
        """Call ``work`` with an execution on a fresh connection."""
        return self._run_sync(work) if self.kind == "sync" else asyncio.run(self._run_async(work))

    def _run_sync(self, work: Callable[[Execution], Any]) -> Any:
        engine = worker_engine(self.url, 1)
        maker = sessionmaker(class_=self.session_class)
        try:
            with engine.connect() as connection:
                return self._work(work, connection, SyncFace(connection, maker, *_unwatched()))
        finally:
            engine.dispose()

    async def _run_async(self, work: Callable[[Execution], Any]) -> Any:
        engine = worker_async_engine(self.url, 1)
        maker = async_sessionmaker(class_=AsyncTaskSession, sync_session_class=self.session_class)
        try:
            async with engine.connect() as connection:
                face = AsyncFace(connection, maker, *_unwatched())
                return await connection.run_sync(lambda sync: self._work(work, sync, face))
        finally:
            await engine.dispose()

    def _work(self, work: Callable[[Execution], Any], connection: Connection, face: Any) -> Any:
        options = ClaimOptions(batch_size=self.batch_size)
        claimer = Claimer(self.tables.task, list(self.tasks), options)
        events = Events([self.events.append])
        execution = Execution(connection, face, claimer, self.tasks.handlers, self.tables, events)
        execution.arrears.owed, execution.arrears.blameless = self.owed, self.blameless
        result = work(execution)
        execution.pay()
        return result

    # -- look --------------------------------------------------------------------------------

    def execute(self, statement: str, **values: Any) -> None:
        with self.admin.begin() as connection:
            connection.execute(text(statement), values)

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        with self.admin.connect() as connection:
            return [tuple(row) for row in connection.execute(text(statement))]

    def marks(self) -> list[int]:
        """Return what handlers wrote, sorted."""
        return [i for (i,) in self.rows("select i from mark order by i")]

    def waiting(self) -> list[tuple[str, int]]:
        """Return type and attempts of the tasks that wait."""
        name = self.tables.task.fullname
        return self.rows(f"select task_type::text, attempts from {name} order by task_id")

    def dead(self) -> list[tuple[str, int, str]]:
        """Return type, attempts and reason of the dead tasks."""
        name = self.tables.dead.fullname
        return self.rows(f"select task_type::text, attempts, reason from {name} order by task_id")

    def last_error(self) -> str:
        """Return the error of the only task, waiting or dead."""
        names = (self.tables.task.fullname, self.tables.dead.fullname)
        found = [row for name in names for row in self.rows(f"select last_error from {name}")]
        assert len(found) == 1, found
        return found[0][0]

    def told(self, *names: str) -> list[str]:
        """Return the names of the events so far, or those among ``names``."""
        return [event.name for event in self.events if not names or event.name in names]


def mark(session: Any, i: int = 1) -> None:
    """Write something that must be there exactly if the task is done."""
    session.execute(text("insert into mark values (:i)"), {"i": i})


def sweepers(url: str, kind: str, **options: Any) -> Iterator[Sweeper]:
    """Yield a sweeper and close it; for fixtures."""
    sweeper = Sweeper(kind, url, **options)
    yield sweeper
    sweeper.close()


def _unwatched() -> Any:
    """Return a lane and a watchdog that set no deadlines."""
    place = VitalSigns().place()
    watchdog = SimpleNamespace(guard=lambda *_, **__: nullcontext(), see=lambda _lane: place)
    return SimpleNamespace(), watchdog
