"""Reading errors: what to keep of them, and whose fault they are. Pure, but for their classes."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pydantic
import sqlalchemy
from sqlalchemy.exc import DBAPIError, StatementError

MAX_ERROR = 4000
LONGEST_READ = 50_000  # characters of a message that are looked through
# The frames of these say nothing about a handler. By their whole path: a user's own folder may
# have the same name.
LIBRARIES = tuple(
    str(Path(module).parent) for module in (__file__, sqlalchemy.__file__, psycopg.__file__)
)

LOCK_NOT_AVAILABLE = "55P03"  # it was waited for as long as lock_timeout says
READ_ONLY = "25006"
UNDEFINED_TABLE = "42P01"
BLAMELESS = (
    "08",  # connection exceptions
    "57P0",  # the server shuts down, or an administrator ended the connection
    "53",  # out of memory, disk full, too many clients
    READ_ONLY,  # a standby, or a failover under way
    "40001",  # lost a serialisation race
    "40P01",  # a deadlock, and we were the victim
)


def sqlstate(error: BaseException | None) -> str | None:
    """Return the five-letter code of a database error, whichever driver or wrapper it came in.

    Example:
        >>> import psycopg
        >>> sqlstate(psycopg.errors.DeadlockDetected())
        '40P01'
        >>> sqlstate(ValueError()) is None
        True
    """
    origin = error.orig if isinstance(error, DBAPIError) else error
    for name in ("sqlstate", "pgcode"):
        code = _attribute(origin, name)
        if isinstance(code, str):
            return code
    return None


def _attribute(thing: object, name: str) -> Any:
    """Read an attribute of somebody's exception, whose code may raise anything at all."""
    try:
        return getattr(thing, name, None)
    except BaseException:  # noqa: BLE001
        return None


def is_blameless(error: BaseException | None) -> bool:
    """Say whether a database error is the database's own trouble, and no fault of the statement.

    Example:
        >>> import psycopg
        >>> is_blameless(psycopg.errors.ReadOnlySqlTransaction())
        True
        >>> is_blameless(psycopg.errors.DivisionByZero())
        False
    """
    code = sqlstate(error)
    if code is not None:
        return code.startswith(BLAMELESS)
    # no code: the driver itself found the connection dead, or could not make one
    lost = isinstance(error, DBAPIError) and error.connection_invalidated
    origin = error.orig if isinstance(error, DBAPIError) else error
    return lost or isinstance(origin, psycopg.OperationalError)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Walk from an error to what caused it.

    Example:
        >>> inner = KeyError("a"); outer = ValueError("b"); outer.__cause__ = inner
        >>> list(chain(outer)) == [outer, inner]
        True
    """
    for _ in range(20):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def comes_from(error: BaseException | None, trouble: BaseException) -> bool:
    """Say whether a handler's error was raised on account of that database error."""
    return any(link is trouble or _attribute(link, "orig") is trouble for link in chain(error))


def describe(error: BaseException, *, ascii_only: bool = False, values: bool = False) -> str:
    """Render an error for keeping: class, message and the place it came from.

    Never fails, never holds what Postgres cannot store, never more than 4,000 characters, and no
    statement parameters: of a database error only the server's primary message is kept. With
    ``values`` all that the error says.

    Example:
        >>> print(describe(ValueError("bad\\x00value")))
        ValueError: bad\\x00value
        >>> len(describe(ValueError("x" * 10_000)))
        4000
    """
    place = _place(error)
    text = _cut(headline(error, values=values), MAX_ERROR - len(place))
    return _storable(text + place, ascii_only=ascii_only)[:MAX_ERROR]


def in_one_line(error: BaseException, *, values: bool = False) -> str:
    """Render an error for a log line; with ``values`` as in `describe`.

    Example:
        >>> in_one_line(ValueError("bad\\nvalue")), in_one_line(ValueError("a\\nb"), values=True)
        ('ValueError: bad', 'ValueError: a b')
    """
    if not values:
        return describe(error).partition("\n")[0][:300]
    text = _storable(headline(error, values=True), ascii_only=False)
    return " ".join(text.split())[:MAX_ERROR]


def headline(error: BaseException, *, values: bool = False) -> str:
    """Render class and message of an error, without the values of rows and parameters.

    Of a database error only the primary message is kept, and nothing that it quotes if it is about
    a value; of pydantic's where it is and what is wrong. What a handler writes into the message of
    its own error stays. With ``values`` the text is the error's own, whole.

    Example:
        >>> headline(ValueError("bad")), headline(ValueError())
        ('ValueError: bad', 'ValueError')
        >>> headline(psycopg.DataError('invalid input syntax for type integer: "secret"'))
        'DataError: invalid input syntax for type integer: "…"'
    """
    return f"{type(error).__name__}: {_message(error, values=values)}".removesuffix(": ")


# What the driver and SQLAlchemy append to the primary message; also in the middle of the text of
# an error that quotes another one.
_DETAILS = re.compile(
    r"\n(DETAIL|HINT|CONTEXT|QUERY|LINE \d+): .*"
    r"|\s*\[(SQL|parameters): .*"
    r"|\s*Original exception was: .*",
    re.DOTALL,
)
_BACKGROUND = re.compile(r"\n\(Background on this error at: .*\)$")
# From the first quotation mark to the last, in whatever language the server speaks.
_QUOTED = re.compile(
    "[\"'\u00ab\u00bb\u201c\u201e\u2018].*[\"'\u00ab\u00bb\u201c\u201d\u2019]", re.DOTALL
)
_ABOUT_VALUES = "22"  # "data exception": the message quotes the value that does not fit


def _message(error: BaseException, *, values: bool) -> str:
    origin = error.orig if isinstance(error, StatementError) else error
    try:
        if values:
            return _BACKGROUND.sub("", str(error))
        if isinstance(error, pydantic.ValidationError):
            return _validation_message(error)
        text = _primary(origin) or str(origin)
    except BaseException as broken:  # noqa: BLE001 - KeyboardInterrupt, too: it must not win
        return f"(its message cannot be rendered: {type(broken).__name__})"
    if len(text) > LONGEST_READ:
        text = text[:LONGEST_READ] + '"'  # lest a quotation that was cut is not seen as one
    text = _DETAILS.sub("", text)
    return _QUOTED.sub('"…"', text) if _tells_a_value(error, origin) else text


def _primary(origin: object) -> str | None:
    primary = _attribute(_attribute(origin, "diag"), "message_primary")
    return primary if isinstance(primary, str) else None


def _tells_a_value(error: BaseException, origin: BaseException | None) -> bool:
    """Say whether a message quotes a value that a type or a column did not take."""
    if isinstance(origin, psycopg.DataError):
        return (sqlstate(origin) or _ABOUT_VALUES).startswith(_ABOUT_VALUES)
    # SQLAlchemy's own types, before anything is sent
    before = isinstance(error, StatementError) and not isinstance(error, DBAPIError)
    return before and isinstance(origin, (LookupError, TypeError, ValueError))


def _validation_message(error: pydantic.ValidationError) -> str:
    """Say where params, or whatever a handler validates, are wrong, but not what they are."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    lines = [f"{'.'.join(map(str, each['loc']))}: {validation_problem(each)}" for each in found[:3]]
    more = [f"and {len(found) - 3} more"] if len(found) > 3 else []  # noqa: PLR2004
    return "; ".join([*lines, *more]).removeprefix(": ")


def validation_problem(problem: Any) -> str:
    """Return what pydantic says is wrong, without the value where that is quoted.

    Args:
        problem: one of the dicts of ``ValidationError.errors()``.

    Example:
        >>> validation_problem({"type": "missing", "msg": "Field required"})
        'Field required'
    """
    text: str = problem["msg"]
    if problem["type"] == "union_tag_invalid":
        return "Input tag" + text[text.rindex(" found using ") :]
    return text


def _place(error: BaseException) -> str:
    try:
        frames = traceback.extract_tb(error.__traceback__)
    except Exception:  # noqa: BLE001
        return ""
    own = [f for f in frames if not f.filename.startswith(LIBRARIES)]
    lines = [f"\n  at {f.filename}:{f.lineno} in {f.name}" for f in own[-5:]]
    return "".join(lines)[-MAX_ERROR // 2 :]


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 1] + "…"


def _storable(text: str, *, ascii_only: bool) -> str:
    text = text.replace("\x00", "\\x00")
    encoding = "ascii" if ascii_only else "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
