"""What the handlers of a benchmark count, in memory that parent and worker share."""

from __future__ import annotations

import multiprocessing
import threading
import time
from typing import Any

SPAWN = multiprocessing.get_context("spawn")
STAMPS = 20_000
LOG = 20_000


class Tally:
    """Number of executions, moments of the first and the last; more of those that have a number.

    For one process: two that count at once would lose some.
    """

    def __init__(self) -> None:
        self._cells: Any = SPAWN.Array("q", 3 + STAMPS, lock=False)
        self._log: Any = SPAWN.Array("i", LOG, lock=False)
        self._lock: Any = None  # of the process that counts; its handlers may be threads

    def hit(self, number: int | None = None, kind: int = 0) -> None:
        """Count an execution; with a number, note when that one started; ``kind`` is logged."""
        now = time.monotonic_ns()
        if self._lock is None:
            self._lock = threading.Lock()
        with self._lock:
            if self._cells[0] < LOG:
                self._log[self._cells[0]] = kind
            self._cells[0] += 1
            self._cells[1] = self._cells[1] or now
            self._cells[2] = now
            if number is not None and number >= 0:
                self._cells[3 + number] = now

    @property
    def count(self) -> int:
        """The number of executions."""
        return int(self._cells[0])

    @property
    def first(self) -> int:
        """When the first execution was, in ns of the monotonic clock."""
        return int(self._cells[1])

    @property
    def last(self) -> int:
        """When the last execution was, in ns of the monotonic clock."""
        return int(self._cells[2])

    @property
    def seconds(self) -> float:
        """The time from the first execution to the last."""
        return (self.last - self.first) / 1e9

    def started(self, number: int) -> int:
        """When the execution of that number started, in ns of the monotonic clock."""
        return int(self._cells[3 + number])

    def log(self) -> list[int]:
        """Return the kinds of the first executions, in their order."""
        return list(self._log[: min(self.count, LOG)])

    def __getstate__(self) -> dict[str, Any]:
        return {"_cells": self._cells, "_log": self._log, "_lock": None}
