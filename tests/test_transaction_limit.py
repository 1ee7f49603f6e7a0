"""The server's own limit on transactions, for workers that stand still: its value, and who has it.

It is the longest timeout, for each task of a batch, and a margin; on servers from version 17 on.
"""

from __future__ import annotations

import time

import pytest
from fleet import Fleet, events, started
from leased import KINDS, brief, mark
from running import Running
from sqlalchemy import text
from waiting import SOON, let_pass, wait_until

from pgtask_sa import plan

SHOW = text("show transaction_timeout")


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def running(db_url) -> Running:
    running = Running(db_url, concurrency=1)
    if not running.rows("select 1 from pg_settings where name = 'transaction_timeout'"):
        pytest.skip("this server has no transaction_timeout")
    return running


def _show(running: Running, kind: str, name: str, **options) -> list[str]:
    """Register a handler that looks which limit its transaction has."""
    shown: list[str] = []

    def look(session, _task):
        shown.append(session.scalar(SHOW))

    brief(running, kind, name, look, **options)
    return shown


@pytest.mark.parametrize(
    ("timeouts", "batch_size", "limit"),
    [((3, 7), 1, "37s"), ((3, 7), 4, "58s"), ((0.5, None), 1, "0")],
)
def test_the_limit(running, kind, timeouts, batch_size, limit):
    """The longest timeout counts, none of the leased mode; no timeout, no limit."""
    running.options.update(batch_size=batch_size, drain=True)
    shown = [
        _show(running, kind, f"SHOW{i}", mode="transactional", timeout=timeout)
        for i, timeout in enumerate(timeouts)
    ]
    brief(running, kind, "LEASED", lambda session, task: None, timeout=600)
    running.enqueue("SHOW0")
    running.enqueue("SHOW1")
    with running:
        assert 0 == running.wait()
    assert [[limit]] * 2 == shown


@pytest.mark.direct  # through a pooler the limit holds for them as well
def test_the_leased_mode_has_none(running, kind, monkeypatch):
    """A transaction of such a handler may take longer; the next of the others has its limit."""
    monkeypatch.setattr(plan, "LIMIT_MARGIN", 1.0)
    shown = _show(running, kind, "SHORT", mode="transactional", timeout=0.5)

    def body(session, _task):
        mark(session, 1)
        session.execute(text("select pg_sleep(2.5)"))
        mark(session, 2)

    long = brief(running, kind, "LONG", body, lease=30, timeout=60)
    with running:
        for name in ("SHORT", "LONG", "SHORT"):
            running.enqueue(name)
            running.until_empty()
    assert ([1], [], [1, 2]) == (long.starts, long.errors, running.marks())
    assert (["1500ms"] * 2, []) == (shown, running.dead())


def test_a_failure_after_the_limit(running, direct_db_url, kind):
    """It is counted, also where the handler never met the end of its transaction."""
    watched = Running(direct_db_url)
    watched.execute(
        f"alter database {running.url.database} set transaction_timeout = '700ms'"
    )  # it holds for the worker's own transactions as well, on a machine that is busy

    def body(_session, _task):
        let_pass(1.2)
        raise ValueError("too late")

    late = brief(running, kind, "LATE", body, mode="transactional", timeout=None, max_attempts=2)
    watched.enqueue("LATE")
    with running:
        running.until(lambda: [("LATE", 2, "failed")] == watched.dead())
    assert ([1, 2], []) == (late.starts, running.told("claim.failed"))
    assert "ValueError: too late" in watched.rows("select last_error from dead_task")[0][0]


OPTIONS = ("--log-format", "json", "--idle-interval", "0.2", "--concurrency", "1")
MOST = 5.0  # seconds that a transaction of `limit_tasks` may last: its timeout and the margin


@pytest.fixture
def fleet(db_url, direct_url) -> Fleet:
    return Fleet(db_url, direct_url=direct_url, target="limit_tasks:tasks")


@pytest.mark.parametrize("task_type", ["FROZEN", "ASYNC_FROZEN"])
@pytest.mark.usefixtures("running")  # which skips where the server cannot
def test_a_worker_that_stands_still(fleet, tmp_path, task_type, figures):
    """The row frees itself, another worker does the task, once, and the first goes on later."""
    file, go = tmp_path / "starts", tmp_path / "go"
    file.touch()
    with fleet.worker(*OPTIONS) as one:
        started(one)
        fleet.enqueue(task_type, {"file": str(file), "go": str(go)})
        wait_until(file.read_bytes)
        one.suspend()
        began = time.monotonic()
        fleet.until(lambda: [0] == fleet.attempts())
        took = time.monotonic() - began
        with fleet.worker(*OPTIONS):
            fleet.until(lambda: fleet.count() == 0)
            assert [2] == fleet.done()
        go.touch()
        one.resume()
        fleet.enqueue("GOOD", {"i": 7})
        fleet.until(lambda: [2, 7] == fleet.done())
        one.terminate()
        assert 0 == one.wait()
    figures(f"{task_type}: free {took:.2f} s after SIGSTOP, with a limit of {MOST:g} s")
    assert MOST + SOON > took
    assert (b"xx", 0) == (file.read_bytes(), fleet.count("dead_task"))
    # the first has met the end of a transaction, and neither lost its database nor failed to claim
    assert [] == [event for event in events(one) if event["level"] in ("ERROR", "CRITICAL")], (
        one.output
    )
