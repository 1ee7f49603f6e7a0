"""The database of the model test, as seen and touched from outside of all workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from model_fates import Fate
from sqlalchemy import create_engine, text
from waiting import wait_until

from pgtask_sa import statements
from pgtask_sa.engines import database_url
from pgtask_sa.errors import TaskFailed
from pgtask_sa.events import Events
from pgtask_sa.presence_table import worker_table
from pgtask_sa.retry import Verdict
from pgtask_sa.settle import Settler, Tables

# Deferred, so that a handler can write what only fails at the end.
EFFECT = """create table if not exists effect
    ( task_id bigint not null, n int not null, unique (n) deferrable initially deferred )"""
KILL = "select pg_terminate_backend(pid) from unnest(cast(:pids as int[])) as pid"
ALIVE = "select count(*) from pg_stat_activity where pid = any(:pids)"

FREE = "select task_id from {task} for update skip locked"
ALL = """
    select case when lease_token is null then 'waiting' else 'leased' end, task_id, attempts, '',
           run_at is null or run_at <= clock_timestamp() from {task}
    union all select 'dead', task_id, attempts, reason, false from {dead}
    union all select 'effect', task_id, n, '', false from effect"""


@dataclass
class Seen:
    """What is in the tables at one moment."""

    fates: dict[int, Fate]  # of every task that is in one of the tables
    effects: dict[int, frozenset[int]]  # of every task that has some
    locked: set[int]
    ready: set[int]  # could be claimed now


class ModelDatabase:
    """Looks and touches, over connections of its own."""

    def __init__(self, url: str, task_class: type[Any]) -> None:
        self.url = database_url(url)
        self.tables = Tables(task_class)
        self.compiled: dict[Any, Any] = {}  # statements, for all engines of all processes
        self.admin = create_engine(self.url)
        self.execute(EFFECT)
        names = {"task": self.tables.task.fullname, "dead": self.tables.dead.fullname}
        self._free = text(FREE.format(**names))
        self._all = text(ALL.format(**names))

    def close(self) -> None:
        self.admin.dispose()

    def execute(self, statement: str, **values: Any) -> None:
        with self.admin.begin() as connection:
            connection.execute(text(statement), values)

    def empty(self) -> None:
        """Remove everything; numbers begin again, so that an example can be repeated."""
        tables = (self.tables.task, self.tables.dead, worker_table(self.tables.task))
        names = ", ".join(table.fullname for table in tables)
        self.execute(f"truncate {names}, effect restart identity")

    def kill(self, pids: set[int]) -> None:
        """End server processes, and wait until they are gone."""
        given = {"pids": list(pids)}
        self.execute(KILL, **given)
        with self.admin.connect() as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT")
            wait_until(lambda: not connection.scalar(text(ALIVE), given), interval=0.001)

    # -- looking -------------------------------------------------------------------------------

    def look(self) -> Seen:
        """Return what is there."""
        with self.admin.connect() as connection:
            free = set(connection.scalars(self._free))
            rows = connection.execute(self._all).all()
        seen = Seen({}, self._effects(rows), set(), set())
        for place, task_id, count, reason, is_ready in rows:
            if place == "effect":
                continue
            assert task_id not in seen.fates, f"in two places: task {task_id}"
            effects = seen.effects.get(task_id, frozenset())
            seen.fates[task_id] = Fate(place, count, reason, effects)
            if place != "dead":
                (seen.ready if task_id in free and is_ready else set()).add(task_id)
                (set() if task_id in free else seen.locked).add(task_id)
        return seen

    @staticmethod
    def _effects(rows: Sequence[Any]) -> dict[int, frozenset[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for place, task_id, n, *_ in rows:
            if place == "effect":
                found[task_id].append(n)
        assert all(len(set(each)) == len(each) for each in found.values()), "an effect twice"
        return {task_id: frozenset(each) for task_id, each in found.items()}

    # -- touching ------------------------------------------------------------------------------

    def requeue(self, task_id: int) -> None:
        """Bring a dead task back, as the command does."""
        task, dead = self.tables.task, self.tables.dead
        with self.admin.begin() as connection:
            statement = statements.requeue(task, dead, dead.c.task_id == task_id)
            assert [task_id] == list(connection.scalars(statement))

    def cancel(self, task_id: int) -> None:
        """Bury a task that waits, or that is leased."""
        with self.admin.begin() as connection:
            settler = Settler(connection, self.tables, {}, Events())
            (claimed,) = settler.reclaim(task_id)
            verdict = Verdict("bury", claimed.attempts, reason="cancelled")
            settler.write(claimed, verdict, TaskFailed("cancelled"))

    def end_lease(self, task_id: int) -> None:
        """Let the time of a lease run out."""
        name = self.tables.task.fullname
        gone = "set run_at = statement_timestamp() - interval '1 second'"
        self.execute(f"update {name} {gone} where task_id = :task_id", task_id=task_id)
