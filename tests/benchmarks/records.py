"""What the records of tasks in flight cost: drains with and without them, in turns.

Before its handlers start, a lane commits on a second connection what it has claimed. Here some
workers do so, and others only pretend to. A pair of drains follows another, each pair in another
order; the figures are of the ratio within each pair, so that a slow change of the machine cancels
out. On a machine with other work the throughput says little, and the processor time much more: that
of the worker, and that of its connections' server processes.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import psycopg
from figures import Figure, in_turns
from ours import handlers, reset
from stage import LANES, LOCK, SETTINGS, SPAWN, PostgresServer
from tally import Tally

from pgtask_sa import Worker
from pgtask_sa.presence import Presence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stage import Stage

TASKS = {1: 4000, 100: 40_000}
# The most that the records may cost, in per cent of the throughput.
LIMITS = {1: 15.0, 100: 5.0}
# Coroutines wait together: the more lanes there are, the more of their notes travel together.
CASES = (
    ("noop", 4, 1),
    ("noop", 2, 100),
    ("async_noop", 4, 1),
    ("async_noop", 16, 1),
    ("async_noop", 2, 100),
)
FILL = (
    "insert into task (task_type, params) select '{kind}', jsonb_build_object('i', g)"
    " from generate_series(1, {count}) g"
)


@dataclass(frozen=True)
class Drain:
    """What one drain came to: tasks per second, and microseconds of processor time per task."""

    rate: float
    worker: float
    server: float


def drain(url: str, tally: Tally, spent: Any, *, lanes: int, batch: int, noted: bool) -> None:
    """Run what waits, in a process of its own."""
    if not noted:
        Presence.note = lambda *_: None  # type: ignore[method-assign]
        Presence.is_noting = False  # type: ignore[assignment,method-assign]
        Presence.own_row = lambda *_: None  # type: ignore[method-assign]
    worker = Worker(handlers(tally), url, concurrency=lanes, batch_size=batch, drain=True)
    before = time.process_time()
    worker.run()
    spent.value = time.process_time() - before


def server_time(pid: int) -> float:
    """Return the processor time of the server processes that have ended, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def measure(  # noqa: PLR0917
    server: PostgresServer, kind: str, lanes: int, batch: int, count: int, *, noted: bool
) -> Drain:
    """Drain a full table, from the first handler to the last."""
    url = server.url(driver=None)
    reset(url)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(FILL.format(kind=kind, count=count))
        for statement in ("vacuum analyze", "checkpoint"):
            connection.execute(statement)
    tally, spent = Tally(), SPAWN.Value("d", 0.0)
    postmaster = int((server.home / "data" / "postmaster.pid").read_text().split()[0])
    before = server_time(postmaster)
    options = {"lanes": lanes, "batch": batch, "noted": noted}
    worker = SPAWN.Process(target=drain, args=(url, tally, spent), kwargs=options)
    worker.start()
    worker.join(120)
    if tally.count != count:
        raise SystemExit(f"{tally.count} of {count} tasks were run")
    times = (spent.value, server_time(postmaster) - before)
    return Drain(tally.count / tally.seconds, *(1e6 * each / tally.count for each in times))


def compare(
    server: PostgresServer, kind: str, lanes: int, batch: int, rounds: int
) -> dict[str, Any]:
    """Take turns, and sum up: medians, and the cost in per cent with its quartiles."""
    pairs: list[tuple[Drain, Drain]] = []
    for number in range(rounds):
        order = (True, False) if number % 2 else (False, True)
        pair = {
            noted: measure(server, kind, lanes, batch, TASKS[batch], noted=noted) for noted in order
        }
        pairs.append((pair[True], pair[False]))
    costs = [100 * (1 - noted.rate / plain.rate) for noted, plain in pairs]
    return {
        "kind": kind,
        "lanes": lanes,
        "batch": batch,
        "cost": spread(costs),
        "limit": LIMITS[batch],
        "rate": middle(pairs, "rate"),
        "worker": middle(pairs, "worker"),
        "server": middle(pairs, "server"),
        "pairs": [(asdict(noted), asdict(plain)) for noted, plain in pairs],
    }


def spread(values: list[float]) -> tuple[float, ...]:
    """Return the quartiles, the median in the middle."""
    return tuple(quantiles(values, n=4)) if len(values) > 1 else tuple(values * 3)


def middle(pairs: list[tuple[Drain, Drain]], name: str) -> tuple[float, float]:
    """Return the medians of a figure, with the records and without."""
    noted, plain = ([getattr(drain, name) for drain in side] for side in zip(*pairs, strict=True))
    return median(noted), median(plain)


def notes(stage: Stage) -> Iterator[Figure]:
    """Drain with notes of what runs, and without: sync and async handlers."""
    for kind, lanes, batch in CASES:
        count = stage.sizes["single" if batch == 1 else "batched"]
        given = (stage.server, kind, lanes, batch, count)
        with_notes, without = in_turns(
            stage.rounds * 3,
            lambda given=given: measure(*given, noted=True).rate,
            lambda given=given: measure(*given, noted=False).rate,
        )
        handlers = "async" if kind.startswith("async") else "sync"
        what = f"drain of no-ops, {handlers} handlers, {lanes} lanes, batch {batch}, noted"
        limit = 1 - LIMITS[batch] / 100
        yield Figure(what, "tasks/s", with_notes, "without notes", without, limit)


def compare_all(
    server: PostgresServer, rounds: int, kinds: list[str], batches: list[int]
) -> Iterator[dict[str, Any]]:
    """Compare each kind of handler, one at a time and in batches."""
    for kind in kinds:
        for batch in batches:
            yield compare(server, kind, LANES[batch], batch, rounds)


def show(line: dict[str, Any]) -> None:
    """Print a comparison as a line of the table."""
    low, cost, high = line["cost"]
    verdict = "" if cost <= line["limit"] else f"  over {line['limit']:.0f} %"
    figures = "".join(
        f"{f'{noted:,.0f} / {plain:,.0f}':>17}"
        for noted, plain in (line[name] for name in ("rate", "worker", "server"))
    )
    cost_text = f"{cost:>8.1f} %  ({low:.1f} to {high:.1f} %)"
    print(f"{line['kind']:<12}{line['batch']:>6}{figures}{cost_text}{verdict}", flush=True)


def main() -> None:
    """Measure, print, and write the figures down if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="pairs of drains (default: 8)")
    parser.add_argument("--kinds", nargs="+", default=["noop", "async_noop"])
    parser.add_argument("--batches", nargs="+", type=int, choices=TASKS, default=list(TASKS))
    parser.add_argument("--json", metavar="FILE", help="write everything to this file")
    arguments = parser.parse_args()
    with LOCK.open("a") as lock, PostgresServer(fsync=True, settings=SETTINGS) as server:
        fcntl.flock(lock, fcntl.LOCK_EX)
        load = os.getloadavg()[0]
        print(f"PostgreSQL {server.version}, {os.cpu_count()} cores, load before: {load:.2f}")
        print("with / without the records; processor time in microseconds per task\n")
        print(f"{'':<12}{'batch':>6}{'tasks/s':>17}{'worker':>17}{'server':>17}{'cost':>10}")
        lines = []
        chosen = arguments.kinds, arguments.batches
        for line in compare_all(server, arguments.rounds, *chosen):
            show(line)
            lines.append(line)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
