"""Statements that are executed for each task, past SQLAlchemy: several times as fast.

SQLAlchemy compiles them, once. From there on they go to libpq, prepared, together with what comes
just before and after them, in one round trip; and come back as plain dictionaries.
"""

from __future__ import annotations

import asyncio
import hashlib
import select
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import psycopg
from psycopg import pq
from psycopg.adapt import PyFormat, Transformer
from sqlalchemy import Connection, Executable, Float
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import psycopg as postgresql_psycopg

Row: TypeAlias = "dict[str, Any]"
Results: TypeAlias = "list[pq.abc.PGresult]"

BEGIN = b"BEGIN ISOLATION LEVEL READ COMMITTED"
AFRESH = (b"ROLLBACK", BEGIN)  # unseen by psycopg, which would forget more
PREPARED = "pgtask_prepared"  # attribute of a driver's connection: the names of statements
SURPRISES = 2  # it is there, against expectation, and then is not, since the ROLLBACK after that
FLOAT8, NUMERIC = 701, 1700  # what a type is to the server
_NUMBERED = postgresql.dialect(paramstyle="numeric_dollar")  # type: ignore[no-untyped-call]
_PSYCOPG = postgresql_psycopg.dialect()  # type: ignore[no-untyped-call]
_GOOD = (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK)
_OPENINGS = {pq.TransactionStatus.IDLE: (BEGIN,), pq.TransactionStatus.INERROR: AFRESH}
_SURPRISING = (
    # psycopg has all statements of its connection forgotten when it sees a ROLLBACK; others of
    # ours may have been prepared since
    psycopg.errors.InvalidSqlStatementName,
    psycopg.errors.DuplicatePreparedStatement,  # it was prepared, and then failed
)


class Command(NamedTuple):
    """One of those that a message is made of: text, or what is prepared under a name."""

    text: bytes
    values: list[bytes | None] | None = None
    name: bytes = b""
    prepare: bool = False


class Answers(NamedTuple):
    """The results of a message, one for each command, up to where the connection was lost."""

    results: Results
    lost: psycopg.OperationalError | None

    def problem(self, commands: slice = slice(None)) -> psycopg.Error | None:
        """Return the first error among the answers to some commands; None if all went well."""
        for result in self.results[commands]:
            problem = _problem(result)
            if problem is not None:
                return problem
        is_short = commands.stop is None or commands.stop > len(self.results)
        return self.lost if is_short else None


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

    def commands(self, driver: Any, values: list[bytes | None], *, keep: bool) -> list[Command]:
        """Return what executes it; with ``keep`` the server keeps it prepared."""
        text = self.text.encode()
        if not keep:
            return [Command(text, values)]
        execute = Command(text, values, self.name)
        if self.name in _prepared(driver):
            return [execute]
        return [Command(text, None, self.name, prepare=True), execute]

    def learn(self, driver: Any, problem: psycopg.Error | None) -> bool:
        """Note whether it is prepared now; True if another try, in a new transaction, may do."""
        if isinstance(problem, psycopg.errors.InvalidSqlStatementName):
            _prepared(driver).discard(self.name)
        elif problem is None or isinstance(problem, psycopg.errors.DuplicatePreparedStatement):
            _prepared(driver).add(self.name)
        return isinstance(problem, _SURPRISING)

    def fetch(
        self,
        connection: Connection,
        given: Mapping[str, Any],
        *,
        keep: bool,
        afresh: bool = False,
        before: Sequence[bytes] = (),
        after: Sequence[bytes] = (),
    ) -> list[Row]:
        """Execute it on one of the worker's connections and return all rows.

        It is the first in its transaction that matters: begins one, unless there is one that is
        sound, and may begin it once more; with ``afresh`` it does so at once. What is to be
        executed before and after it travels along.

        Raises:
            psycopg.Error: as libpq reports it.
        """
        values = self.parameters(given)
        driver: Any = connection.connection.driver_connection
        status = driver.pgconn.transaction_status
        opening = AFRESH if afresh else _OPENINGS.get(status, ())
        for tries in range(SURPRISES + 1):
            first = list(map(Command, (*opening, *before)))
            own = self.commands(driver, values, keep=keep)
            answers = exchange(connection, [*first, *own, *map(Command, after)])
            problem = answers.problem()
            is_surprise = keep and self.learn(driver, problem)
            if problem is None:
                return self.rows(driver, answers.results[len(first) + len(own) - 1])
            if not is_surprise or tries == SURPRISES:
                raise problem
            opening = AFRESH
        raise AssertionError

    def read(self, driver: Any, given: Mapping[str, Any], *, keep: bool) -> list[Row]:
        """Execute it on a connection of a thread in autocommit, and return all rows.

        Raises:
            psycopg.Error: as libpq reports it.
        """
        commands = self.commands(driver, self.parameters(given), keep=keep)
        answers = _exchange(driver, driver.pgconn, commands)
        problem = answers.problem()
        if keep:
            self.learn(driver, problem)
        if problem is not None:
            raise problem
        return self.rows(driver, answers.results[-1])

    def rows(self, driver: Any, result: Any) -> list[Row]:
        """Return the rows of its result as dictionaries."""
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


class AllWired(dict[Executable, Wired]):
    """Statements, each compiled when it is first asked for."""

    def __missing__(self, statement: Executable) -> Wired:
        wired = self[statement] = Wired(statement)
        return wired


def exchange(connection: Connection, commands: Iterable[Command]) -> Answers:
    """Send commands in one message, and wait for all answers.

    After an error none of those that follow is executed.
    """
    driver: Any = connection.connection.driver_connection
    return _exchange(connection.connection.dbapi_connection, driver.pgconn, commands)


def _exchange(dbapi: Any, pgconn: pq.abc.PGconn, commands: Iterable[Command]) -> Answers:
    pgconn.enter_pipeline_mode()
    for command in commands:
        _send(pgconn, command)
    pgconn.pipeline_sync()
    steps = _answers(pgconn)
    if hasattr(dbapi, "run_async"):
        found = dbapi.run_async(lambda _driver: _await(pgconn, steps))
    else:
        found = _run(pgconn, steps)
    if pgconn.status == pq.ConnStatus.OK:
        pgconn.exit_pipeline_mode()
    return found  # type: ignore[no-any-return]


def _send(pgconn: pq.abc.PGconn, command: Command) -> None:
    if command.prepare:
        pgconn.send_prepare(command.name, command.text)
    elif command.name:
        pgconn.send_query_prepared(command.name, command.values)
    else:
        pgconn.send_query_params(command.text, command.values)


def _prepared(driver: Any) -> set[bytes]:
    """Return the names of the statements that the server keeps on a connection, as we think."""
    if not hasattr(driver, PREPARED):
        setattr(driver, PREPARED, set())
    return getattr(driver, PREPARED)  # type: ignore[no-any-return]


def _dump(value: Any) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, list):
        return array(value).encode()
    if isinstance(value, (str, int, float)):
        return str(value).encode()
    return bytes(Transformer().get_dumper(value, PyFormat.TEXT).dump(value) or b"")


def _answers(pgconn: pq.abc.PGconn) -> Generator[int, None, Answers]:
    """Read the answers to a pipeline; yield for which events to wait."""
    found: Results = []
    try:
        while pgconn.flush():
            yield select.POLLIN | select.POLLOUT
            pgconn.consume_input()
        while (result := (yield from _next(pgconn))) is not None:
            found.append(result)
    except psycopg.OperationalError as lost:
        return Answers(found, lost)
    return Answers(found, None)


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


def _run(pgconn: pq.abc.PGconn, steps: Generator[int, None, Answers]) -> Answers:
    try:
        while True:
            _wait(pgconn, next(steps))
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def _await(pgconn: pq.abc.PGconn, steps: Generator[int, None, Answers]) -> Answers:
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
        kind = column.type.dialect_impl(_PSYCOPG)
        number = FLOAT8 if isinstance(kind, Float) else NUMERIC  # others do not look at it
        processor = kind.result_processor(_PSYCOPG, number)
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


def readable(files: Iterable[int], seconds: float) -> list[int]:
    """Wait until one of some files can be read, or so long; return those that can.

    Args:
        files: their numbers, also over 1,023, which `select.select` does not take.
        seconds: 0 or more.
    """
    poll = select.poll()
    for number in files:
        poll.register(number, select.POLLIN)
    return [number for number, _ in poll.poll(seconds * 1000)]


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
