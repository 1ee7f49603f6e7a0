"""Our own measures, each beside the same work in bare psycopg, in the same run: `make bench`.

Starts a PostgreSQL server of its own, with fsync, and takes turns: one round of the library, one of
bare psycopg, three times; the median counts. A share of 50 % means half as fast as bare psycopg.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import psycopg

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "support"))

import bare
import ours
from postgres_server import PostgresServer
from tally import SPAWN, Tally

SETTINGS: dict[str, str | int] = {
    "shared_buffers": "256MB",
    "max_wal_size": "2GB",
    "shared_preload_libraries": "pg_stat_statements",
    "pg_stat_statements.track": "all",
}
SHOWN = ("fsync", "synchronous_commit", "shared_buffers", "max_wal_size")
# The one that the benchmark of other task queues holds, too: two timed things never overlap.
LOCK = Path(tempfile.gettempdir()) / "queue-bench.lock"

# Four lanes, the worker's default: while one waits for its commit, others work. A batch of 100 is
# bound by Python alone, where a second thread is only in the way.
LANES = {1: 4, 100: 1}

Sizes = dict[str, Any]
FULL: Sizes = {
    "rounds": 3,
    "enqueue": 1000,
    "bulk": 50_000,
    "noop": {1: 2000, 100: 20_000},
    "row": {1: 1000, 100: 5000},
    "pickups": 70,
    "idle": 20.0,
}
QUICK: Sizes = {
    "rounds": 1,
    "enqueue": 200,
    "bulk": 10_000,
    "noop": {1: 400, 100: 3000},
    "row": {1: 200, 100: 1000},
    "pickups": 20,
    "idle": 5.0,
}


class Bench:
    """Runs each measure for either side, in a database that both use in turn."""

    def __init__(self, server: PostgresServer, sizes: Sizes) -> None:
        self.url = server.url(driver=None)
        self.sizes = sizes

    @contextmanager
    def process(self, side: ModuleType, **options: Any) -> Iterator[tuple[Any, Tally]]:
        """Run a worker of a side in a process of its own."""
        tally = Tally()
        worker = SPAWN.Process(target=side.worker, args=(self.url, tally), kwargs=options)
        worker.start()
        try:
            yield worker, tally
        finally:
            worker.terminate()
            worker.join(10)
            worker.kill()

    def fresh(self, side: ModuleType) -> None:
        """Make empty tables, and let the server come to rest."""
        side.reset(self.url)
        self.execute("checkpoint")

    def execute(self, statement: str) -> Any:
        """Execute a statement apart from everything else."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else None

    def enqueue(self, side: ModuleType) -> float:
        """Enqueue one by one, a commit each: tasks per second."""
        self.fresh(side)
        with side.sender(self.url) as send:
            send("noop", 0)
            start = time.perf_counter()
            for number in range(self.sizes["enqueue"]):
                send("noop", number)
            return float(self.sizes["enqueue"] / (time.perf_counter() - start))

    def bulk(self, side: ModuleType) -> float:
        """Enqueue many in one transaction: tasks per second."""
        self.fresh(side)
        start = time.perf_counter()
        side.bulk(self.url, self.sizes["bulk"])
        return float(self.sizes["bulk"] / (time.perf_counter() - start))

    def drain(self, side: ModuleType, kind: str, batch: int, count: int) -> float:
        """Run what waits, from the first handler to the last: tasks per second."""
        self.fresh(side)
        self.execute(
            f"insert into task (task_type, params) select '{kind}', jsonb_build_object('i', g)"
            f" from generate_series(1, {count}) g"
        )
        self.execute("vacuum analyze")
        with self.process(side, concurrency=LANES[batch], batch=batch, drain=True) as running:
            worker, tally = running
            worker.join(120)
        done = (tally.count, *self.execute("select count(*) from task")[0])
        if done != (count, 0):
            raise SystemExit(f"{side.NAME} ran {done[0]} of {count} tasks, {done[1]} are left")
        return count / tally.seconds

    def pickups(self, side: ModuleType, kind: str) -> list[float]:
        """From the return of the enqueue to the start of the handler, 50 ms apart: in ms."""
        self.fresh(side)
        returned: list[int] = []
        count = self.sizes["pickups"]
        running = self.process(side, concurrency=4, batch=1, drain=False)
        with running as (_, tally), side.sender(self.url) as send:
            self.warm_up(send, tally)
            for number in range(count):
                time.sleep(0.05)
                send(kind, number)
                returned.append(time.monotonic_ns())
            wait_for(lambda: tally.count > count)
        return [max(0, tally.started(n) - at) / 1e6 for n, at in enumerate(returned)]

    def warm_up(self, send: Any, tally: Tally) -> None:
        """Wait until the worker runs a task, and then until it is idle."""
        send("noop", 0)
        wait_for(lambda: tally.count > 0)
        time.sleep(0.5)

    def idle(self, side: ModuleType) -> float:
        """Count the statements per second of a worker that has nothing to do."""
        self.fresh(side)
        counted = "select coalesce(sum(calls), 0) from pg_stat_statements"
        running = self.process(side, concurrency=4, batch=1, drain=False)
        with running as (_, tally), side.sender(self.url) as send:
            self.warm_up(send, tally)
            time.sleep(1)
            self.execute("select pg_stat_statements_reset()")
            time.sleep(self.sizes["idle"])
            (calls,) = self.execute(counted)[0]
        return float(calls - 1) / float(self.sizes["idle"])  # without the reset itself


def wait_for(condition: Any, seconds: float = 20) -> None:
    """Wait until something is true, and give up with a message."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("the worker did not run what was enqueued")
        time.sleep(0.01)


def in_turns(rounds: int, measure: Any) -> dict[str, list[Any]]:
    """Let the two sides take turns."""
    found: dict[str, list[Any]] = {"ours": [], "bare": []}
    for _ in range(rounds):
        found["ours"].append(measure(ours))
        found["bare"].append(measure(bare))
    return found


def row(name: str, unit: str, found: dict[str, list[float]]) -> dict[str, Any]:
    """Sum a measure up: medians, the share, and how far the rounds lie apart."""
    mine, other = median(found["ours"]), median(found["bare"])
    part, whole = (mine, other) if unit == "tasks/s" else (other, mine)  # here less is better
    share = part / whole if whole else 1.0
    spreads = [(max(v) - min(v)) / 2 / median(v) if median(v) else 0.0 for v in found.values()]
    return {
        "measure": name,
        "unit": unit,
        "ours": mine,
        "bare": other,
        "share": share,
        "spread": max(spreads),
        "rounds": found,
    }


def measure_all(bench: Bench) -> Iterator[dict[str, Any]]:
    """Run every measure, and give each as soon as it is known."""
    sizes, rounds = bench.sizes, bench.sizes["rounds"]
    yield row("enqueue one by one", "tasks/s", in_turns(rounds, bench.enqueue))
    yield row(f"enqueue {sizes['bulk']:,} in bulk", "tasks/s", in_turns(rounds, bench.bulk))
    for kind, what in (("noop", "no-op"), ("row", "one row each")):
        for batch in (1, 100):
            drain = partial(bench.drain, kind=kind, batch=batch, count=sizes[kind][batch])
            yield row(f"drain, batch {batch}, {what}", "tasks/s", in_turns(rounds, drain))
    yield from measure_pickups(bench, rounds)
    yield row("idle worker", "statements/s", in_turns(1, bench.idle))


def measure_pickups(bench: Bench, rounds: int) -> Iterator[dict[str, Any]]:
    """Measure how soon a task starts on an idle worker, by kind of handler."""
    times: dict[str, list[list[float]]] = {"stamp": [], "async_stamp": [], "bare": []}
    for _ in range(rounds):
        for kind, found in times.items():
            side, what = (bare, "stamp") if kind == "bare" else (ours, kind)
            found.append(sorted(bench.pickups(side, what)))
    for kind, what in (("stamp", "sync"), ("async_stamp", "async")):
        for name, part in (("p50", 0.5), ("p99", 0.99)):
            points = {
                side: [several[min(len(several) - 1, int(part * len(several)))] for several in of]
                for side, of in (("ours", times[kind]), ("bare", times["bare"]))
            }
            yield row(f"pickup, {what} handler, {name}", "ms", points)


def about(server: PostgresServer) -> dict[str, Any]:
    """Describe what was measured on what."""
    with psycopg.connect(server.url(driver=None)) as connection:
        settings = {
            name: connection.execute(f"show {name}").fetchone()[0]  # type: ignore[index]
            for name in SHOWN
        }
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "python": platform.python_version(),
        "postgresql": server.version,
        "packages": {name: version(name) for name in ("pgtask_sa", "sqlalchemy", "psycopg")},
        "settings": settings,
        "lanes": {f"batch {batch}": lanes for batch, lanes in LANES.items()},
        "load_before": round(os.getloadavg()[0], 2),
    }


def show(line: dict[str, Any]) -> None:
    """Print a measure as a line of the table."""
    form = "{:,.0f}" if line["unit"] == "tasks/s" else "{:.2f}"
    mine, other = form.format(line["ours"]), form.format(line["bare"])
    print(
        f"{line['measure']:<34}{mine:>10}{other:>14}  {line['unit']:<13}"
        f"{line['share']:>7.0%}{line['spread']:>9.0%}",
        flush=True,
    )


def main() -> None:
    """Measure, print, and write the figures down if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round, under 30 seconds")
    parser.add_argument("--json", metavar="FILE", help="write everything to this file")
    arguments = parser.parse_args()
    with LOCK.open("a") as lock, PostgresServer(fsync=True, settings=SETTINGS) as server:
        fcntl.flock(lock, fcntl.LOCK_EX)
        facts = about(server)
        for name, value in facts.items():
            print(f"{name}: {value}")
        print(f"\n{'':<34}{ours.NAME:>10}{bare.NAME:>14}{'':<15}{'share':>7}{'± spread':>9}")
        bench = Bench(server, QUICK if arguments.quick else FULL)
        bench.execute("create extension pg_stat_statements")
        lines = []
        for line in measure_all(bench):
            show(line)
            lines.append(line)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({**facts, "measures": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
