"""Measures of fairness: who gets its turn, and what turns cost."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import claims
import ours
from claims import FIVE, MANY
from figures import Figure, in_turns
from sqlalchemy import create_engine
from stage import wait_for

from pgtask_sa.claim_orders import ClaimOptions
from pgtask_sa.turns import Claimer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine
    from stage import Stage

CLAIMS = "claims"  # the database of claims that are given back
RARE = 10
WEIGHTS = {"A": 1.0, "B": 2.0, "C": 3.0, "D": 4.0}


def claims_engine(stage: Stage) -> Engine:
    """Make an engine on a database in which there is nothing else."""
    stage.url(CLAIMS)
    return create_engine(stage.server.url(CLAIMS))


def fair(stage: Stage) -> Iterator[Figure]:
    """Run a crowd of one type and a few of another, and see when the few are done."""
    crowd = stage.sizes["crowd"]
    stage.fresh(ours)
    stage.fill(ours, "CROWD", crowd)
    stage.rest(ours)
    found = [rare_done(stage) for _ in range(stage.rounds)]
    yield Figure(
        f"{crowd:,} of one type, {RARE} of another, 4 lanes: claims until the {RARE} are done",
        "claims",
        found,
        limit=100,
        absolute=True,
        most=True,
    )


def rare_done(stage: Stage) -> int:
    """Return how many claims there were when the last of the few was run."""
    stage.fill(ours, "RARE", RARE)
    log = run_logged(stage, {"CROWD": 0, "RARE": 1}, 1000)
    if sum(log) != RARE:
        raise SystemExit(f"{sum(log)} of {RARE} were run in {len(log)} claims")
    return max(place for place, kind in enumerate(log, 1) if kind)


def run_logged(stage: Stage, kinds: dict[str, int], count: int, **options: Any) -> list[int]:
    """Let a worker run so many tasks and some more, and return what they were."""
    run = {"concurrency": 4, "batch": 1, "log": kinds, **options}
    with stage.workers(ours, **run) as running:
        wait_for(lambda: running.count >= count, 300)
    return running.tallies[0].log()


def weighted(stage: Stage) -> Iterator[Figure]:
    """Run tasks of types that have weights, and see how far their shares are off."""
    count = stage.sizes["claims"]
    found = [worst_share(stage, count) for _ in range(stage.rounds)]
    yield Figure(
        f"weights 1:2:3:4, {count:,} claims, 4 lanes: largest deviation of a share",
        "%",
        found,
        limit=5.0,
        absolute=True,
        most=True,
        note="Of the share itself: 19 instead of 20 of a hundred are 5 %",
    )


def worst_share(stage: Stage, count: int) -> float:
    """Return by how much the worst share is off, in per cent of what it should be."""
    stage.fresh(ours)
    for name in WEIGHTS:
        stage.fill(ours, name, count)
    stage.rest(ours)
    kinds = {name: number for number, name in enumerate(WEIGHTS)}
    log = run_logged(stage, kinds, count, weights=WEIGHTS)[:count]
    whole = sum(WEIGHTS.values())
    shares = [(log.count(kinds[name]) / count, w / whole) for name, w in WEIGHTS.items()]
    return max(100 * abs(got / wanted - 1) for got, wanted in shares)


def kinds(stage: Stage) -> Iterator[Figure]:
    """Claim with few and with many registered types."""
    engine, seconds = claims_engine(stage), stage.sizes["claim_seconds"]
    depth = stage.sizes["crowd"] // 10
    claims.fill(engine, (depth, {}))
    measure = partial(claims.measure, engine, "", "", seconds=seconds / 2)
    # many short rounds, as the difference is small
    many, few = in_turns(3 * stage.rounds, partial(measure, MANY), partial(measure, FIVE))
    what = f"claim of {depth:,}, {len(MANY)} registered types"
    yield from compared(what, many, f"{len(FIVE)} registered types", few, 1.1)
    claims.fill(engine, (depth, {"task_type": "'K' || g % 500"}))
    (every,) = in_turns(stage.rounds, partial(measure, MANY))
    yield from compared(f"claim of {depth:,}, all of 500 types wait", every, "5 wait", few)
    engine.dispose()


def compared(
    what: str,
    own: list[claims.Line],
    beside: str,
    other: list[claims.Line],
    limit: float | None = None,
) -> Iterator[Figure]:
    """Put two kinds of claims beside each other."""
    for part, most in (("p50", limit), ("p99", None)):
        mine, others = ([getattr(each, part) for each in side] for side in (own, other))
        yield Figure(f"{what}, {part}", "ms", mine, beside, others, most, most=True)


def tenants(stage: Stage) -> Iterator[Figure]:
    """Claim in turns of many tenants: what it costs, and whether everybody has a turn."""
    engine, seconds = claims_engine(stage), stage.sizes["claim_seconds"]
    depth, count = stage.sizes["crowd"], stage.sizes["tenants"]
    # nearly everything is of one of them, and each of them has something
    crowd = f"case when g <= {count} then g when g % 100 = 0 then g % {count} else 7 end"
    claims.fill(engine, (depth, {"tenant_id": crowd}))
    by_key = partial(claims.measure, engine, "", "", FIVE, seconds=seconds, fair_by="tenant_id")
    by_type = partial(claims.measure, engine, "", "", FIVE, seconds=seconds)
    own, other = in_turns(stage.rounds, by_key, by_type)
    what = f"claim of {depth:,} of {count:,} tenants, 99 % of one, by tenant"
    yield from compared(what, own, "the same queue, turns by type", other)
    served = tenants_served(engine, count)
    yield Figure(
        f"{count:,} claims of {count:,} tenants, 1 lane: tenants that had a turn",
        "tenants",
        [served],
        limit=0.99 * count,
        absolute=True,
    )
    engine.dispose()


def tenants_served(engine: Engine, count: int) -> int:
    """Claim and commit so often, and count the tenants among it."""
    claimer = Claimer(claims.Job.__table__, FIVE, ClaimOptions(fair_by="tenant_id"))
    seen = set()
    with engine.connect() as connection:
        for _ in range(count):
            for row in claims.claim_once(connection, claimer)[1]:
                seen.add(row["tenant_id"])
            connection.commit()
    return len(seen)
