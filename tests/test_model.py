"""A model of the queue, driven at random beside the real one: no task is lost, none done twice.

Enqueues, claims, outcomes, time limits, lost leases, cuts and crashes come in any order, between
any two round trips. After every step the database must show what the model says: each committed
task in exactly one place, with the attempts it used, and with what its handler wrote exactly if it
is done.

PGTASK_MODEL_SECONDS is for how long new examples are tried.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from model_database import ModelDatabase
from model_fates import Fate, Job, Work
from model_process import Crashed, Fault, Lane, Plan, Process, register
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import sessionmaker
from waiting import wait_until

from pgtask_sa import (
    Discard,
    EnqueueBlocked,
    Retry,
    Snooze,
    Task,
    TaskRegistry,
    TaskSession,
)

SECONDS = float(os.environ.get("PGTASK_MODEL_SECONDS", "30"))
SHRINKS = os.environ.get("PGTASK_MODEL_SHRINK", "1") == "1"
PHASES = [Phase.generate, *([Phase.shrink] if SHRINKS else [])]
BUDGET = {"A": 2, "B": 3, "L": 2}  # task type to max_attempts; L is leased
WRITE = text("insert into effect values (:task_id, :n)")
RACE = text("do $$ begin raise sqlstate '40001'; end $$")
# Without these, statements that may run a sub-select again do so.
HOSTILE = ("hashjoin", "mergejoin", "hashagg", "sort", "material", "bitmapscan", "indexscan")
PLANS = [
    Plan((1,)),
    Plan((1, 1)),
    Plan((3,)),
    Plan((2, 1)),
    Plan((1, 2), HOSTILE),
]

faults = st.none() | st.builds(
    Fault,
    kind=st.sampled_from(["crash", "cut"]),
    when=st.sampled_from(["before", "after"]),
    countdown=st.integers(1, 12),
)
OWN = 0  # stands for a task that is not committed yet
picks = st.integers(0, 7)  # one of those that there are


def _raises(error: BaseException) -> Callable[[Any], bool]:
    def order(_session: Any) -> bool:
        raise error

    return order


def _races(session: Any) -> bool:
    session.execute(RACE)
    return True


ENDINGS: dict[str, Callable[[Any], bool]] = {
    "return": lambda _session: True,
    "fail": _raises(ValueError("as the model says")),
    "retry": _raises(Retry("as the model says", after=0)),
    "exit": _raises(SystemExit(1)),
    "snooze": _raises(Snooze(0)),
    "discard": _raises(Discard()),
    "race": _races,
}
OUTCOMES = {"retry": "fail", "exit": "fail"}
EXAMPLES = 10  # between two looks at the clock


class Caller(TaskSession):
    enqueue_lock_timeout = 0.02


class Enqueuing:
    """A caller's transaction that is open."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.tasks: list[tuple[Any, Any]] = []  # and their keys
        self.locked_keys: set[Any] = set()
        self.shared: list[set[int]] = []  # of each set it keeps one from being claimed


class QueueMachine(RuleBasedStateMachine):
    """The real queue and the model of it."""

    database: ModelDatabase
    examples = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).examples += 1
        self.jobs: dict[int, Job] = {}
        self.processes: list[Process] = []
        self.callers: list[Enqueuing] = []
        self.buried_entries: list[dict[int, int]] = []  # of dead lanes: task to its version
        self.noted: dict[Lane, dict[int, int]] = {}
        self.batch: dict[Lane, dict[int, Work | None]] = {}  # what each lane has claimed
        self.current: dict[Lane, int] = {}
        self.work: dict[Lane, Work] = {}
        self.disturbed: set[Lane] = set()  # whose connection was cut, or whose task was taken
        self.owed: dict[Lane, list[int]] = {}
        self.outcomes: dict[tuple[Lane, int], str] = {}  # also of those that did not count
        self.serial = 0
        self.tasks = TaskRegistry()
        for name, attempts in BUDGET.items():
            mode: Any = {"mode": "leased", "lease": 3600} if name == "L" else {}
            register(self.tasks, self.processes, name, max_attempts=attempts, **mode)
        self.database.empty()

    @initialize(plans=st.tuples(st.sampled_from(PLANS), st.sampled_from(PLANS)), seed=picks)
    def begin(self, plans: tuple[Plan, Plan], seed: int) -> None:
        self.chance = random.Random(seed)
        for plan in plans:
            self._add_process(plan)

    def _add_process(self, plan: Plan) -> None:
        self.processes.append(Process(plan, self.database, self.tasks, self.chance))

    # -- who there is --------------------------------------------------------------------------

    def _lanes(self, which: Callable[[Lane], bool]) -> list[Lane]:
        return [lane for process in self.processes for lane in process.lanes if which(lane)]

    def _idle(self) -> list[Lane]:
        return self._lanes(lambda lane: not lane.is_busy)

    def _blocked(self) -> list[Lane]:
        """Return the lanes in a handler that may use its connection without waiting."""
        return self._lanes(lambda lane: lane.is_busy and not self._would_wait(lane))

    def _sound(self) -> list[Lane]:
        return [lane for lane in self._blocked() if lane not in self.disturbed]

    def _would_wait(self, lane: Lane) -> bool:
        return self._job(lane).is_leased and self._job(lane).holder is not None

    def _jobs(self, *places: str) -> list[Job]:
        free = [job for job in self.jobs.values() if job.holder is None and not self._shared(job)]
        return [job for job in free if job.fate.place in places]

    def _shared(self, job: Job) -> bool:
        return any(job.task_id in ids for caller in self.callers for ids in caller.shared)

    def _job(self, lane: Lane) -> Job:
        return self.jobs[self.current[lane]]

    def _able(self) -> list[Lane]:
        """Return the lanes in a handler whose next statement would succeed."""
        return [lane for lane in self._sound() if not self.work[lane].has_swallowed]

    # -- enqueue -------------------------------------------------------------------------------

    @precondition(lambda self: len(self.callers) < 2)
    @rule()
    def caller_begins(self) -> None:
        session = sessionmaker(self.database.admin, class_=Caller)()
        self.serial += 1
        session.execute(text("select setseed(:seed)"), {"seed": 1 / (1 + self.serial)})
        self.callers.append(Enqueuing(session))

    @precondition(lambda self: self.callers)
    @rule(
        pick=picks,
        kind=st.sampled_from(list(BUDGET)),
        savepoint=st.sampled_from(["", "keep", "lose"]),
    )
    def enqueue(self, pick: int, kind: str, savepoint: str) -> None:
        caller = _pick(self.callers, pick)
        self.serial += 1
        with _Savepoint(caller.session, savepoint):
            task = caller.session.enqueue(kind, {"n": self.serial})
        if savepoint != "lose":
            caller.tasks.append((task, None))

    @precondition(lambda self: self.callers)
    @rule(
        pick=picks,
        kind=st.sampled_from(list(BUDGET)),
        savepoint=st.sampled_from(["", "keep", "lose"]),
    )
    def coalesce(self, pick: int, kind: str, savepoint: str) -> None:
        caller = _pick(self.callers, pick)
        is_blocked = any(kind in each.locked_keys for each in self.callers if each is not caller)
        equal = {job.task_id for job in self.jobs.values() if job.key == kind and job.is_waiting()}
        own = any(key == kind for _, key in caller.tasks)
        with _Savepoint(caller.session, savepoint):
            try:
                task = caller.session.enqueue(kind, {"key": kind}, coalesce=True)
            except EnqueueBlocked:
                assert is_blocked
                return
        assert not is_blocked
        assert (task is None) == bool(equal or own)
        if savepoint != "lose":
            self._note_coalesced(caller, task, kind, equal | {OWN} if own else equal)

    def _note_coalesced(self, caller: Enqueuing, task: Any, key: str, equal: set[int]) -> None:
        caller.locked_keys.add(key)
        if task is not None:
            caller.tasks.append((task, key))
        else:
            caller.shared.append(equal)

    @precondition(lambda self: self.callers)
    @rule(pick=picks)
    def caller_commits(self, pick: int) -> None:
        caller = _pick(self.callers, pick)
        caller.session.commit()
        self.callers.remove(caller)
        for task, key in caller.tasks:
            self._add_job(task.task_id, task.task_type, key)
        caller.session.close()

    @precondition(lambda self: self.callers)
    @rule(pick=picks)
    def caller_rolls_back(self, pick: int) -> None:
        caller = _pick(self.callers, pick)
        self.callers.remove(caller)
        caller.session.rollback()
        caller.session.close()

    @rule(kind=st.sampled_from(list(BUDGET)))
    def enqueue_and_commit(self, kind: str) -> None:
        with sessionmaker(self.database.admin, class_=Caller)() as session:
            self.serial += 1
            session.execute(text("select setseed(:seed)"), {"seed": 1 / (1 + self.serial)})
            task = session.enqueue(kind, {"n": self.serial})
            session.commit()
        self._add_job(task.task_id, kind)

    def _add_job(self, task_id: int, kind: str, key: Any = None) -> None:
        self.jobs[task_id] = Job(task_id, kind, BUDGET[kind], kind == "L", key)

    # -- claim, run, settle --------------------------------------------------------------------

    @precondition(lambda self: self._idle())
    @rule(pick=picks, fault=faults)
    def claim(self, pick: int, fault: Fault | None) -> None:
        self._claim(_pick(self._idle(), pick), fault)

    @precondition(lambda self: self._idle())
    @rule(pick=picks, kind=st.sampled_from(list(BUDGET)))
    def claim_undisturbed(self, pick: int, kind: str) -> None:
        if not self.database.look().ready:
            self.enqueue_and_commit(kind=kind)
        self._claim(_pick(self._idle(), pick))

    def _claim(self, lane: Lane, fault: Fault | None = None) -> None:
        ready = self.database.look().ready
        is_open = lane.process.gate.enter(lane)
        lane.process.gate.leave(lane)
        self.owed[lane] = lane.owed()
        lane.claim(replace(fault) if fault else None)
        if ready and is_open and fault is None:
            assert any(entry[0] in ("note", "waits") for entry in lane.log), (
                "there was something to claim"
            )
        self._follow(lane)

    @precondition(lambda self: self._able())
    @rule(pick=picks)
    def handler_writes(self, pick: int) -> None:
        self._write(_pick(self._able(), pick))

    def _write(self, lane: Lane) -> None:
        self.serial += 1
        given = {"task_id": self.current[lane], "n": self.serial}
        self._go_on(lane, lambda session: session.execute(WRITE, given))
        self.work[lane].effects.append(self.serial)

    @precondition(lambda self: self._able())
    @rule(pick=picks)
    def handler_enqueues(self, pick: int) -> None:
        lane = _pick(self._able(), pick)
        ids: list[int] = []
        self._go_on(lane, lambda session: ids.append(_enqueue_now(session)))
        self.work[lane].children += ids

    @precondition(lambda self: self._able())
    @rule(pick=picks)
    def handler_writes_what_fails_at_the_end(self, pick: int) -> None:
        lane = _pick(self._able(), pick)
        given = [{"task_id": self.current[lane], "n": -lane.number}] * 2
        self._go_on(lane, lambda session: session.execute(WRITE, given))
        self.work[lane].has_double = True

    @precondition(lambda self: self._able())
    @rule(pick=picks)
    def handler_swallows_an_error(self, pick: int) -> None:
        lane = _pick(self._able(), pick)
        self._go_on(lane, _swallow)
        self.work[lane].has_swallowed = True

    @precondition(lambda self: self._sound())
    @rule(pick=picks)
    def handler_rolls_back(self, pick: int) -> None:
        lane = _pick(self._sound(), pick)
        self._go_on(lane, lambda session: session.rollback())
        self.work[lane].undo()

    @precondition(lambda self: self._able())
    @rule(pick=picks)
    def handler_commits(self, pick: int) -> None:
        lane = _pick(self._able(), pick)
        job, work = self._job(lane), self.work[lane]
        if not job.is_leased:
            self._go_on(lane, lambda session: session.commit())
            work.keep()
        elif work.has_double or job.owner is not lane:
            self._end(lane, "fail", _does(lambda session: session.commit()))
        else:
            self._go_on(lane, lambda session: session.commit())
            fate = job.fate
            job.fates = {replace(fate, effects=fate.effects | frozenset(work.effects))}
            self._born(work.children)
            work.undo()

    @precondition(lambda self: self._blocked())
    @rule(
        pick=picks,
        how=st.sampled_from(["return", *ENDINGS]),
        fault=st.none() | faults,
        writes=st.booleans(),
    )
    def handler_ends(self, pick: int, how: str, fault: Fault | None, writes: bool) -> None:
        lane = _pick(self._blocked(), pick)
        if writes and lane in self._able():
            self._write(lane)
        if how == "race" and (self.work[lane].has_swallowed or lane in self.disturbed):
            how = "fail"
        outcome = self.work[lane].returns() if how == "return" else OUTCOMES.get(how, how)
        self._end(lane, outcome, ENDINGS[how], fault)

    @precondition(lambda self: self._blocked())
    @rule(pick=picks)
    def handler_returns(self, pick: int) -> None:
        lane = _pick(self._blocked(), pick)
        self._end(lane, self.work[lane].returns(), ENDINGS["return"])

    def _go_on(self, lane: Lane, what: Callable[[Any], Any]) -> None:
        lane.obey(_does(what))
        self._follow(lane)
        assert lane.is_busy, "the handler was to go on"

    def _end(self, lane: Lane, outcome: str, order: Any, fault: Fault | None = None) -> None:
        job, work = self._job(lane), self.work[lane]
        work.outcome = self.outcomes[lane, job.task_id] = outcome
        lane.obey(order, replace(fault) if fault else None)
        if job.is_leased and job.owner is lane:
            hit = any(entry[0] in ("cut", "crash") for entry in lane.log)
            self._leased_end(lane, job, work, hit or lane in self.disturbed)
        self._follow(lane)

    def _leased_end(self, lane: Lane, job: Job, work: Work, is_unsure: bool) -> None:
        """Settle a leased task; if its connection was lost meanwhile, it may be as it was."""
        fate = job.fate
        after = job.after(fate, work.outcome, fate.attempts, work.kept)
        fates = {after} | self._merged(job, {after})
        if is_unsure:
            fates |= {fate, job.after(fate, "race", fate.attempts, [])}
        if is_unsure or work.outcome in ("snooze", "race", "stop"):
            job.forgiven += 1
        if work.outcome == "done" and not (is_unsure and job.task_id in self.database.look().fates):
            self._born(work.kept_children)
        job.settle(fates)
        job.owner = None

    def _born(self, task_ids: list[int]) -> None:
        for task_id in task_ids:
            self._add_job(task_id, "A")

    def _merged(self, job: Job, fates: set[Fate]) -> set[Fate]:
        """Return the fates of one that vanishes, since an equal one waits."""
        equal = [
            other
            for other in self.jobs.values()
            if other is not job and other.key == job.key is not None
        ]
        if not any(fate.place == "waiting" for other in equal for fate in other.fates):
            return set()
        return {Fate("gone", effects=f.effects) for f in fates if f.place == "waiting"}

    # -- what the log of a lane tells ----------------------------------------------------------

    def _follow(self, lane: Lane) -> None:
        """Do in the model what a lane did, in that order."""
        log, lane.log = lane.log, []
        for name, *given in log:
            getattr(self, f"_on_{name}")(lane, *given)
        if lane.process in self.processes and lane.process.is_dead:
            self._after_crash(lane.process)

    def _on_note(self, lane: Lane, ids: list[int]) -> None:
        self._rolled_back(lane)
        unknown = set(ids) - set(self.jobs)
        assert not unknown, f"claimed what was never committed: {unknown}"
        self.noted[lane] = {task_id: self.jobs[task_id].version for task_id in ids}
        for task_id in ids:
            job = self.jobs[task_id]
            assert job.holder is None, f"claimed twice: {job}"
            self._break_shares(task_id)
            job.holder = lane
        self.batch[lane] = dict.fromkeys(ids)

    def _break_shares(self, task_id: int) -> None:
        for caller in self.callers:
            for ids in caller.shared:
                ids.discard(task_id)
                assert ids, "claimed what an open enqueue was coalesced with"

    def _on_start(self, lane: Lane, task_id: int, attempt: int) -> None:
        job = self.jobs[task_id]
        work = self.work[lane] = Work(outcome="done" if lane.answers_itself else None)
        self.current[lane] = task_id
        if lane in self.disturbed and job.holder is not lane:
            return  # it does not know yet that its transaction is lost: for nothing, again
        if job.is_leased:
            job.owner = lane
            job.fates = {fate for fate in job.fates if fate.place == "leased"}
            expected = job.fate.attempts
        else:
            assert job.holder is lane, f"started what it does not hold: {job}"
            self.batch[lane][task_id] = work
            expected = job.fate.attempts + self._deaths(job) + 1
        job.starts += 1
        assert expected == attempt
        assert attempt <= job.max_attempts
        assert job.starts <= job.max_attempts + job.forgiven, f"started too often: {job}"
        if job.is_leased and lane.answers_itself:
            self._leased_end(lane, job, work, is_unsure=False)

    def _deaths(self, job: Job) -> int:
        return sum(entry.get(job.task_id) == job.version for entry in self.buried_entries)

    def _on_commit(self, lane: Lane) -> None:
        batch = self.batch.pop(lane, {})
        for task_id, work in batch.items():
            self._settled(self.jobs[task_id], work)
        if not batch and self.owed.get(lane):
            job = self.jobs[self.owed[lane].pop(0)]
            self._paid(job, self.outcomes.get((lane, job.task_id), "fail"))

    def _settled(self, job: Job, work: Work | None) -> None:
        fate, deaths = job.fate, self._deaths(job)
        job.holder = None
        if work is None or work.outcome is None:  # not run, or not yet
            fates = job.admitted(fate, deaths)
            job.owner = None
        else:
            attempt = fate.attempts + deaths + 1
            fates = {job.after(fate, work.outcome, attempt, work.kept)}
            job.forgiven += work.outcome in ("snooze", "race")
            self._born(work.kept_children if work.outcome == "done" else [])
        job.settle(fates | self._merged(job, fates))

    def _paid(self, job: Job, outcome: str) -> None:
        """Note that a lane counted an attempt afterwards, if the task was free."""
        if not (job.is_waiting() and job.fate.place == "waiting"):
            return
        attempt = job.fate.attempts + self._deaths(job) + 1
        outcome = outcome if outcome in ("discard", "snooze") else "fail"
        failed = {job.after(job.fate, outcome, attempt, [])}
        if not self._shared(job):
            job.settle(failed | self._merged(job, failed))

    def _on_waits(self, lane: Lane) -> None:
        self._rolled_back(lane)

    def _on_cut(self, lane: Lane) -> None:
        self.disturbed.add(lane)

    _on_crash = _on_cut

    def _on_end(self, lane: Lane, error: BaseException | None) -> None:
        self._rolled_back(lane)
        if error is not None and lane not in self.disturbed:
            raise AssertionError(f"a lane failed: {error!r}") from error
        if lane in self.disturbed:
            lane.disconnect()  # it may not know yet that its connection is lost
        self.disturbed.discard(lane)

    def _rolled_back(self, lane: Lane) -> None:
        for task_id, work in self.batch.pop(lane, {}).items():
            self.jobs[task_id].holder = None
            if work is not None and not lane.process.is_dead:  # else the death is counted
                self.jobs[task_id].forgiven += 1

    # -- what happens to workers ---------------------------------------------------------------

    @precondition(lambda self: self._lanes(lambda lane: lane.is_busy))
    @rule(pick=picks)
    def crash(self, pick: int) -> None:
        process = _pick(self.processes, pick)
        process.crash()
        self._after_crash(process)

    def _after_crash(self, process: Process) -> None:
        self.processes.remove(process)
        for lane in process.lanes:
            self.disturbed.add(lane)
            if lane.is_busy:
                lane.obey(_die)
                self._follow(lane)
            self.buried_entries.append(self.noted.get(lane, {}))
        self._disown(process)
        process.close()
        self._add_process(process.plan)

    def _disown(self, process: Process) -> None:
        for job in self.jobs.values():
            if job.owner in process.lanes:
                job.owner = None

    @precondition(lambda self: self._sound())
    @rule(pick=picks)
    def connection_is_cut(self, pick: int) -> None:
        lane = _pick(self._sound(), pick)
        self.database.kill({lane.pid()})
        self.disturbed.add(lane)
        self._rolled_back(lane)

    @precondition(lambda self: self._sound())
    @rule(pick=picks)
    def time_is_over(self, pick: int) -> None:
        lane = _pick(self._sound(), pick)
        job = self._job(lane)
        lane.process.watchdog.expire(lane, lane.execution.running)
        self.disturbed.add(lane)
        if job.is_leased and job.owner is not lane:
            return
        deaths = 0 if job.is_leased else self._deaths(job) + 1
        failed = {job.failed(job.fate, job.fate.attempts + deaths)}
        job.settle(failed | self._merged(job, failed))
        job.owner = job.holder = None
        self.batch.get(lane, {}).pop(job.task_id, None)
        self._rolled_back(lane)

    @precondition(lambda self: self._lanes(lambda lane: lane.is_busy))
    @rule(pick=picks)
    def worker_stops(self, pick: int) -> None:
        process = _pick(self.processes, pick)
        busy = [lane for lane in process.lanes if lane.is_busy]
        if any(lane not in self._blocked() for lane in busy):
            return
        for lane in process.lanes:
            lane.execution_is_cut()
        for lane in busy:
            is_cut = lane in self.disturbed
            self.disturbed.add(lane)
            self._end(lane, "stop", ENDINGS["return"])
            assert not lane.is_busy, is_cut
        self.processes.remove(process)
        process.close()
        self._add_process(process.plan)

    @precondition(lambda self: self._jobs("leased"))
    @rule(pick=picks)
    def lease_runs_out(self, pick: int) -> None:
        job = _pick(self._jobs("leased"), pick)
        self.database.end_lease(job.task_id)
        job.version += 1

    @precondition(lambda self: [each for each in self._sound() if self._job(each).is_leased])
    @rule(pick=picks)
    def lease_is_renewed(self, pick: int) -> None:
        lane = _pick([each for each in self._sound() if self._job(each).is_leased], pick)
        lane.process.keeper._prolong(lane.execution.lease)
        self._job(lane).version += self._job(lane).owner is lane

    @rule(pick=picks)
    def worker_looks_after_the_dead(self, pick: int) -> None:
        _pick(self.processes, pick).presence.look_after()

    # -- what people do ------------------------------------------------------------------------

    @precondition(lambda self: self._jobs("dead"))
    @rule(pick=picks)
    def requeue(self, pick: int) -> None:
        job = _pick(self._jobs("dead"), pick)
        self.database.requeue(job.task_id)
        job.settle({Fate("waiting", effects=job.fate.effects)})
        job.starts = job.forgiven = 0

    @precondition(lambda self: self._jobs("waiting", "leased"))
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        job = _pick(self._jobs("waiting", "leased"), pick)
        self.database.cancel(job.task_id)
        counts = {job.fate.attempts, job.fate.attempts + self._deaths(job)}
        job.settle({Fate("dead", count, "cancelled", job.fate.effects) for count in counts})
        job.owner = None

    # -- the database agrees -------------------------------------------------------------------

    @invariant()
    def agree(self) -> None:
        seen = self.database.look()
        unknown = (set(seen.fates) | set(seen.effects)) - set(self.jobs)
        assert not unknown, f"there is what was never committed: {unknown}"
        for task_id, job in self.jobs.items():
            gone = Fate("gone", effects=seen.effects.get(task_id, frozenset()))
            fate = seen.fates.get(task_id, gone)
            assert fate in job.fates, f"{fate}, and it should be {job}"
            job.fates = {fate}
            self._check_lock(job, task_id in seen.locked)

    def _check_lock(self, job: Job, is_locked: bool) -> None:
        if not any(job.task_id in ids and len(ids) > 1 for c in self.callers for ids in c.shared):
            expected = job.holder is not None or self._shared(job)
            assert expected == is_locked, f"locked: {is_locked}, and it should be {job}"

    # -- the end -------------------------------------------------------------------------------

    def teardown(self) -> None:
        """Let everything run to its end, with workers to whom nothing happens any more."""
        try:
            if sys.exc_info()[0] is None:
                self._finish_all()
        finally:
            for caller in self.callers:
                caller.session.close()
            for process in self.processes:
                self._abandon(process)

    def _finish_all(self) -> None:
        for caller in [*self.callers]:
            self.callers.remove(caller)
            caller.session.close()
        while blocked := self._blocked():
            self._end(blocked[0], self.work[blocked[0]].returns(), ENDINGS["return"])
            self.agree()
        for lane in self._idle():
            lane.answers_itself = True
        while unfinished := self._jobs("waiting", "leased"):
            for job in self._jobs("leased"):
                self.database.end_lease(job.task_id)
                job.version += 1
            wait_until(lambda: self.database.look().ready, message=f"not due: {unfinished}")
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
                lane.obey(_die)
        process.close()


def _pick(choices: list[Any], number: int) -> Any:
    return choices[number % len(choices)]


def _does(what: Callable[[Any], Any]) -> Callable[[Any], bool]:
    def order(session: Any) -> bool:
        what(session)
        return False

    return order


def _die(_session: Any) -> bool:
    raise Crashed


def _swallow(session: Any) -> None:
    with suppress(DBAPIError):
        session.execute(text("select 1/0"))


def _enqueue_now(session: Any) -> int:
    task = session.enqueue("A", {"child": True})
    session.flush()
    return task.task_id


class _Savepoint:
    """A savepoint of the caller that is kept or lost, or none."""

    def __init__(self, session: Any, what: str) -> None:
        self.what = what
        self.savepoint = session.begin_nested() if what else None

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        if self.what == "keep":
            self.savepoint.commit()
        elif self.what == "lose":
            self.savepoint.rollback()


@pytest.mark.skipif(
    "PGTASK_MODEL_SECONDS" not in os.environ,
    reason="by `make soak` only: about every second run of it still ends in an alarm",
)
@pytest.mark.timeout(SECONDS + 400)  # a failure is made smaller, which takes its time
def test_the_queue_does_what_the_model_says(db_url: str) -> None:
    """Whatever happens, each task is in one place, done once, and tried within its budget."""
    QueueMachine.database = ModelDatabase(db_url, Task)
    options = settings(
        max_examples=EXAMPLES,
        stateful_step_count=30,
        deadline=None,
        database=None,
        print_blob=True,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=PHASES,
    )
    end = time.monotonic() + SECONDS
    try:
        while time.monotonic() < end:
            run_state_machine_as_test(QueueMachine, settings=options)
    finally:
        QueueMachine.database.close()
    print(f"{QueueMachine.examples} examples")
