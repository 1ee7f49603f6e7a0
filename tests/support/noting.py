"""Rows of the table of the workers, written by a test, and the lock of a worker that lives."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sqlalchemy import NullPool, create_engine, text

from pgtask_sa import Task
from pgtask_sa.presence_table import LOCK_CLASS, worker_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection

WORKER_ID = 99_001
# Who holds the row of a task, and since when: as a worker would note it.
_HOLDER = text(
    "select pid, xact_start from pg_stat_activity join task on cast(backend_xid as text) ="
    " cast(xmax as text) where task_id = :task_id"
)
_VERSION = text("select cast(cast(xmin as text) as bigint) from task where task_id = :task_id")


def holder(connection: Connection, task_id: int) -> Any:
    """Return pid and beginning of the transaction that holds a task; None if nobody does."""
    return connection.execute(_HOLDER, {"task_id": task_id}).first()


def write_lane(
    connection: Connection, *task_ids: int, worker_id: int = WORKER_ID, lane: int = 1, **values: Any
) -> None:
    """Note that a lane runs tasks, in the transaction that holds the first one, and commit."""
    found = holder(connection, task_ids[0]) if task_ids else None
    row = {
        "host": "web1",
        "pid": 4711,
        "is_direct": True,
        "backend_pid": found and found.pid,
        "begun_at": found and found.xact_start,
        "task_ids": list(task_ids),
        "row_versions": [connection.scalar(_VERSION, {"task_id": each}) or 0 for each in task_ids],
        "server_started_at": connection.scalar(text("select pg_postmaster_start_time()")),
    }
    table = worker_table(Task.__table__)
    connection.execute(
        table.insert().values({"worker_id": worker_id, "lane": lane, **row, **values})
    )
    connection.commit()


@contextmanager
def alive(url: Any, worker_id: int = WORKER_ID) -> Iterator[Connection]:
    """Hold the lock of a worker, and give a connection to write its lanes with."""
    engine = create_engine(url, poolclass=NullPool)
    with engine.connect() as lock, engine.connect() as connection:
        lock.execute(text(f"select pg_advisory_lock({LOCK_CLASS}, {worker_id})"))
        lock.commit()
        yield connection
