"""The load of a soak: a process that enqueues at a steady rate, and processes of workers.

They count in shared memory, where they cost the database nothing. How late tasks start is counted
in classes that are 10 % wide, from 0.1 ms up; the parent takes differences to see an interval.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker
from tally import SPAWN

from pgtask_sa import TaskRegistry, TaskSession, TaskView, Worker

if TYPE_CHECKING:
    from collections.abc import Sequence

TYPES = ("SOAK_A", "SOAK_B", "SOAK_C")
DELAYED, FAILING = 20, 50  # one in so many
DELAY = 2.0  # seconds
BACKOFF = 1.0
TICK = 0.01  # seconds between the commits of the enqueuer
MOST = 500  # tasks in one of them
WIDTH, FIRST, CLASSES = 1.1, 0.1, 160
LANES = 4


class Counters:
    """Tasks done, failures, and how late tasks started: those without a delay, those with one."""

    NAMES = ("done", "failed")

    def __init__(self) -> None:
        self._cells: Any = SPAWN.Array("q", 2 + 2 * CLASSES, lock=False)
        self._lock: Any = None  # of the process that counts; its handlers are threads

    def add(self, name: str) -> None:
        """Count something."""
        self._add(self.NAMES.index(name))

    def late(self, milliseconds: float, *, delayed: bool) -> None:
        """Count a start."""
        place = 0
        while place < CLASSES - 1 and FIRST * WIDTH**place < milliseconds:
            place += 1
        self._add(2 + delayed * CLASSES + place)

    def _add(self, cell: int) -> None:
        if self._lock is None:
            self._lock = threading.Lock()
        with self._lock:
            self._cells[cell] += 1

    def values(self) -> list[int]:
        """Return a copy of everything that was counted."""
        return list(self._cells)

    def __getstate__(self) -> dict[str, Any]:
        return {"_cells": self._cells, "_lock": None}


def lateness(counted: Sequence[int], part: float, *, delayed: bool = False) -> float | None:
    """Return a percentile in ms, the upper bound of its class; None if nothing started."""
    start = 2 + delayed * CLASSES
    classes = counted[start : start + CLASSES]
    left = part * sum(classes)
    for place, count in enumerate(classes):
        left -= count
        if count and left <= 0:
            return float(FIRST * WIDTH**place)
    return None


def enqueuer(url: str, rate: float, seconds: float, sent: Any) -> None:
    """Enqueue at a steady rate, some with each commit; more, up to `MOST`, if it falls behind."""
    # in the tests it may lead through a pooler
    through = {"prepare_threshold": None} if os.environ.get("PGTASK_TEST_POOLER") else {}
    engine = create_engine(url, connect_args=through)
    sessions = sessionmaker(engine, class_=TaskSession)
    start = time.monotonic()
    while (now := time.monotonic()) < start + seconds:
        due = min(int((now - start) * rate) - sent.value, MOST)
        if due > 0:
            with sessions.begin() as session:
                for number in range(sent.value, sent.value + due):
                    _enqueue(session, number)
            sent.value += due
        time.sleep(max(0.0, now + TICK - time.monotonic()))
    engine.dispose()


def _enqueue(session: TaskSession, number: int) -> None:
    delay = DELAY if number % DELAYED == 0 else None
    starts = time.monotonic_ns() + int((delay or 0) * 1e9)
    params = {"i": number, "starts": starts, "delayed": delay is not None}
    session.enqueue(TYPES[number % len(TYPES)], params, delay=delay)


def worker(url: str, counters: Counters, lanes: int) -> None:
    """Run a worker in this process until SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's business
    logging.getLogger("pgtask_sa").setLevel(logging.CRITICAL)  # tasks fail as they should
    Worker(registry(counters), url, concurrency=lanes).run()


def registry(counters: Counters) -> TaskRegistry:
    """Make the handlers: they write nothing, and some tasks fail at first."""
    tasks = TaskRegistry()

    def run(session: TaskSession, params: dict[str, Any], task: TaskView) -> None:
        if task.attempt == 1:
            late = (time.monotonic_ns() - params["starts"]) / 1e6
            counters.late(late, delayed=params["delayed"])
            if params["i"] % FAILING == 1:
                counters.add("failed")
                raise RuntimeError("fails at first")
        counters.add("done")

    for name in TYPES:
        tasks.handler(name, backoff=BACKOFF)(run)
    return tasks
