"""The async face of enqueue.py: ``await session.enqueue()`` on AsyncSession.

    engine = create_async_engine("postgresql+psycopg://..")
    Session = async_sessionmaker(engine, class_=AsyncTaskSession)

    async with Session.begin() as session:
        usr = Usr(name="Ann")
        session.add(usr)
        await session.enqueue("SEND_EMAIL_WELCOME", lambda: {"usr_id": usr.usr_id})

There is one engine, and it is sync: an `AsyncSession` is a facade over a sync Session, and so is
this. ``run_sync`` takes a call to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from sqlalchemy.ext.asyncio import AsyncSession

from pgtask_sa.enqueue import BATCH_SIZE, EnqueueMixin, TaskSession
from pgtask_sa.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from datetime import datetime

    from sqlalchemy.orm import Session

    from pgtask_sa.enqueue import Conflict, HandlerFor, P, PlainHandler, PlainParams, TaskType
    from pgtask_sa.mapping import TaskMixin
    from pgtask_sa.retry import Seconds

    _Base = AsyncSession
else:
    _Base = object


class AsyncEnqueueMixin(_Base):
    """Give an AsyncSession class of your own ``enqueue()``; put it before ``AsyncSession``.

    Its ``sync_session_class`` must be a Session class with `EnqueueMixin`; by default it is
    `TaskSession`. The options of `EnqueueMixin` are those of the sync session.

    Raises:
        ConfigurationError: the sync session class has no `EnqueueMixin`.

    Example:
        >>> from sqlalchemy.orm import Session
        >>> class MySession(AsyncEnqueueMixin, AsyncSession): pass
        >>> MySession(sync_session_class=Session)
        Traceback (most recent call last):
        pgtask_sa.errors.ConfigurationError: sync_session_class of MySession must have \
EnqueueMixin, Session has not
    """

    sync_session_class: type[Session] = TaskSession

    def __init__(self, *args: Any, **kw: Any) -> None:
        kind = kw.get("sync_session_class") or self.sync_session_class
        if not issubclass(kind, EnqueueMixin):
            raise ConfigurationError(
                f"sync_session_class of {type(self).__name__} must have EnqueueMixin, "
                f"{kind.__name__} has not"
            )
        super().__init__(*args, **kw)

    @overload
    async def enqueue(
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
    async def enqueue(
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
    async def enqueue(
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
    async def enqueue(
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
    async def enqueue(
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

    async def enqueue(self, task: Any, params: Any = None, **options: Any) -> TaskMixin | None:
        """Enqueue a task in this session's transaction; the same as `EnqueueMixin.enqueue`.

        Example:
            >>> import asyncio
            >>> async def main():
            ...     async with AsyncTaskSession() as session:
            ...         return await session.enqueue("SEND_EMAIL_WELCOME", {"usr_id": 1})
            >>> asyncio.run(main())
            <Task (new) SEND_EMAIL_WELCOME>
        """
        return await self.run_sync(_enqueue, task, params, options)

    @overload
    async def enqueue_many(
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
    async def enqueue_many(
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

    async def enqueue_many(self, task: Any, params_list: Iterable[Any], **options: Any) -> int:
        """Enqueue many tasks at the call; the same as `EnqueueMixin.enqueue_many`."""
        return await self.run_sync(_enqueue_many, task, params_list, options)


def _enqueue(session: Any, task: Any, params: Any, options: dict[str, Any]) -> TaskMixin | None:
    task_object: TaskMixin | None = session.enqueue(task, params, **options)
    return task_object


def _enqueue_many(session: Any, task: Any, params_list: Any, options: dict[str, Any]) -> int:
    written: int = session.enqueue_many(task, params_list, **options)
    return written


class AsyncTaskSession(AsyncEnqueueMixin, AsyncSession):
    """An AsyncSession with ``enqueue()``: ``async_sessionmaker(engine, class_=AsyncTaskSession)``.

    Example:
        >>> AsyncTaskSession().sync_session
        <pgtask_sa.enqueue.TaskSession object at 0x...>
    """
