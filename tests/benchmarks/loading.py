"""The measure of pickups under load: how long a task waits while a worker is more or less busy."""

from __future__ import annotations

import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import bare
import ours
import psycopg
from figures import Curve, Figure, in_turns, percentile
from stage import SPAWN
from waking import send_all, waits

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stage import Stage

PLOT = "pickup_under_load"
TICK = 0.01  # seconds
EVERY = 0.02  # seconds from probe to probe
# of the type of the probes, or they would get a turn of their own
LOAD = (
    "insert into task (task_type, params)"
    " select 'stamp', '{\"i\": -1}' from generate_series(1, %s::int)"
)


def under_load(stage: Stage) -> Iterator[Figure | Curve]:
    """Measure pickups while other tasks come at a steady rate, one claim and commit each."""
    curves: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for load in stage.sizes["loads"]:
        sides = [partial(times_at, stage, side, load) for side in (ours, bare)]
        own, other = in_turns(1, *sides)
        for side, (times,) in ((ours, own), (bare, other)):
            for part, share in (("p50", 0.5), ("p99", 0.99)):
                point = (load, percentile(times, share))
                curves.setdefault((side.NAME, part), []).append(point)
    for (name, part), points in curves.items():
        yield Curve(PLOT, f"{name}, {part}", points)
    yield from (line(stage, curves, part) for part in ("p50", "p99"))


def line(stage: Stage, curves: Any, part: str) -> Figure:
    """Sum up what the plot shows, at half of the loads."""
    middle = len(stage.sizes["loads"]) // 2
    (load, own), (_, other) = (curves[side.NAME, part][middle] for side in (ours, bare))
    what = f"pickup beside {load:,} other tasks/s, batch 1, {part}"
    return Figure(what, "ms", [own], "bare psycopg, the oldest first", [other])


def times_at(stage: Stage, side: Any, load: int) -> list[float]:
    """Return how long the probes waited, in ms."""
    probes = max(10, round(stage.sizes["load_seconds"] / EVERY))
    with stage.idle_worker(side, "stamp") as (running, send):
        with loader(stage, side, load):
            time.sleep(min(1.0, stage.sizes["load_seconds"]))
            returned = send_all(send, "stamp", probes, EVERY)
        return waits(running, returned)


@contextmanager
def loader(stage: Stage, side: Any, load: int) -> Iterator[None]:
    """Run a process that enqueues so many tasks per second."""
    process = SPAWN.Process(target=keep_loading, args=(stage.url(side.DATABASE), load))
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def keep_loading(url: str, load: int) -> None:
    """Enqueue a few tasks every `TICK`, in one statement."""
    start, sent = time.monotonic(), 0
    with psycopg.connect(url, autocommit=True) as connection:
        while True:
            time.sleep(TICK)
            due = int((time.monotonic() - start) * load) - sent
            if due:
                connection.execute(LOAD, (due,), prepare=True)
                sent += due
