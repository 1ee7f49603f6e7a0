"""Sending a lane's claims: each with the BEGIN it needs, or along with the COMMIT before it.

A round trip costs more than the claim itself. So what the server is to do next travels in one
message: the end of one transaction, the note of what is next (noted_claims), the beginning of the
next transaction, the claim in it, and the savepoint for a handler that will probably write. After
an error the server skips the rest of a message, so a COMMIT that fails takes no tasks along.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

from sqlalchemy import Connection, Executable, text

from pgtask_sa.claim_orders import Ask
from pgtask_sa.engines import is_pooled
from pgtask_sa.errors import TaskError
from pgtask_sa.ground import OPEN, Ground
from pgtask_sa.noted_claims import claim_noted
from pgtask_sa.pipeline import Answers, Command, exchange
from pgtask_sa.settle import Claimed, Tables
from pgtask_sa.turns import Claimer
from pgtask_sa.wire import AllWired, Wired

# Claims are prepared, and the server keeps their plans. A plan made while the queue was all but
# empty, when nothing is cheaper than reading the whole table, would be kept while a million tasks
# arrive, until autovacuum looks at the table: 40 ms a claim, not 0.4, with 200,000 tasks.
REPLAN = b"DISCARD PLANS"
AND_CHAIN = text("COMMIT AND CHAIN")
PATIENCE = text("SET LOCAL lock_timeout = '100ms'")  # less than until anybody looks for a deadlock
LONGEST_PAUSE = 63  # claims


class _Part(NamedTuple):
    """Some commands of a message; of a statement that the server keeps prepared, or others."""

    commands: list[Command]
    wired: Wired | None = None


def _no_row() -> None:
    return None


class Claiming:
    """Claims for one lane, on its connection.

    Attributes:
        full: the last claim took all it may: there is probably more.
        expects_writes: the next handler will probably need the savepoint.
        own_row: gives what names the lane's row, if the lane may note by itself what is next.
        leased: types whose start a lease counts.
        only_once: types whose tasks have a single attempt: none is to be charged with a start that
            was noted and never made.
        moved: told where that row is then, and whether it names nothing.
    """

    def __init__(
        self, connection: Connection, ground: Ground, claimer: Claimer, tables: Tables
    ) -> None:
        self.connection = connection
        self.ground = ground
        self.claimer = claimer
        self.tables = tables
        self.full = False
        self.expects_writes = False
        self.own_row: Callable[[], dict[str, Any] | None] = _no_row
        self.leased: list[str] = []
        self.only_once: frozenset[str] = frozenset()
        self.moved: Callable[..., object] = lambda *_args, **_options: None
        self._claim_noted = claim_noted(tables.task)
        self._wired = AllWired()
        self._asks: Iterator[Ask] | None = None  # begun with a claim that was sent ahead
        self._ahead: list[dict[str, Any]] | None = None  # and what it took
        self._is_noted = False  # and that is noted
        self._pause = self._next_pause = 0  # chains without a note: after one that was in vain

    def claim(self) -> list[Claimed]:
        """Claim once, or take what was claimed ahead; empty if there is nothing to do.

        Raises:
            TaskError: more came than was asked for.
        """
        batch_size, is_noted = self.claimer.options.batch_size, self._is_noted
        for given in self._answers():
            rows = self.claimer.learn(given)
            if len(rows) > batch_size:  # rows nobody expects would be lost
                raise TaskError(f"a claim took {len(rows)} rows; it was rolled back")
            if rows:
                self.full = len(rows) == batch_size
                return [self.tables.claimed(row, in_flight=is_noted) for row in rows]
            is_noted = False  # whatever comes now was not sent ahead
        return []

    def _answers(self) -> Iterator[Sequence[Mapping[Any, Any]]]:
        asks, rows = self._asks, self._ahead
        self.forget()
        if asks is None:
            asks = self.claimer.statements()
        elif rows is not None:
            yield rows
        for statement, parameters in asks:
            yield self._fetch(statement, parameters)

    @property
    def holds(self) -> bool:
        """Say whether tasks were claimed ahead that nobody has taken yet."""
        return bool(self._ahead)

    def forget(self) -> None:
        """Note that what was claimed ahead, if anything, was rolled back."""
        self._asks = self._ahead = None
        self.full = self._is_noted = False

    def _fetch(
        self, statement: Executable, parameters: Mapping[str, Any]
    ) -> Sequence[Mapping[Any, Any]]:
        wired, after = self._wired[statement], self._savepoint()
        rows = wired.fetch(
            self.connection,
            parameters,
            keep=not is_pooled(self.connection),
            afresh=self.ground.is_in_vain(),
            before=self._replan(),
            after=after,
        )
        self._note(after)
        return rows

    def _replan(self) -> list[bytes]:
        # through a pooler nothing is prepared, and the plans are not ours to discard
        due = self.claimer.must_replan() and not is_pooled(self.connection)
        return [REPLAN] if due else []

    def _savepoint(self) -> list[bytes]:
        # through a pooler a transaction holds settings of ours, which go if it is begun afresh
        is_worth_it = self.expects_writes and not is_pooled(self.connection)
        return [OPEN.encode()] if is_worth_it else []

    def chain(self, ends: Sequence[str]) -> None:
        """Send what ends a transaction and begins the next, and the next claim along with it.

        Raises:
            psycopg.Error: the transaction could not be ended; nothing was claimed.
        """
        self.forget()
        asks = self.claimer.statements()
        ask = next(asks)
        self.claimer.sent_along()
        parts, after = self._parts(ends, ask), self._savepoint()
        commands = [command for part in parts for command in part.commands]
        answers = exchange(self.connection, [*commands, *map(Command, after)])
        if answers.problem() is None:
            self.ground.begin()
            self._prepared(parts)
            self._take_ahead(ask, asks, parts, answers)
            self._note(after)
            return
        problem = answers.problem(slice(len(ends)))
        if problem is not None:
            raise problem
        self.ground.begin()
        if not self._learn(parts, answers):  # in any case it is claimed once more; that will tell
            self._pause = self._next_pause = LONGEST_PAUSE

    def _parts(self, ends: Sequence[str], ask: Ask) -> list[_Part]:
        """Say what is to be sent: what ends the transaction, perhaps a note, and a claim."""
        before = _Part([*(Command(each.encode()) for each in ends), *map(Command, self._replan())])
        note, row = self._note_of(ask), self.own_row()
        if note is None or row is None:
            return [before, self._part(*ask)]
        given = {**ask[1], **row, "leased": self.leased}
        sent: list[Ask] = [(PATIENCE, {}), (note, given), (AND_CHAIN, {}), (self._claim_noted, {})]
        return [before, *(self._part(*each) for each in sent)]

    def _note_of(self, ask: Ask) -> Executable | None:
        note = self.claimer.notes.get(ask[0])
        if note is None or not self.only_once.isdisjoint(ask[1]["types"]):
            return None
        if self._pause:
            self._pause -= 1
            return None
        return note

    def _part(self, statement: Executable, given: Mapping[str, Any]) -> _Part:
        wired, driver = self._wired[statement], self.connection.connection.driver_connection
        return _Part(wired.commands(driver, wired.parameters(given), keep=True), wired)

    def _prepared(self, parts: Sequence[_Part]) -> None:
        """Note that all is prepared now."""
        for part in parts:
            if part.wired is not None and len(part.commands) > 1:
                part.wired.learn(self.connection.connection.driver_connection, None)

    def _learn(self, parts: Sequence[_Part], answers: Answers) -> bool:
        """Note what is prepared now, up to an error; True if that need not come again."""
        driver, start = self.connection.connection.driver_connection, 0
        for part in parts:
            end = start + len(part.commands)
            problem = answers.problem(slice(start, end))
            is_surprise = part.wired is not None and part.wired.learn(driver, problem)
            if problem is not None:
                return is_surprise
            start = end
        return False

    def _take_ahead(
        self, ask: Ask, asks: Iterator[Ask], parts: Sequence[_Part], answers: Answers
    ) -> None:
        """Keep what was claimed for the next time; or have it asked for in the ordinary way."""
        results = [answers.results[end - 1] for end in accumulate(len(p.commands) for p in parts)]
        claim = parts[-1].wired
        assert claim is not None  # noqa: S101 - it comes last
        rows = claim.rows(self.connection.connection.driver_connection, results[-1])
        note = results[2] if len(results) > 2 else None  # noqa: PLR2004 - as `_parts` has them
        if note is None or self._was_noted(note, rows):
            self._asks, self._ahead = asks, rows
            self._is_noted = bool(rows and note is not None and note.ntuples)
        else:
            self._asks = chain([ask], asks)

    def _was_noted(self, noted: Any, rows: Sequence[Any]) -> bool:
        """Take in what was noted; False if something is there that cannot be claimed so."""
        found = b"t"  # for all we know: the row is elsewhere; the next ordinary note will find it
        if noted.ntuples:
            place, found, named = (noted.get_value(0, i) for i in range(3))
            self.moved(place.decode(), is_empty=named == b"0")
        was_missed = not rows and found == b"t"
        self._pause = self._next_pause = min(2 * self._next_pause + 1, LONGEST_PAUSE) * was_missed
        return not was_missed

    def _note(self, after: Sequence[bytes]) -> None:
        if after:
            self.ground.opened()
