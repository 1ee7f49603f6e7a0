"""Writing what became of a task: put back, buried, or left deleted; and telling about it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeAlias
from uuid import UUID

from sqlalchemy import Connection, Executable, Table
from sqlalchemy.exc import DBAPIError

from pgtask_sa import presence_statements, statements
from pgtask_sa.claim import ROW_VERSION, claim_by_force, claim_by_id
from pgtask_sa.errors import TaskError, TaskFailed
from pgtask_sa.events import Events
from pgtask_sa.failures import chain, describe, headline, in_one_line, is_blameless, sqlstate
from pgtask_sa.ground import ENDED
from pgtask_sa.handlers import Handler
from pgtask_sa.mapping import dead_task_class, mapped_table, own_columns, task_table, unique_columns
from pgtask_sa.retry import Policy, Verdict, decide
from pgtask_sa.rows import WHOLE_ROW


@dataclass(eq=False)
class Claimed:
    """A row that was claimed: all its columns, so that it can be put back whole.

    Attributes:
        task_id: its number.
        task_type: its type, as text.
        values: the columns.
        json: the params are JSON, which came as text.
        uncounted: starts that the row does not count: with workers that died. Less than none in a
            lease, where the row counts the start that is under way.
        was_alone: one of these workers had nothing else in flight.
        was_taken: of these starts the last was no death: the time of the handler was over, or its
            transaction was lost.
        was_late: its time was over.
        noted: under which number this start is noted, if it is, for whoever claims the row next. Of
            a leased task, where the row counts it: its connection was cut.
        in_flight: its lane's row names it already; see noted_claims.
        started: when its handler was called here, by the monotonic clock; 0 if it was not.
    """

    task_id: int
    task_type: str
    values: Mapping[Any, Any]
    json: bool
    uncounted: int = 0
    was_alone: bool = False
    was_taken: bool = False
    was_late: bool = False
    noted: int = 0
    in_flight: bool = False
    started: float = 0.0

    @property
    def attempts(self) -> int:
        """How many attempts there were before this one."""
        return self.values["attempts"] + self.uncounted  # type: ignore[no-any-return]

    def params(self) -> Any:
        """Decode the params; JSON came as text."""
        raw = self.values["params"]
        return _decode(raw) if self.json else raw

    def __str__(self) -> str:
        return f"task {self.task_id} {self.task_type}"


_decode = json.JSONDecoder().decode  # what `json.loads` comes to, after some questions

# A task, what became of it, the error if there was one, and the seconds it took; 0 if not known.
Report: TypeAlias = "tuple[Claimed, Verdict, BaseException | None, float]"


class TransactionLost(TaskError):  # noqa: N818
    """The worker's transaction cannot go on: all of the batch is back in the table."""

    def __init__(
        self,
        claimed: Claimed,
        error: BaseException | None,
        *,
        ended: bool = False,
        dirty: bool = False,
        unrun: bool = False,
    ) -> None:
        super().__init__(f"the transaction of task {claimed.task_id} was lost")
        self.claimed = claimed
        self.error = error
        self.ended = ended  # by the handler, past all guards
        self.dirty = dirty  # something of the handler still works with the connection
        self.unrun = unrun  # one of the same batch whose turn never came


def timed_out(seconds: float) -> TaskFailed:
    """Return the error of an attempt that took longer than its handler may."""
    return TaskFailed(f"timed out after {seconds:g} s")


class Unsettled(TaskError):  # noqa: N818
    """Neither table takes a failed task; the transaction must be rolled back."""


class Tables:
    """The two tables of a worker and the statements on them, each built once."""

    def __init__(self, task_class: type[Any]) -> None:
        self.task: Table = task_table(task_class)
        self.dead: Table = mapped_table(dead_task_class(task_class))
        self.json = statements.is_json(self.task)
        self.own_columns = {key: column.name for key, column in own_columns(task_class).items()}
        self.unique = unique_columns(task_class)
        self.stored_names = statements.stored_names(self.task)
        self._retries: dict[tuple[str, ...], Executable] = {}
        self.equal_waiting = statements.equal_waiting(self.task)
        self.bury = statements.bury(self.task, self.dead)
        self.exists = statements.task_exists(self.task)
        self.dismiss = presence_statements.dismiss(self.task)
        self.forget_taken = presence_statements.forget_taken(self.task)
        self.claim_by_id = claim_by_id(self.task)
        self.claim_by_force = claim_by_force(self.task)

    def retry(self, names: tuple[str, ...]) -> Executable:
        """Return the statement that puts a row of these columns back."""
        if names not in self._retries:
            self._retries[names] = statements.retry(self.task, names, self.unique)
        return self._retries[names]

    def claimed(
        self, row: Mapping[Any, Any], uncounted: int = 0, *, in_flight: bool = False
    ) -> Claimed:
        """Wrap a row that a claim returned."""
        number, kind = row["task_id"], row["task_type"]
        return Claimed(number, kind, row, self.json, uncounted, in_flight=in_flight)


def _is_uncounted(row: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    """Say whether nobody has counted a start since; DDL may have written all rows anew."""
    return bool(row[ROW_VERSION] == before[ROW_VERSION] or row["attempts"] == before["attempts"])


CUT_OFF = "the connection was lost while the handler ran"
NOT_BURIED_DELAY = 300.0  # until a task that the error queue refused is tried again
KEEPS_ERROR = ("snoozed", "unrun", "cancelled")  # nothing failed: what failed before is kept


class Settler:
    """Writes outcomes on one connection, in whatever transaction is open there."""

    def __init__(
        self,
        connection: Connection,
        tables: Tables,
        handlers: Mapping[str, Handler],
        events: Events,
    ) -> None:
        self.connection = connection
        self.tables = tables
        self.handlers = handlers
        self.events = events

    def reclaim(self, task_id: int) -> list[Claimed]:
        """Claim one certain task; an empty list if it is gone or somebody else holds it."""
        rows = self.connection.execute(self.tables.claim_by_id, {"task_id": task_id}).mappings()
        return [self.tables.claimed(row) for row in rows]

    def seize(self, task_id: int, pid: int, begun: str | None = None) -> list[Claimed]:
        """End the server process that runs a task, and claim the task from it.

        With ``begun`` only if it still runs the transaction that began at that moment.
        """
        key = {"task_id": task_id, "pid": pid, "begun": begun}
        rows = self.connection.execute(self.tables.claim_by_force, key).mappings()
        return [self.tables.claimed(row) for row in rows]

    @staticmethod
    def judge(
        claimed: Claimed, error: BaseException, policy: Policy, *, blameless: int = 0
    ) -> Verdict:
        """Decide what an error means; one that cannot even be looked at is a plain failure."""
        try:
            return decide(error, claimed.attempts, policy, blameless=blameless)
        except Exception as broken:  # noqa: BLE001 - odd values in a Retry, say
            return decide(broken, claimed.attempts, policy)

    def write(self, claimed: Claimed, verdict: Verdict, error: BaseException) -> Verdict:
        """Put a failed task back or bury it, as the verdict says; return what was possible.

        Raises:
            Unsettled: neither table takes the row.
        """
        row = self._row(claimed, verdict, error)
        if verdict.action == "bury":
            refused = self._bury(row, verdict.reason)
            if refused is None:
                return verdict
            self._tell_refused(self.tables.dead, claimed, refused, "it stays where it is")
            verdict = replace(verdict, action="retry", delay=NOT_BURIED_DELAY, reason="not buried")
            row["pgtask_delay"] = timedelta(seconds=NOT_BURIED_DELAY)
        refused = self._put_back(claimed, row)
        if refused is None:
            return verdict
        self._tell_refused(self.tables.task, claimed, refused, "it is buried instead")
        refused = self._bury(row, "not put back")
        if refused is not None:
            told = self._headline(refused)
            raise Unsettled(f"neither table takes {claimed}: {told}") from refused
        return replace(verdict, action="bury", reason="not put back")

    def lease(self, claimed: Claimed, token: UUID, seconds: float) -> None:
        """Put a claimed task back as leased, with the attempt that begins counted.

        Raises:
            Unsettled: its table refuses the row.
        """
        row = {
            WHOLE_ROW: claimed.values[WHOLE_ROW],
            "pgtask_attempts": claimed.attempts + 1,
            "pgtask_last_error": claimed.values["last_error"],
            "pgtask_delay": timedelta(seconds=seconds),
            "pgtask_lease": str(token),
        }
        refused = self._insert(row)
        if refused is not None:
            raise Unsettled(f"{claimed} cannot be leased: {self._headline(refused)}") from refused

    def _row(self, claimed: Claimed, verdict: Verdict, error: BaseException) -> dict[str, Any]:
        last_error = claimed.values["last_error"]
        if verdict.reason not in KEEPS_ERROR:
            last_error = describe(
                error, ascii_only=not self._speaks_utf8(), values=self.events.shows_values
            )
        return {
            WHOLE_ROW: claimed.values[WHOLE_ROW],
            "pgtask_attempts": verdict.attempts,
            "pgtask_last_error": last_error,
            "pgtask_delay": timedelta(seconds=verdict.delay),
        }

    def _bury(self, row: dict[str, Any], reason: str) -> DBAPIError | None:
        """Write to the error queue; return the error if its table refuses the row."""
        return self._try(self.tables.bury, {**row, "pgtask_reason": reason})

    def _put_back(self, claimed: Claimed, row: dict[str, Any]) -> DBAPIError | None:
        """Write to the task table; return the error if it refuses the row."""
        if claimed.values["coalesce_key"] is not None and self._has_equal(row):
            return None
        return self._insert(row)

    def _insert(self, row: dict[str, Any]) -> DBAPIError | None:
        names = self.connection.execute(self.tables.stored_names).scalars()
        return self._try(self.tables.retry(tuple(names)), row)

    def _try(self, statement: Executable, row: dict[str, Any]) -> DBAPIError | None:
        savepoint = self.connection.begin_nested()
        try:
            self.connection.execute(statement, row)
        except DBAPIError as refused:
            if refused.connection_invalidated or is_blameless(refused):
                raise
            savepoint.rollback()
            return refused
        savepoint.commit()
        return None

    def _has_equal(self, row: Mapping[str, Any]) -> bool:
        """Say whether a coalesced task may vanish, because an equal one runs soon anyway."""
        return self.connection.execute(self.tables.equal_waiting, row).first() is not None

    def _tell_refused(self, table: Table, claimed: Claimed, refused: DBAPIError, then: str) -> None:
        self.events.emit(
            "settle.refused",
            f"{table.name} refuses {claimed}: {self._headline(refused)}; {then}",
            level=logging.CRITICAL,
            task_id=claimed.task_id,
            task_type=claimed.task_type,
        )

    def _headline(self, error: BaseException) -> str:
        return headline(error, values=self.events.shows_values)

    def _speaks_utf8(self) -> bool:
        driver: Any = self.connection.connection.driver_connection
        return driver.info.parameter_status("server_encoding") in (None, "UTF8")

    def settle_apart(self, lost: TransactionLost) -> None:
        """Count an attempt whose own transaction was lost, in the transaction open here."""
        claimed = lost.claimed
        error = lost.error or TaskFailed(ENDED if lost.ended else CUT_OFF)
        if lost.unrun:
            if not self._is_there(claimed):
                self.write(claimed, Verdict("retry", claimed.attempts, reason="unrun"), error)
            return
        if self._count_apart(claimed, error) or self._is_there(claimed):
            return  # where somebody else holds it, he counts, or whoever comes next
        is_counted = self._is_counted(claimed)
        if lost.ended and lost.error is not None and not is_counted:
            # A handler that failed has committed the row away. If it ended the transaction with a
            # COMMIT of its own and returned, the task is done.
            self.fail(claimed, error)

    def forget(self, claimed: Claimed) -> bool:
        """Take out the note that leaves a start to others; False if there is none (any more).

        Whoever counts a start takes its note out in the same transaction, so that it is counted
        once.
        """
        if not claimed.noted:
            return False
        key = {"worker_id": claimed.noted}
        return self.connection.execute(self.tables.dismiss, key).rowcount > 0

    def _is_counted(self, claimed: Claimed) -> bool:
        """Say whether others have counted a start that was left to them; else it is ours now."""
        return bool(claimed.noted) and not self.forget(claimed)

    def forget_taken(self, claimed: Claimed) -> None:
        """Take out the notes that leave starts to whoever claims this row: they are counted."""
        key = {"task_ids": [claimed.task_id], "row_versions": [claimed.values[ROW_VERSION]]}
        self.connection.execute(self.tables.forget_taken, key)

    def count_apart(self, claimed: Claimed, error: BaseException, seconds: float = 0.0) -> bool:
        """Count a start whose own transaction is gone; False if somebody else holds the row.

        He has claimed it since, and has found the start if it was noted.
        """
        return self._count_apart(claimed, error, seconds) or not self._is_there(claimed)

    def _count_apart(self, claimed: Claimed, error: BaseException, seconds: float = 0.0) -> bool:
        """Count it if the row can be had, and has not been counted; False if it cannot."""
        before = self.connection.begin_nested()
        found = self.reclaim(claimed.task_id)
        if not found or self._is_counted(claimed):
            before.rollback()
            return bool(found)
        before.commit()
        # the one knows who has died of it, the other which columns there are by now
        is_same = _is_uncounted(found[0].values, claimed.values)
        row = replace(found[0], uncounted=claimed.uncounted) if is_same else found[0]
        self.fail(row, error, seconds)
        return True

    def fail(self, claimed: Claimed, error: BaseException, seconds: float = 0.0) -> None:
        """Count a failed attempt of a task that this transaction has claimed."""
        verdict = self.judge(claimed, error, self.handlers[claimed.task_type].policy)
        self.tell(claimed, self.write(claimed, verdict, error), error, seconds)

    def _is_there(self, claimed: Claimed) -> bool:
        key = {"task_id": claimed.task_id}
        return bool(self.connection.execute(self.tables.exists, key).scalar())

    def tell(
        self, claimed: Claimed, verdict: Verdict, error: BaseException | None, seconds: float
    ) -> None:
        """Tell the log and the listeners what became of a task; 0 seconds: nobody knows."""
        name, level = _EVENTS[verdict.action]
        if verdict.reason == "snoozed":
            level = logging.INFO
        if verdict.reason == "database" and not self.events.is_news(_trouble(error)):
            level = logging.DEBUG  # a disk that is full is so for thousands of tasks
        if not self.events.wants(level):
            return
        fields: dict[str, Any] = {
            "task_id": claimed.task_id,
            "task_type": claimed.task_type,
            "attempt": claimed.attempts + 1,
        }
        if seconds:
            fields["seconds"] = round(seconds, 6)
        told = ""
        if error is not None:
            told = in_one_line(error, values=self.events.shows_values)
            fields |= {"reason": verdict.reason, "error": told}
        if verdict.action == "retry":
            fields["delay"] = round(verdict.delay, 3)
        self.events.emit(name, _sentence(claimed, verdict, told), level=level, **fields)


def _trouble(error: BaseException | None) -> str:
    """Name what the database reports, for all tasks that meet with it."""
    return next((code for each in chain(error) if (code := sqlstate(each))), "connection")


_EVENTS = {
    "done": ("task.done", logging.INFO),
    "retry": ("task.retry", logging.WARNING),
    "bury": ("task.buried", logging.ERROR),
}


def _sentence(claimed: Claimed, verdict: Verdict, error: str) -> str:
    if not error:
        return f"{claimed} done"
    what = f"{claimed} {verdict.reason} in attempt {claimed.attempts + 1}: {error}"
    then = f"again in {verdict.delay:.3g} s" if verdict.action == "retry" else "buried"
    return f"{what}; {then}"
