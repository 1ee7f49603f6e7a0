"""What a lane saw waiting when it looked last, by number: which of it to try next.

A claim at the end of a queue (see `tail`) is given some of these numbers, not all of them: so it
costs the same whether ten tasks wait or a thousand. They are those of the pairs whose turn it is,
and of each pair a few by chance. Touches no database.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import TypeAlias

from pgtask_sa.claim_orders import Pair, Row

Numbers: TypeAlias = "dict[int, None]"  # in an order

MARGIN = 30  # numbers beyond those that a claim may take: others were quicker
MORE = 4  # times as many, if all of them were gone


@dataclass
class _Waiting:
    """Of one pair: new tasks by chance, those that were planned by time, those somebody holds."""

    new: Numbers = field(default_factory=dict)
    due: Numbers = field(default_factory=dict)
    held: Numbers = field(default_factory=dict)

    def in_order(self, *, new_first: bool) -> Iterable[int]:
        first, second = (self.new, self.due) if new_first else (self.due, self.new)
        return chain(first, second, self.held)

    def without(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            for each in (self.new, self.due, self.held):
                each.pop(number, None)

    def __bool__(self) -> bool:
        return bool(self.new or self.due or self.held)


class Listed:
    """The numbers of the tasks that waited at the last look.

    Args:
        batch_size: tasks per claim.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._waiting: dict[Pair, _Waiting] = {}
        self._in_vain: set[int] = set()  # tried, and not to be had
        self._tried: Sequence[int] = ()  # by the claim that was sent last
        self._asked: Sequence[Pair] = ()
        self._most = self._fewest = 2 * batch_size + MARGIN

    def replace(self, rows: Sequence[Row]) -> None:
        """Take what a look found; what was tried in vain and is still there is held by somebody."""
        self._waiting, self._most = {}, self._fewest
        self._in_vain &= {row["task_id"] for row in rows}
        planned = sorted((r for r in rows if r["due"] is not None), key=lambda row: row["due"])
        new = [row for row in rows if row["due"] is None]
        random.shuffle(new)
        for row in (*planned, *new):
            waiting = self._waiting.setdefault((row["level"], row["kind"]), _Waiting())
            kind = waiting.new if row["due"] is None else waiting.due
            if row["task_id"] in self._in_vain:
                kind = waiting.held
            kind[row["task_id"]] = None

    def choose(self, asked: Sequence[Pair], *, new_first: bool) -> Sequence[int]:
        """Return what to try, of these pairs, in their order."""
        waiting = [self._waiting[pair] for pair in asked if pair in self._waiting]
        numbers = chain.from_iterable(each.in_order(new_first=new_first) for each in waiting)
        self._asked, self._tried = asked, list(islice(numbers, self._most))
        return self._tried

    def took(self, rows: Sequence[Row]) -> set[Pair]:
        """Take what a claim returned; return the pairs of which there is more to try.

        If it is full, it is not known what else it tried, and nothing is returned.
        """
        is_full = len(rows) >= self._batch_size
        gone = [row["task_id"] for row in rows] if is_full else self._tried
        waiting = {pair: self._waiting[pair] for pair in self._asked if pair in self._waiting}
        for each in waiting.values():
            each.without(gone)
        if is_full:
            return set()
        self._in_vain.update(gone)
        self._most *= MORE
        return {pair for pair, each in waiting.items() if each}
