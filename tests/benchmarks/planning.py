"""Measures of tasks that wait for their time: beside others, in time, and after failures."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import claims
import ours
from claims import FIVE
from figures import Figure, in_turns, percentile
from stage import wait_for
from turns_taken import claims_engine, compared
from waking import PARTS, trickle

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine
    from stage import Stage

LATER = {"run_at": "now() + interval '7 days' + g * interval '1 ms'"}
JUST_DUE = {"run_at": "now() - g * interval '1 ms'"}
FEW = 100
EVERY = 0.137  # seconds from one due task to the next, of no beat with anything else
PLAN = "now() + interval '3 s' + g * interval '{ms} ms'"


def planned(stage: Stage) -> Iterator[Figure]:
    """Claim where a crowd waits for next week, and where a few are due beside a crowd."""
    engine, crowd = claims_engine(stage), stage.sizes["crowd"]
    few = claim_times(stage, engine, (FEW, {}))
    own = claim_times(stage, engine, (crowd, LATER), (FEW, {}))
    yield from compared(
        f"claim of {FEW} ready, {crowd:,} due next week", own, f"{FEW} ready alone", few, 1.5
    )
    many = claim_times(stage, engine, (crowd, {}))
    own = claim_times(stage, engine, (crowd, {}), (FEW, JUST_DUE))
    yield from compared(
        f"claim of {crowd:,} ready and {FEW} just due", own, f"{crowd:,} ready alone", many, 1.5
    )
    engine.dispose()


def claim_times(
    stage: Stage, engine: Engine, *parts: tuple[int, dict[str, str]]
) -> list[claims.Line]:
    """Fill the queue once and measure it in rounds: a million rows are no figure to wait for."""
    claims.fill(engine, *parts)
    measure = partial(claims.measure, engine, "", "", FIVE, seconds=stage.sizes["claim_seconds"])
    (found,) = in_turns(stage.rounds, measure)
    return found


def due(stage: Stage) -> Iterator[Figure]:
    """Plan tasks one after another, and see how late an idle worker starts them."""
    count = stage.sizes["due"]
    (found,) = in_turns(stage.rounds, partial(late_by, stage, count))
    for part, share in (*PARTS.items(), ("max", 1.0)):
        yield Figure(
            f"{count} tasks due one by one, idle worker: late by, {part}",
            "ms",
            [percentile(times, share) for times in found],
            limit=50.0,
            absolute=True,
            most=True,
        )


def late_by(stage: Stage, count: int) -> list[float]:
    """Return by how much each started after its time, in ms."""
    columns = {"run_at": PLAN.format(ms=1000 * EVERY)}
    with stage.idle_worker(ours, "stamp") as (running, _):
        (tally,) = running.tallies
        stage.fill(ours, "stamp", count, **columns)
        rows = stage.execute(
            ours.DATABASE, "select (params->>'i')::int, extract(epoch from run_at) from task"
        )
        wait_for(lambda: all(tally.started(n) for n, _ in rows), 30 + count * EVERY)
        clock = time.time() - time.monotonic()
    return [1000 * (tally.started(n) / 1e9 + clock - float(at)) for n, at in rows]


def failing(stage: Stage) -> Iterator[Figure]:
    """Trickle good tasks beside a crowd that always fails, and on a quiet system."""
    crowd = stage.sizes["failing"]
    own, quiet = in_turns(
        stage.rounds, partial(beside_failing, stage, crowd), partial(beside_failing, stage, 0)
    )
    for part, share in PARTS.items():
        yield Figure(
            f"pickup of good tasks beside {crowd:,} that always fail, {part}",
            "ms",
            [percentile(times, share) for times in own],
            "the same, quiet",
            [percentile(times, share) for times in quiet],
            3.0,
            most=True,
        )


def beside_failing(stage: Stage, crowd: int) -> list[float]:
    """Return how long good tasks waited, in ms."""
    with stage.idle_worker(ours, "stamp", "fail") as (running, send):
        if crowd:
            stage.fill(ours, "fail", crowd)
            wait_for(lambda: failures(stage) >= min(crowd, FEW))
        return trickle(running, send, "stamp", stage.sizes["pickups"])


def failures(stage: Stage) -> int:
    """Count the tasks that have failed at least once."""
    counted = "select count(*) from task where attempts > 0"
    return int(stage.execute(ours.DATABASE, counted)[0][0])
