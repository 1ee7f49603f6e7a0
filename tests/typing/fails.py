"""Code that a type checker must refuse, line by line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from pgtask_sa import AsyncTaskSession, TaskRegistry, TaskSession, TaskView


@dataclass
class Welcome:
    usr_id: int


@dataclass
class Bye:
    usr_id: int


tasks = TaskRegistry()


@tasks.handler("WELCOME")
def welcome(session: Session, params: Welcome) -> None: ...


@tasks.handler("BYE")
async def bye(session: Any, params: Bye, task: TaskView) -> None: ...


def sync_face(session: TaskSession) -> None:
    session.enqueue(welcome, Bye(1))  # expect-error
    session.enqueue(bye, Welcome(1))  # expect-error
    session.enqueue(welcome)  # expect-error
    session.enqueue(welcome, {"usr_id": "x"})  # expect-error
    session.enqueue(welcome, lambda: Bye(1))  # expect-error
    session.enqueue(welcome, Welcome("1"))  # expect-error
    session.enqueue("A", 3)  # expect-error
    session.enqueue("A", [1])  # expect-error
    session.enqueue(3)  # expect-error
    session.enqueue("A", delay="1")  # expect-error
    session.enqueue("A", run_at="now")  # expect-error
    session.enqueue("A", on_conflict="update")  # expect-error
    print(session.enqueue("A", coalesce=True).task_id)  # expect-error
    session.enqueue_many(welcome, [Bye(1)])  # expect-error
    session.enqueue_many("A", [1])  # expect-error
    session.enqueue_many("A", [{}], batch_size="1")  # expect-error


async def async_face(session: AsyncTaskSession) -> None:
    await session.enqueue(welcome, Bye(1))  # expect-error
    await session.enqueue(bye, Welcome(1))  # expect-error
    print((await session.enqueue("A", coalesce=True)).task_id)  # expect-error
    print(session.enqueue("A").task_id)  # expect-error


def registration() -> None:
    tasks.handler(3)(welcome)  # expect-error
    tasks.handler("A", max_attempts="3")(welcome)  # expect-error
    tasks.handler("A")(welcome)(None, Bye(1))  # expect-error


def view(task: TaskView) -> None:
    task.attempt = 3  # expect-error
    task.params["a"] = 3  # expect-error
