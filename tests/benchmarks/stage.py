"""The ground that every measure stands on: a server, a database for each side, and workers.

A *side* is a module that does the same work in its own way: `ours` with the library, `bare` in bare
psycopg. They have the same functions.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
import time
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "support"))

from postgres_server import PostgresServer
from tally import SPAWN, Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

SETTINGS: dict[str, str | int] = {
    "shared_buffers": "1GB",
    "max_wal_size": "8GB",
    "max_connections": 400,
    "shared_preload_libraries": "pg_stat_statements",
    "pg_stat_statements.track": "all",
}
SHOWN = ("fsync", "synchronous_commit", "shared_buffers", "max_wal_size", "max_connections")
# The one that the benchmark of other task queues holds, too: two timed things never overlap.
LOCK = Path(tempfile.gettempdir()) / "queue-bench.lock"

# Four lanes, the worker's default: while one waits for its commit, others work. Larger batches are
# bound by Python: one lane claims while the other works, and a third is only in the way.
LANES = {1: 4, 100: 2, 200: 2, 500: 2}

Sizes = dict[str, Any]
FULL: Sizes = {
    "rounds": 3,
    "enqueue": 1000,
    "bulk": 50_000,
    "single": 4000,  # tasks of a drain one by one ..
    "batched": 60_000,  # .. and of a drain in batches
    "shallow": 20_000,
    "deep": 1_000_000,
    "deepest": 10_000_000,
    "deep_seconds": 10.0,
    "rival_seconds": 5.0,
    "around_sleep": 1000,
    "pickups": 200,
    "loads": (0, 100, 200, 400, 800, 1200, 1600),
    "load_seconds": 5.0,
    "idle": 20.0,
    "idle_workers": 50,
    "memory": 1_000_000,
    "crowd": 1_000_000,  # waits beside what is looked at
    "claims": 10_000,
    "tenants": 10_000,
    "claim_seconds": 3.0,
    "due": 100,
    "failing": 10_000,
}
QUICK: Sizes = {
    "rounds": 1,
    "enqueue": 100,
    "bulk": 5000,
    "single": 300,
    "batched": 3000,
    "shallow": 3000,
    "deep": 20_000,
    "deepest": 50_000,
    "deep_seconds": 1.0,
    "rival_seconds": 0.5,
    "around_sleep": 30,
    "pickups": 20,
    "loads": (0, 200),
    "load_seconds": 0.5,
    "idle": 2.0,
    "idle_workers": 3,
    "memory": 20_000,
    "crowd": 10_000,
    "claims": 300,
    "tenants": 100,
    "claim_seconds": 0.2,
    "due": 10,
    "failing": 200,
}


class Stage:
    """A server with a database for each side, and what every measure does with them.

    Args:
        server: it runs.
        sizes: how much of everything.
    """

    def __init__(self, server: PostgresServer, sizes: Sizes) -> None:
        self.server = server
        self.sizes = sizes
        self.rounds: int = sizes["rounds"]
        self._made: set[str] = set()
        self.execute("postgres", "create extension if not exists pg_stat_statements")

    def url(self, name: str) -> str:
        """Return the URL of a database, as libpq takes it; it is created when it is missing."""
        if name not in self._made:
            self.execute("postgres", f"create database {name}")
            self._made.add(name)
        return self.server.url(name, driver=None)

    def drop(self, name: str) -> None:
        """Drop a database that was large."""
        if name in self._made:
            self.execute("postgres", f"drop database {name} with (force)")
            self._made.discard(name)

    def execute(self, name: str, *statements: str) -> Any:
        """Execute statements apart from everything else; return the rows of the last one."""
        url = self.server.url(name, driver=None) if name == "postgres" else self.url(name)
        with psycopg.connect(url, autocommit=True) as connection:
            for statement in statements:
                cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else None

    def fresh(self, side: ModuleType) -> None:
        """Make empty tables, and let the server come to rest."""
        side.reset(self.url(side.DATABASE))
        self.execute(side.DATABASE, "checkpoint")

    def fill(self, side: ModuleType, kind: str, count: int, **columns: str) -> None:
        """Add so many tasks by SQL; columns are SQL over the number ``g``."""
        given = {"task_type": f"'{kind}'", "params": "jsonb_build_object('i', g)", **columns}
        names, values = ", ".join(given), ", ".join(given.values())
        self.execute(
            side.DATABASE,
            f"insert into task ({names}) select {values} from generate_series(1, {count}) g",
        )

    def rest(self, side: ModuleType) -> None:
        """Do now what else a background process would do in the middle of the measure."""
        self.execute(side.DATABASE, "vacuum analyze", "checkpoint")

    def left(self, side: ModuleType) -> int:
        """Count the tasks that are not done."""
        return int(self.execute(side.DATABASE, "select count(*) from task")[0][0])

    @contextmanager
    def workers(self, side: ModuleType, processes: int = 1, **options: Any) -> Iterator[Running]:
        """Run workers of a side, each in a process of its own."""
        running = Running(self.url(side.DATABASE), side.worker, processes, options)
        try:
            running.start()
            yield running
        finally:
            running.end()

    @contextmanager
    def idle_worker(self, side: ModuleType, *kinds: str) -> Iterator[tuple[Running, Any]]:
        """Run one on empty tables that has run a task and is idle now; give also a sender."""
        self.fresh(side)
        with (
            self.workers(side, concurrency=4, batch=1, only=("noop", *kinds)) as run,
            side.sender(self.url(side.DATABASE)) as send,
        ):
            send("noop", 0)
            wait_for(lambda: run.count > 0, 60)
            time.sleep(0.5)
            yield run, send


class Running:
    """Worker processes and what they have done so far."""

    def __init__(self, url: str, worker: Any, processes: int, options: dict[str, Any]) -> None:
        self.tallies = [Tally() for _ in range(processes)]
        self.processes = [
            SPAWN.Process(target=worker, args=(url, tally), kwargs=options)
            for tally in self.tallies
        ]

    def start(self) -> None:
        """Start them all."""
        for process in self.processes:
            process.start()

    def join(self, seconds: float) -> None:
        """Wait until they end by themselves."""
        end = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))

    def end(self) -> None:
        """End those that run."""
        for process in self.processes:
            if process.is_alive():
                process.terminate()
        self.join(10)
        for process in self.processes:
            process.kill()
            process.join()

    @property
    def count(self) -> int:
        """The number of executions."""
        return sum(tally.count for tally in self.tallies)

    @property
    def first(self) -> int:
        """When the first execution was, in ns of the monotonic clock."""
        return min((tally.first for tally in self.tallies if tally.count), default=0)

    @property
    def seconds(self) -> float:
        """The time from the first execution to the last."""
        return (max(tally.last for tally in self.tallies) - self.first) / 1e9


def wait_for(condition: Callable[[], object], seconds: float = 30) -> None:
    """Wait until something is true, and give up with a message."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("the worker did not run what was enqueued")
        time.sleep(0.005)


def about(server: PostgresServer) -> dict[str, Any]:
    """Describe what is measured on what."""
    with psycopg.connect(server.url(driver=None)) as connection:
        settings = {
            name: connection.execute(f"show {name}").fetchone()[0]  # type: ignore[index]
            for name in SHOWN
        }
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "postgresql": server.version,
        **{name: version(name) for name in ("pgtask_sa", "sqlalchemy", "psycopg")},
        "settings": settings,
        "lanes": {f"batch {batch}": lanes for batch, lanes in LANES.items()},
    }


def load_now() -> float:
    """Return the average load of the last minute."""
    return round(os.getloadavg()[0], 2)


def _cpu() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor() or "unknown"
