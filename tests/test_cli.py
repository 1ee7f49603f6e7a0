"""The command line: `python -m pgtask_sa`, for people and for programs."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

import pytest
from alembic_cli import ROOT
from sqlalchemy import UniqueConstraint, make_url, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped

import pgtask_sa
from pgtask_sa import (
    DeadTask,
    DeadTaskMixin,
    Task,
    TaskMixin,
    TaskRegistry,
    TaskSession,
    cli,
    cli_commands,
    reports,
    worker,
)
from pgtask_sa.migrations import head

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Engine

SOURCE = Path(pgtask_sa.__file__).parents[1]
READY = ", ready now (planned times are not kept)"
ERROR = "ValueError: no such user\n  at shop/tasks.py:7 in send"


class Base(DeclarativeBase):
    pass


class Job(TaskMixin, Base):
    __tablename__ = "job"
    __table_args__ = (UniqueConstraint("task_type", "params"),)
    tenant: Mapped[str | None]


class DeadJob(DeadTaskMixin, Base):
    __tablename__ = "dead_job"
    tenant: Mapped[str | None]


@dataclass
class Welcome:
    usr_id: UUID
    at: datetime | None = None


tasks = TaskRegistry()
jobs = TaskRegistry(task_class=Job)
empty = TaskRegistry()


@tasks.handler("WELCOME")
def welcome(session, params: Welcome): ...


@tasks.handler("PLAIN")
@tasks.handler("OTHER")
def plain(session, params): ...


@jobs.handler("JOB")
def job(session, params): ...


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def document(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def own_log() -> Iterator[None]:
    """Take back what a command does to the log, which it takes for that of its own process.

    Its handler would go on writing to the standard error of one test, which is closed after it.
    """
    root, nobody = logging.getLogger(), logging.Handler()
    before, level = list(root.handlers), root.level
    root.handlers[:] = [nobody]  # a command closes what it finds
    yield
    root.handlers[:] = before
    root.setLevel(level)


@pytest.fixture
def run(db_url, capsys, monkeypatch, own_log):
    """Give a function that runs a command in the test's database and returns what came of it."""
    monkeypatch.setenv("DATABASE_URL", db_url)
    monkeypatch.delenv("PGTASK_TASKS", raising=False)

    def run(*argv: str) -> Result:
        capsys.readouterr()
        try:
            code = cli.main(argv)
        except SystemExit as end:
            code = end.code
        return Result(code, *capsys.readouterr())

    return run


@pytest.fixture
def session(engine: Engine) -> Iterator[TaskSession]:
    with TaskSession(engine) as session:
        yield session


@pytest.fixture
def job_tables(engine: Engine) -> None:
    Base.metadata.create_all(engine)


def _bury(session: TaskSession, *task_ids: int, task_type: str = "A", **columns: Any) -> None:
    now = datetime.now(timezone.utc)
    for task_id in task_ids:
        values = {"params": {"n": task_id}, "attempts": 10, "reason": "failed", **columns}
        session.add(
            DeadTask(
                task_id=task_id, task_type=task_type, created_at=now, last_error=ERROR, **values
            )
        )
    session.commit()


def _waiting(session: TaskSession, task_class: type[Any] = Task) -> list[tuple[int, int]]:
    session.rollback()
    rows = session.execute(select(task_class.task_id, task_class.attempts))
    return sorted(tuple(row) for row in rows)


def _dead_ids(session: TaskSession) -> list[int]:
    session.rollback()
    return list(session.scalars(select(DeadTask.task_id).order_by(DeadTask.task_id)))


class TestMigrate:
    def test_creates_the_tables_and_says_so(self, empty_db_url, run):
        """The first run migrates, the second finds nothing to do, and both say what was done."""
        name = make_url(empty_db_url).database
        first = run("migrate", "--database-url", empty_db_url)
        assert (0, f"migrated {name} from nothing to {head()}\n") == first[:2]
        second = run("migrate", "--database-url", empty_db_url)
        assert (0, f"nothing to do: {name} is at revision {head()}\n") == second[:2]
        assert 0 == run("stats", "--database-url", empty_db_url).code

    def test_tells_programs(self, empty_db_url, run):
        """With --json both revisions are in a document."""
        result = run("migrate", "--database-url", empty_db_url, "--json")
        assert {"before": None, "after": head()} == result.document

    def test_an_unknown_revision(self, run):
        """A revision that does not exist is one line, not a traceback."""
        result = run("migrate", "--revision", "4711")
        assert (1, "") == result[:2]
        assert re.fullmatch(r"error: .*4711.*\n", result.err)


class TestProblems:
    @pytest.mark.parametrize(
        "command",
        [
            *("todo", "list", "dead", "stats", "requeue --all", "enqueue A", "dead --show 1"),
            *("workers", "cancel 1"),
        ],
    )
    def test_without_the_tables(self, empty_db_url, run, command):
        """Every command says how to create what is missing."""
        result = run(*command.split(), "--database-url", empty_db_url)
        assert (1, "") == result[:2]
        assert re.fullmatch(
            r'error: relation "\w+" does not exist .*create it with: python -m pgtask_sa migrate; '
            r"or, if your tables are your own, name your registry: --tasks .* PGTASK_TASKS\n",
            result.err,
        )

    def test_without_the_tables_of_a_registry(self, empty_db_url, run):
        """Who has named it is not told to."""
        result = run("stats", "--tasks", "test_cli:tasks", "--database-url", empty_db_url)
        assert result.err.endswith("create it with: python -m pgtask_sa migrate\n")

    def test_without_the_tables_of_ones_own(self, run):
        """The library's migrations would not create a user's own table."""
        result = run("list", "--tasks", "test_cli:jobs")
        assert 1 == result.code
        assert "create it with your migrations (alembic upgrade head)" in result.err

    @pytest.mark.parametrize("command", ["list", "migrate", "enqueue A"])
    def test_an_unreachable_database(self, run, command):
        """One line, without a traceback and without the password."""
        url = "postgresql://bob:secret@127.0.0.1:1/shop"
        result = run(*command.split(), "--database-url", url)
        assert (1, "") == result[:2]
        assert re.fullmatch(r"error: cannot reach the database at 127\.0\.0\.1, .*\n", result.err)
        assert "secret" not in result.err

    def test_a_database_that_does_not_exist(self, db_url, run):
        """The server's own words are passed on."""
        url = make_url(db_url).set(database="no_such_db").render_as_string(hide_password=False)
        result = run("list", "--database-url", url)
        assert 1 == result.code
        assert 'database "no_such_db" does not exist' in result.err

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            (["--database-url", "mysql://x"], "a Postgres database is needed"),
            (["--database-url", "nonsense"], "not a database URL"),
            (["--tasks", "no.such:tasks"], "cannot import 'no.such'"),
            (["--tasks", "test_cli:Base"], "has no TaskRegistry named 'Base'"),
        ],
    )
    def test_a_wrong_option(self, run, options, problem):
        """What cannot be used is named in one line."""
        result = run("list", *options)
        assert 1 == result.code
        assert result.err.startswith("error: ")
        assert problem in result.err
        assert 1 == result.err.count("\n")

    @pytest.mark.parametrize(
        ("command", "problem"),
        [
            (
                ["stats", "--database-url", "postgresql://bob:secret@h:abc/x"],
                "is the port a number?",
            ),
            (["migrate", "--database-url", "postgresql://bob:secret@h:abc/x"], "is the port a"),
            (["stats", "--tasks", ".test_cli:tasks"], "package.module:name, got '.test_cli:tasks'"),
            (["stats", "--tasks", ":tasks"], "package.module:name, got ':tasks'"),
            (["enqueue", "A", "[" * 100_000], "PARAMS_JSON is nested too deeply"),
            (["enqueue", "A\udce9"], r"task_type 'A\udce9' holds half of a surrogate pair"),
            (["enqueue", "A" * 501], "has 501 bytes"),
            (["worker", ".test_cli:tasks"], "package.module:name, got '.test_cli:tasks'"),
        ],
    )
    def test_what_cannot_be_read(self, run, command, problem):
        """One line, no traceback, no password."""
        result = run(*command)
        assert result.code in (1, 2)
        assert result.err.startswith("error: ")
        assert problem in result.err
        assert 1 == result.err.count("\n")
        assert "secret" not in result.err

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            (["--processes", "0"], "processes must be an integer from 1"),
            (["--concurrency", "0"], "concurrency must be an integer from 1"),
            (["--grace", "-1"], "grace must be 0 or more seconds"),
            (["--weight", "PLAIN"], "--weight takes TYPE=N, got 'PLAIN'"),
            (["--priority", "PLAIN=high"], "RANK must be an integer"),
            (["--weight", "PLAIN=2", "--order", "random"], "need the order fair"),
            (["--fair-by", "nope"], "'nope' is no column of Task"),
        ],
    )
    def test_an_option_of_a_worker_that_is_wrong(self, run, options, problem):
        """Wrong usage, as what argparse finds: to start it again as it is will not help."""
        result = run("worker", "test_cli:tasks", *options)
        assert 2 == result.code
        assert re.fullmatch(rf"error: .*{re.escape(problem)}.*\n", result.err)

    @pytest.mark.parametrize("target", ["no.such:tasks", "test_cli:empty"])
    def test_a_worker_that_cannot_start(self, run, target):
        """The command is right, what it names is not."""
        assert 1 == run("worker", target).code

    def test_a_type_that_is_not_utf8(self, run):
        """It is usage that is wrong, not the database."""
        result = run("list", "--type", "A\udce9")
        assert 2 == result.code
        assert r"is not UTF-8: 'A\udce9'" in result.err

    def test_priority_of_a_type_without_handler(self, run, monkeypatch):
        """It has no effect, which is worth a line; another worker may know the type."""
        monkeypatch.setattr(worker.Worker, "run", lambda self: 0)
        options = ("--priority", "NOSUCH=1", "PLAIN=2", "--weight", "NOR_THIS=2")
        result = run("worker", "test_cli:tasks", *options)
        assert 0 == result.code
        assert "WARNING priority: there is no handler here for 'NOSUCH'" in result.err
        assert "WARNING weights: there is no handler here for 'NOR_THIS'" in result.err

    @pytest.mark.parametrize("style", ["text", "json"])
    def test_a_log_line_names_its_process(self, run, monkeypatch, style):
        """With several processes their lines would be the same."""
        monkeypatch.setattr(worker.Worker, "run", lambda self: self.events.emit("a", "b") or 0)
        err = run("worker", "test_cli:tasks", "--log-format", style).err
        assert (f'"process": {os.getpid()},' if style == "json" else f" [{os.getpid()}] ") in err

    def test_no_database_is_named(self, run, monkeypatch):
        """Both ways to name it are in the message."""
        monkeypatch.delenv("DATABASE_URL")
        assert (1, "", "error: name the database with --database-url or DATABASE_URL\n") == run(
            "list"
        )


class TestHelp:
    @pytest.mark.parametrize("command", [*cli.COMMANDS, "worker"])
    def test_each_command_explains_itself(self, run, command):
        """Help says what the command does and, for ours, gives an example that parses."""
        result = run(command, "--help")
        assert 0 == result.code
        assert "--database-url" in result.out
        if command != "worker":
            assert f"{cli._program()} {command}" in result.out.partition("example:")[2]

    def test_the_overview_lists_the_commands(self, run):
        """Without a command the help is shown, and the exit code says that nothing was done."""
        result = run()
        assert 2 == result.code
        for command in [*cli.COMMANDS, "worker"]:
            assert re.search(rf"^    {command} +\S", result.out, re.MULTILINE)
        assert result.out == run("--help").out

    def test_the_version(self, run):
        """The version is that of pyproject.toml, or unknown where the package is on the path."""
        version = re.search(r'version = "(.*)"', (ROOT / "pyproject.toml").read_text())[1]
        assert run("--version").out in (f"pgtask_sa {version}\n", "pgtask_sa (not installed)\n")

    def test_the_worker_gets_its_command_line(self, run, monkeypatch):
        """All that follows `worker` is the worker's, and its exit code is ours."""
        seen = []
        monkeypatch.setattr(worker, "main", lambda argv: seen.append(argv) or 3)
        assert 3 == run("worker", "shop:tasks", "--drain").code
        assert [["shop:tasks", "--drain"]] == seen


class TestEnqueue:
    def test_writes_a_task(self, run, session):
        """The task is there when the number is printed."""
        result = run("enqueue", "A", '{"usr_id": 1}')
        [task] = session.scalars(select(Task))
        assert (0, f"{task.task_id}\n", "") == result
        assert ("A", {"usr_id": 1}, None) == (task.task_type, task.params, task.run_at)

    def test_tells_programs(self, run, session):
        """With --json the number is in a document."""
        result = run("enqueue", "A", "--json")
        assert {"task_id": session.scalar(select(Task.task_id)), "task_type": "A"} == (
            result.document
        )

    def test_params_from_standard_input(self, run, session, monkeypatch):
        """A dash keeps params out of the process list and off the limits of a command line."""
        monkeypatch.setattr("sys.stdin", io.StringIO('{"usr_id": 7}'))
        assert 0 == run("enqueue", "A", "-").code
        assert {"usr_id": 7} == session.scalar(select(Task.params))

    @pytest.mark.parametrize(
        ("params", "problem"),
        [
            ('{"a": 1,}', "line 1 column 9 (char 8)"),
            ("", "line 1 column 1 (char 0)"),
            ("[1]", "must be an object"),
        ],
    )
    def test_what_is_no_json_object(self, run, session, params, problem):
        """Wrong usage, with the place of the mistake."""
        result = run("enqueue", "A", params)
        assert (2, "") == result[:2]
        assert problem in result.err
        assert [] == _waiting(session)

    @pytest.mark.parametrize(
        ("params", "problem"),
        [(r'{"a": ["\u0000"]}', "params.a[0]: text with a NUL"), ('{"a": NaN}', "params.a: nan")],
    )
    def test_what_postgres_cannot_keep(self, run, params, problem):
        """The library's own check speaks."""
        result = run("enqueue", "A", params)
        assert 1 == result.code
        assert result.err.startswith(f"error: {problem}")

    def test_delay(self, run, session):
        """Seconds from now."""
        run("enqueue", "A", "--delay", "3600")
        [task] = session.scalars(select(Task))
        assert timedelta(minutes=59) < task.run_at - task.created_at < timedelta(minutes=61)

    @pytest.mark.parametrize("moment", ["2030-01-31T08:00:00+01:00", "2030-01-31T07:00:00Z"])
    def test_run_at(self, run, session, moment):
        """A moment in a time zone."""
        run("enqueue", "A", "--run-at", moment)
        expected = datetime(2030, 1, 31, 7, tzinfo=timezone.utc)
        assert expected == session.scalar(select(Task.run_at))

    @pytest.mark.parametrize("moment", ["2030-01-31T08:00:00", "tomorrow"])
    def test_run_at_without_a_time_zone(self, run, moment):
        """The machine's time zone is not guessed at."""
        result = run("enqueue", "A", "--run-at", moment)
        assert 2 == result.code
        assert "--run-at" in result.err

    def test_priority(self, run, session):
        """A priority is kept, also one below 0."""
        assert 0 == run("enqueue", "A", "--priority", "-5").code
        assert -5 == session.scalar(select(Task.priority))

    def test_priority_out_of_range(self, run):
        """What the column cannot hold is refused."""
        result = run("enqueue", "A", "--priority", "40000")
        assert (1, "error: priority must be from -32768 to 32767, got 40000\n") == (
            result.code,
            result.err,
        )

    def test_coalesce(self, run, session):
        """An equal task that waits is enough, and the second call says so."""
        assert 0 == run("enqueue", "A", "--coalesce").code
        assert (0, "an equal task waits already\n", "") == run("enqueue", "A", "--coalesce")
        assert run("enqueue", "A", "--coalesce", "--json").document["task_id"] is None
        assert 1 == len(_waiting(session))

    def test_params_are_checked_by_the_handler(self, run, session):
        """With a registry, params are read by the handler's annotation and stored as it would."""
        usr_id = "00000000-0000-0000-0000-000000000007"
        given = {"usr_id": usr_id.replace("-", ""), "at": "2030-01-31T07:00:00Z"}
        assert 0 == run("enqueue", "WELCOME", json.dumps(given), "--tasks", "test_cli:tasks").code
        raw = session.scalar(select(Task.params))
        assert usr_id == raw["usr_id"]
        assert datetime(2030, 1, 31, 7, tzinfo=timezone.utc) == welcome_at(raw)

    def test_params_that_do_not_fit(self, run):
        """The message has the path of what is wrong."""
        result = run("enqueue", "WELCOME", '{"usr_id": "seven"}', "--tasks", "test_cli:tasks")
        assert 1 == result.code
        assert result.err.startswith("error: params.usr_id: ")

    def test_a_function_with_several_types(self, run, session):
        """The type that was typed is the one that is written."""
        assert 0 == run("enqueue", "OTHER", "--tasks", "test_cli:tasks").code
        assert "OTHER" == session.scalar(select(Task.task_type))

    def test_a_type_without_a_handler(self, run, session):
        """It waits for whoever implements it; a slip of the pen is pointed out."""
        result = run("enqueue", "WELCOM", "--tasks", "test_cli:tasks")
        assert 0 == result.code
        assert "no handler for 'WELCOM' in --tasks yet, which has: WELCOME" in result.err
        assert "WELCOM" == session.scalar(select(Task.task_type))

    def test_an_own_table(self, run, session, job_tables):
        """The registry's task class decides which table; equal tasks are skipped where unique."""
        assert (0, "1\n", "") == run("enqueue", "JOB", "--tasks", "test_cli:jobs")
        assert (0, "an equal task waits already\n", "") == (
            run("enqueue", "JOB", "--tasks", "test_cli:jobs")
        )
        assert [(1, 0)] == _waiting(session, Job)


def welcome_at(raw: dict) -> datetime:
    return tasks.handlers["WELCOME"].load_params(raw).at


class TestList:
    def test_shows_what_waits(self, run, session):
        """One line for each task, the oldest first."""
        session.enqueue("A", {"usr_id": 1})
        session.enqueue("B", delay=7300)
        session.commit()
        result = run("list")
        assert 0 == result.code
        heading, first, second = map(str.split, result.lines)
        assert ["ID", "TYPE", "PARAMS", "CREATED", "DUE", "ATTEMPTS", "LAST", "ERROR"] == heading
        assert ["1", "A", '{"usr_id":', "1}", "now", "0"] == [*first[:4], *first[-2:]]
        assert ["2", "B", "{}", "in", "2", "h", "0"] == [*second[:3], *second[-4:]]

    def test_nothing(self, run):
        """An empty table is said in words."""
        assert (0, "no task waits\n", "") == run("list")
        assert {"tasks": [], "more": False} == run("list", "--json").document

    def test_type_and_limit(self, run, session):
        """Only so many of a type; that there are more is said beside the table."""
        session.enqueue_many("A", [{}] * 3)
        session.enqueue_many("B", [{}] * 3)
        session.commit()
        result = run("list", "--type", "B", "--limit", "2")
        assert ["B", "B"] == [line.split()[1] for line in result.lines[1:]]
        assert "there are more than these 2: see --limit\n" == result.err
        assert "" == run("list", "--type", "B", "--limit", "3").err
        assert 2 == run("list", "--limit", "0").code

    def test_what_runs_in_a_transaction(self, run, session, engine):
        """Its row is there until the commit; who deletes it, has not ended."""
        session.enqueue_many("A", [{}] * 3)
        session.commit()
        with engine.connect() as rolled_back:
            rolled_back.execute(text("delete from task"))
        with engine.connect() as claim:
            claim.execute(text("delete from task where task_id = 2"))
            states = [re.split("  +", line)[4] for line in run("list").lines[1:]]
            assert ["now", "running", "now"] == states
            listed = run("list", "--json").document["tasks"]
            assert [False, True, False] == [task["running"] for task in listed]
            [counted] = run("stats", "--json").document["types"]
            assert (2, 1) == (counted["ready"], counted["running"])

    def test_a_lease(self, run, session):
        """A task that runs in leased mode is not due at the end of its lease."""
        session.enqueue_many("A", [{}] * 2)
        session.execute(
            text(
                "update task set lease_token = gen_random_uuid(),"
                " run_at = now() + (task_id - 1.5) * interval '1 hour'"
            )
        )
        session.commit()
        assert ["now", "leased"] == [re.split("  +", line)[4] for line in run("list").lines[1:]]

    def test_tells_programs(self, run, session):
        """All columns of the row, params as JSON, datetimes as ISO 8601."""
        session.enqueue("A", {"big": 10**20, "list": [1.5, None]}, delay=60)
        session.commit()
        document = run("list", "--json").document
        [task] = document["tasks"]
        assert False is document["more"]
        assert {
            "task_id": 1,
            "task_type": "A",
            "params": {"big": 10**20, "list": [1.5, None]},
            "attempts": 0,
            "last_error": None,
            "lease_token": None,
            "priority": 0,
            "running": False,
        } == {key: task[key] for key in task if key not in ("created_at", "run_at")}
        assert datetime.fromisoformat(task["created_at"]) < datetime.fromisoformat(task["run_at"])

    def test_numbers_that_no_float_can_hold(self, run, session):
        """What plain SQL may have stored still gives valid JSON."""
        session.execute(
            text("""insert into task (task_type, params) values ('A', '{"n": 1e400}')""")
        )
        session.commit()
        [task] = json.loads(run("list", "--json").out, parse_constant=pytest.fail)["tasks"]
        assert "1" + "0" * 400 == str(task["params"]["n"])

    def test_long_params_are_cut(self, run, session):
        """In a list; a document holds them whole."""
        session.enqueue("A", {"text": "x" * 5000})
        session.commit()
        assert max(map(len, run("list").lines)) < 300
        assert "..." in run("list").out
        assert "x" * 5000 == run("list", "--json").document["tasks"][0]["params"]["text"]

    def test_stored_text_cannot_steer_the_terminal(self, run, session):
        """Escape sequences and rich's markup are shown, not obeyed."""
        session.execute(
            text("insert into task (task_type, params, last_error) values (:t, '{}', :e)"),
            {"t": "\x1b[2J[red]X[/red]", "e": "bad\x07\r\nsecond line"},
        )
        session.commit()
        out = run("list").out
        assert r"\x1b[2J[red]X[/red]" in out
        assert r"bad\x07\r" in out
        assert "second line" not in out

    def test_an_own_table(self, run, session, job_tables):
        """The columns that a task class adds are in the document."""
        session.enqueue("JOB", task_class=Job, tenant="acme")
        session.commit()
        [task] = run("list", "--tasks", "test_cli:jobs", "--json").document["tasks"]
        assert "acme" == task["tenant"]


class TestDead:
    def test_shows_the_error_queue(self, run, session):
        """Why, after how many attempts, when, and the first line of the error."""
        _bury(session, 7, 8)
        result = run("dead")
        heading, first, _ = result.lines
        assert ["ID", "TYPE", "PARAMS", "REASON", "ATTEMPTS", "BURIED", "ERROR"] == heading.split()
        assert re.fullmatch(
            r' 7 +A +\{"n": 7\} +failed +10 +\d+ s ago +ValueError: no such user', first
        )

    def test_nothing(self, run):
        """An empty error queue is said in words."""
        assert (0, "no task is dead\n", "") == run("dead")

    def test_shows_one_task_whole(self, run, session):
        """The whole error and the whole params of one task."""
        _bury(session, 7, params={"text": "x" * 5000})
        result = run("dead", "--show", "7")
        assert 0 == result.code
        assert f"last_error:   {ERROR}" in result.out
        assert "x" * 5000 in result.out

    def test_tells_programs(self, run, session):
        """One task or all, as documents."""
        _bury(session, 7)
        [listed] = run("dead", "--json").document["tasks"]
        assert ("A", {"n": 7}, "failed", 10, ERROR) == tuple(
            listed[key] for key in ("task_type", "params", "reason", "attempts", "last_error")
        )
        assert listed == run("dead", "--show", "7", "--json").document

    def test_a_task_that_is_not_there(self, run):
        """It is named, and the exit code says so."""
        assert (1, "", "task 7 is not in the error queue\n") == run("dead", "--show", "7")


class TestRequeue:
    def test_brings_tasks_back(self, run, session):
        """They keep their numbers and get fresh attempts; a number that is not there is named."""
        _bury(session, 7, 8, 9)
        result = run("requeue", "7", "9", "11")
        assert (0, f"2 tasks are back{READY}\n", "not in the error queue: 11\n") == result
        assert [(7, 0), (9, 0)] == _waiting(session)
        assert [8] == _dead_ids(session)

    def test_none_matches(self, run):
        """Nothing to bring back is a failure for scripts."""
        assert (1, "0 tasks are back\n", "not in the error queue: 11\n") == run("requeue", "11")
        assert (1, "0 tasks are back\n", "") == run("requeue", "--all")

    def test_by_type(self, run, session):
        """All dead tasks of one type."""
        _bury(session, 1, 2)
        _bury(session, 3, task_type="B")
        assert (0, f"1 task is back{READY}\n", "") == run("requeue", "--type", "B")
        assert [1, 2] == _dead_ids(session)

    def test_all_in_batches(self, run, session, monkeypatch):
        """A long queue comes back in several transactions, each task once."""
        monkeypatch.setattr(cli_commands, "BATCH", 2)
        _bury(session, *range(1, 6))
        assert (0, f"5 tasks are back{READY}\n", "") == run("requeue", "--all")
        assert [(n, 0) for n in range(1, 6)] == _waiting(session)
        assert [] == _dead_ids(session)

    def test_tells_programs(self, run, session):
        """What became of each number."""
        _bury(session, 7)
        assert {"count": 1, "requeued": [7], "merged": [], "locked": [], "missing": [8]} == (
            run("requeue", "7", "8", "--json").document
        )

    @pytest.mark.parametrize("how", [["7"], ["--all"]])
    def test_a_locked_row_is_passed_over(self, run, session, engine, how):
        """Somebody edits a dead task: the command returns at once, and brings the others back."""
        _bury(session, 7, 8)
        with engine.begin() as other:
            other.execute(text("select * from dead_task where task_id = 7 for update"))
            result = run("requeue", *how)
        if how == ["7"]:
            assert (1, "0 tasks are back\n") == result[:2]
            assert "held by somebody else, try again: 7\n" == result.err
        else:
            assert (0, f"1 task is back{READY}\n") == result[:2]
        assert 7 in _dead_ids(session)

    def test_an_equal_task_waits(self, run, session, job_tables):
        """Where only one may exist, the dead one is not needed any more, and that is said."""
        self._bury_job(session)
        session.enqueue("JOB", {"n": 7}, task_class=Job)
        session.commit()
        result = run("requeue", "7", "--tasks", "test_cli:jobs")
        assert (0, "0 tasks are back\n", "not needed, an equal task waits: 7\n") == result
        assert 1 == len(_waiting(session, Job))

    def test_an_equal_task_runs(self, run, session, engine, job_tables, monkeypatch):
        """The wait for a running equal task is bounded; then nothing has changed."""
        monkeypatch.setattr(cli_commands, "LOCK_TIMEOUT", "50ms")
        self._bury_job(session)
        session.enqueue("JOB", {"n": 7}, task_class=Job)
        session.commit()
        with engine.connect() as claim:
            claim.execute(text("delete from job"))
            result = run("requeue", "7", "--tasks", "test_cli:jobs")
            claim.rollback()
        assert 1 == result.code
        assert "an equal task is running" in result.err
        assert 7 == session.scalar(select(DeadJob.task_id))

    @pytest.mark.parametrize("arguments", [[], ["7", "--all"], ["--type", "A", "--all"]])
    def test_one_choice_is_needed(self, run, arguments):
        """Neither none nor two of: numbers, --type, --all."""
        result = run("requeue", *arguments)
        assert 2 == result.code
        assert "either task numbers, or --type, or --all" in result.err

    @pytest.mark.parametrize("number", ["0", "seven", str(2**63)])
    def test_what_is_no_task_number(self, run, number):
        """Refused before the database is asked."""
        assert 2 == run("requeue", number).code

    @staticmethod
    def _bury_job(session: TaskSession) -> None:
        now = datetime.now(timezone.utc)
        dead = {"task_type": "JOB", "params": {"n": 7}, "created_at": now, "attempts": 1}
        session.add(DeadJob(task_id=7, reason="failed", **dead))
        session.commit()


class TestStats:
    def test_counts_by_type_and_state(self, run, session):
        """Tasks of each type by their state, and the age of the oldest that is ready."""
        session.enqueue_many("A", [{}] * 3)
        session.enqueue("B", delay=60)
        session.enqueue("LONG")
        session.flush()  # SQLAlchemy 2.0 does not for text
        lease = f"lease_token = '{UUID(int=7)}', run_at = now() + interval '1 min', attempts = 2"
        session.execute(text(f"update task set {lease} where task_type = 'LONG'"))
        session.execute(text("update task set attempts = 1 where task_id = 1"))
        session.execute(
            text("update task set created_at = now() - interval '3 h' where task_id = 2")
        )
        _bury(session, 100, task_type="C")
        rows = [re.split(r" {2,}", line.strip()) for line in run("stats").lines]
        assert [
            ["TYPE", "READY", "RUNNING", "PLANNED", "LEASED", "RETRYING", "DEAD", "OLDEST READY"],
            ["A", "3", "0", "0", "0", "1", "0", "3 h"],
            ["B", "0", "0", "1", "0", "0", "0"],
            ["C", "0", "0", "0", "0", "0", "1"],
            ["LONG", "0", "0", "0", "1", "0", "0"],
        ] == rows

    def test_tells_programs(self, run, session):
        """The keys are stable."""
        session.enqueue("A")
        session.commit()
        [entry] = run("stats", "--json").document["types"]
        counts = {"ready": 1, "running": 0, "planned": 0, "leased": 0, "retrying": 0, "dead": 0}
        assert {"task_type": "A", **counts} == {
            key: entry[key] for key in entry if key != "oldest_seconds"
        }
        assert 0 <= entry["oldest_seconds"] < 60

    def test_nothing(self, run):
        """Empty tables are said in words."""
        assert (0, "there are no tasks\n", "") == run("stats")


class TestTodo:
    @pytest.fixture(autouse=True)
    def rows(self, session):
        session.enqueue_many("UNKNOWN", [{}] * 4)
        session.enqueue("PLANNED_UNKNOWN", delay=60)
        session.enqueue("PLAIN")
        session.commit()

    def _types(self, result: Result) -> list[list[str]]:
        return [line.split()[:2] for line in result.lines[1:]]

    def test_types_without_a_handler(self, run):
        """With a registry: only what it has no handler for, ready or planned."""
        expected = [["PLANNED_UNKNOWN", "1"], ["UNKNOWN", "4"]]
        assert expected == self._types(run("todo", "test_cli:tasks"))
        assert expected == self._types(run("todo", "--tasks", "test_cli:tasks"))

    def test_the_registry_of_the_environment(self, run, monkeypatch):
        """PGTASK_TASKS saves the typing."""
        monkeypatch.setenv("PGTASK_TASKS", "test_cli:tasks")
        assert 2 == len(self._types(run("todo")))

    def test_all_that_waits(self, run):
        """Without a registry: every type."""
        assert ["PLAIN", "PLANNED_UNKNOWN", "UNKNOWN"] == [
            row[0] for row in self._types(run("todo"))
        ]

    def test_a_crowd_is_not_counted_to_its_end(self, run, monkeypatch):
        """The work is bounded, and what is shown says so."""
        monkeypatch.setattr(cli_commands, "COUNTED", 3)
        assert re.search(r"UNKNOWN +3 or more +\d+ s or more", run("todo").out)
        entries = run("todo", "--json").document["types"]
        assert [("PLAIN", 1, True), ("PLANNED_UNKNOWN", 1, True), ("UNKNOWN", 3, False)] == [
            (entry["task_type"], entry["count"], entry["exact"]) for entry in entries
        ]

    def test_nothing_is_left_to_do(self, run, session):
        """Said in words, with and without a registry."""
        session.execute(text("delete from task where task_type <> 'PLAIN'"))
        session.commit()
        assert "every type that waits has a handler\n" == run("todo", "test_cli:tasks").out
        session.execute(text("delete from task"))
        session.commit()
        assert "nothing waits\n" == run("todo").out
        assert {"types": []} == run("todo", "--json").document


class TestProcess:
    def _start(self, url: str, *argv: str, **options: Any) -> subprocess.Popen:
        paths = [str(SOURCE), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "DATABASE_URL": url,
            **options.pop("env", {}),
        }
        command = [sys.executable, "-m", "pgtask_sa", *argv]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
        return subprocess.Popen(command, env=environment, **streams)

    @pytest.fixture
    def filled(self, db_url, session) -> str:
        session.enqueue_many("A", [{"text": "wide " * 30, "n": n} for n in range(3000)])
        session.commit()
        return db_url

    def test_a_pipe_gets_whole_plain_lines(self, filled):
        """Into a pipe: no colours, no escape sequences, nothing cut at 80 columns."""
        process = self._start(filled, "list", "--limit", "1")
        out, err = (stream.decode() for stream in process.communicate(timeout=30))
        assert 0 == process.returncode, err
        assert "wide " * 30 in out
        assert "\x1b" not in out
        assert [line.rstrip() for line in out.splitlines()] == out.splitlines()

    def test_a_terminal_gets_lines_that_fit(self, filled):
        """On a terminal: one line for each task, cut with an ellipsis at its width."""
        ours, theirs = pty.openpty()
        env = {"COLUMNS": "90", "TERM": "xterm"}
        process = self._start(filled, "list", "--limit", "3", stdout=theirs, env=env)
        os.close(theirs)
        _, err = process.communicate(timeout=30)
        shown = re.sub(r"\x1b\[[0-9;]*m", "", os.read(ours, 65536).decode()).splitlines()
        os.close(ours)
        assert 0 == process.returncode, err
        assert ["1", "2", "3"] == [line.split()[0] for line in shown if re.match(r" *\d", line)]
        assert max(map(len, shown)) <= 90
        assert "…" in shown[-1]

    def test_a_reader_that_leaves(self, filled):
        """`| head` ends the command without a word."""
        process = self._start(filled, "list", "--limit", "3000", "--json")
        assert b"{\n" == process.stdout.readline()
        process.stdout.close()
        assert 0 == process.wait(timeout=30)
        assert b"" == process.stderr.read()
        process.stderr.close()

    def test_any_encoding_will_do(self, db_url, session):
        """A terminal that knows ASCII only is no reason to fail."""
        session.enqueue("GRÜSSE", {"to": "世界"})
        session.commit()
        process = self._start(db_url, "list", env={"PYTHONIOENCODING": "ascii"})
        out, err = process.communicate(timeout=30)
        assert 0 == process.returncode, err
        assert rb"GR\xdcSSE" in out


class TestStatements:
    def test_a_rare_type_is_counted_by_the_indexes(self, engine):
        """Among many tasks of another type, `todo` reads only those that it counts."""
        with engine.begin() as connection:
            connection.execute(
                text(
                    "insert into task (task_type, params) select 'CROWD', '{}' "
                    "from generate_series(1, 20000)"
                )
            )
            connection.execute(text("insert into task (task_type, params) values ('RARE', '{}')"))
        with engine.connect() as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT")
            connection.execute(text("vacuum analyze task"))
            summary = reports.summarize_waiting(Task.__table__, 10_000)
            plan = _plan(connection, summary, {"kind": "RARE"})
        assert "Seq Scan" not in plan
        assert {"task_ready_idx", "task_due_idx"} == set(re.findall(r"task_\w+_idx", plan))


def _plan(connection, statement, parameters: dict) -> str:
    compiled = statement.compile(connection, compile_kwargs={"render_postcompile": True})
    sql, values = str(compiled), compiled.construct_params(parameters)
    rows = connection.exec_driver_sql(f"explain {sql}", values)
    return "\n".join(row[0] for row in rows)


def test_requeue_carries_columns_that_nobody_mapped(run, engine):
    """Without --tasks the columns of a user's own class are not lost on the way back."""
    with engine.begin() as connection:
        for name in ("task", "dead_task"):
            connection.execute(text(f"alter table {name} add tenant_id int not null default 0"))
        connection.execute(
            text(
                "insert into dead_task (task_id, task_type, params, created_at, attempts, reason,"
                " tenant_id) values (7, 'A', '{}', now(), 3, 'failed', 42)"
            )
        )
    run("requeue", "7")
    with engine.connect() as connection:
        assert 42 == connection.scalar(text("select tenant_id from task where task_id = 7"))


def test_migrate_only_goes_up(run):
    """A way back is not taken for nothing to do."""
    result = run("migrate", "--revision", "base")
    assert 2 == result.code
    assert "migrate only goes up" in result.err


def test_the_pgtask_script_is_the_same_program():
    """What pip installs as ``pgtask`` is what ``python -m pgtask_sa`` runs."""
    (script,) = metadata.entry_points(group="console_scripts", name="pgtask")
    assert cli.main is script.load()
