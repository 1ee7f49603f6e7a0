"""Taking a task from a handler whose time is over, whatever it does and whoever locks the table.

The aim: its work is undone, its row is free, and this start is counted exactly once, whoever gets
hold of the row first. Three steps, of which each stands when a later one fails:

1. **Note it.** In the workers' table the lane's entry, with this row and its version, becomes one
   of a worker that is dead: it gets a number whose lock nobody holds. From that commit on the start
   cannot get lost: whoever claims the row finds the entry, and counts it before anything else. So
   no task is started more often than its budget says. Two gaps are left: through a pooler without a
   direct URL nothing is noted; where the DDL writes all rows anew, a lane does not know one again.
2. **First in line.** One statement ends the server process and claims the row from it. As it waits
   for the row already when that comes free, nobody takes it in between, and the attempt is counted
   with its right error. But it needs a lock on the table. An ``ALTER TABLE`` that waits for the
   handler's transaction lets no new one through: then the deadline would wait for the DDL, the DDL
   for the handler, and the handler for ever. So this is tried for a second.
3. **Without the table.** The server process is ended by its number and the beginning of its
   transaction, which together name no stranger; that needs no lock at all. The DDL goes on, and
   after it the row is claimed by its number. Who was faster has counted, and has taken the note out
   with that; the version of the row does not tell, as DDL may write all rows anew.

What fails is tried again, from the second step on, until the handler comes back by itself. Then its
lane owes the attempt, and finds out in the same way whether it was counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from pgtask_sa import presence_statements, statements
from pgtask_sa.admission import Lease
from pgtask_sa.claim import BACKEND_PID, BEGUN_AT
from pgtask_sa.engines import is_pooled
from pgtask_sa.errors import TaskFailed
from pgtask_sa.execution import Execution
from pgtask_sa.failures import LOCK_NOT_AVAILABLE, sqlstate
from pgtask_sa.insert_statements import set_lock_timeout
from pgtask_sa.leases import take_over
from pgtask_sa.settle import Claimed, Settler, timed_out

FIRST_PATIENCE = "1s"  # for the lock on the table, and for the server process to end
PATIENCE = "5s"  # for what waits for that lock, when the process is gone


class Enforcer:
    """Takes tasks away, over short-lived connections of its own.

    Args:
        engine: where these come from.
        settle: makes a Settler for one.
    """

    def __init__(self, engine: Engine, settle: Callable[[Connection], Settler]) -> None:
        self.engine = engine
        self.settle = settle
        self._alone = engine.execution_options(isolation_level="AUTOCOMMIT")

    def take(self, execution: Execution, claimed: Claimed) -> bool:
        """Undo what a handler does, and count the attempt; False if somebody else holds the row.

        Raises:
            DBAPIError: the database is away, or something else is locked; to be tried again.
        """
        lease = execution.lease
        if lease is not None:
            return self._take_leased(execution, lease)
        self._note(execution, claimed)
        try:
            return self._take(execution, claimed, FIRST_PATIENCE)
        except DBAPIError as error:
            if sqlstate(error) != LOCK_NOT_AVAILABLE:
                raise
        row = claimed.values
        with self._alone.connect() as connection:
            ended = {"pid": row[BACKEND_PID], "begun": row[BEGUN_AT]}
            connection.execute(statements.end_transaction(), ended)
        return self._take(execution, claimed, PATIENCE)

    def _take(self, execution: Execution, claimed: Claimed, patience: str) -> bool:
        error, seconds = _judged(execution, claimed)
        row = claimed.values
        with self.engine.connect() as connection, connection.begin():
            connection.execute(set_lock_timeout(patience))
            settler = self.settle(connection)
            for seized in settler.seize(claimed.task_id, row[BACKEND_PID], row[BEGUN_AT]):
                mine = replace(seized, uncounted=claimed.uncounted)
                settler.fail(mine, error, seconds)
                break
            else:  # its transaction had ended already, in whatever way: it was no COMMIT
                if not settler.count_apart(claimed, error, seconds):
                    return False
            settler.forget(claimed)
        return True

    def _take_leased(self, execution: Execution, lease: Lease) -> bool:
        """Take a task that was counted when its lease began, and for whose row nobody waits."""
        error, seconds = _judged(execution, lease.claimed)
        if not lease.claimed.noted:  # only once: the number may be a stranger's later
            self._cut(_own_process(execution.connection))
            lease.claimed.noted = 1
        with self.engine.connect() as connection, connection.begin():
            connection.execute(set_lock_timeout(PATIENCE))
            settler = self.settle(connection)
            for taken in take_over(settler, lease):
                settler.fail(taken, error, seconds)
        return True

    def _cut(self, pid: int | None) -> None:
        if pid is not None:
            with self._alone.connect() as connection:
                connection.exec_driver_sql("select pg_terminate_backend(%s)", (pid,))

    def _note(self, execution: Execution, claimed: Claimed) -> None:
        """Leave the start to whoever takes the row, with the entry that its own lane has made."""
        admission = execution.admission
        if claimed.noted or admission is None or not admission.presence.is_noting:
            return
        pid = claimed.values[BACKEND_PID]
        entry = admission.presence.farewell(admission.entry, claimed, pid)
        try:
            with self.engine.connect() as connection, connection.begin():
                connection.execute(set_lock_timeout(FIRST_PATIENCE))
                disown = presence_statements.disown(execution.tables.task)
                is_noted = connection.execute(disown, entry).first() is not None
        except DBAPIError as error:
            if sqlstate(error) != LOCK_NOT_AVAILABLE:  # the same DDL has locked this one, too
                raise
        else:
            claimed.noted = entry["nobody"] if is_noted else 0


def _judged(execution: Execution, claimed: Claimed) -> tuple[TaskFailed, float]:
    """Return the error of a handler whose time is over, and for how long it has run."""
    limit = execution.handlers[claimed.task_type].timeout or 0.0
    return timed_out(limit), time.monotonic() - claimed.started


def _own_process(connection: Connection) -> int | None:
    """Return the server process of a lane, in which nobody but the lane can work; or none."""
    if connection.closed or connection.invalidated or is_pooled(connection):
        return None
    driver: Any = connection.connection.driver_connection
    pid: int = driver.info.backend_pid
    return pid
