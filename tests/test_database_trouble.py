"""The database is there, and in trouble: nobody is blamed, nothing runs hot, and it ends by itself.

Each test tells its figures, which stand at the end of the report.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest
from faults import Transactions
from running import Running
from sqlalchemy import Engine, NullPool, create_engine, make_url, text
from waiting import SOON, let_pass, wait_until

from pgtask_sa import insert_task
from pgtask_sa.presence import Presence


class Trouble:
    """A worker with one lane of each kind, and what it costs while its database is in trouble."""

    def __init__(self, running: Running, direct_url: str) -> None:
        self.running = running
        self.direct = create_engine(direct_url, poolclass=NullPool)
        self.transactions = Transactions(running.url)
        for name in ("SYNC", "ASYNC"):
            running.tasks.handler(name, max_attempts=1)(_mark if name == "SYNC" else _awaited_mark)

    def enqueue(self) -> None:
        for kind in ("SYNC", "ASYNC"):
            self.running.enqueue(kind, {"i": 1})

    def rate(self, seconds: float = 1.0) -> float:
        """Return the transactions a second, for both lanes and the listener."""
        self.running.admin.dispose()
        return self.transactions.rate(seconds, let_pass)

    def outcome(self) -> tuple[list[int], list[Any]]:
        """Return the marks and the dead, when no task is left."""
        self.running.until_empty(10)
        return self.running.marks(), self.running.dead()


def _mark(session, params):
    session.execute(text("insert into mark values (:i)"), params)


async def _awaited_mark(session, params):
    await session.run_sync(_mark, params)


OF_POOLERS = {"listener.polling", "presence.pooled"}  # told once, where there is one


@pytest.fixture
def trouble(db_url, direct_db_url) -> Trouble:
    return Trouble(Running(db_url, concurrency=1, idle_interval=0.5), direct_db_url)


def _raising(running: Running, when: str, code: str) -> str:
    """Make a trigger that fails as a server in trouble does; return the statement that ends it."""
    running.execute(
        "create function fail() returns trigger language plpgsql as"
        f" $$ begin raise 'no' using errcode = '{code}'; end $$"
    )
    running.execute(f"create trigger fail before {when} for each row execute function fail()")
    return "drop function fail() cascade"


@pytest.mark.parametrize("code", ["53100", "40001"])
def test_claims_that_fail(trouble: Trouble, code, figures):
    """E12: a full disk, or lost races, at the claim itself: no hot loop, no attempt, one line."""
    running = trouble.running
    end = _raising(running, "delete on task", code)
    trouble.enqueue()
    with running:
        running.until(lambda: running.told("database.down")) if code == "53100" else let_pass(0.3)
        rate = trouble.rate()
        running.execute(end)
        assert ([1, 1], []) == trouble.outcome()
    figures(f"{code} at each claim: {rate:.0f} transactions/s for two lanes; {running.told()[1:]}")
    assert 150 > rate  # a hot loop makes thousands
    state = ["database.down", "database.up"] if code == "53100" else []
    assert ["worker.started", "worker.stopped"] == [running.told()[0], running.told()[-1]]
    told = sorted(name for name in running.told()[1:-1] if name not in OF_POOLERS)
    if code == "40001":  # told once, if it lasts for more than a few tries
        told = told[told[0] == "claim.failed" :]
    assert [*state, "task.done", "task.done"] == told


@pytest.mark.parametrize("code", ["40001", "25P04"])
def test_a_claim_that_fails_and_then_does_not(trouble: Trouble, code):
    """A race that was lost, or a process that stood still meanwhile: there is nothing to tell."""
    running = trouble.running
    running.execute("create sequence tries")
    running.execute(
        "create function fail() returns trigger language plpgsql as $$ begin"
        f" if nextval('tries') <= 3 then raise 'no' using errcode = '{code}'; end if;"
        " return old; end $$"
    )
    running.execute(
        "create trigger fail before delete on task for each row execute function fail()"
    )
    trouble.enqueue()
    with running:
        assert ([1, 1], []) == trouble.outcome()
    told = running.told("claim.failed", "database.down", "worker.error", "task.retry")
    assert ([(5,)], []) == (running.rows("select last_value from tries"), told)


@pytest.mark.parametrize("code", ["53100", "40001"])
def test_a_handlers_table_that_fails(trouble: Trouble, code, figures):
    """E12: not the task's fault; it is tried again some times a second."""
    running = trouble.running
    end = _raising(running, "insert on mark", code)
    trouble.enqueue()
    with running:
        running.first("task.retry")
        rate = trouble.rate()
        running.execute(end)
        assert ([1, 1], []) == trouble.outcome()
    retries = len(running.told("task.retry"))
    figures(f"{code} in the handlers: {rate:.0f} transactions/s for two lanes, {retries} retries")
    assert 150 > rate


def test_a_handlers_table_that_fails_for_many_tasks(trouble: Trouble, figures, monkeypatch):
    """E12: one warning for all of them; those who listen hear of each."""
    monkeypatch.setattr("pgtask_sa.events.LATELY", 3600.0)
    running = trouble.running
    end = _raising(running, "insert on mark", "53100")
    for _ in range(40):
        trouble.enqueue()
    with running:
        running.until(lambda: len(running.told("task.retry")) > 100)
        running.execute(end)
        running.until_empty()
    levels = [event.level for event in running.events if event.name == "task.retry"]
    figures(f"{len(levels)} retries, {levels.count(logging.WARNING)} lines")
    assert [logging.WARNING] == [level for level in levels if level != logging.DEBUG]


def test_a_handlers_table_that_fails_for_some_seconds(trouble: Trouble):
    """E12: a disk that is full for four seconds costs no attempt."""
    running = trouble.running
    end = _raising(running, "insert on mark", "53100")
    trouble.enqueue()
    with running:
        let_pass(4)
        running.execute(end)
        assert ([1, 1], []) == trouble.outcome()


@pytest.mark.direct
def test_a_workers_table_that_fails(trouble: Trouble, monkeypatch):
    """As when a right is taken away: it is tried again twice a second, and told once."""
    running, failures, reassure = trouble.running, [], Presence.reassure

    def counted(presence):
        try:
            reassure(presence)
        except Exception as error:
            failures.append(error)
            raise

    monkeypatch.setattr(Presence, "reassure", counted)
    monkeypatch.setattr("pgtask_sa.leases.PULSE", 0.05)
    with running:
        running.until(lambda: running.count("task_worker"))
        end = _raising(running, "update on task_worker", "42501")
        trouble.enqueue()
        running.until(lambda: len(failures) >= 5)
        running.execute(end)
        assert ([1, 1], []) == trouble.outcome()
    assert 1 == len(running.told("presence"))


def test_a_deadlock_with_another_session(trouble: Trouble):
    """E12: a real one, of which the task is the victim: done once, no attempt counted."""
    running, first, seen = trouble.running, threading.Event(), []
    running.execute("create table account (id int primary key, n int)")
    running.execute("insert into account values (1, 0), (2, 0)")
    running.execute(f"alter database {running.url.database} set deadlock_timeout = '100ms'")
    statement = "update account set n = n + 1 where id = :i"

    @running.tasks.handler("LOCKS", max_attempts=1)
    def locks(session, params, task):
        session.execute(text(statement), {"i": 1})
        seen.append(task.attempt)
        first.set()
        wait_until(lambda: len(seen) > 1 or running.rows(WAITING), 10)
        session.execute(text(statement), {"i": 2})

    running.enqueue("LOCKS")
    with trouble.direct.connect() as connection:
        connection.execute(text("set deadlock_timeout = '1h'"))
        connection.commit()
        with running:
            assert first.wait(10)
            connection.execute(text(statement), {"i": 2})
            connection.execute(text(statement), {"i": 1})  # until the handler is the victim
            connection.commit()
            running.until_empty()
    assert [(2,), (2,)] == running.rows("select n from account")
    assert ([1, 1], []) == (seen, running.dead())
    assert ["task.retry", "task.done"] == running.told("task.retry", "task.done")


WAITING = "select 1 from pg_stat_activity where wait_event_type = 'Lock'"


def test_a_failover_to_read_only_under_way(trouble: Trouble, figures):
    """E12: read-only for two seconds, and every connection ended at both changes."""
    running, name = trouble.running, trouble.running.url.database
    with running:
        running.until_idle()
        running.admin.dispose()
        _set_read_only(
            trouble.direct, f"alter database {name} set default_transaction_read_only = on"
        )
        _enqueue_all_the_same(trouble.direct)
        running.first("database.down")
        rate = trouble.rate()
        _set_read_only(trouble.direct, f"alter database {name} reset default_transaction_read_only")
        running.admin.dispose()
        began = time.monotonic()
        assert ([1, 1], []) == trouble.outcome()
        back = time.monotonic() - began
    figures(f"read-only: {rate:.0f} transactions/s; all done {back:.2f} s after its end")
    assert (100 > rate, SOON > back) == (True, True)
    told = ["database.down", "database.up"]
    assert told == running.told("database.down", "database.up", "claim.failed", "worker.error")


def _set_read_only(direct: Engine, statement: str) -> None:
    others = "datname = current_database() and pid <> pg_backend_pid()"
    with direct.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("set default_transaction_read_only = off"))
        connection.execute(text(statement))
        connection.execute(
            text(f"select pg_terminate_backend(pid) from pg_stat_activity where {others}")
        )


def _enqueue_all_the_same(direct: Engine) -> None:
    with direct.connect() as connection:
        connection.execute(text("set default_transaction_read_only = off"))
        connection.commit()
        for kind in ("SYNC", "ASYNC"):
            connection.execute(insert_task(kind, {"i": 1}))
        connection.commit()


@pytest.mark.parametrize("limit", [0, 4])
def test_too_many_clients(db_url, proxy, limit, figures):
    """E12: some of the lanes, or none, get a connection: no hot loop of connecting, none blamed."""
    running = Running(db_url, concurrency=4, idle_interval=0.5)
    running.tasks.handler("SYNC", max_attempts=1)(_mark)
    name = f"worker_{running.url.database}"
    running.execute(f"create role {name} login password 'x' connection limit {limit}")
    running.execute(f"grant all on all tables in schema public to {name}")
    running.execute(f"grant all on all sequences in schema public to {name}")
    running.url = make_url(proxy.url(db_url)).set(username=name, password="x")
    try:
        with running:
            running.enqueue("SYNC", *[{"i": i} for i in range(50)])
            let_pass(0.5)
            before, feeding = proxy.accepted, time.monotonic()
            while time.monotonic() < feeding + 1.5:
                running.enqueue("SYNC", {"i": 50})
            tries = (proxy.accepted - before) / 1.5
            running.execute(f"alter role {name} connection limit -1")
            running.until_empty(10)
    finally:
        running.execute(f"drop owned by {name}")
        running.execute(f"drop role {name}")
        running.admin.dispose()
    state = running.told("database.down", "database.up")
    figures(f"limit {limit}: {tries:.0f} connections tried in a second; changes: {len(state)}")
    assert [] == running.dead()
    assert 40 > tries
    # While some lanes work and others cannot connect, more changes than one are told.
    assert limit or state == ["database.down", "database.up"]
