"""An idle worker costs next to nothing, and wakes within milliseconds."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from running import Running
from sqlalchemy import create_engine, text
from sqlalchemy.orm import sessionmaker
from waiting import SOON, let_pass, wait_until

from pgtask_sa import Task, TaskSession, insert_task, wakeup
from pgtask_sa.doorbell import Doorbell
from pgtask_sa.engines import database_url, worker_engine
from pgtask_sa.events import Events
from pgtask_sa.pipeline import readable
from pgtask_sa.roster import Roster
from pgtask_sa.wakeup import AFTER_NOTIFY, FEW, GIVE_WAY, Health, Listener

if TYPE_CHECKING:
    from collections.abc import Iterator

# Far longer than anything here may take: what passes was not found by polling.
NEVER = 60


@pytest.fixture(params=["sync", "async"])
def running(request, db_url) -> Running:
    return _recorder(db_url, request.param)


def _recorder(db_url: str, kind: str = "sync", **options: Any) -> Running:
    """Return a worker whose handler of A writes when, by the server's clock, it began."""
    options = {"idle_interval": NEVER, "report_interval": NEVER, **options}
    running = Running(db_url, **options)
    running.execute("create table began (i int, at timestamptz default clock_timestamp())")

    def body(session, params):
        session.execute(text("insert into began (i) values (:i)"), params)

    async def awaited(session, params):
        await session.run_sync(body, params)

    running.tasks.handler("A")(body if kind == "sync" else awaited)
    return running


def _asleep(running: Running) -> None:
    """Wait until all is quiet: announced, and the quick looks after that are over."""
    running.until_idle()
    busy = (
        "select 1 from pg_stat_activity where datname = current_database()"
        " and pid <> pg_backend_pid() and state_change > now() - interval '0.3 s'"
    )
    running.until(lambda: [] == running.rows(busy))


def test_a_task_on_an_idle_system_starts_at_once(running: Running, direct_url):
    """The figure is the benchmark's; here it is enough that nobody waited for a poll."""
    running.options["direct_url"] = direct_url
    with running:
        _asleep(running)
        for i in range(5):
            began = time.monotonic()
            running.enqueue("A", {"i": i})
            running.until(lambda i=i: running.rows(f"select 1 from began where i = {i}"))
            assert SOON > time.monotonic() - began
            running.until_idle()


def test_kinds_that_take_turns(db_url, direct_url):
    """Neither kind of handler waits for a poll because the other one found something last."""
    running = _recorder(db_url, direct_url=direct_url)

    @running.tasks.handler("B")
    async def awaited(session, params):
        await session.execute(text("insert into began (i) values (:i)"), params)

    with running:
        _asleep(running)
        for i, kind in enumerate("ABBAAB"):
            began = time.monotonic()
            running.enqueue(kind, {"i": i})
            running.until(lambda i=i: running.rows(f"select 1 from began where i = {i}"))
            assert SOON > time.monotonic() - began
            running.until_idle()


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_delayed_task_starts_at_its_time(db_url, direct_url, monkeypatch, concurrency):
    """Never early, nor late by a look of habit, also if no lane was asleep at the news of it.

    How late exactly is the benchmark's; here a look of habit is not due within a minute.
    """
    monkeypatch.setattr(wakeup, "GROWTH", 1000.0)
    running = _recorder(db_url, direct_url=direct_url, concurrency=concurrency)
    with running:
        _asleep(running)
        running.execute(
            "create table due as select i, clock_timestamp() + i * interval '0.3 s' as at"
            " from generate_series(1, 4) as i"
        )
        running.execute(
            "insert into task (task_type, params, run_at)"
            " select 'A', jsonb_build_object('i', i), at from due"
        )
        running.until_empty()
    query = "select extract(epoch from began.at - due.at)::float from began join due using (i)"
    delays = [seconds for (seconds,) in running.rows(query)]
    assert (4, []) == (len(delays), [late for late in delays if not 0 <= late < SOON])


def test_an_idle_worker_has_no_transaction_open(running: Running):
    """G5: neither idle in transaction nor holding back vacuum."""
    with running:
        running.enqueue("A", {"i": 1})
        running.until_empty()
        _asleep(running)
        states = (
            "select distinct state, backend_xmin is null, backend_xid is null"
            " from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
        )
        for _ in range(5):
            assert [("idle", True, True)] == running.rows(states)


def test_an_idle_worker_asks_little(db_url):
    """G5: at the idle interval, some statements a second for a process, however many its lanes."""
    running = _recorder(db_url, concurrency=8, idle_interval=0.5)
    with running:
        _asleep(running)
        running.admin.dispose()
        # five looks each; an idle server process counts what the start cost ten seconds later
        asked = [_asked(running, 2.5)]
        while asked[-1] > 25 and len(asked) < 7:
            asked.append(_asked(running, 2.5))
    assert 1 <= asked[-1] <= 25, asked


def _asked(running: Running, seconds: float) -> int:
    before = _transactions(running)
    let_pass(seconds)
    return _transactions(running) - before


def _transactions(running: Running) -> int:
    # seen from another database, so that looking does not count
    url = running.url.set(database="postgres")
    engine = create_engine(url)
    statement = text(
        "select xact_commit + xact_rollback from pg_stat_database where datname = :name"
    )
    with engine.connect() as connection:
        connection.execute(text("select pg_stat_clear_snapshot()"))
        count = connection.execute(statement, {"name": running.url.database}).scalar_one()
    engine.dispose()
    return count


@contextmanager
def _ear(url: str) -> Iterator[Any]:
    """Listen as the worker does."""
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        oid = connection.execute(text("select 'task'::regclass::oid")).scalar_one()
        connection.execute(text(f"listen pgtask_{oid}"))
        yield lambda seconds=0.5: _heard(connection, seconds)
    engine.dispose()


def _heard(connection: Any, seconds: float) -> int:
    driver = connection.connection.driver_connection
    readable([driver.fileno()], seconds)
    driver.pgconn.consume_input()
    count = 0
    while driver.pgconn.notifies():
        count += 1
    return count


def test_notify_is_sent_only_to_sleepers(db_url, direct_url, direct_db_url):
    """NOTIFY serialises all commits of a database, so a busy one must be spared."""
    running = _recorder(db_url, direct_url=direct_url, concurrency=1)
    started, release = threading.Event(), threading.Event()

    @running.tasks.handler("BUSY")
    def busy(session, params):
        started.set()
        release.wait(20)

    with _ear(direct_db_url) as heard:
        running.enqueue("A", {"i": 0})
        assert 0 == heard(0.2)
        with running:
            running.until_empty()
            _asleep(running)
            running.enqueue("BUSY")
            assert 1 == heard(5)
            assert started.wait(10)
            running.enqueue("A", {"i": 1})  # tells the listener that nobody sleeps any more
            running.until(lambda: not running.sleeps())
            heard(0.2)
            for i in range(5):
                running.enqueue("A", {"i": i + 2})
            assert 0 == heard(0.3)
            release.set()
            running.until_empty()


def test_a_commit_that_falls_between_falling_asleep_and_listening(db_url):
    """The one race that is left: the trigger ran before the worker slept. Polling finds it."""
    running = _recorder(db_url)
    with TaskSession(running.admin) as session:
        session.enqueue("A", {"i": 1})
        session.flush()  # the trigger has run, and nobody was asleep
        with running:
            running.until_idle()
            let_pass(0.3)  # the transaction is that long
            began = time.monotonic()
            session.commit()
            running.until(lambda: running.rows("select 1 from began"))
            assert SOON > time.monotonic() - began


def test_a_two_phase_enqueue_with_a_sleeper(db_url):
    """B16: a transaction that has notified cannot be prepared; polling finds its task."""
    running = _recorder(db_url, idle_interval=0.5)
    with running:
        _asleep(running)
        maker = sessionmaker(running.admin, class_=TaskSession, twophase=True)
        with maker() as session:
            session.enqueue("A", {"i": 1})
            session.commit()
        running.until(lambda: running.rows("select 1 from began"))


def test_a_listener_that_was_cut_off_listens_again(db_url, direct_url):
    """One connection less is no reason to alarm anybody, and wake-ups work as before."""
    running = _recorder(db_url, direct_url=direct_url)
    with running:
        for i in range(3):
            _asleep(running)
            _cut_listener_off(running)
            _asleep(running)
            running.enqueue("A", {"i": i})
            running.until(lambda i=i: running.rows(f"select 1 from began where i = {i}"), 5)
    assert [] == running.told("database.down", "listener.down", "worker.error")


def test_a_listener_that_was_cut_off_while_handlers_run(db_url, direct_url, caplog):
    """Not a line about it, from no library: it has nothing to do with what guards the handlers."""
    caplog.set_level(logging.WARNING)
    running = _recorder(db_url, direct_url=direct_url, concurrency=3)
    begun, end = threading.Semaphore(0), threading.Event()
    running.tasks.handler("WAIT")(lambda session, params: begun.release() or end.wait(20))
    clients = (
        "from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
        " and backend_type = 'client backend'"
    )
    with running:
        _asleep(running)
        [(listening,)] = running.rows(f"select pid {ASLEEP}")
        # a lane that connects anew gets the place in the pool that the listener had
        running.rows(f"select pg_terminate_backend(pid, 5000) {clients} and pid <> {listening}")
        running.enqueue("WAIT", {"i": 1}, {"i": 2}, {"i": 3})
        assert [True] * 3 == [begun.acquire(timeout=20) for _ in range(3)]
        before = running.rows(f"select count(*) {clients}")
        caplog.clear()
        running.execute(f"select pg_terminate_backend({listening}, 5000)")
        running.until(lambda: before == running.rows(f"select count(*) {clients}"))
        end.set()
        running.until_empty()
    assert [] == [(record.name, record.getMessage()) for record in caplog.records]


ASLEEP = (
    "from pg_locks where locktype = 'advisory' and mode = 'ShareLock'"
    " and database = (select oid from pg_database where datname = current_database())"
)


def _cut_listener_off(running: Running) -> None:
    terminated = running.rows(f"select pid, pg_terminate_backend(pid, 5000) {ASLEEP}")
    assert 1 == len(terminated)


def test_workers_without_a_listener_look_by_themselves(db_url, direct_url):
    """When LISTEN cannot be had, it is told once, and tasks are found within a second or so."""
    running = _recorder(db_url, direct_url=direct_url)
    name = running.url.database
    broken = "pg_try_advisory_lock_shared(int, int) returns bool language plpgsql"
    with running:
        _asleep(running)
        running.execute(f"alter database {name} set search_path = public, pg_catalog")
        running.execute(f"create function {broken} as $$ begin raise 'not here'; end $$")
        _cut_listener_off(running)
        running.first("listener.down")
        for i in range(3):
            running.enqueue("A", {"i": i})
            running.until(lambda i=i: running.rows(f"select 1 from began where i = {i}"), 5)
        running.execute("drop function public.pg_try_advisory_lock_shared(int, int)")
        running.first("listener.up")
    assert ["listener.down", "listener.up"] == running.told("listener.down", "listener.up")
    assert [] == running.told("database.down")


def test_no_wake_up_is_lost(db_url, direct_url):
    """A thousand tasks, at random moments around falling asleep: each is found without a poll."""
    running = _recorder(db_url, direct_url=direct_url, concurrency=2)
    total, threads = 1000, 2

    def enqueue(part: int) -> None:
        dice = random.Random(part)
        with running.admin.connect() as connection:
            for i in range(part, total, threads):
                with connection.begin():
                    connection.execute(insert_task("A", {"i": i}))
                time.sleep(dice.choice((0, 0, 0.002, 0.01, 0.03)))

    with running:
        running.until_idle()
        enqueuers = [threading.Thread(target=enqueue, args=(n,)) for n in range(threads)]
        for thread in enqueuers:
            thread.start()
        for thread in enqueuers:
            thread.join()
        running.until(lambda: running.count() == 0, timeout=20)
    late = "select count(*), count(distinct i) from began"
    assert [(total, total)] == running.rows(late)


# -- a listener by itself --------------------------------------------------------------------


@contextmanager
def _listener(url: str, rung: list[str]) -> Iterator[Listener]:
    """Give a listener whose only lane sleeps, and notes in ``rung`` that it was woken."""
    engine = worker_engine(database_url(url), 1)
    events, bell = Events([]), Doorbell({"sync": 1})
    roster = Roster(Task.__table__, {}, events)
    pauses = {"idle_interval": NEVER, "report_interval": NEVER}
    listener = Listener(engine, roster, bell, Health(events), **pauses)
    bell.sleep("sync", lambda: rung.append("rung"))
    yield listener
    if listener.is_alive():
        listener.stop()
        listener.join(5)
    engine.dispose()


def test_notices_to_cancel(direct_db_url):
    """Who wants a task to be stopped says so where workers listen; all else means work."""
    rung: list[str] = []
    cancelled: list[int] = []
    admin = create_engine(direct_db_url, isolation_level="AUTOCOMMIT")
    with _listener(direct_db_url, rung) as listener, admin.connect() as connection:
        listener.on_cancel = cancelled.append
        oid = connection.execute(text("select 'task'::regclass::oid")).scalar_one()
        send = text(f"select pg_notify('pgtask_{oid}', :payload)")

        def put_to_sleep() -> None:
            rung.clear()
            while not listener.bell.sleep("sync", lambda: rung.append("rung")):
                pass

        listener.start()
        wait_until(lambda: rung)  # it rings once when it listens
        put_to_sleep()
        for payload in ("cancel 17", f"cancel {2**62}"):
            connection.execute(send, {"payload": payload})
        wait_until(lambda: len(cancelled) == 2)
        assert ([17, 2**62], []) == (cancelled, rung)
        for payload in ("", "cancel", "cancel x", "cancel -1"):
            connection.execute(send, {"payload": payload})
            wait_until(lambda: rung)
            put_to_sleep()
    admin.dispose()
    assert [17, 2**62] == cancelled


def _intervals(listener: Listener, answers: str) -> list[float]:
    """Return how long it waits after each look that found something ready (1), or nothing (0)."""
    waits = []
    for answer in answers:
        listener._look = lambda _, ready=answer == "1": (ready, None)
        before = time.monotonic()
        listener._poll(None)
        waits.append(listener._next_poll - before)
    return waits


@pytest.mark.parametrize(
    ("pooled", "answers", "expected"),
    [
        (True, "000000", [0.02, 0.06, 0.18, 0.54, 1, 1]),
        (True, "0000011111", [0.02, 0.06, 0.18, 0.54, 1, 0.02, 0.06, 0.18, 0.4, 0.4]),
        (False, "00000000", [0.02, 0.06, 0.18, 0.54, 1.62, 4.86, 14.58, 43.74]),
        (False, "1111100", [0.02, 0.06, 0.18, 0.4, 0.4, 0.4, 1.2]),
    ],
)
def test_how_often_a_listener_looks(direct_db_url, pooler, pooled, answers, expected):
    """G5: less and less while nothing comes; through a pooler once a second, and soon after work.

    A task that runs looks like one that waits, and must not be asked for all the time.
    """
    url = pooler.url(direct_db_url) if pooled else direct_db_url
    with _listener(url, []) as listener, listener.engine.connect() as connection:
        listener._set_up(connection, connection.connection.driver_connection, 1)
        waits = _intervals(listener, answers)
    assert [True] * len(expected) == [
        0.85 * most < wait < most + 0.1 for most, wait in zip(expected, waits, strict=True)
    ], waits


def _one_of_many(others: int) -> Listener:
    """Give the listener of a worker that sleeps, beside others; it has no connection."""
    engine = create_engine("postgresql+psycopg://")
    bell = Doorbell({"sync": 1})
    roster, health = SimpleNamespace(table=Task.__table__), SimpleNamespace()
    listener = Listener(engine, roster, bell, health, idle_interval=60, report_interval=60)
    listener.count_others = lambda: others
    listener._next_poll = math.inf
    return listener


@pytest.mark.parametrize("others", [0, 2, 49])
def test_one_task_does_not_wake_a_whole_fleet(others):
    """G3: of many workers a few claim at once; the others look a moment later."""
    at_once, later = 0, []
    for _ in range(400):
        listener, woken = _one_of_many(others), []
        listener.bell.sleep("sync", lambda woken=woken: woken.append(1))
        began = time.monotonic()
        listener._on_work(None, 0)
        at_once += len(woken)
        later += [] if woken else [listener._next_poll - began]
        for end in (listener._ear, listener._mouth):
            end.close()
    if others < FEW:
        assert 400 == at_once
    else:
        assert 2 <= at_once <= 80  # 24 on the average
        assert 0 < min(later) <= max(later) < AFTER_NOTIFY


# -- which lane is woken ---------------------------------------------------------------------


@pytest.fixture
def mixed() -> SimpleNamespace:
    """Give a bell with a sleeper of each kind, the async one having found something last."""
    bell, woken = Doorbell({"sync": 1, "async": 1}), []

    def sleep(kind: str) -> bool:
        return bell.sleep(kind, lambda: woken.append(kind))

    bell.found("async")
    assert (True, True) == (sleep("sync"), sleep("async"))
    return SimpleNamespace(bell=bell, woken=woken, sleep=sleep)


def test_the_likely_kind_comes_first(mixed):
    """The other is woken when that one has found nothing."""
    assert (True, ["async"]) == (mixed.bell.ring_first(), mixed.woken)
    mixed.sleep("async")
    assert ["async", "sync"] == mixed.woken


def test_the_other_kind_sleeps_on(mixed):
    """It is not woken in vain when the first has found the task."""
    mixed.bell.ring_first()
    mixed.bell.found("async")
    mixed.sleep("async")
    assert ["async"] == mixed.woken


def test_a_ring_while_the_likely_kind_is_busy(mixed):
    """The other is woken at once, and the busy one looks again before it sleeps."""
    mixed.bell.chain("async")
    assert (False, ["async", "sync"]) == (mixed.bell.ring_first(), mixed.woken)
    assert not mixed.sleep("async")


def _of_both_kinds(mixed: SimpleNamespace, next_poll: float) -> Listener:
    listener = _one_of_many(0)
    listener.bell, listener._next_poll, listener._planned = mixed.bell, next_poll, next_poll
    return listener


def test_a_look_for_a_task_of_the_other_kind(mixed):
    """Two tasks may come with one notification: soon it is looked whether there is more."""
    listener = _of_both_kinds(mixed, math.inf)
    began = time.monotonic()
    listener._on_work(None, 0)
    assert GIVE_WAY <= listener._next_poll - began < AFTER_NOTIFY / 2


def test_a_look_gives_way_to_a_lane_that_was_woken(mixed):
    """A look that is due just now is put off for a moment; once, however much else comes."""
    began = time.monotonic()
    listener = _of_both_kinds(mixed, began)
    listener._on_work(None, 0)
    assert began + GIVE_WAY == listener._next_poll
    mixed.sleep("async")
    time.sleep(GIVE_WAY)
    listener._on_work(None, 0)
    assert began + GIVE_WAY == listener._next_poll


def test_a_notification_that_comes_with_the_answer_to_a_look(direct_db_url):
    """It is heard: nobody would look at the socket before something else arrives there."""
    admin = create_engine(direct_db_url, isolation_level="AUTOCOMMIT")
    with (
        _listener(direct_db_url, []) as listener,
        listener.engine.connect() as connection,
        admin.connect() as other,
    ):
        driver = connection.connection.driver_connection
        listener._set_up(connection, driver, 1)
        other.execute(text("notify pgtask_1"))
        readable([driver.fileno()], 5)
        assert ((False, None), True) == (listener._look(connection), listener._notified)
    admin.dispose()
