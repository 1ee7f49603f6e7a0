"""Typed params: between what a handler's annotation says and the JSON that the table keeps.

Types are pydantic's business (dataclass, TypedDict, pydantic model, ..); params.py has the last
word about what may be stored. On Python before 3.12 pydantic wants ``TypedDict`` imported from
``typing_extensions``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pydantic
from pydantic_core import PydanticSerializationError, to_json

from pgtask_sa.errors import HandlerError, ParamsError
from pgtask_sa.failures import validation_problem
from pgtask_sa.params import MAX_BYTES, kind_of, path_of, snapshot


class ParamsCodec:
    """Params between a handler's own type and the JSON object that the table keeps.

    Made by `codec_for`. A codec without an adapter passes plain dicts through.

    Attributes:
        typed: whether there is a type to validate against.

    Example:
        >>> import dataclasses, uuid
        >>> @dataclasses.dataclass
        ... class Welcome:
        ...     usr_id: uuid.UUID
        >>> codec = codec_for(Welcome, namespace=globals())
        >>> raw = codec.dump(Welcome(uuid.UUID(int=7)))
        >>> raw
        {'usr_id': '00000000-0000-0000-0000-000000000007'}
        >>> codec.load(raw) == Welcome(uuid.UUID(int=7))
        True
    """

    def __init__(self, adapter: pydantic.TypeAdapter[Any] | None = None) -> None:
        self._adapter = adapter
        self.typed = adapter is not None

    def dump(
        self, value: Any, *, path: str = "params", max_bytes: int = MAX_BYTES
    ) -> dict[str, Any]:
        """Validate params and return the JSON object to store.

        Args:
            value: an instance of the type, or a mapping that validates as one; None is ``{}``.
            path: what to call the top in error messages.
            max_bytes: upper limit of the size, counted about as JSON text.

        Raises:
            ParamsError: the value does not fit the type, or what it holds cannot be kept.
        """
        if self._adapter is None:
            return snapshot(value, path=path, max_bytes=max_bytes)
        value = {} if value is None else value
        try:
            instance = self._adapter.validate_python(value)
            raw = snapshot(
                _json_form(self._adapter, instance, path), path=path, max_bytes=max_bytes
            )
            self._check_return(instance, raw, path)
        except pydantic.ValidationError as error:
            raise _params_error(error, path) from None
        except (PydanticSerializationError, RecursionError) as error:
            raise ParamsError(path, _without_value(error)) from None
        return raw

    def _check_return(self, instance: Any, raw: dict[str, Any], path: str) -> None:
        """Make sure that the worker can read it, and that nothing is lost on the way.

        An instance was not validated when it was made; aliases and excluded fields may lose
        something. Equal JSON forms will do, too: not every type can compare itself.
        """
        adapter: Any = self._adapter
        again = adapter.validate_json(to_json(raw))
        if again != instance and _json_form(adapter, again, path) != raw:
            raise ParamsError(path, f"{kind_of(instance)} would not come back from JSON as it is")

    def load(self, raw: Any, *, path: str = "params") -> Any:
        """Return what the handler receives for the JSON object that the table kept.

        Raises:
            ParamsError: the stored object does not fit the handler's type.
        """
        if self._adapter is None:
            return raw
        try:
            return self._adapter.validate_json(to_json(raw))
        except pydantic.ValidationError as error:
            raise _params_error(error, path) from None


def _json_form(adapter: pydantic.TypeAdapter[Any], instance: Any, path: str) -> dict[str, Any]:
    dump = partial(adapter.dump_python, instance, mode="json", by_alias=True, round_trip=True)
    try:
        raw = dump(warnings="error")
    except PydanticSerializationError:
        _find_misfit(adapter, lambda: dump(warnings="none"))
        raise
    if not isinstance(raw, dict):
        problem = f"must be a JSON object, {kind_of(instance)} becomes {kind_of(raw)}"
        raise ParamsError(path, problem)
    return raw


def _find_misfit(adapter: pydantic.TypeAdapter[Any], dump: Callable[[], Any]) -> None:
    """Raise the error that names the way to the value that does not fit, if there is one.

    The serializer, which objects to it, does not know the way. A validator does, of the JSON form;
    a strict one objects also to what would fit with a conversion.
    """
    try:
        form = to_json(dump())
    except (ValueError, RecursionError):  # PydanticSerializationError is a ValueError
        return
    for strict in (False, True):
        adapter.validate_json(form, strict=strict)


def _params_error(error: pydantic.ValidationError, path: str) -> ParamsError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return ParamsError(path_of(path, first["loc"]), validation_problem(first))


def _without_value(error: BaseException) -> str:
    """Render an error of the serializer, which tells the value: it must not get into a log."""
    return re.sub(r", input_value=.*?(, input_type=\w+)?\]", r"\1]", _first_line(error))


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return " ".join(line.strip() for line in lines[:3]) or type(error).__name__


PLAIN = ParamsCodec()
_PLAIN_ANNOTATIONS: tuple[Any, ...] = (
    inspect.Parameter.empty,
    None,
    Any,
    object,
    dict,
    Mapping,
    dict[str, Any],
    Mapping[str, Any],
    dict[str, object],
    Mapping[str, object],
)


def codec_for(annotation: Any, *, namespace: Mapping[str, Any] | None = None) -> ParamsCodec:
    """Return the codec for the annotation of a handler's ``params``.

    Args:
        annotation: none, ``dict``, ``Mapping`` or ``Any`` for plain JSON; else whatever pydantic
            understands and whose JSON form is an object.
        namespace: names that postponed annotations inside the type may use, besides those of its
            module.

    Raises:
        HandlerError: pydantic cannot handle the type, or its JSON form is no object.

    Example:
        >>> codec_for(dict).typed
        False
        >>> codec_for(list[int])
        Traceback (most recent call last):
        pgtask_sa.errors.HandlerError: params: list[int] becomes a JSON array, not an object
    """
    if any(annotation is plain or annotation == plain for plain in _PLAIN_ANNOTATIONS):
        return PLAIN
    try:
        adapter: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(annotation)
        adapter.rebuild(raise_errors=True, _types_namespace=dict(namespace or {}))
    except Exception as error:
        raise HandlerError(f"params: {_name(annotation)}: {_first_line(error)}") from error
    _refuse_unfit_schema(annotation, adapter)
    return ParamsCodec(adapter)


def _name(annotation: Any) -> str:
    generic = hasattr(annotation, "__origin__")
    return annotation.__name__ if isinstance(annotation, type) and not generic else str(annotation)


def _refuse_unfit_schema(annotation: Any, adapter: pydantic.TypeAdapter[Any]) -> None:
    try:
        schema = adapter.json_schema(mode="serialization")
    except Exception:  # noqa: BLE001 - some types have no schema; they are judged at enqueue
        return
    for kind in _top_types(schema, schema.get("$defs", {})):
        if kind != "object":
            problem = f"{_name(annotation)} becomes a JSON {kind}, not an object"
            raise HandlerError(f"params: {problem}")
    if "'writeOnly': True" in str(schema):
        problem = "has secret fields, whose JSON form is asterisks; keep secrets out of params"
        raise HandlerError(f"params: {_name(annotation)} {problem}")


def _top_types(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> list[str]:
    """Return the JSON types that a schema allows at its top, as far as it says so."""
    if "$ref" in schema:
        name = str(schema["$ref"]).rsplit("/", 1)[-1]
        return _top_types(definitions.get(name, {}), {})
    branches = schema.get("anyOf") or schema.get("oneOf") or []
    if branches:
        return [kind for branch in branches for kind in _top_types(branch, definitions)]
    kind = schema.get("type")
    return [kind] if isinstance(kind, str) else []
