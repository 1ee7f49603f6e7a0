"""Measures of drains: no-ops and rows, one by one and in batches, and at great depth."""

from __future__ import annotations

import time
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import bare
import ours
from figures import Figure, in_turns
from stage import LANES, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stage import Stage

WHAT = {"noop": "no-ops", "row": "one row each"}
DEEP_BATCH = 200
# at least, of bare psycopg: one by one, and the best batches of either side
SHARES = {("noop", 1): 0.7, ("row", 1): 0.7, ("row", 0): 0.4}


def drains(stage: Stage) -> Iterator[Figure]:
    """Drain no-ops and tasks that write a row, in batches of all sizes."""
    for processes in (1, 2):
        for kind in WHAT:
            yield from by_batch(stage, kind, processes)


def by_batch(stage: Stage, kind: str, processes: int) -> Iterator[Figure]:
    """Drain one kind of task; the best batches of either side make a line of their own."""
    found: dict[int, list[list[float]]] = {}
    plural = "es" if processes > 1 else ""
    what = f"drain of {WHAT[kind]}, {processes} process{plural}, batch"
    for batch in LANES:
        sides = [partial(drain, stage, side, kind, batch, processes) for side in (ours, bare)]
        found[batch] = own, other = in_turns(stage.rounds, *sides)
        limit = SHARES.get((kind, batch)) if processes == 1 else None
        yield Figure(f"{what} {batch}", "tasks/s", own, "bare psycopg, pipelined", other, limit)
    best = [max(found, key=lambda batch: median(found[batch][side])) for side in (0, 1)]
    limit = SHARES.get((kind, 0)) if processes == 1 else None
    yield Figure(
        f"{what} {best[0]}, our best",
        "tasks/s",
        found[best[0]][0],
        f"bare psycopg, its best batch {best[1]}",
        found[best[1]][1],
        limit,
    )


def drain(stage: Stage, side: Any, kind: str, batch: int, processes: int) -> float:
    """Run what waits, from the first handler to the last: tasks per second."""
    count = stage.sizes["single" if batch == 1 else "batched"]
    stage.fresh(side)
    stage.fill(side, kind, count)
    stage.rest(side)
    options = {"concurrency": LANES[batch], "batch": batch, "drain": True, "only": (kind,)}
    with stage.workers(side, processes, **options) as running:
        running.join(120)
    done = running.count, stage.left(side)
    if done != (count, 0):
        raise SystemExit(f"{side.NAME} ran {done[0]} of {count} tasks, {done[1]} are left")
    return count / running.seconds


def deep(stage: Stage) -> Iterator[Figure]:
    """Drain some seconds of a deep queue, beside a shallow one and beside bare psycopg."""
    depth, shallow = stage.sizes["deep"], stage.sizes["shallow"]
    own, other, one, psycopg = in_turns(
        stage.rounds,
        partial(depth_rate, stage, ours, "deep_ours", depth),
        partial(depth_rate, stage, ours, "shallow_ours", shallow),
        partial(depth_rate, stage, ours, "deep_ours", depth, 1),
        partial(depth_rate, stage, bare, "deep_bare", depth),
    )
    what = f"drain of no-ops, {depth:,} waiting, batch"
    yield beside_shallow(depth, shallow, own, other, 0.9)
    yield Figure(f"{what} {DEEP_BATCH}", "tasks/s", own, "bare psycopg, pipelined", psycopg)
    yield Figure(f"{what} 1", "tasks/s", one)
    for name in ("deep_ours", "shallow_ours", "deep_bare"):
        stage.drop(name)


def deepest(stage: Stage) -> Iterator[Figure]:
    """Drain some seconds of a very deep queue, beside a shallow one."""
    depth, shallow = stage.sizes["deepest"], stage.sizes["shallow"]
    own, other = in_turns(
        stage.rounds,
        partial(depth_rate, stage, ours, "deep_ours", depth),
        partial(depth_rate, stage, ours, "shallow_ours", shallow),
    )
    yield beside_shallow(depth, shallow, own, other, 0.8)
    for name in ("deep_ours", "shallow_ours"):
        stage.drop(name)


def beside_shallow(
    depth: int, shallow: int, own: list[float], other: list[float], limit: float
) -> Figure:
    """Put two depths beside each other."""
    what = f"drain of no-ops, {depth:,} waiting, batch {DEEP_BATCH}"
    return Figure(what, "tasks/s", own, f"the same with {shallow:,} waiting", other, limit)


class Apart:
    """A side with a database of its own."""

    def __init__(self, side: Any, database: str) -> None:
        self.side = side
        self.DATABASE = database

    def __getattr__(self, name: str) -> Any:
        return getattr(self.side, name)


def depth_rate(
    stage: Stage, side: Any, database: str, depth: int, batch: int = DEEP_BATCH
) -> float:
    """Drain for some seconds a queue that is filled up before: tasks per second."""
    there: Any = Apart(side, database)
    if not stage.execute(database, "select to_regclass('task')")[0][0]:
        stage.fresh(there)
    stage.fill(there, "noop", depth - stage.left(there))
    stage.rest(there)
    options = {"concurrency": LANES[batch], "batch": batch, "only": ("noop",)}
    with stage.workers(there, **options) as running:
        wait_for(lambda: running.count > 0, 120)
        end = running.first + round(stage.sizes["deep_seconds"] * 1e9)
        while (count := running.count) < depth and time.monotonic_ns() < end:
            time.sleep(0.002)
        if count >= depth:
            return count / running.seconds
        return count / ((time.monotonic_ns() - running.first) / 1e9)
