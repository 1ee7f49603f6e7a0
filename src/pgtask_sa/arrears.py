"""Attempts that could not be counted in their own transaction: it was lost.

Their rows are back by themselves, uncounted. Where the task is to blame, the attempt is counted in
a transaction of its own, before the lane claims again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy.exc import DBAPIError

from pgtask_sa.events import Events
from pgtask_sa.failures import READ_ONLY, chain, headline, is_blameless, sqlstate
from pgtask_sa.settle import Claimed, Settler, TransactionLost

MAX_BLAMELESS = 20
MOST_COUNTED = 10_000  # tasks that met failures which are nobody's fault
BEYOND_ITS_REACH = ("53", READ_ONLY, "57P02", "57P03")  # disk, memory; a standby; starting up


class Arrears:
    """What one lane owes; it outlives the lane's connection.

    Args:
        events: where it is told.
        blameless: task_id to how often it failed by nobody's fault; a worker's lanes share one.
    """

    def __init__(self, events: Events, blameless: dict[int, int] | None = None) -> None:
        self.events = events
        self.blameless = {} if blameless is None else blameless
        self.owed: list[TransactionLost] = []

    def bear(self, claimed: Claimed, trouble: BaseException | None) -> int:
        """Count a failure that is nobody's fault; 0 when this task had too many of its kind.

        Deadlocks and lost connections it may bring upon itself; not that the disk is full.
        """
        if len(self.blameless) > MOST_COUNTED:
            self.blameless.clear()
        count = self.blameless[claimed.task_id] = self.blameless.get(claimed.task_id, 0) + 1
        beyond = (sqlstate(trouble) or "").startswith(BEYOND_ITS_REACH)
        return count if beyond or count <= MAX_BLAMELESS else 0

    def blame(self, lost: TransactionLost, trouble: BaseException | None) -> bool:
        """Note that a lost transaction is the task's fault; False if it is not."""
        cause = lost.error or trouble
        innocent = not lost.ended and any(is_blameless(link) for link in chain(cause))
        if innocent and self.bear(lost.claimed, cause):
            self.events.emit(
                "transaction.lost",
                f"the transaction of {lost.claimed} was lost; it runs again",
                level=logging.WARNING,
                task_id=lost.claimed.task_id,
                task_type=lost.claimed.task_type,
            )
            return False
        self.owed.append(lost)
        return True

    def rescue(self, batch: Sequence[Claimed], lost: TransactionLost) -> None:
        """Note the rest of a batch, whose rows a handler may have committed away unrun."""
        if lost.ended:
            ids = [claimed.task_id for claimed in batch]
            rest = batch[ids.index(lost.claimed.task_id) + 1 :]
            self.owed += [
                TransactionLost(claimed, None, ended=True, unrun=True) for claimed in rest
            ]

    def pay(self, begin: Callable[[], Any], settler: Settler) -> None:
        """Count them, each in a transaction of its own."""
        while self.owed:
            try:
                with begin():
                    settler.settle_apart(self.owed[0])
            except DBAPIError as error:
                if error.connection_invalidated or is_blameless(error):
                    raise  # later, then
                told = headline(error, values=self.events.shows_values)
                self.events.emit("settle.failed", f"{self.owed[0]}: {told}", level=logging.CRITICAL)
                self.owed.pop(0)
                raise  # the task is free, and uncounted: at least its lane takes a rest
            self.owed.pop(0)
