"""The crew holds together: an event loop that is stopped, late deadlines, a lost announcement."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psycopg
import pytest
from dead_workers import presences
from running import Running
from sqlalchemy import create_engine, text
from waiting import SOON, let_pass

from pgtask_sa import Task, Worker, wakeup
from pgtask_sa.aside import MOST_HELPERS, Helpers
from pgtask_sa.events import Events
from pgtask_sa.mapping import LOCK_CLASS
from pgtask_sa.trouble import Trouble
from pgtask_sa.wakeup import Health

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection


@contextmanager
def _session(running: Running) -> Iterator[Connection]:
    """Give a session of somebody else, whose transaction stays open."""
    engine = create_engine(running.url)
    with engine.connect() as connection:
        yield connection
    engine.dispose()


# -- the event loop --------------------------------------------------------------------------


async def _exit_in_a_child(error: type[BaseException]) -> None:
    async def child() -> None:
        raise error(1)

    await asyncio.gather(child())


def test_helpers_of_the_event_loop():
    """As many at once as there may be, all daemons; the rest waits, and errors come back."""
    before = {*threading.enumerate()}  # other tests may have left some
    helpers, together = Helpers(2), threading.Barrier(2)

    def meet() -> tuple[int, bool]:
        return together.wait(10), threading.current_thread().daemon

    met = [helpers.submit(meet) for _ in range(4)]
    failed = helpers.submit(divmod, 1, 0)
    assert [(0, True), (0, True), (1, True), (1, True)] == sorted(f.result(20) for f in met)
    assert ZeroDivisionError is type(failed.exception(10))
    new = {*threading.enumerate()} - before
    threads = [t for t in new if t.name.startswith("pgtask-helper")]
    helpers.shutdown()
    for thread in threads:
        thread.join(10)
    assert [False, False] == [thread.is_alive() for thread in threads]


@pytest.mark.parametrize("timeout", [None, 5])
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_an_exit_in_a_child_task_of_a_handler(db_url, error, timeout):
    """It fails the handler, counted, and not the loop that all the others need."""
    running = Running(db_url, concurrency=2)

    @running.tasks.handler("EXIT", max_attempts=2, backoff=0, timeout=timeout)
    async def leave(session, params):
        await session.execute(text("insert into mark values (1)"))
        await _exit_in_a_child(error)

    @running.tasks.handler("GOOD")
    async def good(session, params):
        await session.execute(text("insert into mark values (7)"))

    with running:
        running.enqueue("EXIT")
        running.until(lambda: [("EXIT", 2, "failed")] == running.dead())
        running.enqueue("GOOD")
        running.until(lambda: [7] == running.marks())
        running.until_empty()
    assert (0, ["loop.interrupted"] * 2) == (running.code, running.told("loop.interrupted"))
    assert error.__name__ in running.first("loop.interrupted").message
    assert error.__name__ in running.rows("select last_error from dead_task")[0][0]


def test_a_handler_that_stops_the_loop(db_url):
    """The loop goes on, and so does the handler."""
    running = Running(db_url, concurrency=1, drain=True)

    @running.tasks.handler("STOP")
    async def stop(session, params):
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0.01)
        await session.execute(text("insert into mark values (1)"))

    running.enqueue("STOP")
    with running:
        running.wait()
    assert (0, [1]) == (running.code, running.marks())


def test_a_loop_that_ends_unasked(db_url):
    """The worker stops with a code that tells, and the row of what ran is free."""
    running = Running(db_url, concurrency=2)

    @running.tasks.handler("KILL")
    async def kill(session, params):
        await session.execute(text("insert into mark values (1)"))
        for task in asyncio.all_tasks():
            if "lane" not in task.get_name():
                task.cancel()
        await asyncio.sleep(30)

    with running:
        running.enqueue("KILL")
        running.wait()
        free = "select count(*) from (select from task for update skip locked) as free"
        running.until(lambda: [(1,)] == running.rows(free))
    assert ([], True) == (running.marks(), running.code not in (0, None))
    assert logging.CRITICAL == running.first("loop.died").level


def test_a_loop_that_ends_while_nothing_runs(db_url):
    """An idle worker that cannot run anything any more says so by its exit code."""
    running = Running(db_url, concurrency=1)

    @running.tasks.handler("LATER")
    async def later(session, params):
        victims = [task for task in asyncio.all_tasks() if "lane" not in task.get_name()]
        for victim in victims:
            asyncio.get_running_loop().call_later(0.3, victim.cancel)

    with running:
        running.enqueue("LATER")
        assert 1 == running.wait()


# -- a database that is away -----------------------------------------------------------------


def test_a_single_connection_that_was_ended():
    """It says nothing about the database, however new it was; the next one that fails does."""
    told: list[str] = []
    health = Health(Events([lambda event: told.append(event.name)]))
    trouble = Trouble(Task.__table__, health, health.events)
    gone = psycopg.OperationalError("server closed the connection unexpectedly")
    for expected in ([], ["database.down"], ["database.down"]):
        trouble.connecting()
        trouble.seconds(gone)
        assert expected == told
    trouble.over()
    trouble.connecting()
    trouble.seconds(gone)
    assert ["database.down", "database.up"] == told


def test_handlers_that_use_up_the_threads(db_url):
    """Coroutines that were cancelled leave their threads behind; the worker has its own."""
    running, release = Running(db_url, concurrency=2, idle_interval=0.2), threading.Event()

    @running.tasks.handler("THREAD", max_attempts=1, timeout=0.2)
    async def waits(session, params):
        await asyncio.to_thread(release.wait)

    @running.tasks.handler("A")
    async def body(session, params):
        await session.execute(text("insert into mark values (1)"))

    running.enqueue("THREAD", *[{}] * MOST_HELPERS)
    with running:
        running.until(lambda: MOST_HELPERS == running.count("dead_task"))
        for pid in presences(running):  # so that a thread has to note what runs
            running.execute("select pg_terminate_backend(:pid)", pid=pid)
        running.enqueue("A")
        running.until_empty()
        release.set()
    assert [1] == running.marks()


# -- deadlines -------------------------------------------------------------------------------


def test_deadlines_do_not_wait_for_each_other(db_url):
    """One that cannot be enforced for long does not let another task commit too late."""
    running = Running(db_url, concurrency=2)

    @running.tasks.handler("FIRST", max_attempts=1, timeout=0.2)
    def first(session, params):
        session.execute(text("insert into mark values (1)"))
        time.sleep(1)

    @running.tasks.handler("SECOND", max_attempts=2, backoff=0, timeout=0.4)
    def second(session, params):
        session.execute(text("insert into mark values (2)"))
        time.sleep(1.5)

    running.enqueue("FIRST")
    running.enqueue("SECOND")
    with _session(running) as other:
        other.execute(text("lock table dead_task in access exclusive mode"))
        with running:
            entered = time.monotonic()
            running.until(lambda: running.told("task.retry"))
            assert 4.5 > time.monotonic() - entered  # nobody waits longer than 5 s for a lock
            other.rollback()
            running.until(lambda: len(running.dead()) == 2)
    assert ([], 0) == (running.marks(), running.count())
    assert [("FIRST", 1, "failed"), ("SECOND", 2, "failed")] == sorted(running.dead())


def test_more_late_handlers_than_can_be_stopped_at_once(db_url, monkeypatch):
    """Those who come back by themselves count their own attempt, each exactly once."""
    monkeypatch.setattr("pgtask_sa.watchdog.ENFORCERS", 1)
    running = Running(db_url, concurrency=6)

    @running.tasks.handler("LATE", max_attempts=2, backoff=0, timeout=0.2)
    def late(session, params):
        session.execute(text("insert into mark values (1)"))
        time.sleep(0.2 + 0.02 * params["i"])

    running.enqueue("LATE", *[{"i": i} for i in range(12)])
    with running:
        running.until(lambda: len(running.dead()) == 12)
    assert ([], 0) == (running.marks(), running.count())
    assert [("LATE", 2, "failed")] * 12 == running.dead()
    assert {(2, 12)} == set(running.rows("select attempts, count(*) from dead_task group by 1"))
    assert 12 == len(running.told("task.retry"))


def test_a_handler_that_is_late_while_the_watchdog_is_not_there(db_url, monkeypatch):
    """Whoever returns after the deadline does not commit, seen or unseen."""
    monkeypatch.setattr("pgtask_sa.watchdog.Watchdog.run", lambda self: None)
    running = Running(db_url, concurrency=1)

    @running.tasks.handler("LATE", max_attempts=1, timeout=0.1)
    def late(session, params):
        session.execute(text("insert into mark values (1)"))
        time.sleep(0.2)

    with running:
        running.enqueue("LATE")
        running.until(lambda: [("LATE", 1, "failed")] == running.dead())
    assert [] == running.marks()
    assert "timed out after 0.1 s" in running.rows("select last_error from dead_task")[0][0]


# -- the announcement ------------------------------------------------------------------------


def test_an_announcement_that_is_lost(db_url, direct_url, monkeypatch):
    """An insert held the lock in the moment in which the worker fell asleep; it tries again."""
    monkeypatch.setattr(wakeup, "GROWTH", 1000.0)  # the second look of habit is far away
    options = {"idle_interval": 60, "report_interval": 60, "direct_url": direct_url}
    running = Running(db_url, concurrency=1, **options)
    began = threading.Event()
    running.tasks.handler("A")(lambda session, params: began.set())
    oid = running.rows("select 'task'::regclass::oid::int")[0][0]
    with _session(running) as other:
        other.execute(text(f"select pg_advisory_lock({LOCK_CLASS}, {oid})"))
        with running:
            running.until(lambda: running.told("worker.started"))
            let_pass(1.0)
            assert not running.sleeps()
            other.execute(text(f"select pg_advisory_unlock({LOCK_CLASS}, {oid})"))
            other.rollback()
            running.until_idle(2)
            let_pass(0.5)
            running.enqueue("A")
            assert began.wait(SOON)


# -- the garbage collector -------------------------------------------------------------------


def test_what_the_garbage_collector_looks_through(db_url):
    """Not what stays, in a process that serves the worker; afterwards it is as it was."""
    running, frozen = Running(db_url), []

    @running.tasks.handler("A")
    def look(session, params):
        frozen.append(gc.get_freeze_count())
        worker.stop()

    worker = Worker(running.tasks, running.url)
    running.enqueue("A")
    assert 0 == gc.get_freeze_count()
    worker.run()
    assert (True, 0) == (frozen[0] > 10_000, gc.get_freeze_count())


def test_a_worker_in_a_thread_leaves_the_garbage_collector_alone(db_url):
    """The process is somebody else's."""
    running, frozen = Running(db_url), []

    @running.tasks.handler("A")
    def look(session, params):
        frozen.append(gc.get_freeze_count())

    running.enqueue("A")
    with running:
        running.until_empty()
    assert [0] == frozen
