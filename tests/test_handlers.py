"""What may be registered as a handler, and what is refused before a task is lost to it."""

from __future__ import annotations

import asyncio
import enum
import functools
import gc
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from own_models import EnumJob, Kind, PlainJob
from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from pgtask_sa import TaskRegistry, TaskView
from pgtask_sa.errors import ConfigurationError, EnqueueError, HandlerError
from pgtask_sa.handlers import handler_of

if TYPE_CHECKING:
    from decimal import Decimal  # what only a type checker imports

    from sqlalchemy.orm import Session as HiddenSession


def register(function: Any, **options: Any) -> Any:
    """Register a function in a fresh registry and return its handler."""
    tasks = TaskRegistry()
    assert tasks.handler("A", **options)(function) is function
    return tasks.handlers["A"]


class Mailer:
    def send(self, session, params): ...
    async def asend(self, session, params, task): ...

    @staticmethod
    def static(session, params): ...

    @classmethod
    async def klass(cls, session, params): ...


class CallableObject:
    def __call__(self, session, params): ...


class AsyncCallableObject:
    async def __call__(self, session, params, task): ...


async def with_mailer(mailer, session, params): ...
def with_option(session, params, *, dry=False): ...
def with_defaults(session, params=None, retries=3, *args, **kw): ...
def optional_task(session, params, task=None): ...


@functools.wraps(with_mailer)
def wrapped(*args, **kw): ...


@pytest.mark.parametrize(
    ("function", "is_async", "takes_task"),
    [
        (lambda session, params: None, False, False),
        (Mailer().send, False, False),
        (Mailer().asend, True, True),
        (Mailer.static, False, False),
        (Mailer.__dict__["static"], False, False),
        (Mailer.klass, True, False),
        (CallableObject(), False, False),
        (AsyncCallableObject(), True, True),
        (functools.partial(with_mailer, object()), True, False),
        (functools.partial(AsyncCallableObject(), task=1), True, False),
        (functools.partial(functools.partial(with_option, dry=True)), False, False),
        (with_defaults, False, False),
        (optional_task, False, True),
    ],
)
def test_anything_that_can_be_called_with_session_and_params(
    function: Any, is_async: bool, takes_task: bool
) -> None:
    """Functions, methods, partials and objects; async is seen through all of them (F16)."""
    handler = register(function)

    assert (handler.is_async, handler.takes_task) == (is_async, takes_task)


def generator(session, params):
    yield


async def async_generator(session, params):
    yield


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: None, r"must take \(session, params\) or \(session, params, task\), got \(\)"),
        (lambda session: None, r"got \(session\)"),
        (lambda session, params, other: None, r"got \(session, params, other\)"),
        (lambda session, params, task, more: None, r"got \(session, params, task, more\)"),
        (lambda session, params, *, must: None, r"got \(session, params, \*, must\)"),
        (lambda *args, **kw: None, r"got \(\*args, \*\*kw\)"),
        (Mailer.send, r"got \(self, session, params\)"),
        (generator, "must not be a generator"),
        (async_generator, "must not be a generator"),
        (functools.partial(generator), "must not be a generator"),
        (Mailer, "must be a function or an instance, not a class"),
        ("name", "must be callable, got 'name'"),
        (None, "must be callable, got None"),
    ],
)
def test_what_cannot_be_a_handler_is_refused(function: Any, message: str) -> None:
    """Wrong arity, generators and classes fail at registration."""
    with pytest.raises(HandlerError, match=message):
        register(function)


async def async_with_sync_session(session: Session, params): ...
def sync_with_async_session(session: AsyncSession, params): ...
async def async_with_hidden_session(session: HiddenSession, params): ...
async def good_async(session: AsyncSession, params): ...
def good_hidden(session: HiddenSession, params): ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (async_with_sync_session, "is async: it receives an AsyncSession, not a Session"),
        (sync_with_async_session, "is not async: it receives a Session, not an AsyncSession"),
    ],
)
def test_the_session_must_be_of_the_handlers_kind(function: Any, message: str) -> None:
    """An async function with a sync session is a mistake that the annotation shows (F16)."""
    with pytest.raises(HandlerError, match=message):
        register(function)


def test_a_session_imported_for_type_checkers_only_is_no_obstacle() -> None:
    """Postponed annotations that only a type checker can resolve are common for sessions."""
    assert register(good_hidden).is_async is False
    assert register(good_async).is_async is True


def unresolvable(session, params: Decimal): ...
def not_an_object(session, params: list[int]): ...


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (unresolvable, "handler of 'A': the annotation of its params, 'Decimal', cannot be resol"),
        (not_an_object, "handler of 'A': params: .* becomes a JSON array, not an object"),
    ],
)
def test_params_annotations_must_be_usable(function: Any, message: str) -> None:
    """The annotation decides what the handler receives, so it must be understood."""
    with pytest.raises(HandlerError, match=message):
        register(function)


def test_classes_defined_in_a_function_are_found() -> None:
    """Postponed annotations may name classes that only the enclosing function knows."""

    class Inner(BaseModel):
        name: str

    @dataclass
    class Local:
        inner: Inner

    tasks = TaskRegistry()

    @tasks.handler("A")
    def handle(session: Session, params: Local) -> None: ...

    handler = tasks.handlers["A"]
    value = Local(Inner(name="Ann"))

    assert handler.load_params(handler.codec.dump(value)) == value


@pytest.mark.parametrize("annotation", [dict, Mapping, Any, dict[str, Any], "Mapping[str, Any]"])
def test_plain_annotations_mean_plain_json(annotation: Any) -> None:
    """Without a type of one's own, params are what the table keeps."""

    def handle(session, params): ...

    handle.__annotations__["params"] = annotation

    assert register(handle).codec.typed is False


@pytest.mark.parametrize("task_type", ["", None, 7, b"A", enum.Enum("E", {"A": 1}).A])
def test_task_types_are_text(task_type: Any) -> None:
    """An empty type, or one without text, fails before the function is even seen."""
    with pytest.raises(HandlerError):
        TaskRegistry().handler(task_type)


def test_a_type_has_one_handler() -> None:
    """A duplicate is refused, by text and by enum member alike."""
    tasks = TaskRegistry(task_class=EnumJob)
    tasks.handler(Kind.WELCOME)(with_option)

    with pytest.raises(HandlerError, match="task type 'welcome-mail' has a handler already"):
        tasks.handler("welcome-mail")(with_defaults)
    with pytest.raises(HandlerError, match="is not a label of kind"):
        tasks.handler("unknown")
    assert list(tasks) == ["welcome-mail"]


def test_two_decorators_made_before_either_is_used_cannot_share_a_type() -> None:
    """The check is made again when the function arrives."""
    tasks = TaskRegistry()
    first, second = tasks.handler("A"), tasks.handler("A")
    first(with_option)

    with pytest.raises(HandlerError, match="has a handler already"):
        second(with_defaults)


@pytest.mark.parametrize(
    "options",
    [{"max_attempts": 0}, {"max_attempts": True}, {"backoff": -1}, {"timeout": 0}, {"timeout": -1}],
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    """Bad options fail at registration."""
    with pytest.raises(ConfigurationError):
        register(with_option, **options)


@pytest.mark.parametrize("timeout", [0, 0.0, -1, timedelta(0)])
def test_a_timeout_of_nothing_is_refused(timeout: Any) -> None:
    """The message quotes what was given."""
    with pytest.raises(ConfigurationError) as caught:
        register(with_option, timeout=timeout)

    problem = "over 0" if timeout != -1 else "0 or more"
    assert f"timeout must be {problem} seconds, got {timeout!r}" == str(caught.value)


def test_a_decorator_without_its_type_says_what_to_write() -> None:
    """It is given the function in place of the type."""
    with pytest.raises(HandlerError) as caught:
        TaskRegistry().handler(with_option)  # type: ignore[arg-type]

    assert 'write @tasks.handler("NAME") above with_option: its task type is missing' == str(
        caught.value
    )


def test_options_are_kept() -> None:
    """Attempts, backoff and timeout are what the worker will read."""
    handler = register(with_option, max_attempts=3, backoff=5, timeout=timedelta(minutes=1))

    assert (handler.policy.max_attempts, handler.policy.backoff(1), handler.timeout) == (3, 5, 60)


def test_a_registry_is_a_collection_of_types() -> None:
    """Length, membership and order; what is no type is simply not in it; never false."""
    tasks = TaskRegistry()
    assert bool(tasks)
    tasks.handler("A")(with_option)
    tasks.handler("B")(with_option)

    assert (list(tasks), len(tasks), "A" in tasks, "C" in tasks, None in tasks) == (
        ["A", "B"], 2, True, False, False,
    )  # fmt: skip
    with pytest.raises(TypeError):
        tasks.handlers["C"] = tasks.handlers["A"]  # type: ignore[index]


def test_including_another_registry() -> None:
    """All handlers or none; twice is harmless; the other task class is refused."""
    tasks, mails, clash = TaskRegistry(), TaskRegistry(), TaskRegistry()
    mails.handler("MAIL")(with_option)
    clash.handler("OTHER")(with_defaults)
    clash.handler("MAIL")(with_defaults)
    tasks.include(mails)
    tasks.include(mails)

    with pytest.raises(HandlerError, match="'MAIL' has a handler already"):
        tasks.include(clash)
    with pytest.raises(HandlerError, match="registry of PlainJob into one of Task"):
        tasks.include(TaskRegistry(task_class=PlainJob))
    assert dict(tasks.handlers) == dict(mails.handlers)


def test_functions_are_found_again() -> None:
    """By identity, bound methods included, which are a new object at each access."""
    tasks = TaskRegistry()
    mailer, other = Mailer(), Mailer()
    tasks.handler("A")(mailer.send)

    assert tasks.find(mailer.send).label == "A"
    assert handler_of(mailer.send) == (tasks, tasks.handlers["A"])
    with pytest.raises(EnqueueError, match=r"Mailer.send is not registered as a handler"):
        handler_of(other.send)


def test_a_function_of_several_types_is_ambiguous() -> None:
    """The error names the types to choose from."""
    tasks = TaskRegistry()
    tasks.handler("A")(with_option)
    tasks.handler("B")(with_option)

    for find in (tasks.find, handler_of):
        with pytest.raises(EnqueueError, match="handles several task types: name one of A, B"):
            find(with_option)


def test_an_included_handler_is_not_ambiguous_and_outlives_its_first_registry() -> None:
    """It is one handler in two registries; the first may be forgotten."""

    def handle(session, params): ...

    def register_and_forget() -> TaskRegistry:
        mails = TaskRegistry()
        mails.handler("MAIL")(handle)
        tasks.include(mails)
        assert handler_of(handle)[0] is mails
        return mails

    tasks = TaskRegistry()
    handler = register_and_forget().handlers["MAIL"]
    gc.collect()

    assert handler_of(handle) == (tasks, handler)


def test_a_forgotten_registry_takes_its_handlers_along() -> None:
    """Registries made in passing, as in tests, leave nothing behind."""

    def handle(session, params): ...

    TaskRegistry().handler("A")(handle)
    gc.collect()

    with pytest.raises(EnqueueError, match="is not registered"):
        handler_of(handle)


def test_the_registry_wants_a_mapped_task_class() -> None:
    """A class without the mixin fails at once."""
    with pytest.raises(ConfigurationError, match="is not a mapped class with TaskMixin"):
        TaskRegistry(task_class=dict)


def test_handlers_stay_ordinary_functions() -> None:
    """The decorator returns the function itself, callable in a unit test."""
    tasks = TaskRegistry()

    @tasks.handler("A")
    async def double(session, params):
        return params["n"] * 2

    assert asyncio.run(double(None, {"n": 4})) == 8


def test_the_task_view_cannot_be_changed() -> None:
    """It is a value: no attribute, no item, and the caller's dict is not shared."""
    raw = {"a": 1}
    view = TaskView(1, "A", raw, datetime(2026, 1, 1), 2, 2, {"tenant_id": 3})
    raw["a"] = 2

    with pytest.raises(AttributeError):
        view.attempt = 5  # type: ignore[misc]
    with pytest.raises(TypeError):
        view.columns["tenant_id"] = 4  # type: ignore[index]
    assert (view.params["a"], view.columns["tenant_id"], view.is_last_attempt) == (1, 3, True)
