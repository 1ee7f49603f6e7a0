"""What stands in the rows of a worker's lanes, and sending it; see `presence`.

It is sent past SQLAlchemy and psycopg's cursors, since it is sent for each claim: three times as
fast. A row is updated where it was last, without a walk through the index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import psycopg
from psycopg.pq import ConnStatus
from sqlalchemy import Table

from pgtask_sa import presence_statements as statements
from pgtask_sa.claim import BACKEND_PID, BEGUN_AT, ROW_VERSION
from pgtask_sa.pipeline import Command, Message, checked
from pgtask_sa.presence_table import NOTES_PER_NUMBER, NUMBERS
from pgtask_sa.settle import Claimed
from pgtask_sa.wire import Wired

Landed: TypeAlias = Callable[["list[bool]"], object]

MOST_NUMBERS = 2**14  # of one lane; then the first one is so old that it is new again


class Note:
    """What is to stand in a lane's row.

    Args:
        worker_id: whose lane it is.
        lane: its number.
        batch: what it runs; nothing, if it is empty.
    """

    def __init__(self, worker_id: int, lane: int, batch: Sequence[Claimed] = ()) -> None:
        self.lane = lane
        self.is_empty = not batch
        first = batch[0].values if batch else {}
        self.values: dict[str, Any] = {
            "worker_id": worker_id,
            "which": lane,
            "task_ids": [claimed.task_id for claimed in batch],
            "row_versions": [claimed.values[ROW_VERSION] for claimed in batch],
            "backend_pid": first.get(BACKEND_PID),
            "begun_at": first.get(BEGUN_AT),
        }


@dataclass
class Flight:
    """Notes that are under way.

    Attributes:
        landed: to be told which of them were written, if another thread reads the answer.
    """

    notes: Sequence[Note]
    message: Message
    landed: Landed


class Notes:
    """The rows of all lanes. Only one thread at a time may call any of this.

    Attributes:
        flying: lanes whose rows are not empty.
        places: where each lane's row is in the table.
    """

    def __init__(self, task: Table) -> None:
        self.flying: set[int] = set()
        self.places: dict[int, str] = {}
        self._written: Counter[int] = Counter()  # notes of each lane
        self._by_number = Wired(statements.note_claim(task))
        self._in_place = Wired(statements.note_in_place(task))
        self._flight: Flight | None = None

    def prepare(self, pgconn: Any) -> None:
        """Have a new connection know the statements.

        Raises:
            psycopg.Error: there is no such table, say.
        """
        for each in (self._by_number, self._in_place):
            checked(pgconn.prepare(each.name, each.text.encode()))

    def write(self, pgconn: Any, note: Note) -> bool:
        """Write a row and wait for the answer; False if there is no such row.

        Raises:
            psycopg.Error: it could not be committed.
        """
        if note.lane in self.places:
            found = self._execute(pgconn, self._in_place, self._values(note))
            if self._learn(note, found):
                return True
        given = {**note.values, "number": self._number(note.lane)}
        return self._learn(note, self._execute(pgconn, self._by_number, given))

    @staticmethod
    def _execute(pgconn: Any, wired: Wired, values: dict[str, Any]) -> Any:
        return checked(pgconn.exec_prepared(wired.name, wired.parameters(values)))

    def enlisted(self) -> None:
        """Forget where rows are: they have been written anew, with their first numbers."""
        self.places.clear()
        self._written.clear()

    def own(self, worker_id: int, lane: int) -> dict[str, Any] | None:
        """Return what names a lane's row in a statement of the lane's own; None: not known where.

        The lane may call it while another thread works here.
        """
        place = self.places.get(lane)
        if place is None:
            return None
        return {"worker_id": worker_id, "which": lane, "number": self._number(lane), "place": place}

    def moved(self, lane: int, place: str, *, is_empty: bool) -> None:
        """Take in where a row is that was written; the lane may call it while others work here."""
        self.places[lane] = place
        self._written[lane] += 1
        (self.flying.discard if is_empty else self.flying.add)(lane)

    def can_send(self, notes: Sequence[Note]) -> bool:
        """Say whether nothing is under way, and it is known where the rows are."""
        return self._flight is None and all(note.lane in self.places for note in notes)

    def send(self, pgconn: Any, notes: Sequence[Note], landed: Landed) -> None:
        """Send notes in one message, to be committed together.

        Raises:
            psycopg.Error: the connection is lost.
        """
        name = self._in_place.name
        given = [self._in_place.parameters(self._values(note)) for note in notes]
        commands = [Command(b"", values, name) for values in given]
        self._flight = Flight(notes, Message(pgconn, commands), landed)

    def see(self, landed: Landed) -> list[bool] | None:
        """Read what there is of the answer; return which notes were written, if that is known.

        Not if they are another's than those for which ``landed`` is to be told.
        """
        flight = self._flight
        if flight is None or flight.landed != landed:
            return None
        flight.message.read_all()
        return None if flight.message.answers is None else self._end(flight)

    def is_lost(self, pgconn: Any) -> bool:
        """Say whether the other side has closed the connection; not while an answer is awaited."""
        if self._flight is not None:
            return False
        try:
            pgconn.consume_input()
        except psycopg.Error:
            return True
        return bool(pgconn.status == ConnStatus.BAD)

    def land(self) -> None:
        """Wait for the answer, if one is under way, and tell whoever sent the notes."""
        flight = self._flight
        if flight is not None:
            flight.landed(self._end(flight))

    def _end(self, flight: Flight) -> list[bool]:
        self._flight = None
        answers = flight.message.wait()
        if answers.problem() is not None:  # then none of them was committed
            return [False] * len(flight.notes)
        return [self._learn(*each) for each in zip(flight.notes, answers.results, strict=True)]

    def _values(self, note: Note) -> dict[str, Any]:
        lane = note.lane
        return {**note.values, "number": self._number(lane), "place": self.places[lane]}

    def _number(self, lane: int) -> int:
        times = self._written[lane] // NOTES_PER_NUMBER
        return lane + NUMBERS * (times % MOST_NUMBERS)

    def _learn(self, note: Note, result: Any) -> bool:
        """Take in where a row is now; False if there was none."""
        if not result.ntuples:
            return False
        self.moved(note.lane, result.get_value(0, 0).decode(), is_empty=note.is_empty)
        return True
