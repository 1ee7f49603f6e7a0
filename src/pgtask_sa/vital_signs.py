"""Signs of life that a worker process gives to its supervisor, in memory that both of them share.

A handler that holds the interpreter in C code, such as a regular expression that backtracks for
ever, stops every thread of its process: no deadline is seen there any more. Only somebody outside
can notice, and has to know how long such a silence is in order.

So each lane says when the time of its handler is over, before it calls it: what was told once a
second could be of a task that has ended since. That is why this is memory, and not a pipe: to write
there costs a fraction of a microsecond, and it does not matter whether anybody reads.
"""

from __future__ import annotations

import itertools
import math
import mmap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

LANES = 2000  # of one process, at most: 1,000 of each kind
_BYTES = 8  # of a float
_STOPPED = ("T", "t")  # by a signal; by a debugger


class Place:
    """Where one lane says how long its handler may run."""

    __slots__ = ("_beat", "_times")

    def __init__(self, times: memoryview[float], beat: Callable[[], None]) -> None:
        self._times = times
        self._beat = beat

    def begin(self, seconds: float | None, lease: float | None) -> None:
        """Say that a handler begins: with its time limit, and with its lease if it has one."""
        self._times[1] = math.inf if lease is None else lease
        self._times[0] = math.inf if seconds is None else time.monotonic() + seconds

    def end(self) -> None:
        """Say that it has come back, and is alive: it may have silenced all others until now."""
        self._beat()
        self._times[0] = 0.0


class VitalSigns:
    """What one process tells; to be made before the fork.

    All moments are of the system's monotonic clock, which is the same in all processes.
    """

    def __init__(self) -> None:
        self._times = memoryview(mmap.mmap(-1, _BYTES * 2 * (1 + LANES))).cast("d")
        self._numbers = itertools.count(1)

    def beat(self) -> None:
        """Give a sign of life."""
        self._times[0] = time.monotonic()

    def come_back(self) -> None:
        """Say that the run has come to its end, in whatever way, and was not broken off."""
        self._times[1] = 1.0

    @property
    def came_back(self) -> bool:
        """Whether it has."""
        return bool(self._times[1])

    @property
    def last(self) -> float:
        """The moment of the last sign of life; 0 before the first one."""
        return self._times[0]

    def place(self) -> Place:
        """Return the place of one more lane."""
        # Who has no supervisor may come to more lanes, since stuck ones are replaced; nobody reads.
        number = min(next(self._numbers), LANES)
        return Place(self._times[2 * number : 2 * number + 2], self.beat)

    def bearable_until(self, silence: float, since: float = 0.0) -> float:
        """Return the moment from which on the process is to be taken for one that hangs.

        That is ``silence`` seconds after its last sign of life, or after ``since``. While handlers
        run, it is so long after the time of the first of them is over: such a handler may hold the
        interpreter as long as it may run. But a lease is lost when nobody has renewed it for its
        length, and then somebody else runs the task.
        """
        running = list(self._running())  # first: who comes back gives a sign, and then is gone
        last = self.last
        if not last:  # it has not begun
            return math.inf
        ends = [min(until + silence, last + lease) for until, lease in running]
        return max(last + silence, since + silence, min(ends, default=0.0))

    def _running(self) -> Iterator[tuple[float, float]]:
        for until, lease in zip(self._times[2::2], self._times[3::2], strict=True):
            if until:
                yield until, lease


def is_stopped(pid: int) -> bool:
    """Say whether a process is stopped, by a signal or a debugger, where the system tells that."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    # after its name, which stands in parentheses and may have some itself
    return status.rpartition(")")[2].split()[0] in _STOPPED
