"""Several lanes on one table: exact counts, deadlocks, lost connections, and your own tables."""

from __future__ import annotations

import enum
import logging
import threading
from functools import partial
from typing import Any

import pytest
from running import Running
from sqlalchemy import Enum, MetaData, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pgtask_sa import DeadTaskMixin, TaskMixin, TaskRegistry
from pgtask_sa.ground import LENDER


@pytest.mark.parametrize("how", ["raises", "at commit"])
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_attempts_are_counted_exactly(db_url, kind, how):
    """B8: eight lanes race for tasks that always fail; each is called max_attempts times."""
    running = Running(db_url, concurrency=8)
    running.execute("create table parent (id int primary key)")
    running.execute("create table child (id int references parent deferrable initially deferred)")
    calls: list[int] = []

    def body(session, params):
        calls.append(params["i"])
        if how == "raises":
            raise ValueError
        session.execute(text("insert into child values (1)"))

    async def awaited(session, params):
        await session.run_sync(body, params)

    options: Any = {"max_attempts": 25, "backoff": 0}
    running.tasks.handler("FAIL", **options)(body if kind == "sync" else awaited)
    running.enqueue("FAIL", {"i": 1}, {"i": 2})
    with running:
        running.until_empty()
    assert [1] * 25 + [2] * 25 == sorted(calls)
    assert [("FAIL", 25, "failed")] * 2 == running.dead()


def test_a_deadlock_between_two_handlers(db_url):
    """C2: one of them is chosen as the victim; it runs again and no attempt is burnt."""
    running = Running(db_url, concurrency=2)
    running.execute("create table account (id int primary key, money int)")
    running.execute("insert into account values (1, 0), (2, 0)")
    both = threading.Barrier(2)
    seen: list[int] = []

    @running.tasks.handler("MOVE", max_attempts=1)
    def move(session, params, task):
        seen.append(task.attempt)
        for number, account in enumerate(params["accounts"]):
            update = text("update account set money = money + 1 where id = :id")
            session.execute(update, {"id": account})
            if number == 0 and len(seen) <= 2:
                both.wait(10)

    running.enqueue("MOVE", {"accounts": [1, 2]}, {"accounts": [2, 1]})
    with running:
        running.until_empty()
    assert ([1, 1, 1], []) == (seen, running.dead())
    assert [(2,), (2,)] == running.rows("select money from account")
    retries = [e.fields["reason"] for e in running.events if e.name == "task.retry"]
    assert ["database"] == retries


END_AT_COMMIT = """
create function farewell() returns trigger language plpgsql as
  $$ begin perform pg_terminate_backend(pg_backend_pid()); return null; end $$;
create constraint trigger farewell after insert on mark deferrable initially deferred
  for each row execute function farewell()
"""


def test_a_connection_that_is_always_lost_at_commit(db_url, monkeypatch):
    """Once it is nobody's fault; if it goes on like this, the task is not tried for ever."""
    monkeypatch.setattr("pgtask_sa.arrears.MAX_BLAMELESS", 2)
    running, starts = Running(db_url, concurrency=1), []

    @running.tasks.handler("A", max_attempts=2, backoff=0)
    def body(session, params, task):
        starts.append(task.attempt)
        session.execute(text("insert into mark values (1)"))

    running.execute(END_AT_COMMIT)
    running.enqueue("A")
    with running:
        running.until(lambda: running.count("dead_task"))
    assert ([1, 1, 1, 2], []) == (starts, running.marks())


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_commit_whose_answer_is_lost(db_url, proxy, kind):
    """B10: the row's presence is the truth: it was committed, so it does not run again."""
    running = Running(db_url, concurrency=1)
    calls: list[int] = []

    def body(session, params):
        calls.append(params["i"])
        session.execute(text("insert into mark values (:i)"), params)
        if params["i"] == 1:
            ground = session.connection().info[LENDER]
            ground.commit = partial(stalled, ground.commit)

    def stalled(commit, chain):
        proxy.stall("down")
        commit(chain)

    async def awaited(session, params):
        await session.run_sync(body, params)

    running.tasks.handler("A", max_attempts=1)(body if kind == "sync" else awaited)
    running.url = running.url.set(host="127.0.0.1", port=proxy.port)
    running.enqueue("A", {"i": 1})
    with running:
        running.until(lambda: [1] == running.marks())
        proxy.drop_all()
        proxy.resume()
        running.enqueue("A", {"i": 2})
        running.until(lambda: [1, 2] == running.marks())
        running.until_empty()
    assert ([1, 2], []) == (calls, running.dead())
    unknown = [e.fields["task_ids"] for e in running.events if e.name == "commit.unknown"]
    assert [[1]] == unknown


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_backends_terminated_at_random(db_url, kind):
    """Nothing is lost or done twice, no attempt is burnt, and nobody is alarmed."""
    running = Running(db_url, concurrency=4)

    def body(session, params):
        session.execute(text("insert into mark values (:i)"), params)
        session.execute(text("select pg_sleep(0.002)"))

    async def awaited(session, params):
        await session.run_sync(body, params)

    running.tasks.handler("A", max_attempts=1)(body if kind == "sync" else awaited)
    running.enqueue("A", *[{"i": i} for i in range(400)])
    kill = (
        "select pg_terminate_backend(pid) from pg_stat_activity where pid = (select pid from"
        " pg_stat_activity where application_name like 'pgtask %' and datname = current_database()"
        " order by random() limit 1)"
    )
    killed = 0
    with running:
        while running.count():
            killed += len(running.rows(kill)) if killed < 40 else 0
        assert running.listener_alive()
    assert (list(range(400)), []) == (running.marks(), running.dead())
    assert killed > 3
    assert [] == running.told("database.down", "worker.error")


# -- tables of one's own --------------------------------------------------------------------------


class Base(DeclarativeBase):
    metadata = MetaData(schema="jobs")


class Kind(enum.Enum):
    KNOWN = "known"
    SOON = "soon"


class EnumJob(TaskMixin, Base):
    """A native enum in a schema of its own, under a name that needs quotes."""

    __tablename__ = "My Job"

    task_type: Mapped[Kind] = mapped_column(  # type: ignore[assignment]
        Enum(Kind, name="kind", schema="jobs", values_callable=lambda e: [m.value for m in e]),
        nullable=False,
    )


class DeadEnumJob(DeadTaskMixin, Base):
    __tablename__ = "dead_job"


def _labels(running: Running, *labels: str) -> None:
    quoted = ", ".join(f"'{label}'" for label in labels)
    running.execute("create schema jobs")
    running.execute(f"create type jobs.kind as enum ({quoted})")
    with running.admin.begin() as connection:
        Base.metadata.create_all(connection)


@pytest.mark.parametrize("order", ["fair", "random", "tablesample"])
def test_an_enum_of_which_each_side_knows_another_label(empty_db_url, order):
    """D10, D11: the others are claimed, and the new label as soon as the database has it."""
    tasks = TaskRegistry(task_class=EnumJob)
    running = Running(empty_db_url, tasks, order=order, report_interval=0.2, batch_size=2)
    _labels(running, "known", "foreign")
    calls = []

    @tasks.handler(Kind.KNOWN, max_attempts=2, backoff=0)
    def known(session, params, task):
        calls.append(task.task_type)
        if task.attempt == 1:
            raise ValueError

    @tasks.handler(Kind.SOON)
    async def soon(session, params, task):
        calls.append(task.task_type)

    insert = """insert into jobs."My Job" (task_type) values ('{}')"""
    running.execute(insert.format("foreign"))
    with running:
        running.execute(insert.format("known"))
        running.until(lambda: ["known", "known"] == calls)
        unknown = running.first("handler.unknown_label")
        assert (["soon"], logging.WARNING) == (unknown.fields["task_types"], unknown.level)
        assert "foreign" == running.first("task.unhandled").fields["task_type"]
        running.execute("alter type jobs.kind add value 'soon'")
        running.execute(insert.format("soon"))
        running.until(lambda: ["known", "known", "soon"] == calls)
        running.until(lambda: 1 == running.count('jobs."My Job"'))
    assert ["handler.unknown_label"] == running.told("handler.unknown_label")
    assert [] == running.told("database.down", "worker.error", "listener.down")


def test_a_column_added_while_workers_run(db_url):
    """F11: prepared claims name their columns, so they go on."""
    running = Running(db_url)
    running.tasks.handler("A")(lambda session, params: None)
    with running:
        running.enqueue("A", *[{}] * 20)
        running.until_empty()
        running.execute("alter table task add column note text default 'x'")
        running.enqueue("A", *[{}] * 20)
        running.until_empty()
    assert ["task.done"] * 40 == running.told("task.done", "database.down", "worker.error")
