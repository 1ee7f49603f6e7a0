"""Params are nobody's business: no record of a failure and no log line holds their values."""

from __future__ import annotations

import contextlib
import logging
import re
from typing import Any, Literal

import pydantic
import pytest
from fleet import Fleet, events
from running import Running
from sqlalchemy import Column, Enum, MetaData, Table, Text, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sweeping import KINDS, Sweeper

from pgtask_sa.codec import codec_for
from pgtask_sa.engines import database_url, worker_engine

MARKER = "xyzzy4711"
SECRET = f"({MARKER}|47114711)"  # the second one is a number


class Base(DeclarativeBase):
    pass


class Usr(Base):
    __tablename__ = "usr"

    email: Mapped[str] = mapped_column(primary_key=True)
    age: Mapped[int | None] = mapped_column()


class Model(pydantic.BaseModel):
    n: int


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]


class Owner(pydantic.BaseModel):
    pet: Cat | Dog = pydantic.Field(discriminator="kind")


COLOURS = Table(
    "colour",
    MetaData(),
    Column("c", Enum("red", "blue", name="c", validate_strings=True)),
    Column("t", Text),
)


def duplicate(session, secret):
    session.execute(text("insert into usr (email) values (:e)"), [{"e": secret}] * 2)


def duplicate_flush(session, secret):
    for _ in range(2):
        session.add(Usr(email=secret))
        session.flush()
        session.expunge_all()


def pending_rollback(session, secret):
    with contextlib.suppress(Exception):
        duplicate_flush(session, secret)
    session.execute(text("select 1"))


def wrapped(session, secret):
    try:
        duplicate(session, secret)
    except Exception as error:
        raise RuntimeError(f"it did not work: {error}") from error


def check_violation(session, secret):
    session.execute(text("insert into usr (email, age) values (:e, -1)"), {"e": secret})


def wrong_integer(session, secret):
    session.execute(text("select cast(cast(:n as text) as integer)"), {"n": secret})


def wrong_date(session, secret):
    session.execute(text("select cast(cast(:n as text) as date)"), {"n": secret})


def wrong_label(session, secret):
    session.execute(text("create type mood as enum ('sad')"))
    session.execute(text("select cast(cast(:n as text) as mood)"), {"n": secret})


def wrong_json(session, secret):
    session.execute(text("select cast(cast(:n as text) as json)"), {"n": secret})


def swallowed(session, secret):
    with contextlib.suppress(Exception):
        session.connection().execute(text("select cast(:n as integer)"), {"n": secret})


def wrong_enum(session, secret):
    session.execute(COLOURS.insert(), {"c": secret})


def too_large(session, secret):
    session.execute(text("select cast(:n as smallint)"), {"n": 4711_4711})
    raise AssertionError(secret)


def validation(session, secret):
    Model.model_validate({"n": secret})


def validation_of_json(session, secret):
    Model.model_validate_json(secret)


def validation_of_a_tag(session, secret):
    Owner.model_validate({"pet": {"kind": secret}})


def enqueue_of_a_wrong_value(session, secret):
    codec_for(Model).dump({"n": secret})


def unserializable(session, secret):
    codec_for(Model).dump(Model.model_construct(n=secret))


PROVOKED = [
    *(duplicate, duplicate_flush, pending_rollback, wrapped, check_violation, wrong_integer),
    *(wrong_date, wrong_label, wrong_json, swallowed, wrong_enum, too_large, validation),
    *(validation_of_json, validation_of_a_tag, enqueue_of_a_wrong_value, unserializable),
]


@pytest.mark.parametrize("kind", KINDS)
def test_no_value_in_the_record(db_url, caplog, kind):
    """Neither in the last error, nor in an event, nor in a log line of any library at DEBUG."""
    caplog.set_level(logging.DEBUG)
    sweeper = Sweeper(kind, db_url)
    sweeper.execute("create table usr (email text primary key, age int check (age > 0))")
    for provoke in PROVOKED:

        @sweeper.handler(provoke.__name__.upper(), backoff=60)
        def body(session, params, task, provoke=provoke):
            provoke(session, params["secret"])

        sweeper.enqueue({"secret": MARKER}, task_type=provoke.__name__.upper())
    caplog.clear()
    sweeper.drain()
    errors = dict(sweeper.rows("select task_type, last_error from task where attempts = 1"))
    logged = _logged(caplog, besides="sqlalchemy.engine")
    sweeper.close()
    for error in errors.values():
        print(error.partition("\n")[0])
    assert {provoke.__name__.upper() for provoke in PROVOKED} == set(errors)
    assert [] == [kind for kind, error in errors.items() if re.search(SECRET, error)]
    assert [] == re.findall(f".*{SECRET}.*", logged + repr(sweeper.events))


OURS = (enqueue_of_a_wrong_value, unserializable)  # our own errors never quote a value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["transactional", "leased"])
@pytest.mark.parametrize("shown", [True, False], ids=["shown", "hidden"])
def test_values_that_were_asked_for(db_url, caplog, kind, mode, shown):
    """With show_values all that errors say is kept and told, with SQL parameters; else nothing."""
    caplog.set_level(logging.INFO)
    running = Running(db_url, concurrency=1, drain=True, show_values=shown)
    running.execute("create table usr (email text primary key, age int check (age > 0))")
    quoting = [provoke for provoke in PROVOKED if provoke not in OURS]
    for provoke in quoting:

        def body(session, params, provoke=provoke):
            provoke(session, params["secret"])

        async def awaited(session, params, provoke=provoke):
            await session.run_sync(provoke, params["secret"])

        handler = running.tasks.handler(provoke.__name__.upper(), backoff=60, mode=mode)
        handler(body if kind == "sync" else awaited)
        running.enqueue(provoke.__name__.upper(), {"secret": MARKER})
    with running:
        assert 0 == running.wait()
    kept = dict(running.rows("select task_type, last_error from task where attempts = 1"))
    told = {e.fields["task_type"]: e for e in running.events if e.name == "task.retry"}
    running.admin.dispose()
    names = {provoke.__name__.upper() for provoke in quoting}
    assert (names, names) == (set(kept), set(told))
    assert {shown} == {bool(re.search(SECRET, error)) for error in kept.values()}
    assert {shown} == {bool(re.search(SECRET, e.fields["error"])) for e in told.values()}
    lines = [r.getMessage() for r in caplog.records if r.name == "pgtask_sa"]
    assert shown * len(names) == sum(bool(re.search(SECRET, line)) for line in lines)
    assert shown == ("DETAIL: Key (email)=(" in told["DUPLICATE"].fields["error"])


def test_values_that_a_worker_process_shows(db_url):
    """By its option --show-values."""
    fleet = Fleet(db_url)
    fleet.enqueue("QUERY", {"i": 2, "seconds": MARKER})
    with fleet.worker("--drain", "--show-values", "--log-format", "json") as worker:
        assert 0 == worker.wait(20)
    [told] = events(worker, "task.retry")
    assert [True] * 2 == [
        MARKER in error
        for error in (told["error"], fleet.rows("select last_error from task")[0][0])
    ]


def _logged(caplog: Any, besides: str) -> str:
    lines = [
        logging.Formatter().format(r) for r in caplog.records if not r.name.startswith(besides)
    ]
    return "\n".join(lines)


def test_no_value_in_the_log_of_a_worker(db_url):
    """With --log-level debug too, in which the libraries below us tell every row and parameter."""
    fleet = Fleet(db_url)
    fleet.enqueue("ROW", {"i": 1, "secret": MARKER})
    fleet.enqueue("QUERY", {"i": 2, "seconds": MARKER})
    with fleet.worker("--drain", "--log-level", "debug", "--log-format", "json") as worker:
        assert 0 == worker.wait(20)
    assert [1] == fleet.done()
    assert {"task.done", "task.retry"} <= {e.get("event") for e in events(worker)}
    assert [] == [line for line in worker.lines if MARKER in line]
    assert MARKER not in fleet.rows("select last_error from task")[0][0]


def test_no_value_in_what_a_handler_sees_of_an_error(db_url):
    """A handler that logs the text of a database error logs no parameters with it."""
    engine = worker_engine(database_url(db_url), 1)
    with engine.connect() as connection, pytest.raises(DBAPIError) as raised:
        connection.execute(text("select cast(:a as text) from nowhere"), {"a": MARKER})
    engine.dispose()
    assert MARKER not in str(raised.value)


class Odd(Exception):
    """Looks at itself, and breaks."""

    def __repr__(self) -> str:
        raise SystemExit(4)

    def __str__(self) -> str:
        raise KeyboardInterrupt

    def __getattr__(self, name: str) -> Any:
        raise KeyboardInterrupt


class OddInterrupt(KeyboardInterrupt):
    """Gets out of every event loop, and cannot be shown."""

    __repr__ = Odd.__repr__
    __str__ = Odd.__str__


@pytest.mark.parametrize("kind", KINDS)
def test_errors_that_cannot_be_looked_at(db_url, kind):
    """E4: whatever they raise when they are rendered, the attempt is counted, the lane lives."""
    running = Running(db_url, concurrency=1, drain=True)
    errors = (Odd, OddInterrupt)

    def body(session, params):
        raise errors[params["i"]]

    async def awaited(session, params):
        raise errors[params["i"]]

    running.tasks.handler("A", max_attempts=1)(body if kind == "sync" else awaited)
    running.enqueue("A", {"i": 0}, {"i": 1})
    with running:
        assert 0 == running.wait()
    running.admin.dispose()
    assert [("A", 1, "failed")] * 2 == running.dead()
    assert [] == running.told("worker.error", "loop.died", "lane.stuck")
