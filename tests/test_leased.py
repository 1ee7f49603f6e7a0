"""The leased mode: long work without a long transaction, and at most one worker that writes."""

from __future__ import annotations

import contextlib
import threading

import pytest
from fleet import Fleet, events
from leased import KINDS, Long, brief, mark
from proxy import TcpProxy
from running import Running
from sqlalchemy import Engine, create_engine, event, text
from waiting import let_pass, wait_until

from pgtask_sa import Discard, Retry, Snooze, TaskRegistry, TaskSession
from pgtask_sa.errors import LeaseLost
from pgtask_sa.fence import PAST_FENCE
from pgtask_sa.leases import LeasedRuns
from pgtask_sa.testing import drain

LEASED = "select attempts, lease_token is not null, run_at > now() from task"
TRANSACTIONS = """
select 1 from pg_stat_activity
where datname = current_database() and pid <> pg_backend_pid() and xact_start is not null
"""


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def running(db_url) -> Running:
    return Running(db_url, idle_interval=0.2)


def _dead(running: Running) -> list[tuple]:
    found = running.rows("select task_type, attempts, reason, last_error from dead_task")
    return [(kind, n, reason, error.partition("\n")[0]) for kind, n, reason, error in found]


# -- the mode itself ------------------------------------------------------------------------------


def test_no_transaction_is_open_while_it_runs(running, kind):
    """The claim is committed, counted and leased; the last writes and the end are one commit."""
    long = Long(last=lambda session, _task: mark(session, 1)).register(running, kind)
    with running:
        running.enqueue("LONG")
        running.until(lambda: long.waiting)
        running.until(lambda: [] == running.rows(TRANSACTIONS))
        assert [(1, True, True)] == running.rows(LEASED)
        long.release.set()
        running.until_empty()
    assert ([1], [1], ["task.done"]) == (long.starts, running.marks(), running.told("task.done"))
    assert [] == running.rows("select 1 from dead_task")


@pytest.mark.parametrize("stops", [False, True])
def test_a_lease_whose_task_was_not_begun(running, kind, monkeypatch, stops):
    """The claim was committed, then came a cut: given back at once, and nothing is counted."""
    long = Long().register(running, kind, lease=3600, max_attempts=1)
    long.release.set()
    whole, cuts = LeasedRuns.run, []

    def cut(runs: LeasedRuns) -> None:
        if not runs.execution.granted or cuts:
            return whole(runs)
        cuts.append(running.rows(LEASED))
        if stops:
            running.worker.stop(now=True)
        raise ConnectionError("lost")

    monkeypatch.setattr(LeasedRuns, "run", cut)
    with running:
        running.enqueue("LONG")
        if stops:
            running.wait()
            running.until(lambda: [(0, False, False)] == running.rows(LEASED))
        else:
            running.until_empty()
    assert ([[(1, True, True)]], [] if stops else [1]) == (cuts, long.starts)
    assert [] == _dead(running)


def test_what_it_commits_stays(running, kind):
    """Its own commits are for good; what it has not committed when it fails is undone."""

    def body(session, task):
        if task.attempt == 1:
            for i in (1, 2):
                mark(session, i)
                session.commit()
            with session.begin_nested():
                mark(session, 3)
            raise ValueError("after two commits")
        with session.begin_nested():
            mark(session, 4)
        session.commit()

    long = brief(running, kind, "LONG", body)
    with running:
        running.enqueue("LONG")
        running.until_empty()
    assert ([1, 2], [1, 2, 4], []) == (long.starts, running.marks(), running.dead())


def test_words_of_command(running, kind):
    """Failures, Retry, Discard and Snooze mean the same as in the transactional mode."""

    def snooze(session, task):
        mark(session, task.attempt)
        if len(snoozing.starts) == 1:
            raise Snooze(0.01)

    def fail(error):
        def body(session, _task):
            mark(session, 9)
            raise error

        return body

    snoozing = brief(running, kind, "SNOOZE", snooze)
    brief(running, kind, "FAIL", fail(ValueError("so")), max_attempts=2)
    brief(running, kind, "AGAIN", fail(Retry("so", after=0.01)), max_attempts=3)
    brief(running, kind, "GIVE_UP", fail(Discard("so")))
    with running:
        for name in running.tasks:
            running.enqueue(name)
        running.until_empty()
    assert ([1, 1], [1]) == (snoozing.starts, running.marks())
    assert [
        ("AGAIN", 3, "failed", "Retry: so"),
        ("FAIL", 2, "failed", "ValueError: so"),
        ("GIVE_UP", 1, "discarded", "Discard: so"),
    ] == sorted(_dead(running))


def test_transactions_that_fail(running, kind):
    """B4, B9: a swallowed error, a constraint that fails at the last commit, and rollback."""
    running.execute("create table parent (i int primary key)")
    running.execute("create table child (i int references parent deferrable initially deferred)")

    def swallow(session, _task):
        mark(session, 1)
        with contextlib.suppress(Exception):
            session.execute(text("select 1/0"))

    def orphan(session, _task):
        session.execute(text("insert into child values (1)"))

    def roll_back(session, _task):
        mark(session, 2)
        session.rollback()

    for name, body in {"SWALLOW": swallow, "ORPHAN": orphan, "ROLL_BACK": roll_back}.items():
        brief(running, kind, name, body, max_attempts=1)
    with running:
        for name in running.tasks:
            running.enqueue(name)
        running.until_empty()
    assert ([], 0, 0) == (running.marks(), running.count("child"), running.count())
    by_type = {name: (reason, error) for name, _, reason, error in _dead(running)}
    assert {"SWALLOW", "ORPHAN"} == by_type.keys()
    assert "swallowed" in by_type["SWALLOW"][1]
    assert "foreign key" in by_type["ORPHAN"][1]


def test_both_modes_in_one_worker(db_url):
    """A batch may hold both; each task is done once."""
    running = Running(db_url, batch_size=10, drain=True)
    for i, (kind, mode) in enumerate((k, m) for k in KINDS for m in ("leased", "transactional")):
        long = Long(lambda session, task: mark(session, task.task_id))
        long.release.set()
        long.register(running, kind, f"{kind} {mode}", mode=mode)
        running.enqueue(f"{kind} {mode}", *[{"i": n} for n in range(i, i + 8)])
    numbers = [i for (i,) in running.rows("select task_id from task order by 1")]
    with running:
        running.wait()
    assert (numbers, 0, 0) == (running.marks(), running.count(), running.count("dead_task"))


def test_coalescing_with_a_task_that_runs(running):
    """A leased task that runs may have read already: an equal one is added, at once."""
    long = Long().register(running, "sync")
    with running:
        running.enqueue("LONG", {"i": 1}, coalesce=True)
        running.until(lambda: long.waiting)
        running.enqueue("LONG", {"i": 1}, {"i": 1}, coalesce=True)
        assert 2 == running.count()
        long.release.set()
        running.until_empty()
    assert [1, 1] == long.starts


def test_drained_in_a_test(engine):
    """`testing.drain` runs handlers of this mode in the test's own transaction."""
    tasks = TaskRegistry()
    ran = []

    @tasks.handler("LONG", mode="leased")
    def long(session, params, task):
        session.execute(text("select 1"))
        session.commit()
        ran.append(task.attempt)

    with TaskSession(engine) as session:
        session.enqueue("LONG", {})
        drain(session, tasks)
        session.rollback()
    assert [1] == ran


# -- leases that hold, and leases that are lost ---------------------------------------------------


def test_a_lease_is_renewed(running):
    """It runs on for more than two leases, and no idle lane or other worker takes it."""
    both = [Long().register(running, kind, kind.upper()) for kind in KINDS]
    with running, Running(running.url, running.tasks, idle_interval=0.2):
        running.enqueue("SYNC")
        running.enqueue("ASYNC")
        running.until(lambda: all(long.waiting for long in both))
        let_pass(4.5)
        for long in both:
            long.release.set()
        running.until_empty()
    assert [[1], [1]] == [long.starts for long in both]


def test_a_worker_that_is_cut_off(db_url, kind, monkeypatch):
    """Another takes over when the lease ends; of the first nothing more is written."""
    monkeypatch.setattr("pgtask_sa.watchdog.SECOND_GRACE", 30)  # it is not written off
    with TcpProxy.before(db_url) as proxy:
        first, second = Running(proxy.url(db_url)), Running(db_url, idle_interval=0.2)

        def write(i):
            return Long(lambda s, _t: (mark(s, i), s.commit()), lambda s, _t: mark(s, 10 * i))

        lost, won = write(1).register(first, kind), write(2).register(second, kind)
        with first:
            second.enqueue("LONG")
            first.until(lambda: lost.waiting)
            proxy.stall()
            with second:
                second.until(lambda: won.waiting)
                proxy.resume()
                lost.release.set()
                first.until(lambda: "lease.lost" in first.told())
                won.release.set()
                second.until_empty()
    assert ([1], [2], [1, 2, 20]) == (lost.starts, won.starts, second.marks())
    assert ([], []) == (first.told("task.done", "task.retry"), second.dead())


@pytest.mark.parametrize("name", ["FROZEN", "ASYNC_FROZEN"])
def test_a_worker_that_stands_still(db_url, tmp_path, name):
    """SIGSTOP: another takes over; after SIGCONT the first one cannot write any more."""
    fleet = Fleet(db_url, target="poison_tasks:tasks")
    file, go = tmp_path / "starts", tmp_path / "go"
    fleet.enqueue(name, {"file": str(file), "go": str(go)})
    options = ("--log-format", "json", "--idle-interval", "0.2")
    with fleet.worker(*options) as first:
        fleet.until(file.exists)
        first.suspend()
        with fleet.worker(*options):
            fleet.until(lambda: fleet.count() == 0)
        go.touch()
        first.resume()
        wait_until(lambda: events(first, "lease.lost"), 10, message=lambda: first.output)
        assert [] == events(first, "task.done", "task.retry")
    assert ([2], b"xx", 0) == (fleet.done(), file.read_bytes(), fleet.count("dead_task"))


def test_a_worker_that_stands_still_while_it_renews(running):
    """The server alone begins and ends that transaction: a lock of it could outlive the lease."""
    renewed, go = threading.Event(), threading.Event()

    def stand_still(_connection):
        if threading.current_thread().name == "pgtask-keeper":
            renewed.set()
            go.wait(60)

    long = Long().register(running, "sync")
    event.listen(Engine, "commit", stand_still)
    try:
        with running:
            running.enqueue("LONG")
            running.until(lambda: long.waiting)
            assert renewed.wait(30)
            assert [(1,)] == running.rows("select 1 from task for update skip locked")
            go.set()
            long.release.set()
            running.until_empty()
    finally:
        go.set()
        event.remove(Engine, "commit", stand_still)
    assert [1] == long.starts


@pytest.mark.parametrize("how", ["its own", "the last"])
def test_a_commit_after_the_lease_was_lost(running, kind, how):
    """It raises LeaseLost, be it the handler's own or the worker's; nothing is written."""

    def last(session, _task):
        mark(session, 1)
        if how == "its own":
            session.commit()

    long = Long(last=last).register(running, kind, lease=60)
    with running:
        running.enqueue("LONG")
        running.until(lambda: long.waiting)
        running.execute("delete from task")
        long.release.set()
        running.first("lease.lost")
    assert ([], 0) == (running.marks(), running.count("dead_task"))
    assert ([LeaseLost] if how == "its own" else []) == [type(e) for e in long.errors]


PAST = {
    "COMMIT": lambda session: session.execute(text("COMMIT")),
    "end": lambda session: session.connection().exec_driver_sql(" end transaction"),
    "rollback": lambda session: session.execute(text("rollback")),
    "begin": lambda session: session.execute(text("begin")),
    "connection": lambda session: session.connection().commit(),
    "transaction": lambda session: session.connection().get_transaction().commit(),
    "driver": lambda session: session.connection().connection.dbapi_connection.commit(),
}


@pytest.mark.parametrize("how", PAST)
def test_a_commit_past_the_session(running, kind, how):
    """Where nothing looks at the lease, an end of a transaction is refused, and says why."""

    def body(session, task):
        mark(session, task.attempt)
        session.commit()
        mark(session, 10)
        if task.attempt == 1:
            PAST[how](session)

    long = brief(running, kind, "LONG", body, max_attempts=2)
    with running:
        running.enqueue("LONG")
        assert PAST_FENCE in running.first("task.retry").fields["error"]
        running.until_empty()
    assert ([1, 2], [1, 2, 10]) == (long.starts, running.marks())


def test_a_lease_that_is_lost_ends_the_handler(running, monkeypatch):
    """A coroutine is cancelled; a lane whose thread goes on is written off, and replaced."""
    monkeypatch.setattr("pgtask_sa.watchdog.SECOND_GRACE", 0.2)
    running.options["concurrency"] = 1
    both = [Long().register(running, kind, kind.upper()) for kind in KINDS]
    brief(running, "sync", "GOOD", lambda session, _task: mark(session, 7))
    with running:
        running.enqueue("SYNC")
        running.enqueue("ASYNC")
        running.until(lambda: all(long.waiting for long in both))
        running.execute("delete from task")
        running.until(lambda: not both[1].waiting)
        running.first("lane.stuck")
        running.enqueue("GOOD")
        running.until(lambda: [7] == running.marks())
        both[0].release.set()
    assert [[1], [1]] == [long.starts for long in both]
    assert ["lane.stuck"] == running.told("lane.stuck")


def test_a_connection_that_is_lost(running, kind):
    """Nobody's fault: it runs again, uncounted."""

    def last(session, _task):
        if len(long.starts) == 1:
            session.execute(text("select pg_terminate_backend(pg_backend_pid())"))
        mark(session, 1)

    long = Long(last=last)
    long.release.set()
    long.register(running, kind, max_attempts=1)
    with running:
        running.enqueue("LONG")
        running.until_empty()
    assert ([1, 1], [1], []) == (long.starts, running.marks(), running.dead())


@pytest.mark.direct  # a pooler takes another one in its place
def test_a_connection_that_is_lost_while_it_is_not_used(running, kind):
    """It shows at the next use: nobody's fault, too, and what was committed stays."""
    long = Long(lambda s, _t: (mark(s, 1), s.commit()), lambda s, _t: mark(s, 2))
    long.register(running, kind, lease=60)
    with running:
        running.enqueue("LONG")
        running.until(lambda: long.waiting)
        running.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and query ilike 'commit%'"
        )
        long.release.set()
        running.until_empty()
    assert ([1, 1], [1, 1, 2]) == (long.starts, running.marks())


def test_trouble_with_another_database(running, kind):
    """Only our own database is beyond blame: of others a failure is counted."""
    elsewhere = create_engine("postgresql+psycopg://nobody@127.0.0.1:1/none")

    def body(_session, _task):
        elsewhere.connect()

    long = brief(running, kind, "LONG", body, max_attempts=2)
    with running:
        running.enqueue("LONG")
        running.until_empty()
    assert ([1, 2], [("LONG", 2, "failed")]) == (long.starts, running.dead())


def test_trouble_without_an_end(running, monkeypatch):
    """What is nobody's fault is not counted, but not for ever."""
    monkeypatch.setattr("pgtask_sa.arrears.MAX_BLAMELESS", 3)

    def body(session, _task):
        session.execute(text("do $$ begin raise sqlstate '40P01'; end $$"))

    long = brief(running, "sync", "LONG", body, max_attempts=2)
    with running:
        running.enqueue("LONG")
        running.until_empty()
    assert ([1, 1, 1, 1, 2], [("LONG", 2, "failed")]) == (long.starts, running.dead())


# -- the end of a worker --------------------------------------------------------------------------


def test_a_stop_waits_for_the_grace(running, kind):
    """What ends in time is done."""
    long = Long(last=lambda session, _task: mark(session, 1)).register(running, kind)
    with running:
        running.enqueue("LONG")
        running.until(lambda: long.waiting)
        running.worker.stop()
        running.first("worker.stopping")
        long.release.set()
        running.wait()
    assert (0, 0, [1]) == (running.code, running.count(), running.marks())


def test_a_stop_gives_back_what_does_not_end(running, kind):
    """At once and uncounted; what the thread that is left behind still writes does not count."""
    running.options["grace"] = 0.1
    long = Long(last=lambda session, _task: mark(session, 1)).register(running, kind, lease=60)
    with running:
        running.enqueue("LONG")
        running.until(lambda: long.waiting)
        running.worker.stop()
        running.wait()
    running.until(
        lambda: (
            [(0, None, True)]
            == running.rows("select attempts, lease_token, run_at <= now() from task")
        ),
        2,
    )
    long.release.set()
    running.until(lambda: not _lanes())
    assert (3, [], 1) == (running.code, running.marks(), running.count())


def _lanes() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("pgtask-lane")]


# -- deadlines ------------------------------------------------------------------------------------


@pytest.mark.parametrize("enforced", [True, False])
def test_a_deadline(running, kind, enforced, monkeypatch):
    """Counted, undone, and nothing is committed late, even if nobody could take the lease away."""
    monkeypatch.setattr("pgtask_sa.watchdog.SECOND_GRACE", 0.2)
    monkeypatch.setattr("pgtask_sa.faces.SECOND_GRACE", 0.2)
    running.options["concurrency"] = 1
    long = Long(lambda s, _t: mark(s, 1), lambda s, _t: mark(s, 2))
    long.register(running, kind, max_attempts=1, lease=60, timeout=0.3)
    brief(running, kind, "GOOD", lambda session, _task: mark(session, 7))
    if not enforced:
        monkeypatch.setattr("pgtask_sa.enforcement.take_over", _refuse)
    with running:
        running.enqueue("LONG")
        running.until(lambda: long.waiting)
        running.until(running.dead if enforced else lambda: _is_over(running, long))
        long.release.set()
        running.until(running.dead)
        running.enqueue("GOOD")
        running.until(lambda: [7] == running.marks())
    assert [("LONG", 1, "failed", "TaskFailed: timed out after 0.3 s")] == _dead(running)
    assert ([1], [7], 0) == (long.starts, running.marks(), running.count())


def _is_over(running: Running, long: Long) -> bool:
    return not long.waiting or "task.timeout" in running.told()


def _refuse(*_args):
    raise OSError("the server cannot be reached")
