"""Cheap claims where dead rows fill a queue that is all but empty.

While somebody holds a snapshot (a report, a dump), tasks that are done stay in the table and in its
indexes. Where few tasks wait, a claim by lottery walks over most of them until it finds one: 40 ms
for 100,000 dead, and more with every task that is done.

But tasks get their numbers in order, and a queue that is all but empty keeps up: what waits has the
greatest numbers, but for some. So a lane that finds claims slow *looks* twenty times a second what
waits, along the primary key, and what it claims is then

* some of the tasks that it saw (see `listed`);
* those with numbers that were given out since then;
* of the tasks that were planned, those that fell due since then.

A look does not begin at the first number, either. The lane keeps a *floor*, the greatest number
that there was a second ago, and looks from there on; and besides for those below it that waited
when it looked last (one that takes long, or whose turn it is not). Whoever gets a number and
commits it a moment later, within that second, is found by the next look.

Whoever commits it more than a second later is below the floor when it comes, and so is a dead task
that is brought back. They are found by the *thorough look*, from the first number on, which passes
by all dead rows once. It is made as often as it takes a fiftieth of all time: with 100,000 dead
rows, every half second.

With `MOST_WAITING` tasks or more the lottery is the better way again: it has not far to go, but for
planned tasks; for these see `since`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

from sqlalchemy import Executable, Table

from pgtask_sa.claim_orders import Ask, Pair, Row
from pgtask_sa.listed import Listed
from pgtask_sa.statements import peek
from pgtask_sa.tail_claims import MOST_WAITING, tail_claim, tail_look

Question: TypeAlias = "Callable[[Executable, Mapping[str, Any]], Sequence[Row]]"

FIRST = -(2**63)  # the smallest number there may be
NEVER = math.inf
LAG = 1.0  # seconds that a transaction has from the number, or the time, of a task to its commit
SLOW = 0.003  # seconds, on the average
WITH_COMMIT = 0.007  # that much more is not the claim's fault, if it travels with a COMMIT
LONGEST, SHARE = 0.02, 8  # once may be the machine's fault
FEW = 2_000  # dead rows, no crowd
QUICK = 0.001  # a thorough look that takes no longer has met no crowd, either
PART_OF_TIME, PART_IN_A_CROWD = 50, 200
RAREST = 10.0  # seconds from one thorough look to the next, at most: one may have been held up
MOST_MET = 1_000
PAUSE = 0.5  # seconds from one thorough look to the next, at least


class Tail:
    """What one lane, or one listener, knows of the end of a queue; touches no database.

    Args:
        table: the task table.
        batch_size: tasks per claim.
        next_due: also find out when the next planned task falls due.

    Attributes:
        in_use: claim here, and not by lottery.
        is_wanted: look whether this is the better way, also where claims are not slow.
        thorough: the last look was.
        crowded: it listed as much as it may.
        is_clear: it met no crowd of dead rows.
        until_due: seconds until the next task falls due, after the last look.
    """

    def __init__(self, table: Table, batch_size: int = 1, *, next_due: bool = False) -> None:
        self.in_use = self.is_wanted = self.thorough = self.crowded = self.is_clear = False
        self.until_due: float | None = None
        self._claim, self._look = tail_claim(table, batch_size), tail_look(table, next_due=next_due)
        self._mean = 0.0  # seconds
        self._mark: tuple[float, int] | None = None  # when, and the greatest number then
        self._floor = self._newest = FIRST
        self._others: list[int] = []  # below the floor
        self._listed = Listed(batch_size)
        self._seen = NEVER  # the server's time at the last look
        self._sent = self._next_thorough = self._next_if_slow = 0.0

    def timed(self, seconds: float, *, along: bool = False) -> None:
        """Take notice of how long a claim by lottery took, or a look at its indexes."""
        if along:
            seconds = max(0.0, seconds - WITH_COMMIT)
        self._mean += (min(seconds, LONGEST) - self._mean) / SHARE
        if self._mean < SLOW and not self.is_wanted:
            self._mark = None

    def must_look(self) -> bool:
        """Say whether claims are so slow that it is to be seen whether there is a better way."""
        if self.in_use or (self._mean < SLOW and not self.is_wanted):
            return False
        now, is_slow = time.monotonic(), self._mean >= SLOW
        due = self._next_if_slow if is_slow else self._next_thorough
        return now >= (due if self._mark is None else self._mark[0] + LAG)

    def claim(self, asked: Sequence[Pair], types: Sequence[str], *, new_first: bool) -> Ask:
        """Return a claim of pairs, in their order."""
        others = self._listed.choose(asked, new_first=new_first)
        given = self._place(asked, types, self._newest, self._seen - LAG, others)
        return self._claim, {**given, "new_first": new_first}

    def took(self, rows: Sequence[Row]) -> set[Pair]:
        """Take what a claim returned; return the pairs of which it has not tried everything."""
        return self._listed.took(rows)

    def look(self, pairs: Collection[Pair], types: Sequence[str]) -> Ask:
        """Return the look at what waits, of these types; planned tasks only of these pairs."""
        self._sent = time.monotonic()
        self.thorough = not self.in_use or self._sent >= self._next_thorough
        if self.thorough:  # sees all tasks that are due, by their numbers
            return self._look, self._place(pairs, types, FIRST, NEVER, ())
        since = self._seen - LAG
        return self._look, self._place(pairs, types, self._floor, since, self._others)

    @staticmethod
    def _place(
        pairs: Collection[Pair],
        types: Sequence[str],
        floor: int,
        since: float,
        others: Sequence[int],
    ) -> dict[str, Any]:
        return {
            "levels": [level for level, _ in pairs],
            "types": [kind for _, kind in pairs],
            "mine": types,
            "floor": floor,
            "since": since,
            "others": list(others),
        }

    def learn(self, rows: Sequence[Row]) -> set[Pair]:
        """Take what a look returned; return the pairs that wait."""
        now = time.monotonic()
        took = now - self._sent
        waiting = [row for row in rows if row["kind"] is not None]
        (last,) = (row for row in rows if row["kind"] is None)
        self.until_due, self._seen = last.get("seconds"), last["due"]
        self.crowded = len(waiting) >= MOST_WAITING
        self.is_clear = is_few(last["dead"]) or (self.thorough and took < QUICK)
        if self.thorough:
            part = PART_IN_A_CROWD if self.crowded else PART_OF_TIME
            self._next_thorough = now + min(max(PAUSE, part * took), RAREST)
            self._next_if_slow = now + min(max(PAUSE, PART_OF_TIME * took), RAREST)
        if self.crowded or self.is_clear:
            self._leave(now)
        else:
            self._rise(last["task_id"])
            self._others = [row["task_id"] for row in waiting if row["task_id"] < self._floor]
            self._listed.replace(waiting)
        return {(row["level"], row["kind"]) for row in waiting}

    def _rise(self, newest: int | None) -> None:
        """Let the floor rise to what was the greatest number some time ago."""
        if self._mark is not None and self._sent >= self._mark[0] + LAG:
            self._floor, self._mark, self.in_use = self._mark[1], None, True
        self._newest = self._floor if newest is None else newest
        if self._mark is None:
            self._mark = self._sent, FIRST if newest is None else newest

    def _leave(self, now: float) -> None:
        self.in_use, self._mark, self._floor, self._others = False, None, FIRST, []
        self._mean = 0.0
        self._next_thorough = max(self._next_thorough, now + PAUSE)
        self._next_if_slow = max(self._next_if_slow, now + PAUSE)


def is_few(dead: int | None) -> bool:
    """Say whether dead rows are surely no crowd: the machine is slow, or something else is."""
    return dead is not None and dead < FEW


class Lookout:
    """Looks for work without a lock, on somebody's connection, where dead rows are by the tail."""

    def __init__(self, table: Table) -> None:
        self._peek = peek(table)
        self._tail = Tail(table, next_due=True)
        self._met: set[Pair] = set()

    def look(self, ask: Question, types: Sequence[str]) -> tuple[bool, float | None]:
        """Return whether tasks of these types are ready, and in how many seconds the next will be.

        Args:
            ask: executes a statement and returns its rows.
            types: those that this worker runs.
        """
        if self._tail.in_use or self._tail.must_look():
            return self._look_at_tail(ask, types)
        start = time.monotonic()
        (row,) = ask(self._peek, {"types": types})
        self._tail.timed(time.monotonic() - start)
        return row["ready"], row["seconds"]

    def _look_at_tail(self, ask: Question, types: Sequence[str]) -> tuple[bool, float | None]:
        pairs = {(0, kind) for kind in types} | self._met
        statement, given = self._tail.look(pairs, types)
        found = self._tail.learn(ask(statement, given))
        if len(self._met) < MOST_MET:
            self._met |= found
        return bool(found), self._tail.until_due
