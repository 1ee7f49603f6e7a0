"""After an error: how long a lane waits, and whether there is something to tell."""

from __future__ import annotations

import logging
import random
import time

from sqlalchemy import Table

from pgtask_sa.events import Events
from pgtask_sa.execution import TIME_LIMITS
from pgtask_sa.failures import UNDEFINED_TABLE, headline, is_blameless, sqlstate
from pgtask_sa.settle import TransactionLost
from pgtask_sa.wakeup import DATABASE_ERRORS, Health, no_table

PAUSE = (0.05, 1.0)  # seconds between attempts to reach a database that is away: first, longest
# At the claim itself, which holds nothing yet: try again at once, there is nothing to tell. A race
# that was lost; or the process stood still, and its transaction came to be too old.
RACES = ("40001", "40P01", *TIME_LIMITS)
MANY = 10  # of them in a row


class Trouble:
    """Decides for one lane.

    Args:
        task: the table of the tasks.
        health: of the database, as all lanes have met it.
        events: where errors of our own are told.
    """

    def __init__(self, task: Table, health: Health, events: Events) -> None:
        self.task = task
        self.health = health
        self.events = events
        self.pause = PAUSE[0]
        self.since = 0.0
        self.failures = 0  # in a row

    def connecting(self) -> None:
        """Note that a connection is about to be opened."""
        self.since = time.monotonic()

    def over(self) -> None:
        """Note that a sweep went well."""
        self.pause = PAUSE[0]
        self.failures = 0
        self.health.worked()

    def seconds(self, error: BaseException) -> float:
        """Note an error and return how long to wait."""
        self.failures += 1
        if sqlstate(error) in RACES or isinstance(error, TransactionLost):
            return self._after_a_race(error)
        if not isinstance(error, DATABASE_ERRORS):
            self.events.emit(
                "worker.error", f"unexpected: {headline(error)}", level=logging.CRITICAL
            )
        elif self._is_refusal(error):
            self.health.refused(error)
        elif not self._is_down(error):
            return random.uniform(0.0, min(0.01 * 2.0**self.failures, PAUSE[1]))  # noqa: S311
        self.pause = min(self.pause * 2, PAUSE[1])
        return self.pause * random.uniform(0.5, 1.0)  # noqa: S311

    def _after_a_race(self, error: BaseException) -> float:
        """Wait an instant; longer, and tell, when the races have no end."""
        if self.failures > MANY and isinstance(error, DATABASE_ERRORS):
            self.health.refused(error)
        longest = min(0.05 * 2.0 ** max(0, self.failures - MANY // 2), PAUSE[1])
        return random.uniform(longest / 10, longest)  # noqa: S311

    def _is_down(self, error: BaseException) -> bool:
        """Say whether the database is away; one connection that was ended does not mean it."""
        return self.failures > 1 and self.health.failed(self._plain(error), self.since)

    @staticmethod
    def _is_refusal(error: BaseException) -> bool:
        """Say whether the database works, but not this statement: a trigger, a missing right."""
        code = sqlstate(error)
        return code not in (None, UNDEFINED_TABLE) and not is_blameless(error)

    def _plain(self, error: BaseException) -> BaseException:
        if sqlstate(error) == UNDEFINED_TABLE:
            return no_table(self.task)
        return error
