"""What one claim costs: by depth of the queue, by order, by number of types, tenants and so on.

Each line is a queue that is filled by SQL, and then claims as a lane makes them, with all the
statements that belong to it, each rolled back, so that the queue stays as it is. Shown are the
median and the 99th percentile in milliseconds, the round trips and SQLAlchemy included, and how
many statements there were per claim. `--max` is the deepest queue.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from figures import percentile
from sqlalchemy import Connection, Engine, Index, Integer, MetaData, create_engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from stage import LOCK, SETTINGS, PostgresServer, about

from pgtask_sa import DeadTaskMixin, TaskMixin
from pgtask_sa.claim_orders import ClaimOptions
from pgtask_sa.claiming import REPLAN
from pgtask_sa.priorities import read
from pgtask_sa.turns import Claimer

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS, MOST, FEWEST = 4.0, 1000, 7
PATIENCE = 4  # times as long as that, for claims that take seconds
FIVE = [f"K{n}" for n in range(5)]
MANY = [f"K{n}" for n in range(500)]


class Base(DeclarativeBase):
    """Apart from everything else."""

    metadata = MetaData()


class Job(TaskMixin, Base):
    """A task of a tenant."""

    __tablename__ = "job"
    __fair_by__ = "tenant_id"
    tenant_id: Mapped[int] = mapped_column(Integer, server_default=text("0"))


class DeadJob(DeadTaskMixin, Base):
    """Not used, but every task class has one."""

    __tablename__ = "dead_job"


URGENCY = Job.params["urgency"].as_integer()


@dataclass(frozen=True)
class Line:
    """What was measured of one queue."""

    queue: str
    order: str
    p50: float
    p99: float
    statements: float
    claims: int


def fill(engine: Engine, *parts: tuple[int, dict[str, str]]) -> None:
    """Make the table anew: so many rows of each part; columns are SQL over the number ``g``."""
    fair = next(index for index in Job.__table__.indexes if index.name == "job_fair_idx")
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        if not any("tenant_id" in columns for _, columns in parts):
            fair.drop(connection)
        for count, columns in parts:
            given = {"task_type": "'K' || g % 5", **columns}
            names, values = ", ".join(given), ", ".join(given.values())
            connection.execute(
                text(
                    f"insert into job ({names}) select {values} from generate_series(1, {count}) g"
                )
            )
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("vacuum analyze job"))
        connection.execute(text("checkpoint"))


def measure(
    engine: Engine,
    queue: str,
    name: str,
    types: list[str],
    *,
    seconds: float = SECONDS,
    **options: Any,
) -> Line:
    """Claim for some seconds, and give everything back."""
    claimer = Claimer(Job.__table__, types, ClaimOptions(**options))
    times, sent = [], 0
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        start = time.monotonic()
        while _more(len(times), time.monotonic() - start, seconds):
            begun = time.perf_counter()
            sent += claim_once(connection, claimer)[0]
            # past psycopg, which forgets all that was prepared when it sees a rollback
            driver.pgconn.exec_(b"rollback")
            times.append((time.perf_counter() - begun) * 1000)
    found = times[5:] or times[-1:]  # without those for which statements were prepared
    p50, p99 = percentile(found, 0.5), percentile(found, 0.99)
    return Line(queue, name, round(p50, 3), round(p99, 3), round(sent / len(times), 2), len(times))


def _more(count: int, spent: float, seconds: float) -> bool:
    if count < FEWEST + 5:
        return spent < PATIENCE * seconds or not count
    return count < MOST and spent < seconds


def claim_once(connection: Connection, claimer: Claimer) -> tuple[int, list[Any]]:
    """Claim as a lane does; return the number of statements, and the tasks."""
    if claimer.must_replan():
        connection.exec_driver_sql(REPLAN.decode())
    for sent, (statement, parameters) in enumerate(claimer.statements(), 1):
        rows = connection.execute(statement, parameters).mappings().all()
        if found := claimer.learn(rows):
            return sent, found
    raise SystemExit("nothing to claim")


def depths(engine: Engine, most: int) -> Iterator[Line]:
    """Measure each order by depth."""
    depth = 1000
    while depth <= most:
        fill(engine, (depth, {}))
        name = f"{depth:,} ready"
        for order in ("fair", "random", "tablesample"):
            yield measure(engine, name, order, FIVE, order=order)
        yield measure(engine, name, "fair, batch 100", FIVE, batch_size=100)
        depth *= 10


def kinds(engine: Engine, depth: int) -> Iterator[Line]:
    """Measure by number of types, registered and waiting, and of priorities."""
    fill(engine, (depth, {}))
    for types in (FIVE, MANY):
        yield measure(engine, f"{depth:,} ready of 5 types", f"fair, {len(types)} types", types)
    fill(engine, (depth, {"task_type": "'K' || g % 500"}))
    yield measure(engine, f"{depth:,} ready of 500 types", "fair, 500 types", MANY)
    fill(engine, (depth, {"priority": "g % 20"}))
    yield measure(engine, f"{depth:,} ready, 20 priorities", "fair", FIVE)


def planned(engine: Engine, depth: int) -> Iterator[Line]:
    """Measure planned tasks beside ready ones."""
    later = {"run_at": "now() + interval '7 days' + g * interval '1 ms'"}
    fill(engine, (depth, later), (100, {}))
    yield measure(engine, f"{depth:,} due next week + 100 ready", "fair", FIVE)
    fill(engine, (depth, {}), (100, {"run_at": "now() - g * interval '1 ms'"}))
    yield measure(engine, f"{depth:,} ready + 100 due", "fair", FIVE)


def own_orders(engine: Engine, depth: int) -> Iterator[Line]:
    """Measure turns by tenant, and an expression with and without its index."""
    fill(engine, (depth, {"tenant_id": "g % 10000"}))
    name = f"{depth:,} ready of 10,000 tenants"
    yield measure(engine, name, "fair", FIVE)
    yield measure(engine, name, "fair_by tenant", FIVE, fair_by="tenant_id")
    crowd = {"tenant_id": "case when g % 100 = 0 then g % 10000 else 7 end"}
    fill(engine, (depth, crowd))
    name = f"{depth:,} ready, 99 % of one tenant"
    yield measure(engine, name, "fair_by tenant", FIVE, fair_by="tenant_id")
    fill(engine, (depth, {"params": "jsonb_build_object('urgency', g % 7)"}))
    yield measure(engine, f"{depth:,} ready", "by an expression", FIVE, **read(Job, URGENCY))
    c = Job.__table__.c
    index = Index("job_urgency_idx", c.priority, read(Job, URGENCY)["expression"], c.ticket)
    index.create(engine)
    Job.__table__.indexes.discard(index)
    yield measure(engine, f"{depth:,} ready", ".. with its index", FIVE, **read(Job, URGENCY))


def main() -> None:
    """Measure, print, and write the figures down if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--max", type=int, default=10_000_000, help="deepest queue (10,000,000)")
    parser.add_argument("--json", metavar="FILE", help="write everything to this file")
    arguments = parser.parse_args()
    depth = min(arguments.max, 1_000_000)
    lines = []
    with LOCK.open("a") as lock, PostgresServer(fsync=True, settings=SETTINGS) as server:
        fcntl.flock(lock, fcntl.LOCK_EX)
        facts = about(server)
        engine = create_engine(server.url())
        print(f"{'queue':<42}{'order':<20}{'p50 ms':>9}{'p99 ms':>9}{'statements':>12}")
        parts = (
            depths(engine, arguments.max),
            *(part(engine, depth) for part in (kinds, planned, own_orders)),
        )
        for line in (line for part in parts for line in part):
            lines.append(asdict(line))
            print(
                f"{line.queue:<42}{line.order:<20}{line.p50:>9.3f}{line.p99:>9.3f}"
                f"{line.statements:>12.2f}",
                flush=True,
            )
        engine.dispose()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({**facts, "claims": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
