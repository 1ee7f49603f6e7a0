"""Commands that travel to the server in one message, and waiting for the answers.

A thread waits for them, or a coroutine; or whoever comes first.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import psycopg
from psycopg import pq
from sqlalchemy import Connection

Results: TypeAlias = "list[pq.abc.PGresult]"

_GOOD = (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK)


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


class Message:
    """Commands on their way to the server; whoever comes first reads the answers.

    Args:
        pgconn: a connection on which nothing else is under way.
        commands: after an error none of those that follow is executed.

    Attributes:
        answers: None until all have come.
        events: what to wait for until then.
    """

    def __init__(self, pgconn: pq.abc.PGconn, commands: Iterable[Command]) -> None:
        self.answers: Answers | None = None
        self.events = 0
        self._pgconn = pgconn
        pgconn.enter_pipeline_mode()
        for command in commands:
            _send(pgconn, command)
        pgconn.pipeline_sync()
        self._steps = _answers(pgconn)
        self.proceed()

    def proceed(self) -> None:
        """Read what is there, without waiting."""
        try:
            self.events = next(self._steps)
        except StopIteration as end:
            self.answers = end.value
            if self._pgconn.status == pq.ConnStatus.OK:
                self._pgconn.exit_pipeline_mode()

    def read_all(self) -> None:
        """Read until there is nothing more: of a dead connection a loop may tell only once."""
        self.proceed()
        while self.answers is None and readable([self._pgconn.socket], 0.0):
            self.proceed()

    def wait(self) -> Answers:
        """Wait for all answers."""
        while self.answers is None:
            _wait(self._pgconn, self.events)
            self.proceed()
        return self.answers

    async def awaited(self) -> Answers:
        """Wait for all answers, while the event loop goes on."""
        while self.answers is None:
            await _ready(self._pgconn.socket, self.events)
            self.proceed()
        return self.answers


def exchange(connection: Connection, commands: Iterable[Command]) -> Answers:
    """Send commands in one message, and wait for all answers."""
    dbapi: Any = connection.connection.dbapi_connection
    message = Message(connection.connection.driver_connection.pgconn, commands)  # type: ignore[union-attr]
    if hasattr(dbapi, "run_async"):
        return dbapi.run_async(lambda _driver: message.awaited())  # type: ignore[no-any-return]
    return message.wait()


def _send(pgconn: pq.abc.PGconn, command: Command) -> None:
    if command.prepare:
        pgconn.send_prepare(command.name, command.text)
    elif command.name:
        pgconn.send_query_prepared(command.name, command.values)
    else:
        pgconn.send_query_params(command.text, command.values)


def _answers(pgconn: pq.abc.PGconn) -> Generator[int, None, Answers]:
    """Read the answers to a pipeline; yield for which events to wait."""
    found: Results = []
    try:
        while pgconn.flush():
            yield select.POLLIN | select.POLLOUT
            pgconn.consume_input()
        while (result := (yield from _next(pgconn))) is not None:
            found.append(result)
            pgconn.get_result()  # the end of its command; nothing to wait for
    except psycopg.OperationalError as lost:
        return Answers(found, lost)
    return Answers(found, None)


def _next(pgconn: pq.abc.PGconn) -> Generator[int, None, pq.abc.PGresult | None]:
    """Read the next answer; None after the last."""
    while pgconn.status == pq.ConnStatus.OK:
        while pgconn.is_busy():  # this lets other threads in, so it is not to be asked often
            yield select.POLLIN
            pgconn.consume_input()
        result = pgconn.get_result()
        if result is not None:
            return None if result.status == pq.ExecStatus.PIPELINE_SYNC else result
    raise psycopg.OperationalError("the connection was lost")


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
