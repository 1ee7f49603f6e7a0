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

# pytest imports this module in every run, wherever the package is installed. So nothing heavy is
# imported at the top, only in the functions.
# ruff: noqa: PLC0415
from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from sqlalchemy import Column, ColumnElement
    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session, scoped_session

    from pgtask_sa.guest import Guest
    from pgtask_sa.handlers import TaskRegistry

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
        priority: lower goes first; 0 is normal.
        columns: the columns that your own task class adds, by attribute name.

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
    priority: int = 0
    columns: Mapping[str, Any] = field(default_factory=dict)


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
    from pgtask_sa import reports
    from pgtask_sa.mapping import Task, own_columns, task_table

    chosen: Any = task_class or getattr(session, "task_class", Task)
    statement = reports.all_waiting(task_table(chosen))
    session.flush()
    rows = session.execute(statement, bind_arguments={"mapper": chosen}).mappings()
    return [_as_waiting(dict(row), own_columns(chosen)) for row in rows]


def _as_waiting(row: dict[str, Any], own: Mapping[str, Column[Any]]) -> WaitingTask:
    columns = {key: row.pop(column.name) for key, column in own.items()}
    return WaitingTask(**row, columns=columns)


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
    from pgtask_sa.guest import Guest

    session.flush()
    connection = session.connection(bind_arguments={"mapper": tasks.task_class})
    try:
        with Guest(connection, tasks, _moment(due_by), make_session=handler_session) as guest:
            return _run_all(guest, limit=limit, raise_errors=raise_errors)
    finally:
        session.expire_all()  # handlers may have changed what it has loaded


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
    from pgtask_sa.guest import Guest

    await session.flush()
    connection = await session.connection(bind_arguments={"mapper": tasks.task_class})

    def run(sync_session: Session) -> Drained:
        guest = Guest(
            sync_session.connection(bind_arguments={"mapper": tasks.task_class}),
            tasks,
            _moment(due_by),
            make_session=handler_session,
            async_connection=connection,
            make_async_session=handler_async_session,
        )
        try:
            with guest:
                return _run_all(guest, limit=limit, raise_errors=raise_errors)
        finally:
            _refresh(sync_session)

    return await session.run_sync(run)


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


def _moment(due_by: DueBy) -> ColumnElement[Any] | None:
    """Return the moment up to which tasks are due, as SQL; None is the server's clock."""
    from sqlalchemy import DateTime, literal, literal_column

    from pgtask_sa.errors import ConfigurationError

    kind = DateTime(timezone=True)
    if due_by is None:
        return None
    if due_by == "all":
        return literal_column("'infinity'::timestamptz", kind)
    if getattr(due_by, "tzinfo", None) is None:
        problem = f"a timezone-aware datetime or 'all', got {due_by!r}"
        raise ConfigurationError(f"due_by must be {problem}")
    return literal(due_by, kind)


def _run_all(guest: Guest, *, limit: int | None, raise_errors: bool) -> Drained:
    from pgtask_sa.errors import TaskFailed

    ran = Drained()
    while limit is None or len(ran) < limit:
        if limit is None and len(ran) >= ENDLESS and not guest.is_done():
            raise TaskFailed(f"more than {ENDLESS:,} tasks: does a handler enqueue itself?")
        finished = guest.step()
        if finished is None:
            break
        claimed, error = finished
        if error is not None and _must_raise(error, raise_errors=raise_errors):
            raise error
        ran.append(Ran(claimed.task_type, claimed.params(), error))
    return ran


def _must_raise(error: BaseException, *, raise_errors: bool) -> bool:
    from pgtask_sa.retry import Discard, Retry, Snooze

    if isinstance(error, (Retry, Snooze, Discard)):
        return False
    return raise_errors or not isinstance(error, Exception)


def _refresh(session: Session) -> None:
    """Load anew what handlers may have changed: async code cannot do it when it is used."""
    from sqlalchemy.exc import SQLAlchemyError

    session.expire_all()
    for instance in session.identity_map.values():
        try:
            session.refresh(instance)
        except SQLAlchemyError:
            continue
