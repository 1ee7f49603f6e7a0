"""What a text of SQL does to the transaction and to the session, as far as reading it can tell.

A handler must not end the worker's transaction, and what it sets must not meet the next task. Both
are seen in the text, which may hold several statements, before it is sent. What happens inside
functions and ``DO`` blocks does not show.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

LONG = 2_000  # characters; such texts, of bulk inserts say, are not kept
_ENDS = re.compile(
    r"\s*(commit|end|abort|rollback(?!\s+(work\s+|transaction\s+)?to\b)|begin|start\s+transaction"
    r"|prepare\s+transaction)\b",
    re.IGNORECASE,
)
# What outlives the transaction, and would meet the lane's next task; and what outlives the handler.
_SETS_SESSION = re.compile(
    r"\s*(set(?!\s+(local|transaction|constraints)\b)|reset|discard|listen|prepare(?!\s+transaction)"
    r"|create\s+((local|global)\s+)?temp)\b",
    re.IGNORECASE,
)
_SETS_LOCAL = re.compile(r"\s*set\s+(local|transaction)\b", re.IGNORECASE)
# The same by a function, for the transaction only: its last argument says so.
_SETS_BY_FUNCTION = re.compile(
    r"(?:(?!set_config).)*"
    r"(?:set_config\s*\((?:[^()]|\([^()]*\))*,\s*true\s*\)(?:(?!set_config).)*)+",
    re.IGNORECASE | re.DOTALL,
)
# An enqueue that has to wait for a lock sets this, and sets it back.
_LOCK_TIMEOUT = re.compile(r"SELECT set_config\('lock_timeout', [^,()]+, true\)")
# Without one of these words a text does nothing of all that.
_WORDS = re.compile(
    r"\b(commit|end|abort|rollback|begin|start|prepare|set|set_config|reset|discard|listen|create)\b",
    re.IGNORECASE,
)
# Literals, quoted names, bodies of functions, comments: what stands in there is no statement. A
# dollar may also be part of a name.
_QUOTED = re.compile(
    r"""\bE'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*'|"(?:[^"]|"")*"|(?<![\w$])\$(\w*)\$.*?\$\1\$"""
    r"""|--[^\n]*|/\*""",
    re.DOTALL | re.IGNORECASE,
)
_COMMENT_ENDS = re.compile(r"/\*|\*/")
# A body that is no literal: begin atomic ..; end
_DEFINES = re.compile(r"\s*create\s+(or\s+replace\s+)?(function|procedure)\b", re.IGNORECASE)


class Does(NamedTuple):
    """What a text of SQL does to the transaction and to the session on the server."""

    ends: bool
    sets: bool
    shifts: bool  # settings of the transaction, at least


_NOTHING = Does(ends=False, sets=False, shifts=False)


def what_it_does(text: str) -> Does:
    """Say what a text of SQL, of one or several statements, does.

    Example:
        >>> what_it_does("insert into usr values (1); /* so */ commit")
        Does(ends=True, sets=False, shifts=False)
        >>> what_it_does("do $$ begin perform 1; end $$; select '; commit'")
        Does(ends=False, sets=False, shifts=False)
        >>> what_it_does("set search_path to shop").sets, what_it_does("set local x to 1").sets
        (True, False)
    """
    return _kept(text) if len(text) < LONG else _read(text)


def _read(text: str) -> Does:
    if not _WORDS.search(text) or _LOCK_TIMEOUT.match(text):
        return _NOTHING
    parts = _statements(text)
    sets = any(_sets(part) for part in parts)
    return Does(
        ends=any(_ENDS.match(part) for part in parts),
        sets=sets,
        shifts=sets or any(_SETS_LOCAL.match(part) or "set_config" in part for part in parts),
    )


_kept = lru_cache(maxsize=1000)(_read)


def _sets(statement: str) -> bool:
    if _SETS_SESSION.match(statement):
        return True
    return "set_config" in statement and not _SETS_BY_FUNCTION.fullmatch(statement)


def _statements(text: str) -> list[str]:
    """Split a text into its statements, without what is quoted in them."""
    bare = _bare(text)
    return [bare] if _DEFINES.match(bare) else bare.split(";")


def _bare(text: str) -> str:
    found, place = [], 0
    while quoted := _QUOTED.search(text, place):
        found.append(text[place : quoted.start()])
        is_comment = quoted[0].startswith(("--", "/*"))
        found.append(" " if is_comment else "''")
        place = _comment_end(text, quoted.end()) if quoted[0] == "/*" else quoted.end()
    return "".join([*found, text[place:]])


def _comment_end(text: str, place: int) -> int:
    """Return where a comment ends, in which there may be others."""
    depth = 1
    for mark in _COMMENT_ENDS.finditer(text, place):
        depth += 1 if mark[0] == "/*" else -1
        if depth == 0:
            return mark.end()
    return len(text)


def as_text(query: Any) -> str:
    """Return what a cursor of the driver is given, as text."""
    if isinstance(query, str):
        return query
    if isinstance(query, bytes):
        return query.decode(errors="replace")
    as_string = getattr(query, "as_string", None)
    return "" if as_string is None else str(as_string(None))
