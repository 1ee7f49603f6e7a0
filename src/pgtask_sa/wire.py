"""Statements that are executed for each task, past SQLAlchemy: several times as fast.

SQLAlchemy compiles them, once. From there on they go to libpq, prepared, together with what comes
just before and after them, in one round trip; and come back as plain dictionaries.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import psycopg
from psycopg import pq
from psycopg.adapt import PyFormat, Transformer
from sqlalchemy import Connection, Executable, Float
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import psycopg as postgresql_psycopg

from pgtask_sa.pipeline import Command, Message, exchange

Row: TypeAlias = "dict[str, Any]"

BEGIN = b"BEGIN ISOLATION LEVEL READ COMMITTED"
AFRESH = (b"ROLLBACK", BEGIN)  # unseen by psycopg, which would forget more
PREPARED = "pgtask_prepared"  # attribute of a driver's connection: the names of statements
SURPRISES = 2  # it is there, against expectation, and then is not, since the ROLLBACK after that
FLOAT8, NUMERIC = 701, 1700  # what a type is to the server
_NUMBERED = postgresql.dialect(paramstyle="numeric_dollar")  # type: ignore[no-untyped-call]
_PSYCOPG = postgresql_psycopg.dialect()  # type: ignore[no-untyped-call]
_OPENINGS = {pq.TransactionStatus.IDLE: (BEGIN,), pq.TransactionStatus.INERROR: AFRESH}
_SURPRISING = (
    # psycopg has all statements of its connection forgotten when it sees a ROLLBACK; others of
    # ours may have been prepared since
    psycopg.errors.InvalidSqlStatementName,
    psycopg.errors.DuplicatePreparedStatement,  # it was prepared, and then failed
)


class Wired:
    """A statement as the server takes it: ``$1`` in the text, and the values in that order."""

    def __init__(self, statement: Executable) -> None:
        compiled: Any = statement.compile(dialect=_NUMBERED)  # type: ignore[attr-defined]
        self.text: str = compiled.string
        self._bytes = self.text.encode()
        digest = hashlib.blake2b(self._bytes, digest_size=12).hexdigest()
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
        text = self._bytes
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
        answers = Message(driver.pgconn, commands).wait()
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


def _loaders(statement: Any) -> list[tuple[str, Callable[[Any], Any]]]:
    """List the columns whose values SQLAlchemy would change after psycopg: enums, own types."""
    found = []
    for column in getattr(statement, "exported_columns", ()):
        kind = column.type.dialect_impl(_PSYCOPG)
        # others do not look at it; SQLAlchemy 2.0 has no type of its own for the first
        number = FLOAT8 if isinstance(kind, Float) or isinstance(column.type, Float) else NUMERIC
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
