"""Which claim is next: whose turn it is, and how a worker knows what waits.

The claim (see `claim`) takes tasks of the pairs of priority and type that it is given, in their
order. So the order of the pairs is the whole policy, and it is made here:

* lower priorities before higher ones, whatever their type;
* of one priority, types of a lower rank before those of a higher one;
* of one rank, in turns. Each pair has a *pass*; the smallest pass is next, and a claim adds to it
  what it took, divided by the weight of the type. A type that had nothing to do saves up nothing:
  it comes back at the smallest pass of the others.

Only *warm* pairs go into the statement, those of which tasks came lately: the cost of a claim is
that of the types that wait, not of those that there might be. Pairs that were looked at in vain
are cold. What waits besides is found by a **survey**, a statement that hops over the distinct pairs
in the indexes. There is one at the start, before the next claim whenever the last survey is
`SURVEY_INTERVAL` old, and when a claim found nothing. So an urgent task of a pair that was cold is
noticed within that interval or at the next claim, whichever is later. (A survey that takes long is
made less often.) Of the pairs that the lane has met, and its types at priority 0, each claim looks
for one cold one besides: a few index probes, so that where types are few, the trickle of one does
not wait for a survey.

A lane with nothing warm that is woken does not lose a round trip over it: it asks for the pairs
that it has met, and for its types at priority 0, if they are few, and surveys if that was wrong.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from sqlalchemy import Executable, Table

from pgtask_sa.claim_orders import (
    Ask,
    ByKey,
    ByType,
    ClaimOptions,
    InTurns,
    Pair,
    Plain,
    Row,
    pair_of,
)
from pgtask_sa.detours import Detours
from pgtask_sa.statements import survey

Entry: TypeAlias = "tuple[int, int, float, str]"  # priority, rank, pass, task type

# Seconds. A survey costs about as much as a claim, so this is less than a hundredth of all work.
SURVEY_INTERVAL = 0.05
# And if it takes long, since dead rows that somebody's snapshot holds are in its way, never more
# than a twentieth of all time.
MOST_OF_TIME = 20
# To plan anew costs half a millisecond: nothing among many claims, and worth a try after a slow
# one, but half of the time until a single task starts on an idle worker.
REPLAN_INTERVAL = 1.0  # seconds
MANY_CLAIMS, SLOW_CLAIM = 100, 0.005  # claims; seconds
MOST_GUESSES = 20  # pairs, each some index probes that may be in vain
MOST_TURNS = 20  # pairs in one statement; all are warm, so the first ones should do
MOST_PASSES = 10_000


class Turns:
    """The warm pairs, in the order in which it is their turn; touches no database."""

    def __init__(self, options: ClaimOptions, chance: random.Random) -> None:
        self.options = options
        self.chance = chance
        self._queue: list[Entry] = []  # sorted
        self._passes: dict[Pair, float] = {}  # also of cold pairs: nobody gains by a pause

    def __len__(self) -> int:
        return len(self._queue)

    def pairs(self) -> set[Pair]:
        """Return the warm pairs."""
        return {(level, kind) for level, _, _, kind in self._queue}

    def next(self, most: int) -> list[Pair]:
        """Return the pairs whose turn it is, the first one first."""
        return [(level, kind) for level, _, _, kind in self._queue[:most]]

    def with_scout(self, asked: Sequence[Pair], pair: Pair) -> list[Pair]:
        """Put a cold pair where its turn would be among those that are asked for, before equals."""
        entry = self._entry(pair)[:3]
        self._passes.setdefault(pair, entry[2])  # the others pass by, until it is its turn
        place = sum(warm[:3] < entry for warm in self._queue[: len(asked)])
        return [*asked[:place], pair, *asked[place:]]

    def sorted(self, pairs: Iterable[Pair]) -> list[Pair]:
        """Return any pairs in the order in which their turns would be."""
        passes, rank = self._passes, self.options.rank
        shuffled = [(*pair[:1], rank(pair[1]), passes.get(pair, 0.0), pair[1]) for pair in pairs]
        return [(level, kind) for level, _, _, kind in sorted(shuffled)]

    def replace(self, pairs: set[Pair]) -> None:
        """Let exactly these pairs be warm."""
        self._queue = [entry for entry in self._queue if (entry[0], entry[3]) in pairs]
        self.warm(pairs - self.pairs())
        if len(self._passes) > MOST_PASSES:
            self._passes = {(level, kind): at for level, _, at, kind in self._queue}

    def warm(self, pairs: Iterable[Pair]) -> None:
        """Let pairs be warm that were cold."""
        for entry in [self._entry(pair) for pair in pairs]:
            level, _, at, kind = entry
            self._passes[level, kind] = at
            insort(self._queue, entry)

    def count(
        self,
        asked: Sequence[Pair],
        taken: Mapping[Pair, int],
        limit: int,
        *,
        by_level: bool = False,
    ) -> None:
        """Note what a claim took of the pairs it was given: whose turn it was, and who is cold.

        A claim that is full went no further than to the last pair that it took from; with
        ``by_level`` it looked at the pairs of one priority together.
        """
        reached = len(asked)
        if sum(taken.values()) == limit:
            reached = max((i for i, pair in enumerate(asked, 1) if pair in taken), default=reached)
        done = asked[:reached]
        if by_level and sum(taken.values()) == limit:
            done = [pair for pair in done if pair[0] < asked[reached - 1][0]]
        tried = {*done, *taken}
        # they are the first of the queue, or not in it
        head = self._queue[: len(asked) if by_level else reached]
        self._queue[: len(head)] = [e for e in head if (e[0], e[3]) not in tried]
        known = {(level, kind): at for level, _, at, kind in head}
        for pair, rows in taken.items():
            level, rank, at, kind = self._entry(pair)
            at = known.get(pair, at) + rows / (limit * self.options.weight(kind))
            self._passes[pair] = at
            insort(self._queue, (level, rank, at, kind))

    def _entry(self, pair: Pair) -> Entry:
        """Return where a cold pair comes in: it has saved up no credit, and owes a turn at most."""
        level, kind = pair
        rank, turn = self.options.rank(kind), 1 / self.options.weight(kind)
        start = self._smallest(level, rank)
        # a random phase, or all lanes would go in step
        at = self._passes.get(pair, start + turn * self.chance.random())
        return level, rank, min(max(at, start), start + turn), kind

    def _smallest(self, level: int, rank: int) -> float:
        place = bisect_left(self._queue, (level, rank))
        first = self._queue[place] if place < len(self._queue) else None
        return first[2] if first is not None and first[:2] == (level, rank) else 0.0


class Claimer:
    """Chooses the statements of each claim and learns from what they found; for one lane."""

    def __init__(self, table: Table, types: Sequence[str], options: ClaimOptions) -> None:
        self.types = list(types)
        self.options = options
        self._random = random.Random()  # noqa: S311
        self.turns = Turns(options, self._random)
        self._plain: Plain | None = None
        self._way: InTurns | None = None
        self._detours: Detours | None = None
        self.notes: Mapping[Executable, Executable] = {}  # of claims: see noted_claims
        if options.order != "fair" or options.expression is not None:
            self._plain = Plain(table, options)
        elif options.fair_by:
            self._way = ByKey(table, options, self._random)
        else:
            self._way = lottery = ByType(table, options, self._random)
            self._detours = Detours(table, lottery, self._random)
            self.notes = lottery.notes
        self._survey = survey(table)
        self._asked: Sequence[Pair] | None = None  # by the claim that was sent last
        self._surveyed: float | None = None  # when
        self._looked = 0.0  # when the last survey was sent
        self._interval = SURVEY_INTERVAL
        self._met: set[Pair] = set()
        self._scouts: list[Pair] = []  # cold pairs whose turn to be looked for is still to come
        self._planned = self._sent = time.monotonic()
        self._along = False
        self._claims, self._slowest = 0, 0.0  # since then

    def must_replan(self) -> bool:
        """Say, once in a while, that the next claim is to be planned anew."""
        now = time.monotonic()
        pays = self._claims >= MANY_CLAIMS or self._slowest > SLOW_CLAIM
        if not pays or now - self._planned < REPLAN_INTERVAL:
            return False
        self._planned, self._claims, self._slowest = now, 0, 0.0
        return True

    def statements(self) -> Iterator[Ask]:
        """Yield statements and parameters, each further one only if `learn` returned no tasks."""
        asks = self._in_turns() if self._plain is None else self._plain.asks(self.types)
        for ask in asks:
            self._sent, self._along = time.monotonic(), False
            yield ask

    def sent_along(self) -> None:
        """Note that the last statement travels with a COMMIT, which may take long by itself."""
        self._along = True

    def learn(self, rows: Sequence[Row]) -> list[Row]:
        """Take what a statement returned; return the tasks among it in the order of their turns."""
        self._claims += 1
        self._note_time(time.monotonic() - self._sent)
        if self._way is None:
            assert self._plain is not None  # noqa: S101
            return self._plain.in_order(rows)
        if self._asked is None:
            self._note_survey(rows)
            return []
        taken = Counter(map(pair_of, rows))
        limit, by_level = self.options.batch_size, self._way.by_level
        self.turns.count(self._asked, taken, limit, by_level=by_level)
        if self._detours is not None:
            self.turns.warm(self._detours.took(rows) - self.turns.pairs())
        return self._way.in_order(rows, self._asked, taken)

    def _note_time(self, seconds: float) -> None:
        if not self._along:
            self._slowest = max(self._slowest, seconds)
        if self._detours is not None and self._asked is not None:
            self._detours.timed(seconds, along=self._along)

    def _in_turns(self) -> Iterator[Ask]:
        guesses = [] if self.turns or self._surveyed is None else self._guesses()
        is_late = not guesses and self._is_late()
        tried = set(guesses)
        if guesses:
            yield self._claim(guesses)
        elif is_late:
            yield self._look()
        yield from self._rounds(tried)
        if not is_late:
            yield self._look()
            if self.turns.pairs() - tried or self._looked_thoroughly():
                yield from self._rounds(tried)
            # else they are those that others hold

    def _rounds(self, tried: set[Pair]) -> Iterator[Ask]:
        """Yield claims of the warm pairs; with each that finds nothing there are fewer."""
        while asked := self.turns.next(max(MOST_TURNS, self.options.batch_size)):
            asked = self._scouted(asked)
            yield self._claim(asked)
            tried.update(asked)

    def _scouted(self, asked: list[Pair]) -> list[Pair]:
        """Look for one cold pair as well; each gets its turn to be looked for."""
        is_dear = self._detours is not None and self._detours.has_far_to_go
        if is_dear or self.options.fair_by or len(self.turns) > MOST_GUESSES:
            return asked
        if not self._scouts:
            warm = self.turns.pairs()
            self._scouts = [pair for pair in self._known() if pair not in warm]
        if not self._scouts:
            return asked
        pair = self._scouts.pop()
        return asked if pair in asked else self.turns.with_scout(asked, pair)

    def _claim(self, asked: Sequence[Pair]) -> Ask:
        assert self._way is not None  # noqa: S101
        detour = None if self._detours is None else self._detours.claim(asked, self.types)
        if detour is not None:
            self._asked = asked
            return detour
        ask, self._asked = self._way.claim(asked, self.types)
        return ask

    def _look(self) -> Ask:
        self._asked, self._looked = None, time.monotonic()
        if self._detours is not None:
            pairs = {*self._known(), *self.turns.pairs()}
            if (detour := self._detours.look(pairs, self.types)) is not None:
                return detour
        return self._survey, {"types": self.types}

    def _looked_thoroughly(self) -> bool:
        """Say whether the last look may have found tasks that no claim before it could take."""
        return self._detours is not None and self._detours.is_thorough

    def _is_late(self) -> bool:
        if self._detours is not None and self._detours.must_look():
            return True
        return self._surveyed is None or time.monotonic() - self._surveyed >= self._interval

    def _note_survey(self, rows: Sequence[Row]) -> None:
        now = self._surveyed = time.monotonic()
        took, detours = now - self._looked, self._detours
        pairs = None if detours is None else detours.learn(rows)
        if pairs is None:
            pairs = {(row["level"], row["kind"]) for row in rows}
            if detours is not None:
                detours.surveyed(took, along=self._along)
        # after a thorough look the next one is cheap
        is_rare = not self._looked_thoroughly()
        self._interval = max(SURVEY_INTERVAL, MOST_OF_TIME * took * is_rare)
        if detours is not None and detours.is_partial:
            self.turns.warm(pairs - self.turns.pairs())
        else:
            self.turns.replace(pairs)
        if len(self._met) < MOST_PASSES:
            self._met |= pairs

    def _guesses(self) -> list[Pair]:
        """Return what may well be waiting; nothing, if that is a lot to ask for."""
        pairs = self._known()
        return self.turns.sorted(pairs) if len(pairs) <= MOST_GUESSES else []

    def _known(self) -> set[Pair]:
        own = set(self.types)
        return {(0, kind) for kind in own} | {pair for pair in self._met if pair[1] in own}
