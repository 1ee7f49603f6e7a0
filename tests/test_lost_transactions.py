"""Attempts whose transaction is lost, and whose row is free before they can be counted."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import psycopg
import pytest
from running import Running
from sqlalchemy import text

from pgtask_sa import TaskRegistry
from pgtask_sa.arrears import Arrears
from pgtask_sa.presence import Presence

pytestmark = pytest.mark.direct  # through a pooler nothing is noted, and each is counted later

SLEEP = text("select pg_sleep(5)")


class Starts(Counter[int]):
    """Counts the starts of each task of type A, whose handler loses its transaction."""

    def invalidated(self, tasks: TaskRegistry, **policy: float) -> None:
        @tasks.handler("A", backoff=0, **policy)
        def body(session, params, task):
            self[task.task_id] += 1
            session.execute(text("select"))
            session.invalidate()
            raise ValueError

    def closed(self, tasks: TaskRegistry, **policy: float) -> None:
        @tasks.handler("A", backoff=0, **policy)
        def body(session, params, task):
            self[task.task_id] += 1
            session.connection().connection.driver_connection.close()

    def invalidated_async(self, tasks: TaskRegistry, **policy: float) -> None:
        @tasks.handler("A", backoff=0, **policy)
        async def body(session, params, task):
            self[task.task_id] += 1
            await session.execute(text("select"))
            await session.invalidate()
            raise ValueError

    def timed_out(self, tasks: TaskRegistry, **policy: float) -> None:
        @tasks.handler("A", backoff=0, timeout=0.05, **policy)
        async def body(session, params, task):
            self[task.task_id] += 1
            await session.execute(SLEEP)

    def waited_for(self, tasks: TaskRegistry, **policy: float) -> None:
        @tasks.handler("A", backoff=0, **policy)
        async def body(session, params, task):
            self[task.task_id] += 1
            await asyncio.wait_for(session.execute(SLEEP), 0.02)


WAYS = ["invalidated", "closed", "invalidated_async", "timed_out", "waited_for"]


@pytest.mark.parametrize("max_attempts", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_other_lanes_know_of_it(db_url, way, max_attempts):
    """Whoever claims the row first counts the start: none is lost, and none is counted twice."""
    starts, count = Starts(), 20
    running = Running(db_url, concurrency=8, idle_interval=0.2)
    getattr(starts, way)(running.tasks, max_attempts=max_attempts)
    running.enqueue("A", *[{"i": i} for i in range(count)])
    with running:
        running.until_empty(30)
    assert [max_attempts] * count == list(starts.values())
    assert {("A", max_attempts, "failed")} == set(running.dead())


@pytest.mark.parametrize("max_attempts", [1, 3])
def test_a_lane_that_is_slow_to_count(db_url, monkeypatch, max_attempts):
    """Others have counted, and buried the task: it does not come back."""
    pay = Arrears.pay

    def paying(self, *given):
        if self.owed:
            time.sleep(0.1)
        pay(self, *given)

    monkeypatch.setattr(Arrears, "pay", paying)
    starts: Counter[int] = Counter()
    running = Running(db_url, concurrency=8, idle_interval=0.2)

    @running.tasks.handler("A", backoff=0, max_attempts=max_attempts)
    def body(session, params, task):
        starts[task.task_id] += 1
        driver = session.connection().connection.driver_connection
        psycopg.Cursor(driver).execute("rollback")  # past all guards
        raise ValueError

    @running.tasks.handler("B")
    def other(session, params, task):
        session.execute(text("select pg_sleep(0.002)"))

    running.enqueue("A", *[{"i": i} for i in range(20)])
    running.enqueue("B", *[{"i": i} for i in range(1000)])
    with running:
        running.until_empty(40)
    assert [max_attempts] * 20 == list(starts.values())
    assert [("A", max_attempts, "failed")] * 20 == running.dead()
    assert [] == running.told("settle.refused")


def test_it_is_counted_later_if_it_cannot_be_noted(db_url, monkeypatch):
    """The lane owes the attempt, and it is the only one."""
    monkeypatch.setattr(Presence, "disown", lambda *_: 0)
    starts = Starts()
    running = Running(db_url, concurrency=1, idle_interval=0.2)
    starts.invalidated(running.tasks, max_attempts=3)
    running.enqueue("A", {})
    with running:
        running.until_empty()
    assert [3] == list(starts.values())
    assert [("A", 3, "failed")] == running.dead()


def test_a_lane_that_lives_is_not_taken_for_dead(db_url):
    """What rolls back and is nobody's fault, a deadlock say, is not counted by other lanes."""
    running = Running(db_url, concurrency=4, idle_interval=0.2)
    starts: Counter[tuple[int, int]] = Counter()

    @running.tasks.handler("A", backoff=0, max_attempts=2)
    def body(session, params, task):
        starts[task.task_id, task.attempt] += 1
        if starts[task.task_id, 1] <= 2:
            session.execute(text("select pg_terminate_backend(pg_backend_pid())"))

    running.enqueue("A", *[{"i": i} for i in range(20)])
    with running:
        running.until_empty(30)
    assert {(task_id, 1): 3 for task_id, _ in starts} == starts
    assert [] == running.dead()
