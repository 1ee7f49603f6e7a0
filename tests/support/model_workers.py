"""What workers do: claim, run handlers that do all sorts of things, crash, stop, lose leases."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from model_callers import CallerRules, kinds
from model_machine import does, pick_of, picks
from model_process import Fault, Lane
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
    @precondition(lambda self: self._idle())
    @rule(pick=picks, fault=faults)
    def claim(self, pick: int, fault: Fault | None) -> None:
        self._claim(pick_of(self._idle(), pick), fault)

    @precondition(lambda self: self._idle())
    @rule(pick=picks, kind=kinds)
    def claim_undisturbed(self, pick: int, kind: str) -> None:
        if not self._ready():
            self.enqueue_and_commit(kind=kind)
        self._claim(pick_of(self._idle(), pick))

    @precondition(lambda self: self._able())
    @rule(pick=picks)
    def handler_writes(self, pick: int) -> None:
        self._write(pick_of(self._able(), pick))

    def _write(self, lane: Lane) -> None:
        self.serial += 1
        given = {"task_id": self.current[lane], "n": self.serial}
        self._go_on(lane, lambda session: session.execute(WRITE, given))
        self.work[lane].effects.append(self.serial)

    @precondition(lambda self: self._able())
    @rule(pick=picks)
    def handler_enqueues(self, pick: int) -> None:
        lane = pick_of(self._able(), pick)
        ids: list[int] = []
        self.serial += 1
        params = {"child": self.serial}
        self._go_on(lane, lambda session: ids.append(_enqueue_now(session, params)))
        self.work[lane].children += ids

    @precondition(lambda self: self._able())
    @rule(pick=picks)
    def handler_writes_what_fails_at_the_end(self, pick: int) -> None:
        lane = pick_of(self._able(), pick)
        self.serial += 1  # the same number in two transactions would make one wait for the other
        given = [{"task_id": self.current[lane], "n": -self.serial}] * 2
        self._go_on(lane, lambda session: session.execute(WRITE, given))
        self.work[lane].has_double = True

    @precondition(lambda self: self._able())
    @rule(pick=picks)
    def handler_swallows_an_error(self, pick: int) -> None:
        lane = pick_of(self._able(), pick)
        self._go_on(lane, _swallow)
        self.work[lane].has_swallowed = True

    @precondition(lambda self: self._sound())
    @rule(pick=picks)
    def handler_rolls_back(self, pick: int) -> None:
        lane = pick_of(self._sound(), pick)
        self._go_on(lane, lambda session: session.rollback())
        self.work[lane].undo()

    @precondition(lambda self: self._able())
    @rule(pick=picks)
    def handler_commits(self, pick: int) -> None:
        lane = pick_of(self._able(), pick)
        job, work = self._job(lane), self.work[lane]
        if not job.is_leased:
            self._go_on(lane, lambda session: session.commit())
            work.keep()
        elif work.has_double or job.owner is not lane:
            self._end(lane, "fail", does(lambda session: session.commit()))
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
        lane = pick_of(self._blocked(), pick)
        if writes and lane in self._able():
            self._write(lane)
        if how == "race" and (self.work[lane].has_swallowed or lane in self.disturbed):
            how = "fail"
        outcome = self.work[lane].returns() if how == "return" else OUTCOMES.get(how, how)
        self._end(lane, outcome, ENDINGS[how], fault)

    @precondition(lambda self: self._blocked())
    @rule(pick=picks)
    def handler_returns(self, pick: int) -> None:
        lane = pick_of(self._blocked(), pick)
        self._end(lane, self.work[lane].returns(), ENDINGS["return"])

    @precondition(lambda self: self._lanes(lambda lane: lane.is_busy))
    @rule(pick=picks)
    def crash(self, pick: int) -> None:
        process = pick_of(self.processes, pick)
        self.tally["crashes"] += 1
        process.crash()
        self._after_crash(process)

    @precondition(lambda self: self._sound())
    @rule(pick=picks)
    def connection_is_cut(self, pick: int) -> None:
        lane = pick_of(self._sound(), pick)
        self.tally["cuts"] += 1
        self.database.kill({lane.pid()})
        self.disturbed.add(lane)
        self._rolled_back(lane)

    @precondition(lambda self: self._sound())
    @rule(pick=picks)
    def time_is_over(self, pick: int) -> None:
        lane = pick_of(self._sound(), pick)
        job = self._job(lane)
        self.tally["time was over"] += 1
        lane.process.watchdog.expire(lane, lane.execution.running)
        self.disturbed.add(lane)
        if job.is_leased and job.owner is not lane:
            return
        deaths = 0 if job.is_leased else job.deaths + 1
        failed = {job.failed(job.fate, job.fate.attempts + deaths)}
        job.settle(failed | self._merged(job, failed))
        job.owner = job.holder = None
        self.batch.get(lane, {}).pop(job.task_id, None)
        self._rolled_back(lane)

    @precondition(lambda self: self._lanes(lambda lane: lane.is_busy))
    @rule(pick=picks)
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

    @precondition(lambda self: self._jobs("leased"))
    @rule(pick=picks)
    def lease_runs_out(self, pick: int) -> None:
        job = pick_of(self._jobs("leased"), pick)
        self.tally["leases ran out"] += 1
        self.database.end_lease(job.task_id)
        job.version += 1

    @precondition(lambda self: [each for each in self._sound() if self._job(each).is_leased])
    @rule(pick=picks)
    def lease_is_renewed(self, pick: int) -> None:
        lane = pick_of([each for each in self._sound() if self._job(each).is_leased], pick)
        lane.process.keeper._prolong(lane.execution.lease)
        self._job(lane).version += self._job(lane).owner is lane

    @rule(pick=picks)
    def worker_looks_after_the_dead(self, pick: int) -> None:
        pick_of(self.processes, pick).presence.look_after()


def _swallow(session: Any) -> None:
    with suppress(DBAPIError):
        session.execute(text("select 1/0"))


def _enqueue_now(session: Any, params: Any) -> int:
    task = session.enqueue("A", params)
    session.flush()
    return task.task_id
