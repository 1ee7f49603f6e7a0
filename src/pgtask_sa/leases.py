"""The leased mode: long work without a long transaction.

The claim's transaction counts the attempt, sets a lease and commits. Then the handler runs with no
transaction open; its session begins one when it is first used, and may commit as often as it likes.
Each of these commits first makes sure that the lease still stands and cannot be lost before it is
through. So does the last one, which deletes the task. A worker that is dead, frozen or cut off does
not renew its lease: the task falls due for others, and whatever the old run still wants to commit
fails.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, Engine, Executable
from sqlalchemy.orm import Session

from pgtask_sa import lease_statements as statements
from pgtask_sa.admission import Lease
from pgtask_sa.calls import arguments, close
from pgtask_sa.engines import unlimited
from pgtask_sa.errors import LeaseLost, TaskFailed
from pgtask_sa.events import Events
from pgtask_sa.execution import Execution, Stopped
from pgtask_sa.failures import (
    READ_ONLY,
    UNDEFINED_TABLE,
    comes_from,
    headline,
    is_blameless,
    sqlstate,
)
from pgtask_sa.fence import Fence
from pgtask_sa.ground import TROUBLE
from pgtask_sa.presence import Presence
from pgtask_sa.retry import Verdict
from pgtask_sa.settle import Claimed, Settler, Tables, timed_out
from pgtask_sa.wakeup import REMIND

SCHEMAS = "schema_translate_map"
RENEWALS = 3  # in the length of a lease
CARE = 10.0  # seconds between two looks after the workers' table
PULSE = 0.5  # seconds between two looks whether the connection for it is still there
LOST = "the lease of this task was lost: it ran out, or the task was cancelled; nothing was written"


class Keeper(threading.Thread):
    """Renews the leases of a worker, and looks after its entry in the workers' table."""

    def __init__(self, engine: Engine, tables: Tables, presence: Presence, events: Events) -> None:
        super().__init__(name="pgtask-keeper", daemon=True)
        self.engine = engine
        self.presence = presence
        self.events = events
        self.on_lost: Callable[[Lease], object] = lambda _lease: None
        self._renew = statements.renew_lease(tables.task)
        self._release = statements.release_lease(tables.task)
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, Lease | None]] = [(time.monotonic() + 1.0, 0, None)]
        self._numbers = itertools.count(1)
        self._kept: set[int] = set()  # by identity: a task may be leased again by another lane
        self._stopping = False
        self._next_care = 0.0

    def keep(self, lease: Lease) -> None:
        """Renew a lease from now on."""
        with self._changed:
            self._kept.add(id(lease))
            self._push(lease.seconds / RENEWALS, lease)

    def drop(self, lease: Lease) -> None:
        """Let a lease be."""
        with self._changed:
            self._kept.discard(id(lease))

    def release(self, leases: Sequence[Lease]) -> None:
        """Give back at once, uncounted, what nobody has begun to run, where it is leased at all.

        Raises:
            DBAPIError: the database is away; they fall due when their leases end.
        """
        if leases:
            with self.engine.begin() as connection:
                for lease in leases:
                    connection.execute(self._release, lease.key)

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def _push(self, wait: float, lease: Lease | None) -> None:
        heapq.heappush(self._due, (time.monotonic() + wait, next(self._numbers), lease))
        self._changed.notify()

    def run(self) -> None:
        """Do what is due, until stopped; a database that is away is tried again soon."""
        while True:
            with self._changed:
                lease = self._next()
                if self._stopping:
                    return
            wait = self._look_after() if lease is None else self._prolong(lease)
            with self._changed:
                if lease is None or id(lease) in self._kept:
                    self._push(wait, lease)

    def _next(self) -> Lease | None:
        while not self._stopping:
            when, _, lease = self._due[0]
            wait = when - time.monotonic()
            if lease is not None and id(lease) not in self._kept:
                heapq.heappop(self._due)
            elif wait <= 0:
                return heapq.heappop(self._due)[2]
            else:
                self._changed.wait(wait)
        return None

    def _look_after(self) -> float:
        """Look after the workers' table now and then, and after the connection for it often."""
        try:
            if time.monotonic() >= self._next_care:
                self._next_care = time.monotonic() + CARE
                self.presence.look_after()
            else:
                self.presence.reassure()
        except Exception as error:  # noqa: BLE001
            self._tell("presence", error)
        return min(CARE, PULSE)

    def _tell(self, name: str, error: Exception) -> None:
        """Tell of an error; the lanes tell when the database is away, anything else is a fault.

        It may last, as a missing right does, and is tried again all the time.
        """
        kind = sqlstate(error) or type(error).__name__
        if is_blameless(error) or kind == UNDEFINED_TABLE:
            return
        if self.events.is_news(f"{name} {kind}", REMIND):
            told = headline(error, values=self.events.shows_values)
            self.events.emit(name, told, level=logging.ERROR)

    def _prolong(self, lease: Lease) -> float:
        """Renew one lease; return the seconds until the next time."""
        key = {**lease.key, "lease": timedelta(seconds=lease.seconds)}
        try:
            with self.engine.begin() as connection:
                found = connection.execute(self._renew, key).first()
        except Exception as error:  # noqa: BLE001
            self._tell("lease.renew", error)
            return min(1.0, lease.seconds / RENEWALS)
        if found is None:
            self.drop(lease)
            self.on_lost(lease)
        return lease.seconds / RENEWALS


class LeasedRuns:
    """Runs what one lane has been granted leases for, one after the other."""

    def __init__(self, execution: Execution, keeper: Keeper) -> None:
        self.execution = execution
        self.connection: Connection = execution.connection
        self.events = execution.events
        self.keeper = keeper
        self._trouble: BaseException | None = None  # the last error of our own database
        self._moved = False  # the handler has changed the session on the server
        task = execution.tables.task
        self._hold = statements.hold_lease(task)
        self._finish_statement = statements.finish_lease(task)
        self._take = statements.take_leased(task)
        self._release = statements.release_lease(task)

    def run(self) -> None:
        """Run them all.

        Raises:
            Stopped: the worker is being stopped; they were given back.
            DBAPIError: the database is away; what was not settled falls due when its lease ends.
        """
        leases = list(self.execution.granted)
        if not leases:
            return
        for lease in leases:
            self.keeper.keep(lease)
        try:
            with unlimited(self.connection):
                for lease in leases:
                    self.execution.granted.remove(lease)
                    self._run(lease)
        finally:
            for lease in leases:
                self.keeper.drop(lease)

    def _run(self, lease: Lease) -> None:
        start = time.perf_counter()
        self.execution.running, self.execution.lease = lease.claimed, lease
        try:
            error = self._call(lease)
            self._settle(lease, error, time.perf_counter() - start)
        finally:
            self.execution.running = self.execution.lease = None

    def _call(self, lease: Lease) -> BaseException | None:
        """Call the handler, and delete the task in its last transaction; return what went wrong."""
        execution = self.execution
        handler = execution.handlers[lease.claimed.task_type]
        info = self.connection.info
        info.pop(TROUBLE, None)
        session, handed = execution.face.open(twophase=False)
        error: BaseException | None = None
        with Fence(session, self.connection, lambda: self._is_ours(session, lease)) as fence:
            try:
                given = arguments(handler, handed, lease.claimed, execution.tables)
                execution.face.call(handler, given, lease.claimed)
                fence.up = False
                self._finish(session, lease, fence)
            except BaseException as raised:  # noqa: BLE001 - whatever a handler raises is a failure
                error = raised
                self._trouble = info.get(TROUBLE)  # to end the session may bring more of it
        self._moved = fence.moved
        self._end(session)
        if error is not None and execution.expired is lease.claimed:
            # whatever it met then: the connection was cut, but the row could not be had
            return timed_out(handler.timeout or 0.0)
        return error

    def _end(self, session: Session) -> None:
        """Leave no transaction open; a COMMIT that failed leaves one behind in SQLAlchemy."""
        if self._moved or self.execution.ground.status() == TransactionStatus.ACTIVE:
            # with settings that the next task must not meet; or to end the session would hang
            self.connection.invalidate()
        trouble = close(session, self.events)
        try:
            self.connection.rollback()
        except Exception as error:  # noqa: BLE001 - the connection is in no good state
            trouble = error
        if trouble is not None or self.execution.ground.status() != TransactionStatus.IDLE:
            self.connection.invalidate()

    def _is_ours(self, session: Session, lease: Lease) -> None:
        self._execute(session, self._hold, lease)

    def _execute(self, session: Session, statement: Executable, lease: Lease) -> None:
        # whatever tables of whose the handler works with
        own = {SCHEMAS: self.connection.engine.get_execution_options().get(SCHEMAS)}
        found = session.connection().execute(statement, lease.key, execution_options=own)
        if found.first() is None:
            lease.lost = True
            raise LeaseLost(LOST)

    def _finish(self, session: Session, lease: Lease, fence: Fence) -> None:
        """Delete the task and commit, together with the handler's last writes."""
        if self.execution.cut:
            raise Stopped
        if self.execution.ground.status() == TransactionStatus.INERROR:
            cause = self.connection.info.get(TROUBLE)
            what = headline(cause, values=self.events.shows_values) if cause else "unknown"
            raise TaskFailed(
                f"the handler swallowed a database error in its last transaction: {what}"
            ) from cause
        session.flush()
        fence.come_back(session)
        self._execute(session, self._finish_statement, lease)
        session.commit()

    # -- what became of it -------------------------------------------------------------------------

    def _settle(self, lease: Lease, error: BaseException | None, seconds: float) -> None:
        execution, claimed = self.execution, lease.claimed
        if execution.settled is claimed:
            return  # the deadline was enforced, or the task cancelled, by somebody else
        if execution.cut:
            self.give_back(lease)
            raise Stopped from error
        if error is None:
            execution.settler.tell(claimed, Verdict("done"), None, seconds)
        elif lease.lost or not self._fail(lease, error, seconds):
            self._tell_lost(lease)

    def _fail(self, lease: Lease, error: BaseException, seconds: float) -> bool:
        """Count the failure, in its own transaction; False if the task is not ours any more."""
        settler = self.execution.settler
        policy = self.execution.handlers[lease.claimed.task_type].policy
        with self.connection.begin():
            row = self.connection.execute(self._take, lease.key).mappings().first()
            if row is None:
                return False
            claimed = self.execution.tables.claimed(row, -1)
            blameless = self._is_blameless(claimed, error)
            verdict = settler.judge(claimed, error, policy, blameless=blameless)
            verdict = settler.write(claimed, verdict, error)
        settler.tell(claimed, verdict, error, seconds)
        return True

    def _is_blameless(self, claimed: Claimed, error: BaseException) -> int:
        """Say how often our own database was to blame, and not another one; 0: it is not."""
        trouble = self._trouble
        if trouble is None or not is_blameless(trouble) or not comes_from(error, trouble):
            return 0
        if self._moved and sqlstate(trouble) == READ_ONLY:
            return 0  # it has set that itself, for all we know
        return self.execution.arrears.bear(claimed, trouble)

    def give_back(self, lease: Lease) -> None:
        """End a lease at once, uncounted."""
        with self.connection.begin():
            self.connection.execute(self._release, lease.key)

    def _tell_lost(self, lease: Lease) -> None:
        claimed = lease.claimed
        self.events.emit(
            "lease.lost",
            f"{claimed}: {LOST}",
            level=logging.WARNING,
            task_id=claimed.task_id,
            task_type=claimed.task_type,
        )


def take_over(settler: Settler, lease: Lease) -> list[Claimed]:
    """Claim a leased task from a handler that does not end; nothing if the lease was lost."""
    take = statements.take_leased(settler.tables.task)
    rows = settler.connection.execute(take, lease.key).mappings()
    return [settler.tables.claimed(row, -1) for row in rows]
