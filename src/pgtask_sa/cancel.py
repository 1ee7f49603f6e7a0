"""Cancelling a task, waiting or running: it goes to the error queue and does not run again.

* A waiting task is claimed and buried. So is one that runs in leased mode: its row can be claimed
  by its number, and when the row is gone the old run can no longer commit.
* A running task is a row that a transaction holds. The table of the workers tells whose that is, by
  server process and beginning, and that very transaction is ended; the row is taken from it in the
  same statement, before any worker can claim it. Other tasks of its batch simply run again.
* All that needs locks on the task table. A migration that waits for the running task, or that holds
  the table, lets none through. So when a look takes too long, the transactions that have noted the
  task as theirs are ended without a look at its table, which lets the migration go on; the next
  look finds the row. A worker that was faster runs the task for a moment, until that look.
* Somebody else's transaction is never ended: an administrator may hold the row, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Connection, RowMapping, select
from sqlalchemy.exc import DBAPIError

from pgtask_sa import presence_statements, reports, statements
from pgtask_sa.claim import ROW_VERSION
from pgtask_sa.errors import TaskFailed
from pgtask_sa.events import Events
from pgtask_sa.failures import LOCK_NOT_AVAILABLE, sqlstate
from pgtask_sa.insert_statements import set_lock_timeout
from pgtask_sa.presence_table import worker_table
from pgtask_sa.retry import Verdict
from pgtask_sa.settle import Claimed, Settler, Tables, Unsettled

# Seconds before each look: a task was claimed an instant before its lane notes it, and another
# transaction may hold the row for an instant. And for how long that look waits for the row when it
# has ended the process that held it. Not long at first: a lane that claims in that very moment may
# have been faster, and is to be found by the next look.
LOOKS = ((0.0, "300ms"), (0.02, "600ms"), (0.1, "1s"), (0.2, "2s"), (0.4, "5s"))
_NO_WORKER = -1  # in place of the number of a worker that asks about all the others


@dataclass(frozen=True)
class Cancellation:
    """What became of a task that was to be cancelled.

    Attributes:
        task_id: its number.
        found: ``waiting``, ``running`` or ``leased``, and now it is buried; or, and nothing was
            done: ``missing``, ``held`` (by a transaction that is no worker's), ``hidden`` (by one
            that is a worker's, as it seems, but this role may not see it), ``locked`` (somebody
            holds a lock on a whole table) or ``refused`` (the error queue does not take it).
        host: where the worker is that ran it, and `pid` its process.
        since: when its transaction began, and `seconds` how long ago that was.
        detail: who holds it, or why it is missing; for people.

    Example:
        >>> str(Cancellation(7, "waiting")), Cancellation(7, "waiting").is_done
        ('task 7 was waiting: cancelled', True)
    """

    task_id: int
    found: Literal["waiting", "running", "leased", "missing", "held", "hidden", "locked", "refused"]
    host: str | None = None
    pid: int | None = None
    since: datetime | None = None
    seconds: float | None = None
    detail: str = ""

    @property
    def is_done(self) -> bool:
        """Whether the task was cancelled."""
        return self.found in ("waiting", "running", "leased")

    def __str__(self) -> str:
        return f"task {self.task_id} {_SENTENCES[self.found].format(self, detail=self._detail())}"

    def _detail(self) -> str:
        return f" ({self.detail})" if self.detail else ""


_SENTENCES = {
    "waiting": "was waiting: cancelled",
    "running": "was running (since {0.since:%Y-%m-%d %H:%M:%S %Z}, on {0.host} pid {0.pid}): "
    "cancelled",
    "leased": "was leased to a running handler: cancelled, it can commit nothing more",
    "missing": "is not there{detail}",
    "held": "is held by somebody who is no worker{detail}: not cancelled",
    "hidden": "is run by {0.host} pid {0.pid}, it seems, but this role may not look at another's "
    "transactions: not cancelled, do it as the worker's role",
    "locked": "cannot be looked at, as somebody has locked a whole table (a migration?): "
    "not cancelled, try again",
    "refused": "is not taken by the error queue{detail}: not cancelled",
}


class Canceller:
    """Cancels tasks over a connection, each in a transaction of its own.

    Args:
        connection: one without an open transaction, in READ COMMITTED.
        task_class: the mapped task class.

    Raises:
        sqlalchemy.exc.DBAPIError: the database is away, or this role may not do it.

    Example:
        >>> from pgtask_sa import Task
        >>> from sqlalchemy import create_engine
        >>> engine = create_engine("postgresql+psycopg://localhost/shop")
        >>> with engine.connect() as connection:  # doctest: +SKIP
        ...     print(Canceller(connection, Task).cancel(4711))
        task 4711 was waiting: cancelled
    """

    def __init__(self, connection: Connection, task_class: type[Any]) -> None:
        self.connection = connection
        self.tables = Tables(task_class)
        self.workers = worker_table(self.tables.task)
        self.refusals: list[str] = []
        self.settler = Settler(connection, self.tables, {}, Events())
        self._deaths = presence_statements.deaths(self.tables.task)
        with connection.begin():
            self._carry_all()

    def _carry_all(self) -> None:
        """Bury with the columns of the catalog: of a user's own this mapping may know nothing."""
        kept, names = (
            self.connection.scalars(statements.stored_names(table)).all()
            for table in (self.tables.task, self.tables.dead)
        )
        carried = [name for name in names if name in kept]
        if carried:  # else there are no such tables, which the first look will tell
            self.tables.bury = statements.bury(self.tables.task, self.tables.dead, carried)

    def cancel(self, task_id: int) -> Cancellation:
        """Cancel a task, and say in what state it was; waits for no handler.

        Args:
            task_id: its number.
        """
        ended: RowMapping | None = None
        for pause, patience in LOOKS:
            time.sleep(pause)
            with _unless_locked():
                # a transaction for each: the server shows others' activity as at the first look
                done = self._attempt(task_id, patience, ended)
                if done is not None:
                    return done
                continue
            with _unless_locked():
                ended = self._end(task_id) or ended
        with _unless_locked(), self.connection.begin():
            self.connection.execute(set_lock_timeout(LOOKS[0][1]))
            return self._given_up(task_id)
        return Cancellation(task_id, "locked")

    def _attempt(
        self, task_id: int, patience: str, ended: RowMapping | None
    ) -> Cancellation | None:
        """Look once; None: somebody holds it, and it is not known who."""
        try:
            with self.connection.begin() as transaction:
                self.connection.execute(set_lock_timeout(patience))
                done = self._look(task_id, ended)
                if done is not None and done.found == "refused":
                    transaction.rollback()
                return done
        except Unsettled as error:
            return Cancellation(task_id, "refused", detail=str(error))

    def _look(self, task_id: int, ended: RowMapping | None) -> Cancellation | None:
        lanes = self._lanes(task_id)
        for claimed in self.settler.reclaim(task_id):
            found = ended or (lanes[0] if lanes else None)
            return self._bury(claimed, found, seized=ended is not None)
        if not self.connection.scalar(self.tables.exists, {"task_id": task_id}):
            return Cancellation(task_id, "missing", detail=self._grave(task_id))
        for lane in lanes:
            if lane["begun"] is None:  # which would mean whatever that process does
                continue
            for claimed in self.settler.seize(task_id, lane["backend_pid"], lane["begun"]):
                return self._bury(claimed, lane, seized=True)
        return None

    def _end(self, task_id: int) -> RowMapping | None:
        """End the transaction that has claimed a task, without a lock on the task's table."""
        ended = None
        with self.connection.begin():
            self.connection.execute(set_lock_timeout(LOOKS[0][1]))
            for lane in self.connection.execute(reports.lanes(self.workers)).mappings().all():
                if lane["alive"] and task_id in lane["task_ids"] and lane["begun"] is not None:
                    key = {"pid": lane["backend_pid"], "begun": lane["begun"]}
                    if self.connection.scalar(statements.end_transaction(), key):
                        ended = lane
        return ended

    def _lanes(self, task_id: int) -> Sequence[RowMapping]:
        """Return the lanes of live workers that noted this version of the task, latest first."""
        ids = {"ids": [task_id]}
        rows = self.connection.execute(reports.versions_by_ids(self.tables.task), ids).mappings()
        versions = {row["task_id"]: row for row in rows}
        lanes = self.connection.execute(reports.lanes(self.workers)).mappings()
        holding = [lane for lane in lanes if task_id in running_in(lane, versions)]
        return sorted(holding, key=_beginning, reverse=True)

    def _bury(self, claimed: Claimed, lane: RowMapping | None, *, seized: bool) -> Cancellation:
        leased = claimed.values["lease_token"] is not None
        claimed = self._counted(claimed)
        verdict = Verdict("bury", claimed.attempts, reason="cancelled")
        written = self.settler.write(claimed, verdict, TaskFailed("cancelled"))
        if written.action != "bury" or written.reason != "cancelled":
            return Cancellation(claimed.task_id, "refused")
        if not (seized or leased):
            return Cancellation(claimed.task_id, "waiting")
        key = {"task_id": claimed.task_id}
        self.connection.execute(statements.announce_cancel(self.tables.task), key)
        found: Literal["running", "leased"] = "leased" if leased else "running"
        return Cancellation(claimed.task_id, found, **self._place(lane))

    def _counted(self, claimed: Claimed) -> Claimed:
        """Add the starts with workers that died, which nobody can count once the row is gone.

        A task that was cancelled because it kills its workers must not look as if it never ran.
        """
        version = claimed.values[ROW_VERSION]
        key = {
            "task_ids": [claimed.task_id],
            "row_versions": [version],
            "worker_id": _NO_WORKER,
            "own_lane": 0,
        }
        rows = self.connection.execute(self._deaths, key).all()
        if any(row.is_taken for row in rows):
            self.settler.forget_taken(claimed)
        return replace(claimed, uncounted=sum(row.is_gone for row in rows))

    def _place(self, lane: RowMapping | None) -> dict[str, Any]:
        if lane is None:
            return {}
        place = {"host": lane["host"], "pid": lane["pid"]}
        if lane["begun_at"] is None:
            return place
        now = self.connection.scalars(reports.clock()).one()
        seconds = (now - lane["begun_at"]).total_seconds()
        return {**place, "since": lane["begun_at"], "seconds": round(seconds, 3)}

    def _grave(self, task_id: int) -> str:
        dead = self.tables.dead
        reason = self.connection.scalar(select(dead.c.reason).where(dead.c.task_id == task_id))
        return "" if reason is None else f"it is in the error queue: {reason}"

    def _given_up(self, task_id: int) -> Cancellation:
        """Say who holds a task that could not be had."""
        key = {"task_id": task_id}
        row = self.connection.execute(reports.holder(self.tables.task), key).first()
        if row is None:
            return Cancellation(task_id, "held")
        for lane in self._lanes(task_id):
            if lane["backend_pid"] == row.pid and not row.seen:
                return Cancellation(task_id, "hidden", **self._place(lane))
        who = f"server process {row.pid} of {row.usename}, {row.application_name or 'unnamed'}"
        return Cancellation(task_id, "held", detail=who)


@contextmanager
def _unless_locked() -> Iterator[None]:
    """Go on after the block when it waited too long for a lock."""
    try:
        yield
    except DBAPIError as error:
        if sqlstate(error) != LOCK_NOT_AVAILABLE:
            raise


def running_in(lane: RowMapping, tasks: Mapping[int, RowMapping]) -> dict[int, RowMapping]:
    """Choose, of tasks by their numbers, those that a lane runs.

    Args:
        lane: a row of `reports.lanes`.
        tasks: rows of `reports.versions_by_ids`. A row that is there, in the version that the lane
            claimed, is running: what is deleted and not committed can be seen. So is one with a
            lease. What is not there is done.

    Example:
        >>> lane = {"alive": True, "task_ids": [7, 8], "row_versions": [90, 91]}
        >>> now = {7: {"version": 95, "leased": False}, 8: {"version": 91, "leased": False}}
        >>> list(running_in(lane, now))
        [8]
    """
    if not lane["alive"]:
        return {}
    noted = zip(lane["task_ids"], lane["row_versions"], strict=False)
    return {
        task_id: tasks[task_id]
        for task_id, version in noted
        if task_id in tasks
        and (tasks[task_id]["version"] == abs(version) or tasks[task_id]["leased"])
    }


def _beginning(lane: RowMapping) -> float:
    begun: datetime | None = lane["begun_at"]
    return 0.0 if begun is None else begun.timestamp()
