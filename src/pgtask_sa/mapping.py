"""The task table and the error queue as SQLAlchemy mappings, for our own Base or the user's.

A task is a row. ``task_type`` says what is to be done, ``params`` with what. The other columns
serve the worker:

* ``run_at``     null: ready now. Otherwise: not before this moment (a delay, or a retry).
* ``ticket``     a random number drawn at insert. Ready tasks are claimed by starting at a random
  ticket and walking up an index, which is a fair lottery at the price of one index probe.
* ``attempts``   how often the task was tried and failed; ``last_error`` says why.
* ``coalesce_key``  set only by ``enqueue(.., coalesce=True)``; finds an equal waiting task.

Use `Task` as it is, or put `TaskMixin` on your own Base. Indexes, storage parameters and the
wake-up trigger are added to whichever table results, and are created and dropped with it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from datetime import datetime
from typing import Any, ClassVar

from sqlalchemy import (
    BigInteger,
    Connection,
    DateTime,
    Enum,
    Identity,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    event,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB, REAL
from sqlalchemy.orm import DeclarativeBase, Mapped, Mapper, mapped_column
from sqlalchemy.schema import conv

from pgtask_sa.errors import ConfigurationError, EnqueueError

# The first half of our two-integer advisory lock keys ("pgtk"): an application that uses
# advisory locks of its own, with one bigint or with another class, cannot collide with it.
LOCK_CLASS = 0x7067746B

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
    Declare a `DeadTaskMixin` class on the same Base: it receives the tasks that gave up.

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

    __dead_task__: ClassVar[type[Any] | None] = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.__dict__.get('task_id', '(new)')} {self.task_type}>"


class DeadTaskMixin:
    """The error queue on your own Base: tasks that used up their attempts or were discarded.

    The same shape as the task table, plus ``reason`` (``failed``, ``discarded``, ..) and
    ``buried_at``. Columns that you added to your task class and that exist here by the same name
    are carried along.

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

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.task_id} {self.task_type}: {self.reason}>"


def index_name(table: Table, purpose: str) -> str:
    """Name an index of ours: the same under every naming convention, never over 63 bytes."""
    return conv(f"{table.name[:45]}_{purpose}_idx")


def _add_indexes(table: Table) -> None:
    c = table.c
    Index(index_name(table, "ready"), c.task_type, c.ticket, postgresql_where=c.run_at.is_(None))
    Index(index_name(table, "due"), c.task_type, c.run_at, postgresql_where=c.run_at.is_not(None))
    Index(
        index_name(table, "coalesce"),
        c.task_type,
        c.coalesce_key,
        postgresql_where=c.coalesce_key.is_not(None),
    )


def _set_storage(table: Table, connection: Connection, **_: Any) -> None:
    """Set our storage parameters, where the user's own ``postgresql_with`` names no other value.

    By ALTER TABLE, not as an option of the Table: SQLAlchemy 2.0 does not know that option, and a
    migration that was generated under 2.1 would not run there.
    """
    chosen = table.dialect_options["postgresql"].get("with") or {}
    ours = [f"{key} = {value}" for key, value in STORAGE.items() if key not in chosen]
    if ours:
        name = _Quoted(connection, table.name, connection.schema_for_object(table)).table
        connection.exec_driver_sql(f"alter table {name} set ({', '.join(ours)})")


class _Quoted:
    """The identifiers that the wake-up trigger of a table needs, quoted."""

    def __init__(self, connection_or_dialect: Any, name: str, schema: str | None) -> None:
        dialect = getattr(connection_or_dialect, "dialect", connection_or_dialect)
        quote = dialect.identifier_preparer.quote
        prefix = f"{quote(schema)}." if schema else ""
        self.table = prefix + quote(name)
        self.trigger = quote(wakeup_name(name))
        self.function = prefix + self.trigger


def wakeup_name(table_name: str) -> str:
    """Name the wake-up trigger of a table, and its function."""
    return f"{table_name[:45]}_wakeup"


def create_wakeup_sql(dialect: Any, name: str, schema: str | None = None) -> list[str]:
    """Return the statements that create the wake-up trigger of a task table.

    NOTIFY takes one lock for the whole database at commit, so it must be rare. A worker that goes
    to sleep holds a shared advisory lock; an insert notifies only when it cannot get that lock for
    itself, which means that somebody is asleep. While workers are busy an insert costs nothing.
    """
    q = _Quoted(dialect, name, schema)
    key = f"{LOCK_CLASS}, tg_relid::int"
    function = (
        f"create or replace function {q.function}() returns trigger language plpgsql as $$\n"
        "begin\n"
        # a two-phase transaction must not notify: PREPARE would fail. Polling finds its tasks.
        "  if coalesce(current_setting('pgtask.notify', true), '') = 'off' then\n"
        "    return null;\n"
        "  end if;\n"
        f"  if pg_try_advisory_lock({key}) then\n"
        f"    perform pg_advisory_unlock({key});\n"
        "  else\n"
        "    perform pg_notify('pgtask_' || tg_relid, '');\n"
        "  end if;\n"
        "  return null;\n"
        "end $$"
    )
    trigger = (
        f"create trigger {q.trigger} after insert on {q.table}\n"
        f"for each statement execute function {q.function}()"
    )
    return [function, trigger]


def drop_wakeup_sql(dialect: Any, name: str, schema: str | None = None) -> list[str]:
    """Return the statements that drop the wake-up trigger of a task table; the table may be gone.

    Dropping the function with ``cascade`` takes the trigger along, and only that.
    """
    q = _Quoted(dialect, name, schema)
    return [f"drop function if exists {q.function}() cascade"]


def _after_create(table: Table, connection: Connection, **_: Any) -> None:
    schema = connection.schema_for_object(table)
    for statement in create_wakeup_sql(connection, table.name, schema):
        connection.exec_driver_sql(statement)


def _after_drop(table: Table, connection: Connection, **_: Any) -> None:
    schema = connection.schema_for_object(table)
    for statement in drop_wakeup_sql(connection, table.name, schema):
        connection.exec_driver_sql(statement)


@event.listens_for(TaskMixin, "after_mapper_constructed", propagate=True)
def _complete_table(mapper: Mapper[Any], _class: type[Any]) -> None:
    """Give the table of a freshly mapped task class what the mixin's columns cannot carry."""
    table = mapper.local_table
    if not isinstance(table, Table) or table.info.get("pgtask") is not None:
        return
    table.info["pgtask"] = "task"
    _add_indexes(table)
    event.listen(table, "after_create", _set_storage)
    event.listen(table, "after_create", _after_create)
    event.listen(table, "after_drop", _after_drop)


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


def task_table(task_class: type[Any]) -> Table:
    """Return the table of a task class.

    Raises:
        ConfigurationError: the class is not a mapped `TaskMixin` class.

    Example:
        >>> task_table(Task).name
        'task'
    """
    table = getattr(task_class, "__table__", None)
    if not isinstance(table, Table) or table.info.get("pgtask") != "task":
        raise ConfigurationError(f"{task_class!r} is not a mapped class with TaskMixin")
    return table


def dead_task_class(task_class: type[Any]) -> type[Any]:
    """Return the error queue that belongs to a task class.

    That is its ``__dead_task__``, or the only `DeadTaskMixin` class on the same Base.

    Raises:
        ConfigurationError: there is none, or more than one.

    Example:
        >>> dead_task_class(Task).__name__
        'DeadTask'
    """
    task_table(task_class)
    if task_class.__dead_task__ is not None:
        named: type[Any] = task_class.__dead_task__
        return named
    mappers = task_class.registry.mappers
    found = [m.class_ for m in mappers if issubclass(m.class_, DeadTaskMixin)]
    if len(found) != 1:
        raise ConfigurationError(
            f"{task_class.__name__} needs an error queue: declare one class with DeadTaskMixin on "
            f"its Base, or name it with __dead_task__ (found {len(found)})"
        )
    only: type[Any] = found[0]
    return only


def task_label(task_class: type[Any], task_type: Any) -> str:
    """Return the text by which the database knows a task type, given as text or as Enum member.

    Raises:
        EnqueueError: it is no text, empty, or not a label of the column's enum.

    Example:
        >>> task_label(Task, "SEND_EMAIL_WELCOME")
        'SEND_EMAIL_WELCOME'
    """
    column_type = task_table(task_class).c.task_type.type
    if isinstance(task_type, enum.Enum):
        return _enum_label(column_type, task_type)
    if not isinstance(task_type, str) or not task_type:
        raise EnqueueError(f"task_type must be a non-empty string, got {task_type!r}")
    if isinstance(column_type, Enum) and task_type not in column_type.enums:
        raise EnqueueError(f"task_type {task_type!r} is not a label of {column_type.name}")
    return task_type


def _enum_label(column_type: Any, member: enum.Enum) -> str:
    if isinstance(column_type, Enum) and column_type.enum_class is type(member):
        labels = dict(zip(type(member), column_type.enums, strict=False))
        return str(labels[member])
    if isinstance(member.value, str) and member.value:
        return member.value
    raise EnqueueError(f"task_type {member!r} has no text value")


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
