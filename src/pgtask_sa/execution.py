"""One claim in one transaction: claim, call each handler, settle; commit last.

`Execution.sweep` is written once, over a synchronous Connection. A `Face` makes the difference
between a thread, whose handlers are plain functions, and an event loop, where the same code runs
inside ``run_sync`` and the handlers are awaited from there.

What can happen to a task, and where it is settled:

* The handler returns, COMMIT succeeds: the row was deleted by the claim; nothing is written.
* The handler fails: its work is undone to the savepoint, and the row is put back with the attempt
  counted (or buried) in the same transaction, so that nobody can take it in between.
* The transaction itself is lost (the connection died, the handler ended it past all guards): the
  row is back by itself, uncounted. If the task is to blame, the attempt is counted on a fresh
  transaction before the next claim.
* COMMIT fails for a whole batch (a deferred constraint): each task runs again alone, and then its
  constraints are checked while its row is still held.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from pgtask_sa.admission import Admission, Lease
from pgtask_sa.arrears import Arrears
from pgtask_sa.calls import Face, arguments, close
from pgtask_sa.claiming import Claiming
from pgtask_sa.engines import is_pooled
from pgtask_sa.errors import TaskError, TaskFailed
from pgtask_sa.events import Events
from pgtask_sa.failures import READ_ONLY, comes_from, headline, is_blameless, sqlstate
from pgtask_sa.ground import ENDED, NO_SAVEPOINT, Ground
from pgtask_sa.handlers import Handler
from pgtask_sa.retry import Policy, Verdict
from pgtask_sa.settle import Claimed, Report, Settler, Tables, TransactionLost, Unsettled, timed_out
from pgtask_sa.turns import Claimer

LOST = (TransactionStatus.UNKNOWN, TransactionStatus.IDLE)
# Whatever a sessionmaker of the user says: in somebody else's transaction there is no other way.
SESSION: Mapping[str, Any] = {"join_transaction_mode": "create_savepoint", "twophase": False}
IN_USE = "the handler ended while something of it still worked with its session"
TIME_LIMITS = ("25P03", "25P04")  # the server ended a transaction that took too long


class Stopped(BaseException):
    """The worker is being stopped and cuts this task off: roll back, count nothing."""


def _nothing() -> None:
    pass


class Execution:
    """Runs claims on one connection."""

    def __init__(  # noqa: PLR0917 - it is where everything meets
        self,
        connection: Connection,
        face: Face,
        claimer: Claimer,
        handlers: Mapping[str, Handler],
        tables: Tables,
        events: Events,
        *,
        begin: Callable[[], Any] | None = None,
    ) -> None:
        self.connection = connection
        self._owns = begin is None  # the transaction, and with it the connection
        self.begin = begin or connection.begin  # in somebody else's transaction: begin_nested
        self.face = face
        self.claimer = claimer
        self.handlers = handlers
        self.tables = tables
        self.events = events
        self.ground = Ground(connection)
        self.claiming = Claiming(connection, self.ground, claimer, tables)
        self.settler = Settler(connection, tables, handlers, events)
        self.on_full: Callable[[], object] = _nothing
        self.on_commit: Callable[[], object] = _nothing
        self.running: Claimed | None = None
        self.cut = False  # set from outside: whatever runs must not commit any more
        self.expired: Claimed | None = None  # set from outside: this one's time is over
        self.settled: Claimed | None = None  # set from outside: and its attempt has been counted
        self.arrears = Arrears(events)  # outlive the connection: a lane hands them on
        self.admission: Admission | None = None  # not in somebody else's transaction
        self.granted: list[Lease] = []  # to be run next, outside of this transaction
        self.lease: Lease | None = None  # of what runs
        self._transaction: Any = None
        self._chained = False  # it began with the COMMIT of the one before
        self._writing: set[str] = set()  # types whose handlers have used their session

    # -- the walk of one claim ---------------------------------------------------------------

    def sweep(self) -> int:
        """Claim once, run what was claimed, commit. Return how many tasks were claimed.

        Raises:
            DBAPIError: the database is away or refuses to work; nothing was done.
            Stopped: the worker is being stopped, and the tasks were given back.
            TransactionLost: a handler left something running on the connection; take another one.
        """
        self.pay()
        return self._transact(self.claiming.claim)

    def pay(self) -> None:
        """Count the attempts that could not be counted in their own transaction."""
        if self.arrears.owed:
            self.pause()
        self.arrears.pay(self.begin, self.settler)

    def _transact(self, claim: Callable[[], list[Claimed]]) -> int:
        transaction = self._begin()
        batch: list[Claimed] = []
        try:
            batch = claim()
            finished = self._work(batch)
        except TransactionLost as lost:
            try:
                self._blame(lost)  # first: the row may be free already
            finally:
                self.arrears.rescue(batch, lost)
                self._give_up(transaction)
            if lost.unrun:  # then one of those before is the culprit, if they are back
                ids = [claimed.task_id for claimed in batch]
                self._run_alone(batch[: ids.index(lost.claimed.task_id)])
            if lost.dirty:
                raise
            return len(batch)
        except Unsettled:
            self._give_up(transaction)
            if len(batch) == 1:
                raise
            self._run_alone(batch)  # the others are not to wait for the one that nobody takes
            return len(batch)
        except BaseException:
            self._give_up(transaction)
            raise
        if self._commit(transaction, batch, finished):
            self.on_commit()
            self._keep_leases()
            if self.ground.moved:  # settings that the next task must not meet
                self.ground.moved = False
                self.connection.invalidate()
            for report in finished:
                self.settler.tell(*report)
        return len(batch)

    def _begin(self) -> Any:
        if self._chained and self._transaction.is_active:
            return self._transaction
        self._chained = False
        self.claiming.forget()
        self.ground.begin()
        self._transaction = self.begin()
        return self._transaction

    def pause(self) -> None:
        """Leave no transaction open; what was claimed ahead is free again."""
        if self._chained and self._transaction.is_active:
            self._roll_back(self._transaction)
        self._chained = False
        self.claiming.forget()

    def _work(self, batch: list[Claimed]) -> list[Report]:
        """Run what may run of a batch; return what became of each task."""
        reports: list[Report] = []
        if self.admission is not None:
            batch, reports = self.admission.admit(batch)
            if reports or self.admission.leases:
                self.ground.wrote()
        if self.claiming.full:
            self.on_full()  # wake another lane before the work begins, and not before it can
        return reports + [self._attempt(claimed) for claimed in batch]

    @property
    def unrun(self) -> list[Lease]:
        """What was leased and has not begun; perhaps not leased at all, if a COMMIT was cut off."""
        return self.granted + ([] if self.admission is None else self.admission.leases)

    def _keep_leases(self) -> None:
        if self.admission is not None:
            self.granted += self.admission.leases
            self.admission.leases = []

    def sweep_alone(self, task_ids: list[int]) -> None:
        """Claim and run tasks by their numbers, one by one, while nothing else runs."""
        assert self.admission is not None  # noqa: S101 - it has demanded this
        self.admission.alone = True
        try:
            for task_id in task_ids:
                self._rerun(task_id)
        finally:
            self.admission.alone = False

    def _reclaim(self, task_id: int) -> list[Claimed]:
        if self.admission is not None and self.admission.alone:
            self.admission.take_turn()
        return self.settler.reclaim(task_id)

    def _rerun(self, task_id: int) -> None:
        """Claim and run one certain task, if it is still there."""
        self.pause()
        self._transact(partial(self._reclaim, task_id))

    def _attempt(self, claimed: Claimed) -> Report:
        """Run one task and write what became of it; both in the claim's transaction."""
        handler = self.handlers[claimed.task_type]
        start = time.perf_counter()
        self.running, error = claimed, None
        try:
            error = self._run(handler, claimed)
            verdict = self._settle(claimed, error, handler.policy)
        except DBAPIError as gone:
            if sqlstate(gone) not in TIME_LIMITS:
                raise
            # met only when the outcome was written; it failed all the same, and counts
            raise TransactionLost(claimed, error or gone) from gone
        finally:
            self.running = None
        return claimed, verdict, error, time.perf_counter() - start

    def _run(self, handler: Handler, claimed: Claimed) -> BaseException | None:
        """Call the handler on firm ground; return what went wrong, if anything did."""
        session, handed = self.face.open(**SESSION)
        error: BaseException | None = None
        with self.ground:
            try:
                if claimed.task_type in self._writing:
                    self.ground.expect()
                given = arguments(handler, handed, claimed, self.tables)
                self.face.call(handler, given, claimed)
                self._finish(session, claimed)
            except BaseException as raised:  # noqa: BLE001 - whatever a handler raises is a failure
                error = raised
            status = self.ground.status()
        if status == TransactionStatus.ACTIVE:
            self.connection.invalidate()  # to end the session on it would wait for ever
        trouble = close(session, self.events)
        if self.cut:
            raise Stopped from error
        self._look_whether_lost(handler, claimed)
        if status in LOST or not self._transaction.is_active:
            if status != TransactionStatus.UNKNOWN:
                raise TransactionLost(claimed, error, ended=True)
            raise TransactionLost(claimed, self.ground.reason(error))
        if trouble is not None and sqlstate(trouble) in NO_SAVEPOINT:
            # gone with a transaction that the handler ended
            raise TransactionLost(claimed, error or TaskFailed(ENDED), ended=True, dirty=True)
        if trouble is not None or status == TransactionStatus.ACTIVE:
            raise TransactionLost(claimed, error or TaskFailed(IN_USE), dirty=True)
        return error

    def _look_whether_lost(self, handler: Handler, claimed: Claimed) -> None:
        if self.ground.fell:  # by a task of this batch before it; its own row may be gone
            raise TransactionLost(claimed, None, ended=True, unrun=True)
        if self.expired is claimed:
            raise TransactionLost(claimed, timed_out(handler.timeout or 0.0))

    def _finish(self, session: Session, claimed: Claimed) -> None:
        """Flush the handler's session and release the savepoints, if there is nothing amiss."""
        status = self.ground.status()
        if status == TransactionStatus.INERROR:
            # COMMIT would "succeed" as a silent ROLLBACK, and the task would run for ever
            cause = self.ground.trouble()
            what = headline(cause, values=self.events.shows_values) if cause else "unknown"
            raise TaskFailed(f"the handler swallowed a database error: {what}") from cause
        if status in LOST:
            return
        if status == TransactionStatus.ACTIVE:
            raise TaskFailed(IN_USE)
        if session.in_transaction():
            session.commit()
        self.ground.keep()
        if self.ground.used:
            self._writing.add(claimed.task_type)
        else:
            self._writing.discard(claimed.task_type)
        self.claiming.expects_writes = self.ground.used

    # -- what became of it -------------------------------------------------------------------

    def _settle(self, claimed: Claimed, error: BaseException | None, policy: Policy) -> Verdict:
        """Write the outcome in the transaction that holds the claim."""
        if error is None:
            return Verdict("done")
        if not self.ground.open and self.ground.status() == TransactionStatus.INERROR:
            raise TransactionLost(claimed, error)  # aborted past the session: nothing to go back to
        try:
            self.ground.undo()
        except psycopg.Error as gone:
            # the savepoint went with a transaction that was ended, unless the connection died
            raise TransactionLost(claimed, error, ended=sqlstate(gone) in NO_SAVEPOINT) from gone
        blameless = self._is_blameless(claimed, error)
        verdict = self.settler.judge(claimed, error, policy, blameless=blameless)
        return self.settler.write(claimed, verdict, error)

    def _is_blameless(self, claimed: Claimed, error: BaseException) -> int:
        """Say how often our own database was to blame for this task; 0: it is not."""
        trouble = self.ground.trouble()
        if trouble is None or not is_blameless(trouble) or not comes_from(error, trouble):
            return 0
        if sqlstate(trouble) == READ_ONLY and (self.ground.moved or self.ground.shifted):
            return 0  # it has set that itself, for all we know
        return self.arrears.bear(claimed, trouble)

    # -- when the transaction is lost --------------------------------------------------------

    def _give_up(self, transaction: Any) -> None:
        """Roll back, by cutting the connection if there is no other way."""
        sound = (TransactionStatus.INTRANS, TransactionStatus.INERROR)
        if self.connection.closed:
            return
        if self.ground.status() not in sound or not transaction.is_active:
            self.connection.invalidate()  # somebody ended the transaction under us, or still works
        self._roll_back(transaction)

    def _roll_back(self, transaction: Any) -> None:
        try:
            if self._owns:
                self.connection.rollback()  # also if a COMMIT that failed has ended it already
            else:
                transaction.rollback()
        except Exception:  # noqa: BLE001 - the connection is gone, and with it the transaction
            self.connection.invalidate()
            transaction.close()

    def _commit(self, transaction: Any, batch: list[Claimed], finished: list[Report]) -> bool:
        """Commit. A failure here is the only one that does not tell which task it belongs to."""
        if self.cut:
            self._give_up(transaction)
            raise Stopped
        if self.claiming.holds:  # a mistake of ours; what nobody has run must not be gone
            self._give_up(transaction)
            raise TaskError("tasks that were claimed ahead were not run; they are free again")
        try:
            self._commit_checked(transaction, batch, finished)
        except (DBAPIError, psycopg.Error) as raised:
            error = self.ground.reason(raised) or raised
            batch = _as_admitted(batch, finished)
            lost = self.ground.status() == TransactionStatus.UNKNOWN or _is_invalid(raised)
            if lost and sqlstate(error) not in TIME_LIMITS:
                if batch:
                    self._tell_unknown(batch)
                self._give_up(transaction)
                self._bear_unknown(batch, error)
                raise
            self._roll_back(transaction)
            if is_blameless(error):
                raise
            self._find_culprit(batch, error)
            return False
        return True

    def _tell_unknown(self, batch: list[Claimed]) -> None:
        self.events.emit(
            "commit.unknown",
            "the connection was lost during COMMIT: what is still in the table runs again",
            level=logging.WARNING,
            task_ids=[claimed.task_id for claimed in batch],
        )

    def _bear_unknown(self, batch: list[Claimed], error: BaseException) -> None:
        """Count it where it goes on like this: something ends the connection of just this task."""
        for claimed in batch:
            if not self.arrears.bear(claimed, error):  # if it is done after all, nothing is counted
                self.arrears.owed.append(TransactionLost(claimed, error))
                self._disown(claimed)

    def _commit_checked(
        self, transaction: Any, batch: list[Claimed], finished: list[Report]
    ) -> None:
        """Commit; a task that is alone and breaks a constraint now has failed, like any other."""
        if self._owns and len(batch) == 1:
            self._chained = self.claiming.full and self._may_chain()
            try:
                self.ground.commit(self.claiming.chain if self._chained else None)
                if self._chained:
                    return
            except psycopg.Error as error:
                self._chained = False
                if sqlstate(error) in NO_SAVEPOINT or not self.ground.reopen():
                    raise
                claimed, _, _, seconds = finished[0]
                verdict = self._settle(claimed, error, self.handlers[claimed.task_type].policy)
                finished[:] = [(claimed, verdict, error, seconds)]
        else:
            self._chained = False
            if self._owns:
                self.ground.commit()
        transaction.commit()

    def _may_chain(self) -> bool:
        """Say whether the next claim follows at once, on this connection as it is."""
        quiet = not (self.arrears.owed or self.granted or self.ground.moved)
        leases = self.admission is not None and self.admission.leases
        return quiet and not leases and not is_pooled(self.connection)

    def _blame(self, lost: TransactionLost) -> None:
        """Note that a lost transaction is the task's fault; not if the deadline was enforced."""
        if lost.claimed is not self.settled:  # else the attempt has been counted
            is_owed = self.arrears.blame(lost, self.ground.trouble())
            if is_owed and not lost.unrun:
                self._disown(lost.claimed)

    def _disown(self, claimed: Claimed) -> None:
        """Note a start that is owed: others may claim the row before it can be counted."""
        if self.admission is not None and not claimed.noted:
            self.admission.disown(claimed)

    def _find_culprit(self, batch: list[Claimed], error: BaseException) -> None:
        """Blame the only task of a batch for a failed COMMIT, or run each one alone to see."""
        if len(batch) == 1:
            ended = sqlstate(error) in NO_SAVEPOINT
            self._blame(
                TransactionLost(batch[0], TaskFailed(ENDED) if ended else error, ended=ended)
            )
            return
        self._run_alone(batch)

    def _run_alone(self, batch: list[Claimed]) -> None:
        """Run each task of a batch that was rolled back in a transaction of its own."""
        refused: Unsettled | None = None
        for claimed in batch:
            try:
                self._rerun(claimed.task_id)
            except Unsettled as error:
                refused = error
        if refused is not None:
            raise refused  # the lane takes a rest: that task is free, and uncounted


def _as_admitted(batch: list[Claimed], finished: list[Report]) -> list[Claimed]:
    """Return a batch with what is known of each task since it was claimed."""
    known = {claimed.task_id: claimed for claimed, *_ in finished}
    return [known.get(claimed.task_id, claimed) for claimed in batch]


def _is_invalid(error: BaseException) -> bool:
    return isinstance(error, DBAPIError) and error.connection_invalidated
