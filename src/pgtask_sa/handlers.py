"""Handlers: which function runs which task type, with which params and which patience.

    tasks = TaskRegistry()

    @tasks.handler("SEND_EMAIL_WELCOME", max_attempts=5)
    def send_email_welcome(session: Session, params: Welcome) -> None:
        ...

A registry is all that a worker needs to know: ``python -m pgtask_sa.worker package.module:tasks``.
"""

from __future__ import annotations

import enum
import sys
import threading
import weakref
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, get_args

from pgtask_sa.errors import ConfigurationError, EnqueueError, HandlerError
from pgtask_sa.labels import task_label
from pgtask_sa.mapping import Task, task_table
from pgtask_sa.retry import (
    DEFAULT_MAX_ATTEMPTS,
    Backoff,
    BackoffLike,
    Policy,
    Seconds,
    as_backoff,
    as_seconds,
)
from pgtask_sa.signatures import AnyFunction, identity, shape_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from enum import Enum

    from pgtask_sa.codec import ParamsCodec

F = TypeVar("F", bound=AnyFunction)
Mode: TypeAlias = Literal["transactional", "leased"]

# How long a handler of the transactional mode may hold its transaction, unless it says otherwise.
DEFAULT_TIMEOUT = timedelta(minutes=5)
DEFAULT_LEASE = timedelta(minutes=1)
SHORTEST_LEASE = 1.0  # seconds; it is renewed three times in its length


@dataclass(frozen=True, slots=True)
class TaskView:
    """The row of the task that runs, as a handler sees it: a plain value, not an ORM object.

    A handler receives it when its third parameter is named ``task``.

    Attributes:
        task_id: the primary key; the same in every attempt.
        task_type: the label of the type, as text.
        params: the JSON object as stored; read-only.
        created_at: when the task was enqueued (timezone-aware).
        attempt: number of this attempt, 1 for the first.
        max_attempts: after this many failed attempts the task is buried.
        columns: the columns that your own task class adds, by attribute name; read-only.

    Example:
        >>> task = TaskView(7, "A", {"usr_id": 1}, datetime(2026, 1, 1), 1, 10)
        >>> task.is_last_attempt, task.params["usr_id"]
        (False, 1)
        >>> task.params["usr_id"] = 2
        Traceback (most recent call last):
        TypeError: 'mappingproxy' object does not support item assignment
    """

    task_id: int
    task_type: str
    params: Mapping[str, Any]
    created_at: datetime
    attempt: int
    max_attempts: int
    columns: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("params", "columns"):
            view = MappingProxyType(dict(getattr(self, name)))
            object.__setattr__(self, name, view)

    @property
    def is_last_attempt(self) -> bool:
        """Whether a failure of this attempt buries the task."""
        return self.attempt >= self.max_attempts


@dataclass(frozen=True, eq=False)
class Handler:
    """A registered function and all that is known about it.

    Attributes:
        task_type: the type as given at registration, text or enum member.
        label: the text by which the database knows the type.
        function: what to call, as given.
        is_async: calling it gives a coroutine.
        takes_task: it wants a `TaskView` as third argument.
        codec: between the annotation of its params and JSON.
        policy: how often and how soon it is tried again.
        timeout: seconds that one attempt may take; None is no limit.
        lease: seconds of a lease, in the leased mode; None in the transactional one.
        task_class: the mapped class of its registry.

    Example:
        >>> tasks = TaskRegistry()
        >>> @tasks.handler("A", timeout=30)
        ... def a(session, params): pass
        >>> tasks.handlers["A"]
        <Handler 'A': a>
    """

    task_type: str | Enum
    label: str
    function: AnyFunction
    is_async: bool
    takes_task: bool
    codec: ParamsCodec
    policy: Policy
    timeout: float | None
    lease: float | None
    task_class: type[Any]

    def load_params(self, raw: Mapping[str, Any]) -> Any:
        """Return the params to hand over for a stored JSON object; see `ParamsCodec.load`."""
        return self.codec.load(raw)

    def __repr__(self) -> str:
        name = getattr(self.function, "__qualname__", None) or repr(self.function)
        return f"<Handler {self.label!r}: {name}>"


class TaskRegistry:
    """The handlers of an application, by task type.

    Args:
        task_class: the mapped task class whose types these are.

    Raises:
        ConfigurationError: ``task_class`` is not a mapped class with `TaskMixin`.

    Example:
        >>> tasks = TaskRegistry()
        >>> @tasks.handler("SEND_EMAIL_WELCOME")
        ... def send_email_welcome(session, params):
        ...     print(params["usr_id"])
        >>> "SEND_EMAIL_WELCOME" in tasks, list(tasks)
        (True, ['SEND_EMAIL_WELCOME'])
    """

    def __init__(self, *, task_class: type[Any] = Task) -> None:
        task_table(task_class)
        self.task_class = task_class
        self._handlers: dict[str, Handler] = {}
        self._lock = threading.Lock()

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers by the label of their type; read-only, and always current."""
        return MappingProxyType(self._handlers)

    def __contains__(self, task_type: object) -> bool:
        try:
            return task_label(self.task_class, task_type) in self._handlers
        except EnqueueError:
            return False

    def __iter__(self) -> Iterator[str]:
        return iter(self._handlers)

    def __len__(self) -> int:
        return len(self._handlers)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<TaskRegistry {', '.join(self._handlers) or '(empty)'}>"

    def handler(
        self,
        task_type: str | Enum,
        *,
        max_attempts: int = DEFAULT_MAX_ATTEMPTS,
        backoff: BackoffLike = Backoff(),  # noqa: B008 - frozen
        timeout: Seconds | Literal["default"] | None = "default",
        mode: Mode = "transactional",
        lease: Seconds | None = None,
    ) -> Callable[[F], F]:
        """Register a function as the handler of a task type; a decorator.

        The function takes ``(session, params)`` or ``(session, params, task)``, and may be async.
        What its ``params`` are annotated with decides what may be enqueued and what it receives.

        Args:
            task_type: text, or a member of an enum.
            max_attempts: after this many failed attempts a task is buried.
            backoff: a `Backoff`, a fixed delay (seconds or timedelta), or a function from the
                number of the failed attempt to a delay.
            timeout: seconds or timedelta that one attempt may take, over 0; None is no limit. By
                default 5 minutes in the transactional mode, and no limit in the leased one. A
                single transactional handler without a limit means that the server
                (``transaction_timeout``) watches over none of the worker's.
            mode: ``transactional`` runs it in the transaction of the claim: for seconds.
                ``leased`` runs it with no transaction open: for minutes and hours. The session
                begins a transaction when it is used, and may commit as often as it likes.
            lease: seconds or timedelta, at least one second, after which the task of a worker that
                was killed, frozen or cut off runs elsewhere; only for the leased mode (1 minute).

        Returns:
            A decorator that returns the function as it is.

        Raises:
            HandlerError: the type is no text or taken, or the function cannot be a handler.
            ConfigurationError: an option is out of range.

        Example:
            >>> from dataclasses import dataclass
            >>> tasks = TaskRegistry()
            >>> @tasks.handler("A", max_attempts=3, backoff=60, timeout=30)
            ... async def a(session, params, task): pass
            >>> tasks.handlers["A"].policy.max_attempts
            3
        """
        label = self._free_label(task_type)
        policy = Policy(max_attempts, as_backoff(backoff))
        length = _lease(mode, lease)
        limit = _limit(mode, timeout)

        def register(function: F) -> F:
            # classes defined inside a function are known only to the frame that decorates
            names = sys._getframe(1).f_locals  # noqa: SLF001
            shape = shape_of(function, name=label, local_names=names)
            handler = Handler(
                task_type=task_type,
                label=label,
                function=function,
                is_async=shape.is_async,
                takes_task=shape.takes_task,
                codec=shape.codec,
                policy=policy,
                timeout=limit,
                lease=length,
                task_class=self.task_class,
            )
            self._add(handler)
            return function

        return register

    def include(self, other: TaskRegistry) -> None:
        """Take over all handlers of another registry, all or none.

        Raises:
            HandlerError: a type is taken by another function, or the other registry is for another
                task class.

        Example:
            >>> mails, tasks = TaskRegistry(), TaskRegistry()
            >>> @mails.handler("SEND_EMAIL_WELCOME")
            ... def send_email_welcome(session, params): pass
            >>> tasks.include(mails)
            >>> tasks
            <TaskRegistry SEND_EMAIL_WELCOME>
        """
        if other.task_class is not self.task_class:
            names = f"{other.task_class.__name__} into one of {self.task_class.__name__}"
            raise HandlerError(f"cannot include a registry of {names}")
        for label, handler in other.handlers.items():
            if self._handlers.get(label, handler) is not handler:
                raise HandlerError(f"task type {label!r} has a handler already")
        for label, handler in other.handlers.items():
            self._handlers[label] = handler
            _link(self, handler)

    def find(self, function: AnyFunction) -> Handler:
        """Return the handler that a function is registered as, in this registry.

        Raises:
            EnqueueError: it is registered for no type, or for several.

        Example:
            >>> tasks = TaskRegistry()
            >>> tasks.find(print)
            Traceback (most recent call last):
            pgtask_sa.errors.EnqueueError: print is not registered as a handler
        """
        key = identity(function)
        return _only([h for h in self._handlers.values() if identity(h.function) == key], function)

    def _free_label(self, task_type: str | Enum) -> str:
        if callable(task_type) and not isinstance(task_type, enum.Enum):
            name = _name(task_type)
            raise HandlerError(
                f'write @tasks.handler("NAME") above {name}: its task type is missing'
            )
        try:
            label = task_label(self.task_class, task_type)
        except EnqueueError as error:
            raise HandlerError(str(error)) from None
        self._refuse_taken(label)
        return label

    def _refuse_taken(self, label: str) -> None:
        if label in self._handlers:
            raise HandlerError(f"task type {label!r} has a handler already")

    def _add(self, handler: Handler) -> None:
        with self._lock:
            self._refuse_taken(handler.label)
            self._handlers[handler.label] = handler
        _link(self, handler)


# Function -> its registrations. By identity, so that the function itself stays untouched, and weak,
# so that a registry can be forgotten. An identity cannot be taken over by another function while
# its entry is alive: the registry in it holds the function.
_LINKS: dict[tuple[int, int], list[tuple[weakref.ref[TaskRegistry], Handler]]] = {}


def _link(registry: TaskRegistry, handler: Handler) -> None:
    key = identity(handler.function)
    _LINKS[key] = [*_alive(key), (weakref.ref(registry), handler)]
    weakref.finalize(registry, _prune, key)


def _alive(key: tuple[int, int]) -> list[tuple[weakref.ref[TaskRegistry], Handler]]:
    return [(ref, handler) for ref, handler in _LINKS.get(key, ()) if ref() is not None]


def _prune(key: tuple[int, int]) -> None:
    if not _alive(key):
        _LINKS.pop(key, None)


def handler_of(function: AnyFunction) -> tuple[TaskRegistry, Handler]:
    """Return the registry and the handler that a function was registered as, anywhere.

    Raises:
        EnqueueError: it is registered for no type, or for several.

    Example:
        >>> tasks = TaskRegistry()
        >>> @tasks.handler("A")
        ... def a(session, params): pass
        >>> registry, handler = handler_of(a)
        >>> registry is tasks, handler
        (True, <Handler 'A': a>)
    """
    links = _alive(identity(function))
    handler = _only([handler for _, handler in links], function)
    registry = links[0][0]()
    if registry is None:
        raise EnqueueError(f"{_name(function)} is not registered as a handler")
    return registry, handler


def _only(handlers: list[Handler], function: AnyFunction) -> Handler:
    found = list(dict.fromkeys(handlers))  # an included handler is in several registries
    if len(found) == 1:
        return found[0]
    if not found:
        raise EnqueueError(f"{_name(function)} is not registered as a handler")
    labels = ", ".join(handler.label for handler in found)
    raise EnqueueError(f"{_name(function)} handles several task types: name one of {labels}")


def _name(function: AnyFunction) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _limit(mode: Mode, timeout: Seconds | Literal["default"] | None) -> float | None:
    if timeout == "default":
        return DEFAULT_TIMEOUT.total_seconds() if mode == "transactional" else None
    if timeout is None:
        return None
    if isinstance(timeout, str):
        raise ConfigurationError(f"timeout must be seconds or a timedelta, got {timeout!r}")
    seconds = as_seconds(timeout, "timeout")
    if not seconds:
        raise ConfigurationError(f"timeout must be over 0 seconds, got {timeout!r}")
    return seconds


def _lease(mode: Mode, lease: Seconds | None) -> float | None:
    if mode not in get_args(Mode):
        raise ConfigurationError(f"mode must be one of {get_args(Mode)}, got {mode!r}")
    if mode == "transactional":
        if lease is not None:
            raise ConfigurationError('a lease is for mode="leased" only')
        return None
    seconds = as_seconds(DEFAULT_LEASE if lease is None else lease, "lease")
    if seconds < SHORTEST_LEASE:
        raise ConfigurationError(f"lease must be {SHORTEST_LEASE:g} or more seconds, got {lease!r}")
    return seconds
