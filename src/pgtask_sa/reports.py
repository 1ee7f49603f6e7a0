"""What people and tests ask about the two tables: counts, listings, who is next.

One pure function for each statement, as in statements.py, which holds what the worker needs.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    DateTime,
    Double,
    Integer,
    Select,
    Table,
    Text,
    and_,
    any_,
    bindparam,
    case,
    cast,
    column,
    extract,
    func,
    literal,
    literal_column,
    or_,
    select,
)
from sqlalchemy import table as sql_table
from sqlalchemy.dialects.postgresql import ARRAY

from pgtask_sa.claim import APPLICATION_NAME
from pgtask_sa.mapping import TASK_COLUMNS
from pgtask_sa.presence_statements import lock_holders
from pgtask_sa.presence_table import NUMBERS
from pgtask_sa.rows import quoted, row_version
from pgtask_sa.statements import Now, kinds_of, server_now, some_of_kind


def count_claimable(table: Table, now: Now | None = None) -> Select[Any]:
    """Count the tasks of ``:types`` that are ready or due, running ones included."""
    kinds, moment = kinds_of(table), server_now() if now is None else now
    mine = select(literal(1)).where(kinds.c.kind == table.c.task_type).exists()
    claimable = or_(table.c.run_at.is_(None), table.c.run_at <= moment)
    return select(func.count()).select_from(table).where(mine, claimable)


STATES = ("ready", "running", "planned", "leased", "retrying")


def statistics(table: Table, dead: Table, now: Now | None = None) -> Select[Any]:
    """Count by type what is in each of `STATES`, and dead; and date the oldest ready one.

    A lease that has run out makes a task ready, as it does for a claim.
    """
    moment = server_now() if now is None else now
    waiting = _waiting_by_kind(table, moment)
    buried = (
        select(cast(dead.c.task_type, Text).label("kind"), func.count().label("dead"))
        .group_by(dead.c.task_type)
        .subquery("buried")
    )
    both = waiting.join(buried, waiting.c.kind == buried.c.kind, full=True)
    zero = {n: func.coalesce(waiting.c[n], 0).label(n) for n in STATES}
    kind = func.coalesce(waiting.c.kind, buried.c.kind).label("task_type")
    return (
        select(
            kind,
            *zero.values(),
            func.coalesce(buried.c.dead, 0).label("dead"),
            waiting.c.oldest_seconds,
        )
        .select_from(both)
        .order_by(kind)
    )


def _waiting_by_kind(table: Table, moment: Now) -> Any:
    c = table.c
    later, is_leased = c.run_at > moment, c.lease_token.is_not(None)
    leased = and_(later, is_leased)  # the time is the end of its lease, and an attempt is counted
    is_due, is_held = or_(c.run_at.is_(None), c.run_at <= moment), _is_held(table)
    is_ready = and_(is_due, ~is_held)
    start = func.coalesce(c.run_at, c.created_at)
    since = func.min(case((and_(is_ready, func.isfinite(start)), start)))
    age = extract("epoch", moment - since)
    return (
        select(
            cast(c.task_type, Text).label("kind"),
            func.count().filter(is_ready).label("ready"),
            func.count().filter(is_due, is_held).label("running"),
            func.count().filter(later, ~is_leased).label("planned"),
            func.count().filter(leased).label("leased"),
            func.count().filter(c.attempts > 0, or_(is_due, ~is_leased)).label("retrying"),
            cast(age, Double).label("oldest_seconds"),
        )
        .group_by(c.task_type)
        .subquery("waiting")
    )


def _is_held(table: Table) -> ColumnElement[bool]:
    """Say whether a transaction that has not ended deletes or locks a row: its task runs.

    Takes no lock: a claim would pass over what is looked at.
    """
    names = ("locktype", "transactionid", "granted")  # each transaction that writes locks itself
    locks = sql_table("pg_locks", *map(column, names), schema="pg_catalog").c
    is_number = locks.locktype == literal_column("'transactionid'")
    live = select(locks.transactionid).where(is_number, locks.granted)
    xmax: ColumnElement[Any] = literal_column(f"{quoted(table)}.xmax")
    return xmax == any_(func.array(live.scalar_subquery()))


def listing(table: Table, *, task_type: str | None, limit: int) -> Select[Any]:
    """List rows of the task table or of the error queue, oldest number first.

    Of the task table also whether it is ``running`` in a transaction.
    """
    columns = [_listed(c) for c in table.columns if c.name not in ("ticket", "coalesce_key")]
    if table.info.get("pgtask") == "task" and "running" not in table.c:
        columns.append(_is_held(table).label("running"))
    statement = select(*columns).order_by(table.c.task_id).limit(limit)
    if task_type is not None:
        statement = statement.where(cast(table.c.task_type, Text) == task_type)
    return statement


def _listed(column: ColumnElement[Any]) -> ColumnElement[Any]:
    if column.name in ("task_type", "params"):
        return cast(column, Text).label(column.name)
    if isinstance(column.type, DateTime):  # Python has no infinity and no year 10,000
        bounds = [literal_column(f"'{year}-01-02'", column.type) for year in ("0001", "9999")]
        readable = func.greatest(bounds[0], func.least(column, bounds[1]))
        return case((column.is_not(None), readable)).label(column.name)
    return column


def next_in_line(table: Table, now: Now | None = None) -> Select[Any]:
    """Find and hold the first task of ``:types``: ready ones by number, then by time those due.

    For tests, where the order must not change from run to run. Workers claim by lottery.
    """
    moment = server_now() if now is None else now
    c, types = table.c, cast(bindparam("types", type_=ARRAY(Text)), ARRAY(table.c.task_type.type))
    return (
        select(c.task_id, cast(c.task_type, Text).label("task_type"))
        .where(c.task_type == any_(types), or_(c.run_at.is_(None), c.run_at <= moment))
        .order_by(c.run_at.nulls_first(), c.task_id)
        .limit(1)
        .with_for_update(skip_locked=True)
    )


def all_waiting(table: Table) -> Select[Any]:
    """List all tasks with what tests ask about them, in the order of their numbers.

    Columns of the user's own come last.
    """
    c = table.c
    kind = cast(c.task_type, Text).label("task_type")
    rest = (c.params, _listed(c.created_at), _listed(c.run_at), c.attempts, c.last_error)
    own = [_listed(column) for column in c if column.name not in TASK_COLUMNS]
    return select(c.task_id, kind, *rest, c.priority, *own).order_by(c.task_id)


def summarize_waiting(table: Table, most: int, now: Now | None = None) -> Select[Any]:
    """Count the tasks of the type ``:kind`` and date the oldest, but look at no more than ``most``.

    Returns one row: ``count``, ``oldest_at`` and its age ``oldest_seconds`` (null if none waits).
    """
    moment = server_now() if now is None else now
    some = some_of_kind(table, most, _listed(table.c.created_at))
    oldest = func.min(some.c.created_at)
    age = cast(extract("epoch", moment - oldest), Double)
    return select(
        func.count().label("count"), oldest.label("oldest_at"), age.label("oldest_seconds")
    ).select_from(some)


def by_ids(table: Table) -> ColumnElement[bool]:
    """Choose the rows whose numbers are in ``:ids``."""
    return table.c.task_id == any_(bindparam("ids", type_=ARRAY(BigInteger)))


def rows_by_ids(table: Table) -> Select[Any]:
    """Fetch the rows of ``:ids`` from the task table or from the error queue, as `listing` does."""
    return listing(table, task_type=None, limit=0).limit(None).where(by_ids(table))


def hold_dead(dead: Table, *, task_type: str | None, limit: int) -> Select[Any]:
    """Lock dead tasks with numbers over ``:after``, passing over those that others have locked."""
    statement = select(dead.c.task_id).where(dead.c.task_id > bindparam("after", type_=BigInteger))
    if task_type is not None:
        statement = statement.where(cast(dead.c.task_type, Text) == task_type)
    return statement.order_by(dead.c.task_id).limit(limit).with_for_update(skip_locked=True)


def hold_dead_by_ids(dead: Table) -> Select[Any]:
    """Lock the dead tasks of ``:ids``, passing over those that others have locked."""
    statement = select(dead.c.task_id).where(by_ids(dead)).order_by(dead.c.task_id)
    return statement.with_for_update(skip_locked=True)


def clock() -> Select[Any]:
    """Read the server's clock."""
    return select(func.clock_timestamp())


def lanes(workers: Table, now: Now | None = None) -> Select[Any]:
    """List what the lanes of all workers noted, and whether their process is ``alive``.

    Alive: it holds the advisory lock on its number; or, where nobody can hold one, it was seen in
    the last minute. ``begun`` is ``begun_at`` as text, to the microsecond. What a lane has noted by
    itself runs in a later transaction; when that began, the server knows as long as it runs.
    """
    c = workers.c
    moment = server_now() if now is None else now
    recent = c.seen_at > moment - literal_column(f"interval '{ABSENT} seconds'")
    alive = case((c.is_direct, lock_holders(c.worker_id).exists()), else_=recent)
    begun_at = func.coalesce(c.begun_at, _running_since(c))
    begun = (begun_at.label("begun_at"), cast(begun_at, Text).label("begun"))
    others = ("lane", "server_started_at", "begun_at")
    columns = [column for column in c if column.name not in others]
    lane = func.mod(c.lane, literal_column(str(NUMBERS), Integer)).label("lane")
    return select(lane, *columns, *begun, alive.label("alive")).order_by(c.worker_id, lane)


def _running_since(c: Any) -> ColumnElement[Any]:
    """Return when the transaction began in which a lane runs the only task that it names.

    Which task it runs stands in its name, unless the handler has changed that.
    """
    activity = sql_table("pg_stat_activity", *map(column, ACTIVITY), schema="pg_catalog").c
    name, first = activity.application_name, c.task_ids[literal_column("1", Integer)]
    some, space = literal_column(f"'{APPLICATION_NAME} '", Text), literal_column("' '", Text)
    is_same = func.starts_with(name, func.concat(some, first, space))
    is_changed = and_(~func.starts_with(name, some), activity.backend_xid.is_not(None))
    return (
        select(activity.xact_start)
        .where(activity.pid == c.backend_pid, or_(is_same, is_changed))
        .scalar_subquery()
    )


ABSENT = 60  # seconds


def versions_by_ids(table: Table) -> Select[Any]:
    """Tell of the tasks of ``:ids`` that are there: type, version of the row, whether leased."""
    return select(
        table.c.task_id,
        cast(table.c.task_type, Text).label("task_type"),
        row_version(table).label("version"),
        table.c.lease_token.is_not(None).label("leased"),
    ).where(by_ids(table))


def holder(table: Table) -> Select[Any]:
    """Tell whose transaction holds the row of ``:task_id``: one row, or none if nobody's does.

    ``seen`` is false where this role may not know more of it, such as when it began.
    """
    view = sql_table("pg_stat_activity", *map(column, ACTIVITY), schema="pg_catalog")
    activity = view.c
    xmax = cast(literal_column(f"{quoted(table)}.xmax"), Text)
    return (
        select(
            activity.pid,
            activity.usename,
            activity.application_name,
            activity.xact_start.is_not(None).label("seen"),
        )
        .join_from(table, view, cast(activity.backend_xid, Text) == xmax)
        .where(table.c.task_id == bindparam("task_id"))
    )


ACTIVITY = ("pid", "usename", "application_name", "backend_xid", "xact_start")
