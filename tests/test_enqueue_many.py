"""Bulk: a hundred thousand tasks in one call, one statement per batch."""

from __future__ import annotations

import datetime as dt
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from faces import FACES, Face, committed
from own_models import PlainJob, create_all
from sqlalchemy import Engine, event
from sqlalchemy.orm import sessionmaker

from pgtask_sa import EnqueueError, ParamsError, TaskRegistry, TaskSession


@pytest.fixture
def maker(engine: Engine) -> sessionmaker[TaskSession]:
    create_all(engine)
    return sessionmaker(engine, class_=TaskSession)


@dataclass
class Welcome:
    usr_id: uuid.UUID


class Statements:
    """Counts the inserts that an engine sends."""

    def __init__(self, engine: Engine) -> None:
        self.inserts = 0
        event.listen(engine, "before_cursor_execute", self.see)

    def see(self, _conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
        self.inserts += statement.lower().startswith("insert")


@pytest.mark.parametrize("kind", FACES)
def test_every_task_is_written_once(db_url: str, kind: str) -> None:
    """Whatever the driver, and whatever the text: quotes, backslashes, braces, other alphabets."""
    params = [{"n": n, "text": "'\"\\{}%s :x æ 😀 \t\n"} for n in range(2500)]
    face = Face(kind, db_url)

    written = face.run(lambda session: session.enqueue_many("A", params, batch_size=1000))

    assert written == 2500
    assert face.rows() == [("A", item) for item in params]


def test_a_hundred_thousand_tasks_in_one_call(maker: Any, engine: Engine) -> None:
    """One statement per batch, and done in seconds."""
    statements = Statements(engine)
    start = time.perf_counter()
    with maker.begin() as session:
        written = session.enqueue_many("A", [{"usr_id": n} for n in range(100_000)])
    elapsed = time.perf_counter() - start

    assert (written, statements.inserts) == (100_000, 20)
    assert committed(engine, "count(*), 1 as task_id", "task group by 2") == [(100_000, 1)]
    assert elapsed < 60


def test_a_list_is_judged_whole_before_the_first_row(maker: Any, engine: Engine) -> None:
    """The path says which of the params is bad; the session stays usable."""
    statements = Statements(engine)
    with maker.begin() as session:
        with pytest.raises(ParamsError, match=r"params_list\[5\]\.a: text with a NUL") as caught:
            session.enqueue_many("A", [{"a": 1}] * 5 + [{"a": "\x00"}], batch_size=2)
        assert statements.inserts == 0
        session.enqueue("B")

    assert caught.value.path == "params_list[5].a"
    assert committed(engine) == [("B", {})]


def test_an_iterator_is_read_batch_by_batch(maker: Any, engine: Engine) -> None:
    """Memory is bounded by a batch; an error later leaves it to the caller to roll back."""
    read = []

    def produce() -> Iterator[dict[str, Any]]:
        for number in range(10):
            read.append((number, statements.inserts))
            yield {"n": number if number < 9 else {1}}

    statements = Statements(engine)
    with maker() as session:
        with pytest.raises(ParamsError, match=r"params_list\[9\]\.n: set is not plain JSON"):
            session.enqueue_many("A", produce(), batch_size=4)
        session.rollback()

    assert read == [(n, n // 4) for n in range(10)]
    assert committed(engine) == []


def test_typed_params_columns_and_delay(maker: Any, engine: Engine) -> None:
    """Everything that one enqueue can do, but for callables."""
    tasks = TaskRegistry(task_class=PlainJob)

    @tasks.handler("A")
    def handle(session, params: Welcome): ...

    params = [Welcome(uuid.UUID(int=n)) for n in range(3)]
    with maker.begin() as session:
        moment = dt.datetime(2030, 1, 1, tzinfo=dt.timezone.utc)
        session.enqueue_many(handle, params, run_at=moment, tenant_id=7, note=None)
        session.enqueue_many(handle, params, delay=60, note="x")

    columns = "params->>'usr_id', tenant, note, run_at is null or run_at > now()"
    assert committed(engine, columns, "plain_job") == [
        (str(item.usr_id), tenant, note, True)
        for tenant, note in ((7, None), (None, "x"))
        for item in params
    ]


def test_no_params_no_statement(maker: Any, engine: Engine) -> None:
    """An empty list writes nothing and is no error."""
    statements = Statements(engine)
    with maker.begin() as session:
        assert session.enqueue_many("A", []) == 0
        assert session.enqueue_many("A", iter([])) == 0
        assert session.enqueue_many("A", [None, {}]) == 2

    assert statements.inserts == 1


def test_the_callers_transaction_decides(maker: Any, engine: Engine) -> None:
    """Rolled back with the savepoint, or with all."""
    with maker.begin() as session:
        with session.begin_nested() as savepoint:
            session.enqueue_many("A", [{}] * 3)
            savepoint.rollback()
        session.enqueue_many("B", [{}] * 2)

    assert [row[0] for row in committed(engine)] == ["B", "B"]


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        ([{}], {"batch_size": 0}, "batch_size must be an integer of 1 or more, got 0"),
        ([{}], {"batch_size": True}, "batch_size must be an integer of 1 or more, got True"),
        ([{}], {"batch_size": None}, "batch_size must be an integer of 1 or more, got None"),
        ({"a": 1}, {}, "params_list must be a list of params, got {'a': 1}"),
        ("abc", {}, "params_list must be a list of params, got 'abc'"),
        ([{}], {"tenant_id": 1}, "Task has no extra column tenant_id"),
        ([{}], {"delay": -1}, "delay must be 0 or more seconds"),
    ],
)
def test_wrong_arguments_are_refused(maker: Any, params: Any, options: Any, message: str) -> None:
    """At the call, with nothing written."""
    with maker() as session, pytest.raises(EnqueueError, match=message):
        session.enqueue_many("A", params, **options)


def test_pending_rows_are_flushed_first(maker: Any, engine: Engine) -> None:
    """In the order of the calls, as with any statement."""
    with maker.begin() as session:
        session.enqueue("FIRST")
        session.enqueue_many("SECOND", [{}])
        session.enqueue("THIRD")

    assert [row[0] for row in committed(engine)] == ["FIRST", "SECOND", "THIRD"]
