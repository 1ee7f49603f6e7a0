"""What may be wrong with the tables of a database, so that no worker should touch them.

`find_dangers` is the cheap and decisive part, which a worker asks when it starts: three round
trips, no table is read. All the rest, for people, is in `checkup`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from sqlalchemy import Connection, Row, Table, bindparam, text

from pgtask_sa.handlers import Handler
from pgtask_sa.mapping import TASK_COLUMNS, Task, mapped_table
from pgtask_sa.presence_table import worker_table
from pgtask_sa.rows import full_name
from pgtask_sa.settle import Tables

Level: TypeAlias = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: of the check, such as ``durability``.
        level: ``ok``; ``warning``: slow, late, or at risk in a crash of the server; ``error``:
            tasks would be lost, or workers kept from working.
        message: what was found, one line.
        remedy: what to do about it, one line; empty if nothing is to be done.

    Example:
        >>> Finding("clock", "ok", "0.001 s apart").level
        'ok'
    """

    name: str
    level: Level
    message: str
    remedy: str = ""


@dataclass(frozen=True)
class Facts:
    """What the catalog says about one table; see `read_facts`."""

    name: str
    row: Row[Any]

    @property
    def exists(self) -> bool:
        """Whether the table is there."""
        return self.row.oid is not None

    @property
    def columns(self) -> Mapping[str, str]:
        """Its columns, and their types as Postgres writes them."""
        return dict(zip(self.row.names or (), self.row.types or (), strict=True))


def find_dangers(
    connection: Connection,
    tables: Tables,
    handlers: Mapping[str, Handler],  # noqa: ARG001 - as a worker will ask more of it one day
) -> list[Finding]:
    """Find what should keep a worker from starting: tasks would be lost, or not be claimed.

    Args:
        connection: to the database, as the worker's role; any transaction will do.
        tables: the worker's tables.
        handlers: those of the worker, by task type.

    Returns:
        Findings of the level ``error`` alone; none if all is well.

    Raises:
        sqlalchemy.exc.DBAPIError: the database is away.

    Example:
        >>> from sqlalchemy import create_engine
        >>> engine = create_engine("postgresql+psycopg://localhost/shop")
        >>> with engine.connect() as connection:  # doctest: +SKIP
        ...     find_dangers(connection, Tables(Task), {})
        []
    """
    facts = read_facts(connection, tables)
    return [
        *missing_parts(tables, facts),
        *_not_permanent(facts),
        *_hidden_rows(facts),
        *_unequal_params(facts),
        *_silenced(connection),
        *_cascades(connection, facts),
    ]


# -- the catalog -----------------------------------------------------------------------------------

_FACTS = text(
    """
    select wanted.name, c.oid, c.relkind, c.relpersistence, c.reloptions,
           array(select cast(attname as text) from pg_attribute where attrelid = c.oid
                 and attnum > 0 and not attisdropped order by attnum) as names,
           array(select format_type(atttypid, atttypmod) from pg_attribute where attrelid = c.oid
                 and attnum > 0 and not attisdropped order by attnum) as types,
           coalesce(row_security_active(c.oid), false) and (
             not exists (
               select from pg_policy where polrelid = c.oid and polpermissive and polcmd = '*'
                  and pg_get_expr(polqual, polrelid) = 'true'
                  and coalesce(pg_get_expr(polwithcheck, polrelid), 'true') = 'true'
                  and (0 = any (polroles) or exists (
                    select from unnest(polroles) as granted where pg_has_role(granted, 'member'))))
             or exists (select from pg_policy where polrelid = c.oid and not polpermissive)
           ) as hides_rows
      from unnest(cast(:names as text[])) with ordinality as wanted(name, place)
      left join pg_class as c on c.oid = to_regclass(wanted.name)
     order by wanted.place
    """
)

_REFERRERS = text(
    """
    select conname, cast(cast(conrelid as regclass) as text) as referrer, confdeltype, condeferrable
      from pg_constraint
     where contype = 'f' and conparentid = 0 and confrelid = :oid
     order by conname
    """
).bindparams(bindparam("oid"))


def read_facts(connection: Connection, tables: Tables) -> dict[str, Facts]:
    """Read about the three tables; the keys are ``task``, ``dead`` and ``worker``."""
    names = [full_name(table) for table in three_tables(tables).values()]
    rows = connection.execute(_FACTS, {"names": names})
    return {key: Facts(row.name, row) for key, row in zip(three_tables(tables), rows, strict=True)}


def three_tables(tables: Tables) -> dict[str, Table]:
    """Return the tables by what they are for."""
    return {"task": tables.task, "dead": tables.dead, "worker": worker_table(tables.task)}


def referrers(connection: Connection, facts: Mapping[str, Facts]) -> Sequence[Row[Any]]:
    """List the foreign keys that refer to the task table."""
    return connection.execute(_REFERRERS, {"oid": facts["task"].row.oid}).all()


# -- the dangers -----------------------------------------------------------------------------------


def how_to_migrate(tables: Tables) -> str:
    """Say how the tables get what they lack."""
    if tables.task is mapped_table(Task):
        return "run: python -m pgtask_sa migrate"
    return "run your migrations (alembic upgrade head)"


def missing_parts(tables: Tables, facts: Mapping[str, Facts]) -> Iterator[Finding]:
    """Find tables and columns of the mapping that the database does not have."""
    remedy = how_to_migrate(tables)
    for key, table in three_tables(tables).items():
        found = facts[key]
        if not found.exists:
            yield Finding("schema", "error", f"the table {found.name} does not exist", remedy)
            continue
        missing = [c.name for c in table.columns if c.name not in found.columns]
        if missing:
            lacks = f"the table {found.name} lacks {', '.join(missing)}"
            yield Finding("schema", "error", lacks, remedy)


def _not_permanent(facts: Mapping[str, Facts]) -> Iterator[Finding]:
    for found in (facts["task"], facts["dead"]):
        if found.exists and found.row.relpersistence != "p":
            problem = f"the table {found.name} is unlogged: a crash of the server empties it"
            remedy = f"alter table {found.name} set logged"
            yield Finding("unlogged", "error", problem, remedy)


def _hidden_rows(facts: Mapping[str, Facts]) -> Iterator[Finding]:
    for found in facts.values():
        if found.row.hides_rows:
            problem = f"row level security of {found.name} may hide rows from this role"
            remedy = "let workers see all rows: a policy for them with using (true), or bypassrls"
            yield Finding("row security", "error", problem, remedy)


def _unequal_params(facts: Mapping[str, Facts]) -> Iterator[Finding]:
    task, dead = (facts[key].columns.get("params") for key in ("task", "dead"))
    if task is None or dead is None or task == dead or {task, dead} == {"json", "jsonb"}:
        return
    problem = f"the error queue keeps params as {dead}, tasks have {task}: none can be buried"
    yield Finding("params", "error", problem, f"make params of {facts['dead'].name} {task}, too")


def _silenced(connection: Connection) -> Iterator[Finding]:
    role = connection.scalar(text("select current_setting('session_replication_role')"))
    if role == "replica":
        problem = "session_replication_role is replica: triggers and foreign keys do not work"
        yield Finding("replication role", "error", problem, "set it to origin for this role")


def _cascades(connection: Connection, facts: Mapping[str, Facts]) -> Iterator[Finding]:
    for key in referrers(connection, facts):
        if key.confdeltype == "c":
            problem = f"{key.referrer}.{key.conname}: each claim would delete rows there"
            remedy = "drop that foreign key; keep the number of the task without a constraint"
            yield Finding("foreign keys", "error", problem, remedy)


def own_columns_lost(facts: Mapping[str, Facts]) -> list[str]:
    """List columns of the task table that are not ours and that the error queue does not have."""
    task, dead = facts["task"].columns, facts["dead"].columns
    return [name for name in task if name not in dead and name not in TASK_COLUMNS]
