"""Tables with a unique constraint: skip or raise, and no wait without an end."""

from __future__ import annotations

import secrets
import threading
import time
from typing import Any

import pytest
from faces import FACES, Face, committed
from own_models import DigestJob, UniqueJob, Usr, create_all
from sqlalchemy import Engine, delete, select, text
from sqlalchemy.orm import sessionmaker

from pgtask_sa import DuplicateTask, EnqueueBlocked, EnqueueError, TaskSession


class UniqueSession(TaskSession):
    task_class = UniqueJob
    enqueue_lock_timeout = 0.1


@pytest.fixture
def maker(engine: Engine) -> sessionmaker[UniqueSession]:
    create_all(engine)
    return sessionmaker(engine, class_=UniqueSession)


def rows(engine: Engine) -> list[Any]:
    return committed(engine, table="unique_job")


@pytest.mark.parametrize("kind", FACES)
def test_a_duplicate_is_skipped_by_default(
    maker: Any, engine: Engine, db_url: str, kind: str
) -> None:
    """The caller's unit of work lives on (C4), and the answer says that nothing was added."""

    def work(session):
        session.add(Usr(usr_id=1))
        first = session.enqueue("A", {"a": 1})
        return first, session.enqueue("A", {"a": 1.0}), session.enqueue("A", {"a": 2})

    first, second, third = Face(kind, db_url, task_class=UniqueJob).run(work)

    assert (first.params, second, third.params) == ({"a": 1}, None, {"a": 2})
    assert rows(engine) == [("A", {"a": 1}), ("A", {"a": 2})]
    assert committed(engine, "usr_id as task_id", "usr") == [(1,)]


@pytest.mark.parametrize("kind", FACES)
def test_a_duplicate_raises_on_request(maker: Any, engine: Engine, db_url: str, kind: str) -> None:
    """The session stays usable all the same."""

    def work(session):
        session.add(Usr(usr_id=1))
        session.enqueue("A", on_conflict="raise")
        with pytest.raises(DuplicateTask, match="equal task of type 'A' is waiting already"):
            session.enqueue("A", on_conflict="raise")
        session.enqueue("B")

    Face(kind, db_url, task_class=UniqueJob).run(work)

    assert rows(engine) == [("A", {}), ("B", {})]
    assert committed(engine, "usr_id as task_id", "usr") == [(1,)]


@pytest.mark.parametrize("kind", FACES)
def test_the_wait_for_a_running_task_is_bounded(
    maker: Any, engine: Engine, db_url: str, kind: str
) -> None:
    """A handler that runs for minutes must not stop a web request for minutes (C1)."""
    with maker.begin() as session:
        session.enqueue("A")

    def work(session):
        session.enqueue_lock_timeout = 0.1
        session.add(Usr(usr_id=1))
        for enqueue in (
            lambda: session.enqueue("A"),
            lambda: session.enqueue_many("A", [{}, {"a": 1}]),
        ):
            start = time.monotonic()
            with pytest.raises(EnqueueBlocked, match=r"did not end within 0\.1 s"):
                enqueue()
            assert time.monotonic() - start < 5
        assert session.scalar(text("show lock_timeout")) == "0"
        session.enqueue("B")

    with engine.connect() as worker:
        worker.execute(delete(UniqueJob))
        Face(kind, db_url, task_class=UniqueJob).run(work)
        worker.rollback()

    assert rows(engine) == [("A", {}), ("B", {})]
    assert committed(engine, "usr_id as task_id", "usr") == [(1,)]


def test_a_handler_that_enqueues_its_own_key_elsewhere_gets_an_error(maker: Any) -> None:
    """Through a second session it would wait for itself for ever (C3); in its own it works."""
    with maker.begin() as session:
        session.enqueue("A")
    with maker.begin() as handler_session:
        handler_session.execute(delete(UniqueJob))
        with maker() as helper, pytest.raises(EnqueueBlocked):
            helper.enqueue("A")
        assert handler_session.enqueue("A") is not None


def test_an_enqueue_that_waits_gets_the_key_when_the_run_ends(maker: Any, engine: Engine) -> None:
    """Within the limit the outcome is the right one: one more task (C8)."""
    with maker.begin() as session:
        session.enqueue("A")
    results = []

    def enqueue() -> None:
        with maker.begin() as session:
            session.enqueue_lock_timeout = 30
            results.append(session.enqueue("A"))

    with engine.connect() as worker:
        worker.execute(delete(UniqueJob))
        thread = threading.Thread(target=enqueue)
        thread.start()
        _wait_for_lock(engine)
        worker.commit()
    thread.join(10)

    assert [task.task_type for task in results] == ["A"]
    assert rows(engine) == [("A", {})]


def _wait_for_lock(engine: Engine) -> None:
    from waiting import wait_until

    query = text("select 1 from pg_stat_activity where wait_event_type = 'Lock'")
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        wait_until(lambda: connection.scalar(query), message="nobody waits")


@pytest.mark.parametrize("timeout", ["0", "1500ms"])
def test_the_callers_lock_timeout_is_restored(maker: Any, timeout: str) -> None:
    """The limit is ours for one statement only."""
    with maker() as session:
        session.execute(text(f"set local lock_timeout = '{timeout}'"))
        before = session.scalar(text("show lock_timeout"))
        session.enqueue("A")
        session.enqueue("A")

        assert session.scalar(text("show lock_timeout")) == before


def test_bulk_skips_duplicates_and_counts_what_it_wrote(maker: Any, engine: Engine) -> None:
    """Also duplicates inside one batch and across batches."""
    with maker.begin() as session:
        session.enqueue("A", {"n": 3})
        written = session.enqueue_many("A", [{"n": n % 5} for n in range(20)], batch_size=4)

    assert written == 4
    assert sorted(params["n"] for _, params in rows(engine)) == [0, 1, 2, 3, 4]


def test_bulk_in_opposite_orders_does_not_deadlock(maker: Any, engine: Engine) -> None:
    """Keys are put in order, so two callers meet at the first and not in the middle (C2)."""
    keys = [{"n": n} for n in range(300)]
    errors: list[BaseException] = []
    barrier = threading.Barrier(2)

    def enqueue(params: list[Any]) -> None:
        try:
            with maker.begin() as session:
                session.enqueue_lock_timeout = 30
                barrier.wait(10)
                session.enqueue_many("A", params, batch_size=20)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=enqueue, args=(p,)) for p in (keys, keys[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert errors == []
    assert len(rows(engine)) == 300


def test_callables_are_evaluated_at_the_call(maker: Any, engine: Engine) -> None:
    """The new row has its key by then."""
    with maker.begin() as session:
        usr = Usr()
        session.add(usr)
        session.enqueue("A", lambda: {"usr_id": usr.usr_id})
        assert session.scalar(select(UniqueJob.params)) == {"usr_id": usr.usr_id}

    assert rows(engine) == [("A", {"usr_id": 1})]


def test_coalesce_is_for_tables_without_the_constraint(maker: Any) -> None:
    """The constraint would block it on a running task."""
    with maker() as session, pytest.raises(EnqueueError, match="coalesce cannot be used with"):
        session.enqueue("A", coalesce=True)


def test_a_digest_index_takes_params_of_any_size(maker: Any, engine: Engine) -> None:
    """ON CONFLICT names no columns, so an index on an expression will do (C5)."""
    big = {"a": secrets.token_hex(20_000)}
    with maker.begin() as session:
        first = session.enqueue("A", big, task_class=DigestJob)
        second = session.enqueue("A", big, task_class=DigestJob)

    assert (first.params, second) == (big, None)
