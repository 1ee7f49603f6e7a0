"""The database goes away and comes back: nothing is lost, and one line is told for each change."""

from __future__ import annotations

import time

import pytest
from fleet import Fleet, events, started
from process_tasks import create_tables
from running import Running
from sqlalchemy import create_engine, make_url, text
from waiting import SOON, let_pass, wait_until

from pgtask_sa import migrations

JSON = ("--log-format", "json", "--idle-interval", "0.5")


@pytest.fixture
def fleet(restartable_db_url) -> Fleet:
    return Fleet(restartable_db_url)


@pytest.mark.parametrize("load", ["busy", "idle"])
def test_crashes_of_the_server(fleet: Fleet, restartable_server, load, figures):
    """F7: a worker goes on after each, soon, and tells each change of state exactly once."""
    total, back = 0, []
    with fleet.worker(*JSON) as worker:
        started(worker)
        for crash in range(3):
            if load == "busy":
                fleet.enqueue("ROW", *[{"i": total + i} for i in range(300)])
                fleet.enqueue("ASYNC_ROW", *[{"i": total + 300 + i} for i in range(300)])
                total += 600
            else:
                fleet.until(lambda: fleet.count() == 0)
            restartable_server.stop("immediate")
            wait_until(lambda n=crash: len(events(worker, "database.down")) == n + 1, 10)
            restartable_server.start()
            began = time.monotonic()
            fleet.enqueue("ROW", {"i": total})
            total += 1
            wait_until(lambda n=crash: len(events(worker, "database.up")) == n + 1, 10)
            back.append(time.monotonic() - began)
        fleet.until(lambda: fleet.count() == 0, 30)
        worker.terminate()
        assert 0 == worker.wait(10)
    figures(f"told that it is back after {', '.join(f'{s:.2f}' for s in back)} s")
    assert SOON > max(back)
    assert (list(range(total)), 0) == (fleet.done(), fleet.count("dead_task"))
    changes = [event["event"] for event in events(worker, "database.down", "database.up")]
    assert ["database.down", "database.up"] * 3 == changes
    assert [] == events(worker, "worker.error", "listener.down")


def test_a_worker_before_its_server(fleet: Fleet, restartable_server):
    """A failed first connect is not the end: it waits, and says so once."""
    fleet.enqueue("ROW", {"i": 1})
    restartable_server.stop("fast")
    with fleet.worker(*JSON) as worker:
        wait_until(lambda: events(worker, "database.down"), 10)
        restartable_server.start()
        fleet.until(lambda: [1] == fleet.done())
    changes = [event["event"] for event in events(worker, "database.down", "database.up")]
    assert ["database.down", "database.up"] == changes


@pytest.mark.direct
def test_a_worker_before_its_database(db_url):
    """A name that may be wrong, or too early: it is told that it waits, and for what."""
    name = f"{make_url(db_url).database}_later"
    url = make_url(db_url).set(database=name).render_as_string(hide_password=False)
    fleet = Fleet(url, create=False)
    with (
        create_engine(db_url, isolation_level="AUTOCOMMIT").connect() as admin,
        fleet.worker(*JSON) as worker,
    ):
        [down] = wait_until(lambda: events(worker, "database.down"), 10)
        assert down["message"].startswith("the database does not serve, the worker waits for it: ")
        assert f'database "{name}" does not exist' in down["message"]
        try:
            admin.execute(text(f'create database "{name}"'))
            migrations.upgrade(url)
            create_tables(fleet.engine)
            fleet.enqueue("ROW", {"i": 1})
            fleet.until(lambda: [1] == fleet.done())
        finally:
            admin.execute(text(f'drop database "{name}" with (force)'))


def test_a_worker_before_its_tables(empty_db_url):
    """It says what to do, once, and goes on when it was done."""
    from pgtask_sa import Task

    fleet = Fleet(empty_db_url)
    with fleet.worker(*JSON) as worker:
        wait_until(lambda: events(worker, "database.down"), 10)
        [down] = events(worker, "database.down")
        assert "python -m pgtask_sa migrate" in down["message"]
        Task.metadata.create_all(create_engine(empty_db_url))
        fleet.enqueue("ROW", {"i": 1})
        fleet.until(lambda: [1] == fleet.done())
        assert 1 == len(events(worker, "database.down"))


def test_a_server_that_refuses_to_write(fleet: Fleet):
    """E12: no attempt is burnt, no line but one, and it works again alone."""
    fleet.enqueue("ROW", *[{"i": i} for i in range(10)])
    name = fleet.rows("select current_database()")[0][0]
    _set(fleet, f"alter database {name} set default_transaction_read_only = on")
    with fleet.worker(*JSON) as worker:
        wait_until(lambda: events(worker, "database.down"), 10)
        let_pass(1.5)
        assert ["database.down"] == [event["event"] for event in events(worker)[1:]]
        assert [(10, 0)] == fleet.rows("select count(*), max(attempts) from task")
        _set(fleet, f"alter database {name} reset default_transaction_read_only")
        fleet.until(lambda: list(range(10)) == fleet.done())
    changes = [event["event"] for event in events(worker, "database.down", "database.up")]
    assert ["database.down", "database.up"] == changes


def _set(fleet: Fleet, statement: str) -> None:
    with fleet.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql("set default_transaction_read_only = off")
        connection.exec_driver_sql(statement)


@pytest.mark.parametrize("running", ["nothing", "SLEEP"])
def test_a_signal_while_the_database_is_away(fleet: Fleet, restartable_server, running):
    """E11: the end does not wait for a database that does not answer."""
    with fleet.worker(*JSON, "--grace", "1") as worker:
        started(worker)
        if running != "nothing":
            fleet.enqueue(running, {"i": 1, "seconds": 30})
            fleet.until(fleet.runner)
        restartable_server.stop("immediate")
        worker.terminate()
        assert (0 if running == "nothing" else 3) == worker.wait(5), worker.output
        restartable_server.start()
    assert [] == fleet.done()


READ_ONLY = (
    "set transaction read only",
    "set local transaction_read_only = on",
    "select set_config('transaction_read_only', 'on', true)",
    "set session characteristics as transaction read only; set transaction_read_only = on",
)


@pytest.mark.parametrize("statement", READ_ONLY)
def test_a_handler_that_makes_its_transaction_read_only(db_url, statement):
    """That is no standby: its attempts are counted, and they have an end."""
    running = Running(db_url, concurrency=1)

    @running.tasks.handler("READER", max_attempts=2, backoff=0)
    def reader(session, params):
        for each in statement.split("; "):
            session.execute(text(each))
        session.execute(text("insert into mark values (1)"))

    @running.tasks.handler("GOOD")
    def good(session, params):
        session.execute(text("insert into mark values (7)"))

    with running:
        running.enqueue("READER")
        running.until(lambda: [("READER", 2, "failed")] == running.dead())
        running.enqueue("GOOD")
        running.until_empty()
    assert [7] == running.marks()
