"""Entries of workers that died, as they would have left them behind."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from sqlalchemy import NullPool, create_engine, text

from pgtask_sa.presence_table import LOCK_CLASS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from running import Running

ENTRY = """
insert into task_worker
  (worker_id, lane, host, pid, server_started_at, is_direct, task_ids, row_versions)
select :worker_id, 1, 'elsewhere', 1, pg_postmaster_start_time(), true,
  coalesce(array_agg(task_id), '{}'), coalesce(array_agg(xmin::text::bigint), '{}')
from task where task_type = :task_type
"""
OTHER_LANE = """
insert into task_worker
  (worker_id, lane, host, pid, server_started_at, is_direct, task_ids, row_versions)
values (:worker_id, 2, 'elsewhere', 1, pg_postmaster_start_time(), true, '{-1}', '{0}')
"""


def leave_behind(
    running: Running, task_type: str, *, worker_id: int = 1, alone: bool = True
) -> None:
    """Note that a worker had claimed all tasks of a type, alone or beside another task."""
    running.execute(ENTRY, worker_id=worker_id, task_type=task_type)
    if not alone:
        running.execute(OTHER_LANE, worker_id=worker_id)


@contextmanager
def alive(running: Running, worker_id: int = 1) -> Iterator[None]:
    """Hold the lock of a worker, as long as the block lasts."""
    # a lock like that is a session's, which a connection through a pooler is not
    engine = create_engine(running.options.get("direct_url") or running.url, poolclass=NullPool)
    with engine.connect() as connection:
        key = {"class": LOCK_CLASS, "worker_id": worker_id}
        connection.execute(text("select pg_advisory_lock(:class, :worker_id)"), key)
        yield
        connection.execute(text("select pg_advisory_unlock(:class, :worker_id)"), key)


def presences(running: Running) -> list[int]:
    """Return the server processes that hold the lock of a worker."""
    return [
        pid
        for (pid,) in running.rows(
            "select pid from pg_locks where locktype = 'advisory' and classid = :class and granted"
            " and database = (select oid from pg_database where datname = current_database())",
            **{"class": LOCK_CLASS},
        )
    ]
