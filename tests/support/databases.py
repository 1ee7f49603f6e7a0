"""Databases for single tests: made from a template in some ten milliseconds, and dropped after."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import NullPool, create_engine, make_url, text

if TYPE_CHECKING:
    from collections.abc import Iterator

_PREFIX = "pgtask_test_"


_MEMORY = Path("/dev/shm")
_ROOM = 2 << 30  # bytes; a server under test takes some hundred megabytes at most


def memory() -> Path | None:
    """Return a directory in memory with room for a server's data, where there is one.

    A database is made and dropped for each test, and a disk that others write to, too, takes ten
    times as long for it.
    """
    if not (_MEMORY.is_dir() and os.access(_MEMORY, os.W_OK)):
        return None
    return _MEMORY if shutil.disk_usage(_MEMORY).free > _ROOM else None


def with_psycopg(url: str) -> str:
    """Return any PostgreSQL URL as one of scheme `postgresql+psycopg`, its password kept."""
    # libpq also takes the short scheme, and hosting services like to give it.
    parsed = make_url(url.replace("postgres://", "postgresql://", 1))
    if parsed.get_backend_name() != "postgresql":
        raise ValueError(f"not a PostgreSQL URL: {parsed!r}")
    return parsed.set(drivername="postgresql+psycopg").render_as_string(hide_password=False)


class Databases:
    """Makes databases on the server of `admin_url`; never touches one that it did not make."""

    def __init__(self, admin_url: str) -> None:
        self.admin_url = make_url(admin_url)
        # No pool: the server may be restarted between two tests.
        self._engine = create_engine(
            self.admin_url, isolation_level="AUTOCOMMIT", poolclass=NullPool
        )
        self._strategy = self._best_strategy()

    @contextmanager
    def temporary(self, template: str | None = None) -> Iterator[str]:
        """Make a database, yield its URL, and drop it with all its sessions."""
        name = _PREFIX + secrets.token_hex(6)
        self._execute(f"create database {name} template {template or 'template1'}{self._strategy}")
        try:
            yield self.admin_url.set(database=name).render_as_string(hide_password=False)
        finally:
            self._execute(f"drop database {name} with (force)")

    def _execute(self, statement: str) -> None:
        with self._engine.connect() as connection:
            connection.execute(text(statement))

    def _best_strategy(self) -> str:
        """Return the clause that copies whole files, the faster way where checkpoints are free."""
        with self._engine.connect() as connection:
            version = int(connection.scalar(text("show server_version_num")) or 0)
            fsync = connection.scalar(text("show fsync"))
        return " strategy file_copy" if version >= 150_000 and fsync == "off" else ""
