"""Deadlines for handlers that nobody can interrupt: their transaction is ended instead.

A coroutine can be cancelled, unless it blocks its loop. A thread that loops or sleeps cannot be
stopped from outside. But its work can be undone: the watchdog terminates the lane's server process
from a connection of its own. The row is free, the attempt is counted, and the stuck handler finds a
dead connection whenever it wakes. If it does not wake soon, the lane is written off and another
takes its place.

A deadline takes two steps. To mark the attempt as expired costs nothing and is done for each at its
moment: from then on it cannot be committed. To enforce that takes a connection and locks, so it may
take long; it is done in short-lived threads, so that one deadline does not wait for another.

An attempt is counted once: by the enforcement, if it begins before the handler comes back, and else
by the lane.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from sqlalchemy import Connection, Engine

from pgtask_sa.claim import BACKEND_PID, BEGUN_AT
from pgtask_sa.engines import is_pooled
from pgtask_sa.execution import Execution, timed_out
from pgtask_sa.failures import headline
from pgtask_sa.leases import take_over
from pgtask_sa.settle import Claimed, Settler

SECOND_GRACE = 2.0
WARN_FROM = 10.0  # seconds; of limits that long it is told when half of the time is over
PATIENCE = "set local lock_timeout = '5s'"  # for the server process to end
ENFORCERS = 4  # threads, and so connections, at once


class Guarded(Protocol):
    """What the watchdog knows of a lane."""

    execution: Execution | None


class _Watch:
    def __init__(self, lane: Guarded, claimed: Claimed, limit: float, deadline: float) -> None:
        self.lane = lane
        self.claimed = claimed
        self.limit = limit
        self.deadline = deadline
        self.over = False
        self.fired = False
        self.enforced = False
        self.lock = threading.Lock()  # held while `over` or `fired` changes, never for long
        self.enforcing = threading.Lock()  # held as long as its transaction is being ended


class Watchdog(threading.Thread):
    """One thread that sees the deadlines of all lanes of a worker, and a few that enforce them."""

    def __init__(self, engine: Engine, settle: Callable[..., Settler]) -> None:
        super().__init__(name="pgtask-watchdog", daemon=True)
        self.engine = engine
        self.settle = settle
        self.on_stuck: Callable[[Any], None] = lambda _lane: None
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, _Watch]] = []
        self._numbers = itertools.count()
        self._purge_at = 1000
        self._stopping = False
        self._due: deque[_Watch] = deque()
        self._enforcers = 0

    @contextmanager
    def guard(
        self, seconds: float | None, lane: Guarded, claimed: Claimed, *, grace: float = 0.0
    ) -> Iterator[None]:
        """Enforce a deadline on what runs inside; no deadline costs nothing.

        Raises:
            TaskFailed: what runs inside came to its end, but too late.
        """
        if seconds is None:
            yield
            return
        now = time.monotonic()
        watch = _Watch(lane, claimed, seconds, now + seconds + grace)
        self._push(now + seconds / 2 if seconds >= WARN_FROM else watch.deadline, watch)
        try:
            yield
            if time.monotonic() > watch.deadline:  # nobody has seen it: the interpreter was busy
                raise timed_out(seconds)
        finally:
            if self._end(watch):
                raise timed_out(seconds)

    @staticmethod
    def _end(watch: _Watch) -> bool:
        """Take the watch off; True if the time was over, but the transaction is untouched."""
        with watch.lock:
            watch.over = True
        with watch.enforcing:  # waits for an enforcement under way: its connection is then dead
            if not watch.fired or watch.enforced:
                return False
        # An ordinary failure: the lane counts it in the transaction that still holds the row.
        _execution(watch.lane).expired = None
        return True

    def _push(self, when: float, watch: _Watch) -> None:
        with self._changed:
            if len(self._heap) >= self._purge_at:  # long deadlines, short tasks: mostly over
                self._heap = [entry for entry in self._heap if not entry[2].over]
                heapq.heapify(self._heap)
                self._purge_at = max(1000, 2 * len(self._heap))
            entry = (when, next(self._numbers), watch)
            heapq.heappush(self._heap, entry)
            if self._heap[0] is entry:  # else it is awake in time anyway
                self._changed.notify()

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    # -- seeing ------------------------------------------------------------------------------

    def run(self) -> None:
        """Wait for the next deadline, have it enforced, go on."""
        while True:
            watch = self._next()
            if watch is None:
                return
            if watch.fired:
                self._look_again(watch)
            elif time.monotonic() < watch.deadline:
                self._warn(watch)
            elif self._mark(watch):
                self._hand_over(watch)

    def _next(self) -> _Watch | None:
        with self._changed:
            while not self._stopping:
                while self._heap and self._heap[0][2].over:
                    heapq.heappop(self._heap)
                wait = self._heap[0][0] - time.monotonic() if self._heap else None
                if wait is not None and wait <= 0:
                    return heapq.heappop(self._heap)[2]
                self._changed.wait(wait)
        return None

    def _warn(self, watch: _Watch) -> None:
        """Tell of a task that takes long, well before it is ended."""
        claimed, lane = watch.claimed, watch.lane
        self._push(watch.deadline, watch)
        _execution(lane).events.emit(
            "task.slow",
            f"{claimed} has been running for {watch.limit / 2:g} s; "
            f"it is ended after {watch.limit:g} s",
            level=logging.WARNING,
            task_id=claimed.task_id,
            task_type=claimed.task_type,
            limit=watch.limit,
        )

    def _mark(self, watch: _Watch) -> bool:
        """Keep an attempt from being committed; False if there is nothing to enforce."""
        with watch.lock:
            if watch.over:
                return False
            watch.fired = True
            if self._take(watch.lane, watch.claimed):
                return True
            watch.enforced = True  # by its own event loop
        self._push(time.monotonic() + SECOND_GRACE, watch)
        return False

    def _take(self, lane: Guarded, claimed: Claimed) -> bool:
        """Mark an attempt as expired; False if somebody else has, and enforces that."""
        execution = _execution(lane)
        with self._changed:
            if execution.expired is claimed:
                return False
            execution.expired = claimed
        return True

    def _look_again(self, watch: _Watch) -> None:
        if not watch.over and _execution(watch.lane).running is watch.claimed:
            self.on_stuck(watch.lane)

    def abandon_later(self, lane: Guarded, claimed: Claimed) -> None:
        """Give a handler whose task was taken from it a moment to notice; then it is stuck."""
        now = time.monotonic()
        watch = _Watch(lane, claimed, 0.0, now)
        watch.fired = True
        self._push(now + SECOND_GRACE, watch)

    # -- enforcing ---------------------------------------------------------------------------

    def _hand_over(self, watch: _Watch) -> None:
        with self._changed:
            self._due.append(watch)
            if self._enforcers == ENFORCERS:
                return
            self._enforcers += 1
        threading.Thread(target=self._enforce_due, name="pgtask-enforcer", daemon=True).start()

    def _enforce_due(self) -> None:
        while True:
            with self._changed:
                if not self._due:
                    self._enforcers -= 1
                    return
                watch = self._due.popleft()
            self._fire(watch)

    def _fire(self, watch: _Watch) -> None:
        with watch.enforcing:
            if watch.over:
                return
            watch.enforced = True
            self._undo(_execution(watch.lane), watch.claimed)
        self._push(time.monotonic() + SECOND_GRACE, watch)

    def expire(self, lane: Guarded, claimed: Claimed) -> None:
        """Undo what a lane is doing: end its transaction, count the attempt."""
        if self._take(lane, claimed):
            self._undo(_execution(lane), claimed)

    def _undo(self, execution: Execution, claimed: Claimed) -> None:
        try:
            self._enforce(execution, claimed)
        except Exception as error:  # noqa: BLE001 - the database may be away; then the row is free
            execution.events.emit(
                "task.timeout",
                f"enforcing a deadline failed: {headline(error)}",
                level=logging.ERROR,
            )
        else:
            execution.settled = claimed

    def _enforce(self, execution: Execution, claimed: Claimed) -> None:
        seconds = execution.handlers[claimed.task_type].timeout or 0.0
        with self.engine.connect() as connection, connection.begin():
            connection.exec_driver_sql(PATIENCE)
            settler = self.settle(connection)
            for seized in self._seize(settler, execution, claimed):
                settler.fail(seized, timed_out(seconds), seconds)

    @staticmethod
    def _seize(settler: Settler, execution: Execution, claimed: Claimed) -> list[Claimed]:
        if execution.lease is not None:
            return take_over(settler, execution.lease, _own_process(execution.connection))
        row = claimed.values
        seized = settler.seize(claimed.task_id, row[BACKEND_PID], row[BEGUN_AT])
        return [replace(each, uncounted=claimed.uncounted) for each in seized]


def _own_process(connection: Connection) -> int | None:
    """Return the server process of a lane, in which nobody but the lane can work; or none."""
    if connection.closed or connection.invalidated or is_pooled(connection):
        return None
    driver: Any = connection.connection.driver_connection
    pid: int = driver.info.backend_pid
    return pid


def _execution(lane: Guarded) -> Execution:
    assert lane.execution is not None  # noqa: S101 - it is running a task
    return lane.execution
