"""What workers do: claim, run handlers that do all sorts of things, crash, stop, lose leases."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule
from model_callers import CallerRules, kinds
from model_fates import Job
from model_process import Fault, Lane
from model_steps import does, only_if, pick_of, picks
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from pgtask_sa import Discard, Retry, Snooze

WRITE = text("insert into effect values (:task_id, :n)")
RACE = text("do $$ begin raise sqlstate '40001'; end $$")

faults = st.none() | st.builds(
    Fault,
    kind=st.sampled_from(["crash", "cut", "rival"]),
    when=st.sampled_from(["before", "after"]),
    countdown=st.integers(1, 12),
    rival=picks,
)

endings = st.builds(
    Fault,
    kind=st.sampled_from(["crash", "cut"]),
    when=st.sampled_from(["before", "after"]),
    countdown=st.integers(1, 5),
)


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


class WorkerRules(CallerRules):
    @rule(pick=picks, fault=faults)
    @only_if(lambda self: self._idle())
    def claim(self, pick: int, fault: Fault | None) -> None:
        self._claim(pick_of(self._idle(), pick), fault)

    @rule(pick=picks, kind=kinds)
    @only_if(lambda self: self._idle())
    def claim_undisturbed(self, pick: int, kind: str) -> None:
        if not self._ready():
            self.enqueue_and_commit(kind=kind)
        self._claim(pick_of(self._idle(), pick))

    @rule(
        pick=picks,
        kind=kinds,
        what=st.sampled_from(["", "write", "write", "write_double", "enqueue", "swallow", "spoil"]),
        commits=st.booleans(),
        how=st.sampled_from(list(ENDINGS)),
        fault=faults,
    )
    @only_if(lambda self: self._idle())
    def task_runs(
        self, *, pick: int, kind: str, what: str, commits: bool, how: str, fault: Fault | None
    ) -> None:
        """Let a whole run pass, from the claim to the end."""
        lane = pick_of(self._idle(), pick)
        if not self._ready():
            self.enqueue_and_commit(kind=kind)
        self._claim(lane)
        self.agree()
        if what and lane in self._able():
            getattr(self, f"_{what}")(lane)
        if commits and lane in self._able():
            self._commit(lane)
        if lane in self._blocked():
            self._conclude(lane, how, fault)

    @rule(pick=picks, kind=kinds, what=st.sampled_from(["swallow", "spoil", "write_double"]))
    @only_if(lambda self: self._idle())
    def error_is_not_noticed(self, pick: int, kind: str, what: str) -> None:
        """Let a handler return as if nothing were amiss with its transaction."""
        lane = pick_of(self._idle(), pick)
        if not self._ready():
            self.enqueue_and_commit(kind=kind)
        self._claim(lane)
        self.agree()
        if lane in self._able():
            getattr(self, f"_{what}")(lane)
        if lane in self._blocked():
            self._conclude(lane, "return")

    # -- what handlers do ----------------------------------------------------------------------

    @rule(
        pick=picks,
        what=st.sampled_from(
            ["write", "write", "enqueue", "commit", "write_double", "swallow", "spoil", "spoil"]
        ),
    )
    @only_if(lambda self: self._able())
    def handler_does(self, pick: int, what: str) -> None:
        getattr(self, f"_{what}")(pick_of(self._able(), pick))

    def _write(self, lane: Lane) -> None:
        self.serial += 1
        given = {"task_id": self.current[lane], "n": self.serial}
        self._go_on(lane, lambda session: session.execute(WRITE, given))
        self.work[lane].effects.append(self.serial)

    def _enqueue(self, lane: Lane) -> None:
        ids: list[int] = []
        self.serial += 1
        params = {"child": self.serial}
        self._go_on(lane, lambda session: ids.append(_enqueue_now(session, params)))
        self.work[lane].children += ids

    def _write_double(self, lane: Lane) -> None:
        """Write what breaks a constraint that is looked at in the end."""
        self.serial += 1  # the same number in two transactions would make one wait for the other
        given = [{"task_id": self.current[lane], "n": -self.serial}] * 2
        self._go_on(lane, lambda session: session.execute(WRITE, given))
        self.work[lane].has_double = True

    def _swallow(self, lane: Lane) -> None:
        self._go_on(lane, _swallow)
        self.work[lane].has_swallowed = True

    def _spoil(self, lane: Lane) -> None:
        """Swallow an error below the session, where no savepoint may be open yet."""
        work = self.work[lane]
        if not work.is_untouched():
            return
        self._go_on(lane, _spoil)
        work.is_spoiled = work.has_swallowed = not self._job(lane).is_leased
        ground = lane.execution.ground
        if work.is_spoiled and not (ground.open or ground._sent):
            self.tally["transactions aborted"] += 1
            work.is_aborted = True
            self.disturbed.add(lane)
            if not ground._spent:  # else the rows are held until the handler ends
                self._rolled_back(lane)

    def _commit(self, lane: Lane) -> None:
        job, work = self._job(lane), self.work[lane]
        if not job.is_leased:
            self._go_on(lane, lambda session: session.commit())
            work.keep()
        elif work.has_double or job.owner is not lane:
            passed: list[None] = []
            self._end(lane, "fail", does(lambda session: passed.append(session.commit())))
            assert not passed, f"{lane} committed what it must not: {job}"
        else:
            self._go_on(lane, lambda session: session.commit())
            fate = job.fate
            job.fates = {replace(fate, effects=fate.effects | frozenset(work.effects))}
            self._born(work.children)
            work.undo()

    @rule(pick=picks)
    @only_if(lambda self: self._sound())
    def handler_rolls_back(self, pick: int) -> None:
        lane = pick_of(self._sound(), pick)
        self._go_on(lane, lambda session: session.rollback())
        self.work[lane].undo()

    @rule(pick=picks, how=st.sampled_from(list(ENDINGS)), fault=faults, writes=st.booleans())
    @only_if(lambda self: self._blocked())
    def handler_ends(self, pick: int, how: str, fault: Fault | None, writes: bool) -> None:
        lane = pick_of(self._blocked(), pick)
        if writes and lane in self._able():
            self._write(lane)
        self._conclude(lane, how, fault)

    def _conclude(self, lane: Lane, how: str, fault: Fault | None = None) -> None:
        if how == "race" and (self.work[lane].has_swallowed or lane in self.disturbed):
            how = "fail"
        outcome = self.work[lane].returns() if how == "return" else OUTCOMES.get(how, how)
        self._end(lane, outcome, ENDINGS[how], fault)

    @rule(pick=picks)
    @only_if(lambda self: self._blocked())
    def handler_returns(self, pick: int) -> None:
        self._conclude(pick_of(self._blocked(), pick), "return")

    # -- what happens to workers ---------------------------------------------------------------

    @rule(pick=picks)
    @only_if(lambda self: self._lanes(lambda lane: lane.is_busy))
    def crash(self, pick: int) -> None:
        process = pick_of(self.processes, pick)
        self.tally["crashes"] += 1
        process.crash()
        self._after_crash(process)

    @rule(pick=picks, kind=kinds)
    @only_if(lambda self: self._idle())
    def worker_dies_of_a_task(self, pick: int, kind: str) -> None:
        """Let the others claim what a worker ran that died after their last look at the dead."""
        lane = pick_of(self._idle(), pick)
        if not self._ready():
            self.enqueue_and_commit(kind=kind)
        self._claim(lane)
        self.agree()
        for process in self.processes:
            if process is not lane.process:
                process.presence.look_after()
        if not lane.is_busy:
            return
        self.tally["crashes"] += 1
        lane.process.crash()
        self._after_crash(lane.process)
        self.agree()
        for other in self._idle():
            self._claim(other)
            self.agree()

    @rule(pick=picks)
    @only_if(lambda self: self._sound())
    def connection_is_cut(self, pick: int) -> None:
        lane = pick_of(self._sound(), pick)
        self.tally["cuts"] += 1
        self.database.kill({lane.pid()})
        self.disturbed.add(lane)
        self._rolled_back(lane)

    @rule(pick=picks)
    @only_if(lambda self: self._sound())
    def time_is_over(self, pick: int) -> None:
        lane = pick_of(self._sound(), pick)
        job = self._job(lane)
        self.tally["time was over"] += 1
        lane.process.watchdog.expire(lane, lane.execution.running)
        self.disturbed.add(lane)
        if job.is_leased and job.owner is not lane:
            return
        if not job.is_leased:
            self.noted[lane] = {}  # given away, lest this start is counted twice
        deaths = 0 if job.is_leased else job.deaths + 1
        failed = {job.failed(job.fate, job.fate.attempts + deaths)}
        job.settle(failed | self._merged(job, failed))
        job.owner = job.holder = None
        self.batch.get(lane, {}).pop(job.task_id, None)
        self._rolled_back(lane)

    @rule(pick=picks)
    @only_if(lambda self: self._lanes(lambda lane: lane.is_busy))
    def worker_stops(self, pick: int) -> None:
        process = pick_of(self.processes, pick)
        busy = [lane for lane in process.lanes if lane.is_busy]
        if any(lane not in self._blocked() for lane in busy):
            return
        self.tally["stops"] += 1
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

    @rule(pick=picks)
    @only_if(lambda self: self._jobs("leased"))
    def lease_runs_out(self, pick: int) -> None:
        self._run_out(pick_of(self._jobs("leased"), pick))

    def _run_out(self, job: Job) -> None:
        self.tally["leases ran out"] += 1
        self.database.end_lease(job.task_id)
        job.version += 1

    def _leasing(self) -> list[Lane]:
        return [lane for lane in self._sound() if self._job(lane).is_leased]

    @rule(pick=picks)
    @only_if(lambda self: self._leasing())
    def lease_is_renewed(self, pick: int) -> None:
        lane = pick_of(self._leasing(), pick)
        lane.process.keeper._prolong(lane.execution.lease)
        self._job(lane).version += self._job(lane).owner is lane

    @rule(
        pick=picks,
        commits=st.sampled_from([False, False, True]),
        how=st.sampled_from(["return"] * 6 + list(ENDINGS)),
        fault=st.none() | st.none() | faults,
    )
    @only_if(lambda self: self._leasing() or self._idle())
    def lease_is_lost(self, pick: int, commits: bool, how: str, fault: Fault | None) -> None:
        """Let the others look for work when a lease has run out, and the old run go on then."""
        self._find_lease(pick)
        if not self._leasing():
            return
        lane = pick_of(self._leasing(), pick)
        job = self._job(lane)
        if job in self._jobs("leased"):
            self._run_out(job)
        for other in self._idle():
            self._claim(other)
            self.agree()
        if lane in self._able():
            self._write(lane)
        if commits and lane in self._able():
            self._commit(lane)
        elif lane in self._blocked():
            self._conclude(lane, how, fault)

    def _find_lease(self, pick: int) -> None:
        """See to it that a leased handler runs, if that can be."""
        if not self._leasing():
            self.enqueue_and_commit(kind="L")
            for _ in range(3):  # it may be the turn of others first
                if self._idle() and not self._leasing():
                    self._claim(pick_of(self._idle(), pick))
                    self.agree()

    @rule(pick=picks, fault=endings)
    @only_if(lambda self: self._leasing() or self._idle())
    def leased_handler_is_cut_off(self, pick: int, fault: Fault) -> None:
        """Let it write, and go down between the first and the last round trip of its end."""
        self._find_lease(pick)
        able = [lane for lane in self._leasing() if lane in self._able()]
        if able:
            lane = pick_of(able, pick)
            self._write(lane)
            self._conclude(lane, "return", fault)

    @rule(pick=picks)
    @only_if()
    def worker_looks_after_the_dead(self, pick: int) -> None:
        pick_of(self.processes, pick).presence.look_after()


def _swallow(session: Any) -> None:
    with suppress(DBAPIError):
        session.execute(text("select 1/0"))


def _spoil(session: Any) -> None:
    driver = session.get_bind().connection.driver_connection
    driver.pgconn.exec_(b"select 1/0")


def _enqueue_now(session: Any, params: Any) -> int:
    task = session.enqueue("A", params)
    session.flush()
    return task.task_id
