"""What the doctor looks at in the tables: their parts, their state, and what others put on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sqlalchemy import Index, TableClause, literal, select, text

from pgtask_sa import doctor, migrations, reports
from pgtask_sa.autogenerate import VERSION_TABLE
from pgtask_sa.doctor import Finding
from pgtask_sa.mapping import STORAGE, Task, is_partitioned, mapped_table
from pgtask_sa.patient import BLIND, GIVE_DIRECT_URL, NAME_IT, Patient, error, ok, warning
from pgtask_sa.presence_table import WORKER_STORAGE, worker_table
from pgtask_sa.rows import full_name
from pgtask_sa.triggers import wakeup_name

MANY_DEAD = 10_000
MOST_DEAD = 0.5  # of all rows
RIGHTS = ("SELECT", "INSERT", "UPDATE", "DELETE")


def check_schema(patient: Patient) -> Iterator[Finding]:
    """Check that the tables are there, with all columns, at the newest revision."""
    missing = list(doctor.missing_parts(patient.tables, patient.facts))
    yield from missing
    if patient.tables.task is mapped_table(Task):
        yield from _check_revision(patient, quiet=bool(missing))
    elif not missing:
        yield ok("schema", f"{patient.facts['task'].name} and its tables have all their columns")
    if not patient.handlers:
        yield from _others(patient)


_OTHERS = text(
    """
    select cast(nspname as text) as schema, cast(relname as text) as name
      from pg_class as c join pg_namespace as n on n.oid = relnamespace
     where relkind in ('r', 'p') and not relispartition and c.oid <> all (:known)
       and has_schema_privilege(n.oid, 'USAGE') and has_table_privilege(c.oid, 'SELECT')
       and (select count(*) from pg_attribute
             where attrelid = c.oid and attname = any (:columns)) = cardinality(:columns)
     order by 1, 2
    """
)
_MARKS = ["task_id", "task_type", "coalesce_key", "lease_token", "ticket"]


def _others(patient: Patient) -> Iterator[Finding]:
    """Find tables of tasks on a Base of the user's own, who has not named his registry."""
    known = [found.row.oid for found in patient.facts.values() if found.exists]
    asked = {"known": known, "columns": _MARKS}
    for row in patient.connection.execute(_OTHERS, asked).all():
        other = TableClause(row.name, schema=row.schema)
        first = select(literal(1)).select_from(other).limit(1)
        if not patient.has_tables or patient.connection.scalar(first):
            problem = f"the table {full_name(other)} is one of tasks, too, and was not looked at"
            yield warning("schema", problem, f"if it is yours, name its registry: {NAME_IT}")


# null: there is no such table
_MAY_READ = text("select has_table_privilege(to_regclass(:name), 'SELECT')")


def _check_revision(patient: Patient, *, quiet: bool) -> Iterator[Finding]:
    head, found = migrations.head(), None
    may_read = patient.connection.scalar(_MAY_READ, {"name": VERSION_TABLE})
    if may_read:
        found = patient.connection.scalar(text(f"select version_num from {VERSION_TABLE}"))
    if found == head:
        yield ok("revision", f"the tables are at {head}, the newest")
    elif found is None:
        if not quiet:
            why = "not made by our migrations" if may_read is None else "not for this role to read"
            yield ok("revision", f"{why}; the tables have all their columns")
    elif found < head:
        yield error("revision", f"the tables are at {found}, the newest is {head}", _MIGRATE)
    else:
        problem = f"the tables are at {found}, which is newer than this program ({head})"
        yield warning("revision", problem, "update pgtask_sa")


_MIGRATE = "run: python -m pgtask_sa migrate"


def check_dangers(patient: Patient) -> Iterator[Finding]:
    """Check what also a worker checks when it starts."""
    found = doctor.find_dangers(patient.connection, patient.tables, patient.handlers)
    found = [finding for finding in found if finding.name != "schema"]
    yield from found or [ok("dangers", "nothing that makes workers refuse to start")]


_INDEXES = text(
    """
    select cast(c.relname as text) as name, i.indisvalid as valid,
           array(select cast(attname as text)
                   from unnest(i.indkey) with ordinality as part(number, place)
                   join pg_attribute on attrelid = i.indrelid and attnum = part.number
                  order by part.place) as columns
      from pg_index as i join pg_class as c on c.oid = i.indexrelid where i.indrelid = :oid
    """
)


def check_indexes(patient: Patient) -> Iterator[Finding]:
    """Check that the indexes of the mapping are there, and work."""
    rows = patient.connection.execute(_INDEXES, {"oid": patient.facts["task"].row.oid})
    found = {row.name: row for row in rows}
    states = {
        str(index.name): _state(index, found.get(str(index.name)))
        for index in patient.tables.task.indexes
    }
    for name in sorted(name for name in states if states[name]):
        remedy = "drop it and let your migrations create it, concurrently"
        yield warning("indexes", f"{name} {states[name]}: claims read the whole table", remedy)
    if not any(states.values()):
        yield ok("indexes", "all there")


def _state(index: Index, found: Any) -> str | None:
    """Say what is wrong with an index, if anything is."""
    if found is None:
        return "is missing"
    if not found.valid:
        return "is not valid"
    wanted = [column.name for column in index.columns]
    is_plain = len(wanted) == len(index.expressions)
    return "has other columns" if is_plain and wanted != found.columns else None


def check_own_columns(patient: Patient) -> Iterator[Finding]:
    """Check that the error queue has room for all of a task."""
    lost = doctor.own_columns_lost(patient.facts)
    dead = patient.facts["dead"].name
    if lost:
        problem = f"{dead} lacks {', '.join(lost)}: what is buried loses them"
        yield warning("own columns", problem, f"add them to {dead}, too")
    else:
        yield ok("own columns", f"{dead} keeps all columns of a task")


_RIGHTS = text(
    """
    select wanted.name, has_table_privilege(cast(wanted.name as regclass), wanted.right) as granted,
           wanted.right
      from unnest(cast(:names as text[]), cast(:rights as text[])) as wanted(name, "right")
    """
)


def check_rights(patient: Patient) -> Iterator[Finding]:
    """Check the rights of a worker on the tables, by what the catalog says."""
    names = [facts.name for facts in patient.facts.values()]
    pairs = [(name, right) for name in names for right in RIGHTS]
    asked = {"names": [name for name, _ in pairs], "rights": [right for _, right in pairs]}
    rows = patient.connection.execute(_RIGHTS, asked)
    missing: dict[str, list[str]] = {}
    for row in rows:
        if not row.granted:
            missing.setdefault(row.name, []).append(row.right)
    for name, rights in missing.items():
        listed = ", ".join(rights)
        remedy = f"grant {listed} on {name} to this role"
        yield error("rights", f"this role may not {listed} on {name}", remedy)
    if not missing:
        yield ok("rights", "this role may read and write the three tables")


_TRIGGERS = text(
    """
    select cast(tgname as text) as name, tgenabled as enabled, tgtype & 8 = 8 as on_delete
      from pg_trigger where tgrelid = :oid and not tgisinternal order by 1
    """
)
_ENABLED = ("O", "A")  # in every session but a replica's; always


def check_wakeup(patient: Patient) -> Iterator[Finding]:
    """Check that an enqueue wakes sleeping workers."""
    name = wakeup_name(patient.tables.task.name)
    found = {row.name: row.enabled for row in _triggers(patient)}
    if name not in found:
        problem = f"the trigger {name} is missing: workers find new tasks late, by polling"
        yield warning("wake-up", problem, doctor.how_to_migrate(patient.tables))
    elif found[name] not in _ENABLED:
        problem = f"the trigger {name} is disabled: workers find new tasks late, by polling"
        task = patient.facts["task"].name
        yield warning("wake-up", problem, f"alter table {task} enable trigger {name}")
    else:
        yield ok("wake-up", "the trigger is there and enabled")


def check_triggers(patient: Patient) -> Iterator[Finding]:
    """Find triggers that somebody put on the deletion of tasks."""
    names = [row.name for row in _triggers(patient) if row.on_delete and row.enabled != "D"]
    for name in names:
        problem = f"the trigger {name} fires at each claim, also for tasks that are put back"
        remedy = "drop it, or be sure that it never fails and never returns null"
        yield warning("triggers", problem, remedy)
    if not names:
        yield ok("triggers", "nothing else fires when a task is claimed")


def _triggers(patient: Patient) -> list[Any]:
    oid = patient.facts["task"].row.oid
    return list(patient.connection.execute(_TRIGGERS, {"oid": oid}))


_REMEDY = "drop that foreign key; keep the number of the task without a constraint"


def check_foreign_keys(patient: Patient) -> Iterator[Finding]:
    """Find foreign keys to the task table that stop claims or change rows with them."""
    keys = doctor.referrers(patient.connection, patient.facts)
    for key in keys:
        name = f"{key.referrer}.{key.conname}"
        if key.confdeltype in ("a", "r"):
            problem = f"{name}: a task that it refers to cannot be claimed, nor others with it"
            yield error("foreign keys", problem, _REMEDY)
        elif key.confdeltype != "c":  # that is among the dangers
            yield warning("foreign keys", f"{name}: each claim changes rows there", _REMEDY)
    if not keys:
        yield ok("foreign keys", "nothing refers to the task table")


def check_storage(patient: Patient) -> Iterator[Finding]:
    """Check the storage parameters, and that autovacuum is not off for a table."""
    wanted = {"task": (patient.tables.task, STORAGE), "dead": (patient.tables.dead, {})}
    wanted["worker"] = (worker_table(patient.tables.task), WORKER_STORAGE)
    found = []
    for key, (table, options) in wanted.items():
        name, stored = patient.facts[key].name, _options(patient.facts[key].row.reloptions)
        if stored.get("autovacuum_enabled", "true") in ("false", "off", "0", "no"):
            problem = f"autovacuum is off for {name}: its dead rows are never cleared away"
            found.append(
                warning("storage", problem, f"alter table {name} reset (autovacuum_enabled)")
            )
        missing = [] if is_partitioned(table) else sorted(set(options) - set(stored))
        if missing:
            listed = ", ".join(f"{option} = {options[option]}" for option in missing)
            problem = f"{name} lacks storage parameters: it is vacuumed too rarely"
            found.append(warning("storage", problem, f"alter table {name} set ({listed})"))
    yield from found or [ok("storage", "vacuumed as often as a queue needs it")]


def _options(reloptions: list[str] | None) -> Mapping[str, str]:
    return dict(option.split("=", 1) for option in reloptions or ())


_ROWS = text(
    """
    select n_live_tup as live, n_dead_tup as dead,
           greatest(last_autovacuum, last_vacuum) as cleared
      from pg_stat_user_tables where relid = :oid
    """
)


def check_dead_rows(patient: Patient) -> Iterator[Finding]:
    """Check how many rows of the table wait for vacuum."""
    row = patient.connection.execute(_ROWS, {"oid": patient.facts["task"].row.oid}).first()
    if row is None:  # a partitioned table has none
        yield ok("dead rows", "not counted here")
        return
    share = row.dead / max(1, row.dead + row.live)
    last = f"last vacuum {row.cleared:%Y-%m-%d %H:%M}" if row.cleared else "never vacuumed yet"
    counts = f"{row.dead:,} dead rows, {share:.0%} of all; {last}"
    if row.dead > MANY_DEAD and share > MOST_DEAD:
        name = patient.facts["task"].name
        yield warning("dead rows", counts, f"see snapshots and autovacuum above; vacuum {name}")
    else:
        yield ok("dead rows", counts)


def check_workers(patient: Patient) -> Iterator[Finding]:
    """Count the workers."""
    lanes = patient.connection.execute(reports.lanes(worker_table(patient.tables.task))).all()
    every = {lane.worker_id for lane in lanes}
    direct = {lane.worker_id for lane in lanes if lane.alive and lane.is_direct}
    pooled = {lane.worker_id for lane in lanes if lane.alive} - direct
    gone = len(every) - len(direct | pooled)
    note = f"; {gone} gone, whose rows are still there" if gone else ""
    if pooled:
        problem = f"{len(pooled)} behind a pooler, without a direct URL: {BLIND}"
        yield warning("workers", problem, GIVE_DIRECT_URL)
    if direct or not pooled:
        yield ok("workers", f"{len(direct)} alive{note}")
