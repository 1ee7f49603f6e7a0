"""The measure of claims by depth of the queue, in each order: also the plot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import claims
from claims import FIVE
from figures import Curve, Figure
from turns_taken import CLAIMS, claims_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stage import Stage

PLOT = "claim_by_depth"
ORDERS = ("fair", "random", "tablesample")


def by_depth(stage: Stage) -> Iterator[Figure | Curve]:
    """Claim in each order, at each depth."""
    found: dict[str, list[tuple[int, claims.Line]]] = {order: [] for order in ORDERS}
    engine, seconds = claims_engine(stage), stage.sizes["claim_seconds"]
    depth = 1000
    while depth <= stage.sizes["deepest"]:
        claims.fill(engine, (depth, {}))
        for order, lines in found.items():
            line = claims.measure(engine, "", "", FIVE, seconds=seconds, order=order)
            lines.append((depth, line))
        depth *= 10
    engine.dispose()
    stage.drop(CLAIMS)
    for order, lines in found.items():
        yield Curve(PLOT, order, [(at, line.p50) for at, line in lines])
        yield from table(order, lines)


def table(order: str, lines: list[tuple[int, claims.Line]]) -> Iterator[Figure]:
    """Put each depth beside the smallest one."""
    (start, first), *_ = lines
    for depth, line in lines:
        yield Figure(
            f"one claim in order {order}, {depth:,} waiting, p50",
            "ms",
            [line.p50],
            f"{start:,} waiting",
            [first.p50],
        )
