"""Deadlines and cancels while a migration waits for the lock of the task table, or holds it."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from running import Running
from sqlalchemy import create_engine, text
from waiting import SOON

from pgtask_sa import Task
from pgtask_sa.cancel import Canceller

if TYPE_CHECKING:
    from collections.abc import Iterator

ADD_COLUMN = "alter table task add column extra int not null default 7"
WRITE_ANEW = "alter table task alter column attempts type bigint"  # every row is a new one then
WAITING = "select count(*) from pg_locks where not granted and relation = 'task'::regclass"


@pytest.fixture
def release(monkeypatch):
    """Give an event that lets go of handlers, at the latest at the end of the test."""
    for module in ("watchdog", "faces"):
        monkeypatch.setattr(f"pgtask_sa.{module}.SECOND_GRACE", 0.3)
    release = threading.Event()
    yield release
    release.set()


@contextmanager
def _migration(running: Running, statement: str = ADD_COLUMN) -> Iterator[threading.Event]:
    """Run a migration without a lock_timeout, which waits in line; the event: it is through."""
    through = threading.Event()

    def migrate() -> None:
        engine = create_engine(running.url)
        with engine.begin() as connection:
            connection.execute(text(statement))
        engine.dispose()
        through.set()

    thread = threading.Thread(target=migrate, daemon=True)
    thread.start()
    running.until(lambda: running.rows(WAITING)[0][0])
    yield through
    thread.join(30)


def _loop(running: Running, release: threading.Event, **options) -> list[int]:
    """Register a handler that never looks at the database again once it has begun."""
    starts: list[int] = []

    @running.tasks.handler("LOOP", backoff=0, **options)
    def loop(session, params, task):
        session.execute(text("insert into mark values (1)"))
        starts.append(task.attempt)
        while not release.is_set():
            pass

    return starts


@pytest.mark.parametrize("budget", [1, 2])
def test_a_deadline_while_a_migration_waits(db_url, direct_url, release, budget):
    """The handler's transaction is ended, the migration goes on, and each start is counted."""
    running = Running(db_url, concurrency=4, direct_url=direct_url)
    starts = _loop(running, release, max_attempts=budget, timeout=1)
    with running:
        running.enqueue("LOOP")
        running.until(lambda: starts)
        with _migration(running) as through:
            assert through.wait(3 * SOON)
        running.until(lambda: [("LOOP", budget, "failed")] == running.dead())
        running.until(lambda: running.told("lane.stuck"))
        release.set()
    assert ([*range(1, budget + 1)], []) == (starts, running.marks())
    assert [] == running.told("task.timeout")
    assert "timed out after 1 s" in running.rows("select last_error from dead_task")[0][0]
    assert "the handler of task 1 LOOP, which timed out" in running.first("lane.stuck").message


def test_a_migration_that_writes_all_rows_anew(db_url, release, monkeypatch):
    """The row is of another version then, and the start is counted all the same."""
    monkeypatch.setattr("pgtask_sa.watchdog.SECOND_GRACE", 60)  # so that no other lane takes it
    running = Running(db_url, concurrency=1)
    starts = _loop(running, release, max_attempts=1, timeout=1)
    with running:
        running.enqueue("LOOP")
        running.until(lambda: starts)
        with _migration(running, WRITE_ANEW) as through:
            assert through.wait(3 * SOON)
        running.until(lambda: [("LOOP", 1, "failed")] == running.dead())
        release.set()
    assert ([1], []) == (starts, running.marks())


def _cancel(running: Running, task_id: int = 1) -> str:
    with running.admin.connect() as connection:
        return Canceller(connection, Task).cancel(task_id).found


def test_a_cancel_while_a_migration_waits(db_url, direct_url, release):
    """The task is buried, the migration goes on, and the worker tells which task it was."""
    running = Running(db_url, concurrency=1, direct_url=direct_url)
    starts = _loop(running, release, timeout=None)
    with running:
        running.enqueue("LOOP")
        running.until(lambda: starts)
        with _migration(running) as through:
            assert "running" == _cancel(running)
            assert through.wait(3 * SOON)
        stuck = running.first("lane.stuck")
        release.set()
    assert [("LOOP", 0, "cancelled")] == running.dead()
    assert "the handler of task 1 LOOP, which was cancelled" in stuck.message
    assert ([1], []) == (starts, running.marks())


def test_a_cancel_while_somebody_holds_the_table(db_url, monkeypatch):
    """It does not hang: that the table is locked is said."""
    monkeypatch.setattr("pgtask_sa.cancel.LOOKS", ((0.0, "50ms"), (0.0, "50ms")))
    running = Running(db_url)
    running.enqueue("LOOP")
    with running.admin.connect() as migration:
        migration.execute(text(ADD_COLUMN))
        assert "locked" == _cancel(running)
    assert "waiting" == _cancel(running)
