"""Enqueue in events, under two phases, with several engines, few rights and other schemas."""

from __future__ import annotations

import pickle
import uuid
import warnings
from typing import Any

import pytest
from faces import committed
from own_models import Usr, create_all
from sqlalchemy import (
    Delete,
    Engine,
    Insert,
    Text,
    Update,
    cast,
    create_engine,
    event,
    func,
    select,
    text,
)
from sqlalchemy.orm import sessionmaker

from pgtask_sa import ConfigurationError, EnqueueError, Task, TaskSession
from pgtask_sa.mapping import LOCK_CLASS

ENQUEUES = {
    "plain": lambda session: session.enqueue("A", {}),
    "with a flush": lambda session: session.enqueue("A", dict),
    "coalesced": lambda session: session.enqueue("A", {}, coalesce=True),
    "many": lambda session: session.enqueue_many("A", [{}, {}]),
}


@pytest.mark.parametrize("way", ENQUEUES)
def test_a_session_in_autocommit(maker: Any, engine: Engine, way: str) -> None:
    """A rollback would not take the task back, and that is said; nothing is, without autocommit."""
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    with maker(bind=autocommit) as session, pytest.warns(UserWarning, match="a rollback does not"):
        ENQUEUES[way](session)
        session.flush()
    with maker() as session, warnings.catch_warnings():
        warnings.simplefilter("error")
        ENQUEUES[way](session)
        session.commit()


@pytest.fixture
def maker(engine: Engine) -> sessionmaker[TaskSession]:
    """Sessions on a fresh database with our tables and those of own_models."""
    create_all(engine)
    return sessionmaker(engine, class_=TaskSession)


# -- events (C16) ---------------------------------------------------------------------------------


def test_enqueue_in_before_commit(maker: Any, engine: Engine) -> None:
    """The last moment at which an enqueue is possible."""
    with maker() as session:
        event.listen(session, "before_commit", lambda s: s.enqueue("A"), once=True)
        session.commit()

    assert committed(engine) == [("A", {})]


def test_enqueue_in_after_commit_is_a_clear_error(maker: Any, engine: Engine) -> None:
    """The task would be pending in a session that is about to be closed: lost."""
    errors = []

    def too_late(session):
        try:
            session.enqueue("A")
        except EnqueueError as error:
            errors.append(str(error))

    with maker() as session:
        event.listen(session, "after_commit", too_late)
        session.add(Usr())
        session.commit()

    assert "enqueue before commit" in errors[0]
    assert committed(engine) == []


def test_enqueue_in_before_flush_is_written_by_that_flush(maker: Any, engine: Engine) -> None:
    """An audit listener may enqueue for the rows about to be written."""
    with maker() as session:

        def listener(session, _context, _objects):
            if any(isinstance(row, Usr) for row in session.new):
                usr = next(row for row in session.new if isinstance(row, Usr))
                session.enqueue("SEEN")
                session.enqueue("SEEN", lambda: {"usr_id": usr.usr_id})

        event.listen(session, "before_flush", listener)
        session.add(Usr())
        session.flush()
        assert (list(session.new), session._ledger.tasks) == ([], [])
        session.commit()

    assert committed(engine) == [("SEEN", {}), ("SEEN", {"usr_id": 1})]


# -- engines (B16, B17, C17, C18) -----------------------------------------------------------------


def test_two_phase_transactions_do_not_notify(engine: Engine, db_url: str) -> None:
    """PREPARE fails in a transaction that has notified; the trigger is told to be quiet (B16)."""
    with engine.begin() as connection:
        if connection.scalar(text("show max_prepared_transactions")) == "0":
            pytest.skip("the server does not allow prepared transactions")
    sleeper = engine.connect()  # a worker that sleeps: without care the trigger would notify
    sleeper.execute(
        select(func.pg_advisory_lock_shared(LOCK_CLASS, text("'task'::regclass::oid::int")))
    )
    try:
        with TaskSession(engine, twophase=True) as session:
            session.enqueue("A")
            session.flush()
            session.enqueue_many("B", [{}])
            session.enqueue("C", coalesce=True)
            session.commit()
    finally:
        sleeper.close()

    assert [row[0] for row in committed(engine)] == ["A", "B", "C"]


@pytest.fixture
def other(databases) -> Any:
    """Another database, with the tables of own_models."""
    with databases.temporary() as url:
        engine = create_engine(url)
        create_all(engine)
        yield engine
        engine.dispose()


@pytest.mark.parametrize("first", ["task", "row"])
@pytest.mark.parametrize("how", ["orm", "core"])
def test_two_engines_in_one_transaction_are_refused(
    engine: Engine, other: Engine, first: str, how: str
) -> None:
    """Two commits could keep the one and lose the other (B17)."""
    with TaskSession(binds={Task: engine, Usr: other}) as session:

        def write_row():
            if how == "orm":
                session.add(Usr(usr_id=1))
            else:
                session.execute(Usr.__table__.insert().values(usr_id=1))

        steps = [lambda: session.enqueue("A"), write_row]
        for step in steps if first == "task" else reversed(steps):
            step()
            session.flush()
        with pytest.raises(ConfigurationError, match="through different engines"):
            session.commit()
        session.rollback()

    assert committed(engine) == []
    assert committed(other, "usr_id as task_id", "usr") == []


def test_reading_through_another_engine_is_fine(engine: Engine, other: Engine) -> None:
    """Read replicas are common, and nothing can be lost by them."""
    with TaskSession(binds={Task: engine, Usr: other}) as session:
        session.scalars(select(Usr)).all()
        session.enqueue("A")
        session.commit()
        session.add(Usr(usr_id=1))  # the next transaction has no task
        session.commit()

    assert committed(engine) == [("A", {})]
    assert committed(other, "usr_id as task_id", "usr") == [(1,)]


def test_a_role_that_may_only_insert_and_see_the_key(engine: Engine, db_url: str) -> None:
    """A plain enqueue needs INSERT, and SELECT on what it returns (C17)."""
    role = f"web_{uuid.uuid4().hex[:8]}"
    returned = "task_id, created_at, attempts, ticket, priority"
    with engine.begin() as connection:
        connection.execute(text(f"create role {role}"))
        connection.execute(text(f"grant insert, select ({returned}) on task to {role}"))
    with TaskSession(engine) as session:
        session.execute(text(f"set local role {role}"))
        session.enqueue("A", lambda: {"a": 1})
        session.commit()
    found = committed(engine)
    with engine.begin() as connection:
        connection.execute(text(f"drop owned by {role}"))
        connection.execute(text(f"drop role {role}"))

    assert found == [("A", {"a": 1})]


def test_schema_translation_is_followed(engine: Engine) -> None:
    """With a translate map the task lands in the tenant's table, in every way of writing (C18)."""
    tenant = engine.execution_options(schema_translate_map={None: "tenant"})
    with tenant.begin() as connection:
        connection.execute(text("create schema tenant"))
        Task.metadata.create_all(connection)
    with TaskSession(tenant) as session:
        session.enqueue("A", delay=1)
        session.enqueue_many("B", [{}])
        session.enqueue("C", coalesce=True)
        session.commit()

    assert committed(engine) == []
    assert [row[0] for row in committed(engine, table="tenant.task")] == ["A", "B", "C"]


def test_a_plain_sql_insert_is_a_task(engine: Engine) -> None:
    """The table is the interface: type and params are enough."""
    with engine.begin() as connection:
        connection.execute(text("insert into task (task_type, params) values ('A', '{\"a\": 1}')"))

    with engine.connect() as connection:
        ticket = connection.scalar(select(cast(Task.ticket, Text)))
    assert committed(engine) == [("A", {"a": 1})]
    assert 0 <= float(ticket) < 1


@pytest.fixture
def routed(engine: Engine, db_url: str) -> Any:
    """Sessions that send reads to a replica, by the pattern in SQLAlchemy's documentation."""
    create_all(engine)
    read_only = {"options": "-c default_transaction_read_only=on"}
    follower = create_engine(db_url, connect_args=read_only)

    class RoutingSession(TaskSession):
        def get_bind(self, mapper=None, clause=None, **kw):
            is_write = self._flushing or isinstance(clause, (Update, Delete, Insert))
            return engine if is_write else follower

    yield sessionmaker(class_=RoutingSession)
    follower.dispose()


@pytest.mark.parametrize(
    "enqueue",
    [
        lambda session: session.enqueue("A"),
        lambda session: session.enqueue("A", dict),
        lambda session: session.enqueue("A", coalesce=True),
        lambda session: session.enqueue_many("A", [{}]),
    ],
    ids=["plain", "callable", "coalesce", "many"],
)
def test_routing_sessions_write_tasks_where_they_write(
    routed: Any, engine: Engine, enqueue: Any
) -> None:
    """An enqueue is a write, also where it is no flush."""
    with routed() as session:
        session.add(Usr())
        enqueue(session)
        session.commit()

    assert committed(engine) == [("A", {})]


def test_routing_sessions_load_what_the_server_chose(routed: Any) -> None:
    """The replica does not have the row, which is not even committed."""
    with routed() as session:
        task = session.enqueue("A", delay=60)
        session.commit()

    assert task.run_at > task.created_at


def _to_another(session: Any, task: Any) -> Any:
    session.expunge(task)
    return task


@pytest.mark.parametrize("copied", [_to_another, lambda _, task: pickle.loads(pickle.dumps(task))])
def test_callable_params_do_not_travel(maker: Any, engine: Engine, copied: Any) -> None:
    """Another session does not know the callable, and must not write ``{}``."""
    with maker() as session, maker() as other:
        task = copied(session, session.enqueue("A", lambda: {"usr_id": 1}))
        assert task.params == {}
        other.add(task)
        with pytest.raises(EnqueueError, match="which only that session can evaluate"):
            other.commit()

    assert committed(engine) == []
