"""Which task types a worker may ask for: those it has handlers for, and the database knows.

A claim casts its list of types to the type of the column. Where that is a native enum, a single
label that the database lacks would fail every claim. That happens in every rolling deploy in which
the new code comes before its migration, and ends with the migration. Where it is text, the same
holds of a label that the encoding of the database has no characters for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from sqlalchemy import Connection, Enum, Table, literal, select
from sqlalchemy.exc import DataError

from pgtask_sa import statements
from pgtask_sa.events import Events
from pgtask_sa.handlers import Handler

COUNT_LIMIT = 100_000
UNKNOWN_LABEL = ("handler.unknown_label", "the database does not know these task types yet")
NOT_ENCODABLE = ("handler.not_encodable", "the database's encoding cannot hold these task types")


class Roster:
    """The task types of each kind of lane; the lists change in place, and lanes share them."""

    def __init__(self, table: Table, handlers: Mapping[str, Handler], events: Events) -> None:
        self.table = table
        self.handlers = handlers
        self.events = events
        self.types: dict[str, list[str]] = {
            kind: self._of_kind(kind, set(handlers)) for kind in ("sync", "async")
        }
        kind = table.c.task_type.type
        self._is_enum = isinstance(kind, Enum) and kind.native_enum
        self._missing: set[str] = set()
        self._lock = threading.Lock()

    def all(self) -> list[str]:
        """Return the types of all kinds."""
        return [name for types in self.types.values() for name in types]

    def _of_kind(self, kind: str, known: set[str]) -> list[str]:
        wanted = kind == "async"
        return [n for n, h in self.handlers.items() if h.is_async is wanted and n in known]

    def refresh(self, connection: Connection) -> None:
        """Ask the database which types it can know; leaves no transaction behind."""
        if not self._is_enum:
            self._leave_out(self._not_encodable(connection), NOT_ENCODABLE)
            return
        with _transaction(connection):
            found = connection.execute(statements.enum_labels(self.table)).scalars()
            labels: set[str] = set(found)
        self._leave_out(set(self.handlers) - labels, UNKNOWN_LABEL)

    def _not_encodable(self, connection: Connection) -> set[str]:
        dbapi: Any = connection.connection.dbapi_connection
        driver = getattr(dbapi, "driver_connection", dbapi)  # the listener's is detached
        if driver.info.parameter_status("server_encoding") in ("UTF8", "SQL_ASCII"):
            return set()
        doubtful = [name for name in self.handlers if not name.isascii()]
        return {name for name in doubtful if not _can_read(connection, name)}

    def _leave_out(self, missing: set[str], event: tuple[str, str]) -> None:
        with self._lock:
            known = set(self.handlers) - missing
            for kind, types in self.types.items():
                types[:] = self._of_kind(kind, known)
            if missing - self._missing:
                self._tell(sorted(missing), *event)
            self._missing = missing

    def _tell(self, missing: list[str], name: str, why: str) -> None:
        message = f"{why}: {', '.join(missing)}"
        self.events.emit(name, message, level=logging.WARNING, task_types=missing)

    def report(self, connection: Connection) -> None:
        """Tell which types wait without a handler, and how many tasks of each."""
        kinds = connection.execute(statements.waiting_kinds(self.table)).scalars().all()
        for kind in sorted(set(kinds) - set(self.handlers)):
            count = connection.execute(
                statements.count_waiting(self.table, COUNT_LIMIT), {"kind": kind}
            ).scalar_one()
            shown = f"{count:,}" if count < COUNT_LIMIT else f"{COUNT_LIMIT:,} or more"
            self.events.emit(
                "task.unhandled",
                f"{shown} of type {kind} waiting: no handler here knows it",
                level=logging.WARNING,
                task_type=kind,
                count=count,
            )


def _transaction(connection: Connection) -> Any:
    return nullcontext() if connection.in_transaction() else connection.begin()


def _can_read(connection: Connection, name: str) -> bool:
    try:
        with _transaction(connection):
            connection.execute(select(literal(name)))
    except DataError:
        return False
    return True
