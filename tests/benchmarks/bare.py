"""The same work in bare psycopg: the yardstick. One thread, prepared statements, pipelines.

The table is the plain one of four columns: no lottery, no delays, no trigger. What the library's
indexes and columns cost is part of the comparison.
"""

from __future__ import annotations

import json
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psycopg

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tally import Tally

NAME = "bare psycopg"
DATABASE = "bare"

SCHEMA = """
drop table if exists task, user_rows;
create table task (
  task_id bigint primary key generated always as identity,
  task_type text not null,
  params jsonb not null,
  created_at timestamptz not null default now());
create table user_rows (id bigint primary key generated always as identity, i bigint not null);
"""
INSERT = "insert into task (task_type, params) values (%s, %s)"
ROW = "insert into user_rows (i) values (%s)"
TAKE = """
delete from task where task_id = any (array (
  select task_id from task order by task_id limit {limit} for update skip locked))
returning task_id, task_type, params"""


def reset(url: str) -> None:
    """Make empty tables."""
    with psycopg.connect(url) as connection:
        connection.execute(SCHEMA)


@contextmanager
def sender(url: str) -> Iterator[Callable[[str, int], None]]:
    """Give a function that enqueues a task and commits, in one round trip with its NOTIFY."""
    with psycopg.connect(url, autocommit=True) as connection:

        def send(kind: str, number: int) -> None:
            with connection.pipeline():
                connection.execute(INSERT, (kind, json.dumps({"i": number})), prepare=True)
                connection.execute("notify task")

        yield send


def bulk(url: str, count: int) -> None:
    """Enqueue many tasks, by COPY."""
    into = "copy task (task_type, params) from stdin"
    with psycopg.connect(url) as connection, connection.cursor().copy(into) as copy:
        for number in range(count):
            copy.write_row(("noop", json.dumps({"i": number})))


def worker(url: str, tally: Tally, *, batch: int, drain: bool = False, **_: Any) -> None:
    """Take, run, commit; each commit travels with the next delete."""
    signal.signal(signal.SIGTERM, _stop)
    take = TAKE.format(limit=batch)  # a literal: faster than a parameter
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("listen task")
        while True:
            _run_all(connection, take, tally)
            if drain:
                return
            for _notify in connection.notifies(timeout=5, stop_after=1):
                pass


def _run_all(connection: psycopg.Connection[Any], take: str, tally: Tally) -> None:
    with connection.pipeline():
        while True:
            connection.execute("begin")
            rows = connection.execute(take, prepare=True).fetchall()
            for _task_id, kind, params in rows:
                if kind == "row":
                    connection.execute(ROW, (params["i"],), prepare=True)
                tally.hit(params["i"] if kind == "stamp" else None)
            connection.execute("commit")
            if not rows:
                return


def _stop(*_: object) -> None:
    raise SystemExit(0)
