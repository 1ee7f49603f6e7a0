"""Puts tasks back, for later, that must run alone and cannot: others run, and do not end.

Their starts with workers that died are counted with that, since it writes the row anew, and what
those workers have noted of it does not match any more. None is added.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

from pgtask_sa.admission import DIED, has_killed
from pgtask_sa.errors import WorkerDied
from pgtask_sa.execution import Execution
from pgtask_sa.presence import Deaths
from pgtask_sa.retry import Verdict
from pgtask_sa.settle import Claimed


def postpone(execution: Execution, task_ids: list[int], delay: float) -> None:
    """Put back what is still there and still suspected; all else is left to the next claim.

    Args:
        execution: of a lane that has rolled back its claim.
        task_ids: their numbers.
        delay: seconds until they are tried again.

    Raises:
        DBAPIError: the database is away; nothing was done with those that were not put back.
    """
    execution.pause()
    for task_id in task_ids:
        with execution.begin() as transaction:
            told = _put_back(execution, task_id, delay)
            if told is None:
                transaction.rollback()
        if told is not None:
            _tell(execution, *told, delay)


def _put_back(execution: Execution, task_id: int, delay: float) -> tuple[Claimed, Verdict] | None:
    """Put one back; None if there is nothing to put back, or if it has changed since."""
    admission = execution.admission
    assert admission is not None  # noqa: S101 - it has demanded this
    for claimed in execution.settler.reclaim(task_id):
        look = partial(admission.presence.look, admission.entry, [claimed])
        deaths = execution.face.aside(look)
        found = deaths.get(task_id, Deaths())
        counted = replace(claimed, uncounted=found.count)
        if found.taken or not _is_suspect(execution, counted):
            return None
        verdict = Verdict("retry", counted.attempts, delay=delay, reason="postponed")
        return counted, execution.settler.write(counted, verdict, WorkerDied(DIED))
    return None


def _is_suspect(execution: Execution, claimed: Claimed) -> bool:
    """Say whether it may run once more, and only alone."""
    policy = execution.handlers[claimed.task_type].policy
    return has_killed(claimed) and claimed.attempts < policy.max_attempts


def _tell(execution: Execution, claimed: Claimed, written: Verdict, delay: float) -> None:
    if written.action != "retry":  # the table does not take it back
        execution.settler.tell(claimed, written, WorkerDied(DIED), 0.0)
        return
    execution.events.emit(
        "task.postponed",
        f"{claimed} was there when a worker died, and must run alone; others run and do not end: "
        f"again in {delay:.3g} s",
        level=logging.WARNING,
        task_id=claimed.task_id,
        task_type=claimed.task_type,
        delay=round(delay, 3),
    )
