"""The crew of one worker process: its lanes, listener and watchdog, and how they end together."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import URL, Connection
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from pgtask_sa.claim import ClaimOptions
from pgtask_sa.doorbell import Doorbell
from pgtask_sa.engines import worker_async_engine, worker_engine
from pgtask_sa.errors import ConfigurationError
from pgtask_sa.events import Events
from pgtask_sa.handlers import Handler
from pgtask_sa.lanes import AsyncLane, Lane, Shared, SyncLane
from pgtask_sa.roster import Roster
from pgtask_sa.settle import Settler, Tables
from pgtask_sa.wakeup import DATABASE_ERRORS, Health, Listener, one_line
from pgtask_sa.watchdog import Watchdog

# Kept open besides those of the lanes, at most: the one that listens, and of those that enforce
# deadlines; more are opened and closed again.
SIDE_CONNECTIONS = 3


@dataclass(frozen=True)
class Options:
    """How a worker works; see `pgtask_sa.Worker` for each value."""

    concurrency: int = 4
    processes: int = 1
    claim: ClaimOptions = field(default_factory=ClaimOptions)
    drain: bool = False
    grace: float = 30.0
    idle_interval: float = 5.0
    report_interval: float = 60.0

    def __post_init__(self) -> None:
        for name, most in (("concurrency", 1000), ("processes", 1000)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigurationError(f"{name} must be an integer from 1 to {most}: {value!r}")
        if self.idle_interval <= 0 or self.report_interval <= 0:
            raise ConfigurationError("idle_interval and report_interval must be over 0 seconds")


@dataclass(frozen=True)
class Plan:
    """All that a crew needs to know."""

    url: URL
    options: Options
    tables: Tables
    handlers: Mapping[str, Handler]
    events: Events
    session: Callable[..., Session]
    async_session: Callable[..., AsyncSession]


class Crew:
    """The threads of one worker process."""

    def __init__(self, plan: Plan, stopping: threading.Event, stop: Callable[[], None]) -> None:
        o = plan.options
        self.plan = plan
        self.stopping = stopping
        self.stop = stop
        self.engine = worker_engine(plan.url, o.concurrency + SIDE_CONNECTIONS)
        self.roster = Roster(plan.tables.task, plan.handlers, plan.events)
        self.counts = {kind: o.concurrency for kind, types in self.roster.types.items() if types}
        self.bell = Doorbell(self.counts)
        self.health = Health(plan.events)
        self.watchdog = Watchdog(self.engine, self._settler)
        self.watchdog.on_stuck = self._replace
        self.shared = Shared(
            tables=plan.tables,
            handlers=plan.handlers,
            claim=o.claim,
            roster=self.roster,
            bell=self.bell,
            health=self.health,
            events=plan.events,
            watchdog=self.watchdog,
            make_session=plan.session,
            make_async_session=plan.async_session,
            stopping=stopping,
        )
        self.listener = Listener(
            self.engine,
            self.roster,
            self.bell,
            self.health,
            idle_interval=o.idle_interval,
            report_interval=o.report_interval,
        )
        self.lanes: list[SyncLane] = []
        self.loop = LoopThread(self.shared, plan.url, self.counts.get("async", 0))
        self.loop.on_death = self._loop_died
        self.failed = False

    def _settler(self, connection: Connection) -> Settler:
        return Settler(connection, self.plan.tables, self.plan.handlers, self.plan.events)

    def start(self) -> None:
        """Start everything; lanes connect by themselves, and wait for a database that is away."""
        if self.plan.options.drain:
            self.bell.on_quiet = self._look_again
        else:
            self.listener.start()
        self.watchdog.start()
        for _ in range(self.counts.get("sync", 0)):
            self._add_lane()
        if self.loop.count:
            self.loop.start()

    def _look_again(self) -> None:
        """End a drain if a whole round found nothing: a task may bring work for the other kind."""
        if self.bell.stirred:
            self.bell.stirred = False
            self.bell.ring()
        else:
            self.stop()

    def _add_lane(self) -> None:
        lane = SyncLane(self.shared, self.engine, len(self.lanes) + 1)
        self.lanes.append(lane)
        lane.start()

    def _replace(self, lane: SyncLane | AsyncLane) -> None:
        """Write off a lane whose handler does not come back, and start another if that can help."""
        if self.stopping.is_set():
            return
        threaded = isinstance(lane, SyncLane)
        what = "another takes its place" if threaded else "it blocks all async handlers"
        self.plan.events.emit(
            "lane.stuck",
            f"{lane.name} is stuck in a handler long after its deadline; {what}",
            level=logging.ERROR,
        )
        if not isinstance(lane, SyncLane):
            return
        lane.abandoned = True
        self._add_lane()

    def _loop_died(self, error: BaseException) -> None:
        """Stop the worker: a process without its async lanes looks alive, and is not."""
        self.failed = True
        self.plan.events.emit(
            "loop.died",
            f"the event loop of the async handlers has ended: {error!r}; the worker stops",
            level=logging.CRITICAL,
        )
        self.stopping.set()
        self.loop.give_up()
        self._fence()  # nobody can roll back any more on what is still open
        self.stop()

    def close(self) -> None:
        """Stop claiming: wake all who sleep, so that they can leave."""
        self.bell.close()
        if self.listener.is_alive():
            self.listener.stop()

    def busy(self) -> int:
        """Count the lanes that have not ended yet."""
        alive = sum(lane.is_alive() and not lane.abandoned for lane in self.lanes)
        return alive + self.loop.busy()

    def running(self) -> int:
        """Count the tasks that run."""
        executions = [lane.execution for lane in self._all_lanes()]
        return sum(e is not None and e.running is not None for e in executions)

    def _all_lanes(self) -> list[Lane]:
        return [*(lane for lane in self.lanes if lane.is_alive()), *self.loop.lanes]

    def wait(self, seconds: float) -> None:
        """Wait a moment for lanes to end."""
        for lane in self.lanes:
            if lane.is_alive() and not lane.abandoned:
                lane.join(seconds)
                return
        self.loop.join(seconds)

    def cut(self) -> None:
        """Cut off what still runs; what does not react in a moment is left behind as a daemon.

        A coroutine is cancelled. A thread cannot be, so its server process is ended: its row is
        free at once, also when the program around this worker goes on.
        """
        for lane in self.lanes:
            lane.cut()
        self.loop.cut()
        self._wait_for(lambda: not self.loop.busy(), 0.3)
        # in a thread: the database may be away, and that must not delay the end
        threading.Thread(target=self._fence, name="pgtask-fence", daemon=True).start()
        self._wait_for(lambda: not self.busy(), 1.0)

    def _wait_for(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            self.wait(0.02)

    def _fence(self) -> None:
        """End the server processes of all lanes that still run something."""
        executions = [lane.execution for lane in self._all_lanes()]
        try:
            with self.engine.connect() as connection:
                for execution in executions:
                    if execution is not None and execution.running is not None:
                        driver: Any = execution.connection.connection.driver_connection
                        pid = driver.info.backend_pid
                        connection.exec_driver_sql("select pg_terminate_backend(%s)", (pid,))
        except Exception as error:  # noqa: BLE001 - the database is away; then the rows are free
            self.plan.events.emit("lane.cut", repr(error), level=logging.DEBUG)

    def end(self) -> None:
        """Close what is left open."""
        self.watchdog.stop()
        if self.listener.is_alive():
            self.listener.join(0.5)  # not for long: its connection may be one that hangs
        if not self.busy():
            if self.plan.options.drain:
                self._report()
            self.engine.dispose()

    def _report(self) -> None:
        """Tell at the end of a drain what was left for want of a handler."""
        try:
            with self.engine.connect() as connection:
                self.roster.report(connection)
        except DATABASE_ERRORS as error:
            self.plan.events.emit("drain.report", one_line(error), level=logging.DEBUG)


class LoopThread(threading.Thread):
    """The thread of the event loop, with the async lanes on it."""

    def __init__(self, shared: Shared, url: URL, count: int) -> None:
        super().__init__(name="pgtask-loop", daemon=True)
        self.shared = shared
        self.url = url
        self.count = count
        self.lanes: list[AsyncLane] = []
        self.loop: asyncio.AbstractEventLoop | None = None
        self.on_death: Callable[[BaseException], object] = lambda _error: None
        self._running = count

    def run(self) -> None:
        """Run all lanes to their end."""
        # psycopg cannot work with the loop that is the default on Windows
        loop = asyncio.SelectorEventLoop() if sys.platform == "win32" else asyncio.new_event_loop()
        try:
            self._run_to_end(loop)
        except BaseException as error:  # noqa: BLE001 - whatever it is, somebody must hear of it
            self.on_death(error)
        finally:
            loop.close()

    def _run_to_end(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the loop on when a handler stops it.

        asyncio lets SystemExit and KeyboardInterrupt of any task out of the loop, after it has
        handed them to whoever awaits that task. So the handler fails as with any other error, if
        only the loop goes on.
        """
        main = loop.create_task(self._main())
        while not (main.done() or loop.is_closed()):
            try:
                loop.run_until_complete(main)
            except BaseException as error:  # noqa: BLE001
                if not main.done():
                    self._tell(error)
        main.result()

    def _tell(self, error: BaseException) -> None:
        self.shared.events.emit(
            "loop.interrupted",
            f"something in an async handler stopped the event loop, which goes on: {error!r}",
            level=logging.ERROR,
        )

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        engine = worker_async_engine(self.url, self.count)
        self.lanes = [AsyncLane(self.shared, engine, n + 1) for n in range(self.count)]
        running = [lane.start() for lane in self.lanes]
        for task in running:
            await asyncio.wait([task])
            self._running -= 1
        await engine.dispose()

    def give_up(self) -> None:
        """Let the lanes end on a loop that nobody runs any more; call it in the loop's thread."""
        left = [lane.task for lane in self.lanes if lane.task is not None and not lane.task.done()]
        if not left or self.loop is None or self.loop.is_closed():
            return
        for lane in self.lanes:
            lane.cut()
        with suppress(BaseException):
            self.loop.run_until_complete(asyncio.wait(left, timeout=1.0))

    def busy(self) -> int:
        """Count the lanes that have not ended yet."""
        return self._running if self.is_alive() else 0

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread, if it was ever started."""
        if self.ident is not None:
            super().join(timeout)

    def cut(self) -> None:
        """Cut off all lanes."""
        if self.loop is not None and self.is_alive():
            with suppress(RuntimeError):  # it has ended this very moment
                for lane in self.lanes:
                    self.loop.call_soon_threadsafe(lane.cut)
