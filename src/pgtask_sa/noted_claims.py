"""The next task, noted and claimed in one message; see `presence` for what a note is.

A note must be committed before a handler begins, and by nobody whose rollback would undo it. On a
second connection that is a round trip of its own for each task, and a fifth of all time. So where a
lane sends the next claim together with the COMMIT before it, what it sends is this::

    commit and chain;                     -- the task before is done, whatever comes now
    set local lock_timeout = '100ms';
    update task_worker set task_ids = ..  -- choose the next task, and note it
    commit and chain;
    delete from task where ..             -- claim what is noted, if it is still free

Between the two transactions somebody else may take the task. Then nothing is claimed, and the lane
asks again in the ordinary way, and so it does where there is more to a task than to run it: where
it has been tried before, or another transaction has touched it, whose worker may be dead.

The claim is told by a setting of the session what is noted. To read it in the table would lock that
as long as the handler runs, and DDL there would wait, and with it the notes of all other workers.
The note itself locks both tables; so it does not wait for long, or it would meet with a migration
that changes the one and then the other.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    CTE,
    BigInteger,
    ColumnElement,
    Executable,
    Integer,
    Select,
    Table,
    Text,
    any_,
    bindparam,
    case,
    cast,
    exists,
    false,
    func,
    literal_column,
    null,
    select,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY, array

from pgtask_sa.claim import take_untouched
from pgtask_sa.presence_statements import in_place, own_lane, place_of
from pgtask_sa.presence_table import worker_table
from pgtask_sa.rows import quoted, row_version

_LAZILY = [literal_column(f"'{each}'", Text) for each in ("synchronous_commit", "off")]
_NOTED = literal_column("'pgtask.noted'", Text)
_NUMBERS = ARRAY(BigInteger)


def to_be_noted(task: Table) -> list[ColumnElement[Any]]:
    """List what `note_next` reads of a task besides.

    The version, below 0 of types that are ``:leased``: see presence_table.
    """
    is_leased = cast(task.c.task_type, Text) == any_(bindparam("leased", type_=ARRAY(Text)))
    version = case((is_leased, -row_version(task)), else_=row_version(task))
    return [task.c.attempts, version.label("version")]


def note_next(task: Table, chosen: Select[Any]) -> Executable:
    """Note, in the lane's row at ``:place``, a task that ``chosen`` locks, if it is a fresh one.

    ``chosen`` returns also what is `to_be_noted`. The note is committed without waiting for the
    disk: a crash of the server takes all claims along.

    Returns:
        ``place``, where the row is now; ``found``, whether anything was chosen, and ``named``, how
        many tasks were noted, 0 or 1. Nothing if the row has moved.
    """
    table = worker_table(task)
    found = chosen.cte("chosen").prefix_with("MATERIALIZED")
    noted: dict[str, Any] = {
        "lane": bindparam("number", type_=Integer),
        "task_ids": _if_fresh(found, found.c.task_id),
        "row_versions": _if_fresh(found, found.c.version),
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
            exists(select(literal_column("1")).select_from(found)).label("found"),
            func.cardinality(table.c.task_ids).label("named"),
            func.set_config(*_LAZILY, true()).label("lazily"),
            func.set_config(_NOTED, _handed_on(table), false()).label("handed_on"),
        )
    )


def _if_fresh(found: CTE, value: ColumnElement[Any]) -> ColumnElement[Any]:
    is_fresh = (~found.c.touched, found.c.attempts == literal_column("0"))
    return func.array(select(value).where(*is_fresh).scalar_subquery(), type_=_NUMBERS)


def _handed_on(table: Table) -> ColumnElement[Any]:
    """Say for `claim_noted`, as the text of an array, what the row names: task, version, by whom.

    If it names nothing, neither does this.
    """
    first = literal_column("1", Integer)
    noted_by = _number_of(literal_column("pg_current_xact_id()::xid"))
    version = func.abs(table.c.row_versions[first])
    return cast(array([table.c.task_ids[first], version, noted_by]), Text)


def _number_of(xid: ColumnElement[Any]) -> ColumnElement[Any]:
    return cast(cast(xid, Text), BigInteger)


def claim_noted(task: Table) -> Executable:
    """Claim what this session has just noted, if it is free, and as it was.

    Nobody may have touched it since: the transaction that wrote the note was the last to lock it.
    """
    noted = func.nullif(func.current_setting(_NOTED, true()), literal_column("''", Text))
    named = select(cast(noted, _NUMBERS).label("numbers")).cte("named").prefix_with("MATERIALIZED")
    number, version, noted_by = (
        select(named.c.numbers[literal_column(str(i), Integer)]).scalar_subquery()
        for i in (1, 2, 3)
    )
    same = (
        task.c.task_id == number,
        row_version(task) == version,
        _number_of(literal_column(f"{quoted(task)}.xmax")) == noted_by,
    )
    chosen = select(task.c.task_id).where(*same).with_for_update(of=task, skip_locked=True)
    return take_untouched(task, chosen)
