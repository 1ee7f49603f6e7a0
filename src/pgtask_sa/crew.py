"""The crew of one worker process: its lanes, listener and watchdog, and how they end together."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from sqlalchemy import Connection

from pgtask_sa.admission import Lease
from pgtask_sa.claim import BACKEND_PID, BEGUN_AT
from pgtask_sa.doctor import find_dangers
from pgtask_sa.doorbell import Doorbell
from pgtask_sa.enforcement import Enforcer
from pgtask_sa.engines import worker_engine
from pgtask_sa.execution import Execution, Stopped
from pgtask_sa.failures import headline
from pgtask_sa.lanes import AsyncLane, Lane, Shared, SyncLane
from pgtask_sa.lease_statements import release_lease
from pgtask_sa.leases import Keeper
from pgtask_sa.loops import LoopThread
from pgtask_sa.plan import Plan, transaction_limit
from pgtask_sa.presence import Presence
from pgtask_sa.roster import Roster
from pgtask_sa.settle import Claimed, Settler
from pgtask_sa.statements import end_transaction
from pgtask_sa.wakeup import DATABASE_ERRORS, Health, Listener, one_line
from pgtask_sa.watchdog import Watchdog

# Kept open besides those of the lanes, at most: the one that listens, and of those that enforce
# deadlines; more are opened and closed again.
SIDE_CONNECTIONS = 3
FENCE_PAUSES = (0.0, 0.1, 0.5)  # seconds before each try


def _is_ours() -> bool:
    """Say whether this process serves the worker, and the garbage collector is as it was."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    return in_main_thread and gc.isenabled() and not gc.get_freeze_count()


def _nothing() -> None:
    pass


class Crew:
    """The threads of one worker process."""

    def __init__(self, plan: Plan, stopping: threading.Event, stop: Callable[[], None]) -> None:
        o = plan.options
        self.plan = plan
        self.stopping = stopping
        self.stop = stop
        self.limit = transaction_limit(plan.handlers, o.claim.batch_size)
        size, shown = o.concurrency + SIDE_CONNECTIONS, plan.events.shows_values
        self.engine = worker_engine(plan.url, size, self.limit, show_values=shown)
        self.direct_engine = self.engine
        if plan.direct_url is not None:
            self.direct_engine = worker_engine(plan.direct_url, SIDE_CONNECTIONS)
        self.roster = Roster(plan.tables.task, plan.handlers, plan.events)
        self.counts = {kind: o.concurrency for kind, types in self.roster.types.items() if types}
        self.bell = Doorbell(self.counts)
        self.health = Health(plan.events)
        self.presence = Presence(self.direct_engine, plan.tables.task, plan.events)
        # each renewal commits by itself: a worker that stands still must not keep the row locked
        renewing = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        self.keeper = Keeper(renewing, plan.tables, self.presence, plan.events)
        self.keeper.on_lost = self._lease_lost
        self.watchdog = Watchdog(Enforcer(self.engine, self._settler))
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
            presence=self.presence,
            keeper=self.keeper,
            inspect=self._inspect,
        )
        self.listener = Listener(
            self.direct_engine,
            self.roster,
            self.bell,
            self.health,
            idle_interval=o.idle_interval,
            report_interval=o.report_interval,
        )
        self.listener.on_cancel = self.cancel
        self.listener.count_others = lambda: self.presence.others
        self.lanes: list[SyncLane] = []
        self.loop = self._new_loop()
        self.failed = False
        self._inspected = False
        self.stuck = False  # in a handler: this process should be replaced
        self.on_leaving: Callable[[], None] = lambda: None  # and is about to end for it
        self._freezes = False

    def _settler(self, connection: Connection) -> Settler:
        return Settler(connection, self.plan.tables, self.plan.handlers, self.plan.events)

    def start(self) -> None:
        """Start everything; lanes connect by themselves, and wait for a database that is away."""
        self._freezes = _is_ours()
        self._freeze()
        if self.plan.options.drain:
            self.bell.on_quiet = self._look_again
        else:
            self.bell.on_quiet = self._freeze_again
            self.listener.start()
        self.watchdog.start()
        self.keeper.start()
        for _ in range(self.counts.get("sync", 0)):
            self._add_lane()
        if self.loop.count:
            self.loop.start()

    def _inspect(self, connection: Connection) -> None:
        """Let no lane begin where tasks would be lost; the first that connects looks for all."""
        if self._inspected:
            return
        with connection.begin():
            found = find_dangers(connection, self.plan.tables, self.plan.handlers)
        for each in found:
            if each.name == "schema":  # somebody may be about to migrate
                raise OSError(f"{each.message}; {each.remedy}")
        self._inspected = True
        if found:
            self._refuse([f"{each.message}; {each.remedy}" for each in found])

    def _refuse(self, dangers: Sequence[str]) -> None:
        is_told, self.failed = self.failed, True  # by another lane, which looked at the same time
        for danger in () if is_told else dangers:
            self.plan.events.emit("worker.refused", danger, level=logging.CRITICAL)
        self.stopping.set()
        self.stop()
        raise Stopped

    def _freeze(self) -> None:
        """Let the garbage collector not look through all that stays: some 50 ms each time.

        As it happens while a task is allocated, that task would be late by so much.
        """
        if self._freezes:
            gc.collect()
            gc.freeze()

    def _freeze_again(self) -> None:
        """Do so once more when all lanes have made what they need, and found nothing to do."""
        self.bell.on_quiet = _nothing
        self._freeze()

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

    def _replace(self, lane: SyncLane | AsyncLane, claimed: Claimed, why: str) -> None:
        """Write off a lane whose handler does not come back, and see to it that work goes on."""
        if lane.abandoned or self.stopping.is_set():  # that waits for no such lane; see `busy`
            return
        self.plan.events.emit(
            "lane.stuck",
            f"{lane.name} is stuck in the handler of {claimed}, which {why}; {self._remedy(lane)}",
            level=logging.ERROR,
            task_id=claimed.task_id,
            task_type=claimed.task_type,
        )
        self._abandon(lane)
        if self.plan.options.supervised:
            self.stuck = True
            self.on_leaving()
            self.stop()
        elif isinstance(lane, SyncLane):
            self._add_lane()
        else:
            self._replace_loop()

    def _remedy(self, lane: SyncLane | AsyncLane) -> str:
        if self.plan.options.supervised:
            return "another process takes the place of this one"
        if isinstance(lane, SyncLane):
            return "another takes its place"
        return "another event loop takes the place of the one that it blocks"

    def _abandon(self, lane: SyncLane | AsyncLane) -> None:
        lanes = [lane] if isinstance(lane, SyncLane) else self.loop.lanes
        for each in lanes:
            each.abandoned = True
            self.shared.gate.leave(each)
            with suppress(*DATABASE_ERRORS):
                self.shared.rest(each)
        if isinstance(lane, AsyncLane):
            self.loop.abandon()
            self._fence(self.loop.lanes)

    def _replace_loop(self) -> None:
        """Start another event loop; what ran on the old one was cut off, and runs again."""
        self.bell.forget("async")
        self.loop = self._new_loop()
        self.loop.start()

    def _new_loop(self) -> LoopThread:
        loop = LoopThread(self.shared, self.plan.url, self.counts.get("async", 0))
        loop.limit = self.limit
        loop.on_death = self._loop_died
        return loop

    def _loop_died(self, error: BaseException) -> None:
        """Stop the worker: a process without its async lanes looks alive, and is not."""
        self.failed = True
        self.plan.events.emit(
            "loop.died",
            f"the event loop of the async handlers has ended: {headline(error)}; the worker stops",
            level=logging.CRITICAL,
        )
        self.stopping.set()
        self.loop.give_up()
        self._fence(self.loop.lanes)  # nobody can roll back any more on what is still open
        self.stop()

    def close(self) -> None:
        """Stop claiming: wake all who sleep, so that they can leave."""
        self.bell.close()
        if self.listener.is_alive():
            self.listener.stop()

    def busy(self) -> int:
        """Count the lanes that have not ended yet, and that the end must wait for.

        Not one that is still in a handler whose task was taken from it: there is nothing left to
        finish or to undo. Nor an event loop that such a handler may block, if nothing else runs
        there.
        """
        alive, there = sum(self._must_end(lane) for lane in self.lanes), self.loop.lanes
        if any(map(_is_taken, there)) and not any(map(_is_running, there)):
            return alive
        return alive + self.loop.busy()

    @staticmethod
    def _must_end(lane: SyncLane) -> bool:
        return lane.is_alive() and not lane.abandoned and not _is_taken(lane)

    def running(self) -> int:
        """Count the tasks that run; not those that were taken from a handler that goes on."""
        return sum(_is_running(lane) for lane in self._all_lanes() if not lane.abandoned)

    def _all_lanes(self) -> list[Lane]:
        return [*(lane for lane in self.lanes if lane.is_alive()), *self.loop.lanes]

    def wait(self, seconds: float) -> None:
        """Wait a moment for lanes to end."""
        for lane in self.lanes:
            if self._must_end(lane):
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
        everybody = (self._all_lanes(),)
        threading.Thread(
            target=self._fence, args=everybody, name="pgtask-fence", daemon=True
        ).start()
        self._wait_for(lambda: not self.busy(), 1.0)

    def _wait_for(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline:
            self.wait(0.02)

    def _fence(self, lanes: Sequence[Lane]) -> None:
        """End the transactions and the leases of all that still runs on some lanes."""
        for pause in FENCE_PAUSES:
            time.sleep(pause)
            try:
                with self.engine.begin() as connection:
                    for lane in lanes:
                        if lane.execution is not None:
                            self._cut_off(connection, lane.execution)
            except Exception as error:  # noqa: BLE001 - the database is away; then the rows are free
                self.plan.events.emit("lane.cut", headline(error), level=logging.DEBUG)
            else:
                return

    def _cut_off(self, connection: Connection, execution: Execution) -> None:
        claimed, lease = execution.running, execution.lease
        for each in (lease, *execution.unrun):
            if each is not None:
                connection.execute(release_lease(self.plan.tables.task), each.key)
        if claimed is not None and lease is None:
            row = claimed.values
            ended = {"pid": row[BACKEND_PID], "begun": row[BEGUN_AT]}
            connection.execute(end_transaction(), ended)

    def cancel(self, task_id: int) -> None:
        """Stop a task that was cancelled: it is settled, and its transaction has been ended."""
        for lane in self._all_lanes():
            execution = lane.execution
            claimed = execution.running if execution is not None else None
            if execution is not None and claimed is not None and claimed.task_id == task_id:
                execution.settled = execution.expired = claimed
                self.plan.events.emit(
                    "task.cancelled",
                    f"{claimed} was cancelled; its handler is stopped",
                    task_id=claimed.task_id,
                    task_type=claimed.task_type,
                )
                self._stop_handler(lane, claimed, "was cancelled")

    def _lease_lost(self, lease: Lease) -> None:
        lease.lost = True
        for lane in self._all_lanes():
            if lane.execution is not None and lane.execution.lease is lease:
                self._stop_handler(lane, lease.claimed, "lost its lease")

    def _stop_handler(self, lane: Lane, claimed: Claimed, why: str) -> None:
        lane.interrupt()
        self.watchdog.abandon_later(lane, claimed, why)

    def end(self) -> None:
        """Close what is left open."""
        if self._freezes:
            gc.unfreeze()
        self.watchdog.stop()
        self.keeper.stop()
        # in a thread: the network may be dead, and that must not delay the end
        leaving = threading.Thread(target=self._leave, name="pgtask-leave", daemon=True)
        leaving.start()
        leaving.join(0.5)
        if self.listener.is_alive():
            self.listener.join(0.5)  # not for long: its connection may be one that hangs
        if not self.busy():
            if self.plan.options.drain:
                self._report()
            self.engine.dispose()
            self.direct_engine.dispose()

    def _leave(self) -> None:
        if self.keeper.is_alive():
            self.keeper.join()
        with suppress(*DATABASE_ERRORS):
            self.presence.leave()

    def _report(self) -> None:
        """Tell at the end of a drain what was left for want of a handler."""
        try:
            with self.engine.connect() as connection:
                self.roster.report(connection)
        except DATABASE_ERRORS as error:
            self.plan.events.emit("drain.report", one_line(error), level=logging.DEBUG)


def _is_running(lane: Lane) -> bool:
    """Say whether a lane runs a task that is still its own."""
    return lane.execution is not None and lane.execution.running is not None and not _is_taken(lane)


def _is_taken(lane: Lane) -> bool:
    """Say whether the task was taken from the handler that a lane is in."""
    execution = lane.execution
    if execution is None or execution.running is None:
        return False
    is_lost = execution.lease is not None and execution.lease.lost
    return is_lost or execution.settled is execution.running
