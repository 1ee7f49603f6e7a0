"""What a session has enqueued and not yet written, and the flush that writes it.

A plain enqueue is a ``session.add()``: rollback, savepoints and the order of the flush are the
caller's. Two things are added to the flush. Params given as a callable are evaluated when the rows
they look at have been written. And a written task leaves the session: its row may be claimed and
deleted as soon as the caller commits, so the object must never be refreshed or updated again. One
thing is left out where nobody can tell: see single.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from sqlalchemy import ARRAY, BigInteger, any_, cast, event, func, inspect, select

from pgtask_sa import single
from pgtask_sa.errors import ConfigurationError, EnqueueError
from pgtask_sa.insert_statements import all_columns, fill_in, silence_wakeup
from pgtask_sa.intake import task_connection, task_engine, warn_of_autocommit
from pgtask_sa.mapping import TaskMixin, task_table

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine
    from sqlalchemy.orm import Session, SessionTransaction

Fill: TypeAlias = Callable[[], dict[str, Any]]


class Unevaluated(dict[str, Any]):
    """Stands in the params of a task whose callable has not been called yet.

    Only the session of the enqueue knows the callable. Taken to another one, the task would be
    written with these.
    """


@event.listens_for(TaskMixin, "before_insert", propagate=True)
def _look_at_task(_mapper: Any, connection: Connection, task: Any) -> None:
    warn_of_autocommit(connection)
    if isinstance(task.params, Unevaluated):
        raise EnqueueError(
            f"{task!r} was enqueued with a callable for its params, which only that session can "
            "evaluate: it was expunged from there, or its savepoint was rolled back. Enqueue it "
            "again, in the session that is to write it"
        )


class Ledger:
    """The tasks of one session that are on their way to the database.

    Attributes:
        tasks: enqueued objects that no flush of ours has seen written.
        deferred: of these, the ones whose params are still to be evaluated, and how.
    """

    __slots__ = (
        "_connections",
        "_flushing",
        "_late",
        "_root",
        "_task_engines",
        "deferred",
        "tasks",
    )

    def __init__(self) -> None:
        self.tasks: list[Any] = []
        self.deferred: dict[Any, Fill] = {}
        self._late: list[Any] = []
        self._flushing = False
        self._root: SessionTransaction | None = None
        self._connections: dict[Engine, Connection] = {}
        self._task_engines: set[Engine] = set()

    def add(self, session: Session, task: Any, fill: Fill | None = None) -> None:
        """Put a task into the session; ``fill`` gives its params when the session is flushed."""
        self.tasks.append(task)
        if self._flushing and session.twophase:
            _silence(session, type(task))
        if fill is not None:
            task.params = Unevaluated()
            self.deferred[task] = fill
        if fill is not None and self._flushing:
            self._late.append(
                task
            )  # enqueued by a listener or a callable: not yet, its params lack
        else:
            session.add(task)

    def flush(self, session: Session, flush: Callable[[], None]) -> None:
        """Write the session with its tasks; ``flush`` is the session's own.

        First all but the tasks that look at other new rows; then, their params filled in, those.
        """
        if self._flushing:
            flush()
            return
        if session.twophase:
            for task_class in {type(task) for task in self.tasks if task in session}:
                _silence(session, task_class)
        again = True
        while again:
            waiting = self._take_deferred(session) if self.deferred else []
            again = self._flush_once(session, flush, waiting)
            if self.tasks:
                self._release(session)

    def autoflush(self, session: Session) -> None:
        """Flush as the session would before any statement: if it wants to, and not in a flush."""
        if session.autoflush and not self._flushing:
            session.flush()

    def _take_deferred(self, session: Session) -> list[Any]:
        waiting = [task for task in self.deferred if task in session]
        for task in waiting:
            session.expunge(task)
        self.deferred = {task: self.deferred[task] for task in waiting}
        return waiting

    def _flush_once(self, session: Session, flush: Callable[[], None], waiting: list[Any]) -> bool:
        """Flush all but ``waiting``, fill those in; return whether there is more to write."""
        self._flushing = True
        try:
            self._write(session, flush)
            if waiting:
                _fill(session, {task: self.deferred[task] for task in waiting})
            for task in waiting:
                del self.deferred[task]
        finally:
            self._flushing = False
            again = [*waiting, *self._late]
            self._late.clear()
            # Also after an error, or commit() would write the rest and never know of these. A
            # flush that failed in the database has rolled back already; then they are forgotten.
            if again and session.is_active:
                session.add_all(again)
        return bool(again)

    def _write(self, session: Session, flush: Callable[[], None]) -> None:
        """Write what is in the session; a task that is all there is, without the unit of work."""
        task = self.tasks[-1] if self.tasks else None
        is_ready = task is not None and not isinstance(task.params, Unevaluated)
        if is_ready and single.is_all(session, task, flush) and single.write(session, task, flush):
            self.note_write(session, type(task))
        else:
            flush()

    def _release(self, session: Session) -> None:
        """Let go of the tasks that have been written, and of those that were rolled back."""
        mine = [(task, inspect(task)) for task in self.tasks if task in session]
        written = [(task, state) for task, state in mine if state.persistent]
        stale = [task for task, state in written if state.expired_attributes]
        if stale:
            _load_what_the_server_chose(session, stale)
        for task, _ in written:
            session.expunge(task)
        for task_class in {type(task) for task, _ in written}:
            self.note_write(session, task_class)
        self.tasks = [task for task, state in mine if state.pending]

    # -- one transaction, one engine --------------------------------------------------------------

    def note_begin(self, session: Session, connection: Connection) -> None:
        """Remember which engines take part in the session's transaction."""
        self._same_transaction(session)
        self._connections[connection.engine] = connection

    def note_write(self, session: Session, task_class: type[Any]) -> None:
        """Remember through which engine a task was written."""
        self._same_transaction(session)
        self._task_engines.add(task_engine(session, task_class))

    def check_commit(self, session: Session) -> None:
        """Refuse to commit tasks and other rows through two engines, which is two commits.

        Raises:
            ConfigurationError: the one could be kept and the other lost.
        """
        self._same_transaction(session)
        if session.twophase or not (self.tasks or self._task_engines):
            return
        session.flush()  # what is still to be written counts, too
        for engine, connection in self._connections.items():
            if self._task_engines - {engine} and _has_written(connection):
                raise ConfigurationError(
                    "tasks and other rows of this transaction are written through different "
                    f"engines ({engine.url!r} is one): one commit may fail after the other. Put "
                    "the task table into the database of those rows, or use twophase=True"
                )

    def _same_transaction(self, session: Session) -> None:
        root = session.get_transaction()
        if root is not self._root:
            self._root = root
            self._connections = {}
            self._task_engines = set()


def _silence(session: Session, task_class: type[Any]) -> None:
    # not session.execute(): that would start a flush
    task_connection(session, task_class).execute(silence_wakeup())


def _fill(session: Session, waiting: dict[Any, Fill]) -> None:
    with session.no_autoflush:  # a lazy load in a callable must not start a flush in a flush
        for task, fill in waiting.items():
            task.params = fill()


def _load_what_the_server_chose(session: Session, written: list[Any]) -> None:
    """Load what the insert did not return, such as the moment of a delayed task.

    Later is too late: the object is about to leave the session.
    """
    stale = {inspect(task).identity[0]: task for task in written}
    for task_class in {type(task) for task in stale.values()}:
        ids = [key for key, task in stale.items() if type(task) is task_class]
        c = task_table(task_class).c
        wanted = c.task_id == any_(cast(ids, ARRAY(BigInteger)))
        query = select(*all_columns(task_class)).where(wanted)
        # not session.execute(): a session may send a query to a replica, which has no such row
        for row in task_connection(session, task_class).execute(query).mappings():
            fill_in(stale[row[c.task_id]], row)


def _has_written(connection: Connection) -> bool:
    if connection.dialect.name != "postgresql":
        return True
    return bool(connection.scalar(select(func.pg_current_xact_id_if_assigned().is_not(None))))
