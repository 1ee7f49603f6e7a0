"""Where the idle lanes of one worker wait, and how one of them is woken. Pure threading.

A lane that finds nothing goes to sleep here. One ring wakes one lane of each kind, not all. A lane
that claims a full batch wakes the next before it starts, because there may be more. So one task
on an idle worker costs one or two claims, and a thousand tasks have every lane busy in an instant.

Nobody knows of which kind a new task is. A lane that is woken in vain takes the processor from the
one that is not. So at a notification the kind that found something last comes first, and the other
one when that finds nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

Wake: TypeAlias = Callable[[], None]


class Doorbell:
    """The sleepers of each kind of lane, and the count of those who are awake.

    Example:
        >>> bell = Doorbell({"sync": 1})
        >>> bell.sleep("sync", lambda: print("woken"))
        True
        >>> bell.ring()
        woken
        >>> bell.ring()  # nobody sleeps: remembered for the next who wants to
        >>> bell.sleep("sync", lambda: print("woken"))
        False
    """

    def __init__(self, lanes: dict[str, int]) -> None:
        self._lock = threading.Lock()
        self._sleepers: dict[str, list[Wake]] = {kind: [] for kind in lanes}
        self._missed = dict.fromkeys(lanes, False)
        self._awake = sum(lanes.values())
        self._closed = False
        self._likely = next(iter(lanes), "")  # the kind that found something last
        self._withheld = False  # the other was not woken, since this one may find it
        self.stirred = False  # a lane found something
        self.on_sleep: Callable[[], None] = _nothing
        self.on_quiet: Callable[[], None] = _nothing

    def sleep(self, kind: str, wake: Wake) -> bool:
        """Register a lane that found nothing; False if it had better look again at once."""
        with self._lock:
            if self._missed[kind] or self._closed:
                self._missed[kind] = False
                return False
            self._sleepers[kind].append(wake)
            self._awake -= 1
            quiet = self._awake == 0
            withheld, self._withheld = self._withheld, False
        if withheld:
            self._wake_all_but(kind)
        self.on_sleep()
        if quiet:
            self.on_quiet()
        return True

    def ring(self) -> None:
        """Wake one lane of each kind; remember it for a kind in which nobody sleeps."""
        self._wake_all_but(None)

    def ring_first(self) -> bool:
        """Wake one lane of the kind that found something last; True if others are left asleep.

        They are woken when that one falls asleep without having found anything. If it finds
        something, there may still be more: the caller had better look, a moment later.
        """
        with self._lock:
            asleep = [kind for kind, wakes in self._sleepers.items() if wakes]
            self._withheld = withheld = self._likely in asleep and len(asleep) > 1
        if withheld:
            self.chain(self._likely)
        else:
            self.ring()
        return withheld

    def found(self, kind: str) -> None:
        """Note that a lane of a kind found something."""
        self.stirred, self._likely, self._withheld = True, kind, False

    def _wake_all_but(self, spared: str | None) -> None:
        for kind in self._sleepers:
            if kind != spared and not self.chain(kind):
                with self._lock:
                    self._missed[kind] = True

    def chain(self, kind: str) -> bool:
        """Wake one more lane of a kind, if one sleeps."""
        with self._lock:
            if not self._sleepers[kind]:
                return False
            wake = self._sleepers[kind].pop()
            self._awake += 1
        wake()
        return True

    def close(self) -> None:
        """Wake everybody; from now on nobody sleeps."""
        with self._lock:
            self._closed = True
            sleepers = [wake for kind in self._sleepers.values() for wake in kind]
            self._awake += len(sleepers)
            for kind in self._sleepers.values():
                kind.clear()
        for wake in sleepers:
            wake()

    def forget(self, kind: str) -> None:
        """Forget the sleepers of a kind, whose lanes are replaced by as many new ones."""
        with self._lock:
            self._awake += len(self._sleepers[kind])
            self._sleepers[kind].clear()

    def anyone_asleep(self) -> bool:
        """Say whether any lane waits for work."""
        return any(self._sleepers.values())

    def leave(self) -> None:
        """Take a lane that ends, or is stuck for good, out of the count."""
        with self._lock:
            self._awake -= 1
            quiet = self._awake == 0
        if quiet:
            self.on_quiet()

    def join(self) -> None:
        """Count a lane that was added."""
        with self._lock:
            self._awake += 1


def _nothing() -> None:
    pass
