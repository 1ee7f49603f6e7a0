"""Lets one task run alone in its process, when it is suspected of killing processes.

A process that dies takes all its tasks along, and nobody can tell which of them did it. So the next
time each of them runs alone: if the process dies again, there is no doubt. Most are innocent, and
some take long. After one death the others are therefore kept out for a moment only: enough for one
that kills at once. After two, or before its last start, it must be alone. But what runs beside it
may take hours, and idle lanes claim nothing meanwhile. So the others are kept out for seconds; if
that is not enough it is tried again later, with more patience each time; see `postponing`.

One that has killed while it was alone runs alone each time: else it would make suspects of others
again.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Hashable

LOOK = 0.02  # seconds between looks whether the others have come to their end
MOMENT = 0.5  # seconds, for one that was there once: a task must be running again within one
PATIENCE = (3.0, 30.0)  # seconds, for one that must be alone: at first, and at most
GLANCE = 0.1  # seconds, where it was waited in vain just now: for lanes that only claim
SHARE = 10  # lanes are kept from claiming for about a tenth of the time


class Solitary(Exception):  # noqa: N818 - a demand, no error
    """A claim holds tasks that should run alone: roll it back, and run these by their numbers.

    Attributes:
        task_ids: which.
        strictly: they must not run at all beside others.
    """

    def __init__(self, task_ids: list[int], *, strictly: bool) -> None:
        super().__init__(f"tasks {task_ids} must run alone")
        self.task_ids = task_ids
        self.strictly = strictly


class Gate:
    """Knows the lanes that run something, and keeps the others out for one that must be alone.

    Example:
        >>> gate = Gate()
        >>> gate.enter("one"), gate.close("one", 60)
        (True, True)
        >>> gate.enter("two"), gate.must_wait()
        (False, False)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: set[Hashable] = set()
        self._closed_until = 0.0
        self._owner: Hashable = None
        self._patience = PATIENCE[0]
        self._hopeless_until = 0.0

    def enter(self, lane: Hashable) -> bool:
        """Let a lane in that is about to claim; False when it has to wait."""
        with self._lock:
            if self._is_closed():
                return False
            self._inside.add(lane)
            return True

    def _is_closed(self) -> bool:
        return time.monotonic() < self._closed_until

    def leave(self, lane: Hashable) -> None:
        """Let a lane out whose tasks are settled, or that is written off."""
        with self._lock:
            self._inside.discard(lane)
            if not self._inside:  # who was alone may be written off, and does not open
                self._closed_until = self._hopeless_until = 0.0

    def close(self, lane: Hashable, seconds: float) -> bool:
        """Keep all but one lane out for a while; False when another lane does so already."""
        with self._lock:
            if self._is_closed():
                return False
            self._owner, self._closed_until = lane, time.monotonic() + seconds
            return True

    def patience(self, *, strictly: bool) -> float:
        """Return for how many seconds the others may be kept out, to come to their end."""
        if not strictly:
            return MOMENT
        with self._lock:
            return GLANCE if time.monotonic() < self._hopeless_until else self._patience

    def keep(self, lane: Hashable) -> bool:
        """Keep the others out as long as it takes, if nobody is inside; False if somebody is."""
        with self._lock:
            if not self._inside <= {lane}:
                return False
            self._owner, self._closed_until = lane, math.inf
            self._patience = PATIENCE[0]
            return True

    def give_up(self) -> float:
        """Note that the others did not come to their end; return when to try again, in seconds."""
        with self._lock:
            now = time.monotonic()
            if now >= self._hopeless_until:
                self._hopeless_until = now + SHARE * self._patience
                self._patience = min(2 * self._patience, PATIENCE[1])
            # not all at once: each is claimed to be put back
            return self._hopeless_until - now + random.uniform(0.0, PATIENCE[0])  # noqa: S311

    def must_wait(self) -> bool:
        """Say whether others are still inside, and it pays to wait for their end."""
        return len(self._inside) > 1 and self._is_closed()

    def open(self, lane: Hashable) -> None:
        """Let everybody in again, unless it is another lane by now that keeps them out."""
        with self._lock:
            if self._owner == lane:
                self._closed_until = 0.0
