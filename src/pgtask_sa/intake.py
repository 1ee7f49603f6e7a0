"""From the arguments of an enqueue to a checked `NewTask`: judge everything before any write.

What is judged here raises at the call, with nothing added to the session. Then there are two ways
to the table: a plain enqueue goes through the unit of work (ledger.py), the others are statements
at the call (direct.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from sqlalchemy import Enum as SqlEnum

from pgtask_sa import insert_statements as statements
from pgtask_sa.codec import PLAIN, ParamsCodec
from pgtask_sa.errors import ConfigurationError, EnqueueError, ParamsError
from pgtask_sa.handlers import handler_of
from pgtask_sa.insert_statements import NewTask
from pgtask_sa.labels import task_label
from pgtask_sa.mapping import TASK_COLUMNS, task_table, unique_columns
from pgtask_sa.params import MAX_BYTES, hstore_texts, snapshot_hstore
from pgtask_sa.retry import Seconds, as_seconds

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine
    from sqlalchemy.orm import Session
    from sqlalchemy.types import TypeEngine

MAX_PRIORITY = 2**15 - 1  # of a smallint
AUTOCOMMIT = (
    "a task is enqueued on a connection in AUTOCOMMIT: it is there at once, and a rollback does "
    "not take it back. Give the session an engine or a connection without that isolation level"
)


@dataclass(frozen=True)
class Target:
    """What is enqueued: a task class, the label of a type, and the codec of its params."""

    task_class: type[Any]
    label: str
    codec: ParamsCodec = PLAIN
    max_bytes: int = MAX_BYTES

    def dump(self, params: Any, *, path: str = "params") -> dict[str, Any]:
        """Validate params and return what the column keeps."""
        is_hstore = statements.is_hstore(self.task_class)
        if is_hstore and not self.codec.typed:
            return snapshot_hstore(params, path=path, max_bytes=self.max_bytes)
        raw = self.codec.dump(params, path=path, max_bytes=self.max_bytes)
        return hstore_texts(raw, path=path) if is_hstore else raw

    def evaluate(self, params: Callable[[], Any]) -> dict[str, Any]:
        """Evaluate and validate params that were given as a callable."""
        raw = self.dump(params())
        missing = next((key for key, value in raw.items() if value is None), None)
        if missing is not None and not self.codec.typed:
            question = "None; was the object it comes from added to the session?"
            raise ParamsError(f"params.{missing}", question)
        return raw


def resolve(
    task: Any, task_class: type[Any] | None, default: type[Any], max_bytes: int = MAX_BYTES
) -> Target:
    """Find out what a task type, an enum member or a handler function stands for."""
    if isinstance(task, (str, Enum)) or not callable(task):
        cls = task_class or default
        return Target(cls, task_label(cls, task), max_bytes=max_bytes)
    _, handler = handler_of(task)
    if task_class is None or task_class is handler.task_class:
        return Target(handler.task_class, handler.label, handler.codec, max_bytes)
    return Target(task_class, task_label(task_class, handler.task_type), handler.codec, max_bytes)


def new_task(
    target: Target,
    params: Any,
    *,
    run_at: Any = None,
    delay: Seconds | None = None,
    priority: Any = 0,
    columns: Mapping[str, Any],
) -> NewTask:
    """Check everything but the params, which have been checked or are still to come."""
    if columns:
        check_columns(target.task_class, columns)
    moment = check_run_at(run_at, delay)
    rank = check_priority(priority)
    return NewTask(target.task_class, target.label, params, moment, columns, rank)


def check_priority(priority: Any) -> Any:
    """Return a priority: an integer that the column holds, or an SQL expression."""
    if type(priority) is not int and statements.has_sql(priority):
        return priority
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise EnqueueError(f"priority must be an integer, got {priority!r}")
    if not -MAX_PRIORITY - 1 <= priority <= MAX_PRIORITY:
        limits = f"from {-MAX_PRIORITY - 1} to {MAX_PRIORITY}"
        raise EnqueueError(f"priority must be {limits}, got {priority!r}")
    return priority


def check_run_at(run_at: Any, delay: Seconds | None) -> Any:
    """Return when a task may run: a moment, an SQL expression, or None for now."""
    if delay is not None:
        if run_at is not None:
            raise EnqueueError("give run_at or delay, not both")
        seconds = _delay_seconds(delay)
        return statements.run_at_after(seconds) if seconds else None
    if run_at is None or statements.has_sql(run_at):
        return run_at
    if not isinstance(run_at, datetime):
        raise EnqueueError(f"run_at must be a datetime, got {run_at!r}")
    if run_at.utcoffset() is None:
        raise EnqueueError(f"run_at must be timezone-aware, got {run_at!r}")
    return run_at


def _delay_seconds(delay: Seconds) -> float:
    try:
        return as_seconds(delay, "delay")
    except ConfigurationError as error:
        raise EnqueueError(str(error)) from None


def check_columns(task_class: type[Any], columns: Mapping[str, Any]) -> None:
    """Refuse names that are no extra columns of the task class."""
    unknown = columns.keys() - _extra_columns(task_class)
    if unknown:
        valid = ", ".join(sorted(_extra_columns(task_class))) or "none"
        raise EnqueueError(
            f"{task_class.__name__} has no extra column {', '.join(sorted(unknown))} "
            f"(its extra columns: {valid})"
        )


def _extra_columns(task_class: type[Any]) -> set[str]:
    keys = {attribute.key for attribute in task_class.__mapper__.column_attrs}
    return keys - TASK_COLUMNS


def make_object(new: NewTask) -> Any:
    """Make the ORM object of a plain enqueue."""
    members = _enum_members(task_table(new.task_class).c.task_type.type)
    label: Any = members[new.label] if members else new.label
    return new.task_class(task_type=label, params=new.params, **new.plan(), **new.columns)


@lru_cache
def _enum_members(kind: TypeEngine[Any]) -> dict[str, Enum]:
    """Return what the labels stand for, if the types are members of a Python enum."""
    if not isinstance(kind, SqlEnum) or kind.enum_class is None:
        return {}
    return dict(zip(kind.enums, kind.enum_class, strict=False))


def conflict_rule(task_class: type[Any], on_conflict: str | None, *, coalesce: bool) -> str | None:
    """Return what to do about an equal task on a unique table; None on any other table."""
    unique = unique_columns(task_class)
    if on_conflict not in (None, "skip", "raise"):
        raise EnqueueError(f'on_conflict must be "skip" or "raise", got {on_conflict!r}')
    if unique is None:
        if on_conflict is not None:
            raise EnqueueError(
                f"on_conflict needs a unique constraint over task_type and params, which "
                f"{task_table(task_class).name} does not have; coalesce=True needs none"
            )
        return None
    if coalesce:
        raise EnqueueError(
            f"coalesce cannot be used with the unique constraint of {task_table(task_class).name}: "
            "an equal task that runs would block it"
        )
    return on_conflict or "skip"


def check_usable(session: Session) -> None:
    """Refuse a session whose transaction is over: what is added now would be lost silently."""
    if not session.is_active:
        raise EnqueueError(
            "the session's transaction has ended or failed, and a task enqueued now would be lost: "
            "enqueue before commit (the before_commit event will do), or after rollback()"
        )


def task_connection(session: Session, task_class: type[Any]) -> Connection:
    """Return the connection to which the session would send an insert of a task."""
    return session.connection(bind_arguments=_as_insert(task_class))


def is_autocommit(connection: Connection) -> bool:
    """Say whether each statement on a connection is committed at once."""
    return bool(getattr(connection.connection.dbapi_connection, "autocommit", False))


def warn_of_autocommit(connection: Connection) -> None:
    """Warn where a rollback takes no task back."""
    if is_autocommit(connection):
        warnings.warn(AUTOCOMMIT, UserWarning, stacklevel=2)


def task_engine(session: Session, task_class: type[Any]) -> Engine:
    """Return the engine to which the session would send an insert of a task."""
    return session.get_bind(**_as_insert(task_class)).engine


def _as_insert(task_class: type[Any]) -> Any:
    # With the clause, because a session may route by it: reads to a replica, writes not.
    return {"mapper": task_class.__mapper__, "clause": statements.any_insert(task_class)}
