"""The work of a benchmark done with the library, in the ways that its README shows."""

from __future__ import annotations

import logging
import time
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
DATABASE = "ours"

USER_ROWS = "create table user_rows (id bigint primary key generated always as identity, i bigint)"
ROW = text("insert into user_rows (i) values (:i)")
NAP = 0.005  # seconds


def engine_of(url: str, **options: Any) -> Engine:
    """Make an engine."""
    return create_engine(url.replace("postgresql://", "postgresql+psycopg://", 1), **options)


def reset(url: str) -> None:
    """Make empty tables."""
    engine = engine_of(url, poolclass=NullPool)
    Task.metadata.drop_all(engine)
    Task.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(text("drop table if exists user_rows"))
        connection.execute(text(USER_ROWS))


@contextmanager
def sender(url: str) -> Iterator[Callable[[str, int], None]]:
    """Give a function that enqueues a task in a session and commits."""
    engine = engine_of(url)
    session_class = sessionmaker(engine, class_=TaskSession)

    def send(kind: str, number: int) -> None:
        with session_class.begin() as session:
            session.enqueue(kind, {"i": number})

    yield send
    engine.dispose()


def bulk(url: str, count: int) -> None:
    """Enqueue many tasks in one call."""
    engine = engine_of(url)
    with sessionmaker(engine, class_=TaskSession).begin() as session:
        session.enqueue_many("noop", ({"i": number} for number in range(count)))
    engine.dispose()


def worker(
    url: str,
    tally: Tally,
    *,
    concurrency: int,
    batch: int,
    drain: bool = False,
    only: tuple[str, ...] = (),
    log: dict[str, int] | None = None,
    **options: Any,
) -> None:
    """Run a worker in this process until it is told to stop, or until nothing is left.

    With ``log`` the task types are its keys; executions of each are logged as its number.
    """
    logging.disable(logging.CRITICAL)  # of failures that are wanted
    tasks = handlers(tally, only) if log is None else logged(tally, log)
    Worker(tasks, url, concurrency=concurrency, batch_size=batch, drain=drain, **options).run()


def handlers(tally: Tally, only: tuple[str, ...] = ()) -> TaskRegistry:
    """Make the handlers; every task type is a kind of work."""
    kinds = {**_plain(tally), **_async(tally)}
    tasks = TaskRegistry()
    for kind in only or kinds:
        tasks.handler(kind, max_attempts=1000)(kinds[kind])
    return tasks


def _plain(tally: Tally) -> dict[str, Any]:
    def noop(session: TaskSession, params: dict[str, Any]) -> None:
        tally.hit()

    def row(session: TaskSession, params: dict[str, Any]) -> None:
        session.execute(ROW, params)
        tally.hit()

    def stamp(session: TaskSession, params: dict[str, Any]) -> None:
        tally.hit(params["i"])

    def nap(session: TaskSession, params: dict[str, Any]) -> None:
        time.sleep(NAP)
        tally.hit()

    def fail(session: TaskSession, params: dict[str, Any]) -> None:
        raise ValueError("as always")

    return {function.__name__: function for function in (noop, row, stamp, nap, fail)}


def _async(tally: Tally) -> dict[str, Any]:
    async def async_noop(session: Any, params: dict[str, Any]) -> None:
        tally.hit()

    async def async_stamp(session: Any, params: dict[str, Any]) -> None:
        tally.hit(params["i"])

    return {function.__name__: function for function in (async_noop, async_stamp)}


def logged(tally: Tally, log: dict[str, int]) -> TaskRegistry:
    """Make no-ops that differ in what they log."""
    tasks = TaskRegistry()
    for name, kind in log.items():
        tasks.handler(name)(_logging(tally, kind))
    return tasks


def _logging(tally: Tally, kind: int) -> Any:
    def noop(session: TaskSession, params: dict[str, Any]) -> None:
        tally.hit(kind=kind)

    return noop
