"""Code that a type checker must accept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from enum import Enum
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from typing_extensions import TypedDict, assert_type

from pgtask_sa import (
    AsyncTaskSession,
    EnqueueMixin,
    Task,
    TaskMixin,
    TaskRegistry,
    TaskSession,
    TaskView,
    insert_task,
)


@dataclass
class Welcome:
    usr_id: int


class Bye(TypedDict):
    usr_id: int


class Kind(Enum):
    WELCOME = "welcome"


class OwnSession(EnqueueMixin, Session):
    task_class = Task


tasks = TaskRegistry()


@tasks.handler("WELCOME", max_attempts=3, backoff=timedelta(seconds=5))
def welcome(session: Session, params: Welcome) -> None: ...


@tasks.handler("WELCOME_ASYNC")
async def welcome_async(session: AsyncSession, params: Welcome, task: TaskView) -> None: ...


@tasks.handler(Kind.WELCOME)
def bye(session: Session, params: Bye, task: TaskView) -> int:
    return task.attempt


@tasks.handler("PLAIN")
def plain(session: Session, params: dict[str, Any]) -> None: ...


@tasks.handler("VIEW")
def view(session: Session, params: Mapping[str, Any]) -> None: ...


def sync_face(maker: sessionmaker[TaskSession], own: OwnSession) -> None:
    with maker.begin() as session:
        assert_type(session.enqueue("A"), TaskMixin)
        assert_type(session.enqueue("A", {"a": 1}, delay=5, tenant_id=3), TaskMixin)
        assert_type(session.enqueue("A", coalesce=True), "TaskMixin | None")
        assert_type(session.enqueue("A", on_conflict="skip"), "TaskMixin | None")
        assert_type(session.enqueue(welcome, Welcome(1)), TaskMixin)
        assert_type(session.enqueue(welcome, Welcome(1), coalesce=True), "TaskMixin | None")
        session.enqueue(Kind.WELCOME, lambda: {"a": 1})
        session.enqueue(welcome, lambda: Welcome(1))
        session.enqueue(welcome_async, Welcome(1), run_at=datetime.now(timezone.utc))
        session.enqueue(bye, Bye(usr_id=1))
        session.enqueue(plain)
        session.enqueue(plain, {"a": 1})
        session.enqueue(plain, lambda: {"a": 1})
        session.enqueue(plain, coalesce=True)
        session.enqueue(view, {"a": 1})
        assert_type(session.enqueue_many("A", [{"a": 1}, {}]), int)
        session.enqueue_many(welcome, (Welcome(n) for n in range(3)), batch_size=2)
        session.enqueue_many(plain, [{"a": 1}])
    own.enqueue(welcome, Welcome(1))


async def async_face() -> None:
    engine = create_async_engine("postgresql+psycopg://")
    async with async_sessionmaker(engine, class_=AsyncTaskSession).begin() as session:
        assert_type(await session.enqueue("A"), TaskMixin)
        assert_type(await session.enqueue("A", coalesce=True), "TaskMixin | None")
        assert_type(await session.enqueue(welcome_async, Welcome(1)), TaskMixin)
        assert_type(await session.enqueue_many("A", [{"a": 1}]), int)


def core() -> None:
    select(func.now()).add_cte(insert_task("A", {"now": func.now()}).cte("task"))
    insert_task(welcome, Welcome(1)).returning(Task.task_id)


def handlers_stay_functions(session: Session) -> None:
    assert_type(bye(session, {"usr_id": 1}, TaskView(1, "A", {}, datetime.now(), 1, 1)), int)
