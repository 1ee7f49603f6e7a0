"""From when on a lane looks for what fell due, where dead rows lie in the way of a crowd.

Of new tasks a crowd is found by lottery at once, however many dead ones lie between them: some are
among the first entries that the claim meets. Tasks that were planned are found by time, the longest
due first, and so all dead ones come before those that wait: all that were ever delayed or retried
while somebody holds a snapshot. Every survey walks over them, and every other claim.

So where surveys are slow a lane knows *since* when there may be some: since the first one that fell
due and still waits, as the last survey saw, or since that survey. Like the end of the queue (see
`tail`) this misses what comes late: what is committed more than a second after it fell due, or is
brought back from the error queue with an old time; and besides all of a pair that was never met. A
*thorough* survey looks for these, as often as it takes a fiftieth of all time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Table

from pgtask_sa.claim_orders import Ask, Pair, Row
from pgtask_sa.since_survey import survey_since
from pgtask_sa.tail import is_few

LAG = 1.0  # seconds from the time of a task to the commit of it
SLOW = 0.003  # seconds that a survey takes longer than a claim, on the average
LONGEST, SHARE = 0.02, 8  # once may be the machine's fault
QUICK = 0.001  # and if it is no more than this, there is no crowd of dead rows any more
PART_OF_TIME = 50
PAUSE, RAREST = 0.5, 10.0  # seconds from one thorough survey to the next
ANY, NEVER = -math.inf, math.inf
EARLIEST = -1e10  # 300 years before 1970; beyond that there is no bound


class Since:
    """What one lane knows of the times of planned tasks; touches no database.

    Args:
        table: the task table.

    Attributes:
        on: surveys and claims have a bound.
        thorough: the last survey had none.
        bound: the server's time from which on planned tasks are looked for; seconds after 1970.
    """

    def __init__(self, table: Table) -> None:
        self.on = self.thorough = False
        self._survey = survey_since(table)
        self._claim = self._whole = 0.0  # seconds, on the average; of surveys without a bound
        self.bound = ANY
        self._sent = self._next_thorough = 0.0

    def claimed(self, seconds: float) -> None:
        """Take notice of how long a claim took."""
        self._claim += (min(seconds, LONGEST) - self._claim) / SHARE

    def surveyed(self, seconds: float) -> None:
        """Take notice of how long a survey took; whatever else slows it slows claims as well."""
        self._whole += (min(seconds, LONGEST) - self._whole) / SHARE
        if self._whole > self._claim + SLOW:
            self.begin()
        elif self._whole < self._claim + QUICK:
            self.end()

    def begin(self) -> None:
        """Set a bound, as soon as a thorough survey has told which."""
        if not self.on:
            self.on, self.bound, self._next_thorough = True, ANY, 0.0
            self._whole = LONGEST

    def end(self) -> None:
        """Do without one."""
        if self.on:
            self.on, self._whole = False, 0.0

    def reach(self, rows: Sequence[Row]) -> None:
        """Look as far back as something is due that another look has found."""
        self.bound = min(self.bound, _first(rows))

    def is_due(self) -> bool:
        """Say whether it is time to look thoroughly."""
        return self.on and time.monotonic() >= self._next_thorough

    def look(self, pairs: Collection[Pair], types: Sequence[str]) -> Ask:
        """Return the survey, of these types; planned tasks only of these pairs, if not of all."""
        self._sent = time.monotonic()
        self.thorough = self.is_due()
        given: dict[str, Any] = {
            "types": types,
            "levels": [level for level, _ in pairs],
            "kinds": [kind for _, kind in pairs],
            "since": NEVER if self.thorough else self.bound,  # all are looked for in another way
            "thorough": self.thorough,
        }
        return self._survey, given

    def learn(self, rows: Sequence[Row]) -> set[Pair]:
        """Take what a survey returned; return the pairs that wait."""
        now = time.monotonic()
        took = now - self._sent
        self.bound = _first(rows)
        (dead,) = (row["dead"] for row in rows if row["kind"] is None)
        if is_few(dead):
            self.end()
        elif self.thorough:
            self._next_thorough = now + min(max(PAUSE, PART_OF_TIME * took), RAREST)
            self.surveyed(took)
        return {(row["level"], row["kind"]) for row in rows if row["kind"] is not None}


def _first(rows: Sequence[Row]) -> float:
    """Return from when on there may be something due, where one row holds the time of the look."""
    first: float = min(row["due"] for row in rows if row["due"] is not None)
    return first - LAG if first > EARLIEST else ANY
