"""What is stuck for good is replaced: a lane, an event loop, a process; and cancelled tasks end."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
from dead_workers import leave_behind
from fleet import Fleet, events, started
from leased import Long
from running import Running
from sqlalchemy import text
from waiting import SOON, let_pass, wait_until

from pgtask_sa import Task, TaskRegistry
from pgtask_sa.cancel import Canceller
from pgtask_sa.handlers import DEFAULT_TIMEOUT


@pytest.fixture
def release():
    """Give an event that lets go of what is stuck, at the latest at the end of the test."""
    release = threading.Event()
    yield release
    release.set()


@pytest.fixture
def running(db_url, monkeypatch) -> Running:
    for module in ("watchdog", "faces"):
        monkeypatch.setattr(f"pgtask_sa.{module}.SECOND_GRACE", 0.2)
    return Running(db_url, idle_interval=0.2)


@pytest.mark.parametrize("kind", ["STUCK", "ASYNC_STUCK"])
def test_a_process_with_a_stuck_handler(db_url, kind):
    """It finishes what else it runs, ends with code 4, and another takes its place at once."""
    fleet = Fleet(db_url, target="stuck_tasks:tasks")
    options = ("--processes", "1", "--concurrency", "2", "--log-format", "json")
    with fleet.worker(*options, "--idle-interval", "0.2") as worker:
        started(worker)
        fleet.enqueue("SLOW", {"i": 1})
        fleet.enqueue(kind, {})
        started(worker, times=2)
        fleet.enqueue("GOOD", {"i": 2})
        fleet.enqueue("ASYNC_GOOD", {"i": 3})
        fleet.until(lambda: [1, 2, 3] == fleet.done())
        worker.terminate()
        assert 0 == worker.wait(10)
        assert ([], [4, 0]) == (
            events(worker, "worker.died"),
            [event["exit_code"] for event in events(worker, "worker.stopped")],
        )
    dead = fleet.rows("select task_type, attempts, reason from dead_task")
    assert ([(kind, 1, "failed")], 0) == (dead, fleet.count())


def test_a_process_with_two_stuck_handlers(db_url):
    """Nobody waits for the second one either: its task was settled, too."""
    fleet = Fleet(db_url, target="stuck_tasks:tasks")
    options = ("--processes", "1", "--concurrency", "2", "--grace", "600")
    with fleet.worker(*options, "--log-level", "info") as worker:
        started(worker)
        fleet.enqueue("STUCK", {}, {})
        began = time.monotonic()
        started(worker, times=2)
        assert 4 * SOON > time.monotonic() - began  # they sleep for a minute
    dead = fleet.rows("select task_type, attempts, reason from dead_task")
    assert [("STUCK", 1, "failed")] * 2 == dead


def test_an_event_loop_that_is_blocked(running, release):
    """Another one takes its place; what else ran on the old one runs again, uncounted."""
    long = Long().register(running, "async", mode="transactional", max_attempts=1)

    @running.tasks.handler("BLOCK", max_attempts=1, timeout=0.2)
    async def block(session, params):
        await session.execute(text("insert into mark values (1)"))
        release.wait(100)

    with running:
        running.enqueue("LONG")
        running.until(lambda: long.waiting)
        running.enqueue("BLOCK")
        running.first("lane.stuck")
        running.until(lambda: len(long.starts) == 2)
        long.release.set()
        running.until_empty()
        release.set()
    assert ([1, 1], []) == (long.starts, running.marks())
    assert [("BLOCK", 1, "failed")] == running.dead()
    assert (0, ["lane.stuck"]) == (running.code, running.told("lane.stuck"))


def test_a_suspect_that_is_stuck_while_it_is_alone(running, direct_url, release):
    """It kept all the others out; they come in again when its lane is written off."""
    running.options["direct_url"] = direct_url  # without it there are no suspects

    @running.tasks.handler("SUSPECT", timeout=0.2, max_attempts=5)
    def suspect(session, params):
        release.wait(100)

    @running.tasks.handler("GOOD")
    def good(session, params):
        session.execute(text("insert into mark values (7)"))

    running.enqueue("SUSPECT")
    for worker_id in (1, 2):
        leave_behind(running, "SUSPECT", worker_id=worker_id, alone=False)
    with running:
        running.first("lane.stuck")
        running.enqueue("GOOD")
        running.until(lambda: [7] == running.marks())
        release.set()


def test_a_stop_while_others_are_kept_out(running, direct_url, release):
    """Lanes that wait until a suspect has ended, which runs alone, end themselves."""
    running.options["direct_url"] = direct_url
    entered = threading.Event()

    @running.tasks.handler("SUSPECT", max_attempts=5)
    def suspect(session, params):
        entered.set()
        release.wait(100)

    running.enqueue("SUSPECT")
    for worker_id in (1, 2):
        leave_behind(running, "SUSPECT", worker_id=worker_id, alone=False)
    running.options["grace"] = 0.1
    with running:
        assert entered.wait(30)
        running.enqueue("UNKNOWN")  # the other lane wakes up, and is kept out
        let_pass(0.3)
        running.worker.stop()
        running.wait()
        names = [thread.name for thread in threading.enumerate()]
        assert (3, 1) == (running.code, sum(n.startswith("pgtask-lane") for n in names))


CONNECTIONS = "select pid, state from pg_stat_activity where datname = current_database()"


def test_many_coroutines_that_are_cancelled(running, figures):
    """F13: none leaves a query on the server, a connection, or its own lane behind."""
    running.options["concurrency"] = 4

    @running.tasks.handler("LONG", max_attempts=1, timeout=0.03)
    async def long(session, params):
        await session.execute(text("select pg_sleep(600)"))

    with running:
        running.until_idle()
        before = len(running.rows(CONNECTIONS))
        running.enqueue("LONG", *[{"i": i} for i in range(200)])
        running.until_empty(30)
        running.until_idle()
        running.until(lambda: 1 == sum(s == "active" for _, s in running.rows(CONNECTIONS)))
        running.until(lambda: before + 2 >= len(running.rows(CONNECTIONS)))
        after = len(running.rows(CONNECTIONS))
    figures(f"200 coroutines cancelled in queries: {before} connections before, {after} after")
    assert 200 == running.count("dead_task")
    assert [] == running.told("lane.stuck", "worker.error", "database.down")


def test_the_default_deadline():
    """Five minutes, in the transactional mode; None switches it off."""
    tasks = TaskRegistry()
    options = {"A": {}, "B": {"timeout": None}, "C": {"mode": "leased"}, "D": {"timeout": 7}}
    for name, given in options.items():
        tasks.handler(name, **given)(lambda session, params: None)
    assert timedelta(minutes=5) == DEFAULT_TIMEOUT
    assert [300.0, None, None, 7.0] == [handler.timeout for handler in tasks.handlers.values()]


def test_a_slow_task_is_told_of(running, monkeypatch):
    """When half of its time is over, and once."""
    monkeypatch.setattr("pgtask_sa.watchdog.WARN_FROM", 0.1)
    long = Long().register(running, "sync", mode="transactional", timeout=6)
    with running:
        running.enqueue("LONG")
        event = running.first("task.slow")
        long.release.set()
        running.until_empty()
    assert {"task_id": 1, "task_type": "LONG", "limit": 6.0} == event.fields
    assert "has been running for 3 s; it is ended after 6 s" in event.message
    assert ([1], ["task.slow"]) == (long.starts, running.told("task.slow"))


@pytest.mark.parametrize("mode", ["leased", "transactional"])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_task_that_is_cancelled(running, direct_url, kind, mode):
    """The worker hears of it: a coroutine ends at once, a lane with a thread is written off."""
    running.options["direct_url"] = direct_url
    running.options["concurrency"] = 1  # nobody else takes it meanwhile
    long = Long(lambda s, _t: _mark(s, 1), lambda s, _t: _mark(s, 2))
    long.register(running, kind, mode=mode, max_attempts=1)
    with running:
        running.enqueue("LONG")
        running.until(lambda: long.waiting)
        with running.admin.connect() as connection:
            assert Canceller(connection, Task).cancel(1).is_done
        if kind == "async":
            running.until(lambda: not long.waiting)
        else:
            running.first("lane.stuck")
        long.release.set()
    assert ([1], [], 0) == (long.starts, running.marks(), running.count())
    assert [("LONG", int(mode == "leased"), "cancelled")] == running.dead()
    assert ["task.cancelled"] == running.told("task.cancelled")
    quiet = {
        "task.cancelled",
        "worker.started",
        "worker.stopping",
        "lane.stuck",
        "worker.stopped",
        "session.close",
    }
    assert set() == set(running.told()) - quiet


def _mark(session, i):
    session.execute(text("insert into mark values (:i)"), {"i": i})


# -- a handler that is stuck while the worker ends -------------------------------------------------


def _block(running, release) -> threading.Event:
    """Register handlers that do not come back, and whose task is soon taken from them."""
    entered = threading.Event()

    @running.tasks.handler("BLOCK", max_attempts=1, timeout=0.5)
    def block(session, params):
        session.execute(text("insert into mark values (1)"))
        entered.set()
        release.wait(100)

    @running.tasks.handler("ASYNC_BLOCK", max_attempts=1, timeout=0.5)
    async def async_block(session, params):
        await session.execute(text("insert into mark values (1)"))
        entered.set()
        release.wait(100)

    return entered


@pytest.mark.parametrize("kind", ["BLOCK", "ASYNC_BLOCK"])
def test_an_end_that_waits_for_no_stuck_handler(running, release, kind, monkeypatch):
    """Its task is settled: there is nothing to wait for, and nothing was cut off."""
    monkeypatch.setattr("pgtask_sa.watchdog.SECOND_GRACE", 600)
    entered = _block(running, release)
    running.options["grace"] = 600
    with running:
        running.enqueue(kind)
        assert entered.wait(30)
        running.worker.stop()
        assert 0 == running.wait(SOON)
    assert ([(kind, 1, "failed")], 0, []) == (running.dead(), running.count(), running.marks())
    assert [] == running.told("worker.cut", "lane.stuck")


def test_an_end_with_a_blocked_event_loop(running, release):
    """What else ran there gets its grace, is cut off then, and is back in the table."""
    entered = _block(running, release)
    long = Long().register(running, "async", mode="transactional", max_attempts=1)
    running.options["grace"] = 3
    with running:
        running.enqueue("LONG")
        running.until(lambda: long.waiting)
        running.enqueue("ASYNC_BLOCK")
        assert entered.wait(30)
        running.worker.stop()
        running.until(running.dead)
        assert 3 == running.wait()
    assert ([("ASYNC_BLOCK", 1, "failed")], []) == (running.dead(), running.marks())
    assert [("LONG", 0)] == running.rows("select task_type, attempts from task")
    assert "cutting off 1 running tasks" == running.first("worker.cut").message


def codes(worker):
    """Return the exit codes of the processes that have ended."""
    return [event["exit_code"] for event in events(worker, "worker.stopped")]


def test_a_process_with_a_stuck_handler_beside_one_that_is_cut_off(db_url):
    """It is replaced all the same, as a process with a stuck handler: with code 4 and no pause."""
    fleet = Fleet(db_url, target="stuck_tasks:tasks")
    options = ("--processes", "1", "--concurrency", "2", "--grace", "0.1", "--log-format", "json")
    with fleet.worker(*options) as worker:
        started(worker)
        fleet.enqueue("SLOW", {"i": 1})
        fleet.enqueue("STUCK", {})
        started(worker, times=2)
        fleet.until(lambda: [1] == fleet.done())
    assert ([4], []) == (codes(worker)[:1], events(worker, "worker.died"))


def test_a_process_that_is_replaced_while_it_ends(db_url):
    """The next one works at once, while the first finishes what else it runs."""
    fleet = Fleet(db_url, target="stuck_tasks:tasks")
    options = ("--processes", "1", "--concurrency", "2", "--grace", "600", "--log-format", "json")
    with fleet.worker(*options, "--idle-interval", "0.2") as worker:
        started(worker)
        fleet.enqueue("ENDLESS", {"i": 1})
        fleet.enqueue("STUCK", {})
        started(worker, times=2)
        fleet.enqueue("GOOD", {"i": 2})
        fleet.until(lambda: [2] == fleet.done())
        first, second = fleet.rows("select distinct pid from task_worker where lane = 1")
        assert [] == events(worker, "worker.stopped", "worker.died")
        worker.terminate()
        wait_until(lambda: 0 in codes(worker), 10)
        worker.terminate()
        assert 3 == worker.wait(10)
    assert (first != second, [0, 3]) == (True, codes(worker))
