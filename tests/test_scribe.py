"""Notes of an event loop's lanes: nobody waits for the loop, and the loop for nobody."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from running import Running
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError
from waiting import let_pass, wait_until

from pgtask_sa import Task
from pgtask_sa.claim import BACKEND_PID, BEGUN_AT, ROW_VERSION
from pgtask_sa.engines import EARS, worker_engine
from pgtask_sa.events import Events
from pgtask_sa.presence import Presence
from pgtask_sa.presence_table import LOCK_CLASS
from pgtask_sa.scribe import Scribe

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

pytestmark = pytest.mark.direct  # through a pooler nothing is noted

LANES = 3
LOOK = 0.01  # seconds between looks whether it is done
CUT = (  # the entry's connection: it holds the lock that says that the worker lives
    "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and granted"
    " and database = (select oid from pg_database where datname = current_database())"
)


class Notes:
    """A worker's entry with some lanes, a scribe for them, and a look at the table."""

    def __init__(self, url: str) -> None:
        self.engine = worker_engine(url, 1)
        self.presence = Presence(self.engine, Task.__table__, Events([]))
        self.admin = create_engine(url, isolation_level="AUTOCOMMIT")
        self.lanes = [self.presence.enlist() for _ in range(LANES)]
        for lane in self.lanes:
            self.presence.note(lane, batch(0))

    def close(self) -> None:
        self.presence.leave()
        self.engine.dispose()
        self.admin.dispose()

    def run(self, work: Callable[[Scribe], Coroutine[Any, Any, Any]]) -> Any:
        async def running() -> Any:
            scribe = Scribe(self.presence)
            try:
                return await asyncio.wait_for(work(scribe), 30)
            finally:
                scribe.close()

        return asyncio.run(running())

    def rows(self, columns: str = "task_ids") -> list[Any]:
        statement = f"select {columns} from task_worker order by lane"  # noqa: S608
        with self.admin.connect() as connection:
            return list(connection.scalars(text(statement)))

    def count(self, what: str) -> int:
        with self.admin.connect() as connection:
            return connection.scalar(text(f"select count(*) from {what}"))  # noqa: S608

    def cut(self) -> None:
        """End the server process of the entry's connection."""
        end = (
            "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and granted"
        )
        with self.admin.connect() as connection:
            connection.execute(text(end))


@pytest.fixture
def notes(db_url) -> Iterator[Notes]:
    notes = Notes(db_url)
    yield notes
    notes.close()


def batch(*task_ids: int) -> Any:
    values = {ROW_VERSION: 1, BACKEND_PID: None, BEGUN_AT: None}
    return [SimpleNamespace(task_id=task_id, values=values) for task_id in task_ids]


def test_notes_that_meet_travel_together(notes: Notes):
    """In one transaction; what comes up meanwhile goes with the next."""

    async def work(scribe: Scribe) -> Any:
        first = [scribe.note(lane, batch(lane)) for lane in notes.lanes]
        written = await asyncio.gather(*first)
        before = notes.rows("xmin::text")
        alone = await scribe.note(notes.lanes[0], batch(9, 10))
        return written, alone, before

    written, alone, before = notes.run(work)
    assert ([True] * LANES, True, 1) == (written, alone, len(set(before)))
    assert [[9, 10], [2], [3]] == notes.rows()


def test_the_loop_goes_on(notes: Notes):
    """While the server takes its time over a note, other coroutines have their turn."""

    async def work(scribe: Scribe) -> Any:
        with notes.admin.connect() as connection:
            connection.execution_options(isolation_level="READ COMMITTED")
            connection.execute(text("select from task_worker for update"))
            under_way = scribe.note(1, batch(7))
            for _ in range(5):
                await asyncio.sleep(LOOK)
            is_done = under_way.done()
            connection.rollback()
        return is_done, await under_way

    assert (False, True) == notes.run(work)
    assert [7] == notes.rows()[0]


def test_who_needs_the_connection_does_not_wait_for_the_loop(notes: Notes):
    """A handler may hold the loop up; a thread reads the answer that came for it, and goes on."""

    async def work(scribe: Scribe) -> Any:
        under_way = [scribe.note(lane, batch(7)) for lane in notes.lanes]
        await asyncio.sleep(0)  # they are sent
        thread = threading.Thread(target=notes.presence.look_after)
        thread.start()
        thread.join(20)  # the loop stands still meanwhile
        return thread.is_alive(), await asyncio.gather(*under_way)

    assert (False, [True] * LANES) == notes.run(work)
    assert [[7]] * LANES == notes.rows()


def test_the_end_does_not_wait_for_the_loop(notes: Notes):
    """A worker leaves in order, also if its loop never comes back."""

    async def work(scribe: Scribe) -> Any:
        under_way = scribe.note(1, batch(7))
        await asyncio.sleep(0)
        thread = threading.Thread(target=notes.presence.leave)
        thread.start()
        thread.join(20)
        return thread.is_alive(), await under_way

    assert (False, True) == notes.run(work)
    assert [] == notes.rows()


@pytest.mark.parametrize("when", ["before", "under way"])
def test_a_connection_that_is_lost(notes: Notes, when: str):
    """The notes are not taken for written; a thread writes them, on another connection."""

    async def work(scribe: Scribe) -> Any:
        if when == "before":
            notes.cut()
            return await scribe.note(1, batch(7))
        with notes.admin.connect() as connection:
            connection.execution_options(isolation_level="READ COMMITTED")
            connection.execute(text("select from task_worker for update"))
            under_way = scribe.note(1, batch(7))
            await asyncio.sleep(0)
            notes.cut()
            return await under_way

    assert notes.run(work) is False
    notes.presence.note(1, batch(7))
    assert [[7], [0], [0]] == notes.rows()
    assert notes.run(lambda scribe: _one(scribe, 8))
    assert [8] == notes.rows()[0]


async def _one(scribe: Scribe, task_id: int) -> bool:
    return await scribe.note(1, batch(task_id))


def test_a_lane_that_is_cut_off_meanwhile(notes: Notes):
    """Before its note was sent it is not; after that it is, and the others learn of theirs."""

    async def work(scribe: Scribe) -> Any:
        scribe.note(1, batch(5)).cancel()
        second = scribe.note(2, batch(6))
        await asyncio.sleep(0)
        third = scribe.note(3, batch(7))
        second.cancel()
        return await third

    assert notes.run(work) is True
    assert [[0], [6], [7]] == notes.rows()


def test_a_row_that_is_somewhere_else(notes: Notes):
    """One that somebody took out is not written, and the others are."""
    with notes.admin.connect() as connection:
        connection.execute(text("delete from task_worker where lane = 1"))

    async def work(scribe: Scribe) -> Any:
        return await asyncio.gather(*(scribe.note(lane, batch(7)) for lane in notes.lanes))

    assert [False, True, True] == notes.run(work)
    notes.presence.note(1, batch(8))
    assert [[8], [7], [7]] == notes.rows()


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_server_that_has_not_missed_the_connection(notes: Notes):
    """It holds the worker's lock for the session before, which is ended, and not waited for."""
    statement = f"select pg_advisory_lock({LOCK_CLASS}, {notes.presence.worker_id})"
    with notes.admin.connect() as predecessor:
        waiting = threading.Thread(target=predecessor.execute, args=[text(statement)])
        waiting.start()
        wait_until(lambda: notes.count("pg_locks where locktype = 'advisory'") == 2)
        notes.cut()
        waiting.join(10)
        notes.presence.note(1, batch(7))
        assert [[7], [0], [0]] == notes.rows()
        with pytest.raises(DBAPIError):
            predecessor.execute(text("select 1"))
        predecessor.invalidate()


def test_no_file_descriptors_for_a_moment(notes: Notes, monkeypatch):
    """The note is left to a thread, and the next one is sent as usual."""

    async def work(scribe: Scribe) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr("os.dup", _raise)
            first = await scribe.note(1, batch(7))
        notes.presence.note(1, batch(7))
        return first, await scribe.note(1, batch(8))

    assert (False, True) == notes.run(work)


def _raise(*_: Any) -> None:
    raise OSError(24, "Too many open files")


def test_the_answer_for_another_loop(notes: Notes):
    """One that was given up and comes back does not read what its successor waits for."""

    async def work(scribe: Scribe) -> Any:
        other = Scribe(notes.presence)
        under_way = scribe.note(1, batch(7))
        await asyncio.sleep(0)
        other._sent = []
        for _ in range(5):
            other._see()
            let_pass(LOOK)
        return await under_way

    assert notes.run(work) is True


def test_a_child_keeps_no_socket(notes: Notes):
    """A process that a handler forks does not keep the connection of a dead worker open."""

    async def work(scribe: Scribe) -> Any:
        await scribe.note(1, batch(7))
        child = os.fork()
        if not child:
            os._exit(0 if all(os.path.samestat(null, os.fstat(ear)) for ear in EARS) else 1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])  # noqa: ASYNC222
        return code, await scribe.note(1, batch(8))

    null = Path(os.devnull).stat()
    assert (0, True) == notes.run(work)


def test_no_socket_stays_open(notes: Notes):
    """Also not if connections were lost on the way."""

    def lose() -> None:
        notes.run(lambda scribe: _one(scribe, 7))
        notes.cut()
        notes.run(lambda scribe: _one(scribe, 8))
        notes.presence.note(1, batch(8))

    lose()
    before = _open_files()
    for _ in range(3):
        lose()
    assert before == _open_files()


def test_both_kinds_in_one_worker_while_its_entry_is_cut_off(db_url):
    """Every task runs once, whoever notes it: a thread or the loop."""
    running = Running(db_url, concurrency=3, idle_interval=0.1)

    @running.tasks.handler("A")
    async def a(session, params):
        await session.execute(text("insert into mark values (:i)"), {"i": params["i"]})

    @running.tasks.handler("B")
    def b(session, params):
        session.execute(text("insert into mark values (:i)"), {"i": params["i"]})

    count = 400
    for kind in "AB":
        running.execute(
            "insert into task (task_type, params)"
            f" select '{kind}', jsonb_build_object('i', i) from generate_series(1, {count}) i"
        )
    with running:
        while running.count("task"):
            running.execute(CUT)
            let_pass(0.05)
        running.until_empty()
    assert [(i, 2) for i in range(1, count + 1)] == running.rows(
        "select i, count(*) from mark group by i order by i"
    )
    assert 0 == running.count("dead_task")
    wait_until(lambda: running.count("task_worker") == 0)
