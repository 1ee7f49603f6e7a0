"""The orders of claims: which statement is sent, with what, and in what order its tasks run.

`Plain` orders stand in the statement itself. With `ByType` and `ByKey` the order is what they are
given, pairs of priority and type that wait; who gives it, and how it is made: see `turns`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import itemgetter
from typing import Any, Literal, Protocol, TypeAlias, get_args

from sqlalchemy import ColumnElement, Executable, Table, func

from pgtask_sa.claim import PLACE, fair_choice, fair_claim, random_claim, sampled_claim
from pgtask_sa.custom_claims import IS_READY, KEY, expression_claim, key_columns, keyed_claim
from pgtask_sa.errors import ConfigurationError
from pgtask_sa.noted_claims import note_next, to_be_noted

Order: TypeAlias = Literal["fair", "random", "tablesample"]
Row: TypeAlias = "Mapping[Any, Any]"  # a claimed one
Pair: TypeAlias = "tuple[int, str]"  # priority and task type
Ask: TypeAlias = "tuple[Executable, dict[str, Any]]"

pair_of = itemgetter("priority", "task_type")


@dataclass(frozen=True)
class ClaimOptions:
    """How a worker claims: the order, how many at a time, and which types go first.

    Args:
        order: ``fair`` (the indexed lottery), or literally ``random`` or ``tablesample``.
        batch_size: tasks per claim and transaction, 1 to 10,000.
        ranks: task type to rank; lower ranks go first, a type that is not named has rank 0.
        sample: per cent of the table's pages that ``tablesample`` looks at.
        weights: task type to its share of the turns; a type that is not named has 1.
        rank_else: the rank of types that are not named.
        expression: over the columns of the task, to be sorted by instead; see `priorities.plain`.
        fair_by: the name of a column whose values take turns instead of the types.

    Raises:
        ConfigurationError: a value is out of its range, or two of them exclude each other.

    Example:
        >>> ClaimOptions(batch_size=0)
        Traceback (most recent call last):
        pgtask_sa.errors.ConfigurationError: batch_size must be an integer from 1 to 10000, got 0
    """

    order: Order = "fair"
    batch_size: int = 1
    ranks: Mapping[str, int] = field(default_factory=dict)
    sample: float = 1.0
    weights: Mapping[str, float] = field(default_factory=dict)
    rank_else: int = 0
    expression: ColumnElement[Any] | None = None
    fair_by: str | None = None

    def __post_init__(self) -> None:
        if self.order not in get_args(Order):
            raise ConfigurationError(f"order must be one of {get_args(Order)}, got {self.order!r}")
        _check_integer("batch_size", self.batch_size, 1, 10_000)
        for name, rank in self.ranks.items():
            _check_integer(f"priority of {name}", rank, -(2**31), 2**31 - 1)
        if not 0 < self.sample <= 100:  # noqa: PLR2004
            raise ConfigurationError(f"sample must be over 0 up to 100 per cent: {self.sample!r}")
        for name, weight in self.weights.items():
            _check_weight(name, weight)
        self._check_combination()

    def _check_combination(self) -> None:
        ranked = bool(self.ranks) or self.rank_else != 0
        for name, given in {"weights": self.weights, "fair_by": self.fair_by}.items():
            if given and self.order != "fair":
                raise ConfigurationError(f"{name} need the order fair, not {self.order}")
            if given and self.expression is not None:
                raise ConfigurationError(
                    f"{name} and a priority by an expression exclude each other"
                )
        if self.fair_by and (ranked or self.weights):
            raise ConfigurationError(
                "fair_by takes no turns by type, so that ranks and weights of types would mean "
                "nothing; the priority of each task goes before it"
            )
        if self.expression is not None and self.order == "tablesample":
            raise ConfigurationError("a priority by an expression cannot be had from a sample")

    def rank(self, task_type: str) -> int:
        """Return the rank of a task type; lower goes first."""
        return self.ranks.get(task_type, self.rank_else)

    def weight(self, task_type: str) -> float:
        """Return the weight of a task type."""
        return self.weights.get(task_type, 1.0)


def _check_integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigurationError(f"{name} must be an integer from {low} to {high}, got {value!r}")


def _check_weight(name: str, weight: Any) -> None:
    is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if not is_number or not 1e-6 <= weight <= 1e6:  # noqa: PLR2004 - neither nan nor infinity
        raise ConfigurationError(f"weight of {name} must be a number over 0, got {weight!r}")


class Plain:
    """An order that the statement makes by itself."""

    def __init__(self, table: Table, options: ClaimOptions) -> None:
        self.options = options
        self.claims = self._build(table, options)

    @staticmethod
    def _build(table: Table, options: ClaimOptions) -> list[Executable]:
        limit = options.batch_size
        ranks: dict[str, Any] = {"ranks": options.ranks, "rank_else": options.rank_else}
        if options.expression is not None:
            shuffled = options.order == "random"
            return [expression_claim(table, limit, options.expression, shuffled=shuffled)]
        plain = random_claim(table, limit, **ranks)
        if options.order == "random":
            return [plain]
        # an empty sample does not mean an empty queue: look again at once, at everything
        return [sampled_claim(table, limit, func.system(options.sample), **ranks), plain]

    def asks(self, types: Sequence[str]) -> list[Ask]:
        """Return the statements of a claim; each further one only if it found nothing."""
        return [(claim, {"types": types}) for claim in self.claims]

    def in_order(self, rows: Sequence[Row]) -> list[Row]:
        """Return what was claimed in the order in which it is to run."""
        if self.options.expression is not None:
            return sorted(rows, key=lambda row: row[PLACE])
        rank = self.options.rank
        return sorted(rows, key=lambda row: (row["priority"], rank(row["task_type"])))


class InTurns(Protocol):
    """A way to claim from pairs that wait."""

    by_level: bool  # of one priority a claim looks at all its pairs together

    def claim(self, asked: Sequence[Pair], types: Sequence[str]) -> tuple[Ask, Sequence[Pair]]:
        """Return a statement with its parameters, and of which pairs it takes: the first ones."""

    def in_order(
        self, rows: Sequence[Row], asked: Sequence[Pair], taken: Mapping[Pair, int]
    ) -> list[Row]:
        """Return what was claimed, so many of each pair, in the order in which it is to run."""


class ByType:
    """Pair by pair, by lottery within each."""

    by_level = False

    def __init__(self, table: Table, options: ClaimOptions, chance: random.Random) -> None:
        more = key_columns(table, options.fair_by) if options.fair_by else ()
        limit = self.limit = options.batch_size
        self.chance = chance
        self.claims, self.bounded = (
            [fair_claim(table, limit, due_first=d, more=more, bounded=b) for d in (False, True)]
            for b in (False, True)
        )
        self.notes = {} if more or limit > 1 else self._notes(table)

    def _notes(self, table: Table) -> dict[Executable, Executable]:
        """Return, for each claim, what notes beforehand the task that it would take."""
        more = to_be_noted(table)
        choices = [
            fair_choice(table, 1, due_first=d, bounded=b, more=more)
            for b in (False, True)
            for d in (False, True)
        ]
        claims = [*self.claims, *self.bounded]
        return {
            claim: note_next(table, choice) for claim, choice in zip(claims, choices, strict=True)
        }

    def claim(self, asked: Sequence[Pair], _types: Sequence[str]) -> tuple[Ask, Sequence[Pair]]:
        """Ask for all the pairs, in their order."""
        return (self.chance.choice(self.claims), self._given(asked)), asked

    def claim_since(self, moment: float, asked: Sequence[Pair]) -> Ask:
        """Ask for all the pairs, in their order; for planned tasks from a moment on."""
        return self.chance.choice(self.bounded), {**self._given(asked), "since": moment}

    def _given(self, asked: Sequence[Pair]) -> dict[str, Any]:
        return {
            "levels": [level for level, _ in asked],
            "types": [kind for _, kind in asked],
            "pivot": self.chance.random(),
        }

    @staticmethod
    def in_order(
        rows: Sequence[Row], asked: Sequence[Pair], taken: Mapping[Pair, int]
    ) -> list[Row]:
        """Sort by the place of each pair."""
        if len(taken) < 2:  # noqa: PLR2004
            return list(rows)
        place = {pair: i for i, pair in enumerate(asked)}
        return sorted(rows, key=lambda row: place.get(pair_of(row), -1))


class ByKey:
    """Priority by priority, from key to key; the pairs say which priorities, and what is due."""

    def __init__(self, table: Table, options: ClaimOptions, chance: random.Random) -> None:
        assert options.fair_by is not None  # noqa: S101
        key, limit, self.chance = options.fair_by, options.batch_size, chance
        self.claims = [keyed_claim(table, limit, key, due_first=d) for d in (False, True)]
        self.lottery = ByType(table, options, chance)
        self.cursors: dict[int, str | None] = {}  # by priority: the key that was served last
        self.by_level = True

    def claim(self, asked: Sequence[Pair], types: Sequence[str]) -> tuple[Ask, Sequence[Pair]]:
        """Ask for the first pairs; the first of all by lottery, so that lanes start anywhere."""
        first = asked[0][0]
        self.by_level = first in self.cursors
        if not self.by_level:
            return self.lottery.claim([pair for pair in asked if pair[0] == first], types)
        led = list(takewhile(lambda pair: pair[0] in self.cursors, asked))
        levels = list(dict.fromkeys(level for level, _ in led))
        parameters = {
            "levels": levels,
            "cursors": [self.cursors[level] for level in levels],
            "types": types,
            "due_levels": [level for level, _ in led],
            "due_types": [kind for _, kind in led],
        }
        return (self.chance.choice(self.claims), parameters), led

    def in_order(
        self, rows: Sequence[Row], asked: Sequence[Pair], taken: Mapping[Pair, int]
    ) -> list[Row]:
        """Sort by the place in the claim, and move the cursors."""
        if self.by_level:
            ordered = sorted(rows, key=lambda row: row[PLACE])
        else:
            ordered = self.lottery.in_order(rows, asked, taken)
            self.cursors.setdefault(asked[0][0], None)
        for row in ordered:
            if row[IS_READY]:
                self.cursors[row["priority"]] = row[KEY]
        return ordered
