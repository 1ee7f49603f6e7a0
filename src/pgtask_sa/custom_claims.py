"""Claims in an order of the user's own: turns by a key such as a tenant, or any expression.

Turns by key. An index ``(priority, key, ticket) where run_at is null`` holds the ready tasks key by
key. Each lane has a cursor, the key that it served last, and takes from the next greater one; at
the end come the tasks without a key, and then it begins anew. So a round goes once through all the
keys that have tasks, in one index probe for each claim, and who has a million tasks has a turn in
it like everybody. Planned tasks are taken by time, not by key.

By an expression. Tasks are taken in the order of priority, expression, ticket. That reads and sorts
the whole queue, unless an index serves exactly this order: see `expression_claim`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Executable,
    Integer,
    Select,
    Table,
    Text,
    any_,
    bindparam,
    cast,
    func,
    select,
    true,
    union_all,
)
from sqlalchemy.dialects.postgresql import ARRAY

from pgtask_sa.claim import (
    IS_TOUCHED,
    Now,
    claimable,
    due,
    integer,
    own_types,
    server_now,
    take,
)

KEY, IS_READY = "pgtask_key", "pgtask_is_ready"


def keyed_claim(
    table: Table, limit: int, key: str, *, due_first: bool, now: Now | None = None
) -> Executable:
    """Claim from the next key after the one that had the last turn.

    Parameters: ``:levels``, the priorities in order, and ``:cursors``, for each of them the key
    served last, as text; null if that was none. ``:types``, all that may be claimed. Where planned
    tasks are looked for: ``:due_levels`` and ``:due_types``, pairs in their order.

    Args:
        table: the task table.
        limit: how many tasks, at most.
        key: the name of the column.
        due_first: look at planned tasks before those that are ready.
        now: an expression in place of the server's clock.
    """
    levels = _unnested(table, "levels", "cursors")
    turns = levels.table_valued("level", "cursor").render_derived(name="turns")
    ready = _by_key(table, turns, key, limit)
    planned = [_planned(table, turns, limit, server_now() if now is None else now)]
    branches = planned + ready if due_first else ready + planned
    wrapped = [select(b.correlate(turns).subquery()) for b in branches]
    picked = union_all(*wrapped).lateral("picked")
    found = select(picked.c.task_id, picked.c.touched).select_from(turns.join(picked, true()))
    return take(table, found.limit(integer(limit)), limit, key_columns(table, key), in_order=True)


def key_columns(table: Table, key: str) -> list[ColumnElement[Any]]:
    """Return what a claim tells of the key that it served: `KEY` as text, and `IS_READY`."""
    return [cast(table.c[key], Text).label(KEY), table.c.run_at.is_(None).label(IS_READY)]


def _unnested(table: Table, levels: str, texts: str) -> Any:
    first = cast(bindparam(levels, type_=ARRAY(Integer)), ARRAY(table.c.priority.type))
    return func.unnest(first, cast(bindparam(texts, type_=ARRAY(Text)), ARRAY(Text)))


def _by_key(table: Table, turns: Any, key: str, limit: int) -> list[Select[Any]]:
    c, served = table.c, cast(turns.c.cursor, table.c[key].type)
    rounds: Sequence[tuple[ColumnElement[bool], ...]] = [
        (c[key] > served,),
        (turns.c.cursor.is_(None), c[key].is_not(None)),  # tasks without a key had the last turn
        (c[key].is_(None),),
        (c[key] <= served,),
    ]
    mine = (c.priority == turns.c.level, c.run_at.is_(None), c.task_type == any_(own_types(table)))
    return [
        select(c.task_id, IS_TOUCHED)
        .where(*mine, *part)
        .order_by(c[key], c.ticket)
        .limit(integer(limit))
        .with_for_update(skip_locked=True)
        for part in rounds
    ]


def _planned(table: Table, turns: Any, limit: int, now: Now) -> Select[Any]:
    c = table.c
    named = _unnested(table, "due_levels", "due_types")
    pairs = named.table_valued("level", "kind").render_derived(name="pairs")
    kind = cast(pairs.c.kind, c.task_type.type)
    mine = (c.priority == pairs.c.level, c.task_type == kind)
    found = due(table, mine, limit, now).correlate(pairs).lateral("due")
    return (
        select(found.c.task_id, found.c.touched)
        .select_from(pairs.join(found, true()))
        .where(pairs.c.level == turns.c.level)
        .limit(integer(limit))
    )


def expression_claim(
    table: Table,
    limit: int,
    expression: ColumnElement[Any],
    *,
    shuffled: bool = False,
    now: Now | None = None,
) -> Executable:
    """Claim in the order of priority, an expression over the task, and ticket.

    An index on ``(priority, (expression), ticket)``, without a condition, spares reading and
    sorting everything. Tasks whose time has not come and those of other types are still walked
    over, where they come first.

    Args:
        table: the task table.
        limit: how many tasks, at most.
        expression: over the columns of ``table``; see `priorities.plain`.
        shuffled: at last by chance, not by ticket; no index helps then.
        now: an expression in place of the server's clock.
    """
    c = table.c
    chosen = (
        select(c.task_id, IS_TOUCHED)
        .where(*claimable(table, table, now))
        .order_by(c.priority, expression, func.random() if shuffled else c.ticket)
        .limit(integer(limit))
        .with_for_update(skip_locked=True)
    )
    return take(table, chosen, limit, in_order=True)
