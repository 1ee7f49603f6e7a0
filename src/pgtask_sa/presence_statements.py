"""The SQL of the workers' table; see `presence_table` for what stands in it."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Delete,
    FromClause,
    Insert,
    Integer,
    Select,
    Table,
    Text,
    Update,
    and_,
    bindparam,
    case,
    cast,
    column,
    delete,
    exists,
    func,
    literal_column,
    or_,
    select,
    true,
    update,
)
from sqlalchemy import table as sql_table
from sqlalchemy.dialects.postgresql import ARRAY, OID
from sqlalchemy.dialects.postgresql import insert as pg_insert
from sqlalchemy.types import UserDefinedType

from pgtask_sa.presence_table import LOCK_CLASS, NUMBERS, worker_table
from pgtask_sa.rows import quoted, row_version

# Without a lock to look at: so long after its last word a worker is taken for dead.
SILENCE: ColumnElement[Any] = literal_column("interval '60 seconds'")
LOCKS = ("locktype", "database", "classid", "objid", "objsubid", "granted", "pid")
CLASS = literal_column(str(LOCK_CLASS), Integer)
NOBODY = literal_column("-1", Integer)  # no worker has this number
MINE = bindparam("worker_id", type_=Integer)
ME = bindparam("me", type_=Integer)  # not called as the column: that would be a value to set
TASK_IDS = bindparam("task_ids", type_=ARRAY(BigInteger))
ROW_VERSIONS = bindparam("row_versions", type_=ARRAY(BigInteger))


def _clock() -> ColumnElement[Any]:
    return func.statement_timestamp()


def hold_presence() -> Select[Any]:
    """Hold the lock that says that ``:worker_id`` lives, as long as the connection does."""
    return select(func.pg_advisory_lock(CLASS, MINE))


def try_presence() -> Select[Any]:
    """Hold that lock, if nobody does; true or false comes back."""
    return select(func.pg_try_advisory_lock(CLASS, MINE))


def try_solitude() -> Select[Any]:
    """Be the only one who runs a suspect, until this transaction ends; true or false comes back."""
    return select(func.pg_try_advisory_xact_lock(CLASS, NOBODY))


def lock_holders(worker_id: ColumnElement[Any]) -> Select[Any]:
    """List the server processes that hold the lock of a worker, in this database."""
    locks = sql_table("pg_locks", *map(column, LOCKS), schema="pg_catalog").c
    databases = sql_table("pg_database", column("oid"), column("datname"), schema="pg_catalog").c
    here = select(databases.oid).where(databases.datname == func.current_database())
    return select(locks.pid).where(
        locks.locktype == literal_column("'advisory'"),
        locks.database == here.scalar_subquery(),
        locks.classid == cast(literal_column(str(LOCK_CLASS)), OID),
        locks.objid == cast(worker_id, OID),
        locks.objsubid == literal_column("2"),  # of two integers, not of one bigint
        locks.granted,
    )


def end_predecessor() -> Select[Any]:
    """End the session that holds that lock: a client's whose end the server has not noticed."""
    holders = lock_holders(MINE).subquery("holders")
    return select(func.pg_terminate_backend(holders.c.pid))


def enlist(task: Table) -> Insert:
    """Add a lane, ``:lane``, or bring it up to date when its worker has connected anew."""
    table = worker_table(task)
    given: dict[str, Any] = {name: bindparam(name) for name in ("lane", "host", "pid", "is_direct")}
    row = pg_insert(table).values(
        worker_id=MINE, server_started_at=func.pg_postmaster_start_time(), **given
    )
    renewed: dict[str, Any] = {
        name: row.excluded[name] for name in ("server_started_at", "is_direct")
    }
    # what ran before the server was started anew does not count
    same = table.c.server_started_at == row.excluded.server_started_at
    for name in ("task_ids", "row_versions"):
        renewed[name] = case((same, table.c[name]), else_=row.excluded[name])
    return row.on_conflict_do_update(
        index_elements=["worker_id", "lane"], set_={**renewed, "seen_at": _clock()}
    )


def _lane(table: FromClause) -> ColumnElement[Any]:
    return func.mod(table.c.lane, literal_column(str(NUMBERS), Integer))


def renumber(task: Table) -> Update:
    """Give the rows of ``:me`` their first numbers again."""
    table = worker_table(task)
    return update(table).where(table.c.worker_id == ME).values(lane=_lane(table))


def note_claim(task: Table) -> Update:
    """Note what a lane, ``:which``, has claimed, and return where its row is; none if not enlisted.

    The row has ``:number`` from then on. It must be committed before a handler begins.
    """
    return _note(task).returning(place_of(worker_table(task)))


def note_in_place(task: Table) -> Update:
    """Note what a lane has claimed, in its row at ``:place``; nothing comes back if it has moved.

    It neither reads the table nor walks an index: while somebody holds a snapshot, each note leaves
    a dead row behind in both.
    """
    table = worker_table(task)
    return _note(task).where(in_place(table)).returning(place_of(table))


def in_place(table: Table) -> ColumnElement[bool]:
    """Say that it is the row at ``:place``."""
    return literal_column(f"{quoted(table)}.ctid") == cast(bindparam("place"), _Tid)


class _Tid(UserDefinedType[str]):
    cache_ok = True

    def get_col_spec(self, **_: Any) -> str:
        return "tid"


def place_of(table: Table) -> ColumnElement[Any]:
    """Return where a row is, as text."""
    return cast(literal_column(f"{quoted(table)}.ctid"), Text).label("place")


def _note(task: Table) -> Update:
    table = worker_table(task)
    noted = update(table).values(
        lane=bindparam("number", type_=Integer),
        task_ids=TASK_IDS,
        row_versions=ROW_VERSIONS,
        backend_pid=bindparam("backend_pid"),
        begun_at=bindparam("begun_at"),
        seen_at=_clock(),
    )
    return noted.where(own_lane(table))


def own_lane(table: Table) -> ColumnElement[bool]:
    """Say that it is the row of ``:worker_id`` for its lane ``:which``."""
    return and_(table.c.worker_id == MINE, _lane(table) == bindparam("which", type_=Integer))


def disown(task: Table) -> Update:
    """Make the entry of the lane ``:own_lane`` of ``:me`` one of a worker that is dead.

    Of what it names, only ``:task_ids`` stays. Its new number, ``:nobody``, is one whose lock is
    held by nobody: so whoever claims that row next counts this start. That of the lane, below 0,
    says that the worker lives and the task was taken from its handler, in the server process
    ``:backend_pid``; null if the transaction was lost by itself. No row comes back if the lane has
    no entry, or it does not name that task.
    """
    table = worker_table(task)
    nobody = {"worker_id": bindparam("nobody"), "lane": -table.c.lane}
    start = {
        "task_ids": TASK_IDS,
        "row_versions": ROW_VERSIONS,
        "backend_pid": bindparam("backend_pid", type_=Integer),
    }
    mine = (table.c.worker_id == ME, _lane(table) == bindparam("own_lane", type_=Integer))
    named = table.c.task_ids.contains(TASK_IDS)
    given = {**nobody, **start, "seen_at": _clock()}
    return update(table).where(*mine, named).values(given).returning(table.c.lane)


def is_disowned(task: Table) -> Select[Any]:
    """Say whether there is an entry of ``:nobody``."""
    table = worker_table(task)
    return select(table.c.lane).where(table.c.worker_id == bindparam("nobody", type_=Integer))


def forget_taken(task: Table) -> Delete:
    """Take out what was disowned of a task that is claimed now: its starts are counted."""
    table = worker_table(task)
    named = (table.c.task_ids == TASK_IDS, table.c.row_versions == ROW_VERSIONS)
    return delete(table).where(table.c.lane < literal_column("0"), *named)


def _holdings(ids: Any, versions: Any, name: str) -> Any:
    pairs = func.unnest(ids, versions).table_valued(
        column("task_id", BigInteger), column("version", BigInteger), name=name
    )
    return pairs.render_derived(name=name)


def _is_unsettled(task: Table, held: Any) -> ColumnElement[bool]:
    """Say whether a row is still of the version that was claimed: that claim came to nothing."""
    same = (task.c.task_id == held.c.task_id, row_version(task) == held.c.version)
    return exists(select(literal_column("1")).select_from(task).where(*same))


def _is_gone(table: Any) -> ColumnElement[bool]:
    """Say whether a worker is dead. Its lock is free then; many may look at the same time."""
    free = func.pg_try_advisory_xact_lock_shared(CLASS, table.c.worker_id)
    # one's own lock looks free, too
    return and_(table.c.worker_id != MINE, or_(and_(table.c.is_direct, free), ~table.c.is_direct))


def deaths(task: Table) -> Select[Any]:
    """Of rows claimed by a lane, ``:own_lane``, tell which others had claimed before.

    Returns:
        One row for each such claim: ``task_id``; ``is_gone``, whether its worker is dead;
        ``beside``, how many tasks that had in flight, this one included, in all its lanes;
        ``is_taken``, whether instead the task was taken from its handler; and ``is_late``, whether
        that was since its time was over.
    """
    table = worker_table(task)
    other, lane = table.alias("other"), table.alias("lane")
    claimed = _holdings(TASK_IDS, ROW_VERSIONS, "claimed")
    held = _holdings(other.c.task_ids, other.c.row_versions, "held")
    beside = (
        select(func.sum(func.cardinality(lane.c.task_ids)))
        .where(lane.c.worker_id == other.c.worker_id)
        .scalar_subquery()
    )
    same = and_(claimed.c.task_id == held.c.task_id, claimed.c.version == held.c.version)
    return (
        select(
            claimed.c.task_id,
            beside.label("beside"),
            (other.c.lane < literal_column("0")).label("is_taken"),
            other.c.backend_pid.is_not(None).label("is_late"),
            _is_gone(other).label("is_gone"),
        )
        .select_from(other.join(held, true()).join(claimed, same))
        .where(
            or_(other.c.worker_id != MINE, _lane(other) != bindparam("own_lane", type_=Integer)),
            other.c.task_ids.overlap(TASK_IDS),
            other.c.server_started_at == func.pg_postmaster_start_time(),
        )
    )


def note_alive(task: Table) -> Update:
    """Note that ``:me`` was alive just now; for those who cannot look at its lock."""
    table = worker_table(task)
    return update(table).where(table.c.worker_id == ME).values(seen_at=_clock())


def named_by_dead(task: Table) -> Select[Any]:
    """List the tasks that entries of dead workers name."""
    table = worker_table(task)
    today = table.c.server_started_at == func.pg_postmaster_start_time()
    names_some = func.cardinality(table.c.task_ids) > 0
    dead = (table.c.worker_id != MINE, names_some, today, table.c.is_direct, _is_gone(table))
    return select(func.unnest(table.c.task_ids)).where(*dead)


def count_others(task: Table) -> Select[Any]:
    """Count the other workers, some of which may be dead by now."""
    table = worker_table(task)
    return select(func.count(table.c.worker_id.distinct())).where(table.c.worker_id != MINE)


def dismiss(task: Table) -> Delete:
    """Take ``:worker_id`` out, whose end is in order."""
    table = worker_table(task)
    return delete(table).where(table.c.worker_id == MINE)


def dismiss_dead(task: Table) -> Delete:
    """Take out the dead, but for those whose claims somebody has still to count.

    Whoever has disowned a start asks later whether that is there: it stays for a while.
    """
    table = worker_table(task)
    held = _holdings(table.c.task_ids, table.c.row_versions, "held")
    counts: Select[Any] = (
        select(literal_column("1")).select_from(held).where(_is_unsettled(task, held))
    )
    today = table.c.server_started_at == func.pg_postmaster_start_time()
    silent = table.c.seen_at < _clock() - SILENCE
    settled = or_(~exists(counts.correlate(table)), ~today)
    return delete(table).where(
        table.c.worker_id != MINE,
        settled,
        or_(and_(table.c.is_direct, table.c.lane >= literal_column("0")), silent),
        _is_gone(table),
    )
