"""Claims at the end of a queue that keeps up, past all its dead rows; `tail` tells when and why.

What all statements here begin with, as ``waiting``, are three kinds of tasks:

* those with numbers from ``:floor`` on, and not more than so many of them;
* of the given pairs, those that fell due after ``:since`` (float, seconds after 1970);
* certain ones, ``:others``.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    CTE,
    BigInteger,
    Boolean,
    ColumnElement,
    Double,
    Executable,
    Integer,
    Select,
    Subquery,
    Table,
    Text,
    and_,
    bindparam,
    case,
    cast,
    extract,
    func,
    literal_column,
    null,
    select,
    true,
    union,
    union_all,
)
from sqlalchemy.dialects.postgresql import ARRAY, REGCLASS

from pgtask_sa.claim import IS_TOUCHED, LONG_AGO, Now, epoch, integer, server_now, since, take
from pgtask_sa.rows import quoted, quoted_name
from pgtask_sa.statements import regclass

MOST_NEW = 200  # tasks above its floor that a claim reads
MOST_WAITING = 1_000  # tasks that a look lists
LAST = literal_column(str(2**63 - 1), BigInteger)
NEVER = literal_column("'infinity'", LONG_AGO.type)


def tail_claim(table: Table, limit: int, *, now: Now | None = None) -> Executable:
    """Claim in turns, by chance within each of them, from what waits at the end.

    Parameters: those of ``waiting``, see above; ``:levels`` and ``:types``, pairs in their order;
    ``:mine``, all types that may be claimed; ``:new_first``, whether tasks that were not planned
    go before those that were.
    """
    moment, c = server_now() if now is None else now, table.c
    turns, found = _turns(table, "place"), _waiting(table, moment, MOST_NEW)
    is_second = found.c.run_at.is_(None) != cast(bindparam("new_first"), Boolean)
    pair = and_(found.c.priority == turns.c.level, found.c.task_type == turns.c.kind)
    in_order = (
        select(found.c.task_id)
        .join(turns, pair)
        .order_by(turns.c.place, is_second, found.c.run_at, func.random())
        .subquery("found")
    )
    # one by one and as far as the limit asks, so that no more are locked than are taken
    picked = (
        select(c.task_id, IS_TOUCHED)
        .where(c.task_id == in_order.c.task_id, _is_claimable(table, moment))
        .with_for_update(skip_locked=True)
        .correlate(in_order)
        .lateral("picked")
    )
    chosen = select(picked.c.task_id, picked.c.touched).select_from(in_order.join(picked, true()))
    return take(table, chosen.limit(integer(limit)), limit, by_one=True)


def tail_look(table: Table, *, next_due: bool = False, now: Now | None = None) -> Select[Any]:
    """List what waits at the end; takes no lock, and tasks that run are seen, too.

    Returns rows of ``task_id``, ``level``, ``kind`` and ``due``: when it fell due (float, seconds
    after 1970), null if it was not planned. In one of them there is no ``kind``: its number is the
    greatest that any task has got, null if that cannot be told, and its time that of the look. It
    tells also how many rows are ``dead``. With ``next_due`` it has besides the ``seconds`` (float)
    until the next task of the given pairs falls due, or null.
    """
    moment = server_now() if now is None else now
    found = _waiting(table, moment, MOST_WAITING)
    waiting = [
        found.c.task_id.label("task_id"),
        found.c.priority.label("level"),
        cast(found.c.task_type, Text).label("kind"),
        epoch(found.c.run_at).label("due"),
        cast(null(), BigInteger).label("dead"),
    ]
    newest, dead = _newest(table), dead_rows(table)
    last = [newest, cast(null(), Integer), cast(null(), Text), epoch(moment), dead]
    if next_due:
        waiting.append(cast(null(), Double).label("seconds"))
        last.append(_until_due(table, moment))
    return union_all(select(*waiting), select(*last))  # type: ignore[return-value]


def _until_due(table: Table, now: Now) -> ColumnElement[Any]:
    pairs, run_at = _turns(table), table.c.run_at
    later = _planned(table, pairs, (run_at > now) & (run_at < NEVER), 1).lateral("later")
    first = select(func.min(later.c.run_at)).select_from(pairs.join(later, true()))
    return cast(extract("epoch", first.scalar_subquery() - now), Double)


def _newest(table: Table) -> ColumnElement[Any]:
    """Return the last number that was given out; where that is not to be seen, the last seen."""
    schema = f"{quoted_name(table.schema)}." if table.schema else ""
    sequence = func.pg_get_serial_sequence(_text(schema + quoted(table)), _text("task_id"))
    visible = func.has_sequence_privilege(sequence, _text("usage, select"))
    number = func.pg_sequence_last_value(cast(sequence, REGCLASS))
    seen = select(func.max(table.c.task_id)).where(_is_at_the_end(table)).scalar_subquery()
    return func.coalesce(case((visible, number)), seen)


def dead_rows(table: Table) -> ColumnElement[Any]:
    """Return how many rows of the table and its partitions are dead, as the statistics have it."""
    parts = func.pg_partition_tree(regclass(table)).table_valued("relid", name="parts")
    of_parts = select(func.sum(func.pg_stat_get_dead_tuples(parts.c.relid))).select_from(parts)
    own = func.pg_stat_get_dead_tuples(regclass(table))  # which has no parts, mostly
    return cast(func.coalesce(of_parts.scalar_subquery(), own), BigInteger)


def _text(constant: str) -> ColumnElement[Any]:
    return literal_column("'" + constant.replace("'", "''") + "'", Text)


def _turns(table: Table, place: str | None = None) -> Any:
    levels = unseen(cast(bindparam("levels", type_=ARRAY(Integer)), ARRAY(table.c.priority.type)))
    kinds = unseen(cast(bindparam("types", type_=ARRAY(Text)), ARRAY(table.c.task_type.type)))
    more: dict[str, Any] = {"with_ordinality": place} if place else {}
    pairs = func.unnest(levels, kinds).table_valued("level", "kind", **more)
    return pairs.render_derived(name="turns")


def _waiting(table: Table, now: Now, most: int) -> CTE:
    columns = _columns(table)
    newest = (
        select(*columns)
        .where(_is_at_the_end(table), _is_mine(table), _is_claimable(table, now))
        .order_by(table.c.task_id)
        .limit(integer(most))
        .subquery("newest")
    )
    parts = [newest, _fallen_due(table, now, most), _others(table, now)]
    # not all: the same task may be among several of them
    return union(*[select(*part.c) for part in parts]).cte("waiting").prefix_with("MATERIALIZED")


def _others(table: Table, now: Now) -> Subquery:
    ids = cast(bindparam("others", type_=ARRAY(BigInteger)), ARRAY(table.c.task_id.type))
    given = func.unnest(unseen(ids)).table_valued("number").render_derived(name="given")
    same = table.c.task_id == given.c.number
    one = select(*_columns(table)).where(same, _is_claimable(table, now)).limit(integer(1))
    found = one.correlate(given).lateral("one")
    return select(*found.c).select_from(given.join(found, true())).subquery("others")


def _columns(table: Table) -> list[ColumnElement[Any]]:
    c = table.c
    return [c.task_id, c.priority, c.task_type, c.run_at]


# The planner knows nothing of dead rows, and believes its statistics of the living. Conditions are
# put so that it takes the primary key, for a range that it cannot but hold for small or for one
# number after the other, and no other index.
#
# And it does not get to see what is given: the shorter the lists, the cheaper would it hold a plan
# that is made for them alone, and make a new one each time, which takes longer than all the rest.


def unseen(given: ColumnElement[Any]) -> ColumnElement[Any]:
    """Hide what a parameter holds from the planner."""
    return select(given).scalar_subquery()


def _is_at_the_end(table: Table) -> ColumnElement[bool]:
    floor = cast(bindparam("floor"), BigInteger)
    return table.c.task_id.between(unseen(floor), LAST)


def _is_mine(table: Table) -> ColumnElement[bool]:
    kinds = cast(bindparam("mine", type_=ARRAY(Text)), ARRAY(table.c.task_type.type))
    return func.array_position(kinds, table.c.task_type).is_not(None)


def _is_claimable(table: Table, now: Now) -> ColumnElement[bool]:
    return func.coalesce(table.c.run_at, LONG_AGO) <= now


def _fallen_due(table: Table, now: Now, most: int) -> Subquery:
    pairs = _turns(table)
    due = _planned(table, pairs, table.c.run_at.between(unseen(since()), now), most).lateral("due")
    return select(*due.c).select_from(pairs.join(due, true())).subquery("fallen_due")


def _planned(table: Table, pairs: Any, when: ColumnElement[bool], most: int) -> Select[Any]:
    mine = (table.c.priority == pairs.c.level, table.c.task_type == pairs.c.kind)
    found = select(*_columns(table)).where(*mine, when).order_by(table.c.run_at)
    return found.limit(integer(most)).correlate(pairs)
