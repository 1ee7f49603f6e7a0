"""The names of what a task table brings along, and the SQL of its wake-up trigger.

Postgres cuts identifiers at 63 bytes without a word. Two names that differ after that are one name
to it, so we cut before it does, and tell what we cut apart by a hash.
"""

from __future__ import annotations

import hashlib
from typing import Any

# The first half of our two-integer advisory lock keys ("pgtk"): an application that uses
# advisory locks of its own, with one bigint or with another class, cannot collide with it.
LOCK_CLASS = 0x7067746B

# 63 bytes less "_coalesce_idx", the longest of our endings
_LONGEST_STEM = 50
_HASH = 8


def stem(table_name: str) -> str:
    """Return what the names that belong to a table begin with: its own name, where that fits.

    Example:
        >>> stem("task")
        'task'
        >>> stem("t" * 63) == stem("t" * 62 + "x"), len(stem("t" * 63))
        (False, 50)
    """
    name = table_name.encode()
    if len(name) <= _LONGEST_STEM:
        return table_name
    # half a character at the end is dropped
    kept = name[: _LONGEST_STEM - _HASH - 1].decode(errors="ignore")
    return f"{kept}_{hashlib.sha256(name).hexdigest()[:_HASH]}"


class Quoted:
    """The identifiers that the wake-up trigger of a table needs, quoted.

    Example:
        >>> from sqlalchemy.dialects import postgresql
        >>> Quoted(postgresql.dialect(), "Job", "shop").table
        'shop."Job"'
    """

    def __init__(self, connection_or_dialect: Any, name: str, schema: str | None) -> None:
        dialect = getattr(connection_or_dialect, "dialect", connection_or_dialect)
        quote = dialect.identifier_preparer.quote
        prefix = f"{quote(schema)}." if schema else ""
        self.table = prefix + quote(name)
        self.trigger = quote(wakeup_name(name))
        self.function = prefix + self.trigger


def wakeup_name(table_name: str) -> str:
    """Name the wake-up trigger of a table, and its function.

    Example:
        >>> wakeup_name("task")
        'task_wakeup'
    """
    return f"{stem(table_name)}_wakeup"


def worker_table_name(table_name: str) -> str:
    """Name the table that the workers of a task table write to.

    Example:
        >>> worker_table_name("task")
        'task_worker'
    """
    return f"{stem(table_name)}_worker"


def create_wakeup_sql(dialect: Any, name: str, schema: str | None = None) -> list[str]:
    """Return the statements that create the wake-up trigger of a task table.

    NOTIFY takes one lock for the whole database at commit, so it must be rare. A worker that goes
    to sleep holds a shared advisory lock; an insert notifies only when it cannot get that lock for
    itself, which means that somebody is asleep. While workers are busy an insert costs next to
    nothing: one expression, which PL/pgSQL computes without a statement (PERFORM would be one), and
    which holds the lock so shortly that other inserts hardly ever find it taken.
    """
    q = Quoted(dialect, name, schema)
    key = f"{LOCK_CLASS}, tg_relid::int"
    function = (
        f"create or replace function {q.function}() returns trigger language plpgsql as $$\n"
        "begin\n"
        "  if (case\n"
        # a two-phase transaction must not notify: PREPARE would fail. Polling finds its tasks.
        "        when current_setting('pgtask.notify', true) = 'off' then false\n"
        f"        when pg_try_advisory_lock({key})\n"
        f"          then not pg_advisory_unlock({key})\n"
        "        else true\n"
        "      end) then\n"
        "    perform pg_notify('pgtask_' || tg_relid, '');\n"
        "  end if;\n"
        "  return null;\n"
        "end $$"
    )
    trigger = (
        f"create trigger {q.trigger} after insert on {q.table}\n"
        f"for each statement execute function {q.function}()"
    )
    return [function, trigger]


def drop_wakeup_sql(dialect: Any, name: str, schema: str | None = None) -> list[str]:
    """Return the statements that drop the wake-up trigger of a task table; the table may be gone.

    Dropping the function with ``cascade`` takes the trigger along, and only that.
    """
    q = Quoted(dialect, name, schema)
    return [f"drop function if exists {q.function}() cascade"]
