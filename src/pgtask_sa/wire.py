"""Statements that are executed for each task, past SQLAlchemy: several times as fast.

SQLAlchemy compiles them, once. From there on they go to psycopg, prepared, and come back as plain
dictionaries.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import psycopg
from psycopg import pq
from sqlalchemy import Connection, Executable
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import psycopg as postgresql_psycopg

Row: TypeAlias = "dict[str, Any]"

_NUMBERED = postgresql.dialect(paramstyle="numeric_dollar")  # type: ignore[no-untyped-call]
_PSYCOPG = postgresql_psycopg.dialect()  # type: ignore[no-untyped-call]
_GOOD = (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK)


class Wired:
    """A statement as the server takes it: ``$1`` in the text, and the values in that order."""

    def __init__(self, statement: Executable) -> None:
        compiled: Any = statement.compile(dialect=_NUMBERED)  # type: ignore[attr-defined]
        self.text: str = compiled.string
        self._names: list[str] = compiled.positiontup or []
        self._fixed: Mapping[str, Any] = compiled.params
        self._load = _loaders(statement)
        self._columns: tuple[str, ...] = ()

    def values(self, given: Mapping[str, Any]) -> list[Any]:
        """Put values in order; lists become the text of arrays."""
        found = (given[name] if name in given else self._fixed[name] for name in self._names)
        return [array(value) if isinstance(value, list) else value for value in found]

    def fetch(self, connection: Connection, given: Mapping[str, Any]) -> list[Row]:
        """Execute it on one of the worker's connections and return all rows.

        Raises:
            psycopg.Error: as psycopg raises it.
        """
        dbapi: Any = connection.connection.dbapi_connection
        values = self.values(given)
        if hasattr(dbapi, "run_async"):
            cursor, found = dbapi.run_async(lambda driver: self._fetch_async(driver, values))
        else:
            cursor = psycopg.RawCursor(dbapi)
            found = cursor.execute(self.text, values, prepare=True).fetchall()
        if not found:
            return []
        if not self._columns:
            self._columns = tuple(column.name for column in cursor.description)
        rows = [dict(zip(self._columns, row, strict=True)) for row in found]
        for name, load in self._load:
            for row in rows:
                row[name] = load(row[name])
        return rows

    async def _fetch_async(self, driver: Any, values: list[Any]) -> tuple[Any, list[Any]]:
        cursor = psycopg.AsyncRawCursor(driver)
        await cursor.execute(self.text, values, prepare=True)
        return cursor, await cursor.fetchall()


def _loaders(statement: Any) -> list[tuple[str, Callable[[Any], Any]]]:
    """List the columns whose values SQLAlchemy would change after psycopg: enums, own types."""
    found = []
    for column in getattr(statement, "exported_columns", ()):
        processor = column.type.dialect_impl(_PSYCOPG).result_processor(_PSYCOPG, None)
        if processor is not None:
            found.append((column.name, processor))
    return found


def array(items: Iterable[Any]) -> str:
    """Return the text of a Postgres array.

    Example:
        >>> array([1, 2]), array(['A', 'a "b"', None])
        ('{"1","2"}', '{"A","a \\\\"b\\\\"",NULL}')
    """
    return f"{{{','.join(map(_element, items))}}}"


def _element(item: Any) -> str:
    if item is None:
        return "NULL"
    return '"' + str(item).replace("\\", "\\\\").replace('"', '\\"') + '"'


def send(pgconn: pq.abc.PGconn, commands: str) -> None:
    """Send commands without parameters, on a connection of a thread; then `receive`.

    Raises:
        psycopg.OperationalError: the connection was lost.
    """
    pgconn.send_query(commands.encode())
    pgconn.flush()


def receive(pgconn: pq.abc.PGconn) -> None:
    """Wait for the answer to what was sent.

    `PQexec` would do both at once. But of several errors it keeps the last: not why the server ends
    a connection, but that it did.

    Raises:
        psycopg.Error: the first error.
    """
    problem: psycopg.Error | None = None
    try:
        for result in results(pgconn):  # all, or the connection stays busy
            problem = problem or _problem(result)
    except psycopg.OperationalError as lost:
        problem = problem or lost
    if problem is not None:
        raise problem


def results(pgconn: pq.abc.PGconn) -> Iterator[pq.abc.PGresult]:
    """Wait for the results of what was sent, and give one after the other.

    Raises:
        psycopg.OperationalError: the connection was lost.
    """
    while pgconn.flush():
        _wait(pgconn, select.POLLIN | select.POLLOUT)
        pgconn.consume_input()
    is_new = True  # it may be there already
    while True:
        while pgconn.is_busy():
            if not is_new:
                _wait(pgconn, select.POLLIN)
            is_new = False
            pgconn.consume_input()
        result = pgconn.get_result()
        if result is None:
            return
        yield result


def _wait(pgconn: pq.abc.PGconn, events: int) -> None:
    poll = select.poll()
    poll.register(pgconn.socket, events)
    poll.poll()


def answers_within(pgconn: pq.abc.PGconn, seconds: float) -> bool:
    """Send what waits to be sent, and say whether the answer comes within so many seconds.

    Raises:
        psycopg.OperationalError: the connection was lost.
    """
    poll = select.poll()
    poll.register(pgconn.socket, select.POLLIN)
    return not pgconn.flush() and bool(poll.poll(seconds * 1000))


def checked(result: Any) -> Any:
    """Return a result of libpq's, unless it is an error.

    Raises:
        psycopg.Error: that error.
    """
    problem = _problem(result)
    if problem is not None:
        raise problem
    return result


def _problem(result: Any) -> psycopg.Error | None:
    if result.status in _GOOD:
        return None
    if not result.error_field(pq.DiagnosticField.SQLSTATE):
        return psycopg.OperationalError(result.get_error_message())  # the connection was lost
    return psycopg.errors.error_from_result(result)
