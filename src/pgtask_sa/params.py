"""What may travel in a task's params: plain JSON that Postgres gives back unchanged.

Everything is checked and copied at the call of ``enqueue()``. A value that JSON or Postgres cannot
hold raises `ParamsError` there, with its path, while the caller's session is still usable; found
at flush it would take the caller's whole unit of work down.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from enum import Enum
from typing import Any, TypeAlias

from pgtask_sa.errors import ParamsError

MAX_BYTES = 1_000_000
MAX_DEPTH = 200
# Python refuses to read integers of more than 4300 digits; 14,000 bits are 4215 digits.
MAX_INT_BITS = 14_000
# Below this, repr() writes a float with a point, and jsonb keeps the point.
FIRST_FLOAT_WITHOUT_POINT = 1e16

_TYPED_HINT = "annotate the handler's params with a dataclass, TypedDict or pydantic model to send"

# The way to a value: its parent's way and its key; None is the top. Spelled out only in an error.
Trail: TypeAlias = "tuple[Trail, str | int] | None"


def path_of(top: str, keys: tuple[str | int, ...]) -> str:
    """Spell the way to a value.

    Example:
        >>> path_of("params", ("user", "tags", 2, "a b"))
        "params.user.tags[2]['a b']"
    """
    return top + "".join(_step(key) for key in keys)


def _step(key: str | int) -> str:
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


def snapshot(value: Any, *, path: str = "params", max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Check params and copy them, deeply, in one walk.

    What is returned equals what Postgres will give back from ``jsonb``; what would not is refused.
    Equal means Python's ``==``: ``1.0`` may come back for ``1e0``, and keys in another order.

    Args:
        value: a mapping with text keys that holds dict, list, str, int, float, bool and None;
            None stands for ``{}``.
        path: what to call the top in error messages.
        max_bytes: upper limit of the size, counted about as JSON text.

    Raises:
        ParamsError: a value cannot be kept; the message starts with its path.

    Example:
        >>> snapshot({"usr_id": 1, "tags": ["a", None]})
        {'usr_id': 1, 'tags': ['a', None]}
        >>> snapshot({"user": {"tags": ["a", "b", float("nan")]}})
        Traceback (most recent call last):
        pgtask_sa.errors.ParamsError: params.user.tags[2]: nan is not JSON
    """
    if value is None:
        return {}
    if type(value) is not dict:
        if not isinstance(value, Mapping):
            raise ParamsError(path, f"must be a dict, got {kind_of(value)}")
        value = dict(value)
    return _Walk(path, max_bytes).copy_dict(value, None, 1)


def snapshot_value(value: Any, keys: tuple[str | int, ...], *, max_bytes: int = MAX_BYTES) -> Any:
    """Check and copy one plain value inside params; ``keys`` lead to it.

    Raises:
        ParamsError: a value cannot be kept; the message starts with its path.

    Example:
        >>> snapshot_value([1, float("inf")], ("user", "scores"))
        Traceback (most recent call last):
        pgtask_sa.errors.ParamsError: params.user.scores[1]: inf is not JSON
    """
    trail: Trail = None
    for key in keys[:-1]:
        trail = (trail, key)
    return _Walk("params", max_bytes).copy(value, trail, keys[-1], 1)


def snapshot_hstore(
    value: Any, *, path: str = "params", max_bytes: int = MAX_BYTES
) -> dict[str, str | None]:
    """Check and copy params for an ``HSTORE`` column: text keys, values of text or None.

    Raises:
        ParamsError: a value is not text, or text that Postgres cannot keep.

    Example:
        >>> snapshot_hstore({"name": "Ann", "nick": None})
        {'name': 'Ann', 'nick': None}
        >>> snapshot_hstore({"usr_id": 1})
        Traceback (most recent call last):
        pgtask_sa.errors.ParamsError: params.usr_id: hstore keeps text or None, got int
    """
    copied = snapshot(value, path=path, max_bytes=max_bytes)
    for key, item in copied.items():
        if item is not None and not isinstance(item, str):
            problem = f"hstore keeps text or None, got {kind_of(item)}"
            raise ParamsError(path_of(path, (key,)), problem)
    return copied


def hstore_texts(value: Mapping[str, Any], *, path: str = "params") -> dict[str, str | None]:
    """Turn the scalars of a typed params' JSON form into text, which its type can read back.

    Raises:
        ParamsError: a value is a list or an object.

    Example:
        >>> hstore_texts({"usr_id": 1, "vip": True, "nick": None})
        {'usr_id': '1', 'vip': 'true', 'nick': None}
    """
    nested = [key for key, item in value.items() if isinstance(item, (dict, list))]
    if nested:
        raise ParamsError(path_of(path, (nested[0],)), "hstore cannot keep nested values")
    return {key: _scalar_text(item) for key, item in value.items()}


def _scalar_text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return str(value).lower() if isinstance(value, bool) else repr(value)


class _Walk:
    """One pass over one value; counts down the bytes that are left."""

    __slots__ = ("left", "limit", "top")

    def __init__(self, top: str, limit: int) -> None:
        self.top = top
        self.limit = limit
        self.left = limit

    def copy(self, value: Any, parent: Trail, key: str | int, depth: int) -> Any:
        """Copy one value; the way to it is ``parent`` and ``key``."""
        kind = type(value)
        self.left -= 5  # about what punctuation, a short number or a literal takes
        if kind is str:
            return self.text(value, parent, key)
        if value is None or kind is bool:
            return value
        if kind is int:
            return self.integer(value, parent, key)
        if kind is float:
            return self.number(value, parent, key)
        return self.container(value, (parent, key), depth)

    def container(self, value: Any, trail: Trail, depth: int) -> Any:
        """Copy a dict or a list, or an heir of a plain type."""
        if self.left < 0:
            raise self.error(trail, f"over the limit of {self.limit:,} bytes for params")
        if depth >= MAX_DEPTH:
            # a structure that holds itself ends here, too
            raise self.error(None, f"nested deeper than {MAX_DEPTH} levels, or contains itself")
        if isinstance(value, dict):
            return self.copy_dict(value, trail, depth + 1)
        if isinstance(value, list):
            return [self.copy(item, trail, i, depth + 1) for i, item in enumerate(value)]
        return self.heir(value, trail, depth)

    def heir(self, value: Any, trail: Trail, depth: int) -> Any:
        """Copy a value whose class inherits from str, int or float, as that plain type."""
        if not isinstance(value, Enum):
            for plain in (str, int, float):
                if isinstance(value, plain):
                    parent, key = trail if trail is not None else (None, 0)
                    return self.copy(_plain(plain, value), parent, key, depth)
        raise self.error(
            trail, f"{kind_of(value)} is not plain JSON; {_TYPED_HINT} {kind_of(value)}"
        )

    def copy_dict(self, value: dict[Any, Any], trail: Trail, depth: int) -> dict[str, Any]:
        """Copy a dict, keys checked like text."""
        result = {}
        for key, item in value.items():
            if type(key) is not str:
                problem = f"keys must be str, got {key!r} ({kind_of(key)})"
                raise self.error(trail, problem)
            self.text(key, trail, key)
            result[key] = self.copy(item, trail, key, depth)
        if self.left < 0:
            raise self.error(trail, f"over the limit of {self.limit:,} bytes for params")
        return result

    def text(self, value: str, parent: Trail, key: str | int) -> str:
        """Check text: jsonb has no NUL, UTF-8 no half of a surrogate pair."""
        if "\x00" in value:
            raise self.error((parent, key), "text with a NUL character")
        if value.isascii():
            self.left -= len(value)
            return value
        try:
            self.left -= len(value.encode())
        except UnicodeEncodeError:
            raise self.error((parent, key), "text with a lone surrogate") from None
        return value

    def integer(self, value: int, parent: Trail, key: str | int) -> int:
        """Check an integer: any that Python is willing to read back."""
        if value.bit_length() > MAX_INT_BITS:
            raise self.error((parent, key), "integer with more than 4200 digits")
        self.left -= value.bit_length() // 3
        return value

    def number(self, value: float, parent: Trail, key: str | int) -> float:
        """Check a float: from 1e16 on jsonb returns an integer, which may be another number."""
        if not math.isfinite(value):
            raise self.error((parent, key), f"{value!r} is not JSON")
        if abs(value) >= FIRST_FLOAT_WITHOUT_POINT and int(Decimal(repr(value))) != value:
            raise self.error((parent, key), f"float {value!r} would come back as another number")
        return value

    def error(self, trail: Trail, problem: str) -> ParamsError:
        """Make the error for the value at the end of ``trail``."""
        keys: list[str | int] = []
        while trail is not None:
            trail, key = trail
            keys.append(key)
        return ParamsError(path_of(self.top, tuple(reversed(keys))), problem)


def _plain(plain: type[Any], value: Any) -> Any:
    return str.__str__(value) if plain is str else plain(value)


def kind_of(value: Any) -> str:
    """Name the type of a value, for messages."""
    return type(value).__name__
