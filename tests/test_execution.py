"""What a handler may do to its transaction, and that no task is lost or done twice by it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from sqlalchemy import text
from sweeping import KINDS, Sweeper, mark, sweepers

from pgtask_sa import TaskFailed
from pgtask_sa.settle import TransactionLost


@pytest.fixture(params=KINDS)
def sweeper(request, db_url):
    yield from sweepers(db_url, request.param)


def test_a_handler_that_returns_is_done(sweeper: Sweeper):
    """The row is gone with the same commit that brings what the handler wrote."""

    @sweeper.handler()
    def body(session, params, task):
        mark(session, params["i"])

    sweeper.enqueue({"i": 7})
    assert [1, 0] == sweeper.sweep(2)
    assert ([7], []) == (sweeper.marks(), sweeper.waiting())
    assert ["task.done"] == sweeper.told()


def test_a_commit_of_the_handler_is_undone_when_it_fails(sweeper: Sweeper):
    """B1: commit() in a handler ends nothing but its own savepoint."""

    @sweeper.handler()
    def body(session, params, task):
        mark(session)
        session.commit()
        raise ValueError("after commit")

    sweeper.enqueue()
    sweeper.sweep()
    assert ([], [("A", 1)]) == (sweeper.marks(), sweeper.waiting())


def test_a_rollback_of_the_handler_undoes_only_its_own_work(sweeper: Sweeper):
    """B2: what it writes after rollback() is committed together with the claim."""

    @sweeper.handler()
    def body(session, params, task):
        mark(session, 1)
        session.rollback()
        mark(session, 2)

    sweeper.enqueue()
    sweeper.sweep()
    assert ([2], []) == (sweeper.marks(), sweeper.waiting())


def test_a_commit_then_a_rollback_keeps_what_was_committed(sweeper: Sweeper):
    """A handler's commit() holds against its own later rollback()."""

    @sweeper.handler()
    def body(session, params, task):
        mark(session, 1)
        session.commit()
        mark(session, 2)
        session.rollback()

    sweeper.enqueue()
    sweeper.sweep()
    assert ([1], []) == (sweeper.marks(), sweeper.waiting())


def test_a_savepoint_of_the_handler(sweeper: Sweeper):
    """B13: tasks and rows of a begin_nested() that is rolled back are not written, others are."""

    @sweeper.handler()
    def body(session, params, task):
        with session.begin_nested():
            mark(session, 1)
            session.enqueue("KEPT")
        inner = session.begin_nested()
        mark(session, 2)
        session.enqueue("LOST")
        inner.rollback()

    sweeper.enqueue()
    sweeper.sweep()
    assert ([1], [("KEPT", 0)]) == (sweeper.marks(), sweeper.waiting())


def test_a_swallowed_database_error_is_a_failure(sweeper: Sweeper):
    """B4: COMMIT of an aborted transaction would be a silent rollback, for ever."""

    @sweeper.handler()
    def body(session, params, task):
        mark(session)
        with contextlib.suppress(Exception):
            session.connection().execute(text("select 1/0"))

    sweeper.enqueue()
    sweeper.sweep()
    assert ([], [("A", 1)]) == (sweeper.marks(), sweeper.waiting())
    assert "division by zero" in sweeper.last_error()


def test_a_database_error_is_counted(sweeper: Sweeper):
    """B5: the failure is recorded although the handler's part of the transaction is aborted."""

    @sweeper.handler()
    def body(session, params, task):
        session.execute(text("select 1/0"))

    sweeper.enqueue()
    sweeper.sweep()
    assert [("A", 1)] == sweeper.waiting()
    assert sweeper.last_error().startswith("DataError: division by zero\n")


def _driver(session):
    return session.connection().connection.dbapi_connection


def _libpq(session, command):
    session.connection().connection.driver_connection.pgconn.exec_(command)


ENDINGS = {
    "COMMIT": lambda session: session.execute(text("COMMIT")),
    "rollback": lambda session: session.execute(text(" rollback work ")),
    "BEGIN": lambda session: session.execute(text("BEGIN")),
    "connection.commit": lambda session: session.connection().commit(),
    "connection.rollback": lambda session: session.connection().rollback(),
    "root.commit": lambda session: session.connection().get_transaction().commit(),
    "driver.commit": lambda session: _driver(session).commit(),
    "driver.rollback": lambda session: _driver(session).rollback(),
    "cursor COMMIT": lambda session: _driver(session).cursor().execute("commit"),
    "cursor ROLLBACK": lambda session: _driver(session).cursor().execute("rollback"),
    "executemany": lambda session: _driver(session).cursor().executemany("commit", [()]),
    "two in one": lambda session: session.execute(text("select 1; commit")),
    "commented": lambda session: session.execute(text("/* /* */ */ commit and chain")),
    "libpq COMMIT": lambda session: _libpq(session, b"commit"),
    "libpq ROLLBACK": lambda session: _libpq(session, b"rollback"),
    "libpq COMMIT AND CHAIN": lambda session: _libpq(session, b"commit and chain"),
    "libpq ROLLBACK AND CHAIN": lambda session: _libpq(session, b"rollback and chain"),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_handler_that_ends_the_transaction(sweeper: Sweeper, name: str):
    """B6: whatever it does afterwards, nothing is lost, and the next task runs as ever."""
    for after in ("RETURNS", "RAISES", "GOES ON"):

        @sweeper.handler(after, max_attempts=2)
        def body(session, params, task, after=after):
            mark(session, 1)
            try:
                ENDINGS[name](session)
            except TaskFailed:
                if after != "GOES ON":
                    raise
            if after == "RAISES":
                raise ValueError("later")
            if after == "GOES ON":
                mark(session, 2)

        sweeper.enqueue(task_type=after)
        _drain(sweeper)
        assert _outcome_of(name, after) == (sweeper.marks(), sweeper.waiting(), sweeper.dead())
        sweeper.execute("truncate mark, dead_task")

    @sweeper.handler("GOOD")
    def good(session, params, task):
        mark(session, 7)

    sweeper.enqueue(task_type="GOOD")
    sweeper.drain()
    assert [7] == sweeper.marks()


def _drain(sweeper: Sweeper) -> None:
    """Drain, as a lane does that takes another connection when one is beyond repair."""
    for _ in range(3):
        with contextlib.suppress(TransactionLost):
            sweeper.drain()
            return
    raise AssertionError("no end")


ROADS = [
    b"commit and chain",
    b"commit; begin",
    b"rollback and chain",
    b"rollback; begin; insert into mark values (9)",
]


@pytest.mark.parametrize("command", ROADS, ids=bytes.decode)
def test_a_handler_that_begins_another_transaction(sweeper: Sweeper, command: bytes):
    """The rest of its batch is neither lost nor to blame, and it is not run for ever."""
    sweeper.batch_size = 3
    calls = []

    @sweeper.handler("INNOCENT", max_attempts=1)
    def innocent(session, params, task):
        mark(session, params["i"])

    @sweeper.handler("EVIL", max_attempts=2)
    def evil(session, params, task):
        calls.append(1)
        mark(session, 5)
        _libpq(session, command)

    for priority, kind in enumerate(["INNOCENT", "EVIL", "INNOCENT"]):
        sweeper.enqueue({"i": priority}, task_type=kind, priority=priority)
    _drain(sweeper)
    assert {0, 2} == set(sweeper.marks()) - {5}
    assert [sweeper.marks().count(i) for i in (0, 2)] == [1, 1]
    assert len(calls) <= 4  # in a batch nobody can tell at first whose doing it is
    assert [] == sweeper.waiting()
    assert [] == [dead for dead in sweeper.dead() if dead[0] == "INNOCENT"]


SETTINGS = {
    "SET LOCAL": "set local statement_timeout = '50ms'",
    "SET": "set statement_timeout = '50ms'",
    "function": "select set_config('statement_timeout', '50ms', true)",
    "among others": "select 1; set local statement_timeout = '50ms'",
}


@pytest.mark.direct  # through a pooler SET LOCAL lasts until the end of the transaction
@pytest.mark.parametrize("how", SETTINGS)
def test_what_a_handler_sets_is_gone_with_the_task(sweeper: Sweeper, how: str):
    """Also for the next tasks of the same batch; what the worker has set is there again."""
    sweeper.batch_size = 2
    asked = "select current_setting('{}', true)"
    names = ("statement_timeout", "my.tenant", "datestyle", "client_connection_check_interval")
    seen = []

    @sweeper.handler("SETS")
    def sets(session, params, task):
        seen.append([session.scalar(text(asked.format(name))) or "" for name in names])
        session.connection().exec_driver_sql(SETTINGS[how])
        session.execute(text("set local my.tenant = '7'"))
        session.execute(text("set local datestyle = 'German'"))

    @sweeper.handler("LOOKS")
    def looks(session, params, task):
        seen.append([session.scalar(text(asked.format(name))) or "" for name in names])

    sweeper.enqueue(task_type="SETS", priority=0)
    sweeper.enqueue(task_type="LOOKS", priority=1)
    sweeper.drain()
    assert 2 == len(seen)
    assert seen[0] == seen[1]
    assert "0" == seen[1][0]


def _outcome_of(name: str, after: str) -> tuple[list[int], list[Any], list[Any]]:
    if name == "libpq COMMIT" and after == "RETURNS":
        return [1], [], []  # a COMMIT that nobody can undo, and no error: the task is done
    if after == "GOES ON" and name != "root.commit" and "libpq" not in name:
        return [1, 2], [], []  # it was refused, and the handler took it as it was
    return [1, 1] if "libpq COMMIT" in name else [], [], [(after, 2, "failed")]


def test_a_batch_whose_rows_were_committed_away(db_url: str):
    """Those whose turn had not come are put back, with the count that they had."""
    sweeper = Sweeper("sync", db_url, batch_size=5)
    calls = []

    @sweeper.handler(max_attempts=1)
    def body(session, params, task):
        calls.append(params["i"])
        mark(session, params["i"])
        if len(calls) == 2:
            _libpq(session, b"commit")

    sweeper.enqueue(*[{"i": i} for i in range(5)])
    sweeper.drain()
    assert (list(range(5)), list(range(5))) == (sorted(calls), sweeper.marks())
    assert ([], []) == (sweeper.waiting(), sweeper.dead())
    sweeper.close()


def test_a_failure_found_at_commit(sweeper: Sweeper):
    """B9: a deferred constraint fails when the handler has returned; it counts as its failure."""
    _orphans(sweeper, max_attempts=2)
    sweeper.enqueue({"parent": 1}, {"parent": 99})
    sweeper.drain()
    assert ([(1,)], []) == (sweeper.rows("select parent from child"), sweeper.waiting())
    assert [("A", 2, "failed")] == sweeper.dead()
    assert "foreign key" in sweeper.last_error()


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_found_at_commit_of_a_batch(kind: str, db_url: str):
    """B9: only the culprit's attempt counts, and the others are done once."""
    sweeper = Sweeper(kind, db_url, batch_size=10)
    _orphans(sweeper, max_attempts=3)
    sweeper.enqueue({"parent": 99}, *[{"parent": 1}] * 9)
    sweeper.sweep()
    assert ([(1,)] * 9, [("A", 1)]) == (
        sweeper.rows("select parent from child"),
        sweeper.waiting(),
    )
    sweeper.close()


def _orphans(sweeper: Sweeper, max_attempts: int) -> None:
    sweeper.execute("create table parent (id int primary key); insert into parent values (1)")
    sweeper.execute(
        "create table child (parent int references parent deferrable initially deferred)"
    )

    @sweeper.handler(max_attempts=max_attempts)
    def body(session, params, task):
        session.execute(text("insert into child values (:parent)"), params)


@pytest.mark.parametrize("size", [1, 10])
def test_one_poison_in_a_batch(sweeper: Sweeper, size: int):
    """B12: the good ones run once each, the poison until it is buried."""
    sweeper.batch_size = size
    calls = []

    @sweeper.handler(max_attempts=3)
    def body(session, params, task):
        calls.append(params["i"])
        mark(session, params["i"])
        if params["i"] == 5:
            raise ValueError("poison")

    sweeper.enqueue(*[{"i": i} for i in range(10)])
    sweeper.drain()
    assert sorted([*range(10), 5, 5]) == sorted(calls)
    assert ([0, 1, 2, 3, 4, 6, 7, 8, 9], []) == (sweeper.marks(), sweeper.waiting())
    assert [("A", 3, "failed")] == sweeper.dead()
