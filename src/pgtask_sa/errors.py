"""Every error that this library raises, in one tree under `TaskError`."""

from __future__ import annotations


class TaskError(Exception):
    """Base of all errors raised by this library.

    Example:
        >>> from pgtask_sa import TaskRegistry
        >>> try:
        ...     TaskRegistry().handler("")
        ... except TaskError as error:
        ...     print(error)
        task_type must be a non-empty string, got ''
    """


class ConfigurationError(TaskError, ValueError):
    """An option, a mapping or a session is set up in a way that cannot work.

    Example:
        >>> from pgtask_sa.retry import Backoff
        >>> Backoff(base=-1)
        Traceback (most recent call last):
        pgtask_sa.errors.ConfigurationError: backoff base must be 0 or more seconds, got -1
    """


class HandlerError(TaskError, TypeError):
    """A handler cannot be registered: its signature or its task type is wrong.

    Example:
        >>> from pgtask_sa import TaskRegistry
        >>> TaskRegistry().handler("A")(lambda session: None)
        Traceback (most recent call last):
        pgtask_sa.errors.HandlerError: handler of 'A' must take (session, params) \
or (session, params, task), got (session)
    """


class EnqueueError(TaskError, ValueError):
    """An enqueue was refused at the call, before anything was written.

    Example:
        >>> from pgtask_sa import TaskSession
        >>> TaskSession().enqueue("")
        Traceback (most recent call last):
        pgtask_sa.errors.EnqueueError: task_type must be a non-empty string, got ''
    """


class ParamsError(EnqueueError):
    """Params hold a value that JSON or Postgres cannot keep.

    Attributes:
        path: where the bad value is, such as ``params.user.tags[2]``.

    Example:
        >>> from pgtask_sa import TaskSession
        >>> TaskSession().enqueue("A", {"user": {"name": "a\\x00b"}})
        Traceback (most recent call last):
        pgtask_sa.errors.ParamsError: params.user.name: text with a NUL character
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
        self.problem = problem

    def __reduce__(self) -> tuple[type[ParamsError], tuple[str, str]]:
        return type(self), (self.path, self.problem)


class DuplicateTask(EnqueueError):  # noqa: N818 - the field says "duplicate task"
    """An equal task is waiting already, and the caller asked to be told so.

    Raised by ``session.enqueue(.., on_conflict="raise")`` on a table with a unique constraint.
    The session stays usable: the insert ran in a savepoint.

    Example:
        >>> issubclass(DuplicateTask, TaskError)
        True
    """


class EnqueueBlocked(TaskError):  # noqa: N818
    """An equal task is being run or written elsewhere, and waiting for its end took too long.

    Only a table with a unique constraint can block an enqueue; the wait is bounded so that a web
    request never hangs for as long as a handler runs.

    Example:
        >>> issubclass(EnqueueBlocked, TaskError)
        True
    """


class TaskFailed(TaskError):  # noqa: N818
    """What the worker records when a handler broke a rule instead of raising an error.

    Example:
        >>> raise TaskFailed("the handler ended the worker's transaction")
        Traceback (most recent call last):
        pgtask_sa.errors.TaskFailed: the handler ended the worker's transaction
    """


class WorkerDied(TaskError):  # noqa: N818
    """What is recorded when a worker died, or was cut off, while it ran the task.

    Example:
        >>> raise WorkerDied("the worker died while it ran this task")
        Traceback (most recent call last):
        pgtask_sa.errors.WorkerDied: the worker died while it ran this task
    """


class LeaseLost(TaskError):  # noqa: N818
    """A handler in leased mode wants to commit, but its task is not its own any more.

    The lease ran out, or the task was cancelled. Nothing of the transaction was written.

    Example:
        >>> issubclass(LeaseLost, TaskError)
        True
    """
