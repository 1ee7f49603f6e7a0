"""The async face: the same names, awaited, on AsyncSession and classes of one's own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from faces import committed
from own_models import PlainJob, UniqueJob, Usr, create_all
from sqlalchemy import Engine, NullPool, inspect, make_url
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session

from pgtask_sa import (
    AsyncEnqueueMixin,
    AsyncTaskSession,
    ConfigurationError,
    DuplicateTask,
    EnqueueError,
    EnqueueMixin,
    ParamsError,
    TaskRegistry,
    TaskSession,
)

Work = Callable[[async_sessionmaker[Any]], Awaitable[Any]]


@pytest.fixture(params=["psycopg", "asyncpg"])
def run(request, engine: Engine, db_url: str) -> Callable[..., Any]:
    """Give a function that runs a coroutine function with a maker of async sessions."""
    create_all(engine)
    url = make_url(db_url).set(drivername=f"postgresql+{request.param}")

    def call(work: Work, class_: type[AsyncSession] = AsyncTaskSession, **options: Any) -> Any:
        async_engine = create_async_engine(url, poolclass=NullPool)
        maker = async_sessionmaker(async_engine, class_=class_, **options)
        return asyncio.run(work(maker))

    return call


def test_enqueue_in_an_async_transaction(run: Any, engine: Engine) -> None:
    """Plain, typed by a callable, delayed; detached and complete after the commit."""

    async def work(maker):
        async with maker.begin() as session:
            usr = Usr(name="Ann")
            session.add(usr)
            first = await session.enqueue("A", {"a": 1})
            second = await session.enqueue("B", lambda: {"usr_id": usr.usr_id}, delay=60)
        return first, second

    first, second = run(work)

    assert committed(engine, "task_id, params, run_at") == [
        (first.task_id, {"a": 1}, None),
        (second.task_id, {"usr_id": 1}, second.run_at),
    ]
    assert (inspect(first).detached, second.run_at is None) == (True, False)


def test_rollback_and_savepoint(run: Any, engine: Engine) -> None:
    """The caller's transaction decides here, too (B13)."""

    async def work(maker):
        async with maker() as session:
            await session.enqueue("GONE", lambda: {"a": 1})
            await session.flush()
            await session.rollback()
            await session.enqueue("KEPT")
            async with session.begin_nested() as savepoint:
                await session.enqueue("GONE")
                await session.enqueue("GONE", coalesce=True)
                await savepoint.rollback()
            await session.commit()

    run(work)

    assert committed(engine) == [("KEPT", {})]


def test_statements_at_the_call(run: Any, engine: Engine) -> None:
    """Coalesce, bulk and unique tables."""

    async def work(maker):
        async with maker.begin() as session:
            results = [await session.enqueue("A", coalesce=True) for _ in range(2)]
            results.append(await session.enqueue_many("B", ({"n": n} for n in range(7))))
            unique = {"task_class": UniqueJob}
            results.append(await session.enqueue("C", **unique))
            results.append(await session.enqueue("C", **unique))
            with pytest.raises(DuplicateTask):
                await session.enqueue("C", on_conflict="raise", **unique)
        return [getattr(result, "task_type", result) for result in results]

    assert run(work) == ["A", None, 7, "C", None]
    assert len(committed(engine)) == 8


def test_errors_come_at_the_call_and_from_commit(run: Any, engine: Engine) -> None:
    """Refusals leave the session usable; a missing key is refused by the commit."""

    async def work(maker):
        async with maker() as session:
            with pytest.raises(ParamsError):
                await session.enqueue("A", {"a": "\x00"})
            with pytest.raises(EnqueueError):
                await session.enqueue("A", nothing=1)
            await session.enqueue("GOOD")
            await session.commit()
            await session.enqueue("A", lambda: {"usr_id": Usr().usr_id})
            with pytest.raises(ParamsError, match=r"params.usr_id: None"):
                await session.commit()

    run(work)

    assert committed(engine) == [("GOOD", {})]


def test_the_task_class_of_the_maker(run: Any, engine: Engine) -> None:
    """async_sessionmaker passes the option on to the sync session."""

    async def work(maker):
        async with maker.begin() as session:
            await session.enqueue("A", tenant_id=7)

    run(work, task_class=PlainJob)

    assert committed(engine, "tenant", "plain_job") == [(7,)]


def test_a_session_class_of_ones_own(run: Any, engine: Engine) -> None:
    """With the mixin alone it works on a TaskSession; it may name another."""

    class OwnSync(EnqueueMixin, Session):
        task_class = PlainJob

    class Own(AsyncEnqueueMixin, AsyncSession):
        pass

    class Other(AsyncEnqueueMixin, AsyncSession):
        sync_session_class = OwnSync

    async def work(maker):
        async with maker.begin() as session:
            task = await session.enqueue("A")
            return type(session.sync_session).__name__, type(task).__name__

    assert run(work, class_=Own) == ("TaskSession", "Task")
    assert run(work, class_=Other) == ("OwnSync", "PlainJob")
    assert issubclass(Own.sync_session_class, TaskSession)


def test_a_sync_class_without_the_mixin_is_refused() -> None:
    """At construction, with both names."""

    class Own(AsyncEnqueueMixin, AsyncSession):
        sync_session_class = Session

    message = "sync_session_class of Own must have EnqueueMixin, Session has not"
    with pytest.raises(ConfigurationError, match=message):
        Own()


def test_async_scoped_sessions(run: Any, engine: Engine) -> None:
    """The registry hands out the session that can enqueue."""

    async def work(maker):
        scoped = async_scoped_session(maker, asyncio.current_task)
        await scoped().enqueue("A")
        await scoped.commit()
        await scoped.remove()

    run(work)

    assert committed(engine) == [("A", {})]


def test_handlers_by_function(run: Any, engine: Engine) -> None:
    """An async handler is a name for its type."""
    tasks = TaskRegistry()

    @tasks.handler("WELCOME")
    async def welcome(session, params): ...

    async def work(maker):
        async with maker.begin() as session:
            await session.enqueue(welcome, {"a": 1})
            await session.enqueue_many(welcome, [{"a": 2}])

    run(work)

    assert committed(engine) == [("WELCOME", {"a": 1}), ("WELCOME", {"a": 2})]
