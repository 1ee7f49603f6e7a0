"""Worker processes: the three promises, signals, supervision, and the command line."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from fleet import HERE, Fleet, events, started
from processes import WatchedProcess, WorkerProcess
from waiting import SOON, let_pass, wait_until

from pgtask_sa import TaskSession
from pgtask_sa.events import Events
from pgtask_sa.supervisor import Supervisor
from pgtask_sa.worker import main


@pytest.fixture
def fleet(db_url) -> Fleet:
    return Fleet(db_url)


@pytest.fixture
def wakeful(db_url, direct_url) -> Fleet:
    """Give a fleet whose workers can be notified."""
    return Fleet(db_url, direct_url=direct_url)


# -- the three promises ---------------------------------------------------------------------------


def test_promise_1_no_task_for_work_that_rolled_back(fleet: Fleet):
    """A worker runs all that was committed, and nothing of what was not."""
    with fleet.worker("--log-level", "warning") as worker:
        for i in range(20):
            with TaskSession(fleet.engine) as session:
                session.enqueue("ROW", {"i": i})
                session.flush()
                if i % 2:
                    session.rollback()
                session.commit()
        fleet.until(lambda: [*range(0, 20, 2)] == fleet.done())
        fleet.until(lambda: fleet.count() == 0)
        assert worker.running
    assert [*range(0, 20, 2)] == fleet.done()


@pytest.mark.timeout(150)
def test_promise_2_exactly_once_whoever_is_killed(wakeful: Fleet):
    """Eight workers, 5,000 tasks that insert one row each, SIGKILL at random: 5,000 rows."""
    total, dice = 5000, random.Random(2)
    sizes = ["1", "1", "1", "1", "3", "10", "30", "100"]

    def worker(size):
        options = ("--batch-size", size, "--concurrency", "1", "--idle-interval", "0.5")
        return stack.enter_context(wakeful.worker(*options, "--log-level", "warning"))

    with contextlib.ExitStack() as stack:
        workers = {size + str(n): worker(size) for n, size in enumerate(sizes)}
        wakeful.until(lambda: len(wakeful.rows(SLEEPING)) == len(sizes), 40)
        for i in range(0, total, 500):
            kind = "ASYNC_ROW" if i % 1000 else "ROW"
            wakeful.enqueue(kind, *[{"i": n} for n in range(i, i + 500)])
        killed = 0
        while wakeful.count():
            name = dice.choice([name for name, each in workers.items() if each.running])
            if killed < 12:
                workers[name].kill()
                workers[name] = worker(name[:-1])
                killed += 1
            let_pass(0.3)
    assert killed > 3
    assert list(range(total)) == wakeful.done()
    assert 0 == wakeful.count("dead_task")


SLEEPING = (
    "select 1 from pg_locks where locktype = 'advisory' and mode = 'ShareLock'"
    " and database = (select oid from pg_database where datname = current_database())"
)


@pytest.mark.parametrize("kind", ["SLEEP", "ASYNC_SLEEP", "QUERY"])
def test_promise_3_a_killed_workers_task_runs_elsewhere_within_a_second(wakeful, kind, figures):
    """SIGKILL in the middle of a handler, in Python or in a query on the server (F3)."""
    with wakeful.worker("--log-level", "warning") as first:
        wakeful.enqueue(kind, {"i": 1, "seconds": 60})
        runner = wakeful.until(wakeful.runner)
        with wakeful.worker("--log-level", "warning", "--idle-interval", "30"):
            wakeful.until(lambda: len(wakeful.rows(SLEEPING)) == 2, 20)
            first.kill()
            began = time.monotonic()
            wakeful.until(lambda: wakeful.runner() not in (None, runner), 5)
            took = time.monotonic() - began
    figures(f"{kind}: it runs elsewhere {took:.2f} s after SIGKILL")
    assert SOON > took
    assert ([], 0) == (wakeful.done(), wakeful.count("dead_task"))


# -- signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("SLEEP", "terminate"),
        ("SLEEP", "interrupt"),
        ("ASYNC_SLEEP", "interrupt"),
        ("QUERY", "terminate"),
        ("QUERY", "interrupt"),
    ],
)
def test_a_signal_lets_running_tasks_finish(fleet: Fleet, kind, how):
    """E9: claim nothing more, finish what runs, exit 0."""
    with fleet.worker("--concurrency", "1", "--grace", "20") as worker:
        fleet.enqueue(kind, {"i": 1, "seconds": 1.0}, {"i": 2, "seconds": 1.0})
        fleet.until(fleet.runner)
        getattr(worker, how)()
        assert 0 == worker.wait(15)
    assert (1, [0]) == (len(fleet.done()), fleet.attempts())


@pytest.mark.parametrize("how", ["grace over", "second signal"])
@pytest.mark.parametrize("kind", ["SLEEP", "ASYNC_SLEEP", "QUERY"])
def test_what_does_not_finish_is_cut_off(fleet: Fleet, kind, how):
    """E9: rolled back, exit 3, the row free at once, the attempt not counted."""
    grace = "0.3" if how == "grace over" else "60"
    with fleet.worker("--concurrency", "1", "--grace", grace) as worker:
        fleet.enqueue(kind, {"i": 1, "seconds": 30})
        fleet.until(fleet.runner)
        worker.terminate()
        if how == "second signal":
            worker.wait_for_line("still running: 1")  # two signals that arrive together are one
            worker.terminate()
        assert 3 == worker.wait(5)
        fleet.until(lambda: [0] == fleet.attempts(), 1)
    assert ([], 1, 0) == (fleet.done(), fleet.count(), fleet.count("dead_task"))


SLOW = """
import time
print("importing", flush=True)
try:
    time.sleep(60)
except {swallowed}:
    pass
from process_tasks import tasks
"""


@pytest.mark.parametrize("swallowed", ["ValueError", "BaseException"])
@pytest.mark.parametrize("how", ["terminate", "interrupt"])
@pytest.mark.parametrize("options", [(), ("--processes", "2")])
def test_a_signal_before_the_handlers_are_imported(fleet: Fleet, tmp_path, options, how, swallowed):
    """Exit code 0, also if the module that is imported keeps the end from coming through."""
    (tmp_path / "slow_tasks.py").write_text(SLOW.format(swallowed=swallowed))
    paths = {"pythonpath": [tmp_path, HERE], "cwd": HERE}
    with WorkerProcess("slow_tasks:tasks", fleet.url, *options, **paths) as worker:
        worker.wait_for_line("importing")
        getattr(worker, how)()
        assert 0 == worker.wait(15)
    assert ["importing"] == worker.lines


# -- supervision ----------------------------------------------------------------------------------


def test_a_signal_before_the_first_child_is_started():
    """None is started any more: it would not hear of the signal."""
    supervisor = Supervisor(lambda: 7, 2, Events(), drain=False)
    supervisor._pass_on()
    assert 0 == supervisor.run()


def _children(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("how", ["terminate", "interrupt"])
def test_processes_are_replaced_and_end_together(fleet: Fleet, how):
    """A killed child is replaced; a signal to the parent, or Ctrl-C to all, ends all of them."""
    with fleet.worker("--processes", "2", "--idle-interval", "0.5") as parent:
        started(parent, times=2)
        before = _children(parent.pid)
        victim = min(before)
        os.kill(victim, signal.SIGKILL)
        started(parent, times=3)
        after = _children(parent.pid)
        assert (2, 1) == (len(after), len(before & after))
        fleet.enqueue("ROW", *[{"i": i} for i in range(200)])
        fleet.until(lambda: list(range(200)) == fleet.done())
        fleet.enqueue("SLEEP", {"i": 999, "seconds": 0.7})
        fleet.until(fleet.runner)
        getattr(parent, how)()
        assert 0 == parent.wait(10)
        assert [] == [pid for pid in after if _alive(pid)]
    assert (999, 0) == (fleet.done()[-1], fleet.count())
    assert 1 == parent.output.count("ended unasked")
    assert 2 == parent.output.count("worker stopped")


def test_children_end_when_their_parent_is_killed(fleet: Fleet):
    """A worker that nobody supervises must not live on."""
    with fleet.worker("--processes", "2") as parent:
        started(parent, times=2)
        children = _children(parent.pid)
        parent.kill()
        wait_until(lambda: [] == [pid for pid in children if _alive(pid)], 5)


def test_a_second_signal_reaches_the_children(fleet: Fleet):
    """And the parent's exit code tells that something was cut off."""
    with fleet.worker("--processes", "2", "--grace", "60") as parent:
        fleet.enqueue("SLEEP", {"i": 1, "seconds": 30})
        fleet.until(fleet.runner)
        parent.terminate()
        parent.wait_for_line("still running: 1")
        parent.terminate()
        assert 3 == parent.wait(5)
    assert [0] == fleet.attempts()


def test_a_child_that_dies_while_all_are_to_end(fleet: Fleet):
    """Its task was cut off, is back and is not counted; the others finish theirs."""
    with fleet.worker("--processes", "2", "--concurrency", "1") as parent:
        started(parent, times=2)
        fleet.enqueue("SLEEP", {"i": 1, "seconds": 30})
        fleet.until(fleet.runner)
        parent.terminate()
        parent.wait_for_line("still running: 1")
        wait_until(lambda: 1 == len(_children(parent.pid)), 15)
        os.kill(min(_children(parent.pid)), signal.SIGKILL)
        assert 3 == parent.wait(15)
    assert 1 == parent.output.count("ended unasked; what it ran is back in the table")
    assert (1, 1) == (parent.output.count("worker stopped"), fleet.count())


ENDS = {
    "returns 0": (lambda: 0, 0),
    "was stuck": (lambda: 4, 4),
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), 3),
    "had not begun": (lambda: os.kill(os.getpid(), signal.SIGTERM), 0),
    "a handler leaves": (lambda: os._exit(0), 3),
    "a handler leaves with 1": (lambda: os._exit(1), 3),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_exit_code_of_all(end):
    """While all are to end: what a child returns, or 3 if it did not come that far."""
    run, expected = ENDS[end]
    go = multiprocessing.get_context("fork").Event()
    supervisor = Supervisor(lambda: go.wait(20) and run(), 1, Events(), drain=False)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(supervisor.run()), daemon=True)
    thread.start()
    wait_until(lambda: supervisor.children)
    supervisor.stopping = True
    go.set()
    thread.join(20)
    assert [expected] == codes


FORK = """
import sys
from sqlalchemy import create_engine, text
from process_tasks import tasks
from pgtask_sa import Worker

engine = create_engine(sys.argv[1])
with engine.connect() as connection:
    connection.execute(text("select 1"))
    code = Worker(tasks, engine, processes=4, drain=True, concurrency=2).run()
    assert connection.execute(text("select count(*) from done")).scalar() == 200
print("code", code)
"""


def test_an_engine_of_before_the_fork(fleet: Fleet):
    """F5: children make their own connections, and the parent's are still good."""
    fleet.enqueue("ROW", *[{"i": i} for i in range(200)])
    command = (sys.executable, "-c", FORK, fleet.url)
    with WatchedProcess(*command, pythonpath=[HERE], cwd=HERE) as process:
        assert 0 == process.wait(30), process.output
        assert "code 0" == process.lines[-1]
    assert list(range(200)) == fleet.done()


# -- the command line -----------------------------------------------------------------------------


def test_drain_ends_with_the_queue(fleet: Fleet):
    """Exit code 0 when nothing is left to claim, also if tasks failed; logs are JSON lines."""
    fleet.enqueue("ROW", *[{"i": i} for i in range(50)])
    fleet.enqueue("FAIL", {"secret": "hidden"})
    fleet.enqueue("FOREIGN", {}, {})
    with fleet.worker("--drain", "--log-format", "json", "--batch-size", "8") as worker:
        assert 0 == worker.wait(30)
    assert (list(range(50)), 2, 1) == (fleet.done(), fleet.count(), fleet.count("dead_task"))
    told = events(worker)
    assert [{"time", "level", "logger", "message", "event"}] * len(told) == [
        {"time", "level", "logger", "message", "event"} & event.keys() for event in told
    ]
    done = events(worker, "task.done")
    assert {"ROW"} == {event["task_type"] for event in done}
    assert 50 == len({event["task_id"] for event in done})
    [buried] = events(worker, "task.buried")
    assert ("FAIL", 1, "failed") == (buried["task_type"], buried["attempt"], buried["reason"])
    [left] = events(worker, "task.unhandled")
    assert ("FOREIGN", 2) == (left["task_type"], left["count"])
    assert ["worker.started", "worker.stopped"] == [told[0]["event"], told[-1]["event"]]


USAGE = {
    "no.such:tasks": (1, "error: cannot import 'no.such'"),
    "process_tasks:nothing": (1, "error: process_tasks has no TaskRegistry named 'nothing'"),
    "process_tasks:tasks --concurrency 0": (2, "error: concurrency must be"),
    "process_tasks:tasks --concurrency many": (2, "invalid int value: 'many'"),
    "process_tasks:tasks --batch-size 0": (2, "error: batch_size must be"),
    "process_tasks:tasks --priority ROW": (2, "error: --priority takes TYPE=RANK"),
    "process_tasks:tasks --priority ROW=x": (2, "RANK must be an integer"),
    "process_tasks:tasks --weight ROW": (2, "error: --weight takes TYPE=N"),
    "process_tasks:tasks --weight ROW=x": (2, "N must be a number"),
    "process_tasks:tasks --weight ROW=-1": (2, "weight of ROW must be a number over 0"),
    "process_tasks:tasks --weight ROW=2 --order random": (2, "weights need the order fair"),
    "process_tasks:tasks --order fifo": (2, "invalid choice: 'fifo'"),
    "process_tasks:tasks --grace -1": (2, "error: grace must be"),
    "process_tasks:tasks --log-level loud": (
        2,
        "must be DEBUG, INFO, WARNING, ERROR or CRITICAL, got 'loud'",
    ),
    "process_tasks:tasks --database-url mysql://x/y": (1, "Postgres database is needed"),
}


@pytest.mark.parametrize("command", USAGE)
def test_wrong_usage(capsys, monkeypatch, command):
    """Each mistake is told in one line, with the exit code that the help promises."""
    monkeypatch.setenv("DATABASE_URL", "postgresql://localhost/none")
    monkeypatch.setattr("pgtask_sa.worker.logging.basicConfig", _only_check_level)
    try:
        found = main(command.split())
    except SystemExit as ended:  # argparse
        found = ended.code
    code, message = USAGE[command]
    assert code == found
    assert message in capsys.readouterr().err.strip().splitlines()[-1]


def _only_check_level(level, **_):
    """Leave pytest's own log handlers in place."""
    logging.Handler().setLevel(level)
