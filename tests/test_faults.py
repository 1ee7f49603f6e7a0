"""Faults under load, injected for real: nothing is lost, nothing doubled, nobody blamed.

Each test tells its figures, which stand at the end of the report. The asserts leave room for a
machine that is busy: on a quiet one each "soon" is within two seconds, and a task on the idle
system within half a second.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
from faults import (
    DarkProxy,
    Load,
    Terminator,
    alternate,
    changes,
    connections,
    pickup,
    quiet,
)
from fleet import Fleet, events, started
from proxy import TcpProxy
from running import Running
from sqlalchemy import make_url, text
from waiting import SOON, let_pass, wait_until

from pgtask_sa import engines

if TYPE_CHECKING:
    from collections.abc import Iterator

# What is found soon at this interval was not found by looking.
OPTIONS = ("--log-format", "json", "--idle-interval", "30", "--concurrency", "4")
# Of two workers: four lanes of each kind, one that listens and one that notes what runs; and of two
# enqueuers.
ALL_CONNECTIONS = 2 * (4 + 4 + 2) + 2
MOST_CHANGES = 10  # five times down and up
# Seconds for an end that waits for no network: grace and two, and a machine that is busy. Whoever
# waits for a connection in the dark needs ten at least, five to cancel and five for the answer.
ENDS_ALONE = 7


@pytest.fixture
def fleet(db_url) -> Fleet:
    return Fleet(db_url)


@pytest.mark.timeout(90)
def test_five_crashes_of_the_server_under_load(restartable_db_url, restartable_server, figures):
    """F7: back soon, every time, also at its old pace; and one line for each change of state."""
    fleet, back, rates, as_before = Fleet(restartable_db_url), [], [], []
    with fleet.worker(*OPTIONS) as one, fleet.worker(*OPTIONS) as two:
        started(one, two)
        with Load(fleet) as load:
            for crash in range(5):
                fleet.until(lambda: connections(fleet) == ALL_CONNECTIONS)
                load.first_done_after(time.time() + 1)
                rates.append(load.rate())
                restartable_server.stop("immediate")
                let_pass(crash * 0.3)  # the pauses between two tries get longer
                wait_until(lambda: "database.down" in (changes(one)[-1:] + changes(two)[-1:]), 10)
                restartable_server.start()
                returned = time.time()
                back.append(load.first_done_after(returned))
                as_before.append(load.half_as_fast_after(returned, rates[-1]))
        load.drain()
        found, single = load.lost_and_doubled(), pickup(fleet, -1)
        told = [changes(one), changes(two)]
    figures(
        f"{len(load.confirmed)} confirmed, {len(load.unknown)} unknown; back after "
        f"{', '.join(f'{s:.2f}' for s in back)} s; a task on the idle system: {single:.3f} s;"
        f" changes told: {[len(each) for each in told]}"
    )
    figures(
        f"tasks a second before: {', '.join(f'{rate:.0f}' for rate in rates)}; half as many after"
        f" {', '.join(f'{s:.2f}' for s in as_before)} s"
    )
    assert ([], [], 0) == found
    assert (True, True) == (SOON > max(back), 2 * SOON > max(as_before))
    assert SOON > single
    assert [True, True] == [alternate(each) and len(each) <= MOST_CHANGES for each in told]
    assert [] == events(one, "worker.error", "listener.down") + events(two, "worker.error")


@pytest.mark.parametrize("task_type", ["SLEEP", "ASYNC_SLEEP", "QUERY"])
def test_the_row_of_a_killed_worker(fleet: Fleet, task_type, figures):
    """F3: it is free within a second, for whoever comes, also while the server works on a query."""
    with fleet.worker() as worker:
        fleet.enqueue(task_type, {"i": 1, "seconds": 60})
        fleet.until(fleet.runner)
        assert [] == fleet.attempts()
        worker.kill()
        killed = time.monotonic()
        fleet.until(lambda: [0] == fleet.attempts())
        took = time.monotonic() - killed
    figures(f"{task_type}: the row is free {took:.2f} s after SIGKILL")
    assert SOON > took
    assert ([], 0) == (fleet.done(), fleet.count("dead_task"))


@pytest.mark.timeout(60)
def test_connections_ended_at_random_under_load(fleet: Fleet, figures):
    """All server processes of the database, the listeners' too, and those of the enqueuers."""
    with fleet.worker(*OPTIONS) as one, fleet.worker(*OPTIONS) as two:
        started(one, two)
        with Load(fleet) as load, Terminator(fleet.url, every=0.03) as terminator:
            let_pass(5)
        load.drain()
        found, single = load.lost_and_doubled(), pickup(fleet, -1)
        told = [changes(one), changes(two)]
        lost = len(events(one, "transaction.lost", "commit.unknown"))
    figures(
        f"{terminator.ended} connections ended; {len(load.confirmed)} confirmed,"
        f" {len(load.unknown)} unknown; a task on the idle system: {single:.3f} s; changes told:"
        f" {told}; tasks interrupted in one worker: {lost}"
    )
    assert ([], [], 0) == found
    assert SOON > single
    assert [True, True] == [alternate(each) for each in told]
    assert [] == [e["message"] for e in events(one, "worker.error") + events(two, "worker.error")]


# -- the network -------------------------------------------------------------------------------


def _stall(proxy):
    proxy.stall()
    let_pass(1)
    proxy.resume()


def _lose_answers(proxy):
    proxy.stall("down")
    let_pass(0.5)
    proxy.drop_all()
    proxy.resume()


def _refuse(proxy):
    proxy.refuse()
    proxy.drop_all(reset=False)
    let_pass(1)
    proxy.refuse(False)


def _tear(side):
    def tear(proxy):
        # What one side believes is open stays so, rows included, until the other is told.
        proxy.half_close(side)
        let_pass(0.7)
        proxy.drop_all()

    return tear


FAULTS = {
    "stalls": _stall,
    "answers lost": _lose_answers,
    "drops": TcpProxy.drop_all,
    "refuses": _refuse,
    "ends for the worker": _tear("client"),
    "ends for the server": _tear("server"),
}


@pytest.mark.timeout(60)
def test_a_network_that_fails_under_load(fleet: Fleet, proxy, figures):
    """F6, B10: also when the answer to a COMMIT is lost nothing is done twice."""
    url, back = proxy.url(fleet.url), {}
    with fleet.worker(*OPTIONS, url=url) as one, fleet.worker(*OPTIONS, url=url) as two:
        started(one, two)
        with Load(fleet, pause=0.005) as load:
            for name, break_it in FAULTS.items():
                load.first_done_after(time.time())
                break_it(proxy)
                back[name] = load.first_done_after(time.time())
        load.drain()
        found, single = load.lost_and_doubled(), pickup(fleet, -1)
        told = [changes(one), changes(two)]
        unknown = len(events(one, "commit.unknown") + events(two, "commit.unknown"))
    figures(f"{len(load.confirmed)} confirmed; COMMITs without an answer: {unknown}; back after")
    figures(", ".join(f"{name}: {seconds:.2f} s" for name, seconds in back.items()))
    figures(f"a task on the idle system: {single:.3f} s; changes told: {told}")
    assert ([], [], 0) == found
    assert SOON > max(back.values())
    assert SOON > single
    assert unknown > 0
    assert [True, True] == [alternate(each) for each in told]
    assert [] == [e["message"] for e in events(one, "worker.error") + events(two, "worker.error")]


SHORT = {
    "keepalives_idle": 1,
    "keepalives_interval": 1,
    "keepalives_count": 2,
    "tcp_user_timeout": 2000,
}


@pytest.fixture
def dark_proxy(server_url, monkeypatch) -> Iterator[DarkProxy]:
    """Give a proxy that can go dark, with limits of a few seconds."""
    monkeypatch.setattr(engines, "SERVER_USER_TIMEOUT", 2500)
    for name, value in SHORT.items():
        monkeypatch.setitem(engines.CONNECT_ARGS, name, value)
    with DarkProxy.before(server_url) as proxy:
        yield proxy


def test_connections_that_went_dark(db_url, dark_proxy, figures):
    """F6: the server notices, too: the task runs elsewhere; and the worker listens again."""
    running = Running(db_url, idle_interval=30)
    running.url = make_url(dark_proxy.url(db_url))
    calls: list[int] = []
    release = threading.Event()

    @running.tasks.handler("A", max_attempts=1)
    def body(session, params):
        session.execute(text("insert into mark values (1)"))
        calls.append(1)
        if len(calls) == 1:
            release.wait(60)

    @running.tasks.handler("B", max_attempts=1)
    def mark(session, params):
        session.execute(text("insert into mark values (2)"))

    running.enqueue("A")
    with running:
        running.until(lambda: calls)
        running.until_idle()
        dark, began = dark_proxy.go_dark(), time.monotonic()
        running.until(lambda: running.marks() == [1])
        elsewhere = time.monotonic() - began
        release.set()
        running.until(lambda: running.told("transaction.lost", "commit.unknown"))
        noticed = time.monotonic() - began
        running.until(lambda: quiet(running), 10, 0.05)
        began = time.monotonic()
        running.enqueue("B")
        running.until(lambda: running.marks() == [1, 2])
        single = time.monotonic() - began
    figures(
        f"{dark} connections went dark; with limits of 2 s (worker) and 2.5 s (server) the task"
        f" was done elsewhere after {elsewhere:.1f} s, and the first lane free after"
        f" {noticed:.1f} s; next task: {single:.3f} s"
    )
    assert (15 > elsewhere, 20 > noticed, SOON > single) == (True, True, True)
    assert ([], []) == (running.dead(), running.told("worker.error", "database.down"))


@pytest.mark.parametrize("kind", ["idle", "QUERY"])
def test_a_signal_while_the_network_is_dark(db_url, dark_proxy, kind, figures):
    """E11: the end does not wait for connections that do not answer: grace and two seconds."""
    fleet = Fleet(db_url)
    with fleet.worker(*OPTIONS, "--grace", "0.5", url=dark_proxy.url(db_url)) as worker:
        started(worker)
        if kind == "QUERY":
            fleet.enqueue(kind, {"i": 1, "seconds": 60})
        fleet.until(fleet.runner if kind == "QUERY" else lambda: quiet(fleet, 0.3))
        dark_proxy.go_dark()
        dark_proxy.stall()  # nor does a new connection get through
        began = time.monotonic()
        worker.terminate()
        worker.wait(15)
        ended = time.monotonic() - began
        told = events(worker, "worker.stopped")[0]
    figures(f"{kind}: ended {ended:.2f} s after the signal, with a grace of 0.5 s")
    assert (0 if kind == "idle" else 3) == told["exit_code"]
    assert ENDS_ALONE > ended


def test_a_signal_while_a_note_waits(db_url):
    """E11: nor does the end wait for a thread that helps the event loop, and is held up."""
    fleet = Fleet(db_url)
    waits = (
        "select 1 from pg_stat_activity where datname = current_database()"
        " and wait_event_type = 'Lock'"
    )
    with fleet.worker(*OPTIONS, "--grace", "0.5") as worker:
        started(worker)
        fleet.enqueue("ASYNC_ROW", {"i": 1})
        fleet.until(lambda: fleet.done() == [1])
        with fleet.engine.begin() as connection:
            connection.execute(text("lock table task_worker"))
            fleet.enqueue("ASYNC_ROW", {"i": 2})
            fleet.until(lambda: fleet.rows(waits))
            began = time.monotonic()
            worker.terminate()
            worker.wait(15)
            took = time.monotonic() - began
    assert ENDS_ALONE > took
