"""The priority of a task: given at the enqueue, kept whatever becomes of the task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from faces import FACES, Face
from own_models import create_all
from sqlalchemy import SmallInteger, insert, literal, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sweeping import Sweeper, sweepers

from pgtask_sa import (
    ConfigurationError,
    EnqueueError,
    Snooze,
    Task,
    TaskMixin,
    TaskSession,
    insert_task,
)
from pgtask_sa.reports import by_ids
from pgtask_sa.statements import mapped_names, requeue

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine


@pytest.fixture(params=FACES)
def face(request: pytest.FixtureRequest, db_url: str) -> Face:
    return Face(request.param, db_url)


def test_priority_in_every_way_to_the_table(face: Face) -> None:
    """Every enqueue takes a priority, and without one it is 0."""

    def work(session: Any) -> None:
        session.enqueue("NONE")
        session.enqueue("PLAIN", priority=-32768)
        session.enqueue("LATER", lambda: {"a": 1}, priority=32767)
        session.enqueue("COALESCED", priority=3, coalesce=True)
        session.enqueue_many("MANY", [{}, {}], priority=-2)
        session.execute(insert_task("CORE", priority=4))
        session.execute(insert_task("SQL", priority=literal(2) + 3))

    face.run(work)

    assert {
        *(("NONE", 0), ("PLAIN", -32768), ("LATER", 32767), ("COALESCED", 3)),
        *(("MANY", -2), ("CORE", 4), ("SQL", 5)),
    } == set(face.rows("task_type, priority"))


def test_a_task_knows_its_priority(face: Face) -> None:
    """The object that an enqueue returns has the priority, also the default one."""

    def work(session: Any) -> list[Any]:
        return [session.enqueue("A", priority=7), session.enqueue("A")]

    urgent, plain = face.run(work)
    assert 7 == urgent.priority
    assert plain.__dict__.get("priority") in (0, None)


@pytest.mark.parametrize(
    ("priority", "problem"),
    [
        (32768, "priority must be from -32768 to 32767, got 32768"),
        (-32769, "priority must be from -32768 to 32767, got -32769"),
        (True, "priority must be an integer, got True"),
        (1.0, "priority must be an integer, got 1.0"),
        ("1", "priority must be an integer, got '1'"),
        (None, "priority must be an integer, got None"),
    ],
)
def test_bad_priorities_are_refused_at_the_call(priority: Any, problem: str) -> None:
    """What the column cannot hold is an error at the call, and nothing is added."""
    session = TaskSession()
    calls = [
        lambda: session.enqueue("A", priority=priority),
        lambda: session.enqueue_many("A", [{}], priority=priority),
        lambda: insert_task("A", priority=priority),
    ]
    for call in calls:
        with pytest.raises(EnqueueError) as raised:
            call()
        assert problem == str(raised.value)
    assert not session.new


def test_priority_is_no_part_of_the_key(engine: Engine) -> None:
    """Coalesced onto an equal task of another priority nothing is added; that one keeps its own."""
    with TaskSession(engine) as session:
        session.enqueue("A", priority=5, coalesce=True)
        assert session.enqueue("A", priority=1, coalesce=True) is None
        session.commit()
    with engine.connect() as connection:
        assert [5] == list(connection.scalars(text("select priority from task")))


@pytest.fixture
def sweeper(db_url: str) -> Iterator[Sweeper]:
    yield from sweepers(db_url, "sync")


def test_priority_is_kept_by_every_outcome(sweeper: Sweeper) -> None:
    """A task that is retried, snoozed, or buried and brought back has the priority it had."""

    @sweeper.handler("FAILS", backoff=60)
    def fail(session: Any, params: Any, task: Any) -> None:
        raise ValueError

    @sweeper.handler("SNOOZES")
    def snooze(session: Any, params: Any, task: Any) -> None:
        raise Snooze(60)

    @sweeper.handler("DIES", max_attempts=1)
    def die(session: Any, params: Any, task: Any) -> None:
        raise ValueError

    for priority, kind in enumerate(("FAILS", "SNOOZES", "DIES"), 7):
        sweeper.enqueue(task_type=kind, priority=priority)
    sweeper.sweep(3)
    expected = [("FAILS", 7), ("SNOOZES", 8)]
    select = "select task_type, priority from {} order by priority"
    assert expected == sweeper.rows(select.format("task"))
    assert [("DIES", 9)] == sweeper.rows(select.format("dead_task"))

    task, dead = sweeper.tables.task, sweeper.tables.dead
    names = [name for name in mapped_names(dead) if name in task.c]
    with sweeper.admin.begin() as connection:
        connection.execute(requeue(task, dead, by_ids(dead), names), {"ids": [3]})
    assert [*expected, ("DIES", 9)] == sweeper.rows(select.format("task"))


@pytest.mark.parametrize(
    "column",
    [mapped_column(SmallInteger, nullable=True), mapped_column("priority", nullable=False)],
    ids=["null", "text"],
)
def test_a_priority_of_ones_own_must_be_an_integer(column: Any) -> None:
    """A task class whose own column could not be sorted by is refused when it is mapped."""

    class Base(DeclarativeBase):
        pass

    kind = int if column.column.nullable else str
    with pytest.raises(ConfigurationError, match="its column priority must be an integer"):
        type(
            "Job",
            (TaskMixin, Base),
            {
                "__tablename__": "job",
                "__annotations__": {"priority": Mapped[kind]},
                "priority": column,
            },
        )


def test_plain_inserts_have_priority_0(engine: Engine) -> None:
    """Rows that plain SQL inserts need not name a priority."""
    create_all(engine)
    with engine.begin() as connection:
        connection.execute(insert(Task).values(task_type="A"))
        assert 0 == connection.scalar(text("select priority from task"))
