"""Every SQL statement but the claims: one pure function for each, returning SQLAlchemy Core.

Statements that read the clock take ``now``, so that tests own time; left out, it is the server's
clock. A worker's own clock is never mixed in.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    CTE,
    BigInteger,
    ColumnElement,
    DateTime,
    Double,
    Insert,
    Integer,
    Interval,
    Select,
    Subquery,
    Table,
    Text,
    any_,
    bindparam,
    cast,
    column,
    delete,
    exists,
    extract,
    func,
    literal_column,
    null,
    or_,
    select,
    true,
    tuple_,
    union_all,
)
from sqlalchemy import table as sql_table
from sqlalchemy.dialects.postgresql import ARRAY, OID
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.dialects.postgresql.dml import Insert as PgInsert
from sqlalchemy.ext.compiler import compiles

from pgtask_sa.mapping import LOCK_CLASS, TaskMixin
from pgtask_sa.rows import restored

Now = ColumnElement[Any]
LONG_AGO = literal_column("'-infinity'", DateTime(timezone=True))  # why: see claim.py
ONE = literal_column("1", Integer)  # a parameter would not tell the planner how few are wanted
NEVER = literal_column("'infinity'", DateTime(timezone=True))  # as some plan a task by hand


class Reinsert(PgInsert):
    """An insert that brings its own identity value: a task keeps its number when it comes back."""

    inherit_cache = PgInsert.inherit_cache  # False in SQLAlchemy 2.0


@compiles(Reinsert)
def _compile_reinsert(element: Reinsert, compiler: Any, **kw: Any) -> str:
    text = compiler.visit_insert(element, **kw)
    return _COLUMN_LIST.sub(r"\g<0> OVERRIDING SYSTEM VALUE", text, count=1)


# Quoted names may hold anything, also parentheses.
_COLUMN_LIST = re.compile(r'INSERT INTO (?:"[^"]*"|[^"(])+\((?:"[^"]*"|[^")])*\)')


def server_now() -> Now:
    """Return the server's clock at the start of the statement."""
    return func.statement_timestamp()


def stored_names(table: Table) -> Select[Any]:
    """List the columns that a row is made of in the database, without those that it computes.

    Asked of the catalog: a migration may have added one that this program does not know yet.
    """
    attribute = sql_table("pg_attribute", *map(column, CATALOG), schema="pg_catalog")
    c = attribute.c
    stored = (c.attnum > 0, ~c.attisdropped, c.attgenerated == literal_column("''"))
    mine = c.attrelid == regclass(table)
    return select(cast(c.attname, Text)).where(mine, *stored).order_by(c.attnum)


CATALOG = ("attname", "attnum", "attrelid", "attisdropped", "attgenerated")


def mapped_names(table: Table) -> list[str]:
    """List the columns of a table as the mapping knows them, without the computed ones."""
    return [c.name for c in table.columns if c.computed is None]


def is_json(table: Table) -> bool:
    """Say whether the params of this table are JSON (else they are HSTORE)."""
    return "JSON" in type(table.c.params.type).__name__


def _outcome() -> dict[str, ColumnElement[Any]]:
    return {
        "attempts": bindparam("pgtask_attempts", type_=Integer),
        "last_error": bindparam("pgtask_last_error", type_=Text),
    }


def _lease() -> dict[str, ColumnElement[Any]]:
    return {"lease_token": bindparam("pgtask_lease", None, type_=Text)}


def _soon(now: Now | None) -> ColumnElement[Any]:
    return (server_now() if now is None else now) + bindparam("pgtask_delay", type_=Interval)


def _target(table: Table, names: Sequence[str]) -> Any:
    """Name a table and columns of it, whether the mapping knows them or not."""
    return sql_table(table.name, *map(column, names), schema=table.schema)


def retry(
    table: Table,
    names: Sequence[str],
    unique: Sequence[str] | None = None,
    now: Now | None = None,
) -> Insert:
    """Put a claimed task back: the row as it was, ``:pgtask_row``, with what the attempt changed.

    With ``:pgtask_lease`` it is not free: for ``:pgtask_delay`` it is leased to who has the token.

    Where the table has a unique constraint an equal task may have been enqueued meanwhile. Then
    the two become one, which keeps the higher count.

    Args:
        table: the task table.
        names: all its stored columns; see `stored_names`.
        unique: columns of its unique constraint or index; see `mapping.unique_columns`.
        now: an expression in place of the server's clock.
    """
    row = restored(table, names, **_outcome(), **_lease(), run_at=_soon(now))
    target = _target(table, names)
    statement = Reinsert(target).from_select(
        list(names), select(*[row.c[name] for name in names]), include_defaults=False
    )
    if unique is None:
        return statement
    new = statement.excluded
    return statement.on_conflict_do_update(
        **_conflict_target(table, unique),
        set_={
            "attempts": func.greatest(target.c.attempts, new.attempts),
            "last_error": new.last_error,
        },
    )


def _conflict_target(table: Table, unique: Sequence[str]) -> dict[str, Any]:
    """Name the arbiter of ON CONFLICT: a unique index may be on expressions, and partial."""
    for index in table.indexes:
        if index.unique and [c.name for c in index.columns] == list(unique):
            where = index.dialect_options["postgresql"]["where"]
            return {"index_elements": list(index.expressions), "index_where": where}
    return {"index_elements": list(unique)}


def equal_waiting(table: Table, now: Now | None = None) -> Select[Any]:
    """Hold a waiting task equal to the claimed ``:pgtask_row`` that is due in time."""
    row = restored(table, [c.name for c in table.columns])
    own = [c for c in table.columns if c.name not in TaskMixin.__annotations__]
    return (
        select(table.c.task_id)
        .join(row, true())
        .where(
            table.c.task_type == row.c.task_type,
            table.c.coalesce_key == row.c.coalesce_key,
            table.c.params == row.c.params,
            or_(table.c.run_at.is_(None), table.c.run_at <= _soon(now)),
            table.c.lease_token.is_(None),
            *[c.is_not_distinct_from(row.c[c.name]) for c in own],
        )
        .limit(1)
        .with_for_update(key_share=True, read=True, skip_locked=True, of=table)
    )


def bury(table: Table, dead: Table, names: Sequence[str] | None = None) -> Insert:
    """Write a claimed row that gave up to the error queue, with ``:pgtask_reason``.

    Args:
        table: the task table.
        dead: the error queue.
        names: the columns to carry; by default those that both mappings know.
    """
    names = names or _carried(table, dead)
    row = restored(table, names, **_outcome())
    values = [_as_kind(dead, row.c[n]) if n == "task_type" else row.c[n] for n in names]
    reason = bindparam("pgtask_reason", type_=Text)
    target = _target(dead, [*names, "reason"])
    return pg_insert(target).from_select([*names, "reason"], select(*values, reason))


def _carried(table: Table, dead: Table) -> list[str]:
    own = ("reason", "buried_at")
    known = set(mapped_names(table))
    return [name for name in mapped_names(dead) if name in known and name not in own]


def requeue(
    table: Table, dead: Table, where: ColumnElement[bool], names: Sequence[str] | None = None
) -> Insert:
    """Bring dead tasks back with a fresh budget of attempts; they keep their number.

    Args:
        table: the task table.
        dead: the error queue.
        where: which of its rows.
        names: the columns to carry; by default those that both mappings know.
    """
    carried = [n for n in (names or _carried(table, dead)) if n != "attempts"]
    gone = delete(dead).where(where).returning(*[column(n) for n in carried]).cte("gone")
    values = [_as_kind(table, gone.c[n]) if n == "task_type" else gone.c[n] for n in carried]
    statement = Reinsert(_target(table, carried)).from_select(carried, select(*values))
    return statement.on_conflict_do_nothing().returning(column("task_id", BigInteger))


def _as_kind(table: Table, label: ColumnElement[Any]) -> ColumnElement[Any]:
    """Turn a task type, text or an enum, into what another table has for it."""
    return cast(cast(label, Text), table.c.task_type.type)


def task_exists(table: Table) -> Select[Any]:
    """Ask whether the row of ``:task_id`` is there, locked or not."""
    return select(exists().where(table.c.task_id == bindparam("task_id")))


def kinds_of(table: Table) -> Any:
    """Return ``:types`` as rows with one column, ``kind``, of the type that the table has."""
    types = cast(bindparam("types", type_=ARRAY(Text)), ARRAY(table.c.task_type.type))
    return func.unnest(types).table_valued("kind").render_derived(name="kinds")


def survey(table: Table, now: Now | None = None) -> Select[Any]:
    """List the pairs of priority and type that wait now, ``level`` and ``kind``, among ``:types``.

    A few index probes for each pair that is found, however many rows wait and however many types
    there might be. Takes no lock; a task that runs is seen, too.
    """
    ready, planned = _both(table)
    moment = server_now() if now is None else now
    due = next_planned(table, planned, table.c.run_at.between(LONG_AGO, moment)).lateral("due")
    return union_all(
        listed(ready).where(asked_for(table, ready)),
        listed(planned).join(due, true()).where(asked_for(table, planned)),
    )  # type: ignore[return-value]


def peek(table: Table, now: Now | None = None) -> Select[Any]:
    """Ask without a lock whether a task of ``:types`` is ready, and how soon the next falls due.

    Returns one row: ``ready`` (bool; true also for a task that runs) and ``seconds`` (float, or
    null if nothing is planned for later).
    """
    moment, c = server_now() if now is None else now, table.c
    ready, planned = _both(table)
    past, future = c.run_at.between(LONG_AGO, moment), (c.run_at > moment) & (c.run_at < NEVER)
    due = next_planned(table, planned, past).lateral("due")
    later = next_planned(table, planned, future).lateral("later")
    any_ready = exists(select(ONE).where(asked_for(table, ready)))
    is_planned = asked_for(table, planned)
    found: Select[Any] = select(ONE).select_from(planned.join(due, true())).where(is_planned)
    next_due = select(func.min(later.c.run_at)).select_from(planned.join(later, true()))
    seconds = extract("epoch", next_due.where(is_planned).scalar_subquery() - moment)
    ready_now = or_(any_ready, exists(found)).label("ready")
    return select(ready_now, cast(seconds, Double).label("seconds"))


def waiting_kinds(table: Table) -> Select[Any]:
    """List the distinct task types in the table by hopping through the indexes."""
    kinds = union_all(*map(listed, _both(table))).subquery("kinds")
    return select(kinds.c.kind).distinct().order_by(kinds.c.kind)


def _both(table: Table) -> tuple[CTE, CTE]:
    """Return the pairs of priority and type of the ready tasks, and those of the planned ones."""
    run_at = table.c.run_at
    return (
        distinct_pairs(table, "ready_pairs", run_at.is_(None)),
        distinct_pairs(table, "planned_pairs", run_at.is_not(None)),
    )


def distinct_pairs(table: Table, name: str, part: ColumnElement[bool]) -> CTE:
    """List the pairs of priority and type, ``level`` and ``kind``, of one part of the tasks."""
    return _hop(table, name, part, "level", "kind")


def _hop(table: Table, name: str, part: ColumnElement[bool], *names: str) -> CTE:
    """List the distinct values of the first columns of an index, with one probe for each.

    After each one the scan jumps to the next larger one instead of reading the rows between them.
    """
    columns = (table.c.priority, table.c.task_type)[: len(names)]
    labelled = [c.label(label) for c, label in zip(columns, names, strict=True)]
    least = select(*labelled).where(part).order_by(*columns).limit(ONE)
    hops = select(least.subquery("first")).cte(name, recursive=True)
    larger = least.where(tuple_(*columns) > tuple_(*hops.c)).correlate(hops).lateral("larger")
    return hops.union_all(select(*larger.c).select_from(hops.join(larger, true())))


def listed(pairs: CTE) -> Select[Any]:
    """Return pairs, their kind as text."""
    return select(pairs.c.level, cast(pairs.c.kind, Text).label("kind")).select_from(pairs)


def asked_for(table: Table, pairs: CTE) -> ColumnElement[bool]:
    """Say whether a pair is of ``:types``."""
    types = cast(bindparam("types", type_=ARRAY(Text)), ARRAY(table.c.task_type.type))
    return pairs.c.kind == any_(types)


def next_planned(table: Table, pairs: Any, when: ColumnElement[bool]) -> Select[Any]:
    """Look for the first task of each pair, by time.

    Asked for an order, though any row might do: without it a planner that takes all rows for one
    type prefers to look through the whole table.
    """
    c = table.c
    mine = (c.priority == pairs.c.level, c.task_type == pairs.c.kind, when)
    return select(c.run_at).where(*mine).order_by(c.run_at).limit(ONE).correlate(pairs)


def count_waiting(table: Table, most: int) -> Select[Any]:
    """Count the tasks of the type ``:kind``, but not further than ``most``."""
    return select(func.count()).select_from(some_of_kind(table, most, table.c.task_type))


def some_of_kind(table: Table, most: int, found: ColumnElement[Any]) -> Subquery:
    """Return a column of the tasks of the type ``:kind``, of no more than ``most`` of them.

    Level by level, since the priority comes first in each index.
    """
    c = table.c
    kind = cast(bindparam("kind", type_=Text), c.task_type.type)
    parts = {"ready": c.run_at.is_(None), "planned": c.run_at.is_not(None)}
    selects = []
    for name, part in parts.items():
        levels = _hop(table, f"{name}_levels", part, "level")
        mine = select(found).where(c.priority == levels.c.level, c.task_type == kind, part)
        some = mine.limit(most).correlate(levels).lateral(name)
        selects.append(select(*some.c).select_from(levels.join(some, true())).limit(most))
    return union_all(*[select(s.subquery()) for s in selects]).limit(most).subquery("some")


def enum_labels(table: Table) -> Select[Any]:
    """List the labels that the database has for the enum in ``table.task_type``."""
    labels = func.unnest(func.enum_range(cast(null(), table.c.task_type.type)))
    return select(cast(labels, Text))


def table_oid(table: Table) -> Select[Any]:
    """Look up the number that the wake-up trigger uses for the table's lock and channel."""
    return select(cast(cast(regclass(table), OID), BigInteger))


def regclass(table: Table) -> ColumnElement[Any]:
    """Look the table up in the catalog; null if it is not there."""
    name = func.quote_ident(table.name)
    if table.schema:
        name = func.concat(func.quote_ident(table.schema), ".", name)
    return func.to_regclass(name)


def end_transaction() -> Select[Any]:
    """End the server process ``:pid``, if the transaction that began at ``:begun`` is still in it.

    Behind a pooler it may be working for somebody else by now.
    """
    activity = sql_table("pg_stat_activity", column("pid"), column("xact_start"))
    begun = cast(bindparam("begun", type_=Text), DateTime(timezone=True))
    same = (activity.c.pid == bindparam("pid", type_=Integer), activity.c.xact_start == begun)
    return select(func.pg_terminate_backend(activity.c.pid)).where(*same)


def _wakeup_lock(function: Any) -> Select[Any]:
    key = cast(cast(bindparam("oid", type_=BigInteger), OID), Integer)
    return select(function(LOCK_CLASS, key))


def announce_sleep() -> Select[Any]:
    """Tell inserts of the table ``:oid`` that somebody sleeps: a shared session-level lock."""
    return _wakeup_lock(func.pg_try_advisory_lock_shared)


def withdraw_sleep() -> Select[Any]:
    """Tell inserts of the table ``:oid`` that nobody of this process sleeps any more."""
    return _wakeup_lock(func.pg_advisory_unlock_shared)


def announce_cancel(table: Table) -> Select[Any]:
    """Tell the workers of the table, on the channel of its wake-up, to stop running ``:task_id``.

    The listeners hear it at commit; the payload is ``cancel`` and the number.
    """
    channel = func.concat(literal_column("'pgtask_'"), cast(regclass(table), OID))
    payload = func.concat(literal_column("'cancel '"), bindparam("task_id", type_=BigInteger))
    return select(func.pg_notify(channel, payload))
