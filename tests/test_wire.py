"""Statements that go to libpq prepared, whatever the server has forgotten."""

from __future__ import annotations

from decimal import Decimal
from itertools import pairwise

import pytest
from sqlalchemy import Engine, Float, Numeric, event, literal_column, select, text
from sweeping import Sweeper

from pgtask_sa import claiming, ground, since, tail, wire
from pgtask_sa.engines import worker_engine
from pgtask_sa.wire import PREPARED, Wired


@pytest.fixture
def connection(db_url):
    engine = worker_engine(db_url, 1)
    with engine.connect() as connection:
        yield connection
    engine.dispose()


@pytest.fixture
def fetch(connection):
    """Fetch one of two statements in a transaction of its own."""
    statements = [Wired(select(literal_column(str(number)).label("n"))) for number in range(2)]

    def fetch(number: int):
        with connection.begin():
            return statements[number].fetch(connection, {}, keep=True)

    return fetch


def _driver(connection):
    return connection.connection.driver_connection


def test_statements_that_were_forgotten_one_after_the_other(connection, fetch):
    """What was prepared since all were forgotten is still known when another one is missed."""
    fetch(0)
    _driver(connection).execute("deallocate all")
    _driver(connection).commit()
    assert [[{"n": n}] for n in (1, 0, 1, 0)] == [fetch(n) for n in (1, 0, 1, 0)]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Float(), 0.5),
        (Float(asdecimal=True), Decimal("0.5")),
        (Numeric(), Decimal("0.5")),
        (Numeric(asdecimal=False), 0.5),
    ],
)
def test_numbers_in_columns_of_the_users_own(connection, kind, expected):
    """They come as the ORM would give them."""
    statement = select(literal_column("0.5", kind).cast(kind).label("number"))
    (row,) = Wired(statement).fetch(connection, {}, keep=True)
    assert (type(expected), expected) == (type(row["number"]), row["number"])


def test_a_statement_that_is_there_against_expectation(connection, fetch):
    """It is used; and prepared again, if the ROLLBACK in between has all of them forgotten."""
    fetch(0)
    setattr(_driver(connection), PREPARED, set())
    _driver(connection).execute("select 1", prepare=True)
    _driver(connection).commit()
    assert [{"n": 0}] == fetch(0)


@pytest.mark.direct  # through a pooler nothing is claimed ahead
@pytest.mark.parametrize(("batch_size", "expected"), [(1, 2), (5, 2)])
def test_what_is_sent_for_a_task_that_writes(db_url, monkeypatch, batch_size, expected):
    """COMMIT with the next claim and its savepoint, the row; in a batch savepoint and row.

    The note is presence's.
    """
    sent: list[str] = []

    def counted(owner, name):
        whole = getattr(owner, name)

        def send(*given, **named):
            sent.append(name)
            return whole(*given, **named)

        monkeypatch.setattr(owner, name, send)

    def see(_connection, _cursor, statement, *_):
        sent.append(statement)

    sweeper, marks = Sweeper("sync", db_url, batch_size=batch_size), []

    @sweeper.handler()
    def body(session, params, task):
        session.execute(text("insert into mark values (1)"))
        marks.append(len(sent))

    for module in (tail, since):  # a busy machine is not taken for dead rows
        monkeypatch.setattr(module, "SLOW", 1000.0)
    sweeper.enqueue(*[{}] * 5)
    counted(wire, "exchange")
    counted(claiming, "exchange")
    counted(ground, "send")
    event.listen(Engine, "before_cursor_execute", see)
    try:
        sweeper.sweep(5 // batch_size)
    finally:
        event.remove(Engine, "before_cursor_execute", see)
    sweeper.close()
    assert [expected] * 3 == [after - before for before, after in pairwise(marks[1:])]
