"""Deadlines: for handlers of every kind, stuck in every way, and those of the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from typing import Any

import pytest
from fleet import Fleet
from running import Running
from sqlalchemy import text

from pgtask_sa.claim import BACKEND_PID, BEGUN_AT
from pgtask_sa.enforcement import Enforcer
from pgtask_sa.engines import database_url
from pgtask_sa.statements import end_transaction

TIMEOUT = 0.2
RELEASE = threading.Event()


@pytest.fixture(autouse=True)
def _release(monkeypatch):
    for module in ("watchdog", "faces"):
        monkeypatch.setattr(f"pgtask_sa.{module}.SECOND_GRACE", 0.5)
    RELEASE.clear()
    yield
    RELEASE.set()


def _sleep() -> None:
    RELEASE.wait(100)


def _loop() -> None:
    while not RELEASE.is_set():
        pass


def _swallow() -> None:
    while not RELEASE.is_set():
        try:
            time.sleep(0.01)
        except Exception:
            continue


def _socket() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(100)
        threading.Thread(
            target=lambda: RELEASE.wait(100) and theirs.send(b"!"), daemon=True
        ).start()
        ours.recv(1)


@pytest.mark.parametrize("stuck", [_sleep, _loop, _swallow, _socket])
def test_a_sync_handler_that_does_not_come_back(db_url, stuck):
    """E10: undone, counted exactly, the row free, the others served, the lane replaced."""
    running = Running(db_url, concurrency=1)
    starts: list[int] = []

    @running.tasks.handler("STUCK", max_attempts=2, backoff=0, timeout=TIMEOUT)
    def body(session, params, task):
        starts.append(task.attempt)
        session.execute(text("insert into mark values (1)"))
        stuck()
        with contextlib.suppress(Exception):
            session.execute(text("insert into mark values (2)"))
            session.commit()

    @running.tasks.handler("GOOD")
    def good(session, params):
        session.execute(text("insert into mark values (7)"))

    with running:
        running.enqueue("STUCK")
        running.until(lambda: starts)
        running.enqueue("GOOD")
        running.until(lambda: [("STUCK", 2, "failed")] == running.dead())
        running.until(lambda: [7] == running.marks())
        assert [1, 2] == starts
        RELEASE.set()
    assert ([7], 0, [1, 2]) == (running.marks(), running.count(), starts)
    assert {"lane.stuck"} == set(running.told("lane.stuck"))
    assert TIMEOUT <= running.first("task.retry").fields["seconds"] < 100
    assert "timed out after 0.2 s" in running.rows("select last_error from dead_task")[0][0]


def test_a_sync_handler_in_a_query(db_url):
    """E10: the query is ended with its transaction; the lane itself goes on."""
    running = Running(db_url, concurrency=1)

    @running.tasks.handler("SLOW", max_attempts=2, backoff=0, timeout=TIMEOUT)
    def slow(session, params):
        session.execute(text("select pg_sleep(30)"))

    with running:
        running.enqueue("SLOW")
        running.until(lambda: [("SLOW", 2, "failed")] == running.dead())
    assert (0, []) == (running.count(), running.told("lane.stuck"))


def _async_body(kind: str) -> Any:
    async def sleeps(session, params):
        await session.execute(text("insert into mark values (1)"))
        await asyncio.sleep(30)

    async def queries(session, params):
        await session.execute(text("select pg_sleep(30)"))

    async def swallows_once(session, params):
        await session.execute(text("insert into mark values (1)"))
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(30)

    async def never_ends(session, params):
        await session.execute(text("insert into mark values (1)"))
        while not RELEASE.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)

    return {f.__name__: f for f in (sleeps, queries, swallows_once, never_ends)}[kind]


@pytest.mark.parametrize("kind", ["sleeps", "queries", "swallows_once", "never_ends"])
def test_an_async_handler_that_takes_too_long(db_url, kind):
    """E10: cancelled; cut off if it does not take that; never committed late, always counted."""
    running = Running(db_url, concurrency=1)
    body = _async_body(kind)
    running.tasks.handler("SLOW", max_attempts=2, backoff=0, timeout=TIMEOUT)(body)

    @running.tasks.handler("GOOD")
    async def good(session, params):
        await session.execute(text("insert into mark values (7)"))

    with running:
        running.enqueue("SLOW")
        running.until(lambda: [("SLOW", 2, "failed")] == running.dead())
        running.enqueue("GOOD")
        running.until(lambda: [7] == running.marks())
        RELEASE.set()
    assert (0, [7]) == (running.count(), running.marks())


def test_an_async_handler_that_blocks_the_loop(db_url):
    """The loop cannot be saved, but the row is free and the attempt counted."""
    running = Running(db_url, concurrency=1)

    @running.tasks.handler("BLOCK", max_attempts=1, timeout=TIMEOUT)
    async def block(session, params):
        await session.execute(text("insert into mark values (1)"))
        RELEASE.wait(100)

    with running:
        running.enqueue("BLOCK")
        running.until(lambda: [("BLOCK", 1, "failed")] == running.dead())
        buried = running.first("task.buried")
        RELEASE.set()
    assert ([], 0) == (running.marks(), running.count())
    # what it took until the watchdog came, who leaves it to the event loop at first
    assert TIMEOUT + 2 * 0.5 <= buried.fields["seconds"] < 100
    assert "timed out after 0.2 s" in buried.message


def test_a_deadline_that_cannot_be_enforced(direct_db_url, db_url):
    """Whoever comes back too late does not commit, and it counts, watchdog or not."""
    running = Running(direct_db_url, concurrency=1)
    name = running.url.database
    running.execute(f"alter database {name} set search_path = public, pg_catalog")
    running.execute(
        "create function pg_terminate_backend(int) returns bool language plpgsql"
        " as $$ begin raise 'not allowed'; end $$"
    )
    running.url = database_url(db_url)  # nobody has come this way before the change

    @running.tasks.handler("LATE", max_attempts=2, backoff=0, timeout=TIMEOUT)
    def late(session, params):
        session.execute(text("insert into mark values (1)"))
        time.sleep(2 * TIMEOUT)

    with running:
        running.enqueue("LATE")
        running.until(lambda: [("LATE", 2, "failed")] == running.dead())
    assert ([], ["task.timeout"] * 2) == (running.marks(), running.told("task.timeout"))
    assert "timed out after 0.2 s" in running.rows("select last_error from dead_task")[0][0]


def test_a_handler_within_its_time(db_url):
    """A deadline that is not reached does nothing, also not later."""
    running = Running(db_url, drain=True)

    @running.tasks.handler("SYNC", timeout=5)
    def sync(session, params):
        session.execute(text("insert into mark values (1)"))

    @running.tasks.handler("ASYNC", timeout=5)
    async def awaited(session, params):
        await session.execute(text("insert into mark values (2)"))

    running.enqueue("SYNC")
    running.enqueue("ASYNC")
    with running:
        running.wait()
    assert [1, 2] == running.marks()


SERVER_LIMITS = {
    "transaction_timeout": "transaction timeout",
    "statement_timeout": "statement timeout",
}


@pytest.mark.parametrize("touches", ["before", "after", "never"])
@pytest.mark.parametrize("limit", SERVER_LIMITS)
def test_a_time_limit_of_the_server(direct_db_url, db_url, limit, touches):
    """F2: a failed attempt with a plain message, and the worker lives."""
    running = Running(direct_db_url, concurrency=1)
    if not running.rows("select 1 from pg_settings where name = :n", n=limit):
        pytest.skip(f"this server has no {limit}")
    if limit == "statement_timeout" and touches != "after":
        pytest.skip("it is a limit of statements")
    # it holds for the worker's own statements as well, on a machine that is busy
    running.execute(f"alter database {running.url.database} set {limit} = '700ms'")
    running.url = database_url(db_url)

    @running.tasks.handler("SLOW", max_attempts=2, backoff=0, timeout=None)  # else ours holds
    def slow(session, params):
        if touches == "before":
            session.execute(text("insert into mark values (1)"))
        time.sleep(1.2)
        if touches == "after":
            session.execute(text("select pg_sleep(5)"))

    @running.tasks.handler("GOOD", timeout=None)
    def good(session, params):
        session.execute(text("insert into mark values (7)"))

    running.enqueue("SLOW")
    with running:
        running.until(lambda: [("SLOW", 2, "failed")] == running.dead())
        running.enqueue("GOOD")
        running.until(lambda: [7] == running.marks())
    assert SERVER_LIMITS[limit] in running.rows("select last_error from dead_task")[0][0]
    assert [] == running.told("database.down")


@pytest.mark.parametrize("touches", [False, True])
def test_a_handler_that_limits_its_idle_time(db_url, touches):
    """F1: the server ends its transaction, which is a failed attempt, and the worker lives."""
    running = Running(db_url, concurrency=1)

    @running.tasks.handler("SLOW", max_attempts=2, backoff=0)
    def slow(session, params):
        session.execute(text("set local idle_in_transaction_session_timeout = '100ms'"))
        time.sleep(0.3)
        if touches:
            session.execute(text("select 1"))

    @running.tasks.handler("GOOD")
    def good(session, params):
        session.execute(text("insert into mark values (7)"))

    running.enqueue("SLOW")
    with running:
        running.until(lambda: [("SLOW", 2, "failed")] == running.dead())
        running.enqueue("GOOD")
        running.until(lambda: [7] == running.marks())
    assert "idle-in-transaction" in running.rows("select last_error from dead_task")[0][0]


# -- what fails to be enforced -----------------------------------------------------------------


def _stuck(running: Running, **options: Any) -> list[int]:
    starts: list[int] = []

    @running.tasks.handler("STUCK", backoff=0, timeout=TIMEOUT, **options)
    def body(session, params, task):
        starts.append(task.attempt)
        session.execute(text("insert into mark values (1)"))
        RELEASE.wait(100)

    return starts


def test_what_fails_is_tried_again(db_url, direct_url, monkeypatch):
    """As long as the handler runs; one line tells of it, which names the task."""
    running = Running(db_url, concurrency=1, direct_url=direct_url)
    starts = _stuck(running, max_attempts=1)
    take, tries = Enforcer._take, []

    def fail(*args: Any) -> bool:
        tries.append(args)
        if len(tries) <= 2:
            raise OSError("the server cannot be reached")
        return take(*args)

    monkeypatch.setattr(Enforcer, "_take", fail)
    with running:
        running.enqueue("STUCK")
        running.until(lambda: [("STUCK", 1, "failed")] == running.dead())
        assert [] == running.rows("select * from task_worker where lane < 0")
        RELEASE.set()
    failures = [event for event in running.events if event.name == "task.timeout"]
    assert [logging.ERROR, logging.DEBUG] == [event.level for event in failures]
    assert "enforcing the deadline of task 1 STUCK failed" in failures[0].message
    assert ([1], [], 3) == (starts, running.marks(), len(tries))


@pytest.mark.parametrize("budget", [1, 2])
def test_another_lane_is_faster_than_the_enforcement(db_url, direct_url, monkeypatch, budget):
    """It finds that the start was noted, and counts it in place of a start too many."""
    running = Running(db_url, concurrency=1 + budget, direct_url=direct_url)
    starts = _stuck(running, max_attempts=budget)

    def only_end(_self: Any, execution: Any, claimed: Any, _patience: str) -> bool:
        row = claimed.values
        with running.admin.begin() as connection:
            ended = {"pid": row[BACKEND_PID], "begun": row[BEGUN_AT]}
            connection.execute(end_transaction(), ended)
        raise OSError("the server cannot be reached")

    monkeypatch.setattr(Enforcer, "_take", only_end)
    with running:
        running.enqueue("STUCK")
        running.until(lambda: [("STUCK", budget, "failed")] == running.dead())
        RELEASE.set()
    assert ([*range(1, budget + 1)], []) == (starts, running.marks())
    assert "timed out after 0.2 s" in running.rows("select last_error from dead_task")[0][0]
    assert [(0,)] == running.rows("select count(*) from task")


def test_a_worker_that_dies_while_it_enforces_a_deadline(db_url, direct_url):
    """The start is counted once: as one whose time was over, and not as a death, too."""
    fleet = Fleet(db_url, direct_url=direct_url, target="dying_tasks:tasks")
    with fleet.worker("--concurrency", "1") as worker:
        fleet.enqueue("STUCK", {})
        assert -signal.SIGKILL == worker.wait(30)
    fleet.until(lambda: [0] == fleet.attempts())
    running, starts = Running(db_url, concurrency=1, direct_url=direct_url), []

    @running.tasks.handler("STUCK", max_attempts=5, backoff=0, timeout=TIMEOUT)
    def body(session, params, task):
        starts.append(task.attempt)

    with running:
        running.until_empty()
    assert [2] == starts
    counted = running.first("task.retry")
    assert "timed out after 0.2 s" in counted.message
    assert "seconds" not in counted.fields  # for how long it ran nobody here knows
