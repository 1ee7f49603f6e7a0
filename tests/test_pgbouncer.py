"""Through a real PgBouncer in transaction mode: nothing is lost, and nothing is left to strangers.

The whole functional suite runs through it with PGTASK_TEST_POOLER=pgbouncer; here is what only
matters there.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from faults import Load, alternate, changes
from fleet import HERE, Fleet, events, started
from own_models import UniqueJob
from pgbouncer import PgBouncer, pgbouncer, program
from processes import WorkerProcess
from proxy import TcpProxy
from running import Running
from sqlalchemy import Engine, create_engine, event, make_url, text
from sweeping import Sweeper
from waiting import SOON, let_pass, wait_until

from pgtask_sa import Discard, TaskSession, wakeup
from pgtask_sa.engines import database_url, is_pooled, worker_async_engine, worker_engine
from pgtask_sa.worker import _worker
from pgtask_sa.worker_arguments import make_parser

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from postgres_server import PostgresServer

NEVER = 60  # seconds; far longer than anything here may take
SETTINGS = ("client_connection_check_interval", "datestyle", "idle_in_transaction_session_timeout")


@pytest.fixture
def pooled_url(pooler: PgBouncer, direct_db_url: str) -> str:
    return pooler.url(direct_db_url)


@pytest.fixture(scope="module")
def narrow(server_url: str) -> Iterator[PgBouncer]:
    """Give a pooler with a single connection for each database."""
    if program() is None:
        pytest.skip("needs the program pgbouncer")
    with pgbouncer(server_url, default_pool_size=1) as narrow:
        yield narrow


@pytest.fixture
def narrow_url(narrow: PgBouncer, direct_db_url: str) -> str:
    return narrow.url(direct_db_url)


def _running(watched: str, through: str, **options: Any) -> Running:
    """Return a worker that goes through the pooler, watched from outside of it."""
    running = Running(watched, **options)
    running.url = database_url(through)
    return running


def _register(running: Running, kind: str, task_type: str, **options: Any) -> Callable[[Any], Any]:
    """Register ``body(session, params)`` as a handler of that kind."""

    def register(body: Any) -> Any:
        async def awaited(session, params):
            await session.run_sync(body, params)

        running.tasks.handler(task_type, **options)(body if kind == "sync" else awaited)
        return body

    return register


def _mark(session: Any, params: Any) -> None:
    session.execute(text("insert into mark values (:i)"), params)


@contextmanager
def _application(url: str, **options: Any) -> Iterator[TaskSession]:
    """Give the session of an application that enqueues through the pooler."""
    engine = create_engine(url, connect_args={"prepare_threshold": None})
    with TaskSession(engine, **options) as session:
        yield session
    engine.dispose()


# -- what a connection is --------------------------------------------------------------------


def _shown(connection: Any) -> list[str]:
    return [connection.scalar(text(f"show {name}")) for name in SETTINGS]


def _look(connection: Any) -> tuple[bool, bool, list[str]]:
    prepares = connection.connection.driver_connection.prepare_threshold is not None
    return is_pooled(connection), prepares, _shown(connection)


async def _look_async(url: str) -> tuple[bool, bool, list[str]]:
    engine = worker_async_engine(database_url(url), 1)
    async with engine.connect() as connection:
        found = await connection.run_sync(_look)
    await engine.dispose()
    return found


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("pooled", [False, True])
def test_a_connection_knows_what_it_is(direct_db_url, pooled_url, pooled, kind):
    """Either way a transaction finds its settings; only a direct connection may prepare."""
    url = pooled_url if pooled else direct_db_url
    if kind == "async":
        found = asyncio.run(_look_async(url))
    else:
        engine = worker_engine(database_url(url), 1)
        with engine.connect() as connection:
            found = _look(connection)
        engine.dispose()
    assert (pooled, not pooled, ["250ms", "ISO, MDY", "0"]) == found


def _settings(url: str) -> tuple[int, list[Any]]:
    """Return the server process that answers, and all its settings."""
    with psycopg.connect(url.replace("+psycopg", ""), prepare_threshold=None) as connection:
        # those of a language are there as soon as a trigger has been called
        settings = (
            "select name, setting from pg_settings where name not like 'plpgsql.%' order by 1"
        )
        rows = connection.execute(settings).fetchall()
        tables = connection.execute("select relname from pg_class where relpersistence = 't'")
        who = connection.execute("select current_user, session_user").fetchall()
        channels = connection.execute("select pg_listening_channels()").fetchall()
        rows += tables.fetchall() + who + channels
        return connection.execute("select pg_backend_pid()").fetchall()[0][0], rows


def _spoil(session: Any, params: Any) -> None:
    for statement in (
        "set search_path = pg_catalog",
        "select set_config('pgtask_test.mine', 'yes', false)",
        "set statement_timeout = '3s'",
        "set role pg_monitor",
        "set datestyle = 'SQL, DMY'",
        "create temp table mine (i int)",
        "listen mine",
    ):
        session.execute(text(statement))


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("mode", ["transactional", "leased"])
@pytest.mark.parametrize("spoil", [False, True])
def test_nothing_is_left_to_the_next_client(direct_db_url, narrow_url, kind, mode, spoil):
    """Neither what the worker sets, nor what its handlers do: they are one pool with strangers."""
    running = _running(direct_db_url, narrow_url, concurrency=1, drain=True, batch_size=3)
    _register(running, kind, "SET", mode=mode)(_spoil if spoil else lambda session, params: None)
    _register(running, kind, "A")(_mark)
    if not spoil:
        running.enqueue("A", {"i": 1}, {"i": 2})
    running.enqueue("SET")
    before = _settings(narrow_url)
    with running:
        assert 0 == running.wait()
    server, rows = _settings(narrow_url)
    assert ([], 0) == (running.dead(), running.count())
    assert before[0] == server
    ours = ("pgtask_test.mine", "yes") in rows
    assert (False, before[1]) == (ours, rows)


@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_handler_that_is_longer_than_transactions_may_be_idle(
    direct_db_url, narrow_url, kind, pooled
):
    """F1: its own timeout decides, not the one that somebody gave to the database."""
    running = _running(direct_db_url, narrow_url if pooled else direct_db_url, drain=True)
    name = make_url(direct_db_url).database
    running.execute(f"alter database {name} set idle_in_transaction_session_timeout = '150ms'")

    @_register(running, kind, "LONG")
    def long(session, params):
        _mark(session, {"i": 1})
        threading.Event().wait(0.5)

    running.enqueue("LONG")
    with running:
        running.wait()
    assert ([1], []) == (running.marks(), running.told("task.retry", "transaction.lost"))


@pytest.mark.parametrize(("kind", "batch_size"), [("sync", 1), ("async", 2)])
def test_a_transaction_that_the_server_ends(direct_db_url, pooled_url, kind, batch_size):
    """F2: a failed attempt, also if COMMIT is what finds it, which the pooler answers as well."""
    running = _running(direct_db_url, pooled_url, concurrency=1, batch_size=batch_size)
    if not running.rows("select 1 from pg_settings where name = 'transaction_timeout'"):
        pytest.skip("this server has no transaction_timeout")
    # it holds for the worker's own transactions as well, on a machine that is busy
    name = make_url(direct_db_url).database
    running.execute(f"alter database {name} set transaction_timeout = '700ms'")
    slow = _register(running, kind, "SLOW", max_attempts=2, backoff=0, timeout=None)
    slow(lambda session, params: threading.Event().wait(1.2))
    running.enqueue("SLOW", *[{}] * batch_size)
    with running:
        running.until(lambda: [("SLOW", 2, "failed")] * batch_size == running.dead(), 30)
    errors = [error for (error,) in running.rows("select last_error from dead_task")]
    assert [True] * batch_size == ["transaction timeout" in error for error in errors]
    assert [] == running.told("commit.unknown", "database.down")


# -- work ------------------------------------------------------------------------------------


@pytest.fixture
def discarded() -> Iterator[list[str]]:
    """Give the statements by which anybody discards plans."""
    found: list[str] = []

    def see(_conn, _cursor, statement, *_):
        if "DISCARD" in statement:
            found.append(statement)

    event.listen(Engine, "before_cursor_execute", see)
    yield found
    event.remove(Engine, "before_cursor_execute", see)


def test_three_workers_on_one_connection(direct_db_url, narrow_url, monkeypatch, discarded):
    """F8: statements that come again and again, and a prepared one would be somewhere else."""
    monkeypatch.setattr("pgtask_sa.turns.REPLAN_INTERVAL", 0.0)
    monkeypatch.setattr("pgtask_sa.turns.MANY_CLAIMS", 0)
    workers = [
        _running(direct_db_url, narrow_url, concurrency=1, drain=True, batch_size=size)
        for size in (1, 1, 5)
    ]
    for running in workers:
        _register(running, "sync", "A")(_mark)
        _register(running, "async", "B")(_mark)
    with _application(narrow_url) as session:
        for i in range(30):
            session.enqueue("A", {"i": i})
            session.enqueue("B", {"i": i + 30})
            session.commit()
    with ExitStack() as stack:
        for running in workers:
            stack.enter_context(running)
        assert [0, 0, 0] == [running.wait() for running in workers]
    assert list(range(60)) == workers[0].marks()
    told = {name for running in workers for name in running.told()}
    assert {"worker.started", "worker.stopped", "task.done", "presence.pooled"} == told
    assert [] == discarded  # they would be everybody's plans


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_every_outcome(direct_db_url, pooled_url, kind, batch_size):
    """Done, tried again, buried, discarded; each error is kept, also one of the server."""
    running = _running(direct_db_url, pooled_url, drain=True, batch_size=batch_size)
    _register(running, kind, "GOOD")(_mark)
    failed: list[int] = []

    @_register(running, kind, "RETRY", backoff=0, max_attempts=2)
    def once(session, params):
        _mark(session, params)
        if not failed:
            failed.append(1)
            raise ValueError("once")

    @_register(running, kind, "SQL", backoff=0, max_attempts=2)
    def sql(session, params):
        _mark(session, params)
        session.execute(text("select 1 / 0"))

    @_register(running, kind, "DISCARD")
    def discard(session, params):
        raise Discard("too old")

    with _application(pooled_url) as session:
        for i, name in enumerate(("GOOD", "RETRY", "SQL", "DISCARD")):
            session.enqueue(name, {"i": i})
        session.commit()
    with running:
        assert 0 == running.wait()
    assert ([0, 1], 0) == (running.marks(), running.count())
    dead = running.rows("select task_type, attempts, last_error from dead_task order by 1")
    assert [("DISCARD", 1), ("SQL", 2)] == [row[:2] for row in dead]
    assert "division by zero" in dead[1][2]


def test_coalesce(pooled_url):
    """Its lock ends with the transaction, so it is none that a pooler could give to others."""
    with _application(pooled_url) as session, _application(pooled_url) as other:
        first = session.enqueue("A", {"a": 1}, coalesce=True)
        session.commit()
        assert first is not None
        for each in (session, other, session):
            each.enqueue("A", {"a": 1}, coalesce=True)
            each.commit()
        assert [(1,)] == [tuple(row) for row in session.execute(text("select count(*) from task"))]


def test_a_unique_constraint(pooled_url):
    """A duplicate is skipped."""
    with _application(pooled_url, task_class=UniqueJob) as session:
        UniqueJob.__table__.create(session.connection())
        found = [session.enqueue("A", {"a": 1}) is None for _ in range(3)]
        session.commit()
    assert [False, True, True] == found


@pytest.mark.parametrize("task_type", ["QUERY", "SLEEP"])
def test_a_killed_worker_gives_its_task_back(direct_db_url, pooled_url, task_type, figures):
    """F3: the pooler drops its server connection, and the server looks for that while it works."""
    fleet = Fleet(direct_db_url)
    with fleet.worker(url=pooled_url) as worker:
        fleet.enqueue(task_type, {"i": 1, "seconds": NEVER})
        fleet.until(fleet.runner)
        killed = time.monotonic()
        worker.kill()
        fleet.until(lambda: [0] == fleet.attempts(), 5)
        took = time.monotonic() - killed
    figures(f"{task_type}: the row is free {took:.2f} s after SIGKILL, through the pooler")
    assert SOON > took
    assert [] == fleet.done()


@pytest.mark.parametrize("task_type", ["QUERY", "ASYNC_SLEEP"])
def test_a_killed_workers_task_runs_elsewhere(direct_db_url, pooled_url, task_type):
    """Promise 3 holds, to about a second: nobody is told, the others look."""
    fleet = Fleet(direct_db_url)
    with fleet.worker(url=pooled_url) as first:
        fleet.enqueue(task_type, {"i": 1, "seconds": NEVER})
        runner = fleet.until(fleet.runner)
        with fleet.worker("--idle-interval", "30", url=pooled_url) as second:
            second.wait_for_line("through a pooler", 20)
            first.kill()
            killed = time.monotonic()
            fleet.until(lambda: fleet.runner() not in (None, runner), 5)
            assert SOON > time.monotonic() - killed
    assert ([], 0) == (fleet.done(), fleet.count("dead_task"))


def test_exactly_once_whoever_is_killed(direct_db_url, pooled_url):
    """Promise 2: workers that are killed all the time, and each task leaves one row."""
    total, dice = 600, random.Random(7)
    fleet = Fleet(direct_db_url)

    def worker(size: str) -> WorkerProcess:
        options = ("--batch-size", size, "--concurrency", "2", "--log-level", "warning")
        return stack.enter_context(fleet.worker(*options, url=pooled_url))

    with ExitStack() as stack:
        workers = {size: worker(size) for size in ("1", "10")}
        for i in range(0, total, 100):
            kind = "ASYNC_ROW" if i % 200 else "ROW"
            fleet.enqueue(kind, *[{"i": n} for n in range(i, i + 100)])
            size = dice.choice(list(workers))
            if i < total - 200:
                workers[size].wait_for_line("through a pooler", 20)
                fleet.until(lambda: fleet.done() or not fleet.count())
                workers[size].kill()
                workers[size] = worker(size)
        fleet.until(lambda: fleet.count() == 0, 30)
    assert (list(range(total)), 0) == (fleet.done(), fleet.count("dead_task"))


@contextmanager
def _server_down(server: PostgresServer, _pooler: PgBouncer) -> Iterator[None]:
    server.stop("immediate")
    yield
    server.start()


@contextmanager
def _pooler_down(_server: PostgresServer, pooler: PgBouncer) -> Iterator[None]:
    pooler.kill()
    yield
    pooler.start()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("outage", [_server_down, _pooler_down], ids=["server", "pooler"])
def test_crashes_under_load(restartable_db_url, restartable_server, outage, figures):
    """F7: of the server behind the pooler, or of the pooler itself; everybody goes through it.

    Nothing is lost, nothing doubled, and it comes back by itself. One worker listens beside it.
    """
    if program() is None:
        pytest.skip("needs the program pgbouncer")
    fleet, back = Fleet(restartable_db_url), []
    options = ("--log-format", "json", "--idle-interval", "30", "--concurrency", "2")
    with pgbouncer(restartable_server.admin_url) as pooler:
        url = pooler.url(restartable_db_url)
        direct = ("--direct-url", restartable_db_url)
        with (
            fleet.worker(*options, url=url) as one,
            fleet.worker(*options, *direct, url=url) as two,
        ):
            started(one, two)
            with Load(fleet, through=url) as load:
                for crash in range(4):
                    so_far = len(load.confirmed)
                    wait_until(lambda least=so_far + 200: len(load.confirmed) > least, 20)
                    with outage(restartable_server, pooler):
                        let_pass(crash * 0.4)
                    back.append(load.first_done_after(time.time()))
            load.drain()
            began = time.monotonic()
            fleet.enqueue("ROW", {"i": -1})
            fleet.until(lambda: fleet.done()[0] == -1)
            single, found = time.monotonic() - began, load.lost_and_doubled()
        told = [changes(one), changes(two)]
        unknown = len(events(one, "commit.unknown") + events(two, "commit.unknown"))
    figures(
        f"{len(load.confirmed)} confirmed, {len(load.unknown)} unknown; workers' COMMITs without an"
        f" answer: {unknown}; back after {', '.join(f'{s:.2f}' for s in back)} s; one task"
        f" afterwards: {single:.2f} s; changes told: {[len(each) for each in told]}"
    )
    assert ([], [], 0) == found
    assert (True, True) == (2 * SOON > max(back), SOON > single)
    assert [True, True] == [alternate(each) for each in told]
    assert [] == events(one, "worker.error") + events(two, "worker.error")


# -- waking up -------------------------------------------------------------------------------


def _started(running: Running, *numbers: int) -> None:
    wanted = list(numbers)
    running.until(lambda: running.marks() == wanted)


def test_looking_instead_of_listening(direct_db_url, pooled_url):
    """F9: LISTEN would hear nothing, and give no error; it is said once, whatever comes."""
    with TcpProxy.before(pooled_url) as proxy:
        url = proxy.url(pooled_url)
        running = _running(direct_db_url, url, idle_interval=NEVER, report_interval=NEVER)
        _register(running, "sync", "A")(_mark)
        with running:
            running.first("listener.polling")
            for i in range(3):
                began = time.monotonic()
                running.enqueue("A", {"i": i})
                _started(running, *range(i + 1))
                assert SOON > time.monotonic() - began
                if i == 0:
                    proxy.drop_all()
            running.until(lambda: proxy.open >= 3)
    assert ["listener.polling"] == running.told("listener.polling", "listener.down")
    assert "--direct-url" in running.first("listener.polling").message


def test_what_follows_is_found_soon(direct_db_url, pooled_url, monkeypatch):
    """The first task after a quiet time may have to wait; those that come after it need not."""
    monkeypatch.setattr(wakeup, "POOLED_POLL", 3.0)
    running = _running(direct_db_url, pooled_url, concurrency=1, idle_interval=NEVER)
    _register(running, "sync", "A")(_mark)
    delays = []
    with running:
        running.first("listener.polling")
        _pause(running)
        running.enqueue("A", {"i": 0})
        _started(running, 0)
        for i in range(1, 4):
            began = time.monotonic()
            running.enqueue("A", {"i": i})
            _started(running, *range(i + 1))
            delays.append(time.monotonic() - began)
    assert 2.0 > min(delays), delays


def _pause(running: Running) -> None:
    """Wait until nobody has asked anything for a while."""
    quiet = (
        "select 1 from pg_stat_activity where datname = current_database()"
        " and pid <> pg_backend_pid() and state_change > now() - interval '0.4 s'"
    )
    running.until(lambda: [] == running.rows(quiet))


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_settings_of_a_transaction_whose_first_look_found_nothing(pooled_url, kind):
    """They are as for any other: what was opened in vain is not undone together with them."""
    sweeper, seen = Sweeper(kind, pooled_url), []

    @sweeper.handler("A")
    def body(session, params, task):
        seen.append(session.scalar(text("show client_connection_check_interval")))

    def work(execution):
        sweeper.enqueue({}, task_type="A")
        execution.sweep()  # it used its session
        sweeper.enqueue({}, task_type="A", priority=7)  # which nobody has met yet
        execution.sweep()

    sweeper.run(work)
    sweeper.close()
    assert ["250ms"] * 2 == seen


def test_an_idle_worker_holds_no_server_connection(direct_db_url, narrow_url):
    """No transaction is open while it sleeps, so that even a pool of one serves everybody."""
    running = _running(direct_db_url, narrow_url, concurrency=4, idle_interval=NEVER)
    _register(running, "sync", "A")(_mark)
    _register(running, "async", "B")(_mark)
    states = (
        "select distinct state, backend_xmin is null, backend_xid is null from pg_stat_activity"
        " where datname = current_database() and pid <> pg_backend_pid()"
    )
    with running:
        running.first("listener.polling")
        _pause(running)
        for _ in range(5):
            running.until(lambda: [("idle", True, True)] == running.rows(states))  # between looks
        with _application(narrow_url) as session:
            session.enqueue("B", {"i": 1})
            session.commit()
        _started(running, 1)


def test_a_direct_connection_to_listen_with(direct_db_url, pooled_url):
    """The work goes through the pooler, the news does not."""
    running = _running(
        direct_db_url, pooled_url, idle_interval=NEVER, direct_url=direct_db_url, concurrency=1
    )
    _register(running, "sync", "A")(_mark)
    with running:
        for i in range(3):
            running.until_idle()
            _pause(running)
            began = time.monotonic()
            with _application(pooled_url) as session:
                session.enqueue("A", {"i": i})
                session.commit()
            _started(running, *range(i + 1))
            assert SOON > time.monotonic() - began
    assert [] == running.told("listener.polling", "listener.down")


def test_a_direct_url_from_the_command_line(monkeypatch):
    """The option goes before the environment, and neither is needed."""
    monkeypatch.syspath_prepend(str(HERE))
    command = ["process_tasks:tasks", "--database-url", "postgresql://pooler/app"]

    def host(*more: str) -> str | None:
        url = _worker(make_parser().parse_args([*command, *more]), []).direct_url
        return None if url is None else url.host

    monkeypatch.delenv("DATABASE_DIRECT_URL", raising=False)
    assert (None, "a") == (host(), host("--direct-url", "postgres://a/app"))
    monkeypatch.setenv("DATABASE_DIRECT_URL", "postgresql://b/app")
    assert ("b", "a") == (host(), host("--direct-url", "postgresql+asyncpg://a/app"))
