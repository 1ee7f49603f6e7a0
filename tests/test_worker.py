"""The worker inside a program: options, lanes, order, types it does not know, and its end."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections import Counter
from typing import Any

import pytest
from running import Running
from sqlalchemy import MetaData, func, select, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Session, sessionmaker
from sqlalchemy.schema import CreateSchema

from pgtask_sa import ConfigurationError, DeadTaskMixin, TaskMixin, TaskRegistry, Worker
from pgtask_sa.checkup import examine
from pgtask_sa.patient import Patient
from pgtask_sa.settle import Tables

URL = "postgresql://localhost/none"


def _registry(*types: str) -> TaskRegistry:
    tasks = TaskRegistry()
    for name in types:
        tasks.handler(name)(lambda session, params: None)
    return tasks


BAD_OPTIONS: list[dict[str, Any]] = [
    *[{"batch_size": value} for value in (None, 0, -1, "5", True, 1.5)],
    *[{"concurrency": value} for value in (0, "4", None, True, 1001)],
    *[{"processes": value} for value in (0, 2.0)],
    *[{"grace": value} for value in (-1, "30", float("nan"))],
    *[{"idle_interval": 0}, {"report_interval": 0}],
    *[{"sample": value} for value in (0, 101)],
    *[{"order": "fifo"}, {"priority": {"A": "high"}}, {"priority": {"A": True}}],
]


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=str)
def test_options_are_checked(options):
    """A6: what would claim everything, or nothing, is refused before the start."""
    with pytest.raises(ConfigurationError):
        Worker(_registry("A"), URL, **options)


def test_a_worker_needs_handlers_and_a_postgres():
    """An empty registry, something else, and other databases are refused with the reason."""
    for tasks, url, reason in [
        (TaskRegistry(), URL, "no handlers"),
        ({"A": print}, URL, "TaskRegistry is needed"),
        (_registry("A"), "sqlite:///x", "Postgres database is needed"),
        (_registry("A"), "nonsense", "not a database URL"),
    ]:
        with pytest.raises(ConfigurationError, match=reason):
            Worker(tasks, url)  # type: ignore[arg-type]


def test_an_engine_in_place_of_a_url(async_engine, db_url):
    """The URL of an engine is taken, whatever its driver, and with its password."""
    running = Running(db_url, _registry("A"), drain=True)
    running.enqueue("A")
    assert 0 == Worker(running.tasks, async_engine, drain=True).run()
    assert 0 == running.count()
    asyncpg = create_async_engine(running.url.set(drivername="postgresql+asyncpg"))
    assert 0 == Worker(running.tasks, asyncpg, drain=True).run()


@pytest.mark.parametrize("batch_size", [1, 7])
@pytest.mark.parametrize("order", ["fair", "random", "tablesample"])
def test_drain(db_url, order, batch_size):
    """It runs all that can be claimed, sync and async, with what they enqueue, and then ends."""
    running = Running(db_url, drain=True, order=order, batch_size=batch_size)

    @running.tasks.handler("SYNC")
    def sync(session, params):
        session.execute(text("insert into mark values (:i)"), params)
        session.enqueue("ASYNC", {"i": params["i"] + 100})

    @running.tasks.handler("ASYNC")
    async def awaited(session, params):
        await session.execute(text("insert into mark values (:i)"), params)
        if params["i"] < 150:
            await session.enqueue("SYNC_LATE", {})

    @running.tasks.handler("SYNC_LATE")
    def late(session, params):
        session.execute(text("insert into mark values (1000)"))

    running.enqueue("SYNC", *[{"i": i} for i in range(20)])
    running.enqueue("SYNC", {"i": 99}, delay=3600)
    with running:
        assert 0 == running.wait()
    assert [*range(20), *range(100, 120), *[1000] * 20] == running.marks()
    assert 1 == running.count()


@pytest.mark.parametrize("batch_size", [1, 7])
def test_names_with_per_cent_signs(db_url, batch_size):
    """Its table may be named so, and its schema; the doctor finds it, too."""

    class Base(DeclarativeBase):
        metadata = MetaData(schema="100%s")

    class Job(TaskMixin, Base):
        __tablename__ = "ta%sk"

    class DeadJob(DeadTaskMixin, Base):
        __tablename__ = "dead %d"

    running = Running(db_url, TaskRegistry(task_class=Job), drain=True, batch_size=batch_size)
    with running.admin.begin() as connection:
        connection.execute(CreateSchema("100%s"))
        Base.metadata.create_all(connection)

    @running.tasks.handler("A", max_attempts=1)
    def handler(session, params):
        session.execute(text("insert into mark values (:i)"), params)
        if params["i"] % 5 == 0:
            raise ValueError

    running.enqueue("A", *[{"i": i} for i in range(20)])
    with running:
        assert 0 == running.wait()
    assert [i for i in range(20) if i % 5] == running.marks()
    with running.admin.connect() as connection:
        counts = [connection.scalar(select(func.count()).select_from(t)) for t in (Job, DeadJob)]
        connection.rollback()
        patient = Patient(connection, Tables(Job), running.tasks.handlers, connections=1)
        assert [0, 4] == counts
        found = {each.name: each.level for each in examine(patient)}
    assert ("ok", "ok", "ok", "ok") == tuple(
        found[name] for name in ("schema", "trial", "indexes", "wake-up")
    )


def test_a_drain_tells_what_it_left(db_url):
    """With nothing but unknown types there is nothing to do, and it is said, not hidden."""
    running = Running(db_url, _registry("A"), drain=True)
    running.enqueue("NEW", {}, {})
    with running:
        assert 0 == running.wait()
    assert {"task_type": "NEW", "count": 2} == dict(running.first("task.unhandled").fields)


def test_concurrency_is_a_limit_for_each_kind(db_url):
    """Never more handlers of a kind at once than lanes, and that many when there is work."""
    running = Running(db_url, concurrency=3)
    now: Counter[str] = Counter()
    most: Counter[str] = Counter()
    lock = threading.Lock()
    full = {"sync": threading.Barrier(3), "async": threading.Barrier(3)}

    def enter(kind):
        with lock:
            now[kind] += 1
            most[kind] = max(most[kind], now[kind])

    def leave(kind):
        with lock:
            now[kind] -= 1

    @running.tasks.handler("SYNC")
    def sync(session, params):
        enter("sync")
        full["sync"].wait(10)
        leave("sync")

    @running.tasks.handler("ASYNC")
    async def awaited(session, params):
        enter("async")
        await asyncio.to_thread(full["async"].wait, 10)
        leave("async")

    running.enqueue("SYNC", *[{}] * 6)
    running.enqueue("ASYNC", *[{}] * 6)
    with running:
        running.until_empty()
    assert {"sync": 3, "async": 3} == dict(most)


def test_a_blocking_sync_handler_stops_nobody(db_url):
    """F15: while one blocks its thread, other threads and the event loop go on."""
    running = Running(db_url)
    release = threading.Event()

    @running.tasks.handler("BLOCK")
    def block(session, params):
        release.wait(30)

    @running.tasks.handler("SYNC")
    def sync(session, params):
        session.execute(text("insert into mark values (:i)"), params)

    @running.tasks.handler("ASYNC")
    async def awaited(session, params):
        await asyncio.sleep(0.001)
        await session.execute(text("insert into mark values (:i)"), params)

    with running:
        running.enqueue("BLOCK")
        running.until(lambda: running.rows("select 1 from task for update skip locked") == [])
        for i in range(20):
            running.enqueue("SYNC" if i % 2 else "ASYNC", {"i": i})
        running.until(lambda: list(range(20)) == running.marks())
        assert 1 == running.count()
        release.set()
        running.until_empty()


def test_priority(db_url):
    """Lower ranks go first; what is not named has rank 0."""
    ran: list[str] = []
    running = Running(db_url, drain=True, concurrency=1, priority={"LAST": 1, "FIRST": -1})
    for name in ("LAST", "FIRST", "PLAIN"):
        running.tasks.handler(name)(lambda session, params, name=name: ran.append(name))
        running.enqueue(name, *[{}] * 3)
    with running:
        running.wait()
    assert ["FIRST"] * 3 + ["PLAIN"] * 3 + ["LAST"] * 3 == ran


def test_types_without_a_handler_wait_for_a_worker_that_has_one(db_url):
    """E6: a rolling deploy loses nothing, burns no attempt, and floods no log."""
    running = Running(db_url, _registry("OLD"), report_interval=0.3)
    running.enqueue("NEW", *[{"i": i} for i in range(100)])
    with running:
        running.until(lambda: len(running.told("task.unhandled")) >= 3)
        began = time.monotonic()
        reports = [e.fields for e in running.events if e.name == "task.unhandled"]
        assert [{"task_type": "NEW", "count": 100}] * len(reports) == [dict(f) for f in reports]
        running.until(lambda: len(running.told("task.unhandled")) >= len(reports) + 2)
        assert 0.25 < time.monotonic() - began
    assert [(100, 0)] == running.rows("select count(*), max(attempts) from task")
    newer = Running(db_url, _registry("OLD", "NEW"), drain=True)
    with newer:
        newer.wait()
    assert 0 == newer.count()


@pytest.mark.parametrize(
    "name", ["os.system", "__class__", "x" * 5000, "'; drop table task; --", "pickle\\x80"]
)
def test_a_type_is_only_a_name(db_url, name):
    """D7: who may insert a row cannot choose what code runs."""
    running = Running(db_url, _registry("A"), drain=True)
    running.execute("insert into task (task_type) values (:name)", name=name)
    with running:
        running.wait()
    assert [(name, 0)] == running.rows("select task_type, attempts from task")
    assert name == running.first("task.unhandled").fields["task_type"]


def test_custom_sessionmakers(db_url):
    """Handlers get the user's own Session classes, whatever else these are set up to do."""

    class MySession(Session):
        pass

    class MyAsyncSession(AsyncSession):
        pass

    seen = []
    running = Running(
        db_url,
        drain=True,
        session=sessionmaker(class_=MySession, twophase=True, autoflush=False, autobegin=False),
        async_session=async_sessionmaker(class_=MyAsyncSession, expire_on_commit=False),
    )

    @running.tasks.handler("SYNC")
    def sync(session, params):
        seen.append(isinstance(session, MySession))
        with session.begin():
            session.execute(text("insert into mark values (1)"))

    @running.tasks.handler("IDLE")
    def idle(session, params):
        seen.append(isinstance(session, MySession))

    @running.tasks.handler("ASYNC")
    async def awaited(session, params):
        seen.append(isinstance(session, MyAsyncSession))
        await session.execute(text("insert into mark values (2)"))

    for name in running.tasks:
        running.enqueue(name)
    with running:
        running.wait()
    assert ([1, 2], 0) == (running.marks(), running.count())
    assert [True] * 3 == seen


def test_a_listener_that_raises(db_url):
    """It is logged; tasks are done and other listeners hear all the same."""

    def broken(event):
        raise RuntimeError("listener")

    running = Running(db_url, _registry("A"), drain=True, listeners=[broken])
    running.enqueue("A")
    with running:
        running.wait()
    assert (0, ["task.done"]) == (running.count(), running.told("task.done"))


def test_a_worker_in_a_thread_leaves_signals_alone(db_url):
    """Inside a program the signals are the program's; and after run() in the main thread, too."""
    before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with Running(db_url, _registry("A")) as running:
        running.until_idle()
        assert before == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    Worker(running.tasks, db_url, drain=True).run()
    assert before == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]


@pytest.mark.direct  # a pooler keeps its own connections open
def test_nothing_is_left_of_a_worker(db_url):
    """After run() no thread of it is alive, and no connection of it is open."""
    before = set(threading.enumerate())  # of other tests, in whose nature it is to leave some
    with Running(db_url, _registry("A")) as running:
        running.until_idle()
    assert 0 == running.code
    running.until(
        lambda: [] == [t for t in set(threading.enumerate()) - before if "pgtask" in t.name]
    )
    others = (
        "select 1 from pg_stat_activity"
        " where datname = current_database() and pid <> pg_backend_pid()"
    )
    running.until(lambda: [] == running.rows(others))


def test_stop_twice_is_no_second_signal(db_url):
    """stop() may be called by whoever wants to be sure; it cuts nothing off."""
    running = Running(db_url)
    started, release = threading.Event(), threading.Event()

    @running.tasks.handler("A")
    def body(session, params):
        started.set()
        release.wait(10)

    running.enqueue("A")
    with running:
        assert started.wait(10)
        running.worker.stop()
        running.worker.stop()
        assert running.code is None
        release.set()
        assert 0 == running.wait()
    assert 0 == running.count()


@pytest.mark.parametrize("body", ["sleeping in Python", "in a query", "async"])
def test_stop_now_frees_the_row_at_once(db_url, body):
    """B7: what is cut off is rolled back, not committed, not counted; also in a living program."""
    running = Running(db_url)
    started, release = threading.Event(), threading.Event()

    def block(session, params):
        session.execute(text("insert into mark values (1)"))
        started.set()
        if body == "in a query":
            session.execute(text("select pg_sleep(30)"))
        else:
            release.wait(10)
        session.execute(text("insert into mark values (2)"))

    async def awaited(session, params):
        await session.execute(text("insert into mark values (1)"))
        started.set()
        await asyncio.sleep(30)

    running.tasks.handler("A")(awaited if body == "async" else block)
    running.enqueue("A")
    with running:
        assert started.wait(10)
        running.worker.stop(now=True)
        assert 3 == running.wait(5)
        free = "select attempts from task for update skip locked"
        running.until(lambda: [(0,)] == running.rows(free), timeout=3)
        release.set()
    running.until(lambda: [] == [t for t in threading.enumerate() if "pgtask-lane" in t.name])
    assert ([], [(0,)]) == (running.marks(), running.rows("select attempts from task"))
