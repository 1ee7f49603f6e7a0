"""Minutes of steady load while somebody holds a snapshot: does anything grow? `make soak`.

Starts a PostgreSQL server of its own, with fsync and with autovacuum as the mapping sets it. One
process enqueues at a steady rate; some tasks are delayed, some fail at first. A snapshot that is
held open, by a report or a dump say, keeps every dead row of the database from being cleaned up:
what a queue leaves behind, and what its workers leave behind in their notes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import psycopg

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "support"))

from postgres_server import PostgresServer
from soak_load import LANES, Counters, enqueuer, worker
from soak_samples import Sample, Sampler, held_snapshot
from sqlalchemy import text
from tally import SPAWN

from pgtask_sa import Task

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTINGS: dict[str, str | int] = {
    "shared_buffers": "256MB",
    "max_wal_size": "2GB",
    "shared_preload_libraries": "pg_stat_statements",
    "autovacuum_naptime": "15s",
}
GREW = 2.0  # times as much in the last quarter as in the first is growth
FLOORS = {"real_claim": 1.0, "real_look": 5.0, "real_note": 1.0, "late_p50": 20.0, "late_p99": 100}


class Soak:
    """The processes of a soak, and the looks at it.

    Args:
        url: of a database with the tables in it.
        rate: tasks per second.
        seconds: how long they are enqueued.
        workers: processes.
        lanes: of each of them.
    """

    def __init__(
        self, url: str, rate: float, seconds: float, *, workers: int, lanes: int = LANES
    ) -> None:
        self.counters = [Counters() for _ in range(workers)]
        self.sent: Any = SPAWN.Value("q", 0)
        load = (url, rate, seconds, self.sent)
        self._enqueuer = SPAWN.Process(target=enqueuer, args=load)
        self._workers = [
            SPAWN.Process(target=worker, args=(url, each, lanes)) for each in self.counters
        ]
        self.sampler = Sampler(url, self.counters, lambda: self.sent.value)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start everything, and end what is left of it."""
        processes = [*self._workers, self._enqueuer]
        try:
            for process in processes:
                process.start()
            yield
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.join(20)
                process.kill()

    def samples(self, every: float) -> Iterator[Sample]:
        """Look every so many seconds as long as tasks are enqueued."""
        while self._enqueuer.is_alive():
            self._enqueuer.join(every)
            if self._enqueuer.is_alive():
                yield self.sampler.look()

    def drained(self, timeout: float) -> bool:
        """Wait until every task is done; False if that takes too long."""
        deadline = time.monotonic() + timeout
        while self.sampler.done() < self.sent.value and time.monotonic() < deadline:
            time.sleep(0.1)
        return self.sampler.done() == self.sent.value

    def left(self) -> dict[str, int]:
        """Count what is still in the tables."""
        with self.sampler.engine.connect() as connection:
            return {
                name: int(connection.scalar(text(f"select count(*) from {name}")) or 0)
                for name in ("task", "dead_task")
            }


COLUMNS = {
    "s": ("at", "{:.0f}", 5),
    "done": ("done", "{:,}", 9),
    "backlog": ("backlog", "{:,}", 8),
    "lottery": ("claim_p50", "{:.2f}", 9),
    "max": ("claim_p99", "{:.2f}", 8),
    "new": ("claim_new", "{:.2f}", 8),
    "due": ("claim_due", "{:.2f}", 8),
    "buffers": ("buffers", "{:,}", 9),
    "claim": ("real_claim", "{:.2f}", 8),
    "look": ("real_look", "{:.2f}", 8),
    "note": ("real_note", "{:.2f}", 7),
    "dead tasks": ("dead_tasks", "{:,}", 11),
    "notes": ("dead_notes", "{:,}", 9),
    "late p50": ("late_p50", "{:,.1f}", 10),
    "p99": ("late_p99", "{:,.1f}", 9),
    "due p50": ("due_p50", "{:,.0f}", 8),
    "due p99": ("due_p99", "{:,.0f}", 8),
    "index MB": ("sizes", "{}", 9),
}


def heading() -> str:
    """Return the first line of the table; times are in ms."""
    return "".join(f"{name:>{width}}" for name, (_, _, width) in COLUMNS.items())


def line(sample: Sample) -> str:
    """Return a sample as a line of the table."""
    cells = []
    for key, form, width in COLUMNS.values():
        value = getattr(sample, key)
        if key == "sizes":
            value = f"{sum(s for n, s in value.items() if n != 'task' and '_' in n) / 1e6:.1f}"
        cells.append(f"{'-' if value is None else form.format(value):>{width}}")
    return "".join(cells)


def growth(samples: list[Sample]) -> dict[str, tuple[float, float, bool]]:
    """Compare the last quarter with the first, of what should stay as it is."""
    part = max(1, len(samples) // 4)
    found = {}
    for name, floor in FLOORS.items():
        ends = [
            [v for s in some if (v := getattr(s, name)) is not None]
            for some in (samples[:part], samples[-part:])
        ]
        if all(ends):
            first, last = (median(values) for values in ends)
            found[name] = (first, last, last > floor and last > GREW * first)
    return found


def tell(result: dict[str, Any]) -> None:
    """Print what it came to."""
    print(f"\nsent {result['sent']:,}, done {result['done']:,}, left {result['left']}")
    print(f"drained within {result['drain_seconds']:.1f} s of the last enqueue")
    for name, (first, last, grew) in result["growth"].items():
        print(f"{name:<12}{first:>10.2f} ms -> {last:.2f} ms{'   GREW' if grew else ''}")
    print("\nwhere the time of the server went: ms, calls, ms each")
    for spent, calls, query in result["dearest"]:
        shown = " ".join(query.split())
        shown = shown if len(shown) < 70 else f"{shown[:40]} .. {shown[-25:]}"
        print(f"{spent:>10,.0f}{calls:>10,}{spent / calls:>8.2f}  {shown}")


def soak(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run it to the end, printing each sample."""
    run = Soak(url, options.rate, options.seconds, workers=options.workers)
    Task.metadata.create_all(run.sampler.engine)
    samples = []
    print(heading())
    with ExitStack() as stack:
        holding = held_snapshot(run.sampler.engine) if options.snapshot else nullcontext()
        stack.enter_context(run.running())
        stack.enter_context(holding)
        for sample in run.samples(options.every):
            samples.append(sample)
            print(line(sample), flush=True)
        start = time.monotonic()
        run.drained(options.patience)
        drain_seconds = time.monotonic() - start
    return {
        "options": vars(options),
        "sent": run.sent.value,
        "done": run.sampler.done(),
        "left": run.left(),
        "drain_seconds": drain_seconds,
        "growth": growth(samples),
        "dearest": run.sampler.dearest(),
        "samples": [sample.as_json() for sample in samples],
    }


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=800, help="tasks per second (default: 800)")
    parser.add_argument("--seconds", type=float, default=600, help="how long (default: 600)")
    parser.add_argument("--every", type=float, default=10, help="seconds between two looks")
    parser.add_argument("--workers", type=int, default=2, help="processes, of four lanes each")
    parser.add_argument("--patience", type=float, default=120, help="seconds to drain at the end")
    parser.add_argument("--no-snapshot", dest="snapshot", action="store_false")
    parser.add_argument("--json", metavar="FILE", help="write everything to this file")
    return parser.parse_args()


def main() -> int:
    """Soak, print, and write the figures down if asked to; 1 if a task was lost or left."""
    options = arguments()
    with PostgresServer(fsync=True, settings=SETTINGS) as server:
        print(f"PostgreSQL {server.version}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}")
        print(f"{options.rate:g} tasks/s, a snapshot is held: {options.snapshot}; times in ms")
        url = server.url()
        with psycopg.connect(server.url(driver=None)) as connection:
            connection.execute("create extension pg_stat_statements")
        result = soak(url, options)
    tell(result)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    return int(result["done"] != result["sent"] or any(result["left"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
