"""The workers' table: what counts as a death and what does not, and who is taken out."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
from dead_workers import alive, leave_behind, presences
from fleet import Fleet
from leased import Long
from running import Running

from pgtask_sa import AsyncTaskSession, TaskSession
from pgtask_sa.admission import KILLED, Admission
from pgtask_sa.claim import ROW_VERSION
from pgtask_sa.presence import Deaths, Presence
from pgtask_sa.presence_statements import try_solitude
from pgtask_sa.settle import Claimed
from pgtask_sa.solitude import SHARE, Gate, Solitary

QUIET = ("--log-level", "warning", "--idle-interval", "0.2")
ENTRIES = "select worker_id, task_ids from task_worker order by 1"


@pytest.fixture
def running(db_url, direct_url) -> Running:
    return Running(db_url, idle_interval=0.2, direct_url=direct_url)


def _transactional(running: Running, *, released: bool = False) -> Long:
    long = Long().register(running, "sync", "A", mode="transactional")
    if released:
        long.release.set()
    return long


# -- what counts ----------------------------------------------------------------------------------


def test_a_death_is_a_start(running):
    """The next attempt has the next number."""
    long = _transactional(running, released=True)
    running.enqueue("A")
    leave_behind(running, "A")
    with running:
        running.until_empty()
    assert [2] == long.starts


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_row_that_is_free_before_the_lock_of_its_worker(running, monkeypatch, attempt):
    """The server ends each connection of a dead worker by itself: look again, for a moment."""
    monkeypatch.setattr("pgtask_sa.presence.LOOKS", 15 if attempt == 1 else 500)
    long = _transactional(running, released=True)
    running.enqueue("A")
    leave_behind(running, "A")
    with running:
        with alive(running):
            running.until(lambda: not running.rows("select 1 from task for update skip locked"))
            assert not any(ids for n, ids in running.rows(ENTRIES) if n != 1)  # it is still looking
            if attempt == 1:  # it lives, whatever became of that claim
                running.until_empty()
        running.until_empty()
    assert [attempt] == long.starts


def test_a_server_process_that_is_ended(running):
    """The task runs elsewhere, uncounted: its worker lives."""
    running.options["concurrency"] = 1
    first, other = _transactional(running), Running(running.url, **running.options)
    second = _transactional(other, released=True)
    with running:
        running.enqueue("A")
        running.until(lambda: first.waiting)
        running.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name like 'pgtask % A'"
        )
        with other:
            other.until_empty()
        first.release.set()
    assert ([1], [1]) == (first.starts, second.starts)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_worker_whose_connections_are_all_ended(running, monkeypatch, kind):
    """Its task is not buried while it may come back, which it does at once."""
    looks, look_after = [], Presence.look_after
    monkeypatch.setattr(Presence, "look_after", lambda each: looks.append(look_after(each)))
    running.options["concurrency"] = 1
    other = Running(running.url, **running.options)
    once = {"mode": "transactional", "max_attempts": 1}
    first = Long().register(running, kind, "A", **once)
    second = Long().register(other, "sync", "A", **once)
    second.release.set()
    with running:
        running.enqueue("A")
        running.until(lambda: first.waiting and looks)  # the next one is far away
        for pid in presences(running):
            running.execute("select pg_terminate_backend(:pid)", pid=pid)
        running.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name like 'pgtask % A'"
        )
        with other:
            other.until_empty()
        first.release.set()
    assert ([1], [1], 0) == (first.starts, second.starts, running.count("dead_task"))


def test_a_worker_that_is_stopped(running):
    """What it cuts off is not counted: its end is in order."""
    running.options["grace"] = 0.1
    first = _transactional(running)
    with running:
        running.enqueue("A")
        running.until(lambda: first.waiting)
        running.worker.stop()
        running.wait()
    again = Running(running.url, direct_url=running.options["direct_url"])
    second = _transactional(again, released=True)
    with again:
        again.until_empty()
    first.release.set()
    assert (3, [1], [1], []) == (running.code, first.starts, second.starts, running.rows(ENTRIES))


def test_a_worker_that_is_stopped_after_it_lost_its_connection(running):
    """It takes its entry out all the same: what it cuts off is not counted as a death."""
    running.options["grace"] = 0.1
    first = _transactional(running)
    with running:
        running.enqueue("A")
        running.until(lambda: first.waiting)
        for pid in presences(running):
            running.execute("select pg_terminate_backend(:pid)", pid=pid)
        running.worker.stop()
        running.wait()
    assert [] == running.rows(ENTRIES)
    again = Running(running.url)
    second = _transactional(again, released=True)
    with again:
        again.until_empty()
    first.release.set()
    assert ([1], [1]) == (first.starts, second.starts)


def test_a_process_that_is_told_to_stop(db_url, direct_url, tmp_path):
    """SIGTERM, its grace over: uncounted as well."""
    fleet = Fleet(db_url, direct_url=direct_url, target="poison_tasks:tasks")
    file = tmp_path / "starts"
    fleet.enqueue("HANG", {"file": str(file)})
    with fleet.worker(*QUIET, "--grace", "0.1") as worker:
        fleet.until(file.exists)
        worker.terminate()
        assert 3 == worker.wait(10)
    with fleet.worker(*QUIET):
        fleet.until(lambda: fleet.count() == 0)
    assert ([1], b"xx") == ([n for (n,) in fleet.rows("select pid from done")], file.read_bytes())


def test_a_crash_of_the_server(restartable_db_url, restartable_server, tmp_path):
    """Nobody is to blame, also if the worker died meanwhile."""
    fleet = Fleet(restartable_db_url, target="poison_tasks:tasks")
    file = tmp_path / "starts"
    fleet.enqueue("HANG", {"file": str(file)})
    with fleet.worker(*QUIET) as worker:
        fleet.until(file.exists)
        fleet.rows("select 1 from pg_switch_wal()")  # what was noted is on the disk
        restartable_server.stop("immediate")
        os.kill(worker.pid, signal.SIGKILL)
    restartable_server.start()
    assert [[1]] == [ids for _, ids in fleet.rows(ENTRIES) if ids]
    with fleet.worker(*QUIET):
        fleet.until(lambda: fleet.count() == 0)
    assert ([1], b"xx") == ([n for (n,) in fleet.rows("select pid from done")], file.read_bytes())


@pytest.fixture
def admit():
    """Give a function that admits one task, and tells what of it was noted before it got stuck."""

    def admit(deaths: Deaths | None, lease: float | None = None, **row) -> list:
        presence = SimpleNamespace(
            must_look=lambda _batch: deaths is not None, look=lambda *_: {7: deaths}
        )
        face = SimpleNamespace(aside=lambda work: work())
        handlers = {"A": SimpleNamespace(lease=lease, policy=SimpleNamespace(max_attempts=10))}
        noted: list = []

        def settle(_batch):
            noted.extend(_batch)
            raise Noted

        row = {"attempts": 0, "lease_token": None, "last_error": None, ROW_VERSION: 90, **row}
        admission = Admission(presence, 3, face, None, handlers, note=settle)
        with suppress(Noted):
            admission.admit([Claimed(7, "A", row, True)])
        return noted

    class Noted(Exception):
        pass

    return admit


def test_a_suspect_that_waits_to_be_alone_is_not_in_flight(admit):
    """Who asks to be alone has not noted it, lest the death of another be taken for its own."""
    noted = []
    with pytest.raises(Solitary, match="7"):
        noted = admit(Deaths(count=1))
    assert [] == noted


def test_a_task_that_is_known_to_kill_runs_alone(admit):
    """Also when its death has been counted: else it takes others along that must then be alone."""
    killed = "WorkerDied: the worker died while it ran this task"
    with pytest.raises(Solitary, match="7"):
        admit(None, attempts=1, last_error=killed)
    assert [7] == [claimed.task_id for claimed in admit(None, attempts=1, last_error="OSError: x")]


@pytest.mark.parametrize(
    ("deaths", "lease", "attempts", "version"),
    [
        (None, None, 0, 90),
        (None, 5.0, 0, -90),
        (Deaths(count=1, alone=True), None, 1, -90),
        (Deaths(count=1), None, 9, -90),
    ],
    ids=["runs", "is leased", "killed alone", "used up"],
)
def test_what_does_not_run_is_not_in_flight(admit, deaths, lease, attempts, version):
    """Before that is counted, or leased, another task may take the process along."""
    [claimed] = admit(deaths, lease, attempts=attempts)
    assert (7, version) == (claimed.task_id, claimed.values[ROW_VERSION])


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_suspects_in_different_processes(running, monkeypatch, kind):
    """One at a time in all of the database: what dies with its neighbours may not have begun."""
    monkeypatch.setattr("pgtask_sa.admission.MOMENT", 100)
    long = Long().register(running, kind, "A", mode="transactional")
    long.release.set()
    running.enqueue("A")
    leave_behind(running, "A", alone=False)
    tries = "select 1 from pg_stat_activity where query like 'SELECT pg_try_advisory_xact_lock%'"
    with running:
        with running.admin.begin() as other:
            assert other.scalar(try_solitude())
            running.until(lambda: 2 == len(running.rows(tries)))
            assert [] == long.starts
        running.until_empty()
    assert [2] == long.starts


def test_a_suspect_that_takes_long(running):
    """The next one does not wait for its end: it may be innocent."""
    long = _transactional(running, released=True)
    running.enqueue("A")
    leave_behind(running, "A", alone=False)
    with running.admin.begin() as other, running:
        assert other.scalar(try_solitude())
        running.until_empty()
    assert [2] == long.starts


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_suspect_that_cannot_be_alone(running, monkeypatch, kind):
    """It is put back for later, and what is known of it with it; others go on meanwhile."""
    monkeypatch.setattr("pgtask_sa.solitude.PATIENCE", (0.3, 0.3))
    monkeypatch.setattr("pgtask_sa.solitude.SHARE", 1000)
    suspect, other = Long(), Long()
    suspect.register(running, kind, "A", mode="transactional", max_attempts=3)
    other.register(running, kind, "B", mode="transactional", timeout=None)
    suspect.release.set()
    running.tasks.handler("C")(lambda session, params: None)
    running.enqueue("A", *[{}] * 3)
    for worker_id in (1, 2):
        leave_behind(running, "A", worker_id=worker_id, alone=False)
    running.enqueue("B", priority=-1)
    with running:
        postponed = [(2, KILLED, True)] * 3
        look = "select attempts, last_error, run_at > now() from task where task_type = 'A'"
        running.until(lambda: postponed == running.rows(look))
        running.enqueue("C", *[{}] * 10)
        running.until(lambda: 4 == running.count())
        assert ([], 1) == (suspect.starts, other.waiting)
        other.release.set()
        running.until(lambda: 3 == running.count())
        running.execute("update task set run_at = now()")
        running.until_empty()
    assert [3, 3, 3] == suspect.starts
    assert 3 == len(running.told("task.postponed"))


def test_a_suspect_that_was_put_back(running, monkeypatch):
    """It does not run beside others the next time either, however many attempts it has."""
    monkeypatch.setattr("pgtask_sa.solitude.PATIENCE", (0.1, 0.1))
    suspect, other = Long(), Long()
    suspect.register(running, "sync", "A", mode="transactional", max_attempts=10)
    other.register(running, "sync", "B", mode="transactional", timeout=None)
    suspect.release.set()
    running.enqueue("A")
    for worker_id in (1, 2):
        leave_behind(running, "A", worker_id=worker_id, alone=False)
    running.enqueue("B", priority=-1)
    with running:
        for times in (1, 2):
            running.until(lambda times=times: times == len(running.told("task.postponed")))
            assert ([], 1) == (suspect.starts, other.waiting)
            running.execute("update task set run_at = now() where task_type = 'A'")
        other.release.set()
        running.until(lambda: [3] == suspect.starts)


def test_for_whom_others_wait(monkeypatch):
    """For one that must be alone not again and again, but longer when they did not end."""
    gate = Gate()
    gate.enter("one")
    gate.enter("two")
    first = gate.patience(strictly=True)
    assert first > gate.patience(strictly=False) > 0
    assert not gate.keep("one")
    assert gate.give_up() > SHARE * first / 2
    assert gate.patience(strictly=True) < gate.patience(strictly=False)
    later = time.monotonic() + 2 * SHARE * first
    monkeypatch.setattr("time.monotonic", lambda: later)
    assert first < gate.patience(strictly=True)
    gate.leave("two")
    assert gate.keep("one")
    assert not gate.enter("two")
    gate.open("one")
    assert gate.enter("two")
    assert first == gate.patience(strictly=True)
    gate.give_up()
    gate.leave("one")
    assert gate.patience(strictly=True) < first
    gate.leave("two")  # whoever it was that took long
    assert first < gate.patience(strictly=True)


# -- who is listed --------------------------------------------------------------------------------


def test_a_dead_worker_is_taken_out(running, monkeypatch):
    """After a while, by a living one; but not as long as what it held is to be counted."""
    monkeypatch.setattr("pgtask_sa.leases.CARE", 0.05)
    running.enqueue("UNKNOWN")
    leave_behind(running, "UNKNOWN", worker_id=1)
    leave_behind(running, "NONE", worker_id=2)
    _transactional(running)
    with running:
        running.until(lambda: 2 not in [n for n, _ in running.rows(ENTRIES)])
        assert 1 in [n for n, _ in running.rows(ENTRIES)]
        running.execute("delete from task")
        running.until(lambda: 1 not in [n for n, _ in running.rows(ENTRIES)])
        running.until(lambda: 2 == running.count("task_worker"))
    assert 0 == running.count("task_worker")


def test_a_worker_that_lost_its_connection(running, monkeypatch):
    """It works on, is listed anew, and its tasks are not counted."""
    monkeypatch.setattr("pgtask_sa.leases.CARE", 0.05)
    long = _transactional(running)
    with running:
        running.enqueue("A")
        running.until(lambda: long.waiting)
        [lost] = presences(running)
        running.execute("select pg_terminate_backend(:pid)", pid=lost)
        running.execute("delete from task_worker")
        running.until(lambda: lost not in presences(running) and presences(running))
        running.until(lambda: 2 <= running.count("task_worker"))
        running.enqueue("A")
        running.until(lambda: long.waiting == 2)
        running.until(lambda: any(ids for _, ids in running.rows(ENTRIES)))
        long.release.set()
        running.until_empty()
    assert [1, 1] == long.starts


def test_the_first_claims_of_a_worker(running, monkeypatch):
    """Whether the dead name one of the tasks is known from the beginning, not asked each time."""
    looked = []
    monkeypatch.setattr(Presence, "look", lambda _self, batch: looked.append(batch) or {})
    _transactional(running, released=True)
    running.enqueue("A")
    with running:
        running.until_empty()
    assert [] == looked


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_session_that_cannot_be_made(db_url, direct_url, kind):
    """No lane is kept from noting what it runs by one that got no further."""
    failures = iter([False] * 2 + [True] * 3)  # once it is known where the lanes' rows are

    def failing(make):
        def made(*args, **options):
            if next(failures, False):
                raise RuntimeError("no session")
            return make(*args, **options)

        return made

    sessions = {
        "sync": {"session": failing(TaskSession)},
        "async": {"async_session": failing(AsyncTaskSession)},
    }
    running = Running(db_url, concurrency=2, direct_url=direct_url, **sessions[kind])
    long = Long().register(running, kind, "A", mode="transactional")
    long.release.set()
    with running:
        for _ in range(4):
            running.enqueue("A")
            running.until_empty()
    assert [1] * 4 == long.starts
