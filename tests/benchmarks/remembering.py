"""The measure of memory: whether a worker process grows with the tasks that it has run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import ours
from figures import Curve, Figure
from stage import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stage import Stage

PLOT = "memory_of_a_worker"
STEPS = 10


def memory(stage: Stage) -> Iterator[Figure | Curve]:
    """Look at the memory of a worker process while it runs many tasks."""
    count = stage.sizes["memory"]
    points = samples(stage, count)
    yield Curve(PLOT, "batch 100", points)
    first, *_, last = points
    yield Figure(
        f"memory of a worker process after {count:,} tasks (PSS)",
        "MB",
        [last[1]],
        f"after {count // STEPS:,}",
        [first[1]],
        1.05,
        most=True,
    )


def samples(stage: Stage, count: int) -> list[tuple[float, float]]:
    """Return the memory after each tenth of the tasks."""
    stage.fresh(ours)
    stage.fill(ours, "noop", count)
    stage.rest(ours)
    points = []
    with stage.workers(ours, concurrency=1, batch=100, only=("noop",)) as running:
        for step in range(1, STEPS + 1):
            wait_for(lambda at=count * step // STEPS: running.count >= at, 300)
            points.append((running.count, megabytes(running.processes[0].pid)))
    return points


def megabytes(pid: int | None) -> float:
    """Return the proportional set size of a process: what it shares counts in part."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
    return int(found[1]) / 1024 if found else float("nan")
