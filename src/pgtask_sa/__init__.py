"""A task table in Postgres, as a SQLAlchemy ORM extension.

Enqueue in your own transaction; a worker hands each task to its handler inside one transaction,
and the task is gone exactly when that transaction commits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pgtask_sa.enqueue import EnqueueMixin, TaskSession
from pgtask_sa.enqueue_async import AsyncEnqueueMixin, AsyncTaskSession
from pgtask_sa.errors import (
    ConfigurationError,
    DuplicateTask,
    EnqueueBlocked,
    EnqueueError,
    HandlerError,
    ParamsError,
    TaskError,
    TaskFailed,
)
from pgtask_sa.handlers import TaskRegistry, TaskView
from pgtask_sa.inserts import insert_task
from pgtask_sa.mapping import DeadTask, DeadTaskMixin, Task, TaskMixin
from pgtask_sa.retry import Backoff, Discard, Retry, Snooze

if TYPE_CHECKING:
    from pgtask_sa.worker import Worker

__all__ = [
    "AsyncEnqueueMixin",
    "AsyncTaskSession",
    "Backoff",
    "ConfigurationError",
    "DeadTask",
    "DeadTaskMixin",
    "Discard",
    "DuplicateTask",
    "EnqueueBlocked",
    "EnqueueError",
    "EnqueueMixin",
    "HandlerError",
    "ParamsError",
    "Retry",
    "Snooze",
    "Task",
    "TaskError",
    "TaskFailed",
    "TaskMixin",
    "TaskRegistry",
    "TaskSession",
    "TaskView",
    "Worker",
    "insert_task",
]


def __getattr__(name: str) -> Any:
    """Load the worker when it is asked for: a web process never needs it."""
    if name == "Worker":
        from pgtask_sa.worker import Worker  # noqa: PLC0415

        return Worker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
