"""What the command line prints: tables for people, JSON for programs, errors on one line."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from sqlalchemy import URL
from sqlalchemy.exc import DBAPIError

from pgtask_sa.failures import LOCK_NOT_AVAILABLE, UNDEFINED_TABLE, sqlstate
from pgtask_sa.reports import STATES

UNDEFINED_COLUMN = "42703"
WIDEST = 100_000  # columns of a table that goes into a file: nothing is cut off
MOST_IDS = 50  # task numbers in a message
MOST_PARAMS = 200  # characters of params in a list that goes into a file


class Column(NamedTuple):
    """A column of a table: its heading, and how it behaves when the terminal is narrow."""

    heading: str
    number: bool = False
    flexible: bool = False  # gives way first, and is cut with an ellipsis


def say(line: str = "") -> None:
    """Print a line for people, unless the reader has left."""
    print(line)  # noqa: T201


def complain(line: str) -> None:
    """Print a line on standard error."""
    print(line, file=sys.stderr)  # noqa: T201


def print_json(document: Mapping[str, Any]) -> None:
    """Print one JSON document; datetimes as ISO 8601, text in ASCII, so that any reader can."""
    say(json.dumps(document, indent=2, default=_to_json, allow_nan=False))


def _to_json(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def from_json(text: str) -> Any:
    """Read stored params; a number that Python cannot hold stays text.

    Example:
        >>> from_json('{"n": 1.5, "huge": 1.5e999}')
        {'n': 1.5, 'huge': '1.5e999'}
    """
    return json.loads(text, parse_float=_float, parse_int=_integer)


def _float(text: str) -> float | str:
    value = float(text)
    return value if math.isfinite(value) else text


def _integer(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:  # more digits than Python is willing to read
        return text


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table: fitted to a terminal, or as wide as it must be for a file or a pipe.

    Example:
        >>> print_table([Column("TYPE"), Column("N", number=True)], [("A", 10), ("B", 7)])
        TYPE   N
        A     10
        B      7
    """
    terminal = sys.stdout.isatty()
    console = Console(file=sys.stdout, width=None if terminal else WIDEST, highlight=False)
    table = Table(
        box=SIMPLE_HEAD if terminal else None, pad_edge=False, padding=(0, 1), show_edge=False
    )
    for column in columns:
        justify: Any = "right" if column.number else "left"
        table.add_column(column.heading, justify=justify, no_wrap=not column.flexible)
    for row in rows:
        table.add_row(*map(_cell, row))
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        say(line.rstrip())


def _cell(value: Any) -> Text:
    return Text(printable("" if value is None else str(value)), no_wrap=True, overflow="ellipsis")


def printable(text: str, keep: str = "") -> str:
    r"""Make control characters visible: stored text must not steer somebody's terminal.

    Example:
        >>> printable("a\x1b[2Jb")
        'a\\x1b[2Jb'
    """
    return "".join(c if c.isprintable() or c in keep else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def cut(text: str) -> str:
    """Shorten params that go into a list."""
    return text if len(text) <= MOST_PARAMS else text[: MOST_PARAMS - 3] + "..."


def first_line(text: str | None) -> str:
    """Return the first line of an error."""
    return (text or "").partition("\n")[0]


def span(seconds: float | None) -> str:
    """Render a length of time, in the largest unit that fits.

    Example:
        >>> [span(s) for s in (None, 0.2, 59, 60, 7200, 200_000)]
        ['', '0 s', '59 s', '1 min', '2 h', '2 d']
    """
    if seconds is None:
        return ""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def since(moment: datetime, now: datetime) -> str:
    """Render a moment of the past.

    Example:
        >>> from datetime import timedelta, timezone
        >>> now = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
        >>> since(now - timedelta(hours=3), now)
        '3 h ago'
    """
    return f"{span((now - moment).total_seconds())} ago"


def due(moment: datetime | None, now: datetime) -> str:
    """Render when a task is due.

    Example:
        >>> from datetime import timedelta, timezone
        >>> now = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
        >>> due(None, now), due(now - timedelta(hours=1), now), due(now + timedelta(hours=3), now)
        ('now', 'now', 'in 3 h')
    """
    if moment is None or moment <= now:
        return "now"
    return f"in {span((moment - now).total_seconds())}"


# -- the tables of the commands --------------------------------------------------------------------

Row: TypeAlias = "Mapping[str, Any]"

_NUMBER = Column("ID", number=True)
_TYPE = Column("TYPE")
_PARAMS = Column("PARAMS", flexible=True)
_ATTEMPTS = Column("ATTEMPTS", number=True)

_TYPES = [_TYPE, Column("WAITING", number=True), Column("OLDEST", number=True)]
_WAITING = [
    *(_NUMBER, _TYPE, _PARAMS),
    *(Column("CREATED", number=True), Column("DUE", number=True), _ATTEMPTS),
    Column("LAST ERROR", flexible=True),
]
_DEAD = [
    *(_NUMBER, _TYPE, _PARAMS, Column("REASON"), _ATTEMPTS, Column("BURIED", number=True)),
    Column("ERROR", flexible=True),
]
_COUNTS = (*STATES, "dead")
_STATISTICS = [
    _TYPE,
    *(Column(name.upper(), number=True) for name in (*_COUNTS, "oldest ready")),
]


def print_types(rows: Sequence[Row], nothing: str) -> None:
    """Print task types with how many tasks wait, and for how long."""
    _print(_TYPES, [_type_cells(row) for row in rows], nothing)


def _type_cells(row: Row) -> tuple[str, ...]:
    more = "" if row["exact"] else " or more"
    return row["task_type"], f"{row['count']:,}{more}", f"{span(row['oldest_seconds'])}{more}"


def print_waiting(rows: Sequence[Row], now: datetime, *, more: bool) -> None:
    """Print rows of the task table."""
    cells = [
        (
            *(row["task_id"], row["task_type"], cut(row["params"])),
            *(since(row["created_at"], now), _state(row, now), row["attempts"]),
            first_line(row["last_error"]),
        )
        for row in rows
    ]
    _print(_WAITING, cells, "no task waits", more=more)


def _state(row: Row, now: datetime) -> str:
    """Say when a task is due; of one that is leased to a handler the time is the lease's end."""
    when = due(row["run_at"], now)
    if when == "now" and row.get("running") is True:
        return "running"
    return "leased" if row["lease_token"] is not None and when != "now" else when


def print_dead(rows: Sequence[Row], now: datetime, *, more: bool) -> None:
    """Print rows of the error queue."""
    cells = [
        (
            *(row["task_id"], row["task_type"], cut(row["params"]), row["reason"]),
            *(row["attempts"], since(row["buried_at"], now), first_line(row["last_error"])),
        )
        for row in rows
    ]
    _print(_DEAD, cells, "no task is dead", more=more)


def print_statistics(rows: Sequence[Row]) -> None:
    """Print the counts by type."""
    cells = [
        (
            row["task_type"],
            *(f"{row[name]:,}" for name in _COUNTS),
            span(row["oldest_seconds"]),
        )
        for row in rows
    ]
    _print(_STATISTICS, cells, "there are no tasks")


def print_whole(row: Row) -> None:
    """Print all of one row, name by name."""
    for name, value in row.items():
        say(f"{name + ':':<13} {printable('' if value is None else str(value), keep=chr(10))}")


def print_requeued(done: Mapping[str, Sequence[int]]) -> None:
    """Say how many tasks came back, and which did not."""
    count = len(done["requeued"])
    ready = ", ready now (planned times are not kept)" if count else ""
    say(f"1 task is back{ready}" if count == 1 else f"{count:,} tasks are back{ready}")
    for key, problem in (
        ("merged", "not needed, an equal task waits"),
        ("locked", "held by somebody else, try again"),
        ("missing", "not in the error queue"),
    ):
        if done[key]:
            complain(f"{problem}: {_few(done[key])}")


def _few(ids: Sequence[int]) -> str:
    shown = ", ".join(map(str, ids[:MOST_IDS]))
    return shown if len(ids) <= MOST_IDS else f"{shown}, .. ({len(ids):,} in all)"


def _print(
    columns: Sequence[Column], rows: Sequence[Sequence[Any]], nothing: str, *, more: bool = False
) -> None:
    if not rows:
        say(nothing)
        return
    print_table(columns, rows)
    if more:
        complain(f"there are more than these {len(rows):,}: see --limit")


_WORKERS = [
    *(Column("HOST"), Column("PID", number=True), Column("STARTED", number=True)),
    *(Column("LANE", number=True), Column("RUNS", flexible=True), Column("FOR", number=True)),
]


BLIND = (
    "unknown: what workers behind a pooler run, and which of those seen in the last minute are "
    "still alive; give them --direct-url"
)


def print_workers(live: Sequence[Row], gone: Sequence[Row], now: datetime) -> None:
    """Print workers, a line for each lane; those that are gone apart."""
    _print(_WORKERS, [cells for row in live for cells in _lane_cells(row, now)], "no worker runs")
    if any(row["alive"] is None for row in live):
        complain(BLIND)
    if gone:
        names = ", ".join(f"{row['host']} pid {row['pid']}" for row in gone)
        say(printable(f"gone, but still noted: {names}"))


def _lane_cells(worker: Row, now: datetime) -> Iterator[tuple[Any, ...]]:
    who: tuple[Any, ...] = (worker["host"], worker["pid"], since(worker["started_at"], now))
    for lane in worker["lanes"]:
        yield (*who, lane["lane"], _running(lane["tasks"]), span(lane["seconds"]))
        who = ("", "", "")


def _running(tasks: Sequence[Row] | None) -> str:
    if tasks is None:
        return "unknown"
    if not tasks:
        return "idle"
    first, more = f"{tasks[0]['task_id']} {tasks[0]['task_type']}", len(tasks) - 1
    return f"{first} and {more:,} more" if more else first


def print_findings(findings: Sequence[Any]) -> None:
    """Print what the doctor found, a line each, and below it what to do about it."""
    for found in findings:
        say(f"{found.level:<8} {found.name:<16} {printable(found.message)}")
        if found.remedy:
            say(f"{'':<25} -> {printable(found.remedy)}")


# -- what goes wrong -------------------------------------------------------------------------------


def database_problem(error: DBAPIError, url: URL, *, create: str) -> str:
    """Say in one line what is wrong with the database, and what to do about it.

    Args:
        error: what it answered.
        url: of the database.
        create: how to create a table that is not there.
    """
    code = sqlstate(error)
    message = " ".join(str(error.orig).split())
    where = f"{url.host or 'the local socket'}, database {url.database!r}"
    if code in (UNDEFINED_TABLE, UNDEFINED_COLUMN):
        return f"{_primary(error)} ({where}); {create}"
    if code == LOCK_NOT_AVAILABLE:
        return "an equal task is running, and only one may exist: try again when it is done"
    if code is None or code.startswith(("08", "57P")):
        return f"cannot reach the database at {where}: {message}"
    return f"{_primary(error)} ({code})"


def _primary(error: DBAPIError) -> str:
    diagnostics = getattr(error.orig, "diag", None)
    primary = getattr(diagnostics, "message_primary", None)
    return str(primary or " ".join(str(error.orig).split()))


def prepare_output() -> None:
    """Let no character be a reason to fail, whatever encoding the terminal has."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def reader_left() -> None:
    """Go on without the reader of a pipe (`| head`), also when Python flushes at its end."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
    except (OSError, ValueError):  # not a real file: then there is nothing to flush either
        pass
