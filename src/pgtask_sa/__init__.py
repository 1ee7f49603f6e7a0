"""A task table in Postgres, as a SQLAlchemy ORM extension.

Enqueue in your own transaction; a worker hands each task to its handler inside one transaction,
and the task is gone exactly when that transaction commits.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgtask_sa.enqueue import EnqueueMixin, TaskSession
    from pgtask_sa.enqueue_async import AsyncEnqueueMixin, AsyncTaskSession
    from pgtask_sa.errors import (
        ConfigurationError,
        DuplicateTask,
        EnqueueBlocked,
        EnqueueError,
        HandlerError,
        LeaseLost,
        ParamsError,
        TaskError,
        TaskFailed,
        WorkerDied,
    )
    from pgtask_sa.handlers import TaskRegistry, TaskView
    from pgtask_sa.inserts import insert_task
    from pgtask_sa.mapping import DeadTask, DeadTaskMixin, Task, TaskMixin
    from pgtask_sa.retry import Backoff, Discard, Retry, Snooze
    from pgtask_sa.worker import Worker

# Where each public name lives. Modules are loaded when a name is asked for: pytest loads our plugin
# in every run, and a web process never needs the worker.
_HOMES = {
    "enqueue": ("EnqueueMixin", "TaskSession"),
    "enqueue_async": ("AsyncEnqueueMixin", "AsyncTaskSession"),
    "errors": (
        "ConfigurationError",
        "DuplicateTask",
        "EnqueueBlocked",
        "EnqueueError",
        "HandlerError",
        "LeaseLost",
        "ParamsError",
        "TaskError",
        "TaskFailed",
        "WorkerDied",
    ),
    "handlers": ("TaskRegistry", "TaskView"),
    "inserts": ("insert_task",),
    "mapping": ("DeadTask", "DeadTaskMixin", "Task", "TaskMixin"),
    "retry": ("Backoff", "Discard", "Retry", "Snooze"),
    "worker": ("Worker",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

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
    "LeaseLost",
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
    "WorkerDied",
    "insert_task",
]


def __getattr__(name: str) -> Any:
    """Load the module of a public name, once."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"pgtask_sa.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
