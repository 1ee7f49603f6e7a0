'''Run tasks inside a test's own transaction. Plain functions, and a pytest plugin.

A test that rolls its work back at the end cannot use a worker: a worker has a connection of its
own, and sees nothing of what the test has not committed. `drain` runs the waiting tasks on the
test's connection instead, one after the other, with the same code as the worker: each in a
savepoint, undone and put back if its handler fails. A complete test module::

    import os

    import pytest
    from sqlalchemy import create_engine

    from pgtask_sa import TaskRegistry, TaskSession
    from pgtask_sa.testing import waiting

    tasks = TaskRegistry()
    sent = []

    @tasks.handler("SEND_EMAIL_WELCOME")
    def send_email_welcome(session, params):
        sent.append(params["usr_id"])

    @pytest.fixture(scope="session")
    def engine():
        engine = create_engine(os.environ["DATABASE_URL"])
        yield engine
        engine.dispose()

    @pytest.fixture
    def session(engine):
        """Give a session whose commits are undone when the test ends."""
        with engine.connect() as connection:
            outer = connection.begin()
            with TaskSession(bind=connection, join_transaction_mode="create_savepoint") as session:
                yield session
            outer.rollback()

    def test_signup_sends_an_email(session, pgtask_drain):
        session.enqueue("SEND_EMAIL_WELCOME", {"usr_id": 1})
        session.commit()
        expected = ("SEND_EMAIL_WELCOME", {"usr_id": 1})
        assert [expected] == [(task.task_type, task.params) for task in waiting(session)]
        assert [(*expected, None)] == pgtask_drain(session, tasks)
        assert [1] == sent
        assert [] == waiting(session)

The fixture ``pgtask_drain`` comes with the installed package; it is `drain`. With an AsyncSession
use ``await drain_async(session, tasks)`` and ``await session.run_sync(waiting)``.
'''

# pytest imports this module in every run, wherever the package is installed: nothing heavy may be
# imported at the top, and nothing that a user would like to measure or to patch first.
from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from weakref import WeakSet
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
    from sqlalchemy.orm import Session, scoped_session

    from pgtask_sa.execution import Execution
    from pgtask_sa.handlers import Handler, TaskRegistry
    from pgtask_sa.retry import Verdict
    from pgtask_sa.settle import Claimed, Settler, Tables

    AnySession: TypeAlias = Session | scoped_session[Any]

DueBy: TypeAlias = "datetime | Literal['all'] | None"

ENDLESS = 1000  # tasks in one drain without a limit; a handler that enqueues itself stops here


class Ran(NamedTuple):
    """A task that was run: a tuple, so that a test can compare it with one.

    Attributes:
        task_type: the label of the type, as text.
        params: the JSON object as stored.
        error: what the handler raised, or None.

    Example:
        >>> Ran("A", {"usr_id": 1}, None) == ("A", {"usr_id": 1}, None)
        True
    """

    task_type: str
    params: dict[str, Any]
    error: BaseException | None


class Drained(list[Ran]):
    """What `drain` ran, in order: a list of `Ran`, with the questions that tests ask.

    Example:
        >>> ran = Drained([Ran("A", {}, None), Ran("B", {}, ValueError("x"))])
        >>> ran.task_types, ran.errors
        (['A', 'B'], [ValueError('x')])
    """

    @property
    def task_types(self) -> list[str]:
        """The types of the tasks, in the order in which they ran."""
        return [ran.task_type for ran in self]

    @property
    def errors(self) -> list[BaseException]:
        """The errors of those that failed."""
        return [ran.error for ran in self if ran.error is not None]


@dataclass(frozen=True)
class WaitingTask:
    """A row of the task table as a plain value.

    Attributes:
        task_id: the primary key.
        task_type: the label of the type, as text.
        params: the JSON object as stored.
        created_at: when it was enqueued (timezone-aware).
        run_at: not before this moment; None means now.
        attempts: how many attempts have failed.
        last_error: of the last failed attempt, or None.

    Example:
        >>> from datetime import datetime, timezone
        >>> WaitingTask(7, "A", {}, datetime(2026, 1, 1, tzinfo=timezone.utc)).attempts
        0
    """

    task_id: int
    task_type: str
    params: dict[str, Any]
    created_at: datetime
    run_at: datetime | None = None
    attempts: int = 0
    last_error: str | None = None


def waiting(session: AnySession, task_class: type[Any] | None = None) -> list[WaitingTask]:
    """List the tasks that wait, the oldest first, as this session's transaction sees them.

    Args:
        session: any Session; what is pending in it is flushed. Of an AsyncSession use
            ``await session.run_sync(waiting)``.
        task_class: the mapped task class; by default the session's, which is `Task` unless you
            chose another.

    Raises:
        ConfigurationError: ``task_class`` is not a mapped class with `TaskMixin`.

    Example:
        >>> def test_signup(session):  # doctest: +SKIP
        ...     signup(session, "ann@example.org")
        ...     expected = [("SEND_EMAIL_WELCOME", {"usr_id": 1})]
        ...     assert expected == [(task.task_type, task.params) for task in waiting(session)]
    """
    from pgtask_sa import statements
    from pgtask_sa.mapping import Task, task_table

    chosen = task_class or getattr(session, "task_class", Task)
    statement = statements.all_waiting(task_table(chosen))
    session.flush()
    rows = session.execute(statement, bind_arguments={"mapper": chosen}).mappings()
    return [WaitingTask(**row) for row in rows]


def drain(
    session: AnySession,
    tasks: TaskRegistry,
    *,
    limit: int | None = None,
    due_by: DueBy = None,
    raise_errors: bool = True,
    handler_session: Callable[..., Session] | None = None,
) -> Drained:
    """Run the tasks that wait, in this session's transaction, until none is left.

    Tasks that handlers enqueue are run, too. The order is that of the task numbers; planned tasks
    come after those that are ready, by their time. Nothing is committed: the caller does that, or
    rolls back. Afterwards the session reads its objects anew, and so sees what the handlers wrote.

    A task that fails is treated as by the worker: what its handler did is undone, and it is put
    back with the attempt counted, planned for later, or buried. The session stays usable.
    Not as in the worker: constraints that are checked at COMMIT only are not checked, and a time
    limit does not stop a plain function.

    Args:
        session: any Session; what is pending in it is flushed first.
        tasks: the registry with the handlers. Other task types are left waiting.
        limit: run at most so many. None runs all, but no more than 1,000: a handler that enqueues
            itself would never end.
        due_by: also run tasks that are planned up to this moment (timezone-aware), or ``"all"``:
            as if it were that late. With ``"all"`` a task that fails is tried until it is buried.
        raise_errors: raise the first error of a handler, after the task was put back. Not
            `Retry`, `Snooze` and `Discard`: a handler raises them on purpose. If False, errors
            are only collected, except those that are no ``Exception``, as ``pytest.fail()``.
        handler_session: a sessionmaker for the sessions handed to handlers, as the worker's
            ``session``; by default `TaskSession`.

    Returns:
        What ran: a list of ``(task_type, params, error)``.

    Raises:
        ConfigurationError: a task that waits has an async handler (use `drain_async`), or
            ``due_by`` is no moment.
        TaskFailed: a handler ended the transaction, or 1,000 tasks were run and more wait.
        Exception: whatever a handler raised.

    Example:
        >>> def test_the_email_is_sent(session):  # doctest: +SKIP
        ...     session.enqueue("SEND_EMAIL_WELCOME", {"usr_id": 1})
        ...     assert [("SEND_EMAIL_WELCOME", {"usr_id": 1}, None)] == drain(session, tasks)
    """
    makers = (handler_session, None)
    return _drain(session, _Drain(tasks, limit, due_by, raise_errors, makers))


async def drain_async(
    session: AsyncSession,
    tasks: TaskRegistry,
    *,
    limit: int | None = None,
    due_by: DueBy = None,
    raise_errors: bool = True,
    handler_session: Callable[..., Session] | None = None,
    handler_async_session: Callable[..., AsyncSession] | None = None,
) -> Drained:
    """Run the tasks that wait, in this AsyncSession's transaction; otherwise the same as `drain`.

    Async handlers are awaited on the running event loop; plain functions are called on it, too,
    with a Session on the same connection.

    Args:
        session: any AsyncSession, on any driver. The objects in it are refreshed afterwards,
            because an attribute cannot be loaded when it is used.
        tasks: as for `drain`.
        limit: as for `drain`.
        due_by: as for `drain`.
        raise_errors: as for `drain`.
        handler_session: as for `drain`, for plain functions.
        handler_async_session: likewise for async handlers; by default `AsyncTaskSession`.

    Returns:
        What ran: a list of ``(task_type, params, error)``.

    Raises:
        ConfigurationError: ``due_by`` is no moment.
        TaskFailed: as for `drain`.
        Exception: whatever a handler raised.

    Example:
        >>> async def test_the_email_is_sent(session):  # doctest: +SKIP
        ...     await session.enqueue("SEND_EMAIL_WELCOME", {"usr_id": 1})
        ...     await drain_async(session, tasks)
        ...     assert [] == await session.run_sync(waiting)
    """
    connection = await session.connection(bind_arguments={"mapper": tasks.task_class})
    makers = (handler_session, handler_async_session)
    plan = _Drain(tasks, limit, due_by, raise_errors, makers)
    return await session.run_sync(_drain, plan, connection)


try:
    import pytest
except ImportError:  # the functions serve other test frameworks, too
    pass
else:

    @pytest.fixture
    def pgtask_drain() -> Callable[..., Drained]:
        """Give `pgtask_sa.testing.drain`, which runs the waiting tasks in the test's session."""
        return drain


# -- inside ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Drain:
    """What the caller asked for."""

    tasks: TaskRegistry
    limit: int | None
    due_by: DueBy
    raise_errors: bool
    makers: tuple[Callable[..., Session] | None, Callable[..., AsyncSession] | None]

    def moment(self) -> Any:
        """Return the moment up to which tasks are due, as SQL; None is the server's clock."""
        from sqlalchemy import DateTime, literal, literal_column

        from pgtask_sa.errors import ConfigurationError

        kind = DateTime(timezone=True)
        if self.due_by is None:
            return None
        if self.due_by == "all":
            return literal_column("'infinity'::timestamptz", kind)
        if getattr(self.due_by, "tzinfo", None) is None:
            problem = f"a timezone-aware datetime or 'all', got {self.due_by!r}"
            raise ConfigurationError(f"due_by must be {problem}")
        return literal(self.due_by, kind)

    def must_raise(self, error: BaseException | None) -> bool:
        """Say whether the error of a handler ends the drain."""
        from pgtask_sa.retry import Discard, Retry, Snooze

        if error is None or isinstance(error, (Retry, Snooze, Discard)):
            return False
        return self.raise_errors or not isinstance(error, Exception)


def _drain(
    session: AnySession, plan: _Drain, async_connection: AsyncConnection | None = None
) -> Drained:
    session.flush()
    connection = session.connection(bind_arguments={"mapper": plan.tasks.task_class})
    guest = _Guest(connection, async_connection, plan)
    execution, recorder = _execution(connection, guest)
    try:
        _run_all(execution, guest, recorder.ran)
    finally:
        execution.ground.close()
        _see_changes(session, reload=async_connection is not None)
    return recorder.ran


def _run_all(execution: Execution, guest: _Guest, ran: Drained) -> None:
    from pgtask_sa.errors import TaskFailed

    plan = guest.plan
    while plan.limit is None or len(ran) < plan.limit:
        before = len(ran)
        if not execution.sweep():
            return
        if len(ran) == before:
            raise TaskFailed("the transaction was lost while a task ran") from guest.error
        error = ran[-1].error
        if error is not None and plan.must_raise(error):
            raise error
        if plan.limit is None and len(ran) >= ENDLESS and guest.next():
            raise TaskFailed(f"more than {ENDLESS:,} tasks: does a handler enqueue itself?")


def _see_changes(session: AnySession, *, reload: bool) -> None:
    """Let the session see what the handlers wrote to rows that it has loaded."""
    from sqlalchemy.exc import SQLAlchemyError

    session.expire_all()
    if not reload:
        return
    for instance in session.identity_map.values():
        try:
            session.refresh(instance)
        except SQLAlchemyError:  # the row is gone, which whoever uses the object will be told
            continue


def _execution(connection: Connection, guest: _Guest) -> tuple[Execution, _Recorder]:
    """Set up what the worker would, on a transaction that belongs to somebody else."""
    from pgtask_sa.events import Events
    from pgtask_sa.execution import Execution

    stand_in: Any = guest  # for a Claimer
    execution = Execution(
        connection,
        guest,
        stand_in,
        guest.plan.tasks.handlers,
        guest.tables,
        Events(),
        begin=connection.begin_nested,
    )
    recorder: Any = _Recorder(execution.settler)
    execution.settler = recorder
    _remember_errors(connection)
    _teach_asyncpg(execution)
    return execution, recorder


_WATCHED: WeakSet[Any] = WeakSet()  # engines


def _remember_errors(connection: Connection) -> None:
    """Note database errors on the test's engine, as on the worker's: a handler may swallow one."""
    from pgtask_sa.ground import watch_errors

    if connection.engine not in _WATCHED:
        _WATCHED.add(connection.engine)
        watch_errors(connection.engine)


def _teach_asyncpg(execution: Execution) -> None:
    """Ask the server for the state of the transaction, where the driver does not tell it."""
    driver: Any = execution.connection.connection.driver_connection
    if hasattr(driver, "info"):
        return
    ground: Any = execution.ground
    settler: Any = execution.settler.settler  # type: ignore[attr-defined]
    ground.status = lambda: _asyncpg_status(execution.connection)
    settler._speaks_utf8 = lambda: True  # noqa: SLF001 - asyncpg knows no other encoding


def _asyncpg_status(connection: Connection) -> Any:
    from psycopg.pq import TransactionStatus

    driver: Any = connection.connection.driver_connection
    if driver.is_closed():
        return TransactionStatus.UNKNOWN
    if not driver.is_in_transaction():
        return TransactionStatus.IDLE
    cursor = connection.connection.cursor()
    try:
        cursor.execute("select 1")
    except Exception:  # noqa: BLE001 - the only reason to fail is a transaction that failed before
        return TransactionStatus.INERROR
    finally:
        cursor.close()
    return TransactionStatus.INTRANS


class _Recorder:
    """Stands before the settler of an `Execution` and notes what it is told."""

    def __init__(self, settler: Settler) -> None:
        self.settler = settler
        self.ran = Drained()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.settler, name)

    def tell(
        self, claimed: Claimed, verdict: Verdict, error: BaseException | None, seconds: float
    ) -> None:
        """Note what ran, and pass it on."""
        self.ran.append(Ran(claimed.task_type, claimed.params(), error))
        self.settler.tell(claimed, verdict, error, seconds)


class _Guest:
    """What an `Execution` needs to work in a test's transaction.

    It stands in for the worker's Claimer, and takes the tasks in an order that does not change
    from one test run to the next; and for the Face, with handlers of both kinds.
    """

    options = SimpleNamespace(batch_size=1)

    def __init__(
        self, connection: Connection, async_connection: AsyncConnection | None, plan: _Drain
    ) -> None:
        from pgtask_sa.settle import Tables
        from pgtask_sa.statements import next_in_line

        self.connection = connection
        self.plan = plan
        self.tables: Tables = Tables(plan.tasks.task_class)
        self.error: BaseException | None = None
        self._next_in_line = next_in_line(self.tables.task, plan.moment())
        self._faces = _faces(connection, async_connection, plan)
        self._found: tuple[int, Handler] | None = None

    # -- in place of a Claimer

    def next(self) -> list[Any]:
        """Find the next task, and return the statement that claims it."""
        handlers = self.plan.tasks.handlers
        row = self.connection.execute(self._next_in_line, {"types": list(handlers)}).first()
        if row is None:
            return []
        handler = handlers[row.task_type]
        self._refuse_async(handler)
        self._found = row.task_id, handler
        return [self.tables.claim_by_id]

    def parameters(self) -> Mapping[str, Any]:
        """Return the parameters of that statement."""
        return {"task_id": self._found and self._found[0]}

    def rank(self, _task_type: str) -> int:
        """Sort nothing: there is one task at a time."""
        return 0

    def _refuse_async(self, handler: Handler) -> None:
        from pgtask_sa.errors import ConfigurationError

        if handler.is_async and True not in self._faces:
            problem = f"{handler!r} is async: use `await drain_async(..)` with an AsyncSession"
            raise ConfigurationError(problem)

    # -- in place of a Face

    def open(self) -> tuple[Session, Any]:
        """Open the session for the handler of the task that was found."""
        assert self._found is not None  # noqa: S101 - it was just claimed
        opened: tuple[Session, Any] = self._faces[self._found[1].is_async].open()
        return opened

    def call(self, handler: Handler, arguments: tuple[Any, ...], claimed: Claimed) -> None:
        """Call the handler, and remember its error in case that the transaction goes with it."""
        self.error = None
        try:
            self._faces[handler.is_async].call(handler, arguments, claimed)
        except BaseException as error:
            self.error = error
            raise


def _faces(
    connection: Connection, async_connection: AsyncConnection | None, plan: _Drain
) -> dict[bool, Any]:
    """Return the worker's faces, by whether they are for async handlers."""
    from sqlalchemy.ext.asyncio import async_sessionmaker
    from sqlalchemy.orm import sessionmaker

    from pgtask_sa.enqueue import TaskSession
    from pgtask_sa.enqueue_async import AsyncTaskSession
    from pgtask_sa.lanes import AsyncFace, SyncFace

    options = {"task_class": plan.tasks.task_class}
    make = plan.makers[0] or sessionmaker(class_=TaskSession, **options)
    lane: Any = SimpleNamespace(deadline=lambda *_: nullcontext())
    faces: dict[bool, Any] = {False: SyncFace(connection, make, lane)}
    if async_connection is not None:
        make_async = plan.makers[1] or async_sessionmaker(class_=AsyncTaskSession, **options)
        faces[True] = AsyncFace(async_connection, make_async)
    return faces
