"""What the doctor looks at in the server: settings, limits, and whoever holds back vacuum."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from sqlalchemy import Row, text

from pgtask_sa.doctor import Finding
from pgtask_sa.patient import BLIND, GIVE_DIRECT_URL, Patient, error, ok, warning
from pgtask_sa.plan import transaction_limit

OLDEST_VERSION = 150_000
LOOKALIKES = ("CockroachDB", "-YB-", "Redshift", "Materialize", "EnterpriseDB Distributed")
MOST_APART = 1.0  # seconds between two clocks
MOST_XIDS = 10_000_000  # transactions since the oldest snapshot
TRANSACTION = "transaction_timeout"
SHORTER = "give handlers a shorter timeout"
LIMITS = {
    TRANSACTION: "give every handler a timeout",  # then the worker sets its own
    "statement_timeout": SHORTER,
    "lock_timeout": SHORTER,
}
LEAST_STATEMENT = 1000  # milliseconds
LEAST_IDLE = 10_000


def check_version(patient: Patient) -> Iterator[Finding]:
    """Check what server it is."""
    described = str(patient.connection.scalar(text("select version()")))
    yield judge_version(described, patient.number("server_version_num"))


def judge_version(described: str, number: int) -> Finding:
    """Judge a server by what it says of itself.

    Example:
        >>> judge_version("PostgreSQL 18.6 on x86_64", 180_006).level
        'ok'
        >>> judge_version("CockroachDB CCL v24.1", 130_000).level
        'error'
    """
    name = " ".join(described.split()[:2])
    if any(other in described for other in LOOKALIKES):
        problem = f"{name} is no PostgreSQL: SKIP LOCKED may skip what nobody holds there"
        return error("server", problem, "use PostgreSQL")
    if number < OLDEST_VERSION:
        return warning("server", f"{name} was never tried", "use PostgreSQL 15 or newer")
    return ok("server", name)


def check_pooler(patient: Patient) -> Iterator[Finding]:
    """Find out whether a pooler lies between, as workers do: it invents the process id it tells."""
    driver: Any = patient.connection.connection.driver_connection
    told, true = driver.info.backend_pid, patient.connection.scalar(text("select pg_backend_pid()"))
    if told == true:
        yield ok("pooler", "there is none between")
    elif patient.has_direct_url:
        yield ok("pooler", "there is one between, and workers have a direct URL")
    else:
        yield warning("pooler", f"there is one between: {BLIND}", GIVE_DIRECT_URL)


def check_writable(patient: Patient) -> Iterator[Finding]:
    """Check that the server takes writes."""
    if patient.connection.scalar(text("select pg_is_in_recovery()")):
        remedy = "name the primary, or several hosts and target_session_attrs=read-write"
        yield error("writable", "this is a standby: nothing can be claimed", remedy)
    elif patient.is_on("default_transaction_read_only"):
        remedy = "alter role (or database) .. set default_transaction_read_only = off"
        yield error("writable", "default_transaction_read_only is on", remedy)
    else:
        yield ok("writable", "the server takes writes")


def check_durability(patient: Patient) -> Iterator[Finding]:
    """Check that what was committed survives a crash."""
    found = []
    if not patient.is_on("fsync"):
        problem = "fsync is off: a crash of the machine loses tasks, or all"
        found.append(error("durability", problem, "set fsync = on and restart"))
    if not patient.is_on("full_page_writes"):
        problem = "full_page_writes is off: a crash can tear pages, but on few file systems"
        found.append(warning("durability", problem, "set full_page_writes = on"))
    if patient.settings["synchronous_commit"] == "off":
        problem = "synchronous_commit is off: a crash of the server loses the latest commits"
        remedy = "alter role (or database) .. set synchronous_commit = on"
        found.append(warning("durability", problem, remedy))
    yield from found or [ok("durability", "what is committed survives a crash")]


def check_isolation(patient: Patient) -> Iterator[Finding]:
    """Note the default isolation level, which workers do not follow."""
    level = patient.settings["default_transaction_isolation"]
    note = "" if level == "read committed" else "; workers claim in read committed all the same"
    yield ok("isolation", f"the default is {level}{note}")


def check_timeouts(patient: Patient) -> Iterator[Finding]:
    """Compare what the server gives a worker with what handlers may take.

    A worker sets two of the limits itself: ``idle_in_transaction_session_timeout`` always, and
    ``transaction_timeout`` where each handler of the transactional mode has a timeout.
    """
    found = []
    for name, remedy in LIMITS.items():
        limit = patient.number(name)
        longer = ", ".join(_longer(patient, name, limit)) if limit else ""
        if longer:
            problem = f"{name} is {limit / 1000:g} s, and longer may take: {longer}"
            found.append(warning("timeouts", problem, f"alter role .. set {name} = 0, or {remedy}"))
    found += _too_short(patient)
    yield from found or [ok("timeouts", "the server gives tasks the time that they may take")]


def _longer(patient: Patient, name: str, limit: int) -> Iterator[str]:
    """Name the handlers that may take longer than so many milliseconds."""
    of_transactions = name == TRANSACTION
    if of_transactions and transaction_limit(patient.handlers, 1) is not None:
        return
    for label, handler in patient.handlers.items():
        if of_transactions and handler.lease is not None:  # its transactions are short ones
            continue
        if handler.timeout is None and of_transactions:
            yield f"{label} (no timeout)"
        elif handler.timeout is not None and handler.timeout * 1000 >= limit:
            yield f"{label} ({handler.timeout:g} s)"


def _too_short(patient: Patient) -> Iterator[Finding]:
    for name, least in (
        ("statement_timeout", LEAST_STATEMENT),
        ("idle_session_timeout", LEAST_IDLE),
    ):
        if 0 < (limit := patient.number(name)) < least:
            problem = f"{name} is {limit / 1000:g} s: it cuts off what a worker itself does"
            remedy = f"alter role .. set {name} = 0, or at least {least / 1000:g} s"
            yield warning("timeouts", problem, remedy)


_LIMITS = text(
    """
    select (select rolconnlimit from pg_roles where rolname = current_user) as role,
           (select datconnlimit from pg_database where datname = current_database()) as base,
           (select count(*) from pg_stat_activity
             where backend_type = 'client backend' and pid <> pg_backend_pid()) as used
    """
)


def check_connections(patient: Patient) -> Iterator[Finding]:
    """Compare the connections that the workers need with those that there are."""
    row = patient.connection.execute(_LIMITS).one()
    reserved = ("superuser_reserved_connections", "reserved_connections")
    most = patient.number("max_connections") - sum(map(patient.number, reserved))
    limits = [("max_connections less the reserved ones", most)]
    limits += [("the role's limit", row.role), ("the database's limit", row.base)]
    name, least = min((pair for pair in limits if pair[1] >= 0), key=lambda pair: pair[1])
    need = patient.connections
    remedy = "fewer lanes (--concurrency, --processes), a higher limit, or a pooler"
    if need > least:
        problem = f"the workers need {need} connections, and {name} is {least}"
        yield error("connections", problem, remedy)
    elif need + row.used > most:
        problem = f"the workers need {need} connections; {row.used} of {most} are in use"
        yield warning("connections", problem, f"(unless workers are among these) {remedy}")
    else:
        yield ok("connections", f"the workers need {need}; {row.used} of {most} are in use")


def check_clock(patient: Patient) -> Iterator[Finding]:
    """Compare the server's clock with this machine's: people plan by theirs."""
    before = patient.clock()
    server: datetime | None = patient.connection.scalar(text("select clock_timestamp()"))
    after = patient.clock()
    apart = 0.0 if server is None else server.timestamp() - (before + after) / 2
    if abs(apart) - (after - before) / 2 > MOST_APART:
        problem = f"the server's clock is {apart:+.1f} s from this machine's"
        remedy = "set both by NTP; tasks fall due by the server's clock"
        yield warning("clock", problem, remedy)
    else:
        yield ok("clock", f"{abs(apart):.3f} s from this machine's")


def check_autovacuum(patient: Patient) -> Iterator[Finding]:
    """Check that anybody clears away the rows that claims delete."""
    off = [name for name in ("autovacuum", "track_counts") if not patient.is_on(name)]
    for name in off:
        problem = f"{name} is off: dead rows are never cleared away, and claims grow slow"
        yield warning("autovacuum", problem, f"set {name} = on")
    if not off:
        yield ok("autovacuum", "is on")


_PREPARED = text(
    """
    select gid, owner, extract(epoch from clock_timestamp() - prepared) as seconds,
           exists (select from pg_locks as its join pg_locks as held using (virtualtransaction)
             where its.transactionid = transaction and its.pid is null and held.pid is null
             and held.relation = any (:oids)) as ours
      from pg_prepared_xacts
     where database = current_database()
     order by prepared
    """
)


def check_prepared(patient: Patient) -> Iterator[Finding]:
    """List prepared transactions: what they hold they hold through restarts, for ever."""
    oids = [found.row.oid for found in patient.facts.values() if found.exists]
    rows = patient.connection.execute(_PREPARED, {"oids": oids}).all()
    for row in rows:
        what = f"prepared transaction {row.gid!r} of {row.owner}, {row.seconds:.0f} s old"
        remedy = f"commit prepared or rollback prepared {row.gid!r}, if its owner does not"
        if row.ours:
            yield error("prepared", f"{what}, holds locks on the task tables", remedy)
        else:
            yield warning("prepared", f"{what}, holds back vacuum", remedy)
    if not rows:
        yield ok("prepared", "no prepared transactions")


_SNAPSHOTS = text(
    """
    select pid, usename, application_name, backend_type, coalesce(state, '') as state,
           coalesce(age(backend_xmin), 0) as xids,
           coalesce(extract(epoch from clock_timestamp() - xact_start), 0) as seconds
      from pg_stat_activity
     where (backend_xmin is not null or backend_xid is not null) and pid <> pg_backend_pid()
       and (datname = current_database() or datname is null)
     order by seconds desc, xids desc
    """
)


def check_snapshots(patient: Patient) -> Iterator[Finding]:
    """Find who holds back vacuum: as long as they do, claims wade through dead rows."""
    rows = patient.connection.execute(_SNAPSHOTS).all()
    old = [row for row in rows if row.seconds > patient.old or row.xids > MOST_XIDS]
    for row in old[:3]:
        problem = f"{_person(row)} holds back vacuum for {row.seconds:.0f} s"
        remedy = f"end it, or select pg_terminate_backend({row.pid}); give long tasks a timeout"
        yield warning("snapshots", problem, remedy)
    if not old:
        yield ok("snapshots", _oldest(rows[0]) if rows else "none is open")


def _oldest(row: Row[Any]) -> str:
    return f"the oldest is {row.seconds:.0f} s old, of {_person(row)}"


def _person(row: Row[Any]) -> str:
    name = row.application_name or row.backend_type
    return f"pid {row.pid} ({row.usename}, {name}, {row.state or 'no state'})"


_SLOTS = text(
    """
    select slot_name from pg_replication_slots
     where not active and (restart_lsn is not null or xmin is not null) order by slot_name
    """
)


def check_slots(patient: Patient) -> Iterator[Finding]:
    """Find replication slots that nobody reads: they keep WAL, and may hold back vacuum."""
    names = patient.connection.scalars(_SLOTS).all()
    for name in names:
        problem = f"nobody reads the replication slot {name!r}: it keeps WAL and old rows"
        yield warning("slots", problem, f"select pg_drop_replication_slot({name!r})")
    if not names:
        yield ok("slots", "no replication slot is abandoned")
