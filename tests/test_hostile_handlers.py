"""Handlers and tables that nobody expects: nothing is lost, nothing doubled, all is counted."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import text
from sqlalchemy.orm import DeclarativeBase, Mapped
from sweeping import KINDS, Sweeper

from pgtask_sa import DeadTaskMixin, Retry, Snooze, TaskMixin
from pgtask_sa.settle import Unsettled


class Base(DeclarativeBase):
    pass


class OddJob(TaskMixin, Base):
    """Columns whose values Python cannot hold, and names that we use ourselves."""

    __tablename__ = "odd_job"

    delay: Mapped[str | None]
    reason: Mapped[str | None]
    announced: Mapped[str | None]


class DeadOddJob(DeadTaskMixin, Base):
    __tablename__ = "dead_odd_job"

    delay: Mapped[str | None]


@pytest.fixture(params=KINDS)
def sweeper(request, db_url):
    made = Sweeper(request.param, db_url)
    yield made
    made.close()


@pytest.fixture
def sync_sweeper(db_url):
    made = Sweeper("sync", db_url)
    yield made
    made.close()


def mark(session, i=1):
    session.execute(text("insert into mark values (:i)"), {"i": i})


@pytest.mark.parametrize("batch_size", [1, 10])
def test_commit_on_the_driver_and_one_more_statement(db_url, batch_size):
    """A handler that commits past all guards and then fails loses neither its task nor others."""
    sweeper = Sweeper("sync", db_url, batch_size=batch_size)

    @sweeper.handler("VAC", max_attempts=2)
    def vacuum(session, params, task):
        cursor = session.connection().connection.cursor()
        cursor.execute("COMMIT")
        cursor.execute("VACUUM mark")
        cursor.execute("select 1/0")

    @sweeper.handler("OK")
    def fine(session, params, task):
        mark(session)

    sweeper.enqueue(task_type="VAC")
    sweeper.enqueue(*[{}] * 5, task_type="OK")
    for _ in range(12):  # each loss costs the lane its connection
        try:
            sweeper.drain()
        except Exception:
            continue
        break
    assert ([1] * 5, []) == (sweeper.marks(), sweeper.waiting())
    assert [("VAC", 2, "failed")] == sweeper.dead()
    sweeper.close()


def test_writes_past_the_session_are_undone(sync_sweeper):
    """What a failed handler wrote through ``session.get_bind()`` and the driver is undone too."""

    @sync_sweeper.handler(max_attempts=2)
    def body(session, params, task):
        session.get_bind().connection.cursor().execute("insert into mark values (1)")
        raise ValueError

    sync_sweeper.enqueue()
    sync_sweeper.drain()
    assert ([], [("A", 2, "failed")]) == (sync_sweeper.marks(), sync_sweeper.dead())


def test_a_transaction_aborted_past_the_session_counts(sync_sweeper):
    """No savepoint is open then, so the attempt is counted when all is rolled back."""
    starts = []

    @sync_sweeper.handler(max_attempts=2)
    def body(session, params, task):
        starts.append(task.attempt)
        session.get_bind().connection.driver_connection.pgconn.exec_(b"select 1/0")

    sync_sweeper.enqueue()
    sync_sweeper.drain()
    assert ([1, 2], [("A", 2, "failed")]) == (starts, sync_sweeper.dead())


def test_a_half_read_stream_does_not_hang_the_lane(sync_sweeper):
    """A query of the handler that still runs on the driver is a failed attempt."""
    kept = []

    @sync_sweeper.handler(max_attempts=1)
    def body(session, params, task):
        driver = session.connection().connection.driver_connection
        rows = driver.cursor().stream("select generate_series(1, 100000)")
        kept.append(next(rows))
        kept.append(rows)

    sync_sweeper.enqueue()
    for _ in range(3):
        try:
            sync_sweeper.drain()
        except Exception:
            continue
        break
    assert [("A", 1, "failed")] == sync_sweeper.dead()


def test_settings_of_a_handler_do_not_meet_the_next(sweeper):
    """``SET`` in a handler is gone with its task."""
    sweeper.execute("create schema tenant")
    sweeper.execute("create table tenant.task (like task including all)")

    @sweeper.handler("SET")
    def sets(session, params, task):
        session.execute(text("set search_path = tenant"))

    @sweeper.handler("FAIL", max_attempts=5)
    def fails(session, params, task):
        raise Snooze(100)

    for batch_size in (1, 10):
        sweeper.batch_size = batch_size
        sweeper.enqueue(task_type="SET")
        sweeper.enqueue({"i": batch_size}, task_type="FAIL")
        sweeper.drain()
    assert [("FAIL", 0), ("FAIL", 0)] == sweeper.waiting()
    assert [] == sweeper.rows("select task_id from tenant.task")


def test_local_settings_do_not_move_tasks(sweeper):
    """``SET LOCAL search_path`` in a batch does not send the next task into another schema."""
    sweeper.execute("create schema tenant")
    sweeper.execute("create table tenant.task (like task including all)")
    sweeper.batch_size = 10

    @sweeper.handler()
    def body(session, params, task):
        if params["i"] % 2:
            session.execute(text("set local search_path = tenant"))
        else:
            raise Snooze(100)

    sweeper.enqueue(*[{"i": i} for i in range(8)])
    sweeper.drain()
    assert [("A", 0)] * 4 == sweeper.waiting()
    assert [] == sweeper.rows("select task_id from tenant.task")


class BareRetry(Retry):
    def __init__(self):
        Exception.__init__(self)


class BareSnooze(Snooze):
    def __init__(self):
        Exception.__init__(self)


class OddAttributes(Exception):
    def __getattr__(self, name):
        raise KeyError(name)


class OddText(Exception):
    def __str__(self):
        raise SystemExit(3)


class OddDiag(Exception):
    @property
    def diag(self):
        raise RuntimeError


def late_timedelta():
    error = Retry("x")
    error.after = timedelta(0)
    return error


def nonsense():
    error = Retry("x")
    error.after = "soon"
    return error


@pytest.mark.parametrize("make", [BareRetry, OddAttributes, OddText, OddDiag, late_timedelta])
def test_odd_errors_are_counted(sync_sweeper, make):
    """Whatever an exception does when it is looked at, the attempt is counted."""

    @sync_sweeper.handler(max_attempts=2)
    def body(session, params, task):
        raise make()

    sync_sweeper.enqueue()
    sync_sweeper.sweep(3)
    assert [("A", 2, "failed")] == sync_sweeper.dead()


def test_a_nonsensical_delay_is_counted(sync_sweeper):
    """A Retry whose delay is no number takes the usual delay."""

    @sync_sweeper.handler(max_attempts=2)
    def body(session, params, task):
        raise nonsense()

    sync_sweeper.enqueue()
    sync_sweeper.drain()
    assert [("A", 1)] == sync_sweeper.waiting()


def test_a_snooze_without_a_delay(sync_sweeper):
    """A subclass of Snooze that does not call our __init__ snoozes all the same."""

    @sync_sweeper.handler()
    def body(session, params, task):
        raise BareSnooze

    sync_sweeper.enqueue()
    sync_sweeper.drain()
    assert [("A", 0)] == sync_sweeper.waiting()


def test_a_task_that_the_table_does_not_take_back(sweeper):
    """A row that its table refuses is buried, and the rest of its batch is not held up."""
    sweeper.execute("alter table task add constraint no_a check (task_type <> 'A') not valid")
    sweeper.execute("alter table task disable trigger user")
    sweeper.batch_size = 10

    @sweeper.handler("A", max_attempts=3)
    def body(session, params, task):
        raise ValueError

    @sweeper.handler("B")
    def fine(session, params, task):
        mark(session)

    sweeper.execute("alter table task drop constraint no_a")
    sweeper.enqueue()
    sweeper.enqueue(*[{}] * 3, task_type="B")
    sweeper.execute("alter table task add constraint no_a check (task_type <> 'A') not valid")
    sweeper.drain()
    assert ([1] * 3, []) == (sweeper.marks(), sweeper.waiting())
    assert [("A", 1, "not put back")] == sweeper.dead()


def test_a_task_that_no_table_takes(sweeper):
    """It stays where it is, and those that were claimed together with it are done."""
    sweeper.execute("alter table dead_task add check (task_type <> 'A')")
    sweeper.batch_size = 10

    @sweeper.handler("A", max_attempts=3)
    def body(session, params, task):
        raise ValueError

    @sweeper.handler("B")
    def fine(session, params, task):
        mark(session)

    sweeper.enqueue()
    sweeper.enqueue(*[{}] * 3, task_type="B")
    sweeper.execute("alter table task add constraint no_a check (task_type <> 'A') not valid")
    with pytest.raises(Unsettled):
        sweeper.sweep()
    assert ([1] * 3, [("A", 0)], []) == (sweeper.marks(), sweeper.waiting(), sweeper.dead())


def test_a_connection_that_the_handler_loses_counts(sync_sweeper):
    """A handler that closes the connection and returns has failed."""

    @sync_sweeper.handler(max_attempts=2)
    def body(session, params, task):
        session.connection().connection.driver_connection.close()

    sync_sweeper.enqueue()
    for _ in range(6):
        try:
            sync_sweeper.drain()
        except Exception:
            continue
        break
    assert [("A", 2, "failed")] == sync_sweeper.dead()


ODD_COLUMNS = """
    alter table odd_job add iv interval default '1 month 2 days',
        add num numeric default 12345678901234567890.123456789,
        add later timestamptz default 'infinity',
        add js jsonb, add js_null jsonb default 'null', add tags text[] default '{a,"b c"}'
"""


def test_a_failed_task_comes_back_to_the_last_digit(db_url):
    """What Python cannot hold, and columns that the mapping does not know, survive a retry."""
    sweeper = Sweeper("sync", db_url)
    Base.metadata.create_all(sweeper.admin)
    sweeper.execute(ODD_COLUMNS)
    sweeper.close()
    sweeper = Sweeper("sync", db_url, task_class=OddJob)
    sweeper.execute(
        "insert into odd_job (task_type, params, delay, reason, announced, created_at) values "
        """('A', '{"x": 1.00000000000000000001}', 'd', 'r', 'a', '-infinity')"""
    )
    look = "select iv::text, num::text, later::text, js, js_null::text, tags, params::text, delay, "
    look += "reason, announced, created_at::text, task_id from odd_job"
    before = sweeper.rows(look)

    @sweeper.handler(max_attempts=2)
    def body(session, params, task):
        raise ValueError

    sweeper.sweep()
    assert before == sweeper.rows(look)
    sweeper.sweep()
    assert [("d",)] == sweeper.rows("select delay from dead_odd_job")
    sweeper.close()
