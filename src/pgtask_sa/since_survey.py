"""The survey of a crowd beside dead rows; `since` tells when and why."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    Boolean,
    Double,
    Integer,
    Select,
    Subquery,
    Table,
    Text,
    bindparam,
    cast,
    func,
    null,
    select,
    true,
    union,
    union_all,
)
from sqlalchemy.dialects.postgresql import ARRAY

from pgtask_sa.claim import Now, epoch, server_now, since
from pgtask_sa.statements import asked_for, distinct_pairs, listed, next_planned
from pgtask_sa.tail_claims import unseen


def survey_since(table: Table, now: Now | None = None) -> Select[Any]:
    """List the pairs that wait now, and of those that fell due when the first one did.

    Parameters: ``:types``; ``:levels`` and ``:kinds``, pairs of which planned tasks are looked for,
    and ``:since``, from when on. With ``:thorough`` they are looked for of all pairs.

    Returns rows of ``level``, ``kind`` and ``due`` (float, seconds after 1970), null of those that
    were not planned. In one of them there is no ``kind``, and the time is that of the survey.
    """
    moment = server_now() if now is None else now
    ready = distinct_pairs(table, "ready_pairs", table.c.run_at.is_(None))
    pairs = _planned_pairs(table)
    first = next_planned(table, pairs, table.c.run_at.between(unseen(since()), moment)).lateral(
        "first_due"
    )
    found = select(pairs.c.level, cast(pairs.c.kind, Text).label("kind"), epoch(first.c.run_at))
    return union_all(
        listed(ready).add_columns(cast(null(), Double).label("due")).where(asked_for(table, ready)),
        found.select_from(pairs.join(first, true())),
        select(cast(null(), Integer), cast(null(), Text), epoch(moment)),
    )  # type: ignore[return-value]


def _planned_pairs(table: Table) -> Subquery:
    """Return the given pairs, and if asked for all others that have planned tasks."""
    levels = cast(bindparam("levels", type_=ARRAY(Integer)), ARRAY(table.c.priority.type))
    kinds = cast(bindparam("kinds", type_=ARRAY(Text)), ARRAY(table.c.task_type.type))
    pairs = func.unnest(unseen(levels), unseen(kinds)).table_valued("level", "kind")
    given = pairs.render_derived(name="given")
    thorough = unseen(cast(bindparam("thorough"), Boolean))
    planned = distinct_pairs(table, "planned_pairs", table.c.run_at.is_not(None), thorough)
    others = select(planned.c.level, planned.c.kind).where(asked_for(table, planned))
    return union(select(given.c.level, given.c.kind), others).subquery("pairs")
