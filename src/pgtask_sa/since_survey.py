"""The survey of a crowd beside dead rows; `since` tells when and why."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    Boolean,
    ColumnElement,
    Double,
    Integer,
    Select,
    Subquery,
    Table,
    Text,
    bindparam,
    cast,
    extract,
    func,
    null,
    select,
    true,
    union,
    union_all,
)
from sqlalchemy.dialects.postgresql import ARRAY

from pgtask_sa.claim import Now, server_now, since
from pgtask_sa.statements import asked_for, distinct_pairs, listed, next_planned


def survey_since(table: Table, now: Now | None = None) -> Select[Any]:
    """List the pairs that wait now, and of those that fell due how long ago the first one did.

    Parameters: ``:types``; ``:levels`` and ``:kinds``, pairs of which planned tasks are looked for,
    and ``:seconds``, how far back; null for all. With ``:thorough`` they are looked for of all
    pairs.

    Returns rows of ``level``, ``kind`` and ``age`` (float, seconds), null where that is not asked.
    """
    moment = server_now() if now is None else now
    ready = distinct_pairs(table, "ready_pairs", table.c.run_at.is_(None))
    pairs = _planned_pairs(table)
    due = next_planned(table, pairs, table.c.run_at.between(since(moment), moment)).lateral("due")
    # not the difference of two moments: one of them may be infinite
    age = extract("epoch", moment) - extract("epoch", due.c.run_at)
    found = select(pairs.c.level, cast(pairs.c.kind, Text).label("kind"), cast(age, Double))
    nothing = cast(null(), Double).label("age")
    return union_all(
        listed(ready).add_columns(nothing).where(asked_for(table, ready)),
        found.select_from(pairs.join(due, true())),
    )  # type: ignore[return-value]


def _planned_pairs(table: Table) -> Subquery:
    """Return the given pairs, and if asked for all others that have planned tasks."""
    levels = cast(bindparam("levels", type_=ARRAY(Integer)), ARRAY(table.c.priority.type))
    kinds = cast(bindparam("kinds", type_=ARRAY(Text)), ARRAY(table.c.task_type.type))
    pairs = func.unnest(levels, kinds).table_valued("level", "kind").render_derived(name="given")
    thorough: ColumnElement[bool] = cast(bindparam("thorough"), Boolean)
    planned = distinct_pairs(table, "planned_pairs", table.c.run_at.is_not(None), thorough)
    others = select(planned.c.level, planned.c.kind).where(asked_for(table, planned))
    return union(select(pairs.c.level, pairs.c.kind), others).subquery("pairs")
