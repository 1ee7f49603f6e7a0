"""What callers do: enqueue in transactions that are open for a while, and end this way or that."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule
from model_machine import BUDGET, Enqueuing, Machine, only_if, pick_of, picks
from sqlalchemy import text
from sqlalchemy.orm import sessionmaker

from pgtask_sa import EnqueueBlocked, TaskSession

OWN = 0  # stands for a task that is not committed yet
kinds = st.sampled_from(list(BUDGET))
savepoints = st.sampled_from(["", "keep", "lose"])


class Caller(TaskSession):
    enqueue_lock_timeout = 0.02


class CallerRules(Machine):
    def _caller(self) -> Any:
        """Return a session whose tasks draw the same tickets whenever the example is run."""
        session = sessionmaker(
            self.database.admin, class_=Caller, task_class=self.database.task_class
        )()
        self.serial += 1
        session.execute(text("select setseed(:seed)"), {"seed": 1 / (1 + self.serial)})
        return session

    def _open(self, pick: int) -> Enqueuing:
        """Return a caller whose transaction is open; it may be a new one."""
        if not self.callers or (pick % 4 == 0 and len(self.callers) < 2):
            self.callers.append(Enqueuing(self._caller()))
        return pick_of(self.callers, pick)

    @rule(pick=picks, kind=kinds, savepoint=savepoints)
    @only_if()
    def enqueue(self, pick: int, kind: str, savepoint: str) -> None:
        caller = self._open(pick)
        self.serial += 1
        with _Savepoint(caller.session, savepoint):
            task = caller.session.enqueue(kind, {"n": self.serial})
        if savepoint != "lose":
            caller.tasks.append((task, None))

    @rule(pick=picks, kind=kinds, savepoint=savepoints)
    @only_if(lambda self: not self.is_unique)
    def coalesce(self, pick: int, kind: str, savepoint: str) -> None:
        caller = self._open(pick)
        is_blocked = any(kind in each.locked_keys for each in self.callers if each is not caller)
        equal = {job.task_id for job in self._equal(kind) if job.is_waiting()}
        own = any(key == kind for _, key in caller.tasks)
        with _Savepoint(caller.session, savepoint):
            task = self._attempt(caller, kind, is_blocked, {"key": kind}, coalesce=True)
        if is_blocked:
            return
        assert (task is None) == bool(equal or own)
        if savepoint != "lose":
            self._note_coalesced(caller, task, kind, equal | {OWN} if own else equal)

    def _note_coalesced(self, caller: Enqueuing, task: Any, key: str, equal: set[int]) -> None:
        caller.locked_keys.add(key)
        if task is not None:
            caller.tasks.append((task, key))
        else:
            self.tally["coalesced"] += 1
            caller.shared.append(equal)

    @rule(pick=picks, kind=kinds, savepoint=savepoints)
    @only_if(lambda self: self.is_unique)
    def enqueue_unique(self, pick: int, kind: str, savepoint: str) -> None:
        caller = self._open(pick)
        others = [each for each in self.callers if each is not caller]
        there = [job for job in self._equal(kind) if job.fate.place in ("waiting", "leased")]
        is_blocked = any(job.holder is not None for job in there) or any(
            key == kind for each in others for _, key in each.tasks
        )
        own = any(key == kind for _, key in caller.tasks)
        with _Savepoint(caller.session, savepoint):
            task = self._attempt(caller, kind, is_blocked, {"key": kind})
        if is_blocked:
            return
        assert (task is None) == bool(there or own)
        if task is None:
            self.tally["skipped"] += 1
        elif savepoint != "lose":
            caller.tasks.append((task, kind))

    def _attempt(
        self, caller: Enqueuing, kind: str, is_blocked: bool, params: Any, **options: Any
    ) -> Any:
        try:
            task = caller.session.enqueue(kind, params, **options)
        except EnqueueBlocked:
            assert is_blocked
            self.tally["blocked"] += 1
            return None
        assert not is_blocked
        return task

    @rule(pick=picks, commits=st.sampled_from([True, True, False]))
    @only_if(lambda self: self.callers)
    def caller_ends(self, pick: int, commits: bool) -> None:
        caller = pick_of(self.callers, pick)
        self.callers.remove(caller)
        if commits:
            caller.session.commit()
            for task, key in caller.tasks:
                self._add_job(task.task_id, task.task_type, key)
        caller.session.close()

    @rule(kind=kinds)
    @only_if()
    def enqueue_and_commit(self, kind: str) -> None:
        with self._caller() as session:
            task = session.enqueue(kind, {"n": self.serial})
            session.commit()
        self._add_job(task.task_id, kind)


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
