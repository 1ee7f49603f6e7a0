"""What the statements see that only look, and those that announce sleep."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any
from uuid import UUID

import own_models
import pytest
from claiming import TASK, fill
from own_models import EnumJob
from sqlalchemy import Column, Integer, MetaData, Table, cast, literal, text
from sqlalchemy.dialects.postgresql import TIMESTAMP

from pgtask_sa import DeadTask, reports, statements
from pgtask_sa.mapping import LOCK_CLASS

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

DEAD: Table = DeadTask.__table__
NAMES = ["plain", "Capital", "with space", 'quo"te', "dot.ted", "per%cent"]


def at() -> Any:
    """Return a moment in place of the server's clock."""
    return cast(literal(datetime(2030, 1, 1, 12, tzinfo=timezone.utc)), TIMESTAMP(timezone=True))


@pytest.mark.parametrize(
    ("run_ats", "expected"),
    [
        ([], (False, None)),
        (["null"], (True, None)),
        (["'2030-01-01 12:00Z'"], (True, None)),
        (["'2030-01-01 12:00:30Z'"], (False, 30.0)),
        (["'2030-01-01 11:00Z'", "'2030-01-01 12:00:30Z'"], (True, 30.0)),
        (["'infinity'"], (False, None)),
        (["'-infinity'"], (True, None)),
    ],
)
def test_peek(engine: Engine, run_ats: list[str], expected: tuple[bool, float | None]) -> None:
    """A look tells whether there is work, and how soon there will be more; also past running ones.

    A planned task that runs has a moment in the past, and must not hide what is planned next.
    """
    for run_at in run_ats:
        fill(engine, 1, run_at=run_at)
    fill(engine, 1, "OTHER")
    with engine.connect() as connection:
        found = connection.execute(statements.peek(TASK, at()), {"types": ["X", "A"]}).one()
        assert expected == tuple(found)


def test_waiting_kinds(engine: Engine) -> None:
    """Every type in the table is listed once, ready or planned, in order."""
    for task_type, run_at in (("b", "null"), ("a", "now()"), ("c", "null"), ("b", "now()")):
        fill(engine, 3, task_type, run_at=run_at)
    with engine.connect() as connection:
        assert ["a", "b", "c"] == connection.scalars(statements.waiting_kinds(TASK)).all()


def test_waiting_kinds_of_an_enum(engine: Engine) -> None:
    """Types that are an enum are listed as text; an empty table has none."""
    own_models.create_all(engine)
    kinds = statements.waiting_kinds(EnumJob.__table__)
    with engine.begin() as connection:
        assert [] == connection.scalars(kinds).all()
        fill(connection, 2, "bye-mail", table="jobs.enum_job")
        assert ["bye-mail"] == connection.scalars(kinds).all()


@pytest.mark.parametrize(("most", "expected"), [(100, 7), (7, 7), (5, 5), (1, 1)])
def test_count_waiting(engine: Engine, most: int, expected: int) -> None:
    """Tasks of one type are counted, ready and planned together, up to a limit."""
    fill(engine, 4)
    fill(engine, 3, run_at="'infinity'")
    fill(engine, 9, "OTHER")
    with engine.connect() as connection:
        count = statements.count_waiting(TASK, most)
        assert expected == connection.scalar(count, {"kind": "A"})


def test_count_claimable(engine: Engine) -> None:
    """What is ready or due of these types is counted."""
    fill(engine, 4)
    fill(engine, 3, run_at="'2030-01-01 12:00Z'")
    fill(engine, 2, run_at="'2030-01-01 12:01Z'")
    fill(engine, 9, "OTHER")
    with engine.connect() as connection:
        count = reports.count_claimable(TASK, at())
        assert 7 == connection.scalar(count, {"types": ["A", "NONE"]})


def test_statistics(engine: Engine) -> None:
    """Each type has its counts and the age of the task that is ready longest."""
    with engine.begin() as connection:
        fill(connection, 2)
        connection.execute(text("update task set created_at = '2030-01-01 11:59Z'"))
        fill(connection, 1, run_at="'2030-01-01 11:58Z'")
        fill(connection, 4, run_at="'2030-01-01 13:00Z'")
        fill(connection, 1, "FOR EVER", run_at="'infinity'")
        connection.execute(text("update task set attempts = 2 where run_at = '2030-01-01 11:58Z'"))
        fill(connection, 1, "GONE")
        fill(connection, 2, "LEASED", run_at="'2030-01-01 12:01Z'")
        fill(connection, 1, "LEASED", run_at="'2030-01-01 12:00Z'")  # it has run out
        lease = f"lease_token = '{UUID(int=7)}', attempts = 1"
        connection.execute(text(f"update task set {lease} where task_type = 'LEASED'"))
        gone = "delete from task where task_type = 'GONE' returning *"
        columns = "task_id, task_type, params, created_at, attempts"
        dead = f"insert into dead_task ({columns}, reason) select {columns}, 'failed' from gone"
        connection.execute(text(f"with gone as ({gone}) {dead}"))
        found = connection.execute(reports.statistics(TASK, DEAD, at())).all()
        assert [
            ("A", 3, 0, 4, 0, 1, 0, 120.0),
            ("FOR EVER", 0, 0, 1, 0, 0, 0, None),
            ("GONE", 0, 0, 0, 0, 0, 1, None),
            ("LEASED", 1, 0, 0, 2, 1, 0, 0.0),
        ] == [tuple(row) for row in found]


def test_listing(engine: Engine) -> None:
    """Rows are listed by number, of one type or all, moments that Python has not included."""
    fill(engine, 2)
    fill(engine, 1, "B", run_at="'infinity'")
    with engine.connect() as connection:
        every = connection.execute(reports.listing(TASK, task_type=None, limit=2)).all()
        some = connection.execute(reports.listing(TASK, task_type="B", limit=2)).all()
        assert [(1, "A", "{}", None), (2, "A", "{}", None)] == [
            (row.task_id, row.task_type, row.params, row.run_at) for row in every
        ]
        assert [(3, "B", 9999)] == [(row.task_id, row.task_type, row.run_at.year) for row in some]


def test_enum_labels(engine: Engine) -> None:
    """The labels are those that the database has, whatever this program knows."""
    own_models.create_all(engine)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("alter type jobs.kind add value 'new-mail'"))
        labels = connection.scalars(statements.enum_labels(EnumJob.__table__)).all()
        assert ["welcome-mail", "bye-mail", "new-mail"] == labels


# -- waking up ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["plain", "Capital", "with space", 'quo"te', "dot.ted", "per%cent"]
)
@pytest.mark.parametrize("schema", [None, "Odd.Schema"])
def test_table_oid(engine: Engine, name: str, schema: str | None) -> None:
    """A table is found whatever it and its schema are called, and only in its schema."""
    table = Table(name, MetaData(), Column("a", Integer), schema=schema)
    with engine.begin() as connection:
        connection.execute(text('create schema "Odd.Schema"'))
        assert connection.scalar(statements.table_oid(table)) is None
        table.create(connection)
        condition = text("select oid::bigint from pg_class where relname = :name")
        expected = connection.scalar(condition, {"name": name})
        assert expected == connection.scalar(statements.table_oid(table))


def locks(connection: Connection) -> list[tuple[Any, ...]]:
    condition = "locktype = 'advisory' and objsubid = 2"
    found = text(f"select classid::bigint, objid::bigint, mode from pg_locks where {condition}")
    return [tuple(row) for row in connection.execute(found)]


@pytest.mark.parametrize("oid", [1, 2**31 - 1, 2**31, 2**32 - 1])
def test_announce_and_withdraw(engine: Engine, oid: int) -> None:
    """A sleeper holds a shared lock of the table's number, any number, and lets go of it."""
    with engine.connect() as one, engine.connect() as two:
        for connection in (one, two):
            assert connection.scalar(statements.announce_sleep(), {"oid": oid})
        held = (LOCK_CLASS, oid, "ShareLock")
        assert [held, held] == locks(one)
        for connection in (one, two):
            assert connection.scalar(statements.withdraw_sleep(), {"oid": oid})
        assert [] == locks(one)
