"""What a measure yields: a figure, which becomes a line of the table, or a curve of a plot."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Figure:
    """What was asked, what came out in each round, and beside what it is to be seen.

    ``limit`` is of the ratio, ours to the other, or with ``absolute`` of ours itself; with ``most``
    it is not to be exceeded. None: nothing was asked, the figure is for information.
    """

    what: str
    unit: str
    ours: Sequence[float]
    beside: str = ""  # what the other rounds are of
    other: Sequence[float] = ()
    limit: float | None = None
    absolute: bool = False
    most: bool = False
    note: str = ""

    @property
    def value(self) -> float:
        """Ours: the median of the rounds."""
        return median(self.ours)

    @property
    def base(self) -> float | None:
        """The other's: the median of the rounds."""
        return median(self.other) if self.other else None

    @property
    def ratio(self) -> float | None:
        """Ours to the other's."""
        return self.value / self.base if self.base else None

    @property
    def spread(self) -> float | None:
        """How far the rounds lie apart, at most: half of that, to the median."""
        sides = [side for side in (self.ours, self.other) if len(side) > 1 and median(side)]
        spreads = [(max(side) - min(side)) / 2 / median(side) for side in sides]
        return max(spreads, default=None)

    @property
    def met(self) -> bool | None:
        """Whether it is as asked."""
        judged = self.value if self.absolute else self.ratio
        if self.limit is None or judged is None:
            return None
        return judged <= self.limit if self.most else judged >= self.limit

    @property
    def target(self) -> str:
        """What was asked, in words."""
        if self.limit is None:
            return ""
        unit = self.unit if self.absolute else "x"
        return f"{'at most' if self.most else 'at least'} {self.limit:,g} {unit}"

    def as_dict(self) -> dict[str, Any]:
        """Return everything, also what is computed."""
        names = ("value", "base", "ratio", "spread", "met", "target")
        return {**asdict(self), **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True)
class Curve:
    """A line of a plot: points of x and y."""

    plot: str  # the name of its file
    label: str
    points: Sequence[tuple[float, float]]

    def as_dict(self) -> dict[str, Any]:
        """Return everything."""
        return asdict(self)


def figure_from(known: Mapping[str, Any]) -> Figure:
    """Make a figure again from what `Figure.as_dict` returned."""
    return Figure(**{name: known[name] for name in Figure.__dataclass_fields__})


def in_turns(rounds: int, *measures: Callable[[], Any]) -> list[list[Any]]:
    """Let measures take turns, so that a slow change of the machine is the same for all of them."""
    found: list[list[Any]] = [[] for _ in measures]
    for _ in range(rounds):
        for results, measure in zip(found, measures, strict=True):
            results.append(measure())
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is not smaller than such a share of them."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
