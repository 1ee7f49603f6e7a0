"""A worker's own entry in the workers' table: what it runs, and what became of those that died.

A rollback leaves no trace. So before its handlers start, a lane commits on a second connection what
it has claimed. Whoever claims one of these rows again later, still of the same version, finds the
entry: the first claim came to nothing. If the worker of that entry is dead, its death is counted as
an attempt; if it lives, it has settled the matter in its own way (a deadlock, say, is not counted).

A worker is alive as long as it holds an advisory lock on its number, on that same connection. The
server frees it in the moment in which the process dies, with nothing to configure and no clock.

Where a claim travels with the COMMIT before it, the lane makes the entry by itself: noted_claims.

Through a pooler nothing is noted: the note would wait for a server process while its lane holds
another one, and with all of them held by lanes it would wait for ever.

An event loop does not wait for what it has sent, see `scribe`. Whoever needs the connection
meanwhile reads the answer first, so that nobody depends on a loop that a handler may hold up.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, Table
from sqlalchemy.exc import DBAPIError

from pgtask_sa import presence_statements as statements
from pgtask_sa.claim import ROW_VERSION, TOUCHED
from pgtask_sa.engines import is_pooled
from pgtask_sa.events import Events
from pgtask_sa.failures import is_blameless
from pgtask_sa.notes import Landed, Note, Notes
from pgtask_sa.settle import Claimed

T = TypeVar("T")

# The entry may be lost with a crash of the server, which takes all claims along anyway.
NO_WAIT = "set synchronous_commit = off"
QUICK = 1.0  # seconds
LOOK, LOOKS = 0.02, 15  # seconds between looks whether a worker is dead, and how many
POOLED = (
    "through a pooler: what runs is not noted, and a task that kills its worker is tried again "
    "without a limit; give --direct-url"
)


@dataclass
class Deaths:
    """How many workers died while a task was in flight, and whether one had nothing else.

    Attributes:
        count: of these starts, also of those that were taken from a handler: its time was over, or
            its transaction was lost, while its worker lives on.
        alone: one had nothing else.
        taken: there is one of the latter.
        late: and its time was over.
    """

    count: int = 0
    alone: bool = False
    taken: bool = False
    late: bool = False


class Presence:
    """The entry of one worker process: a row for each of its lanes.

    Args:
        engine: of direct connections, if there are such.
        task: the table of the tasks.
        events: where it is told that there are none.
    """

    def __init__(self, engine: Engine, task: Table, events: Events) -> None:
        self.worker_id = secrets.randbelow(2**31)
        self.task = task
        self.events = events
        self.others = 0  # workers that there were lately
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._connection: Connection | None = None
        self._driver: Any = None  # psycopg's connection in there
        self._is_direct = True
        self._lock = threading.Lock()
        self._told = False
        self._lanes = 0
        self._named_by_dead: frozenset[int] | None = None  # tasks; None as long as unknown
        self._notes = Notes(task)

    # -- lanes ---------------------------------------------------------------------------------

    def enlist(self) -> int:
        """Add a lane and return its number.

        Raises:
            DBAPIError: the database is away.
        """
        with self._lock:
            number = self._lanes + 1
            self._surely(lambda connection: self._write_lanes(connection, [number]))
            self._lanes = number
            return number

    def look(self, lane: int, batch: Sequence[Claimed], patience: float = 0.0) -> dict[int, Deaths]:
        """Tell which workers died of tasks that are claimed now, before these are noted as ours.

        Nothing is asked of the database unless another transaction has locked one of these rows
        before, or one is named by a dead worker.

        Args:
            lane: who has claimed.
            batch: what is claimed.
            patience: seconds in which a worker may come back that has lost all its connections.
        """
        if not self.must_look(batch):
            return {}
        ids = [claimed.task_id for claimed in batch]
        versions = [claimed.values[ROW_VERSION] for claimed in batch]
        end = time.monotonic() + patience
        while True:
            rows = self._claims_before(lane, ids, versions)
            missed = any(row.is_gone and not row.is_taken for row in rows)
            if not missed or time.monotonic() >= end:
                return _deaths(rows)
            time.sleep(LOOK)

    def must_look(self, batch: Sequence[Claimed]) -> bool:
        """Say whether the entries of others may name one of these tasks; asks nobody."""
        if not self._is_direct:
            return False
        named = self._named_by_dead
        if named is None or batch[0].values.get(TOUCHED, True):
            return True
        return bool(named) and any(claimed.task_id in named for claimed in batch)

    def note(self, lane: int, batch: Sequence[Claimed]) -> None:
        """Commit what a lane is about to run.

        Raises:
            psycopg.Error: it could not be committed; nothing of it may be run.
        """
        if self._is_direct:
            self.write(self.draft(lane, batch))

    def draft(self, lane: int, batch: Sequence[Claimed]) -> Note:
        """Return what is to be noted of what a lane is about to run, if it runs anything."""
        return Note(self.worker_id, lane, batch)

    def own_row(self, lane: int) -> dict[str, Any] | None:
        """Return what names a lane's row in a statement of the lane's own; None: it is to `note`.

        So it is as long as a dead worker names tasks: these are to be looked at before they are
        noted.
        """
        if not self._is_direct or self._connection is None or self._named_by_dead != frozenset():
            return None
        return self._notes.own(self.worker_id, lane)

    def moved(self, lane: int, place: str, *, is_empty: bool) -> None:
        """Take in where a lane's row is that it has written; ``is_empty`` if that names no task."""
        self._notes.moved(lane, place, is_empty=is_empty)

    def disown(self, lane: int, claimed: Claimed) -> int:
        """Leave a start, whose transaction is lost, to whoever claims the row next.

        That may be at once, and long before this worker could count it.

        Returns:
            Under which number it is noted; 0 if it is not.
        """
        if not self._is_direct:
            return 0
        entry = self.farewell(lane, claimed, backend_pid=None)
        with self._lock:
            is_noted = self._surely(partial(self._disown, entry))
        return entry["nobody"] if is_noted else 0

    def _disown(self, entry: dict[str, Any], connection: Connection) -> bool:
        row = connection.execute(statements.disown(self.task), entry).first()
        if row is None:  # or was it done in the first try, whose answer was lost?
            row = connection.execute(statements.is_disowned(self.task), entry).first()
        return row is not None

    def farewell(self, lane: int, claimed: Claimed, backend_pid: int | None) -> dict[str, Any]:
        """Return the parameters of `presence_statements.disown`, with a new number."""
        return {
            "me": self.worker_id,
            "own_lane": lane,
            "nobody": 1 + secrets.randbelow(2**31 - 1),
            "task_ids": [claimed.task_id],
            "row_versions": [claimed.values[ROW_VERSION]],
            "backend_pid": backend_pid,
        }

    def rest(self, lane: int) -> None:
        """Note that a lane runs nothing, if that is news."""
        if self.is_flying(lane):
            self.write(Note(self.worker_id, lane))

    def is_flying(self, lane: int | None) -> bool:
        """Say whether a lane's row names tasks."""
        return lane in self._notes.flying

    @property
    def is_noting(self) -> bool:
        """Whether entries are looked at when tasks are claimed: not so through a pooler."""
        return self._is_direct

    # -- the whole worker ------------------------------------------------------------------------

    def look_after(self) -> None:
        """Take out the dead whose claims have been counted, and see whether others are left.

        And say that this worker lives, for those who cannot look at its lock.
        """
        with self._lock:
            self._surely(self._look_after)

    def _look_after(self, connection: Connection) -> None:
        me = {"worker_id": self.worker_id}
        self.others = connection.scalar(statements.count_others(self.task), me) or 0
        if self.others:
            connection.execute(statements.dismiss_dead(self.task), me)
            self._look_for_dead(connection)
        else:  # nobody is there who could be dead
            self._named_by_dead = frozenset()
        if not self._is_direct:
            connection.execute(statements.note_alive(self.task), {"me": self.worker_id})

    def _look_for_dead(self, connection: Connection) -> None:
        me = {"worker_id": self.worker_id}
        named = connection.scalars(statements.named_by_dead(self.task), me)
        self._named_by_dead = frozenset(named)

    def reassure(self) -> None:
        """Have the connection again, if it is lost: without it this worker is taken for dead.

        Raises:
            DBAPIError: the database is away.
        """
        if self.is_cut_off():
            self.look_after()

    def is_cut_off(self) -> bool:
        """Say whether the connection is lost, as far as can be seen from here; asks nobody."""
        if not (self._lanes and self._is_direct and self._lock.acquire(blocking=False)):
            return False  # somebody works with it, and will notice
        try:
            return self._connection is None or self._notes.is_lost(self._driver.pgconn)
        finally:
            self._lock.release()

    def leave(self) -> None:
        """Take the entry out; the end of this worker is in order."""
        with self._lock:
            start = time.monotonic()
            try:
                self._dismiss()
            except DBAPIError:
                self._close()
                if time.monotonic() - start > QUICK:
                    raise  # nobody is to wait twice for a network that is dark
                self._dismiss()
            finally:
                self._close()

    def _dismiss(self) -> None:
        self._notes.land()
        if self._lanes:
            me = {"worker_id": self.worker_id}
            self._connected().execute(statements.dismiss(self.task), me)

    # -- the connection --------------------------------------------------------------------------

    def _connected(self) -> Connection:
        if self._connection is not None and not self._driver.closed:
            return self._connection
        self._close()
        connection = self._connection = self._engine.connect()
        self._driver = connection.connection.driver_connection
        self._is_direct = not is_pooled(connection)
        connection.detach()  # the lock must end with it
        self._introduce(connection)
        return connection

    def _surely(self, work: Callable[[Connection], T]) -> T:
        """Do something on the connection; once more, if it was lost unnoticed.

        None is kept that met an error: a setting of it may be the cause.
        """
        self._notes.land()
        was_open = self._connection is not None
        try:
            return work(self._connected())
        except BaseException as error:
            self._close()
            if not (was_open and is_blameless(error)):
                raise
        try:
            return work(self._connected())
        except BaseException:
            self._close()
            raise

    def _introduce(self, connection: Connection) -> None:
        if self._is_direct:
            connection.exec_driver_sql(NO_WAIT)
            self._hold_lock(connection)
            self._notes.prepare(self._driver.pgconn)
            self._look_for_dead(connection)
        elif not self._told:
            self._told = True
            self.events.emit("presence.pooled", POOLED, level=logging.WARNING)
        self._write_lanes(connection, range(1, self._lanes + 1))

    def _hold_lock(self, connection: Connection) -> None:
        """Say that this worker lives; also if the server has not missed the connection before."""
        me = {"worker_id": self.worker_id}
        if not connection.scalar(statements.try_presence(), me):
            connection.execute(statements.end_predecessor(), me)
            connection.execute(statements.hold_presence(), me)

    def _write_lanes(self, connection: Connection, lanes: Iterable[int]) -> None:
        """Write the rows of lanes, at once: meanwhile a lane may give its own another number."""
        connection.exec_driver_sql("begin")
        connection.execute(statements.renumber(self.task), {"me": self.worker_id})
        self._notes.enlisted()
        me = {"worker_id": self.worker_id, "host": socket.gethostname(), "pid": os.getpid()}
        rows = [{**me, "lane": lane, "is_direct": self._is_direct} for lane in lanes]
        if rows:
            connection.execute(statements.enlist(self.task), rows)
        connection.exec_driver_sql("commit")

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._driver.close()  # nobody else would: it was taken out of its pool
            connection.invalidate()
            connection.close()

    # -- notes -----------------------------------------------------------------------------------

    def write(self, note: Note) -> None:
        """Write a lane's row.

        Raises:
            psycopg.Error: it could not be committed.
        """
        with self._lock:
            self._surely(lambda connection: self._write_or_enlist(connection, note))

    def _write_or_enlist(self, connection: Connection, note: Note) -> None:
        pgconn = self._driver.pgconn
        if not self._notes.write(pgconn, note):  # somebody took this worker for dead, and it out
            self._write_lanes(connection, range(1, self._lanes + 1))
            self._notes.write(pgconn, note)

    def send(
        self, notes: Sequence[Note], landed: Landed, watch: Callable[[Any], object], patience: float
    ) -> bool:
        """Send notes without waiting; from then on `see` is to be called until they have landed.

        Args:
            notes: at least one; they are committed together.
            landed: told which were written, if another thread reads the answer.
            watch: told the connection on which the answer will come.
            patience: seconds to wait for the connection, if a thread works with it.

        Returns:
            False if that cannot be now: they are to be written one by one.
        """
        if not self._lock.acquire(timeout=patience):
            return False
        try:
            if self._connection is None or not self._notes.can_send(notes):
                return False
            pgconn = self._driver.pgconn
            watch(pgconn)
            self._notes.send(pgconn, notes, landed)
        except Exception:  # noqa: BLE001 - no file descriptors, say; a thread will see what it is
            self._close()
            return False
        finally:
            self._lock.release()
        return True

    def see(self, landed: Landed) -> list[bool] | None:
        """Read what there is of the answer, without waiting; return which notes were written.

        ``landed`` is what was given to `send`.

        None: that is not known yet, or somebody else sees to it.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self._notes.see(landed)
        finally:
            self._lock.release()

    def _claims_before(self, lane: int, ids: list[int], versions: list[int]) -> Sequence[Any]:
        """List which other lanes had claimed these rows before, and whether they are dead.

        A row may be free a moment before its dead worker's lock is: the server ends each connection
        by itself. One that lives has rolled back, and soon notes something else.
        """
        given = {
            "worker_id": self.worker_id,
            "own_lane": lane,
            "task_ids": ids,
            "row_versions": versions,
        }
        statement = statements.deaths(self.task)
        for _ in range(LOOKS):
            with self._lock:
                rows = self._surely(lambda connection: connection.execute(statement, given).all())
            if all(row.is_gone for row in rows):
                break
            time.sleep(LOOK)
        return rows


def _deaths(claims_before: Sequence[Any]) -> dict[int, Deaths]:
    """Sum up what is known of each task."""
    found: dict[int, Deaths] = {}
    for row in claims_before:
        if row.is_gone:
            deaths = found.setdefault(row.task_id, Deaths())
            deaths.count += 1
            deaths.alone = deaths.alone or row.beside == 1
            deaths.taken = deaths.taken or row.is_taken
            deaths.late = deaths.late or (row.is_taken and row.is_late)
    return found
