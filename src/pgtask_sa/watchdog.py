"""Deadlines for handlers that nobody can interrupt: their transaction is ended instead.

A coroutine can be cancelled, unless it blocks its loop. A thread that loops or sleeps cannot be
stopped from outside. But its work can be undone: the watchdog terminates the lane's server process
from a connection of its own. The row is free, the attempt is counted, and the stuck handler finds a
dead connection whenever it wakes. If it does not wake soon, the lane is written off and another
takes its place. A handler that holds the interpreter stops this thread as well: that is for the
supervisor to see, see `vital_signs`.

A deadline takes two steps. To mark the attempt as expired costs nothing and is done for each at its
moment: from then on it cannot be committed. To enforce that takes a connection and locks, so it may
take long; it is done in short-lived threads, so that one deadline does not wait for another.

An attempt is counted once: by the enforcement, if it begins before the handler comes back, and
else by the lane. What fails to be enforced is tried again as long as the handler runs; see
`enforcement`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from operator import attrgetter
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from pgtask_sa.enforcement import Enforcer
from pgtask_sa.execution import Execution
from pgtask_sa.failures import headline
from pgtask_sa.settle import Claimed, timed_out
from pgtask_sa.vital_signs import Place, VitalSigns

SECOND_GRACE = 2.0
WARN_FROM = 10.0  # seconds; of limits that long it is told when half of the time is over
LONGEST_PAUSE = 10.0  # between attempts to enforce a deadline
ENFORCERS = 4  # threads, and so connections, at once
_UNGUARDED = nullcontext()
_moment = attrgetter("when")


class Guarded(Protocol):
    """What the watchdog knows of a lane."""

    execution: Execution | None
    watch: Watch | None  # of what it runs, or ran last


class Watch:
    """The deadline of one call of a handler; to be entered when it begins."""

    __slots__ = (
        "claimed",
        "deadline",
        "dog",
        "enforced",
        "enforcing",
        "fired",
        "lane",
        "limit",
        "lock",
        "over",
        "pause",
        "when",
        "why",
    )

    def __init__(
        self,
        dog: Watchdog,
        lane: Guarded,
        claimed: Claimed,
        limit: float,
        *,
        grace: float = 0.0,
        why: str = "timed out",
    ) -> None:
        now = time.monotonic()
        self.dog = dog
        self.lane = lane
        self.claimed = claimed
        self.limit = limit
        self.why = why  # its task was taken from a handler, for people
        self.pause = 0.0  # after which a deadline that was enforced is looked at again
        self.deadline = now + limit + grace
        self.when = now + limit / 2 if limit >= WARN_FROM else self.deadline  # to look at it
        self.over = False
        self.fired = False
        self.enforced = False
        self.lock = threading.Lock()  # held while `over` or `fired` changes, never for long
        self.enforcing = threading.Lock()  # held as long as its transaction is being ended

    def __enter__(self) -> None:
        self.lane.watch = self
        self.dog.heed(self.when)

    def __exit__(self, kind: object, *_: object) -> None:
        # nobody has seen it: the interpreter was busy
        is_late = kind is None and time.monotonic() > self.deadline
        if self._end() or is_late:
            raise timed_out(self.limit)

    def _end(self) -> bool:
        """Take the watch off; True if the time was over, but the transaction is untouched."""
        with self.lock:
            self.over = True
        with self.enforcing:  # waits for an enforcement under way: its connection is then dead
            if not self.fired or self.enforced:
                return False
        # An ordinary failure: the lane counts it in the transaction that still holds the row.
        _execution(self.lane).expired = None
        return True


class Watchdog(threading.Thread):
    """One thread that sees the deadlines of all lanes of a worker, and a few that enforce them.

    A lane begins and ends a task thousands of times a second, and hardly ever misses a deadline. So
    it only leaves its watch where the thread finds it, and wakes the thread only if that would come
    too late.
    """

    def __init__(self, enforcer: Enforcer) -> None:
        super().__init__(name="pgtask-watchdog", daemon=True)
        self.enforcer = enforcer
        self.on_stuck: Callable[[Any, Claimed, str], None] = lambda *_: None
        self.signs = VitalSigns()  # for a supervisor, if there is one
        self._changed = threading.Condition()
        self._lanes: WeakKeyDictionary[Guarded, Place] = WeakKeyDictionary()
        self._stuck: list[Watch] = []  # handlers whose task was taken from them
        self._awake_at = math.inf  # when it looks next; infinity while it looks
        self._stopping = False
        self._due: deque[Watch] = deque()
        self._enforcers = 0

    def guard(
        self, seconds: float | None, lane: Guarded, claimed: Claimed, *, grace: float = 0.0
    ) -> AbstractContextManager[None]:
        """Enforce a deadline on what runs inside; no deadline costs nothing.

        Leaving it raises TaskFailed if what ran inside came to its end, but too late.
        """
        if seconds is None:
            return _UNGUARDED
        return Watch(self, lane, claimed, seconds, grace=grace)

    def see(self, lane: Guarded) -> Place:
        """Look at the watches of a lane from now on, as long as there is one.

        Returns where it has to say what it runs, for whoever watches over this very thread.
        """
        with self._changed:
            if lane not in self._lanes:
                self._lanes[lane] = self.signs.place()
            return self._lanes[lane]

    def heed(self, when: float) -> None:
        """Be awake at that moment; the watch is to be found already."""
        if when < self._awake_at:
            with self._changed:  # it sleeps by now, or looks: then it must look once more
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

    def _next(self) -> Watch | None:
        with self._changed:
            while not self._stopping:
                self._awake_at = math.inf
                watch = min(self._watches(), key=_moment, default=None)
                when = math.inf if watch is None else watch.when
                wait = when - time.monotonic()
                if watch is not None and wait <= 0:
                    watch.when = math.inf  # until it is said when to look again
                    return watch
                self._awake_at = when
                # a watch that was put on since it looked has seen infinity, and waits to tell
                self._changed.wait(min(wait, threading.TIMEOUT_MAX))
        return None

    def _watches(self) -> Iterator[Watch]:
        self._stuck = [watch for watch in self._stuck if watch.when < math.inf]
        for watch in chain((lane.watch for lane in self._lanes), self._stuck):
            if watch is not None and not watch.over:
                yield watch

    def _again(self, watch: Watch, when: float) -> None:
        """Look at a watch once more."""
        watch.when = when
        self.heed(when)

    def _warn(self, watch: Watch) -> None:
        """Tell of a task that takes long, well before it is ended."""
        claimed, lane = watch.claimed, watch.lane
        self._again(watch, watch.deadline)
        _execution(lane).events.emit(
            "task.slow",
            f"{claimed} has been running for {watch.limit / 2:g} s; "
            f"it is ended after {watch.limit:g} s",
            level=logging.WARNING,
            task_id=claimed.task_id,
            task_type=claimed.task_type,
            limit=watch.limit,
        )

    def _mark(self, watch: Watch) -> bool:
        """Keep an attempt from being committed; False if there is nothing to enforce."""
        with watch.lock:
            if watch.over:
                return False
            watch.fired = True
            if self._take(watch.lane, watch.claimed):
                return True
            watch.enforced = True  # by its own event loop
        self._again(watch, time.monotonic() + SECOND_GRACE)
        return False

    def _take(self, lane: Guarded, claimed: Claimed) -> bool:
        """Mark an attempt as expired; False if somebody else has, and enforces that."""
        execution = _execution(lane)
        with self._changed:
            if execution.expired is claimed:
                return False
            execution.expired = claimed
        return True

    def _look_again(self, watch: Watch) -> None:
        execution = _execution(watch.lane)
        if watch.over or execution.running is not watch.claimed:
            return
        self.on_stuck(watch.lane, watch.claimed, watch.why)
        if watch.pause and execution.settled is not watch.claimed:
            self._hand_over(watch)

    def abandon_later(self, lane: Guarded, claimed: Claimed, why: str) -> None:
        """Give a handler whose task was taken from it a moment to notice; then it is stuck."""
        watch = Watch(self, lane, claimed, 0.0, why=why)
        watch.fired = True
        watch.when = time.monotonic() + SECOND_GRACE
        with self._changed:
            self._stuck.append(watch)
            self._changed.notify()

    # -- enforcing ---------------------------------------------------------------------------

    def _hand_over(self, watch: Watch) -> None:
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

    def _fire(self, watch: Watch) -> None:
        with watch.enforcing:
            if watch.over:
                return
            watch.enforced = True
            self._undo(_execution(watch.lane), watch.claimed, is_first=not watch.pause)
        watch.pause = min(max(2 * watch.pause, SECOND_GRACE), LONGEST_PAUSE)
        self._again(watch, time.monotonic() + watch.pause)

    def expire(self, lane: Guarded, claimed: Claimed) -> None:
        """Undo what a lane is doing: end its transaction, count the attempt."""
        if self._take(lane, claimed):
            self._undo(_execution(lane), claimed)

    def _undo(self, execution: Execution, claimed: Claimed, *, is_first: bool = True) -> None:
        try:
            if self.enforcer.take(execution, claimed):
                execution.settled = claimed
        except Exception as error:  # noqa: BLE001 - the database may be away
            told = headline(error, values=execution.events.shows_values)
            execution.events.emit(
                "task.timeout",
                f"enforcing the deadline of {claimed} failed: {told}",
                level=logging.ERROR if is_first else logging.DEBUG,
                task_id=claimed.task_id,
                task_type=claimed.task_type,
            )


def _execution(lane: Guarded) -> Execution:
    assert lane.execution is not None  # noqa: S101 - it is running a task
    return lane.execution
