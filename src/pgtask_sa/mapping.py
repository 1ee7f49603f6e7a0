"""The task table and the error queue as SQLAlchemy mappings, for our own Base or the user's.

A task is a row. ``task_type`` says what is to be done, ``params`` with what. The other columns
serve the worker:

* ``run_at``     null: ready now. Otherwise: not before this moment (a delay, or a retry).
* ``ticket``     a random number drawn at insert. Ready tasks are claimed by starting at a random
  ticket and walking up an index, which is a fair lottery at the price of one index probe.
* ``priority``   which tasks go first: lower numbers before higher ones, whatever their type.
* ``attempts``   how often the task was tried and failed; ``last_error`` says why.
* ``coalesce_key``  set only by ``enqueue(.., coalesce=True)``; finds an equal waiting task.
* ``lease_token``  set while a handler of the leased mode runs: who holds the lease, which ends at
  ``run_at``.

A third table comes with the first: see `presence_table`.

Use `Task` as it is, or put `TaskMixin` on your own Base. Indexes, storage parameters and the
wake-up trigger are added to whichever table results, and are created and dropped with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from datetime import datetime
from typing import Any, ClassVar
from uuid import UUID

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    DateTime,
    Identity,
    Index,
    Integer,
    MetaData,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    Uuid,
    event,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB, REAL
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Mapper, mapped_column
from sqlalchemy.schema import conv

from pgtask_sa import presence_table, triggers
from pgtask_sa.errors import ConfigurationError

LOCK_CLASS = triggers.LOCK_CLASS

STORAGE: Mapping[str, Any] = {
    # A queue turns over its whole content: the default of 20 % of the table is far too rare.
    "autovacuum_vacuum_scale_factor": 0.02,
    "autovacuum_vacuum_threshold": 1000,
    "autovacuum_analyze_scale_factor": 0.05,
    "autovacuum_vacuum_cost_delay": 0,
}


class TaskMixin:
    """Put the task table on your own declarative Base.

    Add columns, change the table name and schema, make ``task_type`` a native enum or ``params``
    an HSTORE by declaring the column again, add a ``UniqueConstraint("task_type", "params")``.
    Declare a `DeadTaskMixin` class on the same Base: it receives the tasks that gave up. Columns
    that you add belong there, too.
    ``__fair_by__ = "tenant_id"`` adds the index by which workers give equal turns to the values of
    that column (``Worker(.., fair_by=Job.tenant_id)``).

    Example:
        >>> from sqlalchemy.orm import DeclarativeBase
        >>> class Base(DeclarativeBase): pass
        >>> class Job(TaskMixin, Base):
        ...     __tablename__ = "job"
        ...     tenant_id: Mapped[int]
        >>> class DeadJob(DeadTaskMixin, Base):
        ...     __tablename__ = "dead_job"
        ...     tenant_id: Mapped[int]
        >>> sorted(index.name for index in Job.__table__.indexes)
        ['job_coalesce_idx', 'job_due_idx', 'job_ready_idx']
    """

    task_id: Mapped[int] = mapped_column(
        BigInteger, Identity(always=True), primary_key=True, sort_order=-10
    )
    # Any: on your own class they may be an enum, and a dict of another kind
    task_type: Mapped[Any] = mapped_column(Text, nullable=False, sort_order=-9)
    params: Mapped[Any] = mapped_column(
        JSONB, nullable=False, server_default=text("'{}'"), sort_order=-8
    )
    created_at: Mapped[datetime] = mapped_column(
        DateTime(timezone=True), nullable=False, server_default=func.now(), sort_order=-7
    )
    run_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    attempts: Mapped[int] = mapped_column(Integer, nullable=False, server_default=text("0"))
    last_error: Mapped[str | None] = mapped_column(Text)
    ticket: Mapped[float] = mapped_column(REAL, nullable=False, server_default=func.random())
    coalesce_key: Mapped[int | None] = mapped_column(BigInteger)
    lease_token: Mapped[UUID | None] = mapped_column(Uuid)
    priority: Mapped[int] = mapped_column(SmallInteger, nullable=False, server_default=text("0"))

    __dead_task__: ClassVar[type[Any] | None] = None
    __fair_by__: ClassVar[str | None] = None

    def __init_subclass__(cls, **kw: Any) -> None:
        _refuse_dataclass(cls, issubclass(cls, MappedAsDataclass))
        super().__init_subclass__(**kw)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.__dict__.get('task_id', '(new)')} {self.task_type}>"


TASK_COLUMNS = frozenset(name for name in TaskMixin.__annotations__ if not name.startswith("__"))


class DeadTaskMixin:
    """The error queue on your own Base: tasks that used up their attempts or were discarded.

    The same shape as the task table, plus ``reason`` (``failed``, ``discarded``, ..) and
    ``buried_at``. Columns that you added to your task class and that exist here by the same name
    are carried along; the others are lost with the burial. One that is NOT NULL without a server
    default must exist here: else nothing could be brought back, and a worker refuses to begin.

    Example:
        >>> from sqlalchemy.orm import DeclarativeBase
        >>> class Base(DeclarativeBase): pass
        >>> class DeadJob(DeadTaskMixin, Base):
        ...     __tablename__ = "dead_job"
        >>> DeadJob.__table__.c.reason.nullable
        False
    """

    task_id: Mapped[int] = mapped_column(
        BigInteger, primary_key=True, autoincrement=False, sort_order=-10
    )
    task_type: Mapped[Any] = mapped_column(Text, nullable=False, sort_order=-9)
    params: Mapped[Any] = mapped_column(JSONB, nullable=False, sort_order=-8)
    created_at: Mapped[datetime] = mapped_column(
        DateTime(timezone=True), nullable=False, sort_order=-7
    )
    attempts: Mapped[int] = mapped_column(Integer, nullable=False)
    last_error: Mapped[str | None] = mapped_column(Text)
    coalesce_key: Mapped[int | None] = mapped_column(BigInteger)
    reason: Mapped[str] = mapped_column(Text, nullable=False)
    buried_at: Mapped[datetime] = mapped_column(
        DateTime(timezone=True), nullable=False, server_default=func.now()
    )
    priority: Mapped[int] = mapped_column(SmallInteger, nullable=False, server_default=text("0"))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.task_id} {self.task_type}: {self.reason}>"


def index_name(table: Table, purpose: str) -> str:
    """Name an index of ours: the same under every naming convention, never over 63 bytes."""
    return conv(f"{triggers.stem(table.name)}_{purpose}_idx")


def _add_indexes(table: Table) -> None:
    c = table.c
    turn = (c.priority, c.task_type)
    Index(index_name(table, "ready"), *turn, c.ticket, postgresql_where=c.run_at.is_(None))
    Index(index_name(table, "due"), *turn, c.run_at, postgresql_where=c.run_at.is_not(None))
    Index(
        index_name(table, "coalesce"),
        c.task_type,
        c.coalesce_key,
        postgresql_where=c.coalesce_key.is_not(None),
    )


def _add_fair_index(mapper: Mapper[Any], kind: type[Any], table: Table) -> None:
    name = kind.__fair_by__
    if name is None:
        return
    if not isinstance(name, str) or name not in mapper.columns:
        raise ConfigurationError(
            f"{kind.__name__}: __fair_by__ must be the name of a column, got {name!r}"
        )
    parts = (table.c.priority, mapper.columns[name], table.c.ticket)
    Index(index_name(table, "fair"), *parts, postgresql_where=table.c.run_at.is_(None))


def is_partitioned(table: Table) -> bool:
    """Whether a table is partitioned: it keeps no rows, and Postgres refuses storage parameters.

    Those of its partitions are the business of whoever creates them.

    Example:
        >>> is_partitioned(Task.__table__)
        False
    """
    return bool(table.dialect_options["postgresql"].get("partition_by"))


def _set_storage(table: Table, connection: Connection, **_: Any) -> None:
    """Set our storage parameters, where the user's own ``postgresql_with`` names no other value.

    By ALTER TABLE, not as an option of the Table: SQLAlchemy 2.0 does not know that option, and a
    migration that was generated under 2.1 would not run there.
    """
    if is_partitioned(table):
        return
    chosen = table.dialect_options["postgresql"].get("with") or {}
    ours = [f"{key} = {value}" for key, value in STORAGE.items() if key not in chosen]
    if ours:
        name = triggers.Quoted(connection, table.name, connection.schema_for_object(table)).table
        connection.exec_driver_sql(f"alter table {name} set ({', '.join(ours)})")


def _after_create(table: Table, connection: Connection, **_: Any) -> None:
    schema = connection.schema_for_object(table)
    for statement in triggers.create_wakeup_sql(connection, table.name, schema):
        connection.exec_driver_sql(statement)


def _after_drop(table: Table, connection: Connection, **_: Any) -> None:
    schema = connection.schema_for_object(table)
    for statement in triggers.drop_wakeup_sql(connection, table.name, schema):
        connection.exec_driver_sql(statement)


@event.listens_for(TaskMixin, "after_mapper_constructed", propagate=True)
def _complete_table(mapper: Mapper[Any], kind: type[Any]) -> None:
    """Give the table of a freshly mapped task class what the mixin's columns cannot carry."""
    table = mapper.local_table
    _refuse_dataclass(kind, dataclasses.is_dataclass(kind))
    if not isinstance(table, Table) or table.info.get("pgtask") is not None:
        return
    _refuse_incomplete(kind, table)
    table.info["pgtask"] = "task"
    _add_indexes(table)
    _add_fair_index(mapper, kind, table)
    presence_table.add_worker_table(table)
    event.listen(table, "after_create", _set_storage)
    event.listen(table, "after_create", _after_create)
    event.listen(table, "after_drop", _after_drop)


def _refuse_dataclass(kind: type[Any], is_dataclass: bool) -> None:
    if is_dataclass:
        raise ConfigurationError(
            f"{kind.__name__}: a task class cannot be a dataclass, the server fills most of its "
            "columns. Put it on a Base of its own without MappedAsDataclass, with the same metadata"
        )


def _refuse_incomplete(kind: type[Any], table: Table) -> None:
    missing = sorted(TASK_COLUMNS - set(table.c.keys()))
    if missing:
        raise ConfigurationError(
            f"{kind.__name__}: its table {table.name} lacks {', '.join(missing)}. The task class "
            "must have its own table with all columns of a task: a worker claims and deletes one "
            "row of one table, so joined table inheritance cannot work"
        )
    if table.c.priority.nullable or not isinstance(table.c.priority.type, Integer):
        raise ConfigurationError(
            f"{kind.__name__}: its column priority must be an integer and not null: it says which "
            "tasks are claimed first, and null would never be"
        )


@event.listens_for(DeadTaskMixin, "after_mapper_constructed", propagate=True)
def _mark_dead_table(mapper: Mapper[Any], _class: type[Any]) -> None:
    if isinstance(mapper.local_table, Table):
        mapper.local_table.info.setdefault("pgtask", "dead_task")


class TaskBase(DeclarativeBase):
    """The library's own declarative base, for users who do not bring one."""

    metadata = MetaData()


class Task(TaskMixin, TaskBase):
    """A task that waits for a worker: the library's own mapping, table ``task``.

    Example:
        >>> Task.__table__.name
        'task'
        >>> Task(task_type="SEND_EMAIL_WELCOME", params={"usr_id": 1})
        <Task (new) SEND_EMAIL_WELCOME>
    """

    __tablename__ = "task"


class DeadTask(DeadTaskMixin, TaskBase):
    """A task that gave up: the library's own error queue, table ``dead_task``.

    Example:
        >>> DeadTask.__table__.name
        'dead_task'
    """

    __tablename__ = "dead_task"


def mapped_table(mapped: type[Any]) -> Any:
    """Return the table that a class is mapped to, also without declarative; None if it has none.

    Example:
        >>> mapped_table(DeadTask).name, mapped_table(str)
        ('dead_task', None)
    """
    return getattr(getattr(mapped, "__mapper__", None), "local_table", None)


def task_table(task_class: type[Any]) -> Table:
    """Return the table of a task class.

    Raises:
        ConfigurationError: the class is not a mapped `TaskMixin` class.

    Example:
        >>> task_table(Task).name
        'task'
    """
    table = mapped_table(task_class)
    if not isinstance(table, Table) or table.info.get("pgtask") != "task":
        raise ConfigurationError(f"{task_class!r} is not a mapped class with TaskMixin")
    return table


def own_columns(task_class: type[Any]) -> dict[str, Column[Any]]:
    """Return the columns that a task class adds to those of the mixin, by attribute name.

    Example:
        >>> own_columns(Task)
        {}
    """
    mapper = task_class.__mapper__
    return {
        mapper.get_property_by_column(column).key: column
        for column in task_table(task_class).columns
        if column.name not in TASK_COLUMNS
    }


def dead_task_class(task_class: type[Any]) -> type[Any]:
    """Return the error queue that belongs to a task class.

    That is its ``__dead_task__``, or the only `DeadTaskMixin` class on the same Base.

    Raises:
        ConfigurationError: there is none, or more than one; or it lacks a column without which
            nothing could ever be brought back.

    Example:
        >>> dead_task_class(Task).__name__
        'DeadTask'
    """
    task_table(task_class)
    found = task_class.__dead_task__ or _only_dead_class(task_class)
    _refuse_one_way(task_class, found)
    return found


def _only_dead_class(task_class: type[Any]) -> type[Any]:
    mappers = task_class.__mapper__.registry.mappers
    found = [m.class_ for m in mappers if issubclass(m.class_, DeadTaskMixin)]
    if len(found) != 1:
        raise ConfigurationError(
            f"{task_class.__name__} needs an error queue: declare one class with DeadTaskMixin on "
            f"its Base, or name it with __dead_task__ (found {len(found)})"
        )
    only: type[Any] = found[0]
    return only


def _refuse_one_way(task_class: type[Any], dead_class: type[Any]) -> None:
    """Refuse an error queue from which no task could come back: what it does not keep is lost."""
    kept = mapped_table(dead_class).c
    for column in own_columns(task_class).values():
        has_value = column.nullable or column.server_default or column.identity or column.computed
        if column.name not in kept and not has_value:
            raise ConfigurationError(
                f"{task_class.__name__}.{column.name} is NOT NULL and has no server default, and "
                f"{dead_class.__name__} lacks it: a task that was buried could not come back. Add "
                f"the column to {dead_class.__name__}, too, and migrate"
            )


def unique_columns(task_class: type[Any]) -> tuple[str, ...] | None:
    """Return the columns of the table's unique constraint on task_type and params, if it has one.

    Example:
        >>> unique_columns(Task) is None
        True
    """
    table = task_table(task_class)
    uniques = [c for c in table.constraints if isinstance(c, UniqueConstraint)]
    uniques += [i for i in table.indexes if i.unique]  # type: ignore[misc]
    for unique in uniques:
        names = tuple(column.name for column in unique.columns)
        if "task_type" in names:
            return names
    return None
