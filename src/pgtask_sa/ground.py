"""The ground a handler stands on: a savepoint in the worker's transaction, opened when first used.

The handler may do to its session whatever it likes: commit, roll back, begin, break. The claim
lies below the savepoint and survives all of it. A handler that never touches its session never
pays for one.
"""

from __future__ import annotations

import re
from typing import Any

from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, Engine, event
from typing_extensions import Self

from pgtask_sa.errors import TaskFailed

SAVEPOINT = "pgtask"
ENDS_TRANSACTION = re.compile(
    r"\s*(commit|end|abort|rollback(?!\s+(work\s+|transaction\s+)?to\b)|begin|start\s+transaction"
    r"|prepare\s+transaction)\b",
    re.IGNORECASE,
)
ENDED = "the handler ended the worker's transaction; it may only commit or roll back its session"


def watch_errors(engine: Engine) -> None:
    """Remember on each connection its last database error: a handler may swallow it."""

    @event.listens_for(engine, "handle_error")
    def _remember(context: Any) -> None:
        if context.connection is not None and not context.connection.invalidated:
            context.connection.info["pgtask_trouble"] = context.original_exception


class Ground:
    """Watches one connection on behalf of the handler that is running on it."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.armed = False
        self.open = False
        for name in ("before_cursor_execute", "commit", "rollback"):
            event.listen(connection, name, getattr(self, f"_{name}"))

    def __enter__(self) -> Self:
        """Stand guard while a handler runs."""
        self.armed, self.open = True, False
        self.connection.info.pop("pgtask_trouble", None)
        return self

    def __exit__(self, *_: object) -> None:
        """Stand down; the savepoint, if there is one, stays open."""
        self.armed = False

    def close(self) -> None:
        """Stop watching the connection."""
        for name in ("before_cursor_execute", "commit", "rollback"):
            event.remove(self.connection, name, getattr(self, f"_{name}"))

    def _before_cursor_execute(
        self, _conn: Any, cursor: Any, statement: str, _params: Any, _context: Any, _many: bool
    ) -> None:
        if not self.armed:
            return
        if ENDS_TRANSACTION.match(statement):
            raise TaskFailed(ENDED)
        if not self.open:
            cursor.execute(f"SAVEPOINT {SAVEPOINT}")
            self.open = True

    def _commit(self, _conn: Connection) -> None:
        if self.armed:
            raise TaskFailed(ENDED)

    _rollback = _commit

    def undo(self) -> None:
        """Undo all that the handler did, also what it committed; the claim stays."""
        if self.open:
            self._execute(f"ROLLBACK TO SAVEPOINT {SAVEPOINT}")
            self.keep()

    def keep(self) -> None:
        """Keep what the handler did, as part of the worker's transaction."""
        if self.open:
            self._execute(f"RELEASE SAVEPOINT {SAVEPOINT}")
            self.open = False

    def _execute(self, statement: str) -> None:
        # past SQLAlchemy, whose own savepoints on this connection may be in any state by now
        cursor = self.connection.connection.cursor()
        try:
            cursor.execute(statement)
        finally:
            cursor.close()

    def status(self) -> TransactionStatus:
        """Ask the driver, without a round trip, what became of the transaction."""
        if self.connection.closed or self.connection.invalidated:
            return TransactionStatus.UNKNOWN
        driver: Any = self.connection.connection.driver_connection
        status: TransactionStatus = driver.info.transaction_status
        return status

    def trouble(self) -> BaseException | None:
        """Return the last database error on this connection since the handler began."""
        if self.connection.closed or self.connection.invalidated:
            return None
        found: BaseException | None = self.connection.info.get("pgtask_trouble")
        return found
