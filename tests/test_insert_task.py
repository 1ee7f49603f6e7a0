"""insert_task: an insert for Core, which composes into one statement with other rows."""

from __future__ import annotations

import datetime as dt
import uuid
from dataclasses import dataclass
from typing import Any

import pytest
from faces import FACES, Face, committed
from own_models import Base, EnumJob, HstoreJob, Kind, PlainJob, UniqueJob, Usr, create_all
from sqlalchemy import Engine, bindparam, create_engine, event, func, insert, literal, select, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Session

from pgtask_sa import EnqueueError, ParamsError, Task, TaskRegistry, insert_task


@pytest.fixture
def own(engine: Engine) -> Engine:
    """Give the engine of a database with our tables and those of own_models."""
    create_all(engine)
    return engine


def signup(name: str) -> Any:
    """Write a user and their welcome task in one statement; return the new key."""
    usr = insert(Usr).values(name=name).returning(Usr.usr_id, Usr.name).cte("usr")
    task = insert_task("SEND_EMAIL_WELCOME", {"usr_id": usr.c.usr_id}).cte("task")
    return select(usr.c.usr_id).add_cte(task)


@pytest.mark.parametrize("kind", FACES)
def test_the_signup_is_one_statement(db_url: str, kind: str) -> None:
    """Row and task are written by CTEs, and the task's params hold the row's new key."""
    face = Face(kind, db_url)
    Base.metadata.tables["usr"].create(create_engine(db_url))
    statements = []

    def work(session):
        connection = session.connection()
        event.listen(connection, "before_cursor_execute", lambda *a: statements.append(a[2]))
        return session.scalar(signup("Ann"))

    usr_id = face.run(work)

    assert len(statements) == 1
    assert face.rows() == [("SEND_EMAIL_WELCOME", {"usr_id": usr_id})]


def test_the_signup_is_all_or_nothing(own: Engine) -> None:
    """A rollback takes both rows."""
    with own.connect() as connection:
        connection.execute(signup("Ann"))
        connection.rollback()

    assert committed(own) == []


@pytest.mark.parametrize("kind", FACES)
def test_expressions_at_any_depth(db_url: str, kind: str) -> None:
    """In objects and lists, beside plain values of every kind, and more than fifty of them."""
    face = Face(kind, db_url)
    usr = select(literal(7).label("id"), literal("Ann").label("name")).cte("usr")
    plain = {"int": 1, "none": None, "text": 'it\'s "%s" :x', "list": [1, None], "yes": True}
    params = {
        "deep": [usr.c.id, None, "x", {"name": usr.c.name, "plain": plain}, [usr.c.id]],
        "nothing": func.nullif(usr.c.id, usr.c.id),
        **{f"key{n}": usr.c.id + n for n in range(120)},
        "many": [usr.c.id + n for n in range(230)],
        **plain,
    }

    face.run(lambda session: session.execute(insert_task("A", params)))

    assert face.rows() == [
        (
            "A",
            {
                "deep": [7, None, "x", {"name": "Ann", "plain": plain}, [7]],
                "nothing": None,
                **{f"key{n}": 7 + n for n in range(120)},
                "many": [7 + n for n in range(230)],
                **plain,
            },
        )
    ]


@pytest.mark.parametrize(
    ("task_class", "task_type", "table"),
    [
        (PlainJob, "A", "plain_job"),
        (EnumJob, Kind.BYE, "jobs.enum_job"),
        (HstoreJob, "A", "hstore_job"),
    ],
)
def test_own_task_classes(own: Engine, task_class: Any, task_type: Any, table: str) -> None:
    """Enum, HSTORE and the rest, with expressions and without."""
    usr = insert(Usr).values(name="Ann").returning(Usr.name).cte("usr")
    with own.begin() as connection:
        options = {"task_class": task_class}
        connection.execute(insert_task(task_type, {"a": "x", "b": None}, **options))
        connection.execute(insert_task(task_type, {"a": usr.c.name, "b": None}, **options))

    stored = [("x", None), ("Ann", None)]
    operator = "params->'a', params->'b'" if task_class is HstoreJob else "params->>'a', null"
    assert committed(own, operator, table) == stored


def test_columns_and_moments_may_be_expressions(own: Engine) -> None:
    """Each from the new row; the delay is added to the server's clock."""
    usr = insert(Usr).values(name="Ann").returning(Usr.usr_id, Usr.name).cte("usr")
    moment = dt.datetime(2030, 1, 1, tzinfo=dt.timezone.utc)
    with own.begin() as connection:
        for statement in (
            insert_task("A", task_class=PlainJob, tenant_id=usr.c.usr_id, note=usr.c.name),
            insert_task("B", task_class=PlainJob, tenant_id=3, note=None, run_at=moment),
            insert_task("C", task_class=PlainJob, run_at=func.now()),
            insert_task("D", task_class=PlainJob, delay=60),
        ):
            connection.execute(statement)

    columns = "task_type, tenant, note, round(extract(epoch from run_at - created_at))::int > 59"
    assert committed(own, columns, "plain_job") == [
        ("A", 1, "Ann", None),
        ("B", 3, None, True),
        ("C", None, None, False),
        ("D", None, None, True),
    ]


def test_params_may_be_one_expression(own: Engine) -> None:
    """What the database can build, it may build whole."""
    with own.begin() as connection:
        connection.execute(insert(Usr).values(name="Ann"))
        params = func.to_jsonb(text("usr"), type_=JSONB)
        statement = insert_task("A", select(params).select_from(Usr).scalar_subquery())
        connection.execute(statement)

    assert committed(own) == [("A", {"name": "Ann", "usr_id": 1})]


def test_one_insert_for_many_rows(own: Engine) -> None:
    """An insert from a select: a task for each row that a query finds."""
    with own.begin() as connection:
        connection.execute(insert(Usr), [{"name": name} for name in ("Ann", "Bo", "Cy")])
        connection.execute(insert_task("A", {"usr_id": Usr.usr_id}))

    assert committed(own) == [("A", {"usr_id": n}) for n in (1, 2, 3)]


def test_returning_and_conflicts_are_the_callers(own: Engine) -> None:
    """The result is an ordinary Postgres insert."""
    with own.begin() as connection:
        task_id = connection.scalar(insert_task("A").returning(Task.task_id))
        statement = insert_task("A", task_class=UniqueJob).on_conflict_do_nothing()
        for _ in range(2):
            connection.execute(statement)

    assert committed(own, "task_id") == [(task_id,)]
    assert committed(own, table="unique_job") == [("A", {})]


def test_a_parameter_of_ones_own_is_an_expression(own: Engine) -> None:
    """A bound parameter can be filled in at execution."""
    statement = insert_task("A", {"n": bindparam("n", type_=JSONB)})
    with own.begin() as connection:
        for n in (1, "two"):
            connection.execute(statement, {"n": n})

    assert committed(own) == [("A", {"n": 1}), ("A", {"n": "two"})]


def test_inside_a_mapper_event(own: Engine) -> None:
    """In after_insert a session.add() would come too late; the connection is at hand (C16)."""

    def enqueue(_mapper, connection, usr):
        connection.execute(insert_task("WELCOME", {"usr_id": usr.usr_id}))

    event.listen(Usr, "after_insert", enqueue)
    try:
        with Session(own) as session, session.begin():
            session.add(Usr(name="Ann"))
    finally:
        event.remove(Usr, "after_insert", enqueue)

    assert committed(own) == [("WELCOME", {"usr_id": 1})]


def test_under_a_schema_translate_map(own: Engine) -> None:
    """The statement follows the map, as does the enum's type (C18)."""
    tenant = own.execution_options(schema_translate_map={None: "tenant", "jobs": "tenant"})
    with tenant.begin() as connection:
        connection.execute(text("create schema tenant"))
        Task.metadata.create_all(connection)
        Base.metadata.create_all(connection)
        connection.execute(insert_task("A"))
        connection.execute(insert_task(Kind.BYE, task_class=EnumJob))

    assert (committed(own), committed(own, table="jobs.enum_job")) == ([], [])
    assert committed(own, table="tenant.task") == [("A", {})]
    assert committed(own, table="tenant.enum_job") == [("bye-mail", {})]


def test_a_role_that_may_only_insert(own: Engine) -> None:
    """Nothing is returned unless asked for, so INSERT is all it takes (C17)."""
    role = f"web_{uuid.uuid4().hex[:8]}"
    with own.connect() as connection:
        connection.execute(text(f"create role {role}"))
        connection.execute(text(f"grant insert on task to {role}"))
        connection.execute(text(f"set local role {role}"))
        connection.execute(insert_task("A", {"a": 1}))
        connection.execute(text("reset role"))
        found = connection.execute(text("select task_type from task")).all()
        connection.rollback()  # the role is gone with it

    assert found == [("A",)]


@dataclass
class Welcome:
    usr_id: int


def test_handlers_instead_of_types(own: Engine) -> None:
    """Plain params are validated by the handler's annotation; expressions are taken as they are."""
    tasks = TaskRegistry(task_class=PlainJob)

    @tasks.handler("WELCOME")
    def welcome(session, params: Welcome): ...

    with own.begin() as connection:
        connection.execute(insert_task(welcome, Welcome(1)))
        connection.execute(insert_task(welcome, {"usr_id": literal(2)}))
    with pytest.raises(ParamsError, match=r"params.usr_id"):
        insert_task(welcome, {"usr_id": "x"})

    assert committed(own, table="plain_job") == [
        ("WELCOME", {"usr_id": 1}),
        ("WELCOME", {"usr_id": 2}),
    ]


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        ({"a": ["\x00"]}, {}, r"params.a\[0\]: text with a NUL"),
        ({"s": func.now(), "a": {"b": [1, "\x00"]}}, {}, r"params.a.b\[1\]: text with a NUL"),
        ({"s": func.now(), "a": {"b": uuid.UUID(int=0)}}, {}, r"params.a.b: UUID is not plain"),
        ({"s": [func.now(), {1: 2}]}, {}, r"params.s\[1\]: keys must be str"),
        ({"s": func.now(), 1: 2}, {}, r"params: keys must be str"),
        ({"s": (func.now(), 1)}, {}, r"params.s: tuple is not plain JSON"),
        ({"s": func.now(), "a": 1}, {"task_class": HstoreJob}, "params.a: hstore keeps text"),
        ({}, {"tenant": 1}, "Task has no extra column tenant"),
        ({}, {"run_at": dt.datetime(2030, 1, 1)}, "run_at must be timezone-aware"),
    ],
)
def test_plain_values_are_judged(params: Any, options: Any, message: str) -> None:
    """What stands beside the expressions must be plain JSON like anywhere else."""
    with pytest.raises((ParamsError, EnqueueError), match=message):
        insert_task("A", params, **options)
