"""Running tasks inside a test's own transaction: `pgtask_sa.testing`, as users' tests use it."""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from alembic_cli import has_entry_point
from sqlalchemy import ForeignKey, NullPool, create_engine, make_url, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

import pgtask_sa.testing
from pgtask_sa import (
    AsyncTaskSession,
    ConfigurationError,
    DeadTask,
    DeadTaskMixin,
    Discard,
    Retry,
    Snooze,
    Task,
    TaskFailed,
    TaskMixin,
    TaskRegistry,
    TaskSession,
)
from pgtask_sa.testing import Ran, drain, drain_async, waiting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

SOURCE = Path(pgtask_sa.testing.__file__)

# Where the package is only on the path and not installed, no entry point brings the fixture.
pgtask_drain = pgtask_sa.testing.pgtask_drain


class Base(DeclarativeBase):
    pass


class Note(Base):
    __tablename__ = "note"
    note_id: Mapped[int] = mapped_column(primary_key=True)
    body: Mapped[str]
    about_id: Mapped[int | None] = mapped_column(ForeignKey("note.note_id"))


class Job(TaskMixin, Base):
    __tablename__ = "job"
    tenant: Mapped[str]


class DeadJob(DeadTaskMixin, Base):
    __tablename__ = "dead_job"
    tenant: Mapped[str]


@pytest.fixture(scope="module")
def url(databases, template_db) -> Iterator[str]:
    """Give a database for tests that leave nothing behind, with the tables of a user as well."""
    with databases.temporary(template_db) as url:
        Base.metadata.create_all(create_engine(url, poolclass=NullPool))
        yield url
        assert (0, 0, 0) == _committed(url)


@pytest.fixture
def own_url(db_url) -> str:
    """Give a database for a test that commits."""
    Base.metadata.create_all(create_engine(db_url, poolclass=NullPool))
    return db_url


def _with_driver(url: str, driver: str) -> str:
    named = make_url(url).set(drivername=f"postgresql+{driver}")
    return named.render_as_string(hide_password=False)


@contextmanager
def _rolled_back(url: str) -> Iterator[TaskSession]:
    """Give a session as users' fixtures make it: whatever it commits is undone at the end."""
    engine = create_engine(url, poolclass=NullPool)
    with engine.connect() as connection:
        outer = connection.begin()
        with TaskSession(bind=connection, join_transaction_mode="create_savepoint") as session:
            yield session
        outer.rollback()


@asynccontextmanager
async def _rolled_back_async(url: str) -> AsyncIterator[AsyncTaskSession]:
    engine = create_async_engine(url, poolclass=NullPool)
    async with engine.connect() as connection:
        outer = await connection.begin()
        mode = "create_savepoint"
        async with AsyncTaskSession(bind=connection, join_transaction_mode=mode) as session:
            yield session
        await outer.rollback()


@pytest.fixture(params=["psycopg", "psycopg2"])
def session(url, request) -> Iterator[TaskSession]:
    with _rolled_back(_with_driver(url, request.param)) as session:
        yield session


@pytest.fixture(params=["psycopg", "asyncpg"])
def async_url(url, request) -> str:
    return _with_driver(url, request.param)


def _in_session(async_url: str, test) -> None:
    """Run a coroutine function with an AsyncSession that is rolled back."""

    async def main() -> None:
        async with _rolled_back_async(async_url) as session:
            await test(session)

    asyncio.run(main())


def _committed(url: str) -> tuple[int, int, int]:
    """Count what others can see: tasks, dead tasks, notes."""
    with create_engine(url, poolclass=NullPool).connect() as connection:
        counts = [
            connection.scalar(text(f"select count(*) from {table}"))
            for table in ("task", "dead_task", "note")
        ]
    return tuple(counts)


def _bodies(session: Session) -> list[str]:
    return list(session.scalars(select(Note.body).order_by(Note.note_id)))


def _waiting_types(session: Session) -> list[str]:
    return [task.task_type for task in waiting(session)]


tasks = TaskRegistry()


@tasks.handler("NOTE")
def note(session: TaskSession, params: dict) -> None:
    session.add(Note(body=params["body"]))


@tasks.handler("FIRST")
def first(session: TaskSession, params: dict) -> None:
    session.add(Note(body="first"))
    session.enqueue("SECOND", params)


@tasks.handler("SECOND")
def second(session: TaskSession, params: dict) -> None:
    session.add(Note(body="second"))
    session.enqueue("NOTE", {"body": "third"})


@tasks.handler("FAIL", max_attempts=3)
def fail(session: TaskSession, params: dict) -> None:
    session.add(Note(body="of a handler that fails"))
    session.flush()
    raise LookupError("no such thing")


@tasks.handler("COMMIT")
def commit(session: TaskSession, params: dict) -> None:
    session.add(Note(body="kept"))
    session.commit()
    session.add(Note(body="undone"))
    session.flush()
    session.rollback()


@tasks.handler("SWALLOW")
def swallow(session: TaskSession, params: dict) -> None:
    session.add(Note(body="lost"))
    session.flush()
    with suppress(Exception):
        session.execute(text("select 1/0"))


@tasks.handler("AGAIN")
def again(session: TaskSession, params: dict) -> None:
    session.enqueue("AGAIN")


@tasks.handler("COMMAND")
def command(session: TaskSession, params: dict) -> None:
    raise {"retry": Retry("busy"), "snooze": Snooze(60), "discard": Discard("gone")}[params["do"]]


@tasks.handler("VIEW")
def view(session: TaskSession, params: dict, task) -> None:
    session.add(Note(body=f"{task.task_type} {task.attempt} of {task.max_attempts}"))


@tasks.handler("ASYNC")
async def in_async(session: AsyncTaskSession, params: dict) -> None:
    await asyncio.sleep(0)
    session.add(Note(body="async"))
    await session.enqueue("NOTE", {"body": "follow-up"})


@tasks.handler("ASYNC_FAIL")
async def fail_async(session: AsyncTaskSession, params: dict) -> None:
    session.add(Note(body="of a handler that fails"))
    await session.flush()
    raise LookupError("no such thing")


@tasks.handler("ASYNC_SWALLOW")
async def swallow_async(session: AsyncTaskSession, params: dict) -> None:
    with suppress(Exception):
        await session.execute(text("select 1/0"))


class TestDrain:
    def test_runs_what_the_session_enqueued_and_leaves_nothing(self, url, pgtask_drain):
        """Tasks and what their handlers wrote vanish with the test's transaction."""
        with _rolled_back(url) as session:
            session.enqueue("NOTE", {"body": "a"})
            session.commit()
            assert [Ran("NOTE", {"body": "a"}, None)] == pgtask_drain(session, tasks)
            assert ["a"] == _bodies(session)
            assert [] == waiting(session)
        assert (0, 0, 0) == _committed(url)

    def test_runs_on_each_driver(self, session):
        """The session may use psycopg or psycopg2."""
        session.enqueue("NOTE", {"body": "a"})
        assert [("NOTE", {"body": "a"}, None)] == drain(session, tasks)
        assert ["a"] == _bodies(session)

    def test_the_settings_of_the_test_stay(self, session):
        """A handler that sets something for its transaction resets nothing of whoever called."""
        session.execute(text("set statement_timeout = '77s'"))
        registry = TaskRegistry()

        @registry.handler("SETS")
        def sets(session, params):
            session.execute(text("set local lock_timeout = '5s'"))

        session.enqueue("SETS", {})
        drain(session, registry)
        assert "77s" == session.scalar(text("show statement_timeout"))

    def test_flushes_what_is_pending(self, session):
        """A task that was only just enqueued, with params from a new row, is run as well."""
        row = Note(note_id=7, body="new")
        session.add(row)
        session.enqueue("NOTE", lambda: {"body": f"about {row.note_id}"})
        drain(session, tasks)
        assert ["about 7", "new"] == sorted(_bodies(session))

    def test_runs_follow_up_tasks(self, session):
        """Tasks that handlers enqueue are run until none is left."""
        session.enqueue("FIRST", {"n": 1})
        ran = drain(session, tasks)
        assert ["FIRST", "SECOND", "NOTE"] == ran.task_types
        assert ["first", "second", "third"] == _bodies(session)

    def test_the_order_is_that_of_the_numbers(self, session):
        """The oldest task is first, whatever its type, in every run."""
        for number in range(8):
            session.enqueue("NOTE" if number % 2 else "VIEW", {"body": "x", "n": number})
        assert list(range(8)) == [ran.params["n"] for ran in drain(session, tasks)]

    def test_types_of_others_are_left_waiting(self, session):
        """A task type without a handler in the registry is not touched."""
        session.enqueue("UNKNOWN")
        session.enqueue("NOTE", {"body": "a"})
        assert ["NOTE"] == drain(session, tasks).task_types
        assert ["UNKNOWN"] == _waiting_types(session)

    def test_nothing_to_do(self, session):
        """An empty table gives an empty list."""
        assert [] == drain(session, tasks)

    def test_handlers_may_commit_and_roll_back(self, session):
        """As in the worker, a handler's commit and rollback concern its own work only."""
        session.add(Note(body="of the test"))
        session.enqueue("COMMIT")
        assert [("COMMIT", {}, None)] == drain(session, tasks)
        assert ["of the test", "kept"] == _bodies(session)

    def test_handlers_get_a_view_of_the_task(self, session):
        """A third parameter named task is served."""
        session.enqueue("VIEW")
        drain(session, tasks)
        assert ["VIEW 1 of 10"] == _bodies(session)

    def test_loaded_objects_show_what_handlers_wrote(self, session):
        """The test's session does not go on with values from before."""
        registry = TaskRegistry()

        @registry.handler("CHANGE")
        def change(session, params):
            session.get(Note, 1).body = "after"

        row = Note(note_id=1, body="before")
        session.add(row)
        session.commit()
        assert "before" == row.body
        session.enqueue("CHANGE")
        drain(session, registry)
        assert "after" == row.body

    def test_a_session_without_an_outer_transaction_commits_itself(self, own_url):
        """Nothing is committed by drain; the caller's commit keeps tasks done and their work."""
        engine = create_engine(own_url, poolclass=NullPool)
        with TaskSession(engine) as session:
            session.enqueue("NOTE", {"body": "a"})
            session.commit()
            drain(session, tasks)
            assert (1, 0, 0) == _committed(own_url)
            session.commit()
        assert (0, 0, 1) == _committed(own_url)

    def test_a_plain_session_will_do(self, url):
        """The test's session need not be able to enqueue."""
        with Session(create_engine(url, poolclass=NullPool)) as session:
            session.execute(text("insert into task (task_type, params) values ('VIEW', '{}')"))
            assert ["VIEW"] == drain(session, tasks).task_types

    def test_a_task_that_a_worker_holds_is_passed_over(self, own_url):
        """Drain never waits for a row that another transaction has locked."""
        engine = create_engine(own_url, poolclass=NullPool)
        with TaskSession(engine) as session:
            session.enqueue_many("NOTE", [{"body": "held"}, {"body": "free"}])
            session.commit()
            with engine.connect() as other:
                other.execute(text("delete from task where params->>'body' = 'held'"))
                ran = drain(session, tasks)
                other.rollback()
        assert [{"body": "free"}] == [task.params for task in ran]

    def test_own_task_class_and_own_sessions(self, url):
        """The registry's task class counts, and handlers may get sessions of the user's making."""
        registry = TaskRegistry(task_class=Job)
        seen = []

        @dataclass
        class Greeting:
            name: str

        class OwnSession(TaskSession):
            pass

        @registry.handler("GREET")
        def greet(session, params: Greeting, task):
            seen.append((isinstance(session, OwnSession), params, task.columns["tenant"]))

        with _rolled_back(url) as session:
            session.enqueue(greet, Greeting("Ann"), tenant="acme")
            session.enqueue("NOTE", {"body": "of the other table"})
            assert [("GREET", {"name": "Ann"})] == [
                (task.task_type, task.params) for task in waiting(session, Job)
            ]
            drain(session, registry, handler_session=sessionmaker(class_=OwnSession))
            assert [] == waiting(session, Job)
            assert ["NOTE"] == _waiting_types(session)
        assert [(True, Greeting("Ann"), "acme")] == seen


class TestFailures:
    def test_the_error_of_a_handler_is_raised(self, session):
        """The test sees the handler's own exception, with the line that raised it."""
        session.enqueue("FAIL")
        with pytest.raises(LookupError, match="no such thing") as caught:
            drain(session, tasks)
        assert "fail" == caught.traceback[-1].name

    def test_the_session_stays_usable(self, session):
        """After a failure the work of the test is there, that of the handler is not."""
        session.add(Note(body="of the test"))
        session.enqueue("FAIL")
        session.enqueue("NOTE", {"body": "later"})
        with pytest.raises(LookupError):
            drain(session, tasks)
        assert ["of the test"] == _bodies(session)
        [failed, later] = waiting(session)
        assert (1, 0) == (failed.attempts, later.attempts)
        assert failed.last_error.startswith("LookupError: no such thing")
        assert failed.run_at > failed.created_at
        session.add(Note(body="more"))
        session.commit()
        assert ["NOTE"] == drain(session, tasks).task_types
        assert ["of the test", "more", "later"] == _bodies(session)

    def test_errors_can_be_collected(self, session):
        """Without raising, the other tasks are run, too."""
        session.enqueue("FAIL")
        session.enqueue("NOTE", {"body": "a"})
        ran = drain(session, tasks, raise_errors=False)
        assert ["FAIL", "NOTE"] == ran.task_types
        assert ["no such thing"] == [str(error) for error in ran.errors]
        assert ["FAIL"] == _waiting_types(session)

    def test_a_failing_statement_of_a_handler(self, session):
        """An error of the database is undone as well, and raised as it came."""
        registry = TaskRegistry()

        @registry.handler("BREAK")
        def break_it(session, params):
            session.add(Note(body="x", about_id=99))

        session.enqueue("BREAK")
        with pytest.raises(IntegrityError):
            drain(session, registry)
        assert ["BREAK"] == _waiting_types(session)
        assert [] == _bodies(session)

    def test_a_swallowed_database_error_is_a_failure(self, session):
        """In the worker the COMMIT would be a silent ROLLBACK; the test learns of it."""
        session.enqueue("SWALLOW")
        with pytest.raises(TaskFailed, match=r"swallowed a database error: .*DivisionByZero"):
            drain(session, tasks)
        assert [] == _bodies(session)
        assert ["SWALLOW"] == _waiting_types(session)

    def test_bad_params_are_a_failure(self, session):
        """Params that do not fit the handler's annotation fail as they would in the worker."""
        registry = TaskRegistry()

        @dataclass
        class Typed:
            usr_id: int

        @registry.handler("TYPED")
        def typed(session, params: Typed): ...

        session.enqueue("TYPED", {"usr_id": "seven"})
        with pytest.raises(ValueError, match=r"params\.usr_id"):
            drain(session, registry)

    @pytest.mark.parametrize("do", ["retry", "snooze", "discard"])
    def test_words_of_command_are_not_raised(self, session, do):
        """Retry, Snooze and Discard are what the handler meant to do, and are recorded."""
        session.enqueue("COMMAND", {"do": do})
        [ran] = drain(session, tasks)
        assert do == type(ran.error).__name__.lower()
        left = [task.attempts for task in waiting(session)]
        assert {"retry": [1], "snooze": [0], "discard": []}[do] == left

    def test_what_is_no_exception_is_raised_even_when_collecting(self, session):
        """A pytest.fail() or a Ctrl-C in a handler must not be counted as a failed task."""
        registry = TaskRegistry()

        @registry.handler("STOP")
        def stop(session, params):
            pytest.fail("from within")

        session.enqueue("STOP")
        with pytest.raises(pytest.fail.Exception, match="from within"):
            drain(session, registry, raise_errors=False)

    def test_a_handler_that_ends_the_transaction(self, session):
        """A COMMIT past the session is refused, and the test's transaction goes on."""
        registry = TaskRegistry()

        @registry.handler("END")
        def end(session, params):
            session.execute(text("commit"))

        session.enqueue("END")
        with pytest.raises(TaskFailed, match="ended the worker's transaction"):
            drain(session, registry)
        assert ["END"] == _waiting_types(session)

    def test_an_async_handler_needs_an_async_session(self, session):
        """The mistake is named, and the task still waits."""
        session.enqueue("ASYNC")
        with pytest.raises(ConfigurationError, match=r"in_async.* is async: use `await drain_asyn"):
            drain(session, tasks)
        assert ["ASYNC"] == _waiting_types(session)


class TestPlanned:
    def test_later_tasks_are_left(self, session):
        """A task that is planned for later waits, unless the test says how late it is."""
        now = datetime.now(timezone.utc)
        session.enqueue("NOTE", {"body": "in two hours"}, run_at=now + timedelta(hours=2))
        session.enqueue("NOTE", {"body": "in an hour"}, delay=3600)
        assert [] == drain(session, tasks)
        drain(session, tasks, due_by=now + timedelta(minutes=90))
        assert ["in an hour"] == _bodies(session)
        drain(session, tasks, due_by="all")
        assert ["in an hour", "in two hours"] == _bodies(session)

    def test_a_task_is_tried_until_it_is_buried(self, session):
        """With due_by="all" the retries come at once, and end in the error queue."""
        session.enqueue("FAIL")
        ran = drain(session, tasks, due_by="all", raise_errors=False)
        assert ["FAIL"] * 3 == ran.task_types
        [dead] = session.scalars(select(DeadTask))
        assert ("FAIL", 3, "failed") == (dead.task_type, dead.attempts, dead.reason)

    @pytest.mark.parametrize("due_by", [datetime(2030, 1, 1), "tomorrow", 5])
    def test_a_moment_must_be_one(self, session, due_by):
        """A naive datetime would depend on the machine's time zone."""
        with pytest.raises(ConfigurationError, match="due_by must be a timezone-aware datetime"):
            drain(session, tasks, due_by=due_by)


class TestLimit:
    def test_runs_so_many(self, session):
        """A test can go step by step."""
        session.enqueue("FIRST")
        assert ["FIRST"] == drain(session, tasks, limit=1).task_types
        assert ["SECOND"] == _waiting_types(session)
        assert [] == drain(session, tasks, limit=0)

    def test_an_endless_chain_ends(self, url, monkeypatch):
        """A handler that enqueues itself is named as the likely cause."""
        monkeypatch.setattr(pgtask_sa.testing, "ENDLESS", 20)
        with _rolled_back(url) as session:
            session.enqueue("AGAIN")
            with pytest.raises(TaskFailed, match=r"more than 20 tasks: .*enqueue itself"):
                drain(session, tasks)
            assert ["AGAIN"] == _waiting_types(session)


class TestDrainAsync:
    def test_runs_handlers_of_both_kinds_and_leaves_nothing(self, url, async_url):
        """Async and plain handlers work in the AsyncSession's transaction, which is rolled back."""

        async def test(session: AsyncTaskSession) -> None:
            await session.enqueue("ASYNC")
            await session.commit()
            ran = await drain_async(session, tasks)
            assert [("ASYNC", {}, None), ("NOTE", {"body": "follow-up"}, None)] == ran
            assert ["async", "follow-up"] == await session.run_sync(_bodies)
            assert [] == await session.run_sync(waiting)

        _in_session(async_url, test)
        assert (0, 0, 0) == _committed(url)

    @pytest.mark.parametrize("task_type", ["ASYNC_FAIL", "FAIL"])
    def test_a_failure_leaves_the_session_usable(self, async_url, task_type):
        """The error is raised, the handler's work undone, the attempt counted."""

        async def test(session: AsyncTaskSession) -> None:
            session.add(Note(body="of the test"))
            await session.enqueue(task_type)
            with pytest.raises(LookupError):
                await drain_async(session, tasks)
            assert [1] == [task.attempts for task in await session.run_sync(waiting)]
            assert ["of the test"] == await session.run_sync(_bodies)
            session.add(Note(body="more"))
            await session.commit()

        _in_session(async_url, test)

    @pytest.mark.parametrize("task_type", ["ASYNC_SWALLOW", "SWALLOW"])
    def test_a_swallowed_database_error_is_a_failure(self, async_url, task_type):
        """Also with a driver that does not tell the state of its transaction."""

        async def test(session: AsyncTaskSession) -> None:
            await session.enqueue(task_type)
            with pytest.raises(TaskFailed, match="swallowed a database error"):
                await drain_async(session, tasks)
            assert [] == await session.run_sync(_bodies)

        _in_session(async_url, test)

    def test_a_task_is_tried_until_it_is_buried(self, async_url):
        """Rows can be put back and buried through each driver."""

        async def test(session: AsyncTaskSession) -> None:
            await session.enqueue("FAIL")
            ran = await drain_async(session, tasks, due_by="all", raise_errors=False)
            assert 3 == len(ran.errors)
            assert ["failed"] == list(await session.scalars(select(DeadTask.reason)))

        _in_session(async_url, test)

    def test_loaded_objects_are_refreshed(self, async_url):
        """An attribute can be read without await, and shows what a handler wrote."""
        registry = TaskRegistry()

        @registry.handler("CHANGE")
        async def change(session, params):
            (await session.get(Note, 1)).body = "after"
            await session.delete(await session.get(Note, 2))

        async def test(session: AsyncTaskSession) -> None:
            row, gone = Note(note_id=1, body="before"), Note(note_id=2, body="gone")
            session.add_all([row, gone])
            await session.enqueue("CHANGE")
            await drain_async(session, registry)
            assert "after" == row.body

        _in_session(async_url, test)

    def test_own_session_class(self, async_url):
        """Async handlers may get sessions of the user's making."""
        seen = []

        class OwnSession(AsyncTaskSession):
            pass

        registry = TaskRegistry()

        @registry.handler("LOOK")
        async def look(session, params):
            seen.append(type(session))

        async def test(session: AsyncTaskSession) -> None:
            await session.enqueue("LOOK")
            make = async_sessionmaker(class_=OwnSession)
            await drain_async(session, registry, handler_async_session=make)

        _in_session(async_url, test)
        assert [OwnSession] == seen


class TestWaiting:
    def test_shows_the_row(self, session):
        """All that a test may ask about a task that waits."""
        session.enqueue("NOTE", {"body": "a"}, delay=60)
        [task] = waiting(session)
        assert ("NOTE", {"body": "a"}, 0, None) == (
            task.task_type,
            task.params,
            task.attempts,
            task.last_error,
        )
        assert task.run_at - task.created_at >= timedelta(seconds=60)

    def test_shows_priority_and_own_columns(self, url):
        """Columns that the task class adds are there by the name of their attribute."""
        with TaskSession(create_engine(url, poolclass=NullPool), task_class=Job) as session:
            session.enqueue("A", tenant="acme", priority=-3)
            [task] = waiting(session)
            assert (-3, {"tenant": "acme"}) == (task.priority, task.columns)
            session.enqueue("A", task_class=Task)
            assert [(0, {})] == [(each.priority, each.columns) for each in waiting(session, Task)]

    def test_takes_the_task_class_of_the_session(self, url):
        """A session made for a task class of the user's own looks there."""
        with TaskSession(create_engine(url, poolclass=NullPool), task_class=Job) as session:
            session.enqueue("A", tenant="acme")
            assert ["A"] == _waiting_types(session)
            assert [] == waiting(session, Task)


class TestPlugin:
    def test_the_documented_example_runs(self, url, tmp_path):
        """The module's docstring is a test module that passes under a plain pytest."""
        manual = inspect.getdoc(pgtask_sa.testing)
        example = manual.partition("::\n\n")[2].partition("\n\nThe fix")[0]
        (tmp_path / "test_example.py").write_text(inspect.cleandoc("\n" + example))
        options = [] if has_entry_point() else ["-p", "pgtask_sa.testing"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *options, "test_example.py"],
            cwd=tmp_path,
            env=_environment(DATABASE_URL=url),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert 0 == done.returncode, done.stdout + done.stderr
        assert "1 passed" in done.stdout
        assert (0, 0, 0) == _committed(url)

    def test_the_module_itself_imports_nothing_heavy(self):
        """Pytest loads it in every run of whoever has the package installed."""
        heavy = ("sqlalchemy", "pgtask_sa", "pydantic", "alembic", "psycopg", "rich")
        code = (
            "import runpy, sys\n"
            f"runpy.run_path({str(SOURCE)!r})\n"
            f"print([name for name in {heavy!r} if name in sys.modules])"
        )
        assert "[]" == _run_python(code)

    def test_the_functions_do_without_pytest(self):
        """Under another test framework pytest need not be installed."""
        code = (
            "import sys\n"
            "sys.modules['pytest'] = None\n"
            "import pgtask_sa.testing as t\n"
            "print(hasattr(t, 'drain'), hasattr(t, 'pgtask_drain'))"
        )
        assert "True False" == _run_python(code)


def _environment(**extra: str) -> dict[str, str]:
    paths = [str(SOURCE.parents[1]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **extra}


def _run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    return done.stdout.strip()
