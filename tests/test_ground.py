"""The ground a handler stands on: one savepoint, lent to its session, on one connection only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from sqlalchemy import event, text
from sqlalchemy.orm import Session
from waiting import wait_until

from pgtask_sa import Task, TaskSession
from pgtask_sa.engines import database_url, worker_engine
from pgtask_sa.ground import Ground

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection, Engine


@pytest.fixture
def engine(db_url: str) -> Iterator[Engine]:
    engine = worker_engine(database_url(db_url), 2)
    with engine.begin() as connection:
        connection.execute(text("create table mark (i int)"))
    yield engine
    engine.dispose()


@pytest.fixture
def lane(engine: Engine) -> Iterator[Connection]:
    """Give a connection that has claimed something."""
    with engine.connect() as connection:
        connection.execute(text("select 1"))
        yield connection


def marks(connection: Connection) -> list[int]:
    return list(connection.scalars(text("select i from mark order by i")))


def mark(session: Session, i: int) -> None:
    session.execute(text("insert into mark values (:i)"), {"i": i})


def statements(engine: Engine) -> list[str]:
    """List what SQLAlchemy sends from now on."""
    sent: list[str] = []
    event.listen(
        engine, "before_cursor_execute", lambda _c, _k, statement, *_: sent.append(statement)
    )
    return sent


def test_a_connection_out_of_its_pool_is_none_of_a_handlers(engine: Engine):
    """The worker's own one works on while a handler runs, and opens no savepoint on the lane's."""
    with engine.connect() as own:
        driver = own.connection.driver_connection
        own.detach()
        with engine.connect() as lane, lane.begin():  # where the other one was
            lane.execute(text("select 1"))
            ground = Ground(lane)
            with ground:
                own.execute(text("select 1"))
                driver.commit()
                assert not ground.used
            ground.close()


def test_a_session_gets_the_savepoint_lent(engine: Engine, lane: Connection):
    """A handler that writes and commits costs no savepoint of SQLAlchemy's."""
    ground = Ground(lane)
    sent = statements(engine)
    with ground, Session(lane, join_transaction_mode="create_savepoint") as session:
        mark(session, 1)
        session.commit()
    ground.keep()
    ground.close()
    assert ["insert into mark values (%(i)s)"] == sent
    assert [1] == marks(lane)


def test_a_session_that_goes_on_after_commit(lane: Connection):
    """What it rolls back then is undone; what it committed stays, unless the task fails."""
    ground = Ground(lane)
    with ground, Session(lane, join_transaction_mode="create_savepoint") as session:
        mark(session, 1)
        session.commit()
        mark(session, 2)
        with session.begin_nested():
            mark(session, 3)
        session.rollback()
        mark(session, 4)
        session.commit()
        assert [1, 4] == marks(lane)
    ground.undo()
    ground.close()
    assert [] == marks(lane)


def test_a_session_that_begins_with_a_rollback(lane: Connection):
    """The savepoint can be lent once more."""
    ground = Ground(lane)
    with ground, Session(lane, join_transaction_mode="create_savepoint") as session:
        mark(session, 1)
        session.rollback()
        mark(session, 2)
        session.commit()
    ground.keep()
    ground.close()
    assert [2] == marks(lane)


def test_the_next_task_of_a_batch_stands_on_its_own_ground(lane: Connection):
    """To undo one leaves what the others did; also if the savepoint was asked for ahead."""
    ground = Ground(lane)
    for i in range(4):
        with ground, Session(lane, join_transaction_mode="create_savepoint") as session:
            if i > 1:
                ground.expect()
            mark(session, i)
            session.commit()
        if i % 2:
            ground.undo()
        else:
            ground.keep()
    ground.close()
    assert [0, 2] == marks(lane)


def test_a_savepoint_that_was_asked_for_in_vain(lane: Connection):
    """A handler that turns out not to write leaves the connection ready."""
    ground = Ground(lane)
    with ground:
        ground.expect()
        assert psycopg.pq.TransactionStatus.INTRANS == ground.status()
    ground.keep()
    ground.close()
    assert [] == marks(lane)


SETTINGS = {  # statement: whether the connection is to be given up, whether to be put right
    "select set_config('search_path', 'a', false)": (True, True),
    "select set_config('search_path', lower('A'), true)": (False, True),
    "select set_config('a.b', '1', true), set_config('a.c', '1', false)": (True, True),
    "select set_config('a.b', '1', true), set_config('a.c', '1', true)": (False, True),
    "select set_config('a.b', '1', (true and false))": (True, True),
    "set local work_mem = '1MB'": (False, True),
    "set work_mem = '1MB'": (True, True),
    "select 1": (False, False),
}


@pytest.mark.parametrize("statement", SETTINGS)
def test_what_a_handler_sets(lane: Connection, statement: str):
    """What is for its transaction only costs it no connection."""
    ground = Ground(lane)
    with ground:
        lane.execute(text(statement))
    assert SETTINGS[statement] == (ground.moved, ground.shifted)
    ground.close()


def test_an_enqueue_that_may_have_to_wait(engine: Engine, lane: Connection):
    """It sets a limit and sets it back: the lane's connection is as before."""
    Task.metadata.create_all(engine)
    ground = Ground(lane)
    with ground, TaskSession(lane, join_transaction_mode="create_savepoint") as session:
        session.enqueue("A", {"i": 1}, coalesce=True)
        session.commit()
        assert 1 == session.scalar(text("select count(*) from task"))
    assert (False, False) == (ground.moved, ground.shifted)
    ground.close()


def test_why_the_server_ended_the_connection(engine: Engine, lane: Connection):
    """It says so while nothing is being asked; an error that follows does not."""
    ground, pid = Ground(lane), lane.scalar(text("select pg_backend_pid()"))
    with ground, engine.connect() as admin:
        pgconn = ground.driver.pgconn
        admin.execute(text("select pg_terminate_backend(:pid)"), {"pid": pid})
        gone = text("select not exists (select from pg_stat_activity where pid = :pid)")
        wait_until(lambda: admin.scalar(gone, {"pid": pid}))
        wait_until(lambda: _has_heard(pgconn))
        with pytest.raises(psycopg.Error) as raised:
            ground.stand()
        assert psycopg.errors.AdminShutdown is type(ground.reason(raised.value))
    ground.close()
    lane.invalidate()


def _has_heard(pgconn: Any) -> bool:
    """Read what is there; True when the connection is known to be gone."""
    try:
        pgconn.consume_input()
        pgconn.is_busy()
    except psycopg.OperationalError:
        return True
    return False
