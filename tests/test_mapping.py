"""Task tables of all shapes: what is mapped works, and what cannot work says why."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from faces import committed
from sqlalchemy import (
    BigInteger,
    Column,
    Computed,
    Engine,
    ForeignKey,
    Integer,
    MetaData,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    create_engine,
    inspect,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    mapped_column,
    registry,
)

from pgtask_sa import (
    ConfigurationError,
    DeadTaskMixin,
    EnqueueError,
    HandlerError,
    Task,
    TaskMixin,
    TaskRegistry,
    TaskSession,
    Worker,
)
from pgtask_sa.labels import task_label
from pgtask_sa.mapping import dead_task_class, index_name, mapped_table, task_table
from pgtask_sa.triggers import wakeup_name


@pytest.fixture
def empty(empty_db_url: str) -> Any:
    """Give an engine on a database without tables."""
    engine = create_engine(empty_db_url)
    yield engine
    engine.dispose()


# -- the names of task types ----------------------------------------------------------------------

BAD_TYPES = {
    "A\x00B": "holds a NUL",
    "\ud800": "half of a surrogate pair",
    "x" * 501: "has 501 bytes, the limit is 500",
    "é" * 251: "has 502 bytes",
}


@pytest.mark.parametrize("task_type", BAD_TYPES, ids=["nul", "surrogate", "long", "bytes"])
def test_bad_task_type_is_refused_at_the_call(engine: Engine, task_type: str) -> None:
    """At the flush it would take the caller's rows along."""
    with TaskSession(engine) as session:
        session.enqueue("GOOD")
        with pytest.raises(EnqueueError, match=BAD_TYPES[task_type]) as caught:
            session.enqueue(task_type)
        session.commit()

    assert [("GOOD", {})] == committed(engine)
    assert str(caught.value).isascii()


@pytest.mark.parametrize("task_type", BAD_TYPES, ids=["nul", "surrogate", "long", "bytes"])
def test_bad_task_type_is_refused_at_registration(task_type: str) -> None:
    """A handler of a type that nobody can enqueue is a mistake."""
    tasks = TaskRegistry()
    with pytest.raises(HandlerError, match=BAD_TYPES[task_type]):
        tasks.handler(task_type)(lambda session, params: None)
    assert task_type not in tasks


def test_longest_task_type_fits(engine: Engine) -> None:
    """All three indexes take it."""
    with TaskSession(engine) as session:
        session.enqueue("é" * 250)
        session.enqueue("é" * 250, delay=1)
        session.enqueue("é" * 250, coalesce=True)
        session.commit()

    assert 3 == len(committed(engine))
    assert "é" * 250 == task_label(Task, "é" * 250)


# -- shapes of tables -----------------------------------------------------------------------------


def test_partitioned_table(empty: Engine) -> None:
    """Postgres refuses storage parameters on the parent, which keeps no rows."""

    class Base(DeclarativeBase):
        pass

    class Job(TaskMixin, Base):
        __tablename__ = "job"
        __table_args__ = {"postgresql_partition_by": "HASH (task_id)"}

    Base.metadata.create_all(empty)
    with empty.begin() as connection:
        connection.execute(
            text("create table job_0 partition of job for values with (modulus 1, remainder 0)")
        )
    with TaskSession(empty, task_class=Job) as session:
        session.enqueue("A", coalesce=True)
        assert session.enqueue("A", coalesce=True) is None
        session.enqueue("B")
        session.commit()

    assert [("A", {}), ("B", {})] == committed(empty, table="job")
    Base.metadata.drop_all(empty)


def test_mapped_without_a_base(empty: Engine) -> None:
    """`registry.mapped` and `map_imperatively` give no class attribute to ask."""
    mapped = registry()

    @mapped.mapped
    class Job(TaskMixin):
        __tablename__ = "job"

    class Copy(TaskMixin):
        pass

    class DeadJob(DeadTaskMixin):
        pass

    copy = Table("copy", mapped.metadata, *[c._copy() for c in Job.__table__.c])
    mapped.map_imperatively(Copy, copy)
    dead = Table("dead", mapped.metadata, *[c._copy() for c in _dead_columns()])
    mapped.map_imperatively(DeadJob, dead)

    assert (Job.__table__, copy) == (task_table(Job), task_table(Copy))
    assert [DeadJob, DeadJob] == [dead_task_class(Job), dead_task_class(Copy)]
    assert dead is mapped_table(DeadJob)
    mapped.metadata.create_all(empty)
    with TaskSession(empty, task_class=Copy) as session:
        session.enqueue("A", {"n": 1})
        session.enqueue("A", coalesce=True)
        session.commit()
    assert [("A", {"n": 1}), ("A", {})] == committed(empty, table="copy")


def _dead_columns() -> list[Any]:
    class Base(DeclarativeBase):
        pass

    class Dead(DeadTaskMixin, Base):
        __tablename__ = "dead"

    return list(Dead.__table__.c)


@pytest.mark.parametrize(
    ("name", "ready"),
    [
        ("task", "task_ready_idx"),
        ("t" * 45, "t" * 45 + "_ready_idx"),
        ("t" * 50, "t" * 50 + "_ready_idx"),
    ],
)
def test_names_that_fit_are_kept(name: str, ready: str) -> None:
    """Migrations that exist name them."""
    table = Table(name, MetaData())
    assert (ready, name + "_wakeup") == (index_name(table, "ready"), wakeup_name(name))


@pytest.mark.parametrize(
    "names", [("任" * 21, "任" * 20 + "務"), ("t" * 63, "t" * 62 + "x"), ("t" * 51, "t" * 52)]
)
def test_long_names_are_cut_by_bytes_and_do_not_collide(
    empty: Engine, names: tuple[str, str]
) -> None:
    """Postgres cuts silently, and then has the name of the table, or of the other table's index."""

    class Base(DeclarativeBase):
        pass

    jobs = [type(f"Job{n}", (TaskMixin, Base), {"__tablename__": x}) for n, x in enumerate(names)]
    Base.metadata.create_all(empty)
    for job in jobs:
        found = {index["name"] for index in inspect(empty).get_indexes(job.__tablename__)}
        assert {str(index.name) for index in job.__table__.indexes} == found
        with TaskSession(empty, task_class=job) as session:
            session.enqueue("A")
            session.commit()
    Base.metadata.drop_all(empty)
    with empty.connect() as connection:
        left = connection.scalar(text("select count(*) from pg_proc where proname ~ 'wakeup'"))
    assert 0 == left


# -- inheritance ----------------------------------------------------------------------------------


def test_joined_inheritance_is_refused() -> None:
    """One row of one table is claimed."""

    class Base(DeclarativeBase):
        pass

    class Job(TaskMixin, Base):
        __tablename__ = "job"

    with pytest.raises(ConfigurationError, match=r"mail_job lacks attempts, .* must have its own"):

        class MailJob(Job):
            __tablename__ = "mail_job"
            task_id: Mapped[int] = mapped_column(ForeignKey("job.task_id"), primary_key=True)


def test_single_table_inheritance(empty: Engine) -> None:
    """A row written at the call is of the class that was named, as one written by a flush is."""

    class Base(DeclarativeBase):
        pass

    class Job(TaskMixin, Base):
        __tablename__ = "job"
        kind: Mapped[str | None] = mapped_column(Text)
        __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "job"}

    class MailJob(Job):
        __mapper_args__ = {"polymorphic_identity": "mail"}

    Base.metadata.create_all(empty)
    with TaskSession(empty, task_class=MailJob) as session:
        session.enqueue("A")
        task = session.enqueue("B", {"n": 1}, coalesce=True)
        session.enqueue_many("C", [{}])
        session.commit()

    assert [("A", "mail"), ("B", "mail"), ("C", "mail")] == committed(
        empty, "task_type, kind", "job"
    )
    assert (MailJob, {"n": 1}) == (type(task), task.params)


@pytest.mark.filterwarnings("ignore:Flushing object")  # SQLAlchemy warns of the same
def test_polymorphic_on_task_type(empty: Engine) -> None:
    """The enqueue does not ask which class the type would be loaded as: there may be none."""

    class Base(DeclarativeBase):
        pass

    class Job(TaskMixin, Base):
        __tablename__ = "job"
        __mapper_args__ = {"polymorphic_on": "task_type"}

    class MailJob(Job):
        __mapper_args__ = {"polymorphic_identity": "MAIL"}

    Base.metadata.create_all(empty)
    with TaskSession(empty, task_class=Job) as session:
        task = session.enqueue("A", {"n": 1}, coalesce=True)
        late = session.enqueue("B", delay=timedelta(hours=1))
        session.commit()

    assert (1, "A", {"n": 1}) == (task.task_id, task.task_type, task.params)
    assert late.run_at is not None


# -- types of params ------------------------------------------------------------------------------


class Sealed(TypeDecorator[Any]):
    impl = JSONB
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Any) -> Any:
        return {"sealed": value}

    def process_result_value(self, value: Any, dialect: Any) -> Any:
        return value["sealed"]


@pytest.mark.parametrize("unique", [False, True])
def test_params_with_a_type_of_ones_own(empty: Engine, unique: bool) -> None:
    """Every way to the table goes through the type, in bulk too."""

    class Base(DeclarativeBase):
        pass

    class Job(TaskMixin, Base):
        __tablename__ = "job"
        __table_args__ = (UniqueConstraint("task_type", "params"),) if unique else ()
        params: Mapped[Any] = mapped_column(Sealed, nullable=False)

    Base.metadata.create_all(empty)
    with TaskSession(empty, task_class=Job) as session:
        first = session.enqueue("A", {"n": -1})
        assert {"n": -1} == first.params
        written = session.enqueue_many("A", [{"n": n} for n in range(2500)])
        session.commit()

    expected = [{"sealed": {"n": n}} for n in range(-1, 2500)]
    found = committed(empty, "params", "job")
    assert 2500 == written
    assert expected == sorted((row[0] for row in found), key=lambda raw: raw["sealed"]["n"])


# -- dataclasses ----------------------------------------------------------------------------------


def test_dataclass_base_is_refused() -> None:
    """The message says what to do instead."""

    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    with pytest.raises(ConfigurationError, match="Job: a task class cannot be a dataclass"):

        class Job(TaskMixin, Base):
            __tablename__ = "job"


def test_dataclass_is_refused() -> None:
    """Also where the class itself asks for it."""
    with pytest.raises(ConfigurationError, match="Job: a task class cannot be a dataclass"):

        class Base(DeclarativeBase):
            pass

        class Job(MappedAsDataclass, TaskMixin, Base):
            __tablename__ = "job"


def _pair(in_task: Column[Any], in_dead: list[Column[Any]]) -> type[Any]:
    """Map a task class with a column of its own, and its error queue; return the first."""

    class Base(DeclarativeBase):
        pass

    class Job(TaskMixin, Base):
        __table_args__ = (in_task,)
        __tablename__ = "job"

    class DeadJob(DeadTaskMixin, Base):
        __table_args__ = tuple(in_dead)
        __tablename__ = "dead_job"

    return Job


def test_an_error_queue_from_which_nothing_could_come_back_is_refused() -> None:
    """The worker, the tests and the commands refuse it, before anything was buried there."""
    job = _pair(Column("tenant_id", Integer, nullable=False, default=1), [])
    tasks = TaskRegistry(task_class=job)
    tasks.handler("A")(lambda session, params: None)

    with pytest.raises(ConfigurationError, match=r"Job.tenant_id is NOT NULL .* Add the column to"):
        Worker(tasks, "postgresql://localhost/none")


@pytest.mark.parametrize(
    ("in_task", "in_dead"),
    [
        (Column("tenant_id", Integer), []),
        (Column("tenant_id", Integer, nullable=False, server_default=text("0")), []),
        (Column("tenant_id", Integer, Computed("1"), nullable=False), []),
        (Column("tenant_id", Integer, nullable=False), [Column("tenant_id", Integer)]),
    ],
)
def test_what_an_error_queue_may_do_without(in_task: Column[Any], in_dead: list[Any]) -> None:
    """What may be null or has a value by itself is no reason to refuse."""
    assert "DeadJob" == dead_task_class(_pair(in_task, in_dead)).__name__


def test_an_incomplete_table_is_refused() -> None:
    """What is missing is named."""
    mapped = registry()

    class Job(TaskMixin):
        pass

    table = Table("job", mapped.metadata, Column("task_id", BigInteger, primary_key=True))
    with pytest.raises(ConfigurationError, match="job lacks attempts, coalesce_key"):
        mapped.map_imperatively(Job, table)
