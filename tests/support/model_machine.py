"""The state of the model, and what the log of a lane makes of it. The rules stand beside it."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize
from model_database import ModelDatabase
from model_fates import Fate, Job, Work
from model_process import Fault, Lane, Plan, Process, register
from model_steps import die, does, picks

from pgtask_sa import TaskRegistry

BUDGET = {"A": 2, "B": 3, "L": 2}  # task type to max_attempts; L is leased
# Without these, statements that may run a sub-select again do so.
HOSTILE = ("hashjoin", "mergejoin", "hashagg", "sort", "material", "bitmapscan", "indexscan")
PLANS = [
    Plan((1,)),
    Plan((1, 1)),
    Plan((3,)),
    Plan((2, 1)),
    Plan((1, 2), HOSTILE),
]


class Enqueuing:
    """A caller's transaction that is open."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.tasks: list[tuple[Any, Any]] = []  # and their keys
        self.locked_keys: set[Any] = set()
        self.shared: list[set[int]] = []  # of each set it keeps one from being claimed


class Machine(RuleBasedStateMachine):
    """The real queue and the model of it."""

    databases: dict[str, ModelDatabase]  # with a table of each kind
    tally: Counter[str]  # what was driven, in all examples
    end: float  # of the time that there is

    def __init__(self) -> None:
        super().__init__()
        self.is_over = time.monotonic() > self.end  # then the rest is only drawn
        self.is_new = False  # something has happened that is to be looked at
        self.story: list[str] = []  # to be told when something is wrong
        self.jobs: dict[int, Job] = {}
        self.processes: list[Process] = []
        self.callers: list[Enqueuing] = []
        self.buried_entries: list[dict[int, int]] = []  # of dead lanes: task to its version
        self.noted: dict[Lane, dict[int, int]] = {}
        self.batch: dict[Lane, dict[int, Work | None]] = {}  # what each lane has claimed
        self.found: dict[tuple[Lane, int], tuple[int, int]] = {}  # version and deaths then
        self.leases: dict[tuple[Lane, int], int] = {}  # how often it was settled when granted
        self.current: dict[Lane, int] = {}
        self.work: dict[Lane, Work] = {}
        self.disturbed: set[Lane] = set()  # whose connection was cut, or whose task was taken
        self.owed: dict[Lane, list[int]] = {}
        self.left: dict[tuple[Lane, int], int] = {}  # starts that anybody may count: the version
        self.disowned: set[tuple[Lane, int]] = set()  # and those that somebody may have counted
        self.outcomes: dict[tuple[Lane, int], str] = {}  # also of those that did not count
        self.serial = 0

    @initialize(
        table=st.sampled_from(["plain", "plain", "unique"]),
        plans=st.tuples(st.sampled_from(PLANS), st.sampled_from(PLANS)),
        seed=picks,
        waiting=st.lists(st.sampled_from(list(BUDGET)), max_size=6),
    )
    def begin(self, table: str, plans: tuple[Plan, Plan], seed: int, waiting: list[str]) -> None:
        if self.is_over:
            return
        self.tally["examples"] += 1
        self.is_unique = table == "unique"
        self.database = self.databases[table]
        self.database.empty()
        self.tasks = TaskRegistry(task_class=self.database.task_class)
        for name, attempts in BUDGET.items():
            mode: Any = {"mode": "leased", "lease": 3600} if name == "L" else {}
            register(self.tasks, self.processes, name, max_attempts=attempts, **mode)
        self.chance = random.Random(seed)
        self.started = 0
        for plan in plans:
            self._add_process(plan)
        for kind in waiting:
            self.enqueue_and_commit(kind=kind)

    def _add_process(self, plan: Plan) -> None:
        self.started += 1
        process = Process(plan, self.database, self.tasks, self.chance, self.started)
        for lane in process.lanes:
            lane.let_in = lambda pick, lane=lane: self._let_in(lane, pick)
        self.processes.append(process)

    def _let_in(self, lane: Lane, pick: int) -> Lane | None:
        """Have a lane of another process claim, in the middle of what this one does."""
        idle = [each for each in self._idle() if each.process is not lane.process]
        # it would owe a count of what this one may have claimed already, but not noted
        others = [each for each in idle if not each.owed()]
        if lane.execution is not None and lane.execution.lease is not None:
            others = [each for each in others if each.batch_size == 1]  # keeps no lease locked
        if not others:
            return None
        other = others[pick % len(others)]
        self.owed[other] = other.owed()
        other.claim()
        return other

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

    def _equal(self, key: Any) -> list[Job]:
        return [job for job in self.jobs.values() if job.key == key is not None]

    def _ready(self) -> set[int]:
        """Return the tasks that the next claim could take."""
        ready = self.database.look().ready
        return {each for each in ready if not self._shared(self.jobs[each])}

    def _add_job(self, task_id: int, kind: str, key: Any = None) -> None:
        self.tally["tasks"] += 1
        self.jobs[task_id] = Job(task_id, kind, BUDGET[kind], kind == "L", key)

    def _born(self, task_ids: list[int]) -> None:
        for task_id in task_ids:
            self._add_job(task_id, "A")

    # -- steps of a lane -----------------------------------------------------------------------

    def _claim(self, lane: Lane, fault: Fault | None = None) -> None:
        ready = self._ready() - set(lane.owed())  # which may be buried before it claims
        is_open = lane.process.gate.enter(lane)
        lane.process.gate.leave(lane)
        self.owed[lane] = lane.owed()
        lane.claim(replace(fault) if fault else None)
        if ready and is_open and fault is None:
            assert any(entry[0] in ("claimed", "waits") for entry in lane.log), (
                f"there was something to claim for {lane}: {ready}; it did {lane.log}"
            )
        self._follow(lane)

    def _go_on(self, lane: Lane, what: Callable[[Any], Any]) -> None:
        lane.obey(does(what))
        self._follow(lane)
        assert lane.is_busy, "the handler was to go on"

    def _end(self, lane: Lane, outcome: str, order: Any, fault: Fault | None = None) -> None:
        job, work = self._job(lane), self.work[lane]
        work.outcome = self.outcomes[lane, job.task_id] = outcome
        mode = "leased" if job.is_leased else "plain"
        self.tally[f"{mode} {outcome}"] += 1
        lane.obey(order, replace(fault) if fault else None)
        if work.is_aborted and fault is None and outcome != "stop":
            assert job.task_id in lane.owed(), f"{lane} aborted its transaction, and owes nothing"
        if job.is_leased and job.owner is lane and not self._was_robbed(lane, job):
            hit = any(entry[0] in ("cut", "crash") for entry in lane.log)
            self._leased_end(lane, job, work, hit or lane in self.disturbed)
        elif job.is_leased:
            self.tally["lease was lost"] += 1
        self._follow(lane)

    @staticmethod
    def _was_robbed(lane: Lane, job: Job) -> bool:
        """Say whether a rival took a leased task before its lane committed the end."""
        names = [entry[0] for entry in lane.log]
        before = names[: names.index("commit")] if "commit" in names else names
        if "rival" not in before:
            return False
        rival = lane.log[before.index("rival")][1].log
        claimed = any(entry[0] == "claimed" and job.task_id in entry[1] for entry in rival)
        return claimed and ("commit",) in rival

    def _leased_end(self, lane: Lane, job: Job, work: Work, is_unsure: bool) -> None:
        """Settle a leased task; if its connection was lost meanwhile, it may be as it was."""
        fate = job.fate
        after = job.after(fate, work.outcome, fate.attempts, work.kept)
        fates = {after} | self._merged(job, {after})
        if is_unsure:
            fates |= {job.after(fate, "race", fate.attempts, [])}
        if is_unsure or work.outcome in ("snooze", "race", "stop"):
            job.forgiven += 1
        if work.outcome == "done" and not (is_unsure and job.task_id in self.database.look().fates):
            self._born(work.kept_children)
        (job.seems_settled if is_unsure else job.settle)(fates)
        job.owner = None

    def _merged(self, job: Job, fates: set[Fate]) -> set[Fate]:
        """Return the fates of one that vanishes, since an equal one waits."""
        equal = [other for other in self._equal(job.key) if other is not job]
        if not any(fate.place == "waiting" for other in equal for fate in other.fates):
            return set()
        return {Fate("gone", effects=f.effects) for f in fates if f.place == "waiting"}

    # -- what the log of a lane tells ----------------------------------------------------------

    def _follow(self, lane: Lane) -> None:
        """Do in the model what a lane did, in that order."""
        log, lane.log = lane.log, []
        self.story.append(f"{lane} {log}")
        for name, *given in log:
            getattr(self, f"_on_{name}")(lane, *given)
        if lane.process in self.processes and lane.process.is_dead:
            self._after_crash(lane.process)

    def _on_rival(self, _lane: Lane, rival: Lane) -> None:
        self.tally["rivals"] += 1
        self._follow(rival)

    def _on_note(self, lane: Lane, ids: list[int]) -> None:
        self.noted[lane] = {task_id: self.jobs[task_id].version for task_id in ids}

    def _on_claimed(self, lane: Lane, ids: list[int]) -> None:
        self._rolled_back(lane)
        unknown = set(ids) - set(self.jobs)
        assert not unknown, f"claimed what was never committed: {unknown}"
        for task_id in ids:
            job = self.jobs[task_id]
            assert job.holder is None, f"claimed twice: {job}"
            self._break_shares(task_id)
            if len(job.fates) > 1:  # granted a moment ago, or put back: only that can be claimed
                job.fates = {fate for fate in job.fates if fate.place == "waiting"}
            job.holder = lane
            job.deaths = self._deaths(job)
            job.is_left = self._left(job) > 0
            self.found[lane, task_id] = (job.version, job.deaths)
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
        if self._is_for_nothing(lane, job):
            self.tally["starts for nothing"] += 1
            return
        if job.is_leased:
            job.owner = lane
            job.fates = {fate for fate in job.fates if fate.place == "leased"}
            expected = job.fate.attempts
        else:
            assert job.holder is lane, f"started what it does not hold: {job}"
            self.batch[lane][task_id] = work
            expected = job.fate.attempts + job.deaths + 1
        job.starts += 1
        self.tally["starts"] += 1
        assert expected == attempt, f"{lane} started {job} as attempt {attempt}"
        assert attempt <= job.max_attempts
        assert job.starts <= job.max_attempts + job.forgiven, f"started too often: {job}"
        if job.is_leased and lane.answers_itself:
            self._leased_end(lane, job, work, is_unsure=False)

    def _is_for_nothing(self, lane: Lane, job: Job) -> bool:
        """Say whether it starts what it has lost, and cannot know."""
        if job.is_leased:
            return self.leases.get((lane, job.task_id)) != job.settled
        return lane in self.disturbed and job.holder is not lane

    def _on_commit(self, lane: Lane) -> None:
        batch = self.batch.pop(lane, {})
        for task_id, work in batch.items():
            self._settled(lane, self.jobs[task_id], work)
        if not batch and self.owed.get(lane):
            job = self.jobs[self.owed[lane].pop(0)]
            self._paid(lane, job, self.outcomes.get((lane, job.task_id), "fail"))

    def _settled(self, lane: Lane, job: Job, work: Work | None) -> None:
        fate = job.fate
        job.holder = None
        if work is None or work.outcome is None:  # not run, or not yet
            fates = job.admitted(fate, job.deaths)
            job.owner = None
            self.tally["deaths counted"] += job.deaths
            for key in [key for key in self.left if key[1] == job.task_id]:
                if self.left[key] == job.version:
                    del self.left[key]
        else:
            attempt = fate.attempts + job.deaths + 1
            fates = {job.after(fate, work.outcome, attempt, work.kept)}
            job.forgiven += work.outcome in ("snooze", "race")
            self._born(work.kept_children if work.outcome == "done" else [])
        job.settle(fates | self._merged(job, fates))
        self.leases[lane, job.task_id] = job.settled

    def _paid(self, lane: Lane, job: Job, outcome: str) -> None:
        """Note that a lane counted an attempt afterwards, if the task was free."""
        if not (job.is_waiting() and job.fate.place == "waiting"):
            return
        is_left = self.left.pop((lane, job.task_id), None) is not None
        if (lane, job.task_id) in self.disowned:
            self.disowned.discard((lane, job.task_id))
            if not is_left:
                self.tally["counted by others"] += 1
                return
        self.tally["counted afterwards"] += 1
        version, deaths = self.found[lane, job.task_id]
        known = deaths if version == job.version else 0
        attempt = job.fate.attempts + 1 + known
        outcome = outcome if outcome in ("discard", "snooze") else "fail"
        failed = {job.after(job.fate, outcome, attempt, [])}
        if not self._shared(job):
            # workers that died of it meanwhile are forgotten: the row is written anew
            job.forgiven += max(0, self._deaths(job) - known)
            job.settle(failed | self._merged(job, failed))

    def _deaths(self, job: Job) -> int:
        """Count the dead workers that had this version of the row in flight."""
        dead = sum(entry.get(job.task_id) == job.version for entry in self.buried_entries)
        return dead + self._left(job)

    def _left(self, job: Job) -> int:
        """Count the starts whose transaction was lost, and which their lanes have not counted."""
        return sum(
            task_id == job.task_id and version == job.version
            for (_, task_id), version in self.left.items()
        )

    def _on_rollback(self, lane: Lane) -> None:
        batch = self.batch.get(lane, {})
        works = [work for work in batch.values() if work is not None]
        # of several, nobody knows which has broken a constraint that is looked at in the end
        is_unclear = len(batch) > 1 and any(work.keeps_double for work in works)
        if lane not in self.disturbed and not is_unclear:
            assert not any(work.outcome for work in works), (
                f"{lane} let go what had come to its end, before that was counted"
            )
        self._rolled_back(lane)

    def _on_goes_on(self, _lane: Lane) -> None:
        self.tally["claimed ahead"] += 1

    def _on_waits(self, lane: Lane) -> None:
        self.tally["waited to be alone"] += 1
        self._rolled_back(lane)

    def _on_cut(self, lane: Lane) -> None:
        self.tally["cuts"] += 1
        self.disturbed.add(lane)

    def _on_crash(self, lane: Lane) -> None:
        self.tally["crashes"] += 1
        self.disturbed.add(lane)

    def _on_end(self, lane: Lane, error: BaseException | None) -> None:
        self._rolled_back(lane)
        if error is not None and lane not in self.disturbed:
            raise AssertionError(f"{lane} failed: {error!r}") from error
        if lane in self.disturbed:
            lane.disconnect()  # it may not know yet that its connection is lost
        self.disturbed.discard(lane)

    def _rolled_back(self, lane: Lane) -> None:
        for task_id, work in self.batch.pop(lane, {}).items():
            self.jobs[task_id].holder = None
            if work is not None and not lane.process.is_dead:  # else the death is counted
                self.jobs[task_id].forgiven += 1
        self._leave(lane)

    def _leave(self, lane: Lane) -> None:
        """Note what a lane has left to others to count, if it has done so."""
        for task_id in lane.left():
            key, job = (lane, task_id), self.jobs[task_id]
            if key not in self.left:
                version, _ = self.found[key]
                self.left[key] = version
                self.disowned.add(key)
                self.noted.pop(lane, None)  # that note it is
                # who holds it already, may not know
                job.forgiven -= job.holder is None and job.version == version

    def _after_crash(self, process: Process) -> None:
        self.processes.remove(process)
        for lane in process.lanes:
            self.disturbed.add(lane)
            if lane.is_busy:
                lane.obey(die)
                self._follow(lane)
            self.buried_entries.append(self.noted.get(lane, {}))
        for job in self.jobs.values():
            if job.owner in process.lanes:
                job.owner = None
        process.close()
        self._add_process(process.plan)
