"""A model of the queue, driven at random beside the real one: no task is lost, none done twice.

Enqueues, claims, outcomes, time limits, lost leases, cuts and crashes come in any order, between
any two round trips; there too another process may get its turn. After every step the database must
show what the model says: each committed task in exactly one place, with the attempts it used, and
with what its handler wrote exactly if it is done.

PGTASK_MODEL_SECONDS is for how long new examples are tried; 0 leaves it out. PGTASK_MODEL_SEED says
which: those of a run are repeated by its seed, as far as the threads and the server do the same
again. It is the same unless given; with "random" one is drawn.
PGTASK_MODEL_SHRINK=1 makes a failing example smaller, which takes minutes.
"""

from __future__ import annotations

import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import invariant, rule, run_state_machine_as_test
from model_database import ModelDatabase, UniqueTask
from model_fates import Fate, Job
from model_process import Process
from model_steps import die, only_if, pick_of, picks
from model_workers import WorkerRules
from waiting import wait_until

from pgtask_sa import Task

SECONDS = float(os.environ.get("PGTASK_MODEL_SECONDS", "30"))
SEED = os.environ.get("PGTASK_MODEL_SEED", "1")
EXAMPLES = 25  # with one seed
SHRINKS = os.environ.get("PGTASK_MODEL_SHRINK") == "1"


class QueueMachine(WorkerRules):
    """All rules, those of people too, and what must always be true."""

    # -- what people do ------------------------------------------------------------------------

    def _requeueable(self) -> list[Job]:
        """Return the dead that need not wait for an equal one that is being written."""
        return [job for job in self._jobs("dead") if not self._waits_for_equal(job)]

    def _waits_for_equal(self, job: Job) -> bool:
        if not self.is_unique or job.key is None:
            return False
        enqueued = [key for caller in self.callers for _, key in caller.tasks]
        return job.key in enqueued or any(each.holder for each in self._equal(job.key))

    @rule(pick=picks)
    @only_if(lambda self: self._requeueable())
    def requeue(self, pick: int) -> None:
        job = pick_of(self._requeueable(), pick)
        places = {each.fate.place for each in self._equal(job.key)}
        is_there = self.is_unique and bool(places & {"waiting", "leased"})
        assert self.database.requeue(job.task_id) != is_there
        self.tally["requeued"] += 1
        job.settle({Fate("gone" if is_there else "waiting", effects=job.fate.effects)})
        job.starts = job.forgiven = 0

    def _cancellable(self) -> list[Job]:
        """Return the tasks that nobody but a sound worker holds."""
        held = [job for job in self.jobs.values() if self._is_soundly_held(job)]
        return self._jobs("waiting", "leased") + held

    def _is_soundly_held(self, job: Job) -> bool:
        lane = job.holder
        return lane is not None and lane.is_busy and lane not in self.disturbed

    @rule(pick=picks)
    @only_if(lambda self: self._cancellable())
    def cancel(self, pick: int) -> None:
        job = pick_of(self._cancellable(), pick)
        lane, fate = job.holder, job.fate
        found = "leased" if fate.place == "leased" else "waiting" if lane is None else "running"
        assert self.database.cancel(job.task_id) == found
        self.tally[f"cancelled {found}"] += 1
        if lane is not None:
            self.disturbed.add(lane)
            self._rolled_back(lane)
        attempts = fate.attempts + self._deaths(job)
        job.settle({Fate("dead", attempts, "cancelled", fate.effects)})
        job.owner = None

    @rule()
    @only_if()
    def planner_is_told(self) -> None:
        self.database.analyze()

    # -- the database agrees -------------------------------------------------------------------

    @invariant()
    def looks_right(self) -> None:
        if self.is_new and not self.is_over:
            self.is_new = False
            self.tally["steps"] += 1
            self.agree()

    def agree(self) -> None:
        seen = self.database.look()
        unknown = (set(seen.fates) | set(seen.effects)) - set(self.jobs)
        assert not unknown, f"there is what was never committed: {unknown}"
        for task_id, job in self.jobs.items():
            gone = Fate("gone", effects=seen.effects.get(task_id, frozenset()))
            fate = seen.fates.get(task_id, gone)
            assert fate in job.fates, f"{fate}, and it should be {job}"
            job.is_seen(fate)
        self._check_locks(seen.locked)

    def _check_locks(self, locked: set[int]) -> None:
        alternatives = [ids for caller in self.callers for ids in caller.shared if len(ids) > 1]
        unsure: set[int] = set().union(*alternatives)
        expected = {
            job.task_id
            for job in self.jobs.values()
            if job.holder is not None or (self._shared(job) and job.fate.place != "gone")
        } - unsure
        if expected != locked - unsure:  # what two callers hold together does not show
            assert expected == self.database.locked() - unsure

    # -- the end -------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Let everything run to its end, with workers to whom nothing happens any more."""
        error = sys.exc_info()[1]
        has_failed = isinstance(error, Exception)  # not so if Hypothesis ends the example
        try:
            if error is None and not self.is_over:
                has_failed = True
                self._finish_all()
                has_failed = False
        finally:
            if has_failed:
                type(self).end = math.inf  # the example is run once more, and told
                print(*self.story, sep="\n")
            for caller in self.callers:
                caller.session.close()
            for process in self.processes:
                self._abandon(process)

    def _finish_all(self) -> None:
        for caller in [*self.callers]:
            self.callers.remove(caller)
            caller.session.close()
        while blocked := self._blocked():
            self._conclude(blocked[0], "return")
            self.agree()
        for lane in self._idle():
            lane.answers_itself = True
        while unfinished := self._jobs("waiting", "leased"):
            for job in self._jobs("leased"):
                self.database.end_lease(job.task_id)
                job.version += 1
            wait_until(self._ready, timeout=60, message=f"not due: {unfinished}")
            for lane in self._idle():
                self._claim(lane)
                self.agree()
        places = {job.fate.place for job in self.jobs.values()}
        assert places <= {"dead", "gone"}

    @staticmethod
    def _abandon(process: Process) -> None:
        busy = [lane for lane in process.lanes if lane.is_busy]
        if busy:
            process.crash()
        for lane in busy:
            with suppress(AssertionError):
                lane.obey(die)
        process.close()


def _drive(number: int) -> None:
    """Try some examples."""

    @seed(number)
    def machine() -> QueueMachine:
        return QueueMachine()

    options = settings(
        max_examples=EXAMPLES,
        stateful_step_count=60,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, *([Phase.shrink] if SHRINKS else [])],
    )
    run_state_machine_as_test(machine, settings=options)


def _figures(seeds: str, seconds: float) -> str:
    tally = QueueMachine.tally
    main = [f"{tally.pop(name, 0)} {name}" for name in ("examples", "steps", "tasks", "starts")]
    rest = [f"{name} {count}" for name, count in sorted(tally.items())]
    return f"{seeds}, {seconds:.0f} s, {', '.join(main)}; {', '.join(rest)}"


@pytest.mark.skipif(not SECONDS, reason="PGTASK_MODEL_SECONDS is 0")
@pytest.mark.direct  # it ends server processes, by the number that the driver knows
@pytest.mark.timeout(SECONDS + 570)
def test_the_queue_does_what_the_model_says(db_url: str, figures: Callable[[str], None]) -> None:
    """Whatever happens, each task is in one place, done once, and tried within its budget."""
    number = random.randrange(10**6) if SEED == "random" else int(SEED)
    start = time.monotonic()
    tables = {"plain": Task, "unique": UniqueTask}
    QueueMachine.databases = {name: ModelDatabase(db_url, each) for name, each in tables.items()}
    QueueMachine.tally = Counter()
    QueueMachine.end = start + SECONDS
    last = number
    try:
        _drive(last)
        while time.monotonic() < QueueMachine.end:
            last += 1
            _drive(last)
    finally:
        for database in QueueMachine.databases.values():
            database.close()
        figures(_figures(f"seeds {number} to {last}", time.monotonic() - start))
