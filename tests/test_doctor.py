"""The doctor: all is well on a sound server, and everything that can be wrong is found there."""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import noting
import own_models
import pytest
from databases import Databases
from fleet import Fleet, events
from postgres_server import PostgresServer, embedded_bin_dir
from running import Running
from sqlalchemy import NullPool, create_engine, event, make_url, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import DeclarativeBase, Mapped

from pgtask_sa import DeadTaskMixin, Task, TaskMixin, TaskRegistry, cli, migrations
from pgtask_sa.checkup import examine, worst
from pgtask_sa.checkup_server import judge_version
from pgtask_sa.doctor import find_dangers
from pgtask_sa.patient import Patient
from pgtask_sa.settle import Tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Connection

    from pgtask_sa.doctor import Finding

HEALTHY: list[tuple[str, str]] = []


class Base(DeclarativeBase):
    pass


class Job(TaskMixin, Base):
    __tablename__ = "job"
    tenant: Mapped[int]
    remark: Mapped[str | None]


class DeadJob(DeadTaskMixin, Base):
    __tablename__ = "dead_job"
    tenant: Mapped[int]


registry = TaskRegistry()


@registry.handler("SHORT", timeout=1)
def short(session, params): ...


@registry.handler("LONG", timeout=600)
def long(session, params): ...


@registry.handler("ENDLESS", timeout=None)
async def endless(session, params): ...


# -- a server as it should be, and a database of it for each test ----------------------------------


def _server(**settings: str | int) -> PostgresServer:
    own = os.environ.get("PGTASK_TEST_PG_BIN")
    try:
        embedded = None if own else embedded_bin_dir()
    except ImportError:
        embedded = None
    if not (own or embedded):
        pytest.skip("needs binaries of PostgreSQL to start a server of its own")
    return PostgresServer(own, settings=settings)


@pytest.fixture(scope="module")
def sound_server() -> Iterator[PostgresServer]:
    with _server() as server:
        yield server


@pytest.fixture(scope="module")
def sound_databases(sound_server: PostgresServer) -> Iterator[tuple[Databases, str]]:
    databases = Databases(sound_server.admin_url)
    with databases.temporary() as url:
        migrations.upgrade(url)
        yield databases, str(make_url(url).database)


@pytest.fixture
def url(sound_databases: tuple[Databases, str]) -> Iterator[str]:
    databases, template = sound_databases
    with databases.temporary(template) as url:
        yield url


@pytest.fixture
def admin(url: str) -> Iterator[Connection]:
    """Give a connection that commits each statement."""
    engine = create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        yield connection


@pytest.fixture
def sql(admin: Connection) -> Callable[..., None]:
    def sql(*statements: str) -> None:
        for statement in statements:
            admin.execute(text(statement.replace("{here}", str(admin.engine.url.database))))

    return sql


@contextmanager
def _connected(url: str) -> Iterator[Connection]:
    engine = create_engine(url, poolclass=NullPool, isolation_level="READ COMMITTED")
    with engine.connect() as connection:
        yield connection


def _examined(url: str, tasks: TaskRegistry | None = None, **options: Any) -> list[Finding]:
    task_class = tasks.task_class if tasks else Task
    handlers = tasks.handlers if tasks else {}
    with _connected(url) as connection:
        options = {"connections": 7, **options}
        return examine(Patient(connection, Tables(task_class), handlers, **options))


def _unwell(url: str, tasks: TaskRegistry | None = None, **options: Any) -> list[Finding]:
    """Return what is not well."""
    return [found for found in _examined(url, tasks, **options) if found.level != "ok"]


def _named(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(found.name, found.level) for found in findings]


def _dangers(url: str, task_class: type[Any] = Task) -> list[Finding]:
    with _connected(url) as connection:
        return find_dangers(connection, Tables(task_class), {})


@pytest.fixture
def role(url: str, admin: Connection) -> Iterator[str]:
    """Give the URL of a role that has no rights but those that the test grants it: ``clerk``."""
    admin.execute(text("create role clerk login password 'secret'"))
    yield make_url(url).set(username="clerk", password="secret").render_as_string(False)
    admin.execute(text("drop owned by clerk"))
    admin.execute(text("drop role clerk"))


def _grant(sql: Callable[..., None]) -> None:
    sql("grant select, insert, update, delete on task, dead_task, task_worker to clerk")


# -- all is well -----------------------------------------------------------------------------------


class TestAllWell:
    def test_nothing_is_found(self, url):
        """On a sound server with migrated tables every check is ok, and made."""
        findings = _examined(url)
        assert [] == [found for found in findings if found.level != "ok"]
        expected = "server pooler writable durability isolation timeouts connections clock"
        expected += " autovacuum prepared snapshots slots revision dangers foreign-keys triggers"
        expected += " rights trial own-columns indexes wake-up storage dead-rows workers"
        assert expected.split() == [found.name.replace(" ", "-") for found in findings]
        assert [] == _dangers(url)

    def test_nothing_is_left(self, url, admin):
        """The trial leaves no row, and wakes nobody."""
        _examined(url)
        for table in ("task", "dead_task", "task_worker"):
            assert 0 == admin.scalar(text(f"select count(*) from {table}"))

    def test_a_role_with_the_rights_of_the_readme(self, url, role, sql):
        """A worker need not own the tables."""
        _grant(sql)
        assert HEALTHY == _named(_unwell(role))

    @pytest.mark.parametrize("name", ["EnumJob", "HstoreJob", "UniqueJob", "DigestJob"])
    def test_own_tables(self, url, name):
        """Enums, HSTORE and unique constraints can be tried as well."""
        with _own_tables(url) as dead_classes:
            task_class = getattr(own_models, name)
            tasks = TaskRegistry(task_class=task_class)
            task_class.__dead_task__ = dead_classes[name]
            try:
                assert HEALTHY == _named(_unwell(url, tasks))
            finally:
                task_class.__dead_task__ = None

    def test_in_words(self, url, monkeypatch, capsys):
        """One line for each check, and exit code 0."""
        monkeypatch.setenv("DATABASE_URL", url)
        assert 0 == cli.main(["doctor"])
        lines = capsys.readouterr().out.splitlines()
        assert "connects" in lines[0]
        assert {"ok"} == {line.split()[0] for line in lines}

    def test_for_programs(self, url, sql, monkeypatch, capsys):
        """The document has the worst level, and of each check its name, level, message, remedy."""
        monkeypatch.setenv("DATABASE_URL", url)
        sql("alter table task disable trigger task_wakeup")
        assert 0 == cli.main(["doctor", "--json"])
        document = json.loads(capsys.readouterr().out)
        assert "warning" == document["level"]
        assert ["connects", "server"] == [check["name"] for check in document["checks"][:2]]
        for check in document["checks"]:
            assert {"name", "level", "message", "remedy"} == set(check)
        (found,) = [check for check in document["checks"] if check["level"] == "warning"]
        assert "alter table task enable trigger task_wakeup" == found["remedy"]


@contextmanager
def _own_tables(url: str) -> Iterator[dict[str, Any]]:
    """Create the tables of `own_models`, each with an error queue; yield the latter's classes."""
    from sqlalchemy import Text
    from sqlalchemy.dialects.postgresql import HSTORE, JSONB
    from sqlalchemy.orm import mapped_column

    class DeadBase(DeclarativeBase):
        pass

    classes = {}
    for name in ("EnumJob", "HstoreJob", "UniqueJob", "DigestJob"):
        kind = HSTORE if name == "HstoreJob" else JSONB
        body = {"__tablename__": f"dead_{name.lower()}", "params": mapped_column(kind)}
        body["task_type"] = mapped_column(Text)
        classes[name] = type(f"Dead{name}", (DeadTaskMixin, DeadBase), body)
    engine = create_engine(url, poolclass=NullPool)
    own_models.create_all(engine)
    DeadBase.metadata.create_all(engine)
    yield classes


# -- the server ------------------------------------------------------------------------------------


class TestServer:
    def test_no_connection(self, monkeypatch, capsys):
        """That is a finding, too, also for programs, and without the password."""
        monkeypatch.setenv("DATABASE_URL", "postgresql://bob:secret@127.0.0.1:1/shop")
        assert 1 == cli.main(["doctor", "--json"])
        text = capsys.readouterr().out
        assert [("connects", "error")] == [
            (check["name"], check["level"]) for check in json.loads(text)["checks"]
        ]
        assert "secret" not in text

    @pytest.mark.parametrize(
        ("described", "number", "level"),
        [
            ("PostgreSQL 15.1 on x86_64", 150_001, "ok"),
            ("PostgreSQL 14.9 on x86_64", 140_009, "warning"),
            ("CockroachDB CCL v24.1.0 (x86_64-pc-linux-gnu)", 130_000, "error"),
            ("PostgreSQL 15.2-YB-2.25.0.0-b0 on x86_64", 150_002, "error"),
        ],
    )
    def test_which_server(self, described, number, level):
        """Old ones are doubtful, and look-alikes are none."""
        assert level == judge_version(described, number).level

    def test_a_standby_without_autovacuum(self):
        """Nothing can be claimed on a standby."""
        with _server(autovacuum="off") as server:
            migrations.upgrade(server.admin_url)
            server.stop()
            signal = server.home / "data" / "standby.signal"
            signal.touch()
            server._hand_over(signal)
            server.start()
            found = _unwell(server.admin_url)
            expected = [("writable", "error"), ("autovacuum", "warning"), ("trial", "error")]
            assert expected == _named(found)
            assert "this is a standby" in found[0].message

    @pytest.mark.parametrize(
        ("setting", "value", "expected"),
        [
            ("default_transaction_read_only", "on", [("writable", "error"), ("trial", "error")]),
            ("synchronous_commit", "off", [("durability", "warning")]),
            ("session_replication_role", "replica", [("replication role", "error")]),
            ("track_counts", "off", [("autovacuum", "warning")]),
            ("statement_timeout", "500ms", [("timeouts", "warning")]),
            ("idle_session_timeout", "3s", [("timeouts", "warning")]),
            ("transaction_timeout", "30s", []),
            ("idle_in_transaction_session_timeout", "3s", []),
            ("statement_timeout", "30s", []),
            ("lock_timeout", "30s", []),
            ("default_transaction_isolation", "serializable", []),
        ],
    )
    def test_settings_of_the_database(self, url, sql, setting, value, expected):
        """They are looked at as a session of the worker gets them."""
        if setting == "transaction_timeout" and _version(url) < 170_000:
            pytest.skip("PostgreSQL 17 brought it")
        sql(f"alter database {{here}} set {setting} = '{value}'")
        assert expected == _named(_unwell(url))

    @pytest.mark.parametrize(
        ("setting", "level"), [("fsync", "error"), ("full_page_writes", "warning")]
    )
    def test_a_server_that_forgets(self, url, sql, setting, level):
        """What was committed can be lost in a crash."""
        sql(f"alter system set {setting} = off", "select pg_reload_conf()")
        try:
            _until(lambda: [("durability", level)] == _named(_unwell(url)))
        finally:
            sql(f"alter system reset {setting}", "select pg_reload_conf()")
        _until(lambda: [] == _unwell(url))

    @pytest.mark.parametrize(
        ("setting", "longer"),
        [
            ("transaction_timeout", "LONG (600 s), ENDLESS (no timeout)"),
            ("statement_timeout", "LONG (600 s)"),
            ("lock_timeout", "LONG (600 s)"),
        ],
    )
    def test_timeouts_of_handlers(self, url, sql, setting, longer):
        """The server gives less time than the handlers may take, and they are named."""
        if setting == "transaction_timeout" and _version(url) < 170_000:
            pytest.skip("PostgreSQL 17 brought it")
        sql(f"alter database {{here}} set {setting} = '30s'")
        (found,) = _unwell(url, registry)
        assert ("timeouts", "warning") == (found.name, found.level)
        assert f"{setting} is 30 s, and longer may take: {longer}" == found.message

    @pytest.mark.parametrize(
        "setting", ["idle_in_transaction_session_timeout", "transaction_timeout"]
    )
    def test_timeouts_that_a_worker_sets_itself(self, url, sql, setting):
        """Nothing is said of what does not hold for it: its tasks live as long as they may."""
        if setting == "transaction_timeout" and _version(url) < 170_000:
            pytest.skip("PostgreSQL 17 brought it")
        tasks = TaskRegistry()
        tasks.handler("LONG", timeout=600)(long)
        tasks.handler("LEASED", mode="leased")(short)
        tasks.handler("WAITS")(lambda session, params: time.sleep(1.4))
        sql(f"alter database {{here}} set {setting} = '1s'")
        assert [] == _unwell(url, tasks)
        running = Running(url, tasks, concurrency=1, drain=True)
        running.enqueue("WAITS")
        with running:
            assert 0 == running.wait()
        assert ["task.done"] == running.told("task.done", "transaction.lost", "task.retry")

    def test_too_few_connections(self, url, sql, role):
        """The least limit counts: the server's, the database's, or the role's."""
        _grant(sql)
        (found,) = _unwell(url, connections=198)
        assert ("connections", "error") == (found.name, found.level)
        assert "need 198 connections" in found.message
        assert [("connections", "warning")] == _named(_unwell(url, connections=197))
        sql("alter role clerk connection limit 6")
        (found,) = _unwell(role)
        assert "the role's limit is 6" in found.message

    def test_connections_by_the_options(self, url, monkeypatch, capsys):
        """For each process a connection for each lane of each kind, and three more."""
        monkeypatch.setenv("DATABASE_URL", url)
        options = ["--tasks", "test_doctor:registry", "--concurrency", "5", "--processes", "4"]
        cli.main(["doctor", *options])
        assert f"the workers need {4 * (5 * 2 + 3)};" in capsys.readouterr().out

    @pytest.mark.parametrize("apart", [-3600, 3])
    def test_clocks_that_differ(self, url, apart):
        """The message says by how much, and which one is ahead."""
        (found,) = _unwell(url, clock=lambda: time.time() - apart)
        assert ("clock", "warning") == (found.name, found.level)
        assert f"is {apart:+.1f} s from" in found.message

    def test_prepared_transactions(self, url, sql, admin):
        """Any is worth a word; one that holds tasks keeps them from being claimed."""
        sql("create table other (i int)", "begin", "insert into other values (1)")
        sql("prepare transaction 'elsewhere of {here}'")
        sql("insert into task (task_type) values ('A')", "begin", "delete from task")
        sql("prepare transaction 'ours of {here}'")
        try:
            found = _unwell(url)
            assert [("prepared", "warning"), ("prepared", "error")] == _named(found)
            assert "'ours of " in found[1].message
        finally:
            sql("rollback prepared 'ours of {here}'", "rollback prepared 'elsewhere of {here}'")

    def test_an_old_snapshot(self, url, admin):
        """Who holds it is named."""
        with _connected(url) as reader:
            reader.execute(text("set application_name = 'nightly report'"))
            reader.commit()
            reader.execution_options(isolation_level="REPEATABLE READ")
            reader.execute(text("select count(*) from task"))
            (found,) = [each for each in _examined(url) if each.name == "snapshots"]
            assert "nightly report" in found.message
            assert [] == _unwell(url)
            (found,) = _unwell(url, old=0.0)
        assert ("snapshots", "warning") == (found.name, found.level)
        assert "nightly report" in found.message

    def test_an_abandoned_replication_slot(self, url, sql):
        """It keeps WAL until the disk is full."""
        sql("select pg_create_physical_replication_slot('left_over', true)")
        try:
            assert [("slots", "warning")] == _named(_unwell(url))
        finally:
            sql("select pg_drop_replication_slot('left_over')")


def _version(url: str) -> int:
    with _connected(url) as connection:
        return int(connection.scalar(text("show server_version_num")) or 0)


def _until(condition: Callable[[], Any]) -> None:
    from waiting import wait_until

    wait_until(condition, interval=0.05)


# -- the tables ------------------------------------------------------------------------------------


class TestSchema:
    def test_no_tables(self, url, sql):
        """What needs the tables is not looked at then."""
        sql("drop table task, dead_task, task_worker, pgtask_version")
        found = _unwell(url)
        assert [("schema", "error")] * 3 == _named(found)
        assert "run: python -m pgtask_sa migrate" == found[0].remedy
        assert [("schema", "error")] * 3 == _named(_dangers(url))

    def test_tables_that_nobody_named(self, url, sql):
        """Somebody has his own and forgot his registry: it is told if there is anything in them."""
        Base.metadata.create_all(create_engine(url, poolclass=NullPool))
        assert [] == _unwell(url)
        sql("insert into job (task_type, tenant) values ('A', 1)")
        (found,) = _unwell(url)
        assert ("schema", "warning") == (found.name, found.level)
        assert "the table public.job is one of tasks, too, and was not looked at" == found.message
        assert "--tasks" in found.remedy
        assert [] == _unwell(url, registry)
        sql("delete from job", "drop table task, dead_task, task_worker, pgtask_version")
        assert [*[("schema", "error")] * 3, ("schema", "warning")] == _named(_unwell(url))

    def test_an_older_revision(self, url):
        """Before the table of the workers."""
        migrations.downgrade(url, "0001")
        found = _unwell(url)
        assert [*[("schema", "error")] * 3, ("revision", "error")] == _named(found)
        assert "the table task lacks lease_token, priority" == found[0].message
        assert [("schema", "error")] * 3 == _named(_dangers(url))

    def test_a_newer_revision(self, url, sql):
        """Then it is this program that is behind."""
        sql("update pgtask_version set version_num = '9999'")
        assert [("revision", "warning")] == _named(_unwell(url))

    def test_tables_without_a_revision(self, url, sql):
        """Somebody created them by the mapping."""
        sql("drop table pgtask_version")
        assert [] == _unwell(url)

    def test_own_tables_that_lack_a_column(self, url, sql):
        """Their remedy are the user's own migrations."""
        Base.metadata.create_all(create_engine(url, poolclass=NullPool))
        sql("alter table job drop column lease_token")
        found = _unwell(url, TaskRegistry(task_class=Job))
        assert "the table job lacks lease_token" == found[0].message
        assert "run your migrations (alembic upgrade head)" == found[0].remedy

    def test_own_columns(self, url, sql):
        """The error queue would lose one, and the trial cannot fill in another."""
        Base.metadata.create_all(create_engine(url, poolclass=NullPool))
        found = _unwell(url, TaskRegistry(task_class=Job))
        assert [("trial", "warning"), ("own columns", "warning")] == _named(found)
        assert "dead_job lacks remark: what is buried loses them" == found[1].message


TRIGGER = """
create function trap() returns trigger language plpgsql as $$ begin {body} end $$;
create trigger trap {when} on {table} for each row execute function trap()
"""


def _trap(when: str, table: str, body: str = "raise 'a trap';") -> str:
    return TRIGGER.format(when=when, table=table, body=body)


ALL_ROWS = "create policy all_rows on task using (true)"


class TestDangers:
    @pytest.mark.parametrize(
        ("statement", "name"),
        [
            ("alter table task set unlogged", "unlogged"),
            ("alter table dead_task set unlogged", "unlogged"),
            ("alter database {here} set session_replication_role = replica", "replication role"),
            (
                "create table mail (task_id bigint references task on delete cascade)",
                "foreign keys",
            ),
        ],
    )
    def test_makes_a_worker_refuse(self, url, sql, statement, name):
        """It is found by the worker, and by the doctor once."""
        sql(statement)
        assert [(name, "error")] == _named(_dangers(url))
        assert [(name, "error")] == _named(_unwell(url))

    def test_a_worker_process_refuses(self, url, sql):
        """It ends with code 1, says why once, and has claimed nothing."""
        fleet = Fleet(url)
        fleet.enqueue("ROW", {"i": 1})
        sql("create table mail (task_id bigint references task on delete cascade)")
        with fleet.worker("--log-format", "json") as worker:
            assert 1 == worker.wait(20)
        [refused] = events(worker, "worker.refused")
        assert "each claim would delete rows there" in refused["message"]
        assert ([], [0]) == (fleet.done(), fleet.attempts())

    def test_params_of_two_kinds(self, url, sql):
        """Nothing could be buried."""
        sql("create extension hstore", "alter table task alter params drop default")
        sql("alter table task alter params type hstore using ''")
        assert [("params", "error")] == _named(_dangers(url))
        assert ("params", "error") in _named(_unwell(url))

    @pytest.mark.parametrize(
        ("policy", "is_sick"),
        [
            ("", True),
            ("create policy mine on task using (task_type = 'A')", True),
            (ALL_ROWS, False),
            (f"{ALL_ROWS}; create policy but on task as restrictive using (attempts < 3)", True),
            ("create policy others on task to pg_monitor using (true)", True),
        ],
    )
    def test_row_level_security(self, url, sql, role, policy, is_sick):
        """A role from which rows are hidden is no worker; the owner sees them all."""
        _grant(sql)
        sql("alter table task enable row level security", *([policy] if policy else []))
        expected = [("row security", "error")] if is_sick else []
        assert expected == _named(_dangers(role))
        assert [] == _dangers(url)

    def test_costs_three_round_trips(self, url):
        """A worker asks at every start."""
        with _connected(url) as connection:
            sent = []
            event.listen(connection, "before_cursor_execute", lambda *a: sent.append(a[2]))
            find_dangers(connection, Tables(Task), {})
        assert 3 == len(sent)

    def test_a_database_that_is_away(self):
        """The error is the caller's to wait out."""
        with pytest.raises(OperationalError):
            _dangers("postgresql+psycopg://bob@127.0.0.1:1/shop")


class TestTables:
    @pytest.mark.parametrize(
        ("statement", "expected"),
        [
            ("create table mail (task_id bigint references task)", ("foreign keys", "error")),
            (
                "create table mail (task_id bigint references task on delete set null)",
                ("foreign keys", "warning"),
            ),
            (_trap("after delete", "task", "return null;"), ("triggers", "warning")),
            ("drop index task_ready_idx", ("indexes", "warning")),
            ("drop trigger task_wakeup on task", ("wake-up", "warning")),
            ("alter table task disable trigger task_wakeup", ("wake-up", "warning")),
            ("alter table task enable replica trigger task_wakeup", ("wake-up", "warning")),
            ("alter table task reset (autovacuum_vacuum_threshold)", ("storage", "warning")),
            ("alter table task_worker reset (fillfactor)", ("storage", "warning")),
            ("alter table dead_task set (autovacuum_enabled = off)", ("storage", "warning")),
        ],
    )
    def test_what_is_wrong_with_them(self, url, sql, statement, expected):
        """Each is found, and nothing else."""
        sql(statement)
        assert [expected] == _named(_unwell(url))
        assert [] == _dangers(url)

    def test_an_index_that_is_not_valid(self, url, sql, admin):
        """As a concurrent build leaves it that failed."""
        sql("update pg_index set indisvalid = false where indexrelid = 'task_due_idx'::regclass")
        (found,) = _unwell(url)
        assert "task_due_idx is not valid: claims read the whole table" == found.message

    def test_an_index_of_an_older_version(self, url, sql):
        """Its name alone does not make it serve the claims."""
        sql("drop index task_due_idx", "create index task_due_idx on task (task_type, run_at)")
        (found,) = _unwell(url)
        assert "task_due_idx has other columns: claims read the whole table" == found.message

    def test_dead_rows(self, url, sql, admin):
        """Many more than there are tasks."""
        sql("alter table task set (autovacuum_enabled = off)")
        sql("insert into task (task_type) select 'A' from generate_series(1, 11000)")
        sql("delete from task", "select pg_stat_force_next_flush()")
        _until(lambda: ("dead rows", "warning") in _named(_unwell(url)))

    @pytest.mark.parametrize(
        ("right", "table"),
        [
            ("delete", "task"),
            ("insert", "task"),
            ("insert", "dead_task"),
            ("update", "task_worker"),
        ],
    )
    def test_a_right_that_is_missing(self, url, sql, role, right, table):
        """The catalog says so, and the trial confirms it."""
        _grant(sql)
        sql(f"revoke {right} on {table} from clerk")
        found = _unwell(role)
        assert [("rights", "error"), ("trial", "error")] == _named(found)
        assert f"grant {right.upper()} on {table} to this role" == found[0].remedy

    @pytest.mark.parametrize(
        ("when", "table", "step"),
        [
            ("before insert", "task", "enqueue"),
            ("before insert", "dead_task", "bury"),
            ("before insert", "task_worker", "write the table of the workers"),
        ],
    )
    def test_a_step_that_fails(self, url, sql, when, table, step):
        """What no right tells the trial finds, and names the step."""
        sql(_trap(when, table))
        (found,) = _unwell(url)
        assert ("trial", "error") == (found.name, found.level)
        assert found.message.startswith(f"to {step} fails: ")
        assert "a trap" in found.message

    def test_a_claim_that_takes_nothing(self, url, sql):
        """A trigger may take the deletion back without a word."""
        sql(_trap("before delete", "task", "return null;"))
        found = _unwell(url)
        assert [("triggers", "warning"), ("trial", "error")] == _named(found)
        assert found[1].message.startswith("to claim fails: ")

    def test_putting_back(self, url, sql):
        """A table that takes new tasks, but none that have failed."""
        sql("alter table task add check (attempts = 0)")
        (found,) = _unwell(url)
        assert found.message.startswith("to put back fails: ")

    def test_the_workers(self, url, admin):
        """Those that live are counted, and those that are gone."""
        with noting.alive(url) as connection:
            noting.write_lane(connection)
            noting.write_lane(connection, worker_id=5)
            found = {found.name: found for found in _examined(url)}
        assert "1 alive; 1 gone, whose rows are still there" == found["workers"].message

    def test_workers_behind_a_pooler(self, url, admin):
        """It is said what they cannot do, and what helps."""
        noting.write_lane(admin, is_direct=False)
        (found,) = _unwell(url)
        assert ("workers", "warning") == (found.name, found.level)
        assert found.message.startswith(
            "1 behind a pooler, without a direct URL: a task that kills"
        )
        assert "--direct-url" in found.remedy


@pytest.mark.parametrize(("has_direct_url", "level"), [(False, "warning"), (True, "ok")])
def test_behind_a_pooler(pooler, direct_db_url, has_direct_url, level):
    """Workers that go the same way keep some promises only with a direct URL."""
    found = _examined(pooler.url(direct_db_url), has_direct_url=has_direct_url)
    assert [level] == [each.level for each in found if each.name == "pooler"]


def test_a_check_that_cannot_be_made(url, role, sql):
    """It is a warning, and the others are made all the same."""
    _grant(sql)
    sql("revoke select on pg_replication_slots from public")
    assert [("slots", "warning")] == _named(_unwell(role))


def test_the_worst_level_decides():
    """An error is an error among warnings; nothing found is ok."""
    assert "ok" == worst([])
