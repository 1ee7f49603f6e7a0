"""The examples and the demo run, print what they promise, and leave nothing behind."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from alembic_cli import ROOT, run_alembic
from catalog import catalog
from processes import WatchedProcess
from sqlalchemy import NullPool, create_engine, select, text

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from sqlalchemy import Engine

EXAMPLES = ROOT / "examples"
SIGNUP = EXAMPLES / "signup"
ALEMBIC = "-c signup/alembic.ini"
VERSION_TABLE = "alembic_version"

PRINTED = {
    "async_app": """\
planned 2 trips
Lisbon on 01 May: sunny
Oslo on 01 May: sunny
""",
    "own_base": """\
tenant 7: invoice over 120
tenant 8: invoice over 80
""",
    "follow_up": """\
attempt 1 has written the invoice: invoices 1, e-mails to send 1
it failed (RuntimeError: the printer is on fire), and nothing is left of it: \
invoices 0, e-mails to send 0
attempt 2 has written the invoice: invoices 1, e-mails to send 1
e-mail to user1@example.org: your order is invoiced
in the end: invoices 1, e-mails to send 0
""",
}


def run_example(name: str, **env: str) -> str:
    """Run an example as its reader does; what it prints comes back, once it ended well."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    return done.stdout


@pytest.mark.parametrize("name", PRINTED)
def test_example_prints_what_it_promises(name: str, empty_db_url: str) -> None:
    """On a database of the reader's, and a second time on the same one."""
    expected = [PRINTED[name]] * 2
    actual = [run_example(name, DATABASE_URL=empty_db_url) for _ in range(2)]
    assert expected == actual


@pytest.mark.parametrize("name", PRINTED)
def test_example_brings_its_own_database(name: str) -> None:
    """Without DATABASE_URL an example starts an embedded server."""
    assert PRINTED[name] == run_example(name)


def test_async_example_runs_over_asyncpg(empty_db_url: str) -> None:
    """The application's driver is the application's choice, as the docstring says."""
    url = empty_db_url.replace("+psycopg:", "+asyncpg:")
    assert PRINTED["async_app"] == run_example("async_app", DATABASE_URL=url)


# -- signup: migrations ----------------------------------------------------------------------------


def alembic(url: str, *commands: str) -> str:
    lines = [f"{ALEMBIC} {command}" for command in commands]
    done = run_alembic(*lines, cwd=EXAMPLES, env={"DATABASE_URL": url})
    assert done.returncode == 0, done.stdout
    return done.stdout


def _catalog(url: str) -> dict[str, list[tuple]]:
    engine = create_engine(url, poolclass=NullPool)
    with engine.connect() as connection:
        return catalog(connection, without=VERSION_TABLE)


def test_signup_migrations_are_what_autogenerate_makes(empty_db_url: str) -> None:
    """After `upgrade head` autogenerate finds nothing left to do."""
    assert "No new upgrade operations" in alembic(empty_db_url, "upgrade head", "check")


def test_signup_migrations_equal_create_all(empty_db_url: str, tmp_path: Path) -> None:
    """Trigger and storage parameters included; and the way back leads to an empty database."""
    from signup.models import Base

    empty = _catalog(empty_db_url)
    alembic(empty_db_url, "upgrade head")
    migrated = _catalog(empty_db_url)
    alembic(empty_db_url, "downgrade base")
    assert empty == _catalog(empty_db_url)
    engine = create_engine(empty_db_url, poolclass=NullPool)
    Base.metadata.create_all(engine)
    assert _catalog(empty_db_url) == migrated


def test_signup_migrations_can_be_written_as_sql(empty_db_url: str) -> None:
    """`upgrade head --sql` gives a script that makes the same database."""
    script = alembic(empty_db_url, "upgrade head --sql")
    sql = "\n".join(line for line in script.splitlines() if not line.startswith("INFO"))
    engine = create_engine(empty_db_url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql(sql.replace("%", "%%"))
    assert "No new upgrade operations" in alembic(empty_db_url, "check")


# -- signup: the application -----------------------------------------------------------------------


@pytest.fixture
def signup_engine(empty_db_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Give an engine on a database with the tables of signup, which is also the application's."""
    from signup.models import Base

    monkeypatch.setenv("DATABASE_URL", empty_db_url)
    # It makes its engine when it is imported.
    monkeypatch.delitem(sys.modules, "signup.app", raising=False)
    engine = create_engine(empty_db_url)
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


def tasks_in(engine: Engine) -> list[tuple[str, dict]]:
    from signup.models import Task

    with engine.connect() as connection:
        rows = connection.execute(select(Task.task_type, Task.params).order_by(Task.task_id))
        return [tuple(row) for row in rows]


def test_signup_is_one_statement(signup_engine: Engine) -> None:
    """It writes user and task; for an address that is taken it writes neither."""
    from signup.app import signup_statement

    statement = signup_statement("user1@example.org", "hash")
    with signup_engine.begin() as connection:
        usr_id = connection.scalar(statement)
        assert connection.scalar(statement) is None
    assert [("SEND_EMAIL_WELCOME", {"usr_id": usr_id})] == tasks_in(signup_engine)
    with signup_engine.connect() as connection:
        assert [usr_id] == list(connection.scalars(text("select usr_id from usr")))


def test_orm_variant_in_the_readme_runs(signup_engine: Engine) -> None:
    """The README's ORM version writes what the one statement writes."""
    readme = SIGNUP / "README.md"
    (code,) = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    namespace: dict = {}
    exec(compile(code, str(readme), "exec"), namespace)
    usr_id = namespace["sign_up"]("user1@example.org", "hash")
    namespace["engine"].dispose()
    assert [("SEND_EMAIL_WELCOME", {"usr_id": usr_id})] == tasks_in(signup_engine)


# -- signup: the demo ------------------------------------------------------------------------------


def demo(*arguments: str) -> WatchedProcess:
    return WatchedProcess(sys.executable, str(SIGNUP / "demo.py"), *arguments, cwd=ROOT)


def test_demo_ends_with_all_checks_ok() -> None:
    """The whole demo, as `make demo` runs it."""
    with demo() as process:
        assert process.wait(timeout=100) == 0, process.output
        assert re.fullmatch(r"All \d\d checks hold\.", process.lines[-1])
        assert "WRONG" not in process.output


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _refuses(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_demo_cleans_up_after_ctrl_c() -> None:
    """An interrupted demo leaves no worker, no web server and no database server."""
    with demo("--people", "500") as process:
        database = int(process.wait_for_line(r"PostgreSQL \S+ on port (\d+)", 60)[1])
        web = int(process.wait_for_line(r"application serves \S+:(\d+)", 60)[1])
        worker = int(process.wait_for_line(r"a worker is up, process (\d+)", 60)[1])
        process.wait_for_line("500 people sign up")
        process.interrupt()
        assert process.wait(timeout=30) == 130, process.output
    assert (True, True, True) == (_is_gone(worker), _refuses(database), _refuses(web))


def test_demo_fails_when_a_check_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, and a line that says what is wrong."""
    monkeypatch.syspath_prepend(str(SIGNUP))
    import demo
    from story import Check, Story

    checks = [Check("users", 22, 22), Check("dead tasks", 0, 3)]
    assert demo.verdict(Story(), checks) == 1
    assert capsys.readouterr().out.endswith("WRONG: dead tasks: expected 0, counted 3\n")
