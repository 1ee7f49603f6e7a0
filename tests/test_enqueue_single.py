"""A flush of one plain task: what is sent, and that nobody can tell it from any other flush."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from faces import committed
from own_models import EnumJob, HstoreJob, Kind, PlainJob, Usr, create_all
from sqlalchemy import (
    Engine,
    ForeignKey,
    Integer,
    NullPool,
    create_engine,
    event,
    func,
    inspect,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.exc import DBAPIError, IntegrityError, PendingRollbackError
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    mapped_column,
    relationship,
    sessionmaker,
)
from sqlalchemy.orm.exc import FlushError

from pgtask_sa import EnqueueError, EnqueueMixin, Task, TaskMixin, TaskSession

LATER = dt.datetime(2030, 1, 1, tzinfo=dt.timezone.utc)


class OwnBase(DeclarativeBase):
    pass


class MetaJob(TaskMixin, OwnBase):
    """A column that tells None from nothing, and one that only the server knows to fill."""

    __tablename__ = "meta_job"

    meta: Mapped[Any] = mapped_column(JSONB, nullable=True)
    shard: Mapped[int | None]


class DefaultJob(TaskMixin, OwnBase):
    """A default that Python computes."""

    __tablename__ = "default_job"

    tries: Mapped[int] = mapped_column(default=lambda: 7)


class VersionJob(TaskMixin, OwnBase):
    """A version that the mapper counts."""

    __tablename__ = "version_job"

    version: Mapped[int] = mapped_column()
    __mapper_args__: ClassVar[Any] = {"version_id_col": version}


class Tenant(OwnBase):
    __tablename__ = "tenant"

    tenant_id: Mapped[int] = mapped_column(primary_key=True)


class TenantJob(TaskMixin, OwnBase):
    """An object of another class at the task."""

    __tablename__ = "tenant_job"

    tenant_id: Mapped[int | None] = mapped_column(ForeignKey(Tenant.tenant_id))
    tenant: Mapped[Tenant | None] = relationship()


@pytest.fixture
def maker(engine: Engine) -> sessionmaker[TaskSession]:
    """Sessions on a fresh database with our tables, those of own_models, and those above."""
    create_all(engine)
    OwnBase.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(text("alter table meta_job alter shard set default 3"))
        connection.execute(text("alter table task add check (task_type <> 'REFUSED')"))
    return sessionmaker(engine, class_=TaskSession)


@pytest.fixture
def sent(engine: Engine) -> Iterator[list[str]]:
    """Collect the statements that are sent, by their first words."""
    statements: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(" ".join(statement.split()[:3]).lower())

    event.listen(engine, "before_cursor_execute", note)
    yield statements
    event.remove(engine, "before_cursor_execute", note)


@pytest.fixture
def flushes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each flush by the unit of work that has something to write."""
    found: list[int] = []
    flush = Session.flush

    def counted(session: Session, *args: Any) -> None:
        found.extend([len(session.new)] if session.new else [])
        flush(session, *args)

    monkeypatch.setattr(Session, "flush", counted)
    return found


def _row_and_task(session: TaskSession) -> None:
    usr = Usr(name="Ann")
    session.add(usr)
    session.enqueue("A", lambda: {"usr_id": usr.usr_id})


def _three_tasks(session: TaskSession) -> None:
    for number in range(3):
        session.enqueue("A", {"n": number})


INTO_TASK = "insert into task"


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (lambda session: session.enqueue("A", {"a": 1}), ([INTO_TASK], [])),
        (lambda session: session.enqueue("A", lambda: {"a": 1}), ([INTO_TASK], [])),
        (lambda session: session.enqueue("A", priority=3, run_at=LATER), ([INTO_TASK], [])),
        (lambda session: session.enqueue("A", delay=5), ([INTO_TASK], [])),
        (_three_tasks, ([INTO_TASK], [3])),
        (_row_and_task, (["insert into usr", INTO_TASK], [1])),
    ],
    ids=["plain", "callable", "planned", "delayed", "three", "beside a row"],
)
def test_what_is_sent_for_an_enqueue(
    maker: Any, sent: list[str], flushes: list[int], work: Any, expected: Any
) -> None:
    """One insert, and no more; the unit of work has a part in it only where there is more."""
    with maker.begin() as session:
        session.connection()  # the first one of an engine asks the server for its version
        sent.clear()
        work(session)

    assert expected == (sent, flushes)


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("A", {}),
        ("A", {"priority": -4, "run_at": LATER}),
        ("A", {"delay": 0}),
        ("A", {"task_class": PlainJob}),
        ("A", {"task_class": PlainJob, "tenant_id": 5, "note": "æ"}),
        ("A", {"task_class": PlainJob, "note": func.lower("SQL")}),
        (Kind.BYE, {"task_class": EnumJob}),
        ("A", {"task_class": HstoreJob}),
        ("A", {"task_class": MetaJob}),
        ("A", {"task_class": MetaJob, "meta": None}),
        ("A", {"task_class": MetaJob, "meta": {"a": None}, "shard": None}),
        ("A", {"task_class": DefaultJob}),
        ("A", {"task_class": VersionJob}),
    ],
)
def test_an_object_and_its_row_are_what_a_flush_makes_of_them(
    maker: Any, engine: Engine, task: Any, options: dict[str, Any]
) -> None:
    """The same values in the same types, in the object and in the table, whoever writes it."""
    found, rows = [], []
    for makes_a_flush in (False, True):
        with maker.begin() as session:
            if makes_a_flush:
                event.listen(session, "after_flush", lambda *_: None)
            written = session.enqueue(task, {"a": "1"}, **options)
            session.flush()
            assert inspect(written).detached
        found.append({a.key: getattr(written, a.key) for a in inspect(written).mapper.column_attrs})
        table = written.__table__.fullname
        columns = ", ".join(f"{c.name}::text" for c in written.__table__.c if c.name not in CHOSEN)
        rows.append(committed(engine, columns, table)[-1])

    one, other = found
    assert {type(one[key]) for key in CHOSEN} == {type(other[key]) for key in CHOSEN}
    assert other["task_id"] == one["task_id"] + 1
    assert {k: v for k, v in one.items() if k not in CHOSEN} == {
        k: v for k, v in other.items() if k not in CHOSEN
    }
    assert rows[0] == rows[1]


CHOSEN = {"task_id", "created_at", "ticket"}

LISTENERS: dict[str, Callable[[Any], Any]] = {
    "before_flush": lambda session: session,
    "after_flush": lambda session: session,
    "after_flush_postexec": lambda session: session,
    "pending_to_persistent": lambda session: session,
    "persistent_to_detached": lambda session: session,
    "before_insert": lambda _: PlainJob,
    "after_insert": lambda _: PlainJob,
    "refresh_flush": lambda _: PlainJob,
}


@pytest.mark.parametrize("name", LISTENERS)
def test_who_listens_to_flushes_hears_of_every_task(maker: Any, name: str) -> None:
    """Listeners of the session, of the mapper and of objects are called as for any row."""
    heard: list[str] = []

    def listen(*_: Any) -> None:
        heard.append(name)

    with maker.begin() as session:
        target = LISTENERS[name](session)
        event.listen(target, name, listen)
        try:
            session.enqueue("A", task_class=PlainJob)
            session.flush()
        finally:
            event.remove(target, name, listen)

    assert [name] == heard


class AuditSession(Session):
    """A session of somebody's own, which counts its flushes."""

    flushed = 0

    def flush(self, objects: Any = None) -> None:
        self.flushed += len(self.new)
        super().flush(objects)


class AuditTaskSession(EnqueueMixin, AuditSession):
    pass


def test_a_flush_of_ones_own_is_called(maker: Any, engine: Engine) -> None:
    """A base class whose flush does more is not passed by."""
    with AuditTaskSession(engine) as session:
        session.enqueue("A")
        session.flush()

        assert 1 == session.flushed


def test_what_is_changed_before_the_flush_is_written(maker: Any, engine: Engine) -> None:
    """The object in the session counts, not the call."""
    with maker.begin() as session:
        task = session.enqueue("A", {"a": 1})
        task.priority = 9
        task.params["a"] = 2

    assert [({"a": 2}, 9)] == committed(engine, "params, priority")


def test_what_else_is_to_be_written_is_written(maker: Any, engine: Engine) -> None:
    """An object that is changed or deleted is in the same flush as the task."""
    with maker.begin() as session:
        ann, bob = Usr(name="Ann"), Usr(name="Bob")
        session.add_all([ann, bob])
        session.flush()
        ann.name = "Anna"
        session.enqueue("A")
        session.flush()
        assert [] == [*session.dirty, *session.new]
        session.delete(bob)
        session.enqueue("B")
        session.flush()

        assert [] == [*session.deleted, *session.new]
        assert ["Anna"] == list(session.scalars(text("select name from usr")))
    assert [("A",), ("B",)] == committed(engine, "task_type")


def test_an_object_at_the_task_gives_it_its_key(maker: Any, engine: Engine) -> None:
    """A relationship is the unit of work's business."""
    with maker.begin() as session:
        tenant = Tenant(tenant_id=5)
        session.add(tenant)
        session.flush()
        task = session.enqueue("A", task_class=TenantJob)
        task.tenant = tenant

    assert [(5,)] == committed(engine, "tenant_id", "tenant_job")


def test_a_column_that_was_mapped_later_is_written(maker: Any, engine: Engine) -> None:
    """What is remembered of a class does not outlive a change of it."""

    class LateBase(DeclarativeBase):
        pass

    class LateJob(TaskMixin, LateBase):
        __tablename__ = "late_job"

    LateBase.metadata.create_all(engine)
    with maker.begin() as session:
        session.enqueue("A", task_class=LateJob)
    LateJob.late = mapped_column(Integer)  # type: ignore[attr-defined]
    with engine.begin() as connection:
        connection.execute(text("alter table late_job add late integer"))
    with maker.begin() as session:
        session.enqueue("A", task_class=LateJob, late=5)

    assert [(None,), (5,)] == committed(engine, "late", "late_job")


def test_a_row_that_was_added_by_hand_stays(maker: Any) -> None:
    """Only what was enqueued leaves the session."""
    with maker.begin() as session:
        task = Task(task_type="A", params={})
        session.add(task)
        session.flush()

        assert task in session


def test_a_session_whose_task_is_refused_asks_for_a_rollback(maker: Any, engine: Engine) -> None:
    """A flush that the server refuses ends the transaction, for the session, too."""
    with maker() as session:
        session.enqueue("REFUSED")
        with pytest.raises(IntegrityError):
            session.flush()
        assert not session.is_active
        with pytest.raises(PendingRollbackError):
            session.execute(text("select 1"))
        session.rollback()
        session.enqueue("A")
        session.commit()

    assert [("A",)] == committed(engine, "task_type")


def test_a_refused_task_ends_its_savepoint_only(maker: Any, engine: Engine) -> None:
    """What was written before the savepoint, and comes after it, is kept."""
    with maker.begin() as session:
        session.enqueue("A")
        with pytest.raises(IntegrityError), session.begin_nested():
            session.enqueue("REFUSED")
        session.enqueue("B")

    assert [("A",), ("B",)] == committed(engine, "task_type")


def test_a_row_that_a_trigger_drops_is_an_error(maker: Any, engine: Engine) -> None:
    """No key comes back: that is told, as of any row, rather than a task that is none."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "create function nothing() returns trigger language plpgsql as "
                "$$ begin return null; end $$"
            )
        )
        connection.execute(
            text(
                "create trigger nothing before insert on task "
                "for each row execute function nothing()"
            )
        )

    with maker() as session:
        session.enqueue("A")
        with pytest.raises(FlushError):
            session.flush()


def test_an_enqueue_leaves_no_lock_behind(maker: Any, engine: Engine) -> None:
    """The trigger gives back what it took, or later inserts would notify for nobody."""
    with maker() as session:
        session.enqueue("A")
        session.flush()
        mine = "locktype = 'advisory' and pid = pg_backend_pid()"

        assert 0 == session.scalar(text(f"select count(*) from pg_locks where {mine}"))


def test_a_task_whose_callable_is_lost_is_refused(maker: Any, engine: Engine) -> None:
    """Taken out of the session and added again, it has no params to write."""
    with maker() as session:
        task = session.enqueue("A", lambda: {"a": 1})
        session.expunge(task)
        session.add(Task(task_type="REFUSED"))
        with pytest.raises(IntegrityError):
            session.flush()
        session.rollback()
        session.add(task)
        with pytest.raises(EnqueueError, match="callable"):
            session.flush()

    assert [] == committed(engine)


@pytest.mark.parametrize("nested", [False, True])
def test_a_task_whose_insert_was_rolled_back_can_be_added_no_more(engine, nested):
    """Loudly: an object that passed for one with a row would be lost without a word."""
    with TaskSession(engine) as session:
        savepoint = session.begin_nested() if nested else session
        task = session.enqueue("A", {})
        session.flush()
        savepoint.rollback()
        assert inspect(task).transient
        session.add(task)
        with pytest.raises(DBAPIError):
            session.commit()


def test_an_insert_that_fails_in_autocommit(direct_db_url, engine):
    """It is not tried once more behind the caller's back."""
    with create_engine(direct_db_url, poolclass=NullPool).begin() as admin:
        # not for a session: through a pooler the next statement is another one's
        admin.exec_driver_sql(f"alter database {engine.url.database} set lock_timeout = '50ms'")
    connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    with connection, TaskSession(connection) as session, engine.connect() as other:
        other.execute(text("lock table task in exclusive mode"))
        session.enqueue("A", {})
        with pytest.raises(DBAPIError), pytest.warns(UserWarning, match="AUTOCOMMIT"):
            session.flush()
        other.rollback()
        assert 0 == connection.scalar(text("select count(*) from task"))
        assert not session.is_active
