"""What a handler looks like: sync or async, its parameters, the annotation of its params.

Everything that can be known about a function before it runs is checked here, at registration; a
coroutine that is never awaited would otherwise look like success.
"""

from __future__ import annotations

import functools
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from pgtask_sa.codec import ParamsCodec, codec_for
from pgtask_sa.errors import HandlerError

AnyFunction: TypeAlias = Callable[..., Any]
Names: TypeAlias = Mapping[str, Any]

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_WANTED = 2  # session, params


@dataclass(frozen=True)
class Shape:
    """How a handler is to be called, and with which params.

    Attributes:
        is_async: calling it gives a coroutine.
        takes_task: it has a third parameter named ``task``.
        codec: between the annotation of its params and JSON.
    """

    is_async: bool
    takes_task: bool
    codec: ParamsCodec


def shape_of(function: Any, *, name: str, local_names: Names) -> Shape:
    """Examine a handler.

    Args:
        function: a function, method, `functools.partial` or object with ``__call__``.
        name: the task type, for messages.
        local_names: what postponed annotations may name besides the globals of the function.

    Raises:
        HandlerError: it cannot be a handler; the message says why.

    Example:
        >>> async def welcome(session, params, task): pass
        >>> shape = shape_of(welcome, name="A", local_names={})
        >>> shape.is_async, shape.takes_task, shape.codec.typed
        (True, True, False)
    """
    if not callable(function):
        raise HandlerError(f"handler of {name!r} must be callable, got {function!r}")
    if inspect.isclass(function):
        raise HandlerError(f"handler of {name!r} must be a function or an instance, not a class")
    _refuse_generators(function, name)
    signature = _signature(function, name)
    positional = _positional(signature, name)
    names = {**getattr(_body(function), "__globals__", {}), **local_names}
    is_async = _any_layer(function, inspect.iscoroutinefunction)
    _refuse_wrong_session(positional[0].annotation, names, is_async=is_async, name=name)
    takes_task = len(positional) > _WANTED and positional[_WANTED].name == "task"
    return Shape(is_async, takes_task, _codec(positional[1].annotation, names, name))


def identity(function: Any) -> tuple[int, int]:
    """Return what tells a function from others; a bound method is a new object at each access.

    Only meaningful while somebody holds the function.
    """
    if inspect.ismethod(function):
        return id(function.__self__), id(function.__func__)
    return id(function), 0


def _layers(function: Any) -> list[Any]:
    """Return the callables that hide in each other: partial, object, method, function."""
    layers = [function]
    while True:
        inner = _inside(layers[-1])
        if inner is None:
            return layers
        layers.append(inner)


def _inside(function: Any) -> Any:
    if isinstance(function, functools.partial):
        return function.func
    if isinstance(function, (staticmethod, classmethod)) or inspect.ismethod(function):
        return function.__func__
    if inspect.isroutine(function):
        return None
    return getattr(type(function), "__call__", None)  # noqa: B004 - the method itself is wanted


def _any_layer(function: Any, test: Callable[[Any], bool]) -> bool:
    return any(test(layer) for layer in _layers(function))


def _body(function: Any) -> Any:
    """Return the function in whose module the annotations were written."""
    return inspect.unwrap(_layers(function)[-1])


def _refuse_generators(function: Any, name: str) -> None:
    for test in (inspect.isgeneratorfunction, inspect.isasyncgenfunction):
        if _any_layer(function, test):
            raise HandlerError(f"handler of {name!r} must not be a generator: it would never run")


def _signature(function: Any, name: str) -> inspect.Signature:
    try:
        if sys.version_info >= (3, 14):
            import annotationlib  # noqa: PLC0415 - new in Python 3.14

            reference = annotationlib.Format.FORWARDREF
            return inspect.signature(function, annotation_format=reference)
        return inspect.signature(function)
    except ValueError as error:
        raise HandlerError(f"handler of {name!r}: {error}") from error


def _positional(signature: inspect.Signature, name: str) -> list[inspect.Parameter]:
    """Return the parameters that the worker can fill; refuse any other that has no default."""
    every = list(signature.parameters.values())
    positional = [p for p in every if p.kind in _POSITIONAL]
    third = positional[_WANTED : _WANTED + 1]
    fills = _WANTED + 1 if third and third[0].name == "task" else _WANTED
    required = [p for p in every if p.default is p.empty and p.kind not in _VARIADIC]
    if len(positional) >= fills and all(p in positional[:fills] for p in required):
        return positional
    raise HandlerError(
        f"handler of {name!r} must take (session, params) or (session, params, task), "
        f"got {_bare(signature)}"
    )


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _bare(signature: inspect.Signature) -> str:
    empty = inspect.Parameter.empty
    bare = [p.replace(annotation=empty) for p in signature.parameters.values()]
    return str(inspect.Signature(bare))


def _refuse_wrong_session(annotation: Any, names: Names, *, is_async: bool, name: str) -> None:
    try:
        kind = _resolve(annotation, names)
    except Exception:  # noqa: BLE001 - Session is often imported for type checkers only
        kind = {"Session": Session, "AsyncSession": AsyncSession}.get(_last_word(annotation))
    if not isinstance(kind, type):
        return
    if is_async and issubclass(kind, Session):
        problem = f"is async: it receives an AsyncSession, not a {kind.__name__}"
    elif not is_async and issubclass(kind, AsyncSession):
        problem = f"is not async: it receives a Session, not an {kind.__name__}"
    else:
        return
    raise HandlerError(f"handler of {name!r} {problem}")


def _last_word(annotation: Any) -> str:
    text = getattr(annotation, "__forward_arg__", annotation)
    return str(text).rsplit(".", 1)[-1]


def _codec(annotation: Any, names: Names, name: str) -> ParamsCodec:
    try:
        kind = _resolve(annotation, names)
    except Exception as error:
        raise HandlerError(
            f"handler of {name!r}: the annotation of its params, {annotation!r}, cannot be "
            f"resolved: {error}; the type must be importable where the handler is defined"
        ) from error
    try:
        return codec_for(kind, namespace=names)
    except HandlerError as error:
        raise HandlerError(f"handler of {name!r}: {error}") from error.__cause__


def _resolve(annotation: Any, names: Names) -> Any:
    """Evaluate one annotation; the others may name what only type checkers import."""

    def holder() -> None:
        """Carry the annotation: get_type_hints wants an object that has some."""

    if annotation is inspect.Parameter.empty:
        return annotation
    holder.__annotations__ = {"it": annotation}
    return typing.get_type_hints(holder, dict(names), include_extras=True)["it"]
