"""Enqueue takes part in the caller's unit of work, on every driver."""

from __future__ import annotations

import datetime as dt
import uuid
from dataclasses import dataclass
from typing import Any

import pytest
from faces import FACES, Face, committed
from own_models import Base, EnumJob, HstoreJob, Kind, PlainJob, Usr, create_all
from sqlalchemy import Engine, create_engine, func, inspect, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from pgtask_sa import (
    ConfigurationError,
    EnqueueError,
    EnqueueMixin,
    ParamsError,
    Task,
    TaskRegistry,
    TaskSession,
)


@pytest.fixture
def maker(engine: Engine) -> sessionmaker[TaskSession]:
    """Sessions on a fresh database with our tables and those of own_models."""
    create_all(engine)
    return sessionmaker(engine, class_=TaskSession)


@pytest.fixture(params=FACES)
def face(request, db_url: str) -> Face:
    return Face(request.param, db_url)


@dataclass
class Welcome:
    usr_id: uuid.UUID
    at: dt.date


# -- every driver ---------------------------------------------------------------------------------


def test_a_committed_task_is_a_row(face: Face) -> None:
    """What is committed is there, with its params, and the object knows its key."""
    params = {"usr_id": 1, "tags": ["æ", None, {"b": 2.5}], "big": 2**70}

    task = face.run(lambda session: session.enqueue("SEND", params))

    assert face.rows("task_id, task_type, params, run_at") == [(task.task_id, "SEND", params, None)]


def test_a_rolled_back_task_is_no_row(face: Face) -> None:
    """A rollback of the caller leaves no task, flushed or not."""

    def work(session):
        session.enqueue("FLUSHED")
        session.flush()
        session.enqueue("PENDING")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        face.run(work)

    assert face.rows() == []


def test_savepoints_decide_about_what_was_enqueued_in_them(face: Face) -> None:
    """Exactly the tasks whose savepoint survived are kept (B13)."""

    def work(session):
        session.enqueue("OUTER")
        with session.begin_nested():
            session.enqueue("KEPT")
            session.enqueue("KEPT_DEFERRED", lambda: {"a": 1})
        with session.begin_nested() as savepoint:
            session.enqueue("GONE")
            session.flush()
            session.enqueue("GONE_PENDING")
            session.enqueue("GONE_DEFERRED", lambda: {"a": 1})
            savepoint.rollback()
        session.enqueue("LAST")

    face.run(work)

    assert [row[0] for row in face.rows()] == ["OUTER", "KEPT", "KEPT_DEFERRED", "LAST"]


def test_delayed_tasks_are_due_by_the_servers_clock(face: Face) -> None:
    """A delay is counted from the call's flush, not from the start of the transaction (H3)."""

    def work(session):
        session.execute(text("select pg_sleep(0.2)"))
        return session.enqueue("A", delay=dt.timedelta(minutes=1))

    task = face.run(work)
    [(seconds, run_at)] = face.rows("extract(epoch from run_at - created_at)::float, run_at")

    assert 60.2 <= seconds < 70
    assert task.run_at == run_at


def test_run_at_is_kept_to_the_moment(face: Face) -> None:
    """An aware datetime in any zone means the same moment."""
    moment = dt.datetime(2030, 1, 1, 12, tzinfo=dt.timezone(dt.timedelta(hours=5)))

    face.run(lambda session: session.enqueue("A", run_at=moment))

    assert face.rows("run_at") == [(moment,)]


def test_written_tasks_have_left_the_session(face: Face) -> None:
    """After the flush the object is detached, complete, and never touches its row again."""

    def work(session):
        task = session.enqueue("A", {"a": 1}, delay=5)
        session.flush()
        assert task not in session
        session.execute(text("delete from task"))  # as a worker might, after the commit
        task.params = {"changed": True}
        return task

    task = face.run(work)
    values = {attribute.key: getattr(task, attribute.key) for attribute in inspect(Task).attrs}

    assert inspect(task).detached
    assert (values["task_type"], values["attempts"], values["last_error"]) == ("A", 0, None)
    assert None not in (values["task_id"], values["created_at"], values["run_at"])


# -- own task classes -----------------------------------------------------------------------------


OWN = {
    "extra columns": (PlainJob, "A", {"a": 1}, {"tenant_id": 7}, "plain_job"),
    "enum": (EnumJob, Kind.WELCOME, {"a": 1}, {}, "jobs.enum_job"),
    "enum by label": (EnumJob, "welcome-mail", {"a": 1}, {}, "jobs.enum_job"),
    "hstore": (HstoreJob, "A", {"a": "x", "b": None}, {}, "hstore_job"),
}


@pytest.mark.parametrize("kind", FACES)
@pytest.mark.parametrize("case", OWN)
def test_own_task_classes(maker: Any, db_url: str, kind: str, case: str) -> None:
    """Own table, schema, native enum, HSTORE and extra columns, one by one and in bulk."""
    task_class, task_type, params, columns, table = OWN[case]
    face = Face(kind, db_url, task_class=task_class)

    def work(session):
        session.enqueue_many(task_type, [params], **columns)
        session.enqueue(task_type, lambda: {"a": "late"}, **columns)
        return session.enqueue(task_type, params, **columns)

    task = face.run(work)
    label = "welcome-mail" if task_class is EnumJob else "A"
    stored = "hstore_to_jsonb(params)" if task_class is HstoreJob else "params"

    assert type(task) is task_class
    assert face.rows(f"task_type::text, {stored}", table) == [
        (label, params),
        (label, params),
        (label, {"a": "late"}),
    ]
    if columns:
        assert face.rows("tenant", table) == [(7,), (7,), (7,)]


def test_the_task_class_is_chosen_from_near_to_far(maker: Any, engine: Engine) -> None:
    """The argument wins over the handler's registry, that over the session's, that over ours."""
    tasks = TaskRegistry(task_class=PlainJob)

    @tasks.handler("A")
    def handle(session, params): ...

    class OwnSession(EnqueueMixin, Session):
        task_class = HstoreJob

    with OwnSession(engine) as session:
        chosen = [
            type(session.enqueue(handle, task_class=Task)),
            type(session.enqueue(handle)),
            type(session.enqueue("A")),
            type(TaskSession(engine, task_class=PlainJob).enqueue("A")),
            type(TaskSession(engine).enqueue("A")),
        ]

    assert chosen == [Task, PlainJob, HstoreJob, PlainJob, Task]


def test_scoped_sessions_enqueue_through_the_session(maker: Any, engine: Engine) -> None:
    """A scoped_session hands out the session that can."""
    registry = scoped_session(maker)
    registry().enqueue("A")
    registry.commit()
    registry.remove()

    assert committed(engine) == [("A", {})]


# -- handlers and typed params --------------------------------------------------------------------


def test_handlers_validate_what_is_enqueued_for_them(maker: Any, engine: Engine) -> None:
    """Typed params are stored as JSON, and a wrong value never reaches the session."""
    tasks = TaskRegistry()

    @tasks.handler("WELCOME")
    def welcome(session, params: Welcome): ...

    value = Welcome(uuid.UUID(int=1), dt.date(2026, 1, 2))
    with maker.begin() as session:
        session.enqueue(welcome, value)
        session.enqueue(welcome, lambda: value)
        with pytest.raises(ParamsError, match=r"params.at"):
            session.enqueue(welcome, {"usr_id": value.usr_id, "at": "never"})
        assert len(session.new) == 2

    stored = {"usr_id": "00000000-0000-0000-0000-000000000001", "at": "2026-01-02"}
    assert committed(engine) == [("WELCOME", stored), ("WELCOME", stored)]
    assert tasks.handlers["WELCOME"].load_params(stored) == value


def test_unregistered_functions_are_refused(maker: Any) -> None:
    """A function that no registry knows has no type."""
    with maker() as session, pytest.raises(EnqueueError, match="print is not registered"):
        session.enqueue(print)


# -- refusals leave everything as it was ----------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("", {}, "task_type must be a non-empty string, got ''"),
        (None, {}, "task_type must be a non-empty string, got None"),
        ("A", {"params": {"a": "\x00"}}, "params.a: text with a NUL character"),
        ("A", {"params": {"a": uuid.UUID(int=0)}}, "params.a: UUID is not plain JSON"),
        ("A", {"params": 3}, "params: must be a dict, got int"),
        ("A", {"run_at": dt.datetime(2030, 1, 1)}, "run_at must be timezone-aware"),
        ("A", {"run_at": "tomorrow"}, "run_at must be a datetime, got 'tomorrow'"),
        ("A", {"delay": -1}, "delay must be 0 or more seconds, got -1"),
        ("A", {"delay": dt.timedelta(days=400)}, "delay must be at most 365 days"),
        ("A", {"delay": 1, "run_at": dt.datetime.now(dt.timezone.utc)}, "not both"),
        ("A", {"tenant": 1}, "Task has no extra column tenant .its extra columns: none"),
        ("A", {"attempts": 1}, "Task has no extra column attempts"),
        ("A", {"tenant": 1, "task_class": PlainJob}, "extra columns: note, tenant_id"),
        ("A", {"task_class": EnumJob}, "'A' is not a label of kind"),
        ("A", {"task_class": Usr}, "is not a mapped class with TaskMixin"),
        ("A", {"on_conflict": "skip"}, "needs a unique constraint"),
        ("A", {"on_conflict": "update"}, 'on_conflict must be "skip" or "raise"'),
    ],
)
def test_a_refused_enqueue_leaves_the_session_usable(
    maker: Any, engine: Engine, task: Any, options: dict[str, Any], message: str
) -> None:
    """Every mistake raises at the call; the caller's row and other tasks are kept (D4)."""
    with maker.begin() as session:
        session.add(Usr(usr_id=1))
        with pytest.raises((EnqueueError, ConfigurationError), match=message):
            session.enqueue(task, **options)
        session.enqueue("GOOD")

    assert committed(engine) == [("GOOD", {})]
    assert committed(engine, "usr_id as task_id", "usr") == [(1,)]


def test_params_are_taken_as_they_are_at_the_call(maker: Any, engine: Engine) -> None:
    """A dict reused in a loop gives the task what it held then (C14)."""
    params: dict[str, Any] = {"a": [0]}
    with maker.begin() as session:
        for number in range(3):
            params["a"][0] = number
            session.enqueue("A", params)

    assert committed(engine) == [("A", {"a": [number]}) for number in range(3)]


def test_params_over_the_sessions_limit_are_refused(engine: Engine) -> None:
    """The limit is an attribute of the session class (D6)."""

    class Frugal(TaskSession):
        max_params_bytes = 100

    with Frugal(engine) as session, pytest.raises(ParamsError, match="limit of 100 bytes"):
        session.enqueue("A", {"a": "x" * 101})


# -- callables ------------------------------------------------------------------------------------


def test_callables_see_the_keys_of_new_rows(face: Face) -> None:
    """A new row's primary key needs no flush by hand (C13)."""
    Base.metadata.tables["usr"].create(create_engine(face.url.set(drivername="postgresql+psycopg")))

    def work(session):
        usr = Usr(name="Ann")
        session.enqueue("WELCOME", lambda: {"usr_id": usr.usr_id, "name": usr.name})
        session.add(usr)
        return usr

    face.run(work)

    assert face.rows() == [("WELCOME", {"usr_id": 1, "name": "Ann"})]


def test_a_missing_key_is_refused_and_nothing_is_lost_silently(maker: Any, engine: Engine) -> None:
    """commit() raises until rollback(), and the rows of the transaction are not committed."""
    with maker() as session:
        forgotten = Usr()
        session.add(Usr(usr_id=1))
        session.enqueue("PLAIN")
        session.enqueue("WELCOME", lambda: {"usr_id": forgotten.usr_id})
        for _ in range(2):
            with pytest.raises(ParamsError, match=r"params.usr_id: None; was the object it comes"):
                session.commit()
        assert committed(engine, "usr_id as task_id", "usr") == []
        session.rollback()
        session.commit()

    assert committed(engine) == []


def test_a_missing_key_can_be_mended(maker: Any, engine: Engine) -> None:
    """Once the object is added, the same commit goes through."""
    with maker() as session:
        forgotten = Usr()
        session.enqueue("WELCOME", lambda: {"usr_id": forgotten.usr_id})
        with pytest.raises(ParamsError):
            session.commit()
        session.add(forgotten)
        session.commit()

    assert committed(engine) == [("WELCOME", {"usr_id": 1})]


def test_an_error_in_a_callable_is_raised_from_the_flush(maker: Any, engine: Engine) -> None:
    """The caller's own exception comes out as it is."""
    with maker() as session:
        session.enqueue("A", lambda: {"a": 1 // 0})
        with pytest.raises(ZeroDivisionError):
            session.flush()
        with pytest.raises(ZeroDivisionError):
            session.commit()

    assert committed(engine) == []


def test_a_flush_that_fails_in_the_database_forgets_its_tasks(maker: Any, engine: Engine) -> None:
    """After the rollback nothing of the failed unit of work comes back."""
    with maker() as session:
        session.add_all([Usr(usr_id=1), Usr(usr_id=1)])
        session.enqueue("A", lambda: {"a": 1})
        session.enqueue("B")
        with pytest.raises(IntegrityError):
            session.commit()
        with pytest.raises(EnqueueError, match="transaction has ended or failed"):
            session.enqueue("C")
        session.rollback()
        session.enqueue("D")
        session.commit()

    assert committed(engine) == [("D", {})]


def test_a_callable_may_load_and_enqueue(maker: Any, engine: Engine) -> None:
    """Lazy loads and follow-up enqueues inside a callable do not disturb the flush."""
    with maker.begin() as session:
        session.add(Usr(usr_id=1))

        def params():
            session.enqueue("FOLLOW", lambda: {"b": 2})
            return {"count": session.scalar(select(func.count()).select_from(Usr))}

        session.enqueue("A", params)

    assert committed(engine) == [("A", {"count": 1}), ("FOLLOW", {"b": 2})]


def test_queries_flush_tasks_as_they_flush_rows(maker: Any) -> None:
    """Autoflush shows the caller's own tasks to the caller's own query."""
    with maker() as session:
        session.enqueue("A", lambda: {"a": 1})

        assert session.scalar(select(func.count()).select_from(Task)) == 1
        assert session._ledger.tasks == [] == list(session._ledger.deferred)


def test_expunged_and_closed_tasks_are_forgotten(maker: Any, engine: Engine) -> None:
    """What the caller took out of the session is not written."""
    with maker() as session:
        session.expunge(session.enqueue("A"))
        session.expunge(session.enqueue("B", lambda: {"a": 1}))
        session.enqueue("C")
        session.commit()
        session.enqueue("D", lambda: {"a": 1})
        session.close()
        session.enqueue("E")
        session.commit()

    assert committed(engine) == [("C", {}), ("E", {})]


def test_constraints_of_extra_columns_see_the_rows_they_point_to(maker: Any) -> None:
    """The order of the flush is the mapper's, also for callables, which come last."""
    with maker.begin() as session:
        usr = Usr()
        task = session.enqueue("A", lambda: {"usr_id": usr.usr_id}, task_class=PlainJob)
        session.add(usr)
        session.flush()
        assert (task.params, task.tenant_id) == ({"usr_id": usr.usr_id}, None)
