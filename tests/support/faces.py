"""One way to run a piece of work in a session, whatever the driver, sync or async."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from sqlalchemy import NullPool, create_engine, make_url, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from pgtask_sa import AsyncTaskSession, TaskSession

FACES = ("psycopg", "psycopg2", "psycopg async", "asyncpg async")


class Face:
    """Sessions on one database through one driver."""

    def __init__(self, kind: str, url: str, **session_options: Any) -> None:
        driver, _, mode = kind.partition(" ")
        self.url = make_url(url).set(drivername=f"postgresql+{driver}")
        self.is_async = bool(mode)
        self.options = session_options

    def run(self, work: Callable[[TaskSession], Any]) -> Any:
        """Call ``work`` with a session in a transaction, and commit."""
        if self.is_async:
            return asyncio.run(self._run_async(work))
        engine = create_engine(self.url, poolclass=NullPool)
        with sessionmaker(engine, class_=TaskSession, **self.options).begin() as session:
            return work(session)

    async def _run_async(self, work: Callable[[TaskSession], Any]) -> Any:
        engine = create_async_engine(self.url, poolclass=NullPool)
        maker = async_sessionmaker(engine, class_=AsyncTaskSession, **self.options)
        async with maker.begin() as session:
            return await session.run_sync(work)

    def rows(
        self, columns: str = "task_type, params", table: str = "task"
    ) -> list[tuple[Any, ...]]:
        """Return what is committed, in the order of task_id."""
        engine = create_engine(self.url.set(drivername="postgresql+psycopg"), poolclass=NullPool)
        with engine.connect() as connection:
            found = connection.execute(text(f"select {columns} from {table} order by task_id"))
            return [tuple(row) for row in found]


def committed(engine: Any, columns: str = "task_type, params", table: str = "task") -> list[Any]:
    """Return what is committed, in the order of task_id, seen from a new connection."""
    with engine.connect() as connection:
        found = connection.execute(text(f"select {columns} from {table} order by task_id"))
        return [tuple(row) for row in found]
