"""The next task, noted and claimed in one message; see `presence` for what a note is.

A note must be committed before a handler begins, and by nobody whose rollback would undo it. On a
second connection that is a round trip of its own for each task, and a fifth of all time. So where a
lane sends the next claim together with the COMMIT before it, what it sends is this::

    commit and chain;                     -- the task before is done, whatever comes now
    update task_worker set task_ids = ..  -- choose the next task, and note it
    commit and chain;
    delete from task where ..             -- claim what the note names, if it is still free

Between the two transactions somebody else may take the task. Then nothing is claimed, and the lane
asks again in the ordinary way, and so it does where there is more to a task than to run it: where
it has been tried before, or another transaction has touched it, whose worker may be dead.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Executable,
    Integer,
    Select,
    Table,
    Text,
    any_,
    bindparam,
    case,
    cast,
    false,
    func,
    literal_column,
    null,
    select,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY

from pgtask_sa.claim import take
from pgtask_sa.presence_statements import MINE, in_place, own_lane, place_of
from pgtask_sa.presence_table import worker_table
from pgtask_sa.rows import quoted, row_version

_LAZILY = [literal_column(f"'{each}'", Text) for each in ("synchronous_commit", "off")]
_NUMBERS = ARRAY(BigInteger)
_NUMBER = bindparam("number", type_=Integer)


def note_next(task: Table, chosen: Select[Any]) -> Executable:
    """Note, in the lane's row at ``:place``, a task that ``chosen`` locks, if it is a fresh one.

    Of types that are ``:leased`` the version is noted below 0: see presence_table. It is committed
    without waiting for the disk: a crash of the server takes all claims along.

    Returns:
        ``place``, where the row is now; ``found``, how many were chosen, and ``named``, how many
        of them were noted, 0 or 1. Nothing if the row has moved.
    """
    table = worker_table(task)
    found = chosen.cte("chosen").prefix_with("MATERIALIZED")
    untouched = select(found.c.task_id).where(~found.c.touched).scalar_subquery()
    is_leased = cast(task.c.task_type, Text) == any_(bindparam("leased", type_=ARRAY(Text)))
    version = case((is_leased, -row_version(task)), else_=row_version(task))
    fresh = (
        select(task.c.task_id, version.label("version"))
        .where(task.c.task_id == untouched, task.c.attempts == literal_column("0"))
        .cte("fresh")
        .prefix_with("MATERIALIZED")
    )
    noted: dict[str, Any] = {
        "lane": _NUMBER,
        "task_ids": func.array(select(fresh.c.task_id).scalar_subquery(), type_=_NUMBERS),
        "row_versions": func.array(select(fresh.c.version).scalar_subquery(), type_=_NUMBERS),
        "backend_pid": func.pg_backend_pid(),
        "begun_at": null(),  # the transaction in which it runs begins only after this one
        "seen_at": func.statement_timestamp(),
    }
    return (
        update(table)
        .values(noted)
        .where(own_lane(table), in_place(table))
        .returning(
            place_of(table),
            select(func.count()).select_from(found).scalar_subquery().label("found"),
            func.cardinality(table.c.task_ids).label("named"),
            func.set_config(*_LAZILY, true()).label("lazily"),
        )
    )


def claim_noted(task: Table) -> Executable:
    """Claim what the row of ``:worker_id`` with ``:number`` names, if it is free, and as it was.

    Nobody may have touched it since: the transaction that wrote the note was the last to lock it.
    """
    table = worker_table(task)
    first = literal_column("1", Integer)
    named = (
        select(
            table.c.task_ids[first].label("task_id"),
            table.c.row_versions[first].label("version"),
            literal_column(f"{quoted(table)}.xmin").label("noted_by"),
        )
        .where(table.c.worker_id == MINE, table.c.lane == _NUMBER)
        .cte("named")
        .prefix_with("MATERIALIZED")
    )
    same = (
        task.c.task_id == select(named.c.task_id).scalar_subquery(),
        row_version(task) == func.abs(select(named.c.version).scalar_subquery()),
        literal_column(f"{quoted(task)}.xmax") == select(named.c.noted_by).scalar_subquery(),
    )
    chosen = (
        select(task.c.task_id, false().label("touched"))
        .where(*same)
        .with_for_update(of=task, skip_locked=True)
    )
    return take(task, chosen, 1, by_one=True)
