"""The database of the model test, as seen and touched from outside of all workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from model_fates import Fate
from sqlalchemy import UniqueConstraint, create_engine, text
from sqlalchemy.orm import DeclarativeBase
from waiting import wait_until

from pgtask_sa import DeadTaskMixin, TaskMixin, statements
from pgtask_sa.cancel import Canceller
from pgtask_sa.engines import database_url
from pgtask_sa.presence_table import worker_table
from pgtask_sa.settle import Tables

# Deferred, so that a handler can write what only fails at the end.
EFFECT = """create table if not exists effect
    ( task_id bigint not null, n int not null, unique (n) deferrable initially deferred )"""
KILL = "select pg_terminate_backend(pid) from unnest(cast(:pids as int[])) as pid"
ALIVE = "select count(*) from pg_stat_activity where pid = any(:pids)"

NOTED = """select unnest(task_ids), unnest(row_versions) from {worker}
    where worker_id = :worker_id and mod(lane, 65536) = :lane"""
FREE = "select task_id from {task} for update skip locked"
# Who deletes or locks a row leaves its number there. To look must not lock: that is to be seen.
ALL = """
    with open as materialized
        ( select cast(transactionid::text as bigint) as xid
            from pg_locks where locktype = 'transactionid' and granted )
    select case when lease_token is null then 'waiting' else 'leased' end, task_id, attempts, '',
           run_at is null or run_at <= clock_timestamp(),
           cast({task}.xmax::text as bigint) in (select xid from open)
      from {task}
    union all select 'dead', task_id, attempts, reason, false, false from {dead}
    union all select 'effect', task_id, n, '', false, false from effect"""


class Base(DeclarativeBase):
    pass


class UniqueTask(TaskMixin, Base):
    __tablename__ = "unique_task"
    __table_args__ = (UniqueConstraint("task_type", "params"),)


class DeadUniqueTask(DeadTaskMixin, Base):
    __tablename__ = "dead_unique_task"


@dataclass
class Seen:
    """What is in the tables at one moment."""

    fates: dict[int, Fate]  # of every task that is in one of the tables
    effects: dict[int, frozenset[int]]  # of every task that has some
    locked: set[int]
    ready: set[int]  # could be claimed now; also what several callers hold together


class ModelDatabase:
    """Looks and touches, over connections of its own."""

    def __init__(self, url: str, task_class: type[Any]) -> None:
        self.url = database_url(url)
        self.task_class = task_class
        self.tables = Tables(task_class)
        self.compiled: dict[Any, Any] = {}  # statements, for all engines of all processes
        self.admin = create_engine(self.url)
        self._eye = self.admin.connect().execution_options(isolation_level="AUTOCOMMIT")
        self.execute(EFFECT)
        task_class.metadata.create_all(self.admin)
        names = {"task": self.tables.task.fullname, "dead": self.tables.dead.fullname}
        # VACUUM may take away the mark of a claim that came to nothing, with the death: decision 11
        self.execute("alter table {task} set (autovacuum_enabled = off)".format(**names))
        self._noted = text(NOTED.format(worker=worker_table(self.tables.task).fullname))
        self._there = text("select task_id from {task}".format(**names))
        self._free = text(FREE.format(**names))
        self._all = text(ALL.format(**names))

    def close(self) -> None:
        self._eye.close()
        self.admin.dispose()

    def execute(self, statement: str, **values: Any) -> None:
        with self.admin.begin() as connection:
            connection.execute(text(statement), values)

    def empty(self) -> None:
        """Remove everything; numbers begin again, so that an example can be repeated."""
        tables = (self.tables.task, self.tables.dead, worker_table(self.tables.task))
        names = ", ".join(table.fullname for table in tables)
        self.execute(f"truncate {names}, effect restart identity")

    def noted(self, worker_id: int, lane: int) -> list[int]:
        """Return what a lane is noted to run, and no lease counts."""
        given = {"worker_id": worker_id, "lane": lane}
        rows = self._eye.execute(self._noted, given)
        return [task_id for task_id, version in rows if version > 0]

    def kill(self, pids: set[int]) -> None:
        """End server processes, and wait until they are gone."""
        given = {"pids": list(pids)}
        self._eye.execute(text(KILL), given)
        alive = text(ALIVE)
        wait_until(lambda: not self._eye.scalar(alive, given), timeout=60, interval=0.001)

    # -- looking -------------------------------------------------------------------------------

    def look(self) -> Seen:
        """Return what is there, without a trace."""
        rows = self._eye.execute(self._all).all()
        seen = Seen({}, self._effects(rows), set(), set())
        for place, task_id, count, reason, is_ready, is_locked in rows:
            if place == "effect":
                continue
            assert task_id not in seen.fates, f"in two places: task {task_id}"
            effects = seen.effects.get(task_id, frozenset())
            seen.fates[task_id] = Fate(place, count, reason, effects)
            if is_locked:
                seen.locked.add(task_id)
            elif is_ready:
                seen.ready.add(task_id)
        return seen

    def locked(self) -> set[int]:
        """Return the tasks whose rows cannot be locked; this leaves a trace on all others."""
        with self.admin.connect() as connection:
            there = set(connection.scalars(self._there))
            return there - set(connection.scalars(self._free))

    @staticmethod
    def _effects(rows: Sequence[Any]) -> dict[int, frozenset[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for place, task_id, n, *_ in rows:
            if place == "effect":
                found[task_id].append(n)
        assert all(len(set(each)) == len(each) for each in found.values()), "an effect twice"
        return {task_id: frozenset(each) for task_id, each in found.items()}

    # -- touching ------------------------------------------------------------------------------

    def requeue(self, task_id: int) -> bool:
        """Bring a dead task back, as the command does; False: an equal one is there already."""
        task, dead = self.tables.task, self.tables.dead
        with self.admin.begin() as connection:
            statement = statements.requeue(task, dead, dead.c.task_id == task_id)
            return list(connection.scalars(statement)) == [task_id]

    def cancel(self, task_id: int) -> str:
        """Cancel a task as the command does; return in what state it was."""
        with self.admin.connect() as connection:
            return Canceller(connection, self.task_class).cancel(task_id).found

    def analyze(self) -> None:
        """Let the planner know how few tasks there are."""
        self.execute(f"analyze {self.tables.task.fullname}")

    def end_lease(self, task_id: int) -> None:
        """Let the time of a lease run out."""
        name = self.tables.task.fullname
        gone = "set run_at = statement_timestamp() - interval '1 second'"
        self.execute(f"update {name} {gone} where task_id = :task_id", task_id=task_id)
