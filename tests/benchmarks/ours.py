"""The work of a benchmark done with the library, in the ways that its README shows."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.orm import sessionmaker

from pgtask_sa import Task, TaskRegistry, TaskSession, Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Engine
    from tally import Tally

NAME = "pgtask_sa"

USER_ROWS = "create table user_rows (id bigint primary key generated always as identity, i bigint)"
ROW = text("insert into user_rows (i) values (:i)")


def _engine(url: str, **options: Any) -> Engine:
    return create_engine(url.replace("postgresql://", "postgresql+psycopg://", 1), **options)


def reset(url: str) -> None:
    """Make empty tables."""
    engine = _engine(url, poolclass=NullPool)
    Task.metadata.drop_all(engine)
    Task.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(text("drop table if exists user_rows"))
        connection.execute(text(USER_ROWS))


@contextmanager
def sender(url: str) -> Iterator[Callable[[str, int], None]]:
    """Give a function that enqueues a task in a session and commits."""
    engine = _engine(url)
    session_class = sessionmaker(engine, class_=TaskSession)

    def send(kind: str, number: int) -> None:
        with session_class.begin() as session:
            session.enqueue(kind, {"i": number})

    yield send
    engine.dispose()


def bulk(url: str, count: int) -> None:
    """Enqueue many tasks in one call."""
    engine = _engine(url)
    with sessionmaker(engine, class_=TaskSession).begin() as session:
        session.enqueue_many("noop", ({"i": number} for number in range(count)))
    engine.dispose()


def worker(url: str, tally: Tally, *, concurrency: int, batch: int, drain: bool) -> None:
    """Run a worker in this process until it is told to stop, or until nothing is left."""
    registry = handlers(tally)
    Worker(registry, url, concurrency=concurrency, batch_size=batch, drain=drain).run()


def handlers(tally: Tally) -> TaskRegistry:
    """Make the handlers; every task type is a kind of work."""
    tasks = TaskRegistry()

    @tasks.handler("noop")
    def noop(session: TaskSession, params: dict[str, Any]) -> None:
        tally.hit()

    @tasks.handler("async_noop")
    async def async_noop(session: Any, params: dict[str, Any]) -> None:
        tally.hit()

    @tasks.handler("row")
    def row(session: TaskSession, params: dict[str, Any]) -> None:
        session.execute(ROW, params)
        tally.hit()

    @tasks.handler("stamp")
    def stamp(session: TaskSession, params: dict[str, Any]) -> None:
        tally.hit(params["i"])

    @tasks.handler("async_stamp")
    async def async_stamp(session: Any, params: dict[str, Any]) -> None:
        tally.hit(params["i"])

    return tasks
