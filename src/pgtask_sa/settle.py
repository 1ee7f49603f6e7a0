"""Writing what became of a task: put back, buried, or left deleted; and telling about it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, RowMapping, Table
from sqlalchemy.exc import DataError, IntegrityError, ProgrammingError

from pgtask_sa import statements
from pgtask_sa.claim import claim_by_force, claim_by_id
from pgtask_sa.errors import TaskError, TaskFailed
from pgtask_sa.events import Events
from pgtask_sa.failures import describe, headline
from pgtask_sa.ground import ENDED
from pgtask_sa.handlers import Handler
from pgtask_sa.mapping import TaskMixin, dead_task_class, task_table, unique_columns
from pgtask_sa.retry import Verdict, decide


@dataclass(frozen=True)
class Claimed:
    """A row that was claimed: all its columns, so that it can be put back whole."""

    values: RowMapping
    json: bool

    @property
    def task_id(self) -> int:
        """The number of the task."""
        return self.values["task_id"]  # type: ignore[no-any-return]

    @property
    def task_type(self) -> str:
        """The type, as text."""
        return self.values["task_type"]  # type: ignore[no-any-return]

    @property
    def attempts(self) -> int:
        """How many attempts were counted before this one."""
        return self.values["attempts"]  # type: ignore[no-any-return]

    def params(self) -> Any:
        """Decode the params; JSON came as text."""
        raw = self.values["params"]
        return json.loads(raw) if self.json else raw

    def __str__(self) -> str:
        return f"task {self.task_id} {self.task_type}"


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


class Tables:
    """The two tables of a worker and the statements on them, each built once."""

    def __init__(self, task_class: type[Any]) -> None:
        self.task: Table = task_table(task_class)
        self.dead: Table = dead_task_class(task_class).__table__
        self.json = statements.is_json(self.task)
        self.columns = [n for n in statements.stored_columns(self.task) if n != "run_at"]
        mapper = task_class.__mapper__
        self.own_columns: dict[str, str] = {
            mapper.get_property_by_column(self.task.c[name]).key: name
            for name in self.columns
            if name not in _LIBRARY_COLUMNS
        }
        self.retry = statements.retry(self.task, unique_columns(task_class))
        self.equal_waiting = statements.equal_waiting(self.task)
        self.bury = statements.bury(self.task, self.dead)
        self.exists = statements.task_exists(self.task)
        self.claim_by_id = claim_by_id(self.task)
        self.claim_by_force = claim_by_force(self.task)

    def claimed(self, row: RowMapping) -> Claimed:
        """Wrap a row that a claim returned."""
        return Claimed(row, self.json)


NOT_BURIED_DELAY = 300.0  # until a task that the error queue refused is tried again
_LIBRARY_COLUMNS = frozenset(TaskMixin.__annotations__)


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

    def seize(self, task_id: int, pid: int) -> list[Claimed]:
        """End the server process that runs a task, and claim the task from it."""
        key = {"task_id": task_id, "pid": pid}
        rows = self.connection.execute(self.tables.claim_by_force, key).mappings()
        return [self.tables.claimed(row) for row in rows]

    def write(self, claimed: Claimed, verdict: Verdict, error: BaseException) -> None:
        """Put a failed task back or bury it, as the verdict says."""
        values = {name: claimed.values[name] for name in self.tables.columns}
        values["attempts"] = verdict.attempts
        if verdict.reason not in ("snoozed", "unrun"):
            values["last_error"] = describe(error, ascii_only=not self._speaks_utf8())
        if verdict.action != "bury":
            self._put_back(values, verdict.delay)
        elif not self._bury(values, verdict.reason):
            self._put_back(values, NOT_BURIED_DELAY)

    def _bury(self, values: dict[str, Any], reason: str) -> bool:
        """Write to the error queue; False if its table refuses the row."""
        savepoint = self.connection.begin_nested()
        try:
            self.connection.execute(self.tables.bury, {**values, "reason": reason})
        except (DataError, IntegrityError, ProgrammingError) as refused:
            savepoint.rollback()
            self.events.emit(
                "bury.failed",
                f"{self.tables.dead.name} refuses task {values['task_id']}: {headline(refused)}; "
                f"it stays in {self.tables.task.name}",
                level=logging.CRITICAL,
                task_id=values["task_id"],
            )
            return False
        savepoint.commit()
        return True

    def _put_back(self, values: dict[str, Any], delay: float) -> None:
        row = {**values, "delay": timedelta(seconds=delay)}
        if not self._has_equal(row):
            self.connection.execute(self.tables.retry, row)

    def _has_equal(self, values: Mapping[str, Any]) -> bool:
        """Say whether a coalesced task may vanish, because an equal one runs soon anyway."""
        if values["coalesce_key"] is None:
            return False
        return self.connection.execute(self.tables.equal_waiting, values).first() is not None

    def _speaks_utf8(self) -> bool:
        driver: Any = self.connection.connection.driver_connection
        return driver.info.parameter_status("server_encoding") in (None, "UTF8")

    def settle_apart(self, lost: TransactionLost) -> None:
        """Count an attempt whose own transaction was lost, in the transaction open here."""
        claimed, error = lost.claimed, lost.error or TaskFailed(ENDED)
        if lost.unrun:
            if not self._is_there(claimed):
                self.write(claimed, Verdict("retry", claimed.attempts, reason="unrun"), error)
            return
        found = self.reclaim(claimed.task_id)
        if found or self._must_come_back(lost):
            self.fail(found[0] if found else claimed, error)

    def fail(self, claimed: Claimed, error: BaseException, seconds: float = 0.0) -> None:
        """Count a failed attempt of a task that this transaction has claimed."""
        verdict = decide(error, claimed.attempts, self.handlers[claimed.task_type].policy)
        self.write(claimed, verdict, error)
        self.tell(claimed, verdict, error, seconds)

    def _must_come_back(self, lost: TransactionLost) -> bool:
        """Say whether a row that cannot be claimed was committed away by a handler that failed.

        Otherwise somebody else holds it, and counts for himself; or the handler ended the
        transaction with a COMMIT of its own and returned, and then the task is done.
        """
        return lost.ended and lost.error is not None and not self._is_there(lost.claimed)

    def _is_there(self, claimed: Claimed) -> bool:
        key = {"task_id": claimed.task_id}
        return bool(self.connection.execute(self.tables.exists, key).scalar())

    def tell(
        self, claimed: Claimed, verdict: Verdict, error: BaseException | None, seconds: float
    ) -> None:
        """Tell the log and the listeners what became of a task."""
        name = {"done": "task.done", "retry": "task.retry", "bury": "task.buried"}[verdict.action]
        level = _LEVELS[name]
        if not self.events.wants(level):
            return
        fields: dict[str, Any] = {
            "task_id": claimed.task_id,
            "task_type": claimed.task_type,
            "attempt": claimed.attempts + 1,
            "seconds": round(seconds, 6),
        }
        if error is not None:
            fields |= {"reason": verdict.reason, "error": _first_line(error)}
        if verdict.action == "retry":
            fields["delay"] = round(verdict.delay, 3)
        self.events.emit(name, f"{claimed} {_WORDS[name]}", level=level, **fields)


_LEVELS = {"task.done": logging.INFO, "task.retry": logging.WARNING, "task.buried": logging.ERROR}
_WORDS = {"task.done": "done", "task.retry": "goes back", "task.buried": "is buried"}


def _first_line(error: BaseException) -> str:
    return describe(error).partition("\n")[0][:300]
