"""Enqueues that are one statement at the call, because the answer depends on other transactions.

Coalescing, unique tables and bulk. Each may have to wait for a transaction that holds an equal
task; no wait is longer than the session's ``enqueue_lock_timeout``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import make_transient_to_detached

from pgtask_sa import insert_statements as statements
from pgtask_sa.errors import DuplicateTask, EnqueueBlocked, EnqueueError
from pgtask_sa.failures import LOCK_NOT_AVAILABLE, sqlstate
from pgtask_sa.intake import task_connection, warn_of_autocommit
from pgtask_sa.retry import Seconds, as_seconds

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.dialects.postgresql import Insert
    from sqlalchemy.orm import Session

    from pgtask_sa.insert_statements import NewTask
    from pgtask_sa.intake import Target

MAX_TYPED_ROWS = 1000  # each is a bind parameter, of which a statement has 32,767 at most


def _connection(session: Session, task_class: type[Any]) -> Connection:
    """Return the connection that the session uses for tasks, ready for inserts."""
    connection = task_connection(session, task_class)
    warn_of_autocommit(connection)
    if session.twophase:
        connection.execute(statements.silence_wakeup())
    return connection


def write_coalesced(session: Session, new: NewTask, timeout: Seconds) -> Any | None:
    """Insert a task unless an equal one waits; see `insert_statements.insert_unless_waiting`."""
    connection = _connection(session, new.task_class)
    if not connection.scalar(statements.lock_key(new, wait=False)):
        with bounded_wait(connection, timeout, new.label):
            connection.execute(statements.lock_key(new, wait=True))
    return _insert(connection, new, statements.insert_unless_waiting(new))


def write_unique(session: Session, new: NewTask, rule: str, timeout: Seconds) -> Any | None:
    """Insert a task into a unique table; return None, or raise, when an equal one is there."""
    connection = _connection(session, new.task_class)
    with bounded_wait(connection, timeout, new.label):
        task = _insert(connection, new, statements.insert_one(new).on_conflict_do_nothing())
    if task is None and rule == "raise":
        raise DuplicateTask(f"an equal task of type {new.label!r} is waiting already")
    return task


def _insert(connection: Connection, new: NewTask, statement: Insert) -> Any | None:
    """Run an insert; return what it wrote as an object that belongs to no session."""
    returning = statement.returning(*statements.all_columns(new.task_class))
    row = connection.execute(returning).mappings().one_or_none()
    if row is None:
        return None
    task = new.task_class.__mapper__.class_manager.new_instance()
    statements.fill_in(task, row)
    make_transient_to_detached(task)
    return task


@contextlib.contextmanager
def bounded_wait(connection: Connection, timeout: Seconds, label: str) -> Iterator[None]:
    """Wait for another transaction for so long and no longer, in a savepoint.

    An equal task that runs is a deleted row whose transaction is open. Without a limit an insert
    waits for as long as the handler runs; from a second connection inside that very handler it
    waits for ever, and Postgres sees no deadlock.
    """
    milliseconds = max(1, round(as_seconds(timeout, "enqueue_lock_timeout") * 1000))
    savepoint = connection.begin_nested()
    try:
        before = str(connection.scalar(select(func.current_setting("lock_timeout"))))
        connection.execute(statements.set_lock_timeout(f"{milliseconds}ms"))
        yield
        connection.execute(statements.set_lock_timeout(before))
        savepoint.commit()
    except BaseException as error:
        savepoint.rollback()
        if isinstance(error, DBAPIError) and sqlstate(error) == LOCK_NOT_AVAILABLE:
            raise EnqueueBlocked(
                f"an equal task of type {label!r} is being run or written, and did not end "
                f"within {milliseconds / 1000:g} s"
            ) from error
        raise


def write_many(
    session: Session,
    target: Target,
    template: NewTask,
    params: Iterable[Any],
    *,
    batch_size: int,
    unique: bool,
    timeout: Seconds,
) -> int:
    """Insert many tasks, one statement per batch; return how many rows were written."""
    if statements.has_own_params_type(template.task_class):
        batch_size = min(batch_size, MAX_TYPED_ROWS)
    batches = _batches(target, params, batch_size, in_order=unique)
    connection = _connection(session, template.task_class)
    written = 0
    for batch in batches:
        statement = statements.insert_batch(template, batch)
        if unique:
            with bounded_wait(connection, timeout, template.label):
                written += _count(connection, statement.on_conflict_do_nothing())
        else:
            written += _count(connection, statement)
    return written


def _count(connection: Connection, statement: Insert) -> int:
    # without the option SQLAlchemy does not look at the row count of an insert
    result = connection.execute(statement, execution_options={"preserve_rowcount": True})
    return result.rowcount


def _batches(
    target: Target, params: Iterable[Any], size: int, *, in_order: bool
) -> Iterator[list[dict[str, Any]]]:
    """Validate and cut into batches: a sequence as a whole and at once, an iterator as it comes.

    On unique tables the keys are put in order. Two transactions that insert the same keys in
    opposite orders would wait for each other until Postgres kills one of them.
    """
    if isinstance(params, (Mapping, str)):
        raise EnqueueError(f"params_list must be a list of params, got {params!r}")
    dumped: Iterable[dict[str, Any]] = _numbered(target, params)
    if isinstance(params, Sequence):
        dumped = sorted(dumped, key=_order) if in_order else list(dumped)
    return _cut(iter(dumped), size, in_order=in_order)


def _cut(
    dumped: Iterator[dict[str, Any]], size: int, *, in_order: bool
) -> Iterator[list[dict[str, Any]]]:
    while batch := list(itertools.islice(dumped, size)):
        yield sorted(batch, key=_order) if in_order else batch


def _order(params: dict[str, Any]) -> str:
    return json.dumps(params, sort_keys=True)


def _numbered(target: Target, params: Iterable[Any]) -> Iterator[dict[str, Any]]:
    for number, item in enumerate(params):
        yield target.dump(item, path=f"params_list[{number}]")
