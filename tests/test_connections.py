"""The connections of a worker: whatever the URL, the role, the database and the handlers set."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from running import Running
from sqlalchemy import create_engine, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session
from waiting import let_pass

from pgtask_sa import Task, TaskRegistry, TaskSession, Worker
from pgtask_sa.engines import database_url, worker_engine
from pgtask_sa.ground import Ground
from pgtask_sa.lanes import _never_again

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_a_first_connection_that_is_ended_while_it_is_made(db_url):
    """SQLAlchemy looks at the first one of an engine before there is a pool: it is told why."""
    engine = worker_engine(db_url, 1)
    end = "select pg_terminate_backend(pg_backend_pid())"
    engine.dialect.initialize = lambda connection: connection.exec_driver_sql(end)
    with pytest.raises(DBAPIError, match="terminating connection"):
        engine.connect()


@pytest.mark.parametrize(
    ("given", "query"),
    [
        ("postgresql+asyncpg://db/app?ssl=require&command_timeout=5", {"sslmode": "require"}),
        ("postgresql+pg8000://db/app?unix_sock=x", {}),
        ("postgresql://db/app?sslmode=prefer&application_name=x", None),
        ("postgresql+psycopg2://db/app?sslmode=prefer", None),
    ],
)
def test_options_for_another_driver(given, query):
    """What libpq has too is translated, the rest is dropped; our own driver's are kept."""
    expected = dict(make_url(given).query) if query is None else query
    assert expected == dict(database_url(given).query)


def test_a_worker_with_the_url_of_asyncpg(db_url):
    """The URL of an application on asyncpg is good enough."""
    running = Running(db_url, drain=True)
    running.tasks.handler("A")(lambda session, params: None)
    running.enqueue("A")
    url = make_url(db_url).set(drivername="postgresql+asyncpg")
    running.url = url.update_query_dict({"ssl": "prefer"})
    with running:
        assert 0 == running.wait()
    running.admin.dispose()
    assert 0 == running.count()


def _set_date_style(direct_db_url: str) -> None:
    """Give one to the database, before anybody has come there through a pooler."""
    admin = create_engine(direct_db_url)
    name = admin.url.database
    with admin.begin() as connection:
        connection.execute(text(f"alter database {name} set datestyle = 'SQL, DMY'"))
    admin.dispose()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_date_style_of_the_database(direct_db_url, db_url, kind):
    """The rows of a claim hold timestamps, which psycopg reads in one style only."""
    running = Running(direct_db_url, drain=True)
    styles: list[str] = []

    def body(session, params):
        styles.append(session.scalar(text("show datestyle")))

    async def awaited(session, params):
        await session.run_sync(body, params)

    running.tasks.handler("A")(body if kind == "sync" else awaited)
    running.enqueue("A")
    _set_date_style(direct_db_url)
    running.url = database_url(db_url)
    with running:
        running.wait()
    assert ["ISO, DMY"] == styles


@pytest.mark.parametrize("broken", ["CHECK_CLIENT", "DATE_STYLE"])
def test_one_setting_that_is_refused(direct_db_url, db_url, monkeypatch, broken):
    """The other one holds all the same."""
    monkeypatch.setattr(f"pgtask_sa.engines.{broken}", ("no_such_setting", "1"))
    _set_date_style(direct_db_url)
    engine = worker_engine(database_url(db_url), 1)
    with engine.connect() as connection:
        interval = connection.scalar(text("show client_connection_check_interval"))
        style = connection.scalar(text("show datestyle"))
    engine.dispose()
    expected = ("0", "ISO, DMY") if broken == "CHECK_CLIENT" else ("250ms", "SQL, DMY")
    assert expected == (interval, style)


# -- an encoding that is not UTF-8 -----------------------------------------------------------


@pytest.fixture
def latin_url(server_url) -> Iterator[str]:
    """Give the URL of a database in LATIN1, with the library's own tables."""
    admin = create_engine(server_url, isolation_level="AUTOCOMMIT")
    name = "pgtask_test_latin1"
    options = "encoding 'LATIN1' lc_collate 'C' lc_ctype 'C' template template0"
    with admin.connect() as connection:
        connection.execute(text(f"drop database if exists {name} with (force)"))
        connection.execute(text(f"create database {name} {options}"))
    url = make_url(server_url).set(database=name)
    engine = create_engine(url, connect_args={"client_encoding": "utf8"})
    Task.metadata.create_all(engine)
    engine.dispose()
    yield url.render_as_string(hide_password=False)
    with admin.connect() as connection:
        connection.execute(text(f"drop database {name} with (force)"))
    admin.dispose()


def test_a_type_that_the_database_cannot_hold(latin_url):
    """It is left out, with one warning; the others run."""
    running = Running(latin_url, concurrency=2)
    for name in ("PLAIN", "ÄRGER", "PREIS_€"):
        running.tasks.handler(name)(_mark)
    with running:
        running.enqueue("PLAIN")
        running.enqueue("ÄRGER")
        running.until(lambda: [1, 1] == running.marks())
    assert [["PREIS_€"]] == [
        e.fields["task_types"] for e in running.events if e.name == "handler.not_encodable"
    ]
    assert [] == running.told("database.down", "claim.failed", "listener.down")


def _mark(session, params):
    session.execute(text("insert into mark values (1)"))


# -- claims that fail ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_claim_that_a_trigger_refuses(db_url, kind):
    """That is not the database's trouble: it is told as what it is, once for each message."""
    running = Running(db_url, concurrency=2, idle_interval=0.2)

    async def awaited(session, params):
        await session.run_sync(_mark, params)

    running.tasks.handler("A")(_mark if kind == "sync" else awaited)
    _refuse(running, "by the book")
    running.execute(
        "create trigger refuse before delete on task for each row execute function refuse()"
    )
    running.enqueue("A")
    with running:
        assert "by the book" in running.first("claim.failed").message
        let_pass(1.5)
        assert 1 == len(running.told("claim.failed"))
        _refuse(running, "out of spite")
        running.until(lambda: len(running.told("claim.failed")) == 2)
        running.execute("drop trigger refuse on task")
        running.until_empty()
    assert [1] == running.marks()
    assert [] == running.told("database.down", "database.up", "worker.error")


def _refuse(running: Running, why: str) -> None:
    running.execute(
        "create or replace function refuse() returns trigger language plpgsql"
        f" as $$ begin raise '{why}'; end $$"
    )


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_session_that_a_handler_spoilt(db_url, kind):
    """A claim that fails on it is its last one: the next connection fares better."""
    running = Running(db_url, concurrency=1)

    def spoil(session, params):
        session.execute(text("select set_config('search_path', 'nowhere', false)"))

    async def awaited(session, params):
        await session.run_sync(spoil, params)

    running.tasks.handler("SPOIL")(spoil if kind == "sync" else awaited)
    with running:
        for i in range(3):
            running.enqueue("SPOIL", {"i": i})
            running.until_empty(5)
    assert [] == running.dead()


def test_an_error_on_a_connection_that_is_gone(engine):
    """What happened is told, and not that the connection cannot be put away."""
    with (
        engine.connect() as connection,
        pytest.raises(ValueError, match="the cause"),
        _never_again(connection),
    ):
        connection.invalidate()
        raise ValueError("the cause")


@pytest.mark.direct  # a pooler holds as many as it likes
def test_an_idle_worker_holds_a_connection_for_each_lane_and_two_more(db_url):
    """What the README says of sizing: concurrency for each kind of handler, and two more."""
    running = Running(db_url, concurrency=3)

    @running.tasks.handler("SYNC")
    def sync(session, params): ...

    @running.tasks.handler("ASYNC")
    async def awaited(session, params): ...

    held = (
        "select count(*) from pg_stat_activity"
        " where datname = current_database() and pid <> pg_backend_pid()"
    )
    with running:
        running.until_idle()
        running.until(lambda: [(3 + 3 + 2,)] == running.rows(held))


def test_a_connection_out_of_its_pool_has_no_handler(db_url):
    """What listens or notes for the worker opens no savepoint on the lane that came after it."""
    engine = worker_engine(database_url(db_url), 1)
    aside = engine.connect()
    driver = aside.connection.driver_connection
    aside.detach()
    with engine.connect() as lane, lane.begin():
        lane.execute(text("select 1"))
        ground = Ground(lane)
        with ground:
            driver.execute("select 1")
            assert not ground.open
            lane.connection.driver_connection.execute("select 1")
            assert ground.open
    aside.close()
    engine.dispose()


def test_a_second_session_of_a_handler(db_url):
    """B14: a worker leaves the pool of its caller alone: one connection is enough there."""
    engine = create_engine(db_url, pool_size=1, max_overflow=0, pool_timeout=20)
    tasks = TaskRegistry()

    @tasks.handler("A", max_attempts=1)
    def both(session, params):
        session.execute(text("select 1"))
        with Session(engine) as second:
            assert [(params["i"],)] == second.execute(text("select :i"), params).all()

    with TaskSession(engine) as session:
        session.enqueue_many("A", [{"i": i} for i in range(30)])
        session.commit()
    assert 0 == Worker(tasks, engine, drain=True, concurrency=4).run()
    with engine.connect() as connection:
        tables = "select (select count(*) from task), (select count(*) from dead_task)"
        assert (0, 0) == tuple(connection.execute(text(tables)).one())
    engine.dispose()
