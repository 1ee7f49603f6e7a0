"""The claim: one statement that takes tasks for a worker. A lesson for newcomers comes first.

A claim deletes the rows it takes. The transaction stays open while the handlers run, so to the
rest of the world the rows are still there, but locked. Commit, and they are gone together with
everything the handlers wrote. Die, and the server rolls back: they were never gone. No status
column, no lease, no clock. The whole statement, for one task::

    delete from task
    where task_id = any (array (                                          -- (1)
        select picked.task_id
        from unnest(array[0, 0], array['EMAIL', 'REPORT']) as turns(level, kind) -- (2)
        cross join lateral (
            select task_id from (
                select task_id from task where priority = level and task_type = kind
                and run_at is null and ticket >= 0.3717 order by ticket   -- (3)
                limit 1 for update skip locked) as upper                  -- (4)
            union all select task_id from (
                select task_id from task where priority = level and task_type = kind
                and run_at is null and ticket < 0.3717 order by ticket
                limit 1 for update skip locked) as lower
            union all select task_id from (
                select task_id from task where priority = level and task_type = kind
                and run_at between '-infinity' and now() order by run_at  -- (5)
                limit 1 for update skip locked) as due
        ) as picked
        limit 1))                                                         -- (6)
    returning task_id, task_type, params, ..                              -- (7)

1.  ``= any (array (..))`` makes the sub-select an expression that is evaluated exactly once.
    ``task_id in (select .. limit 1)`` looks the same but may be planned as a join that runs the
    sub-select again for every row of the table; each run skips what the statement took before,
    and one claim takes many rows. It happens with default settings, on a queue that was empty
    when statistics were gathered.
2.  Whose turn it is: pairs of a priority and a type of which the worker knows that tasks wait, the
    most urgent priority first. The order of the pairs is the whole policy: taking turns gives every
    type the same number of claims, however many tasks of another type wait. How a worker knows what
    waits, and whose turn it is: `turns`.
3.  A lottery: each row drew a random ``ticket`` at insert, and the claim starts at a random
    number and walks up the index, wrapping around at the end (the second branch). That is random
    order at the price of one index probe, where ``order by random()`` must read and sort them all.
4.  ``skip locked`` passes over rows that other workers hold. Two workers never wait for each
    other, and each gets another row.
5.  Delayed and retried tasks whose time has come. Those whose time has not come are not in this
    part of the index, and cost nothing. Every other claim looks here first, so that neither
    a crowd of retries nor a crowd of new tasks can starve the other.
6.  The branches run only as far as the limit asks, so no more rows are locked than are taken.
    The number stands in the text as a literal: the planner then knows how few rows are wanted.
7.  Columns by name: ``returning *`` would break the prepared statements of running workers when
    a migration adds a column. RETURNING does not keep the order, so the worker sorts again.

In fact (2) to (6) stand in a materialized CTE before the DELETE, which is evaluated once as well.
It carries one thing more: whether ``xmax`` of a row was set before we locked it. If it was, another
transaction had locked or deleted the row, and came to nothing: perhaps its worker died. See
`presence`.

There is one thing that this cannot stand: somebody's snapshot that keeps all that is done from
being cleaned up. The indexes are full of dead entries then, and (3) and (5) walk over them until
they find one that lives: (3) for long if few tasks wait, (5) always, since the oldest come first.
Lanes that meet with the one claim from the end of the primary key instead (`tail`); those that meet
with the other know since when there may be tasks that fell due (`since`).

The two literal orders, ``random`` and ``tablesample``, are the same statement around
``order by priority, random()``, with an optional CASE between. They are simple and exact, and they
read the whole queue (or a sample of it) on every claim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from sqlalchemy import (
    REAL,
    Boolean,
    ColumnElement,
    DateTime,
    Double,
    Executable,
    FromClause,
    Function,
    Integer,
    Select,
    Table,
    Text,
    any_,
    bindparam,
    case,
    cast,
    column,
    delete,
    extract,
    false,
    func,
    literal_column,
    or_,
    select,
    true,
    union_all,
)
from sqlalchemy import table as sql_table
from sqlalchemy.dialects.postgresql import ARRAY

from pgtask_sa.rows import row_version, whole_row

Now: TypeAlias = "ColumnElement[Any]"

APPLICATION_NAME = "pgtask"
# Under these names it travels:
ROW_VERSION, BACKEND_PID, BEGUN_AT = "pgtask_version", "pgtask_pid", "pgtask_begun"
TOUCHED = "pgtask_touched"
PLACE = "pgtask_place"

# The last transaction that locked or deleted a row leaves its number there, also if it came to
# nothing. To be read before the row is locked: then it is our own.
IS_TOUCHED = literal_column("xmax <> '0'::xid", Boolean).label("touched")

# No moment is before it, so as a lower bound it excludes nothing. But a planner without statistics
# takes a range for few rows and a single bound for a third of the table, which it would rather read
# and sort than walk in the order of the index.
LONG_AGO = literal_column("'-infinity'", DateTime(timezone=True))


def server_now() -> Now:
    """Return the server's clock at the start of the statement; worker clocks are never asked."""
    return func.statement_timestamp()


def claim_columns(table: Table) -> list[ColumnElement[Any]]:
    """List what a claim returns: what the worker reads, and the whole row to put back if it fails.

    The type comes as text, so that a label which this program's enum does not know cannot hurt.
    JSON params come as text too, to be decoded where the failure to do so is the task's own.
    """
    read = [_returned(c) for c in table.columns if c.name not in ("run_at", "ticket")]
    return [*read, whole_row(table), *_identity(table)]


def _identity(table: Table) -> list[ColumnElement[Any]]:
    """Return which version of the row this is, and which transaction of which server process.

    Any write makes another version. And behind a pooler only the server knows its process.
    """
    begun = cast(func.transaction_timestamp(), Text)
    return [
        row_version(table).label(ROW_VERSION),
        func.pg_backend_pid().label(BACKEND_PID),
        begun.label(BEGUN_AT),
    ]


def _returned(column: ColumnElement[Any]) -> ColumnElement[Any]:
    json_params = column.name == "params" and "JSON" in type(column.type).__name__
    if json_params or column.name == "task_type":
        return cast(column, Text).label(column.name)
    if column.name == "created_at":
        # Python has no infinity and no year 10,000; one such row would make every claim fail
        bounds = [literal_column(f"'{year}-01-02'", column.type) for year in ("0001", "9999")]
        return func.greatest(bounds[0], func.least(column, bounds[1])).label(column.name)
    return column


def fair_claim(
    table: Table,
    limit: int,
    *,
    due_first: bool,
    more: Sequence[ColumnElement[Any]] = (),
    bounded: bool = False,
    now: Now | None = None,
) -> Executable:
    """Claim by lottery, starting at ``:pivot``, in turns.

    The turns are pairs of a priority and a type, in the order of ``:levels`` and ``:types``, which
    are of the same length. ``more`` is returned as well. If it is ``bounded``, planned tasks are
    taken only if they fell due after ``:since`` (float, seconds after 1970).
    """
    chosen = fair_choice(table, limit, due_first=due_first, bounded=bounded, now=now)
    return take(table, chosen, limit, more)


def fair_choice(
    table: Table,
    limit: int,
    *,
    due_first: bool,
    more: Sequence[ColumnElement[Any]] = (),
    bounded: bool = False,
    now: Now | None = None,
) -> Select[Any]:
    """Lock what `fair_claim` takes; ``more`` of each row is returned as well."""
    turns, moment = _turns(table), server_now() if now is None else now
    mine = (table.c.priority == turns.c.level, table.c.task_type == turns.c.kind)
    lottery = _lottery(table, mine, limit)
    planned = [due(table, mine, limit, moment, since() if bounded else LONG_AGO)]
    branches = planned + lottery if due_first else lottery + planned
    # FOR UPDATE next to UNION is not allowed, hence a sub-select around each branch
    wrapped = [select(b.add_columns(*more).correlate(turns).subquery()) for b in branches]
    picked = union_all(*wrapped).lateral("picked")
    found = select(*picked.c).select_from(turns.join(picked, true()))
    return found.limit(integer(limit))


def random_claim(
    table: Table,
    limit: int,
    *,
    ranks: Mapping[str, int] | None = None,
    rank_else: int = 0,
    now: Now | None = None,
) -> Executable:
    """Claim by ``order by random()`` over the whole queue, after priority and CASE of ``ranks``."""
    order = _rank_case(table.c.task_type, ranks, rank_else)
    return take(table, _shuffled(table, table, limit, order, now), limit)


def sampled_claim(
    table: Table,
    limit: int,
    sample: Function[Any],
    *,
    ranks: Mapping[str, int] | None = None,
    rank_else: int = 0,
    now: Now | None = None,
) -> Executable:
    """Claim by ``order by random()`` over a sample, such as ``func.system(1)`` (per cent)."""
    source = table.tablesample(sample, name="sampled")
    order = _rank_case(source.c.task_type, ranks, rank_else)
    return take(table, _shuffled(table, source, limit, order, now), limit)


def claim_by_id(table: Table) -> Executable:
    """Claim one certain task, ``:task_id``, unless somebody else holds it."""
    chosen = (
        select(table.c.task_id, IS_TOUCHED)
        .where(table.c.task_id == bindparam("task_id"))
        .with_for_update(skip_locked=True)
    )
    return take(table, chosen, 1)


def claim_by_force(table: Table) -> Executable:
    """Claim ``:task_id`` from the server process ``:pid``, which is terminated.

    With ``:begun``, a moment as text, only while that process still runs the transaction that
    began then: a pid alone may mean another one by now. Null means any transaction of it.

    One statement: when it has sent the signal it waits for the row, and so is first in line when
    the row comes free. Terminating first and claiming then would let another worker in between.
    """
    found = delete(table).where(
        table.c.task_id == bindparam("task_id"), _terminated(table).is_not(None)
    )
    return found.returning(*claim_columns(table))


def _terminated(table: Table) -> ColumnElement[Any]:
    """Terminate the process; for a row that is there, and never once for the whole statement."""
    activity = sql_table(
        "pg_stat_activity",
        column("pid", Integer),
        column("xact_start", DateTime(timezone=True)),
        schema="pg_catalog",
    ).alias("holder")
    begun = cast(bindparam("begun", type_=Text), Text)
    return (
        select(func.pg_terminate_backend(activity.c.pid))
        .where(
            activity.c.pid == bindparam("pid", type_=Integer),
            or_(begun.is_(None), activity.c.xact_start == cast(begun, DateTime(timezone=True))),
            # a sub-select that does not mention the row would run before the row is looked for
            table.c.task_id == bindparam("task_id"),
        )
        .correlate(table)
        .scalar_subquery()
    )


def integer(value: int) -> ColumnElement[Any]:
    """Return a literal: of a limit, the planner is to know how few rows are wanted."""
    return literal_column(str(int(value)), Integer)


def _text(constant: str) -> ColumnElement[Any]:
    return literal_column(f"'{constant}'", Text)


def own_types(table: Table) -> ColumnElement[Any]:
    """Return ``:types`` as an array of the type that the table has for them."""
    return cast(bindparam("types", type_=ARRAY(Text)), ARRAY(table.c.task_type.type))


def _turns(table: Table) -> Any:
    levels = cast(bindparam("levels", type_=ARRAY(Integer)), ARRAY(table.c.priority.type))
    pairs = func.unnest(levels, own_types(table)).table_valued("level", "kind")
    return pairs.render_derived(name="turns")


def _lottery(table: Table, mine: Sequence[ColumnElement[bool]], limit: int) -> list[Select[Any]]:
    pivot = cast(bindparam("pivot"), REAL)
    halves = (table.c.ticket >= pivot, table.c.ticket < pivot)
    return [
        select(table.c.task_id, IS_TOUCHED)
        .where(*mine, table.c.run_at.is_(None), half)
        .order_by(table.c.ticket)
        .limit(integer(limit))
        .with_for_update(skip_locked=True)
        for half in halves
    ]


def since() -> Now:
    """Return the moment ``:since`` (float, seconds after 1970, or infinite)."""
    return func.to_timestamp(cast(bindparam("since"), Double))


def epoch(moment: Now) -> ColumnElement[Any]:
    """Return a moment as seconds after 1970 (float)."""
    return cast(extract("epoch", moment), Double)


def due(
    table: Table, mine: Sequence[ColumnElement[bool]], limit: int, now: Now, start: Now = LONG_AGO
) -> Select[Any]:
    """Lock tasks whose time has come, the longest due first; ``mine`` says of which pair."""
    return (
        select(table.c.task_id, IS_TOUCHED)
        .where(*mine, table.c.run_at.between(start, now))
        .order_by(table.c.run_at)
        .limit(integer(limit))
        .with_for_update(skip_locked=True)
    )


def _shuffled(
    table: Table,
    source: FromClause,
    limit: int,
    order: Sequence[ColumnElement[Any]],
    now: Now | None,
) -> Select[Any]:
    return (
        select(source.c.task_id, IS_TOUCHED)
        .where(*claimable(table, source, now))
        .order_by(source.c.priority, *order, func.random())
        .limit(integer(limit))
        .with_for_update(skip_locked=True)
    )


def claimable(
    table: Table, source: FromClause, now: Now | None = None
) -> list[ColumnElement[bool]]:
    """Say what may be claimed at all: tasks of ``:types`` that are ready or due."""
    c, moment = source.c, server_now() if now is None else now
    return [c.task_type == any_(own_types(table)), or_(c.run_at.is_(None), c.run_at <= moment)]


def _rank_case(
    task_type: ColumnElement[Any], ranks: Mapping[str, int] | None, rank_else: int
) -> list[ColumnElement[Any]]:
    if not ranks:
        return []
    whens = {name: integer(rank) for name, rank in ranks.items()}
    return [case(whens, value=cast(task_type, Text), else_=integer(rank_else))]


def take(
    table: Table,
    chosen: Select[Any],
    limit: int,
    more: Sequence[ColumnElement[Any]] = (),
    *,
    in_order: bool = False,
    by_one: bool = False,
) -> Executable:
    """Delete the rows that ``chosen`` locked, its columns being ``task_id`` and ``touched``.

    Args:
        table: the task table.
        chosen: what to take.
        limit: how many rows that may be, at most.
        more: further columns to return.
        in_order: return also at which place in the order of ``chosen`` each row was, as `PLACE`.
        by_one: compare with one number, not with an array, where the limit is 1. The planner takes
            an array for ten numbers, and where it believes that the table holds only a few rows it
            would rather read all of it, the dead ones as well.
    """
    found = chosen.cte("chosen").prefix_with("MATERIALIZED")
    ids = func.array(select(found.c.task_id).scalar_subquery(), type_=ARRAY(table.c.task_id.type))
    touched = select(func.bool_or(found.c.touched)).scalar_subquery()
    returned = [*claim_columns(table), touched.label(TOUCHED), *more]
    if in_order:
        returned.append(func.array_position(ids, table.c.task_id).label(PLACE))
    if limit == 1:
        returned.append(_announce(table))
    number: Any = any_(ids)
    if by_one and limit == 1:
        number = select(found.c.task_id).scalar_subquery()
    taken = delete(table).where(table.c.task_id == number)
    return taken.returning(*returned)


def take_untouched(table: Table, chosen: Select[Any]) -> Executable:
    """Delete the one row that ``chosen`` locked, which nobody had touched; it gives the number."""
    returned = [*claim_columns(table), false().label(TOUCHED), _announce(table)]
    number = chosen.correlate(None).scalar_subquery()
    return delete(table).where(table.c.task_id == number).returning(*returned)


def _announce(table: Table) -> ColumnElement[Any]:
    """Show in pg_stat_activity what this backend runs; costs no round trip, ends with the claim."""
    c = table.c
    name = func.concat(_text(f"{APPLICATION_NAME} "), c.task_id, _text(" "), c.task_type)
    shown = func.left(name, literal_column("63", Integer))
    return func.set_config(_text("application_name"), shown, true()).label("pgtask_announced")
