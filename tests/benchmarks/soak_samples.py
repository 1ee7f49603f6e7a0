"""What a soak looks at every few seconds: claims, the dead rows they meet, and how late tasks are.

A claim by lottery is measured by EXPLAIN (ANALYZE, BUFFERS) in a transaction that is rolled back,
several times, since each starts at another random place: what it would cost. Where
pg_stat_statements is loaded, the mean times of the claims, the looks and the notes that the workers
really sent are there, too.
"""

from __future__ import annotations

import random
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from soak_load import TYPES, lateness
from sqlalchemy import NullPool, create_engine, text

from pgtask_sa import Task
from pgtask_sa.claim import fair_claim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from soak_load import Counters
    from sqlalchemy import Connection, Engine

PROBES = 10  # of each order: new tasks first, due ones first
DEAD = "select relname, n_dead_tup from pg_stat_user_tables where relname = any(:names)"
SIZES = (
    "select c.relname, pg_relation_size(c.oid) from pg_class c join pg_namespace n"
    " on n.oid = c.relnamespace where n.nspname = 'public'"
    " and (c.relname like 'task\\_%idx' or c.relname in"
    " ('task', 'task_pkey', 'task_worker', 'task_worker_pkey'))"
)
CALLS = (
    "select coalesce(sum(calls), 0), coalesce(sum(total_exec_time), 0)"
    " from pg_stat_statements where query like any(:patterns) and query not like 'explain%'"
)
PATTERNS = {
    "claims": ["%DELETE FROM task WHERE%"],
    "looks": ["WITH RECURSIVE ready_pairs%", "%SELECT waiting.task_id AS task_id, %"],
    "notes": ["UPDATE task_worker SET %task_ids%"],
}
DEAREST = (
    "select round(total_exec_time)::float8, calls, left(query, 1000) from pg_stat_statements"
    " where query not like 'explain%' order by total_exec_time desc limit 12"
)


@dataclass(frozen=True)
class Sample:
    """One look; times in ms, sizes in bytes."""

    at: float
    sent: int
    done: int
    backlog: int
    claim_p50: float
    claim_p99: float
    claim_new: float  # the median of those that look for new tasks first
    claim_due: float
    buffers: int  # the most that a claim touched
    real_claim: float | None
    real_look: float | None
    real_note: float | None
    dead_tasks: int
    dead_notes: int
    late_p50: float | None
    late_p99: float | None
    due_p50: float | None
    due_p99: float | None
    sizes: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        """Return it as a plain object."""
        return asdict(self)


class Sampler:
    """Looks at a database and at what the processes count."""

    def __init__(self, url: str, counters: list[Counters], sent: Callable[[], int]) -> None:
        self.engine = create_engine(url, poolclass=NullPool)
        self.counters = counters
        self.sent = sent
        self.start = time.monotonic()
        self._before = self.counted()
        self._calls: dict[str, tuple[int, float]] = {}
        with self.engine.connect() as connection:
            extension = text("select 1 from pg_extension where extname = 'pg_stat_statements'")
            self._has_statistics = connection.scalar(extension) is not None
            self._means(connection)

    def counted(self) -> list[int]:
        """Sum up what all workers have counted."""
        return [sum(cells) for cells in zip(*(c.values() for c in self.counters), strict=True)]

    def done(self) -> int:
        """Return how many tasks are done."""
        return self.counted()[0]

    def look(self) -> Sample:
        """Take a sample; what is counted is of the time since the last one."""
        now, before = self.counted(), self._before
        fresh = [later - earlier for later, earlier in zip(now, before, strict=True)]
        self._before = now
        sent = self.sent()
        with self.engine.connect() as connection:
            return Sample(
                at=time.monotonic() - self.start,
                sent=sent,
                done=now[0],
                backlog=sent - now[0],
                **_probe(connection),
                **self._means(connection),
                **_dead(connection),
                late_p50=lateness(fresh, 0.5),
                late_p99=lateness(fresh, 0.99),
                due_p50=lateness(fresh, 0.5, delayed=True),
                due_p99=lateness(fresh, 0.99, delayed=True),
                sizes=_numbers(connection, SIZES),
            )

    def dearest(self) -> list[tuple[float, int, str]]:
        """List the statements that took most of the server's time: ms in all, calls, text."""
        if not self._has_statistics:
            return []
        with self.engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text(DEAREST))]

    def _means(self, connection: Connection) -> dict[str, float | None]:
        """Return the mean times of the statements that were really sent since the last look."""
        if not self._has_statistics:
            return {f"real_{name[:-1]}": None for name in PATTERNS}
        means = {}
        for name, patterns in PATTERNS.items():
            calls, spent = connection.execute(text(CALLS), {"patterns": patterns}).one()
            calls_before, before = self._calls.get(name, (0, 0.0))
            self._calls[name] = (calls, spent)
            new = calls - calls_before
            means[f"real_{name[:-1]}"] = (spent - before) / float(new) if new else None
        return means


def _probe(connection: Connection) -> dict[str, Any]:
    """Claim some times as lanes do, and give everything back."""
    found = {
        due_first: [explain_claim(connection, due_first=due_first) for _ in range(PROBES)]
        for due_first in (False, True)
    }
    times = sorted(spent for each in found.values() for spent, _ in each)
    return {
        "claim_p50": median(times),
        "claim_p99": times[-1],  # of so few
        "claim_new": median(spent for spent, _ in found[False]),
        "claim_due": median(spent for spent, _ in found[True]),
        "buffers": max(buffers for each in found.values() for _, buffers in each),
    }


def explain_claim(connection: Connection, *, due_first: bool) -> tuple[float, int]:
    """Claim once and roll back: ms that the server took, and buffers that it touched."""
    claim = fair_claim(Task.__table__, 1, due_first=due_first)
    compiled = claim.compile(connection)
    turns = {"levels": [0] * len(TYPES), "types": random.sample(TYPES, len(TYPES))}
    given = {**turns, "pivot": random.random()}
    explain = f"explain (analyze, buffers, timing off, format json) {compiled}"
    try:
        result = connection.exec_driver_sql(explain, compiled.construct_params(given))
        plan = result.scalar_one()[0]
    finally:
        connection.rollback()
    top = plan["Plan"]
    return plan["Execution Time"], top["Shared Hit Blocks"] + top["Shared Read Blocks"]


def _dead(connection: Connection) -> dict[str, int]:
    names = {"task": "dead_tasks", "task_worker": "dead_notes"}
    rows = _numbers(connection, DEAD, names=list(names))
    return {key: int(rows.get(name, 0)) for name, key in names.items()}


def _numbers(connection: Connection, statement: str, **given: Any) -> dict[str, int]:
    return {row[0]: row[1] for row in connection.execute(text(statement), given)}


@contextmanager
def held_snapshot(engine: Engine) -> Iterator[None]:
    """Hold a snapshot open, as a report or a dump does: no row that dies now can be cleaned up."""
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
        connection.execute(text("select 1 from task limit 1"))
        yield
