"""Statements that are executed for each task, past SQLAlchemy: several times as fast.

SQLAlchemy compiles them, once. From there on they go to libpq, prepared, together with the BEGIN
that they may need, in one round trip; and come back as plain dictionaries.
"""

from __future__ import annotations

import asyncio
import hashlib
import select
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, TypeAlias

import psycopg
from psycopg import pq
from psycopg.adapt import PyFormat, Transformer
from sqlalchemy import Connection, Executable
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import psycopg as postgresql_psycopg

Row: TypeAlias = "dict[str, Any]"
Results: TypeAlias = "list[pq.abc.PGresult]"

BEGIN = b"BEGIN ISOLATION LEVEL READ COMMITTED"
PREPARED = "pgtask_prepared"  # attribute of a driver's connection: the names of statements
SURPRISES = 2  # it is there, against expectation, and then is not, since the ROLLBACK after that
_NUMBERED = postgresql.dialect(paramstyle="numeric_dollar")  # type: ignore[no-untyped-call]
_PSYCOPG = postgresql_psycopg.dialect()  # type: ignore[no-untyped-call]
_GOOD = (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK)


class Wired:
    """A statement as the server takes it: ``$1`` in the text, and the values in that order."""

    def __init__(self, statement: Executable) -> None:
        compiled: Any = statement.compile(dialect=_NUMBERED)  # type: ignore[attr-defined]
        self.text: str = compiled.string
        digest = hashlib.blake2b(self.text.encode(), digest_size=12).hexdigest()
        self.name = f"pgtask_{digest}".encode()
        self._names: list[str] = compiled.positiontup or []
        self._fixed: Mapping[str, Any] = compiled.params
        self._load = _loaders(statement)

    def parameters(self, given: Mapping[str, Any]) -> list[bytes | None]:
        """Put values in order, as text; lists become arrays."""
        found = (given[name] if name in given else self._fixed[name] for name in self._names)
        return list(map(_dump, found))

    def fetch(self, connection: Connection, given: Mapping[str, Any], *, keep: bool) -> list[Row]:
        """Execute it on one of the worker's connections and return all rows.

        It is the first in its transaction that matters: begins one, unless there is one, and may
        begin it once more. With ``keep`` the server keeps the statement prepared.

        Raises:
            psycopg.Error: as libpq reports it.
        """
        values = self.parameters(given)
        driver: Any = connection.connection.driver_connection
        for tries in range(SURPRISES):
            try:
                return self._rows(
                    driver, self._execute(connection, driver, values, keep=keep, afresh=tries > 0)
                )
            except psycopg.errors.InvalidSqlStatementName:
                # psycopg has all statements of its connection forgotten when it sees a ROLLBACK;
                # others of ours may have been prepared since
                getattr(driver, PREPARED).discard(self.name)
            except psycopg.errors.DuplicatePreparedStatement:  # it was prepared, and then failed
                getattr(driver, PREPARED).add(self.name)
        return self._rows(driver, self._execute(connection, driver, values, keep=keep, afresh=True))

    def _execute(
        self,
        connection: Connection,
        driver: Any,
        values: list[bytes | None],
        *,
        keep: bool,
        afresh: bool,
    ) -> Any:
        dbapi: Any = connection.connection.dbapi_connection
        self._send(driver, values, keep=keep, afresh=afresh)
        steps = _answers(driver.pgconn)
        if hasattr(dbapi, "run_async"):
            found = dbapi.run_async(lambda _driver: _await(driver.pgconn, steps))
        else:
            found = _run(driver.pgconn, steps)
        if driver.pgconn.status == pq.ConnStatus.OK:
            driver.pgconn.exit_pipeline_mode()
        for result in found:
            checked(result)
        if keep:
            getattr(driver, PREPARED).add(self.name)
        return found[-1]

    def _send(self, driver: Any, values: list[bytes | None], *, keep: bool, afresh: bool) -> None:
        pgconn = driver.pgconn
        begins = afresh or pgconn.transaction_status == pq.TransactionStatus.IDLE
        pgconn.enter_pipeline_mode()
        if afresh:  # psycopg must not see it, or would forget everything once more
            pgconn.send_query_params(b"ROLLBACK", None)
        if begins:
            pgconn.send_query_params(BEGIN, None)
        if keep:
            if not hasattr(driver, PREPARED):
                setattr(driver, PREPARED, set())
            if self.name not in getattr(driver, PREPARED):
                pgconn.send_prepare(self.name, self.text.encode())
            pgconn.send_query_prepared(self.name, values)
        else:
            pgconn.send_query_params(self.text.encode(), values)
        pgconn.pipeline_sync()

    def _rows(self, driver: Any, result: Any) -> list[Row]:
        count = result.ntuples
        if not count:
            return []
        names = [result.fname(i).decode() for i in range(result.nfields)]
        reader = Transformer(driver)
        reader.set_pgresult(result)
        rows = reader.load_rows(0, count, lambda values: dict(zip(names, values, strict=True)))
        for name, load in self._load:
            for row in rows:
                row[name] = load(row[name])
        return rows


def _dump(value: Any) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, list):
        return array(value).encode()
    if isinstance(value, (str, int, float)):
        return str(value).encode()
    return bytes(Transformer().get_dumper(value, PyFormat.TEXT).dump(value) or b"")


def _answers(pgconn: pq.abc.PGconn) -> Generator[int, None, Results]:
    """Read the answers to a pipeline; yield for which events to wait."""
    found: Results = []
    try:
        while pgconn.flush():
            yield select.POLLIN | select.POLLOUT
            pgconn.consume_input()
        while (result := (yield from _next(pgconn))) is not None:
            found.append(result)
    except psycopg.OperationalError:
        if not any(map(_problem, found)):  # else it has been said why the connection is lost
            raise
    return found


def _next(pgconn: pq.abc.PGconn) -> Generator[int, None, pq.abc.PGresult | None]:
    """Read the next answer; None after the last."""
    while pgconn.status == pq.ConnStatus.OK:
        while pgconn.is_busy():
            yield select.POLLIN
            pgconn.consume_input()
        result = pgconn.get_result()
        if result is not None:  # None is the end of one command's results
            return None if result.status == pq.ExecStatus.PIPELINE_SYNC else result
    raise psycopg.OperationalError("the connection was lost")


def _run(pgconn: pq.abc.PGconn, steps: Generator[int, None, Results]) -> Results:
    try:
        while True:
            _wait(pgconn, next(steps))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def _await(pgconn: pq.abc.PGconn, steps: Generator[int, None, Results]) -> Results:
    try:
        while True:
            await _ready(pgconn.socket, next(steps))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def _ready(socket: int, events: int) -> None:
    loop = asyncio.get_running_loop()
    is_ready = loop.create_future()
    loop.add_reader(socket, resolve, is_ready)
    if events & select.POLLOUT:
        loop.add_writer(socket, resolve, is_ready)
    try:
        await is_ready
    finally:
        loop.remove_reader(socket)
        if events & select.POLLOUT:
            loop.remove_writer(socket)


def resolve(future: asyncio.Future[None]) -> None:
    """Let those go on who wait for a future, unless they have given up."""
    if not future.done():
        future.set_result(None)


def _loaders(statement: Any) -> list[tuple[str, Callable[[Any], Any]]]:
    """List the columns whose values SQLAlchemy would change after psycopg: enums, own types."""
    found = []
    for column in getattr(statement, "exported_columns", ()):
        processor = column.type.dialect_impl(_PSYCOPG).result_processor(_PSYCOPG, None)
        if processor is not None:
            found.append((column.name, processor))
    return found


def array(items: list[Any]) -> str:
    """Return the text of a Postgres array of numbers or of texts.

    Example:
        >>> array([1, 2]), array(['A', 'a "b"', None])
        ('{1,2}', '{"A","a \\\\"b\\\\"",NULL}')
    """
    written = map(str, items) if items and isinstance(items[0], int) else map(_element, items)
    return f"{{{','.join(written)}}}"


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
