"""The survey of a crowd beside dead rows; `since` tells when and why."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    CTE,
    BigInteger,
    Boolean,
    ColumnElement,
    Double,
    Integer,
    Select,
    Table,
    Text,
    bindparam,
    cast,
    func,
    null,
    select,
    true,
    tuple_,
    union_all,
)
from sqlalchemy.dialects.postgresql import ARRAY

from pgtask_sa.claim import Now, epoch, integer, server_now, since
from pgtask_sa.statements import asked_for, distinct_pairs, listed, next_planned
from pgtask_sa.tail_claims import dead_rows, unseen


def survey_since(table: Table, now: Now | None = None) -> Select[Any]:
    """List the pairs that wait now, and of those that fell due when the first one did.

    Parameters: ``:types``; ``:levels`` and ``:kinds``, pairs of which planned tasks are looked for,
    and ``:since``, from when on. With ``:thorough`` they are looked for of all pairs, too, and
    since ever.

    Returns rows of ``level``, ``kind`` and ``due`` (float, seconds after 1970), null of those that
    were not planned. In one of them there is no ``kind``: its time is that of the survey, and it
    tells how many rows are ``dead``.
    """
    moment = server_now() if now is None else now
    ready, first = distinct_pairs(table, "ready_pairs", table.c.run_at.is_(None)), _firsts(table)
    given, is_due = _given(table), table.c.run_at.between(unseen(since()), moment)
    due = next_planned(table, given, is_due).lateral("due")
    nothing: ColumnElement[Any] = cast(null(), BigInteger)
    parts = [
        listed(ready)
        .add_columns(cast(null(), Double).label("due"), nothing.label("dead"))
        .where(asked_for(table, ready)),
        select(given.c.level, cast(given.c.kind, Text), epoch(due.c.run_at), nothing).join_from(
            given, due, true()
        ),
        listed(first)
        .add_columns(epoch(first.c.run_at), nothing)
        .where(asked_for(table, first), first.c.run_at <= moment),
        select(cast(null(), Integer), cast(null(), Text), epoch(moment), dead_rows(table)),
    ]
    return union_all(*parts)  # type: ignore[return-value]


def _given(table: Table) -> Any:
    levels = cast(bindparam("levels", type_=ARRAY(Integer)), ARRAY(table.c.priority.type))
    kinds = cast(bindparam("kinds", type_=ARRAY(Text)), ARRAY(table.c.task_type.type))
    pairs = func.unnest(unseen(levels), unseen(kinds)).table_valued("level", "kind")
    return pairs.render_derived(name="given")


def _firsts(table: Table) -> CTE:
    """List the first planned task of each pair; once for each pair all that is dead is walked."""
    pair = (table.c.priority, table.c.task_type)
    names = (pair[0].label("level"), pair[1].label("kind"), table.c.run_at)
    least = select(*names).where(table.c.run_at.is_not(None)).limit(integer(1))
    least = least.order_by(*pair, table.c.run_at)
    is_thorough = unseen(cast(bindparam("thorough"), Boolean))
    hops = select(least.subquery("first")).where(is_thorough).cte("firsts", recursive=True)
    larger = least.where(tuple_(*pair) > tuple_(hops.c.level, hops.c.kind)).correlate(hops)
    step = larger.lateral("larger")
    return hops.union_all(select(*step.c).select_from(hops.join(step, true())))
