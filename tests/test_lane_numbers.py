"""A lane's row takes another number now and then; it stays the row of that lane."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import create_engine, text

from pgtask_sa import Task, notes, reports
from pgtask_sa import presence_statements as statements
from pgtask_sa.claim import BACKEND_PID, BEGUN_AT, ROW_VERSION
from pgtask_sa.engines import worker_engine
from pgtask_sa.events import Events
from pgtask_sa.presence import Presence
from pgtask_sa.presence_table import NUMBERS, worker_table

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.direct  # through a pooler nothing is noted

TASK = Task.__table__
OFTEN = 3  # notes per number


class Entry:
    """The entry of a worker of two lanes, and looks at it."""

    def __init__(self, url: str) -> None:
        self.presence = Presence(worker_engine(url, 1), TASK, Events([]))
        self.admin = create_engine(url, isolation_level="AUTOCOMMIT")
        self.lanes = [self.presence.enlist() for _ in range(2)]

    def note(self, lane: int, *task_ids: int) -> None:
        values = {ROW_VERSION: 1, BACKEND_PID: None, BEGUN_AT: None}
        batch: Any = [SimpleNamespace(task_id=each, values=values) for each in task_ids]
        self.presence.note(lane, batch)

    def rows(self) -> list[tuple[int, list[int]]]:
        """Return the numbers in the table, and the tasks."""
        statement = text("select lane, task_ids from task_worker order by mod(lane, 65536)")
        with self.admin.connect() as connection:
            return [(row.lane, row.task_ids) for row in connection.execute(statement)]

    def cut(self) -> None:
        """End the server process of the entry's connection."""
        end = "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory'"
        with self.admin.connect() as connection:
            connection.execute(text(end))


@pytest.fixture
def entry(db_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Entry]:
    monkeypatch.setattr(notes, "NOTES_PER_NUMBER", OFTEN)
    entry = Entry(db_url)
    yield entry
    entry.presence.leave()
    entry.admin.dispose()


def test_a_row_takes_another_number(entry: Entry) -> None:
    """After so many notes of its lane, and again; the row of the other lane does not."""
    found = []
    for number in range(2 * OFTEN + 1):
        entry.note(1, number)
        found.append(entry.rows()[0])
    numbers = [1] * OFTEN + [1 + NUMBERS] * OFTEN + [1 + 2 * NUMBERS]
    assert [(each, [n]) for n, each in enumerate(numbers)] == found
    assert (2, []) == entry.rows()[1]


def test_it_is_shown_as_that_lane(entry: Entry) -> None:
    """Whatever the number, reports name the lane."""
    for number in range(OFTEN + 1):
        entry.note(2, number)
    with entry.admin.connect() as connection:
        found = connection.execute(reports.lanes(worker_table(TASK))).mappings().all()
    assert [(1, []), (2, [OFTEN])] == [(row["lane"], row["task_ids"]) for row in found]


def test_a_lane_that_rests_keeps_its_row(entry: Entry) -> None:
    """Also where the row is not at its place any more."""
    for number in range(OFTEN + 1):
        entry.note(1, number)
    with entry.admin.connect() as connection:
        connection.execute(text("update task_worker set host = 'moved'"))
    entry.presence.rest(1)
    assert [(1 + NUMBERS, []), (2, [])] == entry.rows()


def test_a_connection_that_is_lost(entry: Entry) -> None:
    """Rows have their first numbers again, and each lane has one."""
    for number in range(OFTEN + 1):
        entry.note(1, number)
    entry.cut()
    entry.note(2, 7)
    assert [(1, [OFTEN]), (2, [7])] == entry.rows()
    entry.note(1, 8)
    assert [(1, [8]), (2, [7])] == entry.rows()


def test_a_row_that_is_disowned(entry: Entry) -> None:
    """A start that was cut off is left to whoever takes the task, under a number below 0."""
    for number in range(OFTEN + 1):
        entry.note(1, number)
    given = {
        "me": entry.presence.worker_id,
        "own_lane": 1,
        "nobody": 5,
        "task_ids": [OFTEN],
        "row_versions": [1],
        "backend_pid": None,
    }
    with entry.admin.connect() as connection:
        connection.execute(statements.disown(TASK), given)
        dead = "select worker_id, task_ids from task_worker where lane < 0"
        assert [(5, [OFTEN])] == [tuple(row) for row in connection.execute(text(dead))]


def test_a_lane_of_the_same_worker_lives(entry: Entry) -> None:
    """What it has noted counts for nothing: the worker's own lock is held, by its own session."""
    entry.note(1, 7)
    assert {} == entry.presence.look(2, [_claimed(7)])


def test_a_lane_of_the_same_worker_that_has_disowned_a_start(entry: Entry) -> None:
    """Then it counts, for whichever lane."""
    entry.note(1, 7)
    assert entry.presence.disown(1, _claimed(7))
    assert 1 == entry.presence.look(2, [_claimed(7)])[7].count


def _claimed(task_id: int) -> Any:
    return SimpleNamespace(task_id=task_id, values={ROW_VERSION: 1})


def test_numbers_begin_anew(entry: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is an end to them."""
    monkeypatch.setattr(notes, "MOST_NUMBERS", 2)
    for number in range(2 * OFTEN + 1):
        entry.note(1, number)
    assert (1, [2 * OFTEN]) == entry.rows()[0]
