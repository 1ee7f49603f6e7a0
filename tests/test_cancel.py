"""Cancelling: what waits or runs goes to the error queue, at once, and does not run again."""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import noting
import psycopg
import pytest
from running import Running
from sqlalchemy import Engine, NullPool, create_engine, make_url, text

from pgtask_sa import Task, TaskRegistry, TaskSession, cli
from pgtask_sa.cancel import Canceller

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pgtask_sa.cancel import Cancellation

AT_ONCE = 5  # seconds; all that a slow machine may need, and far less than any handler here


def _cancel(engine: Engine, *task_ids: int) -> list[Cancellation]:
    with engine.connect() as connection:
        canceller = Canceller(connection, Task)
        return [canceller.cancel(task_id) for task_id in task_ids]


def _add(engine: Engine, task_type: str = "A", **columns: Any) -> int:
    with TaskSession(engine) as session:
        task = Task(task_type=task_type, params={}, **columns)
        session.add(task)
        session.commit()
        return task.task_id


def _rows(engine: Engine, statement: str) -> list[tuple[Any, ...]]:
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text(statement))]


DEAD = "select task_id, task_type, attempts, last_error, reason from dead_task order by task_id"


class TestWaiting:
    @pytest.mark.parametrize("run_at", [None, "infinity"])
    def test_is_buried(self, engine, run_at):
        """It keeps number, attempts and last error: nothing failed by its being cancelled."""
        task_id = _add(engine, attempts=3, last_error="ValueError: no")
        if run_at:
            with engine.begin() as connection:
                connection.execute(text(f"update task set run_at = '{run_at}'"))
        (done,) = _cancel(engine, task_id)
        assert ("waiting", True) == (done.found, done.is_done)
        assert [(task_id, "A", 3, "ValueError: no", "cancelled")] == _rows(engine, DEAD)
        assert [] == _rows(engine, "select task_id from task")

    def test_a_task_that_killed_its_workers(self, engine, direct_db_url):
        """Starts with workers that died of it are counted; one that lives has settled its own."""
        task_id = _add(engine, attempts=1)
        with noting.alive(direct_db_url) as connection:
            for number, worker_id in enumerate((noting.WORKER_ID, 1, 2)):
                noting.write_lane(connection, task_id, worker_id=worker_id, lane=number)
            noting.write_lane(connection, task_id, worker_id=3, row_versions=[1])
            assert "waiting" == _cancel(engine, task_id)[0].found
        assert [(task_id, "A", 3, None, "cancelled")] == _rows(engine, DEAD)

    def test_twice(self, engine):
        """The second time it is not there any more, and where it is is said."""
        task_id = _add(engine)
        found = [done.found for done in _cancel(engine, task_id, task_id, 4711)]
        assert ["waiting", "missing", "missing"] == found
        (again,) = _cancel(engine, task_id)
        assert f"task {task_id} is not there (it is in the error queue: cancelled)" == str(again)

    def test_columns_that_nobody_mapped(self, engine):
        """Columns that somebody added are carried along."""
        with engine.begin() as connection:
            for name in ("task", "dead_task"):
                connection.execute(text(f"alter table {name} add tenant int not null default 1"))
            connection.execute(text("insert into task (task_type, tenant) values ('A', 42)"))
        _cancel(engine, 1)
        assert [(42,)] == _rows(engine, "select tenant from dead_task")

    def test_a_row_that_the_error_queue_refuses(self, engine):
        """Then nothing is changed, and it is said."""
        with engine.begin() as connection:
            connection.execute(text("alter table dead_task add check (task_type <> 'A')"))
        task_id = _add(engine, attempts=2)
        (done,) = _cancel(engine, task_id)
        assert ("refused", False) == (done.found, done.is_done)
        assert [(task_id, 2, None)] == _rows(engine, "select task_id, attempts, run_at from task")

    def test_a_row_that_somebody_holds(self, engine):
        """An administrator's transaction is not ended, and is named."""
        task_id = _add(engine)
        with engine.connect() as admin:
            admin.execute(text("set local application_name = 'psql of bob'"))
            admin.execute(text("select * from task for update"))
            start = time.monotonic()
            (done,) = _cancel(engine, task_id)
            assert AT_ONCE > time.monotonic() - start
            assert "held" == done.found
            assert "psql of bob" in str(done)
            assert 1 == admin.scalar(text("select 1"))
        assert [(task_id,)] == _rows(engine, "select task_id from task")

    def test_a_lease(self, engine):
        """A leased row is buried, and who had the lease finds nothing to complete."""
        task_id = _add(engine)
        token = "00000000-0000-0000-0000-000000000007"
        with engine.begin() as connection:
            lease = f"lease_token = '{token}', run_at = now() + interval '1 hour'"
            connection.execute(text(f"update task set {lease}"))
        (done,) = _cancel(engine, task_id)
        told = "was leased to a running handler: cancelled, it can commit nothing more"
        assert f"task {task_id} {told}" == str(done)
        assert [(task_id, "A", 0, None, "cancelled")] == _rows(engine, DEAD)
        with engine.begin() as connection:
            complete = text(f"delete from task where task_id = 1 and lease_token = '{token}'")
            assert 0 == connection.execute(complete).rowcount


class TestStaleNotes:
    """What is noted is believed only of a worker that lives and of the very same transaction."""

    @contextmanager
    def _held(self, engine: Engine) -> Iterator[tuple[int, Any]]:
        task_id = _add(engine)
        with engine.connect() as holder:
            holder.execute(text("select * from task for update"))
            yield task_id, holder

    def _unharmed(self, holder: Any) -> bool:
        return bool(holder.scalar(text("select count(*) from task")))

    def test_a_worker_that_is_gone(self, engine):
        """Nobody holds its lock: its notes end no process."""
        with self._held(engine) as (task_id, holder), engine.connect() as connection:
            noting.write_lane(connection, task_id)
            assert "held" == _cancel(engine, task_id)[0].found
            assert self._unharmed(holder)

    def test_a_worker_behind_a_pooler(self, engine):
        """One that cannot hold a lock is alive if it was seen in the last minute."""
        with self._held(engine) as (task_id, holder), engine.connect() as connection:
            noting.write_lane(connection, task_id, is_direct=False)
            late = text("update task_worker set seen_at = now() - interval '61 seconds'")
            connection.execute(late)
            connection.commit()
            assert "held" == _cancel(engine, task_id)[0].found
            assert self._unharmed(holder)
            connection.execute(text("update task_worker set seen_at = now() - interval '50 s'"))
            connection.commit()
            assert "running" == _cancel(engine, task_id)[0].found
            holder.invalidate()

    def test_another_transaction_of_the_same_process(self, engine, direct_db_url):
        """The process that ran the task does something else by now."""
        with self._held(engine) as (task_id, holder), noting.alive(direct_db_url) as connection:
            earlier = noting.holder(connection, task_id).xact_start.replace(year=2020)
            noting.write_lane(connection, task_id, begun_at=earlier)
            noting.write_lane(connection, task_id, lane=2, begun_at=None)
            # as the claim of another task would
            holder.execute(text(f"set application_name = 'pgtask {task_id + 1} B'"))
            assert "held" == _cancel(engine, task_id)[0].found
            assert self._unharmed(holder)

    def test_another_version_of_the_row(self, engine, direct_db_url):
        """The task came back and was taken by somebody else since."""
        with self._held(engine) as (task_id, holder), noting.alive(direct_db_url) as connection:
            noting.write_lane(connection, task_id, row_versions=[1])
            assert "held" == _cancel(engine, task_id)[0].found
            assert self._unharmed(holder)


def test_a_transaction_that_may_not_be_seen(engine, direct_db_url):
    """Of another role's transaction nothing is known for sure: it is left, and that is said."""
    name = f"clerk_{secrets.token_hex(4)}"
    task_id = _add(engine)
    with engine.connect() as worker, noting.alive(direct_db_url) as connection:
        worker.execute(text("select * from task for update"))
        noting.write_lane(connection, task_id)
        connection.execute(text(f"create role {name} login password 'secret'"))
        connection.execute(text(f"grant all on all tables in schema public to {name}"))
        connection.commit()
        clerk_url = make_url(direct_db_url).set(username=name, password="secret")
        clerk = create_engine(clerk_url, poolclass=NullPool)
        (done,) = _cancel(clerk, task_id)
        assert ("hidden", False, "web1") == (done.found, done.is_done, done.host)
        assert 1 == worker.scalar(text("select count(*) from task"))
        worker.rollback()
        connection.execute(text(f"drop owned by {name}; drop role {name}"))
        connection.commit()


class Stuck:
    """Handlers of type A that run until they are let go, and count how often they began."""

    def __init__(self, url: str, kind: str, **options: Any) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.go = threading.Event()
        tasks = TaskRegistry()
        tasks.handler("A", backoff=0)(getattr(self, kind))
        tasks.handler("B")(self.quick_async if kind == "in_asyncio" else self.quick)
        self.running = Running(url, tasks, **options)
        self.engine = create_engine(self.running.url)

    def _mark(self, session: Any, task: Any) -> None:
        session.execute(text("insert into mark values (:i)"), {"i": task.task_id})

    def in_sql(self, session, params, task):
        self._mark(session, task)
        self.begun.append(task.task_id)
        if not self.go.is_set():
            session.execute(text("select pg_sleep(60)"))

    def in_python(self, session, params, task):
        self._mark(session, task)
        self.begun.append(task.task_id)
        self.go.wait(60)
        self.ended.append(task.task_id)

    def in_python_alone(self, session, params, task):
        """Run without a look at the database."""
        self.begun.append(task.task_id)
        self.go.wait(60)
        self.ended.append(task.task_id)

    async def in_asyncio(self, session, params, task):
        await session.run_sync(self._mark, task)
        self.begun.append(task.task_id)
        while not self.go.is_set():  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.01)
        self.ended.append(task.task_id)

    def quick(self, session, params, task):
        self._mark(session, task)

    async def quick_async(self, session, params, task):
        await session.run_sync(self._mark, task)

    def begin(self, count: int = 1) -> None:
        """Enqueue tasks at once, and wait until one runs."""
        self.running.enqueue("A", *[{}] * count)
        self.running.until(lambda: self.begun)

    def cancel(self, task_id: int) -> Cancellation:
        start = time.monotonic()
        (done,) = _cancel(self.engine, task_id)
        assert AT_ONCE > time.monotonic() - start
        return done

    def settle(self) -> None:
        """Let the handlers go, and the worker run something else on each of its lanes."""
        self.go.set()
        self.running.enqueue("B", *[{}] * 5)
        self.running.until_empty()


KINDS = ["in_sql", "in_python", "in_python_alone", "in_asyncio"]


class TestRunning:
    @pytest.mark.parametrize("kind", KINDS)
    def test_is_stopped(self, db_url, direct_url, kind):
        """It is buried at once, what it wrote is undone, and it does not run again."""
        stuck = Stuck(db_url, kind, concurrency=1, direct_url=direct_url)
        with stuck.running as running:
            stuck.begin()
            done = stuck.cancel(1)
            assert ("running", os.getpid()) == (done.found, done.pid)
            assert 0 <= done.seconds < 60
            assert [("A", 0, "cancelled")] == running.dead()
            stuck.settle()
        assert [1] == stuck.begun
        assert [2, 3, 4, 5, 6] == stuck.running.marks()
        assert [(1, "A", 0, None, "cancelled")] == _rows(stuck.engine, DEAD)

    @pytest.mark.parametrize("which", [0, 1, 2], ids=["running", "second", "third"])
    def test_one_of_a_batch(self, db_url, direct_url, which):
        """Whether its turn has come or not; the others run again, once to the end."""
        stuck = Stuck(db_url, "in_python", concurrency=1, batch_size=3, direct_url=direct_url)
        with stuck.running as running:
            with running.admin.begin() as connection:  # so that one claim takes all three
                connection.execute(text("insert into task (task_type) values ('A'),('A'),('A')"))
            running.until(lambda: stuck.begun)
            first = stuck.begun[0]
            order = [first, *({1, 2, 3} - {first})]
            assert "running" == stuck.cancel(order[which]).found
            stuck.settle()
        rest = sorted({1, 2, 3} - {order[which]})
        assert [*rest, 4, 5, 6, 7, 8] == stuck.running.marks()
        assert [(order[which], "A", 0, None, "cancelled")] == _rows(stuck.engine, DEAD)

    def test_among_many_workers(self, db_url, direct_url):
        """Many wait for work. One that is faster than the cancel is found by its next look."""
        stuck = Stuck(db_url, "in_python", concurrency=8, direct_url=direct_url)
        with stuck.running:
            for task_id in range(1, 6):
                stuck.begin()
                stuck.running.until(lambda n=task_id: n in stuck.begun)
                assert "running" == stuck.cancel(task_id).found
            stuck.settle()
        assert [1, 2, 3, 4, 5] == sorted(set(stuck.begun))
        assert [(n, "A", 0, None, "cancelled") for n in range(1, 6)] == _rows(stuck.engine, DEAD)
        assert not {1, 2, 3, 4, 5} & set(stuck.running.marks())

    def test_comes_back_by_requeue(self, db_url, direct_url, monkeypatch):
        """With its old number, and it runs."""
        monkeypatch.setenv("DATABASE_URL", db_url)
        stuck = Stuck(db_url, "in_python", concurrency=1, direct_url=direct_url)
        with stuck.running:
            stuck.begin()
            stuck.cancel(1)
            stuck.go.set()
            assert 0 == cli.main(["requeue", "1"])
            stuck.running.until_empty()
        assert [1] == stuck.running.marks()

    def test_is_told_to_the_workers(self, direct_db_url, engine):
        """They hear the number on the channel of the wake-up; of a task that waited, nothing."""
        waiting, running = _add(engine), _add(engine)
        url = make_url(direct_db_url).set(drivername="postgresql")
        dsn = url.render_as_string(hide_password=False)
        with psycopg.connect(dsn, autocommit=True) as listener, engine.connect() as lane:
            (oid,) = listener.execute("select 'task'::regclass::oid").fetchone()
            listener.execute(f"listen pgtask_{oid}")
            lane.execute(text(f"delete from task where task_id = {running}"))
            with noting.alive(direct_db_url) as connection:
                noting.write_lane(connection, running)
                assert ["waiting", "running"] == [
                    d.found for d in _cancel(engine, waiting, running)
                ]
            heard = [n.payload for n in listener.notifies(timeout=5, stop_after=1)]
            heard += [n.payload for n in listener.notifies(timeout=0)]
            lane.invalidate()
        assert [f"cancel {running}"] == heard
