"""Lanes: each runs one task at a time on a connection of its own.

A sync lane is a thread. An async lane is a task on the worker's event loop. Both run the same
`Execution`; a lane adds what surrounds it: sleep when there is nothing, patience when the database
is away, and the end.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from sqlalchemy import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

from pgtask_sa.admission import Admission
from pgtask_sa.arrears import Arrears
from pgtask_sa.aside import aside
from pgtask_sa.calls import Face
from pgtask_sa.claim_orders import ClaimOptions
from pgtask_sa.claiming import Claiming
from pgtask_sa.doorbell import Doorbell
from pgtask_sa.events import Events
from pgtask_sa.execution import Execution, Stopped
from pgtask_sa.faces import AsyncFace, SyncFace
from pgtask_sa.handlers import Handler
from pgtask_sa.leases import Keeper, LeasedRuns
from pgtask_sa.pipeline import resolve
from pgtask_sa.postponing import postpone
from pgtask_sa.presence import Presence
from pgtask_sa.roster import Roster
from pgtask_sa.scribe import Scribe
from pgtask_sa.settle import Claimed, Tables
from pgtask_sa.solitude import LOOK, Gate, Solitary
from pgtask_sa.trouble import Trouble
from pgtask_sa.turns import Claimer
from pgtask_sa.wakeup import DATABASE_ERRORS, Health
from pgtask_sa.watchdog import Watch, Watchdog


class Lane(Protocol):
    """What a lane shows to the rest of its crew."""

    kind: str
    trouble: Trouble
    execution: Execution | None
    watch: Watch | None
    entry: int | None
    abandoned: bool

    def __hash__(self) -> int:
        """Be one of a set."""

    def interrupt(self) -> None:
        """Stop the handler that runs, if there is a way to."""

    def note(self, batch: Sequence[Claimed]) -> None:
        """Note what is to run; if that fails, nothing of it may."""


@dataclass(frozen=True)
class Shared:
    """What all lanes of a worker have in common."""

    tables: Tables
    handlers: Mapping[str, Handler]
    claim: ClaimOptions
    roster: Roster
    bell: Doorbell
    health: Health
    events: Events
    watchdog: Watchdog
    make_session: Callable[..., Session]
    make_async_session: Callable[..., AsyncSession]
    stopping: threading.Event
    presence: Presence
    keeper: Keeper
    inspect: Callable[[Connection], None]
    gate: Gate = field(default_factory=Gate)
    blameless: dict[int, int] = field(default_factory=dict)

    def execution(self, lane: Lane, connection: Connection, face: Face) -> Execution:
        """Set a lane's fresh connection up to run claims; call it where SQL may be run."""
        face.aside(partial(self.give_back, lane))
        self.inspect(connection)
        self.roster.refresh(connection)
        types = self.roster.types[lane.kind]
        claimer = Claimer(self.tables.task, types, self.claim)
        claimer.types = types  # not a copy: it follows the labels of the database
        execution = Execution(connection, face, claimer, self.handlers, self.tables, self.events)
        execution.on_full = partial(self.bell.chain, lane.kind)
        execution.on_commit = lane.trouble.over
        execution.arrears = self._arrears(lane)
        execution.admission = self._admission(lane, execution, face)
        self._note_ahead(lane, execution.claiming)
        lane.execution = execution
        return execution

    def _note_ahead(self, lane: Lane, claiming: Claiming) -> None:
        """Let a lane note by itself what it is to run next."""
        assert lane.entry is not None  # noqa: S101 - it has been enlisted
        claiming.leased = [name for name, each in self.handlers.items() if each.lease is not None]
        once = (name for name, each in self.handlers.items() if each.policy.max_attempts == 1)
        claiming.only_once = frozenset(once)
        claiming.own_row = partial(self.presence.own_row, lane.entry)
        claiming.moved = partial(self.presence.moved, lane.entry)

    def _arrears(self, lane: Lane) -> Arrears:
        """Return what the lane owes, also from its connection before."""
        if lane.execution is not None:
            return lane.execution.arrears
        return Arrears(self.events, self.blameless)

    def _admission(self, lane: Lane, execution: Execution, face: Face) -> Admission:
        if lane.entry is None:
            lane.entry = face.aside(self.presence.enlist)
        settler = execution.settler
        return Admission(self.presence, lane.entry, face, settler, self.handlers, note=lane.note)

    def sweep_alone(self, lane: Lane, execution: Execution, demand: Solitary) -> None:
        """Run what must run alone, or put it back for later where others do not come to their end.

        Call it where SQL may be run, when the others had their time to end.
        """
        if demand.strictly and not self.gate.keep(lane):
            postpone(execution, demand.task_ids, self.gate.give_up())
        else:
            execution.sweep_alone(demand.task_ids)

    def give_back(self, lane: Lane) -> None:
        """End the leases that a lane has not begun with: it was cut off, or its connection was."""
        if lane.execution is not None:
            self.keeper.release(lane.execution.unrun)

    def rest(self, lane: Lane) -> None:
        """Note that a lane runs nothing now."""
        if lane.entry is not None:
            self.presence.rest(lane.entry)


@contextmanager
def _never_again(connection: Connection | None) -> Iterator[None]:
    """Give no connection back to the pool that met an error: the next one may fare better.

    After a failover, say, or when a setting of the database was changed, or when a handler left a
    setting of the session behind with which no claim works.
    """
    try:
        yield
    except BaseException:
        if connection is not None and not (connection.closed or connection.invalidated):
            connection.detach()
        raise


class SyncLane(threading.Thread):
    """A thread that claims and runs sync tasks until the worker stops."""

    kind = "sync"

    def __init__(self, shared: Shared, engine: Engine, number: int) -> None:
        super().__init__(name=f"pgtask-lane-{number}", daemon=True)
        self.shared = shared
        self.engine = engine
        self.number = number
        self.trouble = Trouble(shared.tables.task, shared.health, shared.events)
        self.execution: Execution | None = None
        self.watch: Watch | None = None
        self.entry: int | None = None
        self.abandoned = False
        self._woken = threading.Event()

    def run(self) -> None:
        """Claim, run, sleep, until stopped; an error never ends the lane."""
        while not self._over():
            self.trouble.connecting()
            try:
                with self.engine.connect() as connection, _never_again(connection):
                    self._work(connection)
            except Stopped:
                break
            except BaseException as error:  # noqa: BLE001 - a lane that dies takes capacity along
                if not self._over():
                    self.shared.stopping.wait(self.trouble.seconds(error))
        with suppress(*DATABASE_ERRORS):
            self.shared.give_back(self)
        if not self.abandoned:
            self.shared.bell.leave()

    def _over(self) -> bool:
        return self.shared.stopping.is_set() or self.abandoned

    def _work(self, connection: Connection) -> None:
        face = SyncFace(connection, self.shared.make_session, self, self.shared.watchdog)
        execution = self.shared.execution(self, connection, face)
        leased = LeasedRuns(execution, self.shared.keeper)
        while not self._over():
            if self._sweep(execution):
                self.shared.bell.found(self.kind)
                leased.run()
            else:
                self._sleep()
        execution.pay()
        self.shared.rest(self)  # before what was claimed ahead is free for others

    def _sweep(self, execution: Execution) -> int:
        gate = self.shared.gate
        while not gate.enter(self):
            if self._over():
                return 0
            self.shared.rest(self)
            execution.pause()
            time.sleep(LOOK)
        try:
            return execution.sweep()
        except Solitary as demand:
            if gate.close(self, gate.patience(strictly=demand.strictly)):
                self._run_alone(execution, demand)
            return 1  # there is work
        finally:
            gate.leave(self)

    def _run_alone(self, execution: Execution, demand: Solitary) -> None:
        try:
            while self.shared.gate.must_wait() and not self._over():
                time.sleep(LOOK)
            if not self._over():
                self.shared.sweep_alone(self, execution, demand)
        finally:
            self.shared.gate.open(self)

    def _sleep(self) -> None:
        self._woken.clear()
        self.shared.rest(self)
        if self.shared.bell.sleep(self.kind, self._woken.set):
            self._woken.wait()

    def interrupt(self) -> None:
        """Do nothing: there is no way into a thread."""

    def note(self, batch: Sequence[Claimed]) -> None:
        """Note what is to run, and wait for the answer."""
        assert self.entry is not None  # noqa: S101 - it was made before the first claim
        self.shared.presence.note(self.entry, batch)

    def cut(self) -> None:
        """Keep what runs from committing."""
        if self.execution is not None:
            self.execution.cut = True


class AsyncLane:
    """A coroutine that claims and runs async tasks until the worker stops."""

    kind = "async"

    def __init__(self, shared: Shared, engine: AsyncEngine, scribe: Scribe, number: int) -> None:
        self.shared = shared
        self.scribe = scribe
        self.engine = engine
        self.name = f"pgtask-async-lane-{number}"
        self.trouble = Trouble(shared.tables.task, shared.health, shared.events)
        self.execution: Execution | None = None
        self.watch: Watch | None = None
        self.entry: int | None = None
        self.abandoned = False
        self.task: asyncio.Task[None] | None = None
        self._face: AsyncFace | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> asyncio.Task[None]:
        """Start the lane on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self.task = asyncio.create_task(self.run(), name=self.name)
        return self.task

    async def run(self) -> None:
        """Claim, run, sleep, until stopped; an error never ends the lane."""
        while not self._over():
            self.trouble.connecting()
            try:
                async with self.engine.connect() as connection:
                    with _never_again(connection.sync_connection):
                        await self._work(connection)
            except Stopped:
                break
            except asyncio.CancelledError:
                continue  # by `cut`, and then it is over; or by a handler that cancels its own task
            except BaseException as error:  # noqa: BLE001
                if not self._over():
                    await asyncio.sleep(self.trouble.seconds(error))
        if self.execution is not None and self.execution.unrun:
            await self._give_back()
        if not self.abandoned:
            self.shared.bell.leave()

    def _over(self) -> bool:
        return self.shared.stopping.is_set() or self.abandoned

    async def _work(self, connection: AsyncConnection) -> None:
        shared = self.shared
        face = self._face = AsyncFace(connection, shared.make_async_session, self, shared.watchdog)
        execution = await connection.run_sync(
            lambda sync_connection: self.shared.execution(self, sync_connection, face)
        )
        leased = LeasedRuns(execution, self.shared.keeper)
        while not self._over():
            if await self._sweep(connection, execution):
                self.shared.bell.found(self.kind)
                if execution.granted:
                    await connection.run_sync(lambda _connection: leased.run())
            else:
                await self._sleep()
        await connection.run_sync(lambda _connection: execution.pay())
        await aside(partial(self.shared.rest, self))

    async def _sweep(self, connection: AsyncConnection, execution: Execution) -> int:
        gate = self.shared.gate
        while not gate.enter(self):
            if self._over():
                return 0
            await aside(partial(self.shared.rest, self))
            await connection.run_sync(lambda _connection: execution.pause())
            await asyncio.sleep(LOOK)
        try:
            return await connection.run_sync(lambda _connection: execution.sweep())
        except Solitary as demand:
            if gate.close(self, gate.patience(strictly=demand.strictly)):
                await self._run_alone(connection, execution, demand)
            return 1  # there is work
        finally:
            gate.leave(self)

    async def _run_alone(
        self, connection: AsyncConnection, execution: Execution, demand: Solitary
    ) -> None:
        try:
            while self.shared.gate.must_wait() and not self._over():  # noqa: ASYNC110
                await asyncio.sleep(LOOK)
            if not self._over():
                await connection.run_sync(
                    lambda _connection: self.shared.sweep_alone(self, execution, demand)
                )
        finally:
            self.shared.gate.open(self)

    async def _sleep(self) -> None:
        if self.entry is not None and self.shared.presence.is_flying(self.entry):
            await self._rest(self.entry)
        loop = asyncio.get_running_loop()
        woken = loop.create_future()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop has ended, and the lane with it
                loop.call_soon_threadsafe(resolve, woken)

        if self.shared.bell.sleep(self.kind, wake):
            await woken

    async def _give_back(self) -> None:
        giving = asyncio.ensure_future(aside(partial(self.shared.give_back, self)))
        while not giving.done():
            with suppress(asyncio.CancelledError):  # `cut` may come now; there is nothing to cut
                await asyncio.wait([giving])
        with suppress(*DATABASE_ERRORS):
            giving.result()

    async def _rest(self, entry: int) -> None:
        if not await self.scribe.note(entry, []):
            await aside(partial(self.shared.rest, self))

    def note(self, batch: Sequence[Claimed]) -> None:
        """Note what is to run; the loop goes on meanwhile."""
        assert self.entry is not None  # noqa: S101 - as in a sync lane
        assert self._face is not None  # noqa: S101
        presence = self.shared.presence
        if presence.is_noting and not self._face.wait(self.scribe.note(self.entry, batch)):
            self._face.aside(partial(presence.note, self.entry, batch))

    def interrupt(self) -> None:
        """Cancel the coroutine that runs; from any thread."""
        if self._face is not None and self._loop is not None:
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._face.interrupt)

    def cut(self) -> None:
        """Stop what runs: it can no longer commit. Call it on the event loop."""
        if self.execution is not None:
            self.execution.cut = True
        if self.task is not None:
            self.task.cancel()
