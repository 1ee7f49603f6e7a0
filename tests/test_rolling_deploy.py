"""Two versions side by side: of the handlers, of the tables, and of our own migrations."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from running import Running
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from waiting import SOON, let_pass, wait_until

from pgtask_sa import TaskRegistry, insert_task, migrations

if TYPE_CHECKING:
    from collections.abc import Iterator


def _registry(*types: str) -> TaskRegistry:
    """Return handlers, sync and async in turns, that mark what they did; one attempt each."""
    tasks = TaskRegistry()

    def mark(session, params):
        session.execute(text("insert into mark values (:i)"), params)

    async def awaited(session, params):
        await session.run_sync(mark, params)

    for n, name in enumerate(types):
        tasks.handler(name, max_attempts=1)(awaited if n % 2 else mark)
    return tasks


@contextmanager
def _load(running: Running, *types: str) -> Iterator[list[float]]:
    """Enqueue the types in turns, one in each commit; yield how long each took, in seconds."""
    times: list[float] = []
    stop = threading.Event()

    def enqueue() -> None:
        with running.admin.connect() as connection:
            while not stop.wait(0.003):
                number, began = len(times), time.monotonic()
                with connection.begin():
                    connection.execute(insert_task(types[number % len(types)], {"i": number}))
                times.append(time.monotonic() - began)

    thread = threading.Thread(target=enqueue)
    thread.start()
    try:
        yield times
    finally:
        stop.set()
        thread.join(10)


def test_a_new_type_beside_an_old_worker(db_url, figures):
    """E6: what the old one does not know it leaves alone, and tells once; the new one does it."""
    old = Running(db_url, _registry("OLD", "OLD_TOO"), idle_interval=0.2)
    new = Running(db_url, _registry("OLD", "NEW"))
    old.enqueue("NEW", *[{"i": i} for i in range(100)])
    with old:
        old.first("task.unhandled")
        with _load(old, "OLD", "OLD_TOO", "NEW") as times:
            let_pass(2)
        old.until(lambda: old.rows("select distinct task_type from task") == [("NEW",)])
        assert [(0,)] == old.rows("select max(attempts) from task")
        waiting = old.count()
        with new:
            new.until_empty()
    figures(f"{waiting} of the new type waited beside the old worker for 2 s; none was counted")
    expected = sorted([*range(100), *range(len(times))])
    assert (expected, []) == (new.marks(), new.dead())
    assert 1 == len(old.told("task.unhandled"))
    assert [] == old.told("task.retry") + new.told("task.retry", "claim.failed")


def test_a_column_that_comes_and_goes_under_load(db_url, figures):
    """F11: with plans prepared, and rows that are put back and buried meanwhile."""
    running = Running(db_url, _registry("SYNC", "ASYNC"), concurrency=2)

    @running.tasks.handler("AGAIN", max_attempts=2, backoff=0)
    def again(session, params, task):
        if task.attempt == 1:
            raise ValueError("the first time")
        session.execute(text("insert into mark values (:i)"), params)

    with running:
        with _load(running, "SYNC", "ASYNC", "AGAIN") as times:
            for change in ("add note text default 'x'", "drop note") * 3:
                # enough for each lane to work with prepared plans: those of five executions
                done = len(running.told("task.done"))
                running.until(lambda n=done: len(running.told("task.done")) > n + 60)
                _alter(running, f"alter table task {change}")
        running.until_empty()
    total, longest = len(times), max(times)
    figures(f"{total} tasks, 6 changes of the table; the longest enqueue took {longest:.3f} s")
    assert (list(range(total)), []) == (running.marks(), running.dead())
    assert total // 3 == len(running.told("task.retry"))
    assert SOON > longest
    assert [] == running.told("claim.failed", "database.down", "settle.refused", "worker.error")


def _alter(running: Running, statement: str) -> None:
    def attempt() -> bool:
        try:
            with running.admin.begin() as connection:
                connection.execute(text("set local lock_timeout = '200ms'"))
                connection.execute(text(statement))
        except OperationalError as error:
            assert "lock timeout" in str(error)
            return False
        return True

    wait_until(attempt, 10)


@pytest.fixture
def older(empty_db_url) -> str:
    """Give the URL of a database as the revision before the newest left it."""
    migrations.upgrade(empty_db_url, "0001")
    return empty_db_url


def test_our_migration_under_a_running_task(older, figures):
    """F12: an enqueue does not wait long for 0002, also when that must wait for a task."""
    running = Running(older)
    connection = running.admin.connect()
    connection.execute(text("insert into task (task_type, params) values ('A', '{}')"))
    connection.commit()
    connection.execute(text("delete from task"))  # a claim whose handler takes its time
    migration = threading.Thread(target=migrations.upgrade, args=(older, "0002"))
    migration.start()
    times = []
    for _ in range(3):
        running.until(lambda: running.rows("select 1 from pg_locks where not granted"), 10, 0.002)
        began = time.monotonic()
        running.execute("insert into task (task_type, params) values ('B', '{}')")
        times.append(time.monotonic() - began)
    assert migration.is_alive()
    connection.commit()
    connection.close()
    migration.join(15)
    running.admin.dispose()
    figures(f"enqueues while the migration waited: {', '.join(f'{t:.3f}' for t in times)} s")
    assert SOON > max(times)
    assert ("0002", 3) == (migrations.current(older), running.count())


def test_the_new_code_before_its_migration(older, figures):
    """A worker that is deployed first says what is missing, burns nothing, and works after it."""
    running = Running(older, _registry("SYNC", "ASYNC"), concurrency=2, idle_interval=0.5)
    for name in ("SYNC", "ASYNC"):
        running.execute(f"insert into task (task_type, params) values ('{name}', '{{\"i\": 1}}')")
    with running:
        let_pass(1.5)
        told = running.told()
        migrations.upgrade(older)
        running.until_empty()
    figures(f"before the migration: {told}")
    assert ([1, 1], []) == (running.marks(), running.dead())
    assert 3 > len(running.told("database.down", "claim.failed"))
    assert [] == running.told("task.retry", "worker.error")
