"""What is claimed together with the COMMIT before it: never lost, never run twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import text
from sweeping import KINDS, Sweeper, mark, sweepers

from pgtask_sa.errors import TaskError
from pgtask_sa.retry import Verdict


@pytest.fixture(params=KINDS)
def sweeper(db_url: str, request: Any):
    yield from sweepers(db_url, request.param)


def _free(sweeper: Sweeper) -> int:
    return len(sweeper.rows("select from task for update skip locked"))


def _marking(sweeper: Sweeper, **options: Any) -> None:
    @sweeper.handler(**options)
    def body(session, params, task):
        mark(session, params["i"])


@pytest.mark.direct  # through a pooler nothing is claimed ahead
def test_the_next_task_is_claimed_ahead_and_given_back(sweeper: Sweeper, monkeypatch):
    """After a commit one more task is held; a pause frees it, uncounted, and it runs later."""
    monkeypatch.setattr("pgtask_sa.turns.SURVEY_INTERVAL", 60)  # else a survey may be what is sent
    monkeypatch.setattr("pgtask_sa.detours.Detours.must_look", lambda _self: False)
    _marking(sweeper)
    sweeper.enqueue(*({"i": i} for i in range(4)))
    seen = []

    def work(execution):
        execution.sweep()
        seen.append((execution.claiming.holds, _free(sweeper)))
        execution.pause()
        seen.append((execution.claiming.holds, _free(sweeper)))
        return [execution.sweep() for _ in range(4)]

    assert [1, 1, 1, 0] == sweeper.run(work)
    assert [(True, 2), (False, 3)] == seen
    assert ([0, 1, 2, 3], []) == (sweeper.marks(), sweeper.waiting())


def test_a_connection_that_is_closed_frees_what_was_claimed_ahead(sweeper: Sweeper):
    """As a worker does that stops between two tasks."""
    _marking(sweeper)
    sweeper.enqueue(*({"i": i} for i in range(3)))
    assert [1] == sweeper.sweep()
    assert ([("A", 0)] * 2, 2) == (sweeper.waiting(), _free(sweeper))


def test_a_claim_that_fails_after_the_commit_of_the_task_before(sweeper: Sweeper):
    """The task before is done; its successor is claimed in a transaction of its own."""

    @sweeper.handler()
    def body(session, params, task):
        mark(session, params["i"])
        session.execute(text("deallocate all"))

    sweeper.enqueue(*({"i": i} for i in range(4)))
    assert 4 == sweeper.drain()
    assert ([0, 1, 2, 3], [], []) == (sweeper.marks(), sweeper.waiting(), sweeper.dead())
    assert ["task.done"] * 4 == sweeper.told()


def test_a_commit_that_fails_takes_no_task_along(sweeper: Sweeper):
    """A deferred constraint is broken by each second task; the others are done, once."""
    sweeper.execute("create table parent (id int primary key)")
    sweeper.execute("create table child (id int references parent deferrable initially deferred)")
    sweeper.execute("insert into parent values (1)")

    @sweeper.handler(max_attempts=2)
    def body(session, params, task):
        session.execute(text("insert into child values (:i)"), params)

    sweeper.enqueue(*({"i": 1 + i % 2} for i in range(8)))
    sweeper.drain()
    assert ([(1,)] * 4, []) == (sweeper.rows("select id from child"), sweeper.waiting())
    assert [("A", 2, "failed")] * 4 == sweeper.dead()


def test_a_savepoint_that_was_opened_for_a_task_that_is_not_there(sweeper: Sweeper):
    """A handler that writes, fails and has nothing after it leaves a sound transaction."""
    calls = []

    @sweeper.handler(max_attempts=3)
    def body(session, params, task):
        mark(session, params["i"])
        calls.append(params["i"])
        if calls.count(params["i"]) < 2:
            raise ValueError

    sweeper.enqueue({"i": 1}, {"i": 2})
    sweeper.drain()
    sweeper.enqueue({"i": 3})
    sweeper.drain()
    assert [1, 2, 3] == sweeper.marks()


def test_what_is_put_back_before_a_handler_fails_stays_there(db_url: str):
    """The savepoint came with the claim: what was written since then is not the handler's."""
    sweeper = Sweeper("sync", db_url, batch_size=2)
    fails = []

    @sweeper.handler(max_attempts=2)
    def body(session, params, task):
        mark(session, task.task_id)
        if fails:
            raise ValueError

    def work(execution):
        execution.sweep()  # from here on the savepoint is expected
        fails.append(True)
        sweeper.enqueue(*[{}] * 2)

        def admit(batch):
            verdict = Verdict("retry", 7, delay=60.0, reason="died")
            execution.settler.write(batch[0], verdict, ValueError())
            return batch[1:], [(batch[0], verdict, ValueError(), 0.0)]

        execution.admission = SimpleNamespace(admit=admit, leases=[])
        execution.sweep()

    sweeper.enqueue(*[{}] * 2)
    sweeper.run(work)
    assert [("A", 1), ("A", 7)] == sorted(sweeper.waiting())
    sweeper.close()


@pytest.mark.direct  # through a pooler nothing is claimed ahead
def test_tasks_that_nobody_took_are_not_committed_away(sweeper: Sweeper):
    """Should a claim be made while another one is held, both are rolled back."""
    _marking(sweeper)
    sweeper.enqueue(*({"i": i} for i in range(3)))

    def work(execution):
        execution.sweep()
        with pytest.raises(TaskError, match="free again"):
            execution._transact(list)

    sweeper.run(work)
    assert ([("A", 0)] * 2, 2) == (sweeper.waiting(), _free(sweeper))
