"""What is written about a task that failed: always the count, and nothing that does harm."""

from __future__ import annotations

import contextlib
from decimal import Decimal
from typing import Any

import pytest
from own_models import Base, PlainJob, UniqueJob, create_all
from sqlalchemy import text
from sqlalchemy.orm import Mapped, mapped_column
from sweeping import KINDS, Sweeper, mark, sweepers

from pgtask_sa import DeadTaskMixin, Task, TaskSession, statements
from pgtask_sa.mapping import DeadTask


class DeadJob(DeadTaskMixin, Base):
    """The error queue of the task classes in own_models; without the column `note`."""

    __tablename__ = "dead_job"

    tenant_id: Mapped[int | None] = mapped_column("tenant")


@pytest.fixture(params=KINDS)
def sweeper(request, db_url):
    yield from sweepers(db_url, request.param)


def _job_sweeper(kind: str, url: str, task_class: type[Any]) -> Sweeper:
    sweeper = Sweeper(kind, url, task_class=task_class)
    create_all(sweeper.admin)
    return sweeper


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


ERRORS = {
    "NUL": (lambda: ValueError("a\x00b"), "ValueError: a\\x00b"),
    "SURROGATE": (lambda: ValueError("a\ud800b"), "ValueError: a\\ud800b"),
    "HUGE": (lambda: ValueError("x" * 50_000_000), "ValueError: xxx"),
    "UNPRINTABLE": (_Unprintable, "_Unprintable: (its message cannot be rendered: RuntimeError)"),
    "EMPTY": (ValueError, "ValueError"),
    "FOREIGN": (lambda: ValueError("Grüße 漢字 \U0001f600"), "ValueError: Gr"),
}


@pytest.mark.parametrize("encoding", ["UTF8", "LATIN1", "SQL_ASCII"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_error_can_be_recorded(kind: str, encoding: str, databases):
    """E4, D9: the attempt is counted and the text is kept, as far as the database can hold it."""
    with databases.temporary(f"template0 encoding '{encoding}' locale 'C'") as url:
        sweeper = Sweeper(kind, url)
        Task.metadata.create_all(sweeper.admin)
        for name, (make, _) in ERRORS.items():

            @sweeper.handler(name, max_attempts=2, backoff=60)
            def body(session, params, task, make=make):
                raise make()

            sweeper.enqueue(task_type=name)
        sweeper.drain()
        for table in ("task", "dead_task"):
            found = dict(sweeper.rows(f"select task_type, last_error from {table}"))
            assert dict.fromkeys(ERRORS, True) == {
                name: found[name].startswith(start) for name, (_, start) in ERRORS.items()
            }
            assert 4000 >= max(len(error) for error in found.values())
            sweeper.execute("update task set run_at = null")
            sweeper.drain()
        assert [] == sweeper.waiting()
        sweeper.close()


def test_a_database_error_is_kept_without_its_parameters(sweeper: Sweeper):
    """Neither the statement's parameters nor the values of the row get into the record."""
    sweeper.execute("create table usr (email text primary key)")
    sweeper.execute("insert into usr values ('secret@example.org')")

    @sweeper.handler()
    def body(session, params, task):
        session.execute(text("insert into usr values (:email)"), params)

    sweeper.enqueue({"email": "secret@example.org"})
    sweeper.sweep()
    assert sweeper.last_error().startswith(
        'IntegrityError: duplicate key value violates unique constraint "usr_pkey"\n'
    )
    assert "secret" not in sweeper.last_error() + repr(sweeper.events)


def test_a_swallowed_error_is_kept_without_its_parameters(sweeper: Sweeper):
    """Nor when the handler hid it from us."""
    sweeper.execute("create table usr (email text primary key)")
    sweeper.execute("insert into usr values ('secret@example.org')")

    @sweeper.handler()
    def body(session, params, task):
        with contextlib.suppress(Exception):
            session.connection().execute(text("insert into usr values (:email)"), params)

    sweeper.enqueue({"email": "secret@example.org"})
    sweeper.sweep()
    assert "duplicate key" in sweeper.last_error()
    assert "secret" not in sweeper.last_error() + repr(sweeper.events)


def test_params_that_no_longer_fit(sweeper: Sweeper):
    """The attempt fails before the handler is called, and the values are not in the record."""

    def body(session, params: dict[str, int]):
        raise AssertionError("never called")

    async def awaited(session, params: dict[str, int]):
        raise AssertionError("never called")

    sweeper.tasks.handler("A", max_attempts=1)(body if sweeper.kind == "sync" else awaited)
    sweeper.execute("""insert into task (task_type, params) values ('A', '{"n": "secret"}')""")
    sweeper.sweep()
    assert [("A", 1, "failed")] == sweeper.dead()
    assert "params.n" in sweeper.last_error()
    assert "secret" not in sweeper.last_error()


def test_numbers_survive_a_retry_to_the_last_digit(sweeper: Sweeper):
    """Params that are put back are those that were enqueued, where Python has no such number."""
    digits = "1234567890.123456789012345678901234567890"

    @sweeper.handler()
    def body(session, params, task):
        raise ValueError

    sweeper.execute(
        f"""insert into task (task_type, params) values ('A', '{{"n": {digits}, "m": 1.00}}')"""
    )
    sweeper.sweep(3)
    assert [(Decimal(digits), "1.00")] == sweeper.rows(
        "select (params ->> 'n')::numeric, params ->> 'm' from task"
    )


@pytest.mark.parametrize("attempts", [31, 63, 64, 1024, 999_998])
def test_a_retry_after_very_many_attempts(sweeper: Sweeper, attempts: int):
    """E2: no exponent overflows, in Python or in Postgres."""
    from pgtask_sa import Backoff

    @sweeper.handler(max_attempts=1_000_000, backoff=Backoff())
    def body(session, params, task):
        raise ValueError

    sweeper.enqueue()
    sweeper.execute("update task set attempts = :n", n=attempts)
    sweeper.sweep()
    assert [("A", attempts + 1)] == sweeper.waiting()
    assert [(True,)] == sweeper.rows("select run_at < now() + interval '2 hours' from task")


def test_a_backoff_that_fails(sweeper: Sweeper):
    """A mistake in the user's backoff does not lose the failure."""

    @sweeper.handler(backoff=lambda attempt: 1 / 0)
    def body(session, params, task):
        raise ValueError

    sweeper.enqueue()
    sweeper.sweep()
    assert [("A", 1)] == sweeper.waiting()


def test_the_view_of_a_task_is_immutable(sweeper: Sweeper):
    """B19: no ORM object that a flush would try to update; a change is the handler's mistake."""
    seen = []

    @sweeper.handler(max_attempts=3)
    def body(session, params, task):
        seen.append((task.task_type, dict(task.params), task.attempt, task.is_last_attempt))
        with pytest.raises(AttributeError):
            task.attempt = 5
        with pytest.raises(TypeError):
            task.params["i"] = 5
        session.flush()
        if task.attempt == 1:
            raise ValueError

    sweeper.enqueue({"i": 1})
    sweeper.drain()
    assert [("A", {"i": 1}, 1, False), ("A", {"i": 1}, 2, False)] == seen


@pytest.mark.parametrize("kind", KINDS)
def test_extra_columns_are_carried_along(kind: str, empty_db_url: str):
    """Through retry all, through burial those that the error queue has; the view shows all."""
    sweeper = _job_sweeper(kind, empty_db_url, PlainJob)
    seen = []

    @sweeper.handler(max_attempts=2)
    def body(session, params, task):
        seen.append(dict(task.columns))
        raise ValueError

    sweeper.enqueue(tenant_id=7, note="n")
    sweeper.sweep()
    assert [(7, "n", 1)] == sweeper.rows("select tenant, note, attempts from plain_job")
    sweeper.sweep()
    assert [(7, 2)] == sweeper.rows("select tenant, attempts from dead_job")
    assert [{"tenant_id": 7, "note": "n"}] * 2 == seen
    sweeper.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_retry_meets_an_equal_task_on_a_unique_table(kind: str, empty_db_url: str):
    """C9: the two become one, which keeps the higher count."""
    sweeper = _job_sweeper(kind, empty_db_url, UniqueJob)

    @sweeper.handler()
    def body(session, params, task):
        session.enqueue("A", {"i": 1}, task_class=UniqueJob)  # free: our own row is deleted
        session.execute(text("select 1"))
        raise ValueError

    sweeper.enqueue({"i": 1})
    _enqueue_while_it_runs(sweeper)
    sweeper.sweep(2)
    assert [("A", 2)] == sweeper.waiting()
    sweeper.close()


def _enqueue_while_it_runs(sweeper: Sweeper) -> None:
    """Give the retry an equal row to meet: one with its key, that the claim does not see."""
    sweeper.execute(
        "create function rival() returns trigger language plpgsql as $$ begin"
        " insert into unique_job (task_type, params) values (old.task_type, old.params);"
        " return null; end $$"
    )
    sweeper.execute(
        "create trigger rival after delete on unique_job for each row execute function rival()"
    )


def test_a_retry_meets_an_equal_coalesced_task(sweeper: Sweeper):
    """C9: one that waits already will do the work; the failed one vanishes."""

    @sweeper.handler(backoff=60)
    def body(session, params, task):
        with TaskSession(sweeper.admin) as other:
            other.enqueue("A", {"i": 1}, coalesce=True)  # ours runs: a new one is added
            other.commit()
        raise ValueError

    sweeper.enqueue({"i": 1}, coalesce=True)
    sweeper.sweep()
    assert [("A", 0)] == sweeper.waiting()


def test_requeue_gives_a_fresh_budget(sweeper: Sweeper):
    """A dead task that comes back may fail as often as a new one."""
    calls = []

    @sweeper.handler(max_attempts=2)
    def body(session, params, task):
        calls.append((task.task_id, task.attempt))
        raise ValueError

    sweeper.enqueue()
    sweeper.drain()
    where = DeadTask.__table__.c.task_type == "A"
    with sweeper.admin.begin() as connection:
        connection.execute(statements.requeue(Task.__table__, DeadTask.__table__, where))
    sweeper.drain()
    assert [(1, 1), (1, 2)] * 2 == calls
    assert [("A", 2, "failed")] == sweeper.dead()


def test_an_error_queue_that_refuses_the_task(sweeper: Sweeper):
    """A constraint of the user on the error queue loses nothing: the task stays, counted."""
    sweeper.execute("alter table dead_task add check (task_type <> 'A')")

    @sweeper.handler(max_attempts=1)
    def body(session, params, task):
        mark(session)
        raise ValueError

    sweeper.enqueue()
    sweeper.drain()
    assert ([], [("A", 1)], []) == (sweeper.marks(), sweeper.waiting(), sweeper.dead())
    assert ["settle.refused"] == sweeper.told("settle.refused")
