"""Tasks that a lane notes and claims together with the COMMIT of the one before."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from dead_workers import leave_behind
from leased import KINDS
from running import Running
from sqlalchemy import text

from pgtask_sa import Task
from pgtask_sa.cancel import Canceller
from pgtask_sa.claim import fair_choice
from pgtask_sa.detours import Detours
from pgtask_sa.engines import worker_engine
from pgtask_sa.events import Events
from pgtask_sa.noted_claims import claim_noted, note_next, to_be_noted
from pgtask_sa.presence import Presence
from pgtask_sa.wire import Wired

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.direct  # through a pooler no claim is sent along

TASK = Task.__table__
NAMING = "select begun_at is null from task_worker where :task_id = any (task_ids)"
TRIGGER = """
    create function spoil() returns trigger language plpgsql as
    $$ begin
        if new.begun_at is null and new.task_ids <> '{}' then %s end if;
        return new;
    end $$;
    create trigger spoil before update on task_worker for each row execute function spoil()"""


class Noting:
    """A worker with one lane, whose handler looks at what is noted."""

    def __init__(self, url: str, kind: str, **policy: int) -> None:
        self.running = Running(url, concurrency=1, idle_interval=0.2)
        self.ahead: list[bool] = []  # for each start, whether the lane itself has noted it
        self.starts: list[tuple[int, int]] = []  # tasks and their attempts
        self.meanwhile: dict[int, Callable[[], object]] = {}  # what to do in which start
        self.first = "select"  # what each handler executes before

        def look(task) -> None:
            [(is_ahead,)] = self.running.rows(NAMING, task_id=task.task_id)
            self.ahead.append(is_ahead)
            self.starts.append((task.task_id, task.attempt))
            if act := self.meanwhile.get(len(self.starts)):
                act()

        if kind == "sync":

            @self.running.tasks.handler("A", backoff=0, **policy)
            def body(session, params, task):
                session.execute(text(self.first))
                look(task)
        else:

            @self.running.tasks.handler("A", backoff=0, **policy)
            async def body(session, params, task):
                await session.execute(text(self.first))
                look(task)

    def run(self) -> None:
        with self.running:
            self.running.until_empty()


@pytest.fixture
def _no_surveys(monkeypatch) -> None:
    """Else it may be a look at what waits that is sent along."""
    monkeypatch.setattr("pgtask_sa.turns.SURVEY_INTERVAL", 60)
    monkeypatch.setattr(Detours, "must_look", lambda _self: False)


@pytest.fixture(params=KINDS)
def noting(db_url, request, _no_surveys) -> Noting:
    return Noting(db_url, request.param)


@pytest.fixture
def notes(monkeypatch):
    """Count what is noted on the worker's own connection."""
    counted: Counter[str] = Counter()
    write, send = Presence.write, Presence.send

    def writing(self, note):
        counted["notes"] += not note.is_empty
        write(self, note)

    def sending(self, notes, *given):
        is_sent = send(self, notes, *given)
        counted["notes"] += is_sent * sum(not note.is_empty for note in notes)
        return is_sent

    monkeypatch.setattr(Presence, "write", writing)
    monkeypatch.setattr(Presence, "send", sending)
    return counted


def _fill(noting: Noting, count: int = 10, **columns: object) -> None:
    noting.running.enqueue("A", *[{"i": i} for i in range(count)])
    for name, value in columns.items():
        noting.running.execute(f"update task set {name} = :value", value=value)


def test_it_is_noted_before_it_begins(noting: Noting, notes):
    """Only the first ones are noted in a round trip of their own."""
    _fill(noting)
    noting.run()
    assert 1 <= noting.ahead.count(False) == notes["notes"] <= 3
    assert {1} == {attempt for _, attempt in noting.starts}


def test_many_lanes(noting: Noting):
    """Each task is done once, by whichever lane."""
    noting.running.options["concurrency"] = 4
    _fill(noting, 300)
    noting.run()
    assert 300 == len(noting.starts) == len(set(noting.starts))


def test_what_has_failed_before_is_looked_at(noting: Noting, notes):
    """It may be one that kills its worker, which must run alone."""
    _fill(noting, attempts=1)
    noting.run()
    assert ([False] * 10, 10) == (noting.ahead, notes["notes"])


def test_what_somebody_has_touched_is_looked_at(noting: Noting):
    """Whoever that was may have died of it."""
    _fill(noting)
    with noting.running.admin.connect() as other:
        other.execute(text("select from task for update"))
        other.rollback()
    noting.run()
    assert [False] * 10 == noting.ahead


TOUCH = text("select from task for update")


@pytest.mark.parametrize("is_touched", [False, True])
def test_what_is_touched_between_the_note_and_the_claim(db_url, is_touched):
    """Whoever that was may have died of it: it is looked at."""
    running = Running(db_url)
    running.enqueue("A")
    engine = worker_engine(db_url, 2)
    presence = Presence(engine, TASK, Events([]))
    given = {"levels": [0], "types": ["A"], "pivot": 0.0, "leased": []}
    note = note_next(TASK, fair_choice(TASK, 1, due_first=False, more=to_be_noted(TASK)))
    entry = {"worker_id": presence.worker_id, "which": presence.enlist(), "number": 1}
    [(entry["place"],)] = running.rows("select ctid::text from task_worker")
    with engine.connect() as lane:
        assert 1 == Wired(note).fetch(lane, given | entry, keep=False)[0]["named"]
        lane.connection.driver_connection.commit()
        if is_touched:
            with running.admin.connect() as other:
                other.execute(TOUCH)
                other.rollback()
        assert (not is_touched) == bool(Wired(claim_noted(TASK)).fetch(lane, {}, keep=False))
    presence.leave()


def test_as_long_as_the_dead_name_tasks(noting: Noting, notes):
    """These are to be looked at before they are noted."""
    noting.running.enqueue("UNKNOWN")
    leave_behind(noting.running, "UNKNOWN")
    _fill(noting)
    with noting.running:
        noting.running.until(lambda: len(noting.starts) == 10)
    assert ([False] * 10, 10) == (noting.ahead, notes["notes"])


@pytest.mark.parametrize(
    "spoiled", ["raise 'no note';", "new.row_versions := '{1}';", "new.task_ids := '{}';"]
)
def test_a_note_that_comes_to_nothing(noting: Noting, notes, spoiled):
    """Nothing happens to the task before; the next one is claimed and noted as always."""
    noting.running.execute((TRIGGER % spoiled).replace(":=", "\\:="))
    _fill(noting)
    noting.run()
    assert ([False] * 10, 10) == (noting.ahead, notes["notes"])
    assert (10, {1}) == (len(set(noting.starts)), {attempt for _, attempt in noting.starts})


def test_a_worker_that_was_taken_for_dead(noting: Noting):
    """Its rows are gone; it is listed anew, and its lane knows where."""
    noting.meanwhile[3] = lambda: noting.running.execute("delete from task_worker")
    _fill(noting, 20)
    noting.run()
    assert False in noting.ahead[3:]
    assert all(noting.ahead[-10:])


def test_the_last_one_is_not_named_any_more(noting: Noting, monkeypatch):
    """What was claimed ahead is free when the lane ends; its process may go on, and be killed."""
    monkeypatch.setattr(Presence, "leave", lambda _self: None)
    stop = threading.Event()
    noting.meanwhile[4] = lambda: (noting.running.worker.stop(), stop.set())
    _fill(noting)
    with noting.running:
        noting.running.until(stop.is_set)
        noting.running.wait()
    assert 4 <= len(noting.starts) < 10
    free = "select attempts from task for update skip locked"
    named = "select unnest(task_ids) from task_worker"
    left = [(0,)] * (10 - len(noting.starts))
    assert (left, []) == (noting.running.rows(free), noting.running.rows(named))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("_no_surveys")
def test_with_a_single_attempt(db_url, kind, notes):
    """A process that dies between the note and the start would leave it none."""
    noting = Noting(db_url, kind, max_attempts=1)
    _fill(noting)
    noting.run()
    assert ([False] * 10, 10) == (noting.ahead, notes["notes"])


def test_a_handler_does_not_hold_the_workers_table(noting: Noting):
    """DDL on it waits for no handler, and so the other workers' notes do not wait for the DDL."""

    def lock() -> None:
        with noting.running.admin.begin() as connection:
            connection.execute(text("lock table task_worker in access exclusive mode nowait"))

    noting.meanwhile[5] = lock
    _fill(noting)
    noting.run()
    assert noting.ahead[4]
    assert (10, {1}) == (len(set(noting.starts)), {attempt for _, attempt in noting.starts})


WAITING = """
    select coalesce(max(clock_timestamp() - waitstart), '0') > '1.1 s' from pg_locks
    where relation = 'task'::regclass and not granted"""


def test_a_migration_of_both_tables(noting: Noting):
    """It locks one and then the other; no lane has locked them in the other order meanwhile."""
    running, done = noting.running, threading.Event()
    noting.meanwhile[5] = done.set
    _fill(noting, 2000)
    with running:
        running.until(done.is_set)
        with running.admin.begin() as migration:
            migration.execute(text("lock table task in access exclusive mode"))
            # so long that a lane has looked for a deadlock by now, and will not look again
            running.until(lambda: running.rows(WAITING) == [(True,)])
            migration.execute(text("lock table task_worker in access exclusive mode"))
        running.until_empty()
    assert 2000 == len(set(noting.starts)) == len(noting.starts)


@pytest.mark.parametrize("first", ["select", "set local application_name = 'a report'"])
def test_it_is_known_since_when_it_runs(noting: Noting, first):
    """So it can be cancelled: that ends the transaction which began then, and no other."""
    running, found = noting.running, []
    noting.first = first

    def cancel() -> None:
        def work() -> None:
            with running.admin.connect() as connection:
                found.append(Canceller(connection, Task).cancel(noting.starts[-1][0]))

        other = threading.Thread(target=work)
        other.start()
        other.join()

    noting.meanwhile[4] = cancel
    _fill(noting)
    noting.run()
    [done] = found
    assert ("running", True) == (done.found, done.seconds >= 0)
    assert 1 == running.count("dead_task")
