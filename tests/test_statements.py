"""What the statements do that write, besides the claims."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import own_models
import pytest
from claiming import TASK, fill, ids, take
from own_models import DigestJob, EnumJob, HstoreJob, PlainJob, UniqueJob
from sqlalchemy import (
    Table,
    cast,
    insert,
    literal,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import TIMESTAMP
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pgtask_sa import DeadTask, DeadTaskMixin, TaskMixin, statements
from pgtask_sa.claim import claim_by_id, fair_claim
from pgtask_sa.mapping import unique_columns
from pgtask_sa.rows import WHOLE_ROW

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

DEAD: Table = DeadTask.__table__
NOON = datetime(2030, 1, 1, 12, tzinfo=timezone.utc)


def at(moment: datetime = NOON) -> Any:
    return cast(literal(moment), TIMESTAMP(timezone=True))


def claim_and_change(
    connection: Connection, table: Table = TASK, task_id: int = 1, **changes: Any
) -> dict[str, Any]:
    """Claim a task and return the parameters that put it back."""
    row = connection.execute(claim_by_id(table), {"task_id": task_id}).mappings().one()
    changed = {
        "attempts": row["attempts"],
        "last_error": row["last_error"],
        "delay": timedelta(minutes=1),
        **changes,
    }
    return {WHOLE_ROW: row[WHOLE_ROW]} | {f"pgtask_{name}": v for name, v in changed.items()}


def put_back(
    connection: Connection,
    values: dict[str, Any],
    table: Table = TASK,
    unique: Any = None,
    now: Any = None,
) -> None:
    names = connection.execute(statements.stored_names(table)).scalars().all()
    connection.execute(statements.retry(table, names, unique, now), values)


def rows(connection: Connection, columns: str, table: str = "task") -> list[tuple[Any, ...]]:
    found = connection.execute(text(f"select {columns} from {table} order by task_id"))
    return [tuple(row) for row in found]


# -- putting back -------------------------------------------------------------------------------


def test_retry_puts_the_same_row_back(engine: Engine) -> None:
    """A task comes back under its number, to the last digit, with the count, error and delay."""
    with engine.begin() as connection:
        values = "'A', '{\"n\": 1.000000000000000000001}', '2020-02-02Z', 77"
        names = "task_type, params, created_at, coalesce_key"
        connection.execute(text(f"insert into task ({names}) values ({values})"))
        before = rows(connection, "task_id, task_type, params::text, created_at, coalesce_key")
        values = claim_and_change(connection, attempts=3, last_error="why")
        put_back(connection, values, now=at())
        after = rows(connection, "task_id, task_type, params::text, created_at, coalesce_key")
        assert before == after
        assert [(3, "why", NOON + timedelta(minutes=1))] == rows(
            connection, "attempts, last_error, run_at"
        )


def test_retry_goes_by_the_clock_of_the_server(engine: Engine) -> None:
    """The delay counts from now, not from the start of a transaction that took long."""
    fill(engine, 1)
    with engine.begin() as connection:
        values = claim_and_change(connection, delay=timedelta(0))
        start = connection.scalar(text("select now()"))
        put_back(connection, values)
        assert rows(connection, "run_at")[0][0] > start


@pytest.mark.parametrize("model", [PlainJob, EnumJob, HstoreJob, UniqueJob, DigestJob])
def test_retry_of_own_tables(engine: Engine, model: Any) -> None:
    """Rows of every kind of table come back as they were, own columns included."""
    own_models.create_all(engine)
    table = model.__table__
    label = {"EnumJob": "bye-mail"}.get(model.__name__, "A")
    with engine.begin() as connection:
        fill(connection, 1, label, table=table.fullname)
        if model is PlainJob:
            connection.execute(text("update plain_job set tenant = 9, note = 'n'"))
        columns = ", ".join(c.name for c in table.c if c.name not in ("run_at", "ticket"))
        before = rows(connection, columns, table.fullname)
        values = claim_and_change(connection, table)
        put_back(connection, values, table, unique_columns(model))
        assert before == rows(connection, columns, table.fullname)


@pytest.mark.parametrize("model", [UniqueJob, DigestJob])
@pytest.mark.parametrize(("mine", "other"), [(2, 5), (5, 2)])
def test_retry_merges_with_an_equal_task(engine: Engine, model: Any, mine: int, other: int) -> None:
    """On a unique table an equal task that came meanwhile takes over the higher count."""
    own_models.create_all(engine)
    name = model.__table__.name
    with engine.begin() as connection:
        fill(connection, 1, table=name)
        values = claim_and_change(connection, model.__table__, attempts=mine, last_error="why")
        fill(connection, 1, table=name)
        connection.execute(text(f"update {name} set attempts = {other}"))
        put_back(connection, values, model.__table__, unique_columns(model))
        assert [(2, 5, "why")] == rows(connection, "task_id, attempts, last_error", name)


def test_odd_names_survive_a_retry(engine: Engine) -> None:
    """Names that need quotes, or hold parentheses, quotes and per cent signs, do no harm."""

    class Base(DeclarativeBase):
        pass

    class OddJob(TaskMixin, Base):
        __tablename__ = 'odd (job) "x" 100%'
        odd: Mapped[int | None] = mapped_column('a (b) "c" %s')

    table = OddJob.__table__
    with engine.begin() as connection:
        Base.metadata.create_all(connection)
        connection.execute(insert(table).values(task_type="A", **{'a (b) "c" %s': 4}))
        values = claim_and_change(connection, table)
        put_back(connection, values, table)
        assert [(1, 4)] == [
            tuple(row) for row in connection.execute(select(table.c.task_id, column_of(table)))
        ]


def column_of(table: Table) -> Any:
    return table.c['a (b) "c" %s']


# -- coalesced tasks ----------------------------------------------------------------------------


def coalesced(connection: Connection, run_at: str, key: int = 5) -> None:
    values = f"'A', '{{\"a\": 1}}', {key}, {run_at}"
    names = "task_type, params, coalesce_key, run_at"
    connection.execute(text(f"insert into task ({names}) values ({values})"))


@pytest.mark.parametrize(
    ("run_at", "key", "expected"),
    [
        ("null", 5, [2]),
        ("'2030-01-01 12:01Z'", 5, [2]),
        ("'2030-01-01 12:01:01Z'", 5, []),
        ("null", 6, []),
    ],
)
def test_equal_waiting(engine: Engine, run_at: str, key: int, expected: list[int]) -> None:
    """An equal task counts if it is due by the time that this one would be."""
    with engine.begin() as connection:
        coalesced(connection, "null")
        values = claim_and_change(connection)
        coalesced(connection, run_at, key)
        assert expected == ids(connection.execute(statements.equal_waiting(TASK, at()), values))


def test_equal_waiting_holds_it(engine: Engine) -> None:
    """The equal task that was found cannot be claimed before this transaction ends."""
    with engine.begin() as connection:
        coalesced(connection, "null")
        coalesced(connection, "null")
    claim = fair_claim(TASK, 5, due_first=False)
    with engine.connect() as one, engine.connect() as two:
        values = claim_and_change(one)
        assert [2] == ids(one.execute(statements.equal_waiting(TASK), values))
        assert [] == take(two, claim)
        one.rollback()
        assert [1, 2] == sorted(ids(take(two, claim)))


# -- the error queue ----------------------------------------------------------------------------


def test_bury_and_requeue(engine: Engine) -> None:
    """A buried task keeps number, params and error; brought back it has all attempts again."""
    with engine.begin() as connection:
        fill(connection, 2)
        values = claim_and_change(connection, attempts=10, last_error="why", reason="failed")
        connection.execute(statements.bury(TASK, DEAD), values)
        assert [(1, 10, "why", "failed")] == rows(
            connection, "task_id, attempts, last_error, reason", "dead_task"
        )
        back = connection.execute(statements.requeue(TASK, DEAD, DEAD.c.task_id == 1))
        assert [1] == ids(back)
        assert [(1, 0, "why", None), (2, 0, None, None)] == rows(
            connection, "task_id, attempts, last_error, run_at"
        )
        assert [] == rows(connection, "task_id", "dead_task")


def test_requeue_only_what_was_chosen(engine: Engine) -> None:
    """Dead tasks that the condition does not name stay where they are."""
    with engine.begin() as connection:
        fill(connection, 3)
        for task_id in (1, 2, 3):
            values = claim_and_change(connection, task_id=task_id, reason="failed")
            connection.execute(statements.bury(TASK, DEAD), values)
        assert [2] == ids(connection.execute(statements.requeue(TASK, DEAD, DEAD.c.task_id == 2)))
        assert [(1,), (3,)] == rows(connection, "task_id", "dead_task")


def enum_error_queue(of_its_own: bool) -> tuple[Table, Table]:
    """Return an enum task table, and an error queue whose type is text, or the enum as well."""

    class Base(DeclarativeBase):
        pass

    class Job(TaskMixin, Base):
        __tablename__ = "job"
        task_type = mapped_column(own_models.EnumJob.__table__.c.task_type.type)

    class DeadJob(DeadTaskMixin, Base):
        __tablename__ = "dead_job"
        if of_its_own:
            task_type = mapped_column(own_models.EnumJob.__table__.c.task_type.type)

    return Job.__table__, DeadJob.__table__


@pytest.mark.parametrize("of_its_own", [True, False])
def test_an_error_queue_of_an_enum_table(engine: Engine, of_its_own: bool) -> None:
    """Tasks with an enum type go to an error queue of that enum, or of text, and come back."""
    job, dead = enum_error_queue(of_its_own)
    own_models.create_all(engine)
    with engine.begin() as connection:
        job.metadata.create_all(connection)
        fill(connection, 1, "bye-mail", table="job")
        values = claim_and_change(connection, job, reason="failed")
        connection.execute(statements.bury(job, dead), values)
        assert [("bye-mail",)] == rows(connection, "task_type::text", "dead_job")
        assert [1] == ids(connection.execute(statements.requeue(job, dead, dead.c.task_id == 1)))
        assert [("bye-mail",)] == rows(connection, "task_type::text", "job")


def test_requeue_meets_an_equal_task(engine: Engine) -> None:
    """On a unique table a dead task whose equal waits is let go: the one that waits serves both."""
    own_models.create_all(engine)
    unique = UniqueJob.__table__
    with engine.begin() as connection:
        fill(connection, 1, table="unique_job")
        values = claim_and_change(connection, unique, reason="failed")
        connection.execute(statements.bury(unique, DEAD), values)
        fill(connection, 1, table="unique_job")
        back = connection.execute(statements.requeue(unique, DEAD, DEAD.c.task_id == 1))
        assert [] == back.all()
        assert [(2,)] == rows(connection, "task_id", "unique_job")
        assert [] == rows(connection, "task_id", "dead_task")


def test_task_exists(engine: Engine) -> None:
    """A row is there while it is only being claimed, and not when that is committed."""
    fill(engine, 1)
    exists = statements.task_exists(TASK)
    with engine.connect() as worker, engine.connect() as other:
        worker.execute(claim_by_id(TASK), {"task_id": 1})
        assert other.scalar(exists, {"task_id": 1})
        worker.commit()
        assert not other.scalar(exists, {"task_id": 1})
