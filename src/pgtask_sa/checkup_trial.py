"""The doctor's trial: a real task is enqueued, claimed, put back and buried, and rolled back."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, Enum, func, insert
from sqlalchemy.exc import DBAPIError

from pgtask_sa.doctor import Finding
from pgtask_sa.errors import TaskError, TaskFailed
from pgtask_sa.events import Events
from pgtask_sa.failures import headline, sqlstate
from pgtask_sa.insert_statements import set_lock_timeout, silence_wakeup
from pgtask_sa.patient import Patient, error, ok, warning
from pgtask_sa.presence_table import worker_table
from pgtask_sa.retry import Verdict
from pgtask_sa.settle import Claimed, Settler, Tables

PATIENCE = "5s"
_REMEDY = "as the message says; workers would meet it at every task"
_BROKEN_CONSTRAINT = "23"


class _Failed(Exception):  # noqa: N818 - not an error, but the end of the trial
    """A step did not do what it should."""


class _Quiet(Events):
    """Keeps what the settler tells, instead of logging it."""

    def __init__(self) -> None:
        super().__init__()
        self.told = ""

    def emit(self, name: str, message: str, **_: Any) -> None:  # noqa: ARG002
        self.told = message


def check_trial(patient: Patient) -> Iterator[Finding]:
    """Do with one task all that becomes of tasks; nobody sees it, nothing is left of it."""
    savepoint = patient.connection.begin_nested()
    trial = Trial(patient.connection, patient.tables)
    try:
        trial.run()
    except DBAPIError as failure:
        if failure.connection_invalidated:
            raise
        yield _judge(trial.step, failure)
    except (TaskError, _Failed) as failure:
        problem = f"to {trial.step} fails: {trial.events.told or failure}"
        yield error("trial", problem, _REMEDY)
    else:
        steps = "enqueued, claimed, put back and buried a task, and took all of it back"
        yield ok("trial", steps)
    finally:
        savepoint.rollback()


def _judge(step: str, failure: DBAPIError) -> Finding:
    what = headline(failure)
    if step == "enqueue" and (sqlstate(failure) or "").startswith(_BROKEN_CONSTRAINT):
        problem = f"a task without your own columns is refused, so nothing was tried: {what}"
        return warning("trial", problem, "nothing, if your own tasks can be enqueued")
    return error("trial", f"to {step} fails: {what}", _REMEDY)


class Trial:
    """The steps of one trial; ``step`` names the last one that was begun."""

    def __init__(self, connection: Connection, tables: Tables) -> None:
        self.connection = connection
        self.tables = tables
        self.events = _Quiet()
        self.settler = Settler(connection, tables, {}, self.events)
        self.step = "begin"

    def run(self) -> None:
        """Run all steps."""
        self.connection.execute(silence_wakeup())
        self.connection.execute(set_lock_timeout(PATIENCE))
        task_id = self._enqueue()
        self._settle(self._claim(task_id), Verdict("retry", 1, reason="failed"), "put back")
        self._settle(self._claim(task_id), Verdict("bury", 1, reason="failed"), "bury")
        self._note()

    def _enqueue(self) -> int:
        self.step = "enqueue"
        table = self.tables.task
        token = secrets.token_hex(8)
        values = {"task_type": self._label(token), "params": {"pgtask doctor": token}}
        statement = insert(table).values(values).returning(table.c.task_id)
        return int(self.connection.scalars(statement).one())

    def _label(self, token: str) -> Any:
        """Return a type that nobody has a handler for; an enum has no such label."""
        kind = self.tables.task.c.task_type.type
        if not isinstance(kind, Enum):
            return f"PGTASK_DOCTOR_{token}"
        return next(iter(kind.enum_class)) if kind.enum_class else kind.enums[0]

    def _claim(self, task_id: int) -> Claimed:
        self.step = "claim"
        claimed = self.settler.reclaim(task_id)
        if not claimed:
            raise _Failed("the task that was just written is not found")
        return claimed[0]

    def _settle(self, claimed: Claimed, verdict: Verdict, step: str) -> None:
        self.step = step
        written = self.settler.write(claimed, verdict, TaskFailed("a trial of the doctor"))
        if written.action != verdict.action or written.reason != verdict.reason:
            raise _Failed("the table refuses it")

    def _note(self) -> None:
        self.step = "write the table of the workers"
        table = worker_table(self.tables.task)
        key = {"worker_id": -(2**31), "lane": 0}
        row = {
            **key,
            "host": "doctor",
            "pid": 0,
            "is_direct": False,
            "server_started_at": func.now(),
        }
        mine = [table.c[name] == value for name, value in key.items()]
        self.connection.execute(insert(table).values(row))
        self.connection.execute(table.update().where(*mine).values(pid=1))
        if self.connection.execute(table.delete().where(*mine)).rowcount != 1:
            raise _Failed("the row that was just written is not found")
