"""The ways around dead rows, and which of them a lane takes.

Where somebody holds a snapshot, a lane whose surveys are slow bounds them, and its claims (see
`since`). Where claims are slow, or there is such a bound, it sees now and then whether so little
waits that the end of the queue is the better way (see `tail`).
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from typing import TypeAlias

from sqlalchemy import Table

from pgtask_sa.claim_orders import Ask, ByType, Pair, Row
from pgtask_sa.since import Since
from pgtask_sa.tail import Tail

Look: TypeAlias = "Tail | Since"


class Detours:
    """The ways of one lane; touches no database.

    Args:
        table: the task table.
        lottery: the claims where no detour is taken.
        chance: where chance comes from.
    """

    def __init__(self, table: Table, lottery: ByType, chance: random.Random) -> None:
        self.tail, self.since = Tail(table, lottery.limit), Since(table)
        self._lottery, self._chance = lottery, chance
        self._sent: Look | None = None  # what the last statement looks at, if it is a look
        self._claimed: Tail | Since | None = None  # how the last claim was made

    @property
    def has_far_to_go(self) -> bool:
        """Say whether a pair of which nothing waits costs a claim much."""
        return self.since.on and not self.tail.in_use

    @property
    def is_thorough(self) -> bool:
        """Say whether the last look found also what no claim before it could take."""
        return self._sent is not None and self._sent.thorough

    @property
    def is_partial(self) -> bool:
        """Say whether there may be more than the last look listed."""
        return self._sent is self.tail and self.tail.crowded

    def must_look(self) -> bool:
        """Say whether it is to be seen whether there is a better way."""
        return self.tail.must_look()

    def claim(self, asked: Sequence[Pair], types: Sequence[str]) -> Ask | None:
        """Return a claim of pairs, in their order; None if no detour is taken."""
        self._sent = self._claimed = None
        if self.tail.in_use:
            self._claimed, new_first = self.tail, self._chance.random() < 0.5  # noqa: PLR2004
            return self.tail.claim(asked, types, new_first=new_first)
        if self.since.on:
            self._claimed = self.since
            return self._lottery.claim_since(self.since.bound, asked)
        return None

    def look(self, pairs: Collection[Pair], types: Sequence[str]) -> Ask | None:
        """Return a look at what waits, of these types; None if no detour is taken."""
        self._sent = None
        if self.tail.in_use or self.must_look():
            self._sent = self.tail
        elif self.since.on:
            self._sent = self.since
        return None if self._sent is None else self._sent.look(pairs, types)

    def timed(self, seconds: float, *, along: bool) -> None:
        """Take notice of how long the last claim took, if it was by lottery."""
        if self._claimed is not self.tail:
            self.tail.timed(seconds, along=along)
            self.since.claimed(seconds)

    def surveyed(self, seconds: float, *, along: bool) -> None:
        """Take notice of how long a survey took that was no detour."""
        self.tail.timed(seconds, along=along)
        self.since.surveyed(seconds)
        self.tail.is_wanted = self.since.on

    def took(self, rows: Sequence[Row]) -> set[Pair]:
        """Take what a claim returned; return the pairs of which it has not tried everything."""
        return self.tail.took(rows) if self._claimed is self.tail else set()

    def learn(self, rows: Sequence[Row]) -> set[Pair] | None:
        """Take what a look returned, and return the pairs that wait; None if it was no detour."""
        if self._sent is None:
            return None
        pairs = self._sent.learn(rows)
        if self._sent is self.tail and self.tail.is_clear:
            self.since.end()
        elif self._sent is self.tail and self.tail.crowded:
            self.since.begin()
            self.since.reach(rows)
        self.tail.is_wanted = self.since.on
        return pairs
