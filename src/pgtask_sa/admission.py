"""Between claim and run: note what is in flight, and sort out what must not simply run.

* A task whose worker died while it ran has used up a start. The first time it runs again at once,
  alone: most workers that are killed are killed from outside. Then, if that worker had nothing else
  in flight, it is the culprit: it is put back as after any failed attempt, or buried. If it had,
  nobody can tell, and it runs again, alone.
* One whose handler did not come back in time, or lost its transaction, and whose start nobody has
  counted yet, is put back or buried: whoever claims it finds that noted; see `enforcement`.
* A task of the leased mode is not run in the claim's transaction: it is put back as leased, to run
  after the COMMIT.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from uuid import UUID, uuid4

from pgtask_sa import presence_statements
from pgtask_sa.calls import Face
from pgtask_sa.claim import ROW_VERSION
from pgtask_sa.errors import TaskFailed, WorkerDied
from pgtask_sa.failures import describe
from pgtask_sa.handlers import Handler
from pgtask_sa.presence import Deaths, Presence
from pgtask_sa.retry import Verdict
from pgtask_sa.settle import CUT_OFF as LOST
from pgtask_sa.settle import Claimed, Report, Settler, timed_out
from pgtask_sa.solitude import LOOK, MOMENT, Solitary

DIED = "the worker died while it ran this task"
CUT_OFF = "the lease of this task ran out: its worker died, stood still or was cut off"
KILLED = describe(WorkerDied(DIED))  # as it stands in the row of a task that did so
COMEBACK = 2.0  # seconds for a worker that has lost its connections, before its task is buried
ENOUGH = 2  # deaths beside others, until a task must be alone however long it takes


def has_killed(claimed: Claimed) -> bool:
    """Say whether a worker died while it ran this task, whoever it was that killed it."""
    return claimed.uncounted > 0 or claimed.values["last_error"] == KILLED


@dataclass
class Lease:
    """A task that this worker runs in the leased mode.

    Attributes:
        lost: it is not ours any more, as far as we know.
    """

    claimed: Claimed
    token: UUID
    seconds: float
    lost: bool = False

    @property
    def key(self) -> dict[str, object]:
        """The parameters that name it in a statement."""
        return {"leased_id": self.claimed.task_id, "token": self.token}


class Admission:
    """Decides for one lane what becomes of each task that it has claimed."""

    def __init__(
        self,
        presence: Presence,
        entry: int,
        face: Face,
        settler: Settler,
        handlers: Mapping[str, Handler],
        *,
        note: Callable[[Sequence[Claimed]], None],
    ) -> None:
        self.presence = presence
        self.entry = entry
        self.note = note
        self.face = face
        self.settler = settler
        self.handlers = handlers
        self.leases: list[Lease] = []  # granted in the transaction that is open
        self.alone = False  # nothing else runs in this process
        self._turn = presence_statements.try_solitude()

    def admit(self, batch: Sequence[Claimed]) -> tuple[list[Claimed], list[Report]]:
        """Return those of a batch that are to be run now, and what became of others.

        Raises:
            Solitary: some must run alone; the claim is to be rolled back.
            psycopg.Error: what is in flight could not be noted.
        """
        self.leases = []
        if not batch:
            return [], []
        batch = self._counted(batch)
        self._demand_solitude(batch)
        noted = [self._as_noted(claimed) for claimed in batch]
        if not all(claimed.in_flight and claimed in batch for claimed in noted):
            self.note(noted)
        reports = [self._count_death(claimed) for claimed in batch if self._is_culprit(claimed)]
        sound = [claimed for claimed in batch if not self._is_culprit(claimed)]
        for claimed in sound:
            if self.handlers[claimed.task_type].lease is not None:
                self._grant(claimed)
        return [c for c in sound if self.handlers[c.task_type].lease is None], reports

    def disown(self, claimed: Claimed) -> None:
        """Leave a start, whose transaction is lost, to whoever claims the row, as soon as that is.

        If it cannot be noted, the lane still owes it, and counts it if nobody is faster.
        """
        with suppress(Exception):
            claimed.noted = self.face.aside(partial(self.presence.disown, self.entry, claimed))

    def take_turn(self) -> None:
        """Wait until no other process runs a suspect, but not for long: it may be an innocent one.

        What dies together, as a container that is killed whole, is charged with a start whether it
        had begun or not.
        """
        deadline = time.monotonic() + MOMENT
        while not self.settler.connection.scalar(self._turn) and time.monotonic() < deadline:
            self.face.aside(partial(time.sleep, LOOK))

    def _counted(self, batch: Sequence[Claimed]) -> Sequence[Claimed]:
        if not self.presence.must_look(batch):
            return batch
        deaths = self.face.aside(lambda: self.presence.look(self.entry, batch))
        if any(self._is_end(claimed, deaths) for claimed in batch):
            deaths = self.face.aside(lambda: self.presence.look(self.entry, batch, COMEBACK))
        if not deaths:
            return batch
        found = [deaths.get(claimed.task_id, Deaths()) for claimed in batch]
        return [
            replace(
                claimed,
                uncounted=each.count,
                was_alone=each.alone,
                was_taken=each.taken,
                was_late=each.late,
            )
            for claimed, each in zip(batch, found, strict=True)
        ]

    def _is_end(self, claimed: Claimed, deaths: Mapping[int, Deaths]) -> bool:
        """Say whether a death would end a task that is not known to kill: it must be sure."""
        found = deaths.get(claimed.task_id)
        if found is None or claimed.values["last_error"] == KILLED:
            return False
        return claimed.attempts + found.count >= self._max_attempts(claimed)

    def _as_noted(self, claimed: Claimed) -> Claimed:
        """Mark one that is claimed and does not run in this transaction: nobody can die of it."""
        if self.handlers[claimed.task_type].lease is None and not self._is_culprit(claimed):
            return claimed
        return replace(
            claimed, values={**claimed.values, ROW_VERSION: -claimed.values[ROW_VERSION]}
        )

    def _demand_solitude(self, batch: Sequence[Claimed]) -> None:
        if self.alone:
            return
        suspects = [claimed for claimed in batch if self._is_suspect(claimed)]
        if suspects:
            strictly = any(self._was_there_often(claimed) for claimed in suspects)
            raise Solitary([claimed.task_id for claimed in suspects], strictly=strictly)

    def _is_suspect(self, claimed: Claimed) -> bool:
        if not claimed.attempts or self.handlers[claimed.task_type].lease is not None:
            return False
        return has_killed(claimed) and not self._is_culprit(claimed)

    def _was_there_often(self, claimed: Claimed) -> bool:
        is_last = claimed.attempts + 1 >= self._max_attempts(claimed)
        is_known = claimed.values["last_error"] == KILLED and claimed.attempts >= ENOUGH
        return claimed.uncounted >= ENOUGH or is_known or is_last

    def _is_culprit(self, claimed: Claimed) -> bool:
        """Say whether a worker died of it, or of something that must not be tried once more."""
        died = claimed.uncounted > 0 or claimed.values["lease_token"] is not None
        used_up = claimed.attempts >= self._max_attempts(claimed)
        again = claimed.was_taken or (claimed.was_alone and claimed.attempts > 1)
        return again or (died and used_up)

    def _max_attempts(self, claimed: Claimed) -> int:
        return self.handlers[claimed.task_type].policy.max_attempts

    def _count_death(self, claimed: Claimed) -> Report:
        handler = self.handlers[claimed.task_type]
        error: Exception = WorkerDied(DIED if claimed.uncounted else CUT_OFF)
        if claimed.was_taken:
            self.settler.forget_taken(claimed)
            late, lost = timed_out(handler.timeout or 0.0), TaskFailed(LOST)
            error = late if claimed.was_late else lost
        policy = handler.policy
        # several may have died of it, as they thought, before anybody counted
        surplus = min(max(claimed.attempts - policy.max_attempts, 0), claimed.uncounted)
        before = replace(claimed, uncounted=claimed.uncounted - surplus - 1)
        verdict = self.settler.judge(before, error, policy)
        return before, self.settler.write(before, verdict, error), error, 0.0

    def _grant(self, claimed: Claimed) -> None:
        """Lease a task to this lane; a lane runs one at a time, so the others go back."""
        if self.leases:
            unrun = Verdict("retry", claimed.attempts, reason="unrun")
            self.settler.write(claimed, unrun, WorkerDied(CUT_OFF))
            return
        seconds = self.handlers[claimed.task_type].lease or 0.0
        lease = Lease(claimed, uuid4(), seconds)
        self.settler.lease(claimed, lease.token, seconds)
        self.leases.append(lease)
