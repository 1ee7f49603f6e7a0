"""Enqueue tasks in your own unit of work: ``session.enqueue()`` on a SQLAlchemy Session.

    engine = create_engine("postgresql+psycopg://..")
    Session = sessionmaker(engine, class_=TaskSession)

    with Session.begin() as session:
        usr = Usr(name="Ann")
        session.add(usr)
        session.enqueue("SEND_EMAIL_WELCOME", lambda: {"usr_id": usr.usr_id})

The task is written by the same flush, in the same transaction, as the user. If that transaction is
rolled back, or the savepoint in which the task was enqueued, there is no task.

A `scoped_session` passes on only the methods that SQLAlchemy knows: call ``Session().enqueue(..)``
on it. The async face is in enqueue_async.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, overload

from sqlalchemy import event
from sqlalchemy.orm import Session

from pgtask_sa import direct, intake
from pgtask_sa.errors import EnqueueError
from pgtask_sa.insert_statements import NewTask
from pgtask_sa.inserts import insert_task
from pgtask_sa.ledger import Fill, Ledger
from pgtask_sa.mapping import Task, TaskMixin, task_table, unique_columns
from pgtask_sa.params import MAX_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from datetime import datetime
    from enum import Enum

    from sqlalchemy import Connection

    from pgtask_sa.handlers import TaskView
    from pgtask_sa.retry import Seconds

    P = TypeVar("P")
    TaskType: TypeAlias = str | Enum
    HandlerFor: TypeAlias = Callable[[Any, P], Any] | Callable[[Any, P, TaskView], Any]
    PlainHandler: TypeAlias = HandlerFor[dict[str, Any]]
    PlainParams: TypeAlias = Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None
    Conflict: TypeAlias = Literal["skip", "raise"]

    _Base = Session
else:
    _Base = object

BATCH_SIZE = 5000

__all__ = ["EnqueueMixin", "TaskSession", "insert_task"]


class EnqueueMixin(_Base):
    """Give a Session class of your own ``enqueue()``; put it before ``Session`` in the bases.

    Attributes:
        task_class: the mapped task class of types given as text; also a constructor keyword, so
            that ``sessionmaker(engine, class_=.., task_class=MyTask)`` works.
        enqueue_lock_timeout: seconds or timedelta to wait for another transaction, where an
            enqueue has to (see `enqueue`).
        max_params_bytes: upper limit for the params of a task, as JSON text.

    Example:
        >>> class MySession(EnqueueMixin, Session):
        ...     max_params_bytes = 10_000
        >>> session = MySession()
        >>> session.enqueue("SEND_EMAIL_WELCOME", {"usr_id": 1})
        <Task (new) SEND_EMAIL_WELCOME>
        >>> len(session.new)
        1
    """

    task_class: type[Any] = Task
    enqueue_lock_timeout: Seconds = 5.0
    max_params_bytes: int = MAX_BYTES

    def __init__(self, *args: Any, task_class: type[Any] | None = None, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self._ledger = Ledger()
        if task_class is not None:
            task_table(task_class)
            self.task_class = task_class

    def __init_subclass__(cls, **kw: Any) -> None:
        super().__init_subclass__(**kw)
        heirs = [base for base in cls.__mro__[1:] if _is_task_session(base)]
        if _is_task_session(cls) and not heirs:  # heirs inherit the listeners
            event.listen(cls, "after_begin", _after_begin)
            event.listen(cls, "before_commit", _before_commit)

    def flush(self, objects: Sequence[Any] | None = None) -> None:
        """Write what is pending, tasks included; see ``Session.flush()``.

        Raises:
            ParamsError: the params of a task were given as a callable, and what it returned
                cannot be kept. All that is pending stays pending.
        """
        flush = super().flush
        self._ledger.flush(self, partial(flush, objects) if objects else flush)

    @overload
    def enqueue(
        self,
        task: TaskType,
        params: PlainParams = None,
        *,
        run_at: datetime | None = None,
        delay: Seconds | None = None,
        priority: int = 0,
        coalesce: Literal[False] = False,
        on_conflict: None = None,
        task_class: type[Any] | None = None,
        **columns: Any,
    ) -> TaskMixin: ...

    @overload
    def enqueue(
        self,
        task: HandlerFor[P],
        params: P | Callable[[], P],
        *,
        run_at: datetime | None = None,
        delay: Seconds | None = None,
        priority: int = 0,
        coalesce: Literal[False] = False,
        on_conflict: None = None,
        task_class: type[Any] | None = None,
        **columns: Any,
    ) -> TaskMixin: ...

    @overload
    def enqueue(
        self,
        task: PlainHandler,
        params: None = None,
        *,
        run_at: datetime | None = None,
        delay: Seconds | None = None,
        priority: int = 0,
        coalesce: Literal[False] = False,
        on_conflict: None = None,
        task_class: type[Any] | None = None,
        **columns: Any,
    ) -> TaskMixin: ...

    @overload
    def enqueue(
        self,
        task: TaskType | PlainHandler,
        params: PlainParams = None,
        *,
        run_at: datetime | None = None,
        delay: Seconds | None = None,
        priority: int = 0,
        coalesce: bool = False,
        on_conflict: Conflict | None = None,
        task_class: type[Any] | None = None,
        **columns: Any,
    ) -> TaskMixin | None: ...

    @overload
    def enqueue(
        self,
        task: HandlerFor[P],
        params: P | Callable[[], P],
        *,
        run_at: datetime | None = None,
        delay: Seconds | None = None,
        priority: int = 0,
        coalesce: bool = False,
        on_conflict: Conflict | None = None,
        task_class: type[Any] | None = None,
        **columns: Any,
    ) -> TaskMixin | None: ...

    def enqueue(
        self,
        task: Any,
        params: Any = None,
        *,
        run_at: datetime | None = None,
        delay: Seconds | None = None,
        priority: int = 0,
        coalesce: bool = False,
        on_conflict: Conflict | None = None,
        task_class: type[Any] | None = None,
        **columns: Any,
    ) -> TaskMixin | None:
        """Enqueue a task in this session's transaction.

        A plain enqueue adds an object to the session; it is written by the next flush or by
        commit, and then leaves the session with its ``task_id``. With ``coalesce``, and on a table
        with a unique constraint over task_type and params, the row is written at the call.

        Everything is checked, and the params copied, at the call: after an error the session is as
        it was. Enqueue before commit: in an ``after_commit`` event it is too late.

        Args:
            task: a task type as text or enum member, or a handler function.
            params: a dict, or what the handler's ``params`` are annotated with; or a callable that
                returns it, which is evaluated when the session is flushed, when new rows have
                their primary keys. None stands for ``{}``. A callable's dict must not hold None.
            run_at: not before this moment; timezone-aware.
            delay: not before so many seconds (or a timedelta) from now, by the server's clock.
            priority: which tasks go first, whatever their types: lower before higher, -32768 to
                32767. It is no part of what makes tasks equal: one that waits keeps its own.
            coalesce: add nothing if an equal task, enqueued with ``coalesce`` too, waits already;
                that one is then held until this transaction ends, so it is sure to see what it
                wrote. A task that runs does not count. Equal means equal types, and params equal
                as ``jsonb``: 1 equals 1.0, the order of keys does not matter. When the task that
                waits is due makes no difference. Under REPEATABLE READ or stricter this
                transaction does not see what was committed after its start: two may wait then.
            on_conflict: on a table with the unique constraint only: ``"skip"`` (the default
                there) adds nothing if there is an equal task, ``"raise"`` raises.
            task_class: mapped task class; by default the handler's, else the session's.
            **columns: values of the columns that your task class adds.

        Returns:
            The task; or None if an equal one was there (``coalesce``, ``on_conflict="skip"``).

        Raises:
            ParamsError: params cannot be kept, or do not fit the handler's annotation.
            EnqueueError: any other argument is wrong, or the transaction has ended.
            DuplicateTask: ``on_conflict="raise"``; the session stays usable.
            EnqueueBlocked: an equal task is being run (unique table) or written (coalesce) by a
                transaction that did not end within ``enqueue_lock_timeout``; the session stays
                usable.

        Example:
            >>> from datetime import timedelta
            >>> session = TaskSession()
            >>> task = session.enqueue("REMIND", {"usr_id": 1}, delay=timedelta(hours=1))
            >>> task.params, task in session.new
            ({'usr_id': 1}, True)
        """
        intake.check_usable(self)
        target = intake.resolve(task, task_class, self.task_class, self.max_params_bytes)
        rule = intake.conflict_rule(target.task_class, on_conflict, coalesce=coalesce)
        is_plain, is_late = not coalesce and rule is None, callable(params)
        new = intake.new_task(
            target,
            target.dump(params) if is_plain and not is_late else {},
            run_at=run_at,
            delay=delay,
            priority=priority,
            columns=columns,
        )
        if not is_plain:
            return self._write_now(replace(new, params=self._params_now(params, target)), rule)
        return self._add(new, (lambda: target.evaluate(params)) if is_late else None)

    def _add(self, new: NewTask, fill: Fill | None = None) -> TaskMixin:
        task: TaskMixin = intake.make_object(new)
        self._ledger.add(self, task, fill)
        return task

    def _params_now(self, params: Any, target: intake.Target) -> dict[str, Any]:
        if not callable(params):
            return target.dump(params)
        self.flush()
        return target.evaluate(params)

    def _write_now(self, new: NewTask, rule: str | None) -> TaskMixin | None:
        self._ledger.autoflush(self)
        task: TaskMixin | None
        if rule is None:
            task = direct.write_coalesced(self, new, self.enqueue_lock_timeout)
        else:
            task = direct.write_unique(self, new, rule, self.enqueue_lock_timeout)
        self._ledger.note_write(self, new.task_class)
        return task

    @overload
    def enqueue_many(
        self,
        task: TaskType | PlainHandler,
        params_list: Iterable[Mapping[str, Any]],
        *,
        run_at: datetime | None = None,
        delay: Seconds | None = None,
        priority: int = 0,
        batch_size: int = BATCH_SIZE,
        task_class: type[Any] | None = None,
        **columns: Any,
    ) -> int: ...

    @overload
    def enqueue_many(
        self,
        task: HandlerFor[P],
        params_list: Iterable[P],
        *,
        run_at: datetime | None = None,
        delay: Seconds | None = None,
        priority: int = 0,
        batch_size: int = BATCH_SIZE,
        task_class: type[Any] | None = None,
        **columns: Any,
    ) -> int: ...

    def enqueue_many(
        self,
        task: Any,
        params_list: Iterable[Any],
        *,
        run_at: datetime | None = None,
        delay: Seconds | None = None,
        priority: int = 0,
        batch_size: int = BATCH_SIZE,
        task_class: type[Any] | None = None,
        **columns: Any,
    ) -> int:
        """Enqueue many tasks of one type at the call, with one statement per batch.

        The params of a list are all checked before the first row is written. Those of an iterator
        are checked batch by batch, so that memory is bounded by a batch; all batches are in this
        session's transaction. On a table with a unique constraint equal tasks are skipped, and
        the tasks are written in the order of their params, which keeps two such calls from
        deadlocking (those of an iterator only within a batch).

        Args:
            task: a task type as text or enum member, or a handler function.
            params_list: the params of each task; as for `enqueue`, but no callables.
            run_at: not before this moment, all of them; timezone-aware.
            delay: not before so many seconds (or a timedelta) from now.
            priority: as for `enqueue`, the same for all.
            batch_size: rows per statement, 1 or more.
            task_class: mapped task class; by default the handler's, else the session's.
            **columns: values of the columns that your task class adds, the same for all.

        Returns:
            The number of rows written.

        Raises:
            ParamsError: params cannot be kept; the path starts with ``params_list[i]``.
            EnqueueError: any other argument is wrong, or the transaction has ended.
            EnqueueBlocked: as for `enqueue`, on a table with a unique constraint.

        Example:
            >>> TaskSession().enqueue_many("A", [{"usr_id": 1}, {"usr_id": {2}}])
            Traceback (most recent call last):
            pgtask_sa.errors.ParamsError: params_list[1].usr_id: set is not plain JSON; \
annotate the handler's params with a dataclass, TypedDict or pydantic model to send set
        """
        intake.check_usable(self)
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise EnqueueError(f"batch_size must be an integer of 1 or more, got {batch_size!r}")
        target = intake.resolve(task, task_class, self.task_class, self.max_params_bytes)
        template = intake.new_task(
            target, {}, run_at=run_at, delay=delay, priority=priority, columns=columns
        )
        self._ledger.autoflush(self)
        written = direct.write_many(
            self,
            target,
            template,
            params_list,
            batch_size=batch_size,
            unique=unique_columns(target.task_class) is not None,
            timeout=self.enqueue_lock_timeout,
        )
        self._ledger.note_write(self, template.task_class)
        return written


def _is_task_session(kind: type[Any]) -> bool:
    return issubclass(kind, EnqueueMixin) and issubclass(kind, Session)


def _after_begin(session: EnqueueMixin, _transaction: Any, connection: Connection) -> None:
    session._ledger.note_begin(session, connection)  # noqa: SLF001


def _before_commit(session: EnqueueMixin) -> None:
    session._ledger.check_commit(session)  # noqa: SLF001


class TaskSession(EnqueueMixin, Session):
    """A SQLAlchemy Session with ``enqueue()``.

    Use it in place of ``Session``: ``sessionmaker(engine, class_=TaskSession)``.

    Example:
        >>> session = TaskSession()
        >>> session.enqueue("SEND_EMAIL_WELCOME", {"usr_id": 1})
        <Task (new) SEND_EMAIL_WELCOME>
    """
