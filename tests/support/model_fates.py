"""The model itself: what may have become of each task. Pure, without a database."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

NOTHING: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Fate:
    """Where a task is, as everybody can see it, and what its handler wrote for good."""

    place: str  # waiting, leased, dead or gone
    attempts: int = 0
    reason: str = ""
    effects: frozenset[int] = NOTHING


@dataclass
class Work:
    """What a handler has done so far."""

    effects: list[int] = field(default_factory=list)  # not committed in its session
    kept: list[int] = field(default_factory=list)  # committed there
    children: list[int] = field(default_factory=list)  # tasks, not committed
    kept_children: list[int] = field(default_factory=list)
    has_double: bool = False  # breaks a deferred constraint
    keeps_double: bool = False
    has_swallowed: bool = False  # a database error
    is_spoiled: bool = False  # by one below its session, which cannot be rolled back
    is_aborted: bool = False  # its whole transaction: to be counted in another one
    outcome: str | None = None

    def keep(self) -> None:
        """Commit the session."""
        self.kept += self.effects
        self.kept_children += self.children
        self.keeps_double |= self.has_double
        self.undo()

    def undo(self) -> None:
        """Roll the session back."""
        self.effects, self.children = [], []
        self.has_double, self.has_swallowed = False, self.is_spoiled

    def is_untouched(self) -> bool:
        """Say whether it has done nothing with its session that stands."""
        done = self.effects + self.kept + self.children + self.kept_children
        return not (done or self.has_double or self.keeps_double or self.has_swallowed)

    def returns(self) -> str:
        """Return the outcome when the handler returns."""
        if self.has_swallowed:
            return "fail"
        self.keep()
        return "fail" if self.keeps_double else "done"


@dataclass
class Job:
    """A committed task."""

    task_id: int
    task_type: str
    max_attempts: int
    is_leased: bool
    key: Any = None  # equal tasks, of those that coalesce or must be unique, have the same
    fates: set[Fate] = field(default_factory=lambda: {Fate("waiting")})
    holder: Any = None  # the lane in whose transaction it is
    owner: Any = None  # the lane that has its lease
    version: int = 0  # of the row: the next one with every commit
    settled: int = 0  # how often it was settled; a lease ends with the next time
    deaths: int = 0  # of workers, which the lane that holds it has found
    is_left: bool = False  # of these starts there is one that was no death
    starts: int = 0
    forgiven: int = 0  # starts that need not count
    unsettled: tuple[Fate, int] | None = None  # and its version, if it may not have been settled

    @property
    def fate(self) -> Fate:
        """The only one that is possible."""
        (fate,) = self.fates
        return fate

    def is_waiting(self) -> bool:
        """Say whether it is in the table, and nobody's."""
        return self.holder is None and any(fate.place == "waiting" for fate in self.fates)

    def settle(self, fates: set[Fate]) -> None:
        """Note a commit that wrote its row."""
        self.fates = fates
        self.version += 1
        self.settled += 1
        self.unsettled = None

    def seems_settled(self, fates: set[Fate]) -> None:
        """Note a commit of which nobody knows whether it came to pass."""
        before = self.fate, self.version
        self.settle(fates | {self.fate})
        self.unsettled = before

    def is_seen(self, fate: Fate) -> None:
        """Note which of its fates is the true one.

        A row that was not settled is still of the version that dead workers may have noted.
        """
        self.fates = {fate}
        if self.unsettled is not None and self.unsettled[0] == fate:
            self.version = self.unsettled[1]
        self.unsettled = None

    # -- what an outcome makes of it ---------------------------------------------------------------

    def failed(self, fate: Fate, attempts: int, reason: str = "failed") -> Fate:
        """Return what follows when it failed, as attempt number ``attempts``."""
        if attempts >= self.max_attempts:
            return replace(fate, place="dead", attempts=attempts, reason=reason)
        return replace(fate, place="waiting", attempts=attempts)

    def after(self, fate: Fate, outcome: str, attempts: int, effects: list[int]) -> Fate:
        """Return what follows; ``attempts`` is the number of the attempt that has ended."""
        if outcome == "done":
            return Fate("gone", effects=fate.effects | frozenset(effects))
        if outcome == "fail":
            return self.failed(fate, attempts)
        if outcome == "discard":
            return replace(fate, place="dead", attempts=attempts, reason="discarded")
        assert outcome in ("snooze", "race", "unrun", "stop")
        return replace(fate, place="waiting", attempts=attempts - 1)

    def admitted(self, fate: Fate, deaths: int) -> set[Fate]:
        """Return what may follow a claim after which it was not run in that transaction."""
        before = fate.attempts + deaths
        found: set[Fate] = set()
        if deaths or fate.place == "leased":  # the death is counted
            counted = max(fate.attempts, min(before, self.max_attempts))
            found.add(self.failed(fate, counted, "failed" if self.is_left else "worker died"))
        if self.is_leased and before < self.max_attempts:
            found.add(replace(fate, place="leased", attempts=before + 1))
            found.add(replace(fate, place="waiting", attempts=before))  # a lane runs one at a time
        return found
