"""Lanes: each runs one task at a time on a connection of its own.

A sync lane is a thread. An async lane is a task on the worker's event loop. Both run the same
`Execution`; a lane adds what surrounds it: sleep when there is nothing, patience when the database
is away, and the end.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from pgtask_sa.claim import Claimer
from pgtask_sa.doorbell import Doorbell
from pgtask_sa.errors import TaskFailed
from pgtask_sa.events import Events
from pgtask_sa.execution import Execution, Stopped
from pgtask_sa.failures import sqlstate
from pgtask_sa.handlers import Handler
from pgtask_sa.settle import Claimed, Tables
from pgtask_sa.wakeup import DATABASE_ERRORS, Health
from pgtask_sa.watchdog import Watchdog

PAUSE = (0.05, 1.0)  # seconds between attempts to reach a database that is away: first, longest
RACES = ("40001", "40P01")  # at the claim itself: try again at once, there is nothing to tell


@dataclass(frozen=True)
class Shared:
    """What all lanes of a worker have in common."""

    tables: Tables
    handlers: Mapping[str, Handler]
    claimers: Mapping[str, Callable[[], Claimer]]
    bell: Doorbell
    health: Health
    events: Events
    watchdog: Watchdog
    make_session: Callable[..., Session]
    make_async_session: Callable[..., AsyncSession]
    stopping: threading.Event

    def execution(self, kind: str, connection: Connection, face: Any) -> Execution:
        """Set a connection up to run claims of a kind."""
        execution = Execution(
            connection, face, self.claimers[kind](), self.handlers, self.tables, self.events
        )
        execution.on_full = partial(self.bell.chain, kind)
        return execution


class Trouble:
    """Decides how long a lane waits after an error, and whether there is something to tell."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.pause = PAUSE[0]

    def over(self) -> None:
        """Note that a sweep went well."""
        self.pause = PAUSE[0]
        self.shared.health.worked()

    def seconds(self, error: BaseException) -> float:
        """Note an error and return how long to wait."""
        if sqlstate(error) in RACES:
            return random.uniform(0.005, 0.05)  # noqa: S311
        if isinstance(error, DATABASE_ERRORS):
            self.shared.health.failed(error)
        else:
            self.shared.events.emit(
                "worker.error", f"unexpected: {error!r}", level=logging.CRITICAL
            )
        self.pause = min(self.pause * 2, PAUSE[1])
        return self.pause * random.uniform(0.5, 1.0)  # noqa: S311


class SyncFace:
    """Plain functions, called in the lane's own thread."""

    def __init__(
        self, connection: Connection, make: Callable[..., Session], lane: SyncLane
    ) -> None:
        self.connection = connection
        self.make = make
        self.lane = lane

    def open(self) -> tuple[Session, Any]:
        """Open a Session in which the handler may commit without ending the claim."""
        session = self.make(bind=self.connection, join_transaction_mode="create_savepoint")
        return session, session

    def call(self, handler: Handler, arguments: tuple[Any, ...], claimed: Claimed) -> None:
        """Call the function; a coroutine that it returns would never run, so that is a failure."""
        with self.lane.deadline(handler, claimed):
            result = handler.function(*arguments)
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            raise TaskFailed("the handler returned something to be awaited; make it `async def`")


class AsyncFace:
    """Coroutine functions, awaited on the event loop from within the synchronous code."""

    def __init__(self, connection: AsyncConnection, make: Callable[..., AsyncSession]) -> None:
        self.connection = connection
        self.make = make

    def open(self) -> tuple[Session, Any]:
        """Open an AsyncSession, and the Session inside it."""
        session = self.make(bind=self.connection, join_transaction_mode="create_savepoint")
        return session.sync_session, session

    def call(self, handler: Handler, arguments: tuple[Any, ...], _claimed: Claimed) -> None:
        """Await the coroutine; within its time, if there is a limit."""
        dbapi: Any = self.connection.sync_connection.connection.dbapi_connection  # type: ignore[union-attr]
        dbapi.run_async(lambda _driver: self._await(handler, arguments))

    async def _await(self, handler: Handler, arguments: tuple[Any, ...]) -> None:
        coroutine = handler.function(*arguments)
        if handler.timeout is None:
            await coroutine
            return
        try:
            await asyncio.wait_for(coroutine, handler.timeout)
        except asyncio.TimeoutError as error:
            raise TaskFailed(f"timed out after {handler.timeout:g} s") from error


class SyncLane(threading.Thread):
    """A thread that claims and runs sync tasks until the worker stops."""

    kind = "sync"

    def __init__(self, shared: Shared, engine: Engine, number: int) -> None:
        super().__init__(name=f"pgtask-lane-{number}", daemon=True)
        self.shared = shared
        self.engine = engine
        self.number = number
        self.trouble = Trouble(shared)
        self.execution: Execution | None = None
        self.abandoned = False
        self._woken = threading.Event()

    def run(self) -> None:
        """Claim, run, sleep, until stopped; an error never ends the lane."""
        while not self._over():
            try:
                with self.engine.connect() as connection:
                    self._work(connection)
            except Stopped:
                break
            except BaseException as error:  # noqa: BLE001 - a lane that dies takes capacity along
                if not self._over():
                    self.shared.stopping.wait(self.trouble.seconds(error))
        if not self.abandoned:
            self.shared.bell.leave()

    def _over(self) -> bool:
        return self.shared.stopping.is_set() or self.abandoned

    def _work(self, connection: Connection) -> None:
        face = SyncFace(connection, self.shared.make_session, self)
        self.execution = self.shared.execution(self.kind, connection, face)
        while not self._over():
            claimed = self.execution.sweep()
            self.trouble.over()
            if not claimed:
                self._sleep()

    def _sleep(self) -> None:
        self._woken.clear()
        if self.shared.bell.sleep(self.kind, self._woken.set):
            self._woken.wait()

    def deadline(self, handler: Handler, claimed: Claimed) -> Any:
        """Guard a call with the handler's time limit."""
        return self.shared.watchdog.guard(handler.timeout, self, claimed)

    def cut(self) -> None:
        """Stop what runs: it can no longer commit, and its query on the server is cancelled."""
        execution = self.execution
        if execution is None:
            return
        execution.cut = True
        try:
            driver: Any = execution.connection.connection.driver_connection
            driver.cancel_safe(timeout=1.0)
        except Exception as error:  # noqa: BLE001 - the connection may be gone already
            self.shared.events.emit("lane.cut", repr(error), level=logging.DEBUG)


class AsyncLane:
    """A coroutine that claims and runs async tasks until the worker stops."""

    kind = "async"

    def __init__(self, shared: Shared, engine: AsyncEngine, number: int) -> None:
        self.shared = shared
        self.engine = engine
        self.number = number
        self.trouble = Trouble(shared)
        self.execution: Execution | None = None
        self.task: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """Start the lane on the running event loop."""
        self.task = asyncio.create_task(self.run(), name=f"pgtask-async-lane-{self.number}")
        return self.task

    async def run(self) -> None:
        """Claim, run, sleep, until stopped; an error never ends the lane."""
        while not self._over():
            try:
                async with self.engine.connect() as connection:
                    await self._work(connection)
            except (Stopped, asyncio.CancelledError):
                break
            except BaseException as error:  # noqa: BLE001
                if not self._over():
                    await asyncio.sleep(self.trouble.seconds(error))
        self.shared.bell.leave()

    def _over(self) -> bool:
        return self.shared.stopping.is_set()

    async def _work(self, connection: AsyncConnection) -> None:
        face = AsyncFace(connection, self.shared.make_async_session)
        sync_connection = connection.sync_connection
        assert sync_connection is not None  # noqa: S101 - it was just opened
        execution = self.execution = self.shared.execution(self.kind, sync_connection, face)
        while not self._over():
            claimed = await connection.run_sync(lambda _connection: execution.sweep())
            self.trouble.over()
            if not claimed:
                await self._sleep()

    async def _sleep(self) -> None:
        loop = asyncio.get_running_loop()
        woken = loop.create_future()

        def wake() -> None:
            loop.call_soon_threadsafe(_resolve, woken)

        if self.shared.bell.sleep(self.kind, wake):
            await woken

    def cut(self) -> None:
        """Stop what runs: it can no longer commit. Call it on the event loop."""
        if self.execution is not None:
            self.execution.cut = True
        if self.task is not None:
            self.task.cancel()


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
