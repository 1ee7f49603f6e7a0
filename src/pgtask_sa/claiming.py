"""Sending a lane's claims: each with the BEGIN it needs, or along with the COMMIT before it.

A round trip costs more than the claim itself. So what the server is to do next travels in one
message: the end of one transaction, the beginning of the next, the claim in it, and the savepoint
for a handler that will probably write. After an error the server skips the rest of a message, so a
COMMIT that fails takes no tasks along.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Executable

from pgtask_sa.claim_orders import Ask
from pgtask_sa.engines import is_pooled
from pgtask_sa.errors import TaskError
from pgtask_sa.ground import OPEN, Ground
from pgtask_sa.pipeline import Command, exchange
from pgtask_sa.settle import Claimed, Tables
from pgtask_sa.turns import Claimer
from pgtask_sa.wire import AllWired

# Claims are prepared, and the server keeps their plans. A plan made while the queue was all but
# empty, when nothing is cheaper than reading the whole table, would be kept while a million tasks
# arrive, until autovacuum looks at the table: 40 ms a claim, not 0.4, with 200,000 tasks.
REPLAN = b"DISCARD PLANS"


class Claiming:
    """Claims for one lane, on its connection.

    Attributes:
        full: the last claim took all it may: there is probably more.
        expects_writes: the next handler will probably need the savepoint.
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
        self._wired = AllWired()
        self._asks: Iterator[Ask] | None = None  # begun with a claim that was sent ahead
        self._ahead: list[dict[str, Any]] | None = None  # and what it took

    def claim(self) -> list[Claimed]:
        """Claim once, or take what was claimed ahead; empty if there is nothing to do.

        Raises:
            TaskError: more came than was asked for.
        """
        batch_size = self.claimer.options.batch_size
        for given in self._answers():
            rows = self.claimer.learn(given)
            if len(rows) > batch_size:  # rows nobody expects would be lost
                raise TaskError(f"a claim took {len(rows)} rows; it was rolled back")
            if rows:
                self.full = len(rows) == batch_size
                return [self.tables.claimed(row) for row in rows]
        return []

    def _answers(self) -> Iterator[Sequence[Mapping[Any, Any]]]:
        asks, rows = self._asks, self._ahead
        self.forget()
        if asks is None or rows is None:
            asks = self.claimer.statements()
        else:
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
        self.full = False

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
        statement, parameters = next(asks)
        self.claimer.sent_along()
        wired, driver = self._wired[statement], self.connection.connection.driver_connection
        end = [Command(each.encode()) for each in ends]
        replan, after = map(Command, self._replan()), self._savepoint()
        own = wired.commands(driver, wired.parameters(parameters), keep=True)
        first = [*end, *replan, *own]
        answers = exchange(self.connection, [*first, *map(Command, after)])
        problem = answers.problem(slice(len(end)))
        if problem is not None:
            raise problem
        self.ground.begin()
        problem = answers.problem()
        wired.learn(driver, problem)
        if problem is None:  # else it is claimed once more, and that will tell
            self._asks, self._ahead = asks, wired.rows(driver, answers.results[len(first) - 1])
            self._note(after)

    def _note(self, after: Sequence[bytes]) -> None:
        if after:
            self.ground.opened()
