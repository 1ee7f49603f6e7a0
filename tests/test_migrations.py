"""Our own migrations: what they create, and how they behave beside others."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from alembic_cli import ROOT, run_alembic
from catalog import catalog
from sqlalchemy import NullPool, create_engine, insert, make_url, text
from sqlalchemy.ext.asyncio import create_async_engine
from waiting import SOON, wait_until

from pgtask_sa import Task, migrations
from pgtask_sa.errors import ConfigurationError
from pgtask_sa.mapping import LOCK_CLASS
from pgtask_sa.migrations import VERSION_TABLE, MigrationBlocked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pgbouncer import PgBouncer
    from sqlalchemy import Connection

EMPTY = {
    "columns": [],
    "relations": [],
    "indexes": [],
    "constraints": [],
    "sequences": [],
    "triggers": [],
    "functions": [],
    "enums": [],
}


UPGRADE = """
import sys
from pgtask_sa import migrations
migrations.upgrade(sys.argv[1], lock_timeout=30)
"""


@contextmanager
def _connect(url: str) -> Iterator[Connection]:
    with create_engine(url, poolclass=NullPool).connect() as connection:
        yield connection


def _catalog(url: str) -> dict[str, list[tuple]]:
    with _connect(url) as connection:
        return catalog(connection, without=VERSION_TABLE)


@pytest.fixture
def migrated_url(empty_db_url: str) -> str:
    migrations.upgrade(empty_db_url)
    return empty_db_url


def test_upgrade_creates_what_create_all_creates(db_url: str, migrated_url: str) -> None:
    """The newest migration and the mapping make the same database, down to the catalogs."""
    created = _catalog(db_url)
    assert created == _catalog(migrated_url)
    assert {kind: len(rows) for kind, rows in created.items() if kind != "constraints"} == {
        "columns": 33,
        "relations": 10,
        "indexes": 6,
        "sequences": 1,
        "triggers": 1,
        "functions": 1,
        "enums": 0,
    }


def test_downgrade_leaves_nothing_and_upgrade_comes_back(migrated_url: str) -> None:
    """Down to base nothing of ours is left, and a second upgrade gives the same as the first."""
    before = _catalog(migrated_url)
    migrations.downgrade(migrated_url)
    assert _catalog(migrated_url) == EMPTY
    assert migrations.current(migrated_url) is None
    migrations.upgrade(migrated_url)
    assert _catalog(migrated_url) == before


def test_current_revision_follows_the_migrations(empty_db_url: str) -> None:
    """`current` is None before the first migration and `head()` after the last."""
    before = migrations.current(empty_db_url)
    migrations.upgrade(empty_db_url)
    assert (before, migrations.current(empty_db_url)) == (None, migrations.head())


def test_upgrading_twice_changes_nothing(migrated_url: str) -> None:
    """A second upgrade finds nothing to do."""
    before = _catalog(migrated_url)
    migrations.upgrade(migrated_url)
    assert _catalog(migrated_url) == before


def test_autogenerate_finds_nothing_after_create_all(db_url: str) -> None:
    """Our own environment sees no difference between the mapping and what `create_all` made."""
    done = run_alembic("stamp head", "check", cwd=ROOT, env={"DATABASE_URL": db_url})
    assert "No new upgrade operations detected." in done.stdout.splitlines()


def test_autogenerate_finds_nothing_after_upgrade(migrated_url: str) -> None:
    """Nor what the migrations made, among tables that are not ours."""
    with _connect(migrated_url) as connection:
        connection.execute(text("create table usr (usr_id bigint primary key)"))
        connection.commit()
    done = run_alembic("check", cwd=ROOT, env={"DATABASE_URL": migrated_url})
    assert "No new upgrade operations detected." in done.stdout.splitlines()


@pytest.mark.parametrize(
    "drivername", ["postgresql", "postgres", "postgresql+asyncpg", "postgresql+psycopg2"]
)
def test_command_upgrades_the_database_of_the_environment(
    empty_db_url: str, drivername: str
) -> None:
    """`alembic upgrade head` in the repository migrates what DATABASE_URL names."""
    url = make_url(empty_db_url).set(drivername=drivername).render_as_string(hide_password=False)
    done = run_alembic("upgrade head", cwd=ROOT, env={"DATABASE_URL": url})
    assert done.returncode == 0, done.stdout
    assert migrations.current(empty_db_url) == migrations.head()


def test_command_says_what_is_missing() -> None:
    """Without DATABASE_URL the command fails in one line."""
    done = run_alembic("upgrade head", cwd=ROOT)
    assert (done.returncode, done.stdout.splitlines()[-1].strip()) == (
        255,
        "FAILED: DATABASE_URL is not set: it names the database",
    )


def test_command_writes_a_script(empty_db_url: str) -> None:
    """`alembic upgrade head --sql` prints a script that psql can run to the same effect."""
    script = run_alembic("upgrade head --sql", cwd=ROOT).stdout
    statements = "\n".join(line for line in script.splitlines() if not line.startswith("INFO"))
    with _connect(empty_db_url) as connection:
        connection.connection.driver_connection.execute(statements)
    migrations.upgrade(empty_db_url)
    assert migrations.current(empty_db_url) == migrations.head()


def test_engines_are_accepted(empty_db_url: str) -> None:
    """An engine is used as it is, of an async engine the URL is taken."""
    engine = create_engine(empty_db_url, isolation_level="AUTOCOMMIT")
    migrations.upgrade(engine)
    async_url = make_url(empty_db_url).set(drivername="postgresql+asyncpg")
    asynchronous = create_async_engine(async_url.update_query_dict({"ssl": "prefer"}))
    assert migrations.current(asynchronous) == migrations.current(engine)
    engine.dispose()


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("sqlite://", "not a Postgres database: sqlite://"),
        ("mysql://u:secret@h/d", r"not a Postgres database: mysql://u:\*\*\*@h/d"),
        ("postgresql+oops://u:secret@h/d", "no such driver: oops"),
        ("u:secret@h/d", "the database URL cannot be read"),
    ],
)
def test_other_urls_are_refused_without_their_password(url: str, problem: str) -> None:
    """A URL that cannot work is named in the error, its password is not."""
    with pytest.raises(ConfigurationError, match=f"^{problem}$"):
        migrations.upgrade(url)


def test_unknown_revision_is_refused(empty_db_url: str) -> None:
    """A revision that does not exist is an error of ours, and nothing happens."""
    with pytest.raises(ConfigurationError, match="9999"):
        migrations.upgrade(empty_db_url, "9999")
    assert _catalog(empty_db_url) == EMPTY


def test_identity_columns_are_bigint(db_url: str, migrated_url: str) -> None:
    """No identity column and no sequence behind one ends at two thousand million (C11)."""
    for url in (db_url, migrated_url):
        found = _catalog(url)
        assert [row[3:5] for row in found["columns"] if row[6]] == [("task_id", "bigint")]
        assert [row[2] for row in found["sequences"]] == ["bigint"]


def test_failed_migration_leaves_nothing(empty_db_url: str) -> None:
    """A migration that finds its table name taken creates nothing at all."""
    with _connect(empty_db_url) as connection:
        connection.execute(text("create table dead_task ()"))
        connection.commit()
    before = _catalog(empty_db_url)
    with pytest.raises(Exception, match='"dead_task" already exists'):
        migrations.upgrade(empty_db_url)
    assert _catalog(empty_db_url) == before


# -- beside others ---------------------------------------------------------------------------------


def _waiting(url: str, condition: str) -> int:
    with _connect(url) as connection:
        query = f"select count(*) from pg_locks where not granted and {condition}"
        return int(connection.scalar(text(query)) or 0)


def _advisory_locks(url: str) -> list[int]:
    """Return the server processes that hold one, here."""
    query = (
        "select pid from pg_locks where locktype = 'advisory' and database ="
        " (select oid from pg_database where datname = current_database())"
    )
    with _connect(url) as connection:
        return list(connection.scalars(text(query)))


def test_concurrent_upgrades_do_not_clash(empty_db_url: str) -> None:
    """Of four machines that migrate at the same moment one does it, and none fails."""
    with ThreadPoolExecutor(4) as pool:
        with _connect(empty_db_url) as connection:
            connection.execute(
                text("select pg_advisory_xact_lock(:class, :lock)"),
                {"class": LOCK_CLASS, "lock": migrations.MIGRATION_LOCK},
            )
            command = [sys.executable, "-c", UPGRADE, empty_db_url]
            runs = [
                pool.submit(subprocess.run, command, capture_output=True, text=True)
                for _ in range(4)
            ]
            wait_until(lambda: _waiting(empty_db_url, "locktype = 'advisory'") == 4, interval=0.002)
        errors = [run.result().stderr for run in runs]
    assert errors == ["", "", "", ""]
    assert migrations.current(empty_db_url) == migrations.head()


@contextmanager
def _running_task(
    url: str, claim: str = "delete from task returning task_id"
) -> Iterator[Connection]:
    """Open a worker's transaction: it claimed a task, and its handler takes its time."""
    with _connect(url) as connection:
        connection.execute(text("insert into task (task_type) values ('SLOW')"))
        connection.commit()
        connection.execute(text("set local application_name = 'pgtask SLOW 1'"))
        connection.execute(text(claim))
        yield connection


def test_enqueue_goes_on_while_a_migration_waits_for_a_task(migrated_url: str) -> None:
    """A migration that needs the locks of a running task holds nobody else up for long (F12)."""
    with _running_task(migrated_url) as worker:
        migration = threading.Thread(target=migrations.downgrade, args=(migrated_url,))
        migration.start()
        times = []
        # in several of its attempts, each time right after the migration has begun to wait
        for _ in range(3):
            wait_until(lambda: _waiting(migrated_url, "mode = 'AccessExclusiveLock'"))
            begin = time.monotonic()
            with _connect(migrated_url) as connection:
                connection.execute(insert(Task).values(task_type="FAST"))
                connection.commit()
            times.append(time.monotonic() - begin)
        worker.rollback()
    migration.join(30)
    assert [spent < SOON for spent in times] == [True, True, True], times
    assert _catalog(migrated_url) == EMPTY


def test_blocked_migration_gives_up_and_names_the_task(migrated_url: str) -> None:
    """After its last attempt a migration says which task was in its way, and changed nothing."""
    before = _catalog(migrated_url)
    with _running_task(migrated_url) as worker:
        pid = worker.scalar(text("select pg_backend_pid()"))
        with pytest.raises(MigrationBlocked) as raised:
            migrations.downgrade(migrated_url, lock_timeout=0.05, attempts=2)
    assert str(raised.value) == (
        "gave up after 2 attempts, nothing was changed: other transactions hold locks on the "
        f"tables (pid {pid} pgtask SLOW 1). Stop the workers, or wait for their long tasks."
    )
    assert _catalog(migrated_url) == before
    assert migrations.current(migrated_url) == migrations.head()


@pytest.mark.slow
def test_wheel_ships_the_migrations(tmp_path: Path) -> None:
    """The wheel holds env.py, the template and every version, beside `migrations.py`."""
    pytest.importorskip("hatchling")
    build = "from hatchling.build import build_wheel; import sys; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], cwd=ROOT, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    shipped = {name for name in zipfile.ZipFile(wheel).namelist() if "/alembic/" in name}
    sources = [p for p in (ROOT / "alembic").rglob("*") if p.suffix in (".py", ".mako")]
    assert shipped == {f"pgtask_sa/{path.relative_to(ROOT)}" for path in sources}


# -- 0003 -----------------------------------------------------------------------------------------


def _at_0002(url: str) -> None:
    """Migrate up to 0002, and enqueue a thousand tasks."""
    migrations.upgrade(url, "0002")
    with _connect(url) as connection:
        connection.execute(
            text("insert into task (task_type) select 'A' from generate_series(1, 1000)")
        )
        connection.commit()


def _relations(url: str) -> dict[str, int]:
    query = "select relname, relfilenode from pg_class where relname like 'task_%_idx'"
    with _connect(url) as connection:
        return {row.relname: row.relfilenode for row in connection.execute(text(query))}


@pytest.mark.parametrize("pooled", [False, True])
def test_0003_beside_a_running_task(
    empty_db_url: str, request: pytest.FixtureRequest, pooled: bool
) -> None:
    """A migration to 0003 lets a running task come to its end, and then goes through."""
    url = request.getfixturevalue("pooler").url(empty_db_url) if pooled else empty_db_url
    _at_0002(url)
    with _running_task(url, "delete from task where task_id = 1") as worker:
        migration = threading.Thread(target=migrations.upgrade, args=(url,))
        migration.start()
        wait_until(lambda: _waiting(url, "mode = 'AccessExclusiveLock'"))
        worker.commit()
        migration.join(30)
        assert not migration.is_alive()
    assert [] == _advisory_locks(url)
    assert migrations.head() == migrations.current(url)
    assert {"task_ready_idx", "task_due_idx", "task_coalesce_idx"} == set(_relations(url))


@pytest.mark.direct  # through a pooler nothing is prepared
def test_a_half_built_index_of_0003_is_built_anew(empty_db_url: str) -> None:
    """What a preparation that was killed left behind, valid or not, is in nobody's way."""
    _at_0002(empty_db_url)
    with _connect(empty_db_url) as connection:
        connection.execute(text("create index task_due_0003_idx on task (task_id)"))
        connection.commit()
    migrations.upgrade(empty_db_url)
    with _connect(empty_db_url) as connection:
        query = "select pg_get_indexdef('task_due_idx'::regclass)"
        assert "(priority, task_type, run_at)" in connection.scalar(text(query))


@pytest.mark.direct  # through a pooler nothing is prepared
def test_indexes_of_0003_are_built_before_anything_is_locked(empty_db_url: str) -> None:
    """The index that the preparation built is the one that is there in the end."""
    _at_0002(empty_db_url)
    engine = create_engine(empty_db_url, poolclass=NullPool)
    migrations._prepare(engine, 1.0, 3)
    prepared = _relations(empty_db_url)["task_ready_0003_idx"]
    with engine.connect() as connection:
        assert 1000 == connection.scalar(text("select count(*) from task where priority = 0"))
    migrations._run("upgrade", engine, "head", lock_timeout=1.0, attempts=3)
    assert prepared == _relations(empty_db_url)["task_ready_idx"]


def test_0003_is_not_prepared_through_a_pooler(empty_db_url: str, pooler: PgBouncer) -> None:
    """What is set for a session would be left to strangers there, and a lock be held for ever."""
    _at_0002(empty_db_url)
    before = _relations(empty_db_url)
    engine = create_engine(pooler.url(empty_db_url), poolclass=NullPool)
    migrations._prepare(engine, 1.0, 3)
    assert before == _relations(empty_db_url)


def test_0003_and_back(empty_db_url: str) -> None:
    """A downgrade brings back the indexes that the older program needs."""
    _at_0002(empty_db_url)
    before = _catalog(empty_db_url)
    migrations.upgrade(empty_db_url)
    migrations.downgrade(empty_db_url, "0002")
    assert before == _catalog(empty_db_url)


# -- 0004 -----------------------------------------------------------------------------------------


def test_0004_waits_for_nobody(empty_db_url: str) -> None:
    """The trigger's function is replaced beside transactions that have inserted and claimed."""
    migrations.upgrade(empty_db_url, "0003")
    with (
        _running_task(empty_db_url, "delete from task where task_id = 1"),
        _running_task(empty_db_url, "insert into task (task_type) values ('B')"),
    ):
        migrations.upgrade(empty_db_url, "0004", lock_timeout=0.1, attempts=1)
    assert "0004" == migrations.current(empty_db_url)


def test_0004_and_back(empty_db_url: str) -> None:
    """A downgrade brings back the function as it was."""
    migrations.upgrade(empty_db_url, "0003")
    before = _catalog(empty_db_url)
    migrations.upgrade(empty_db_url)
    assert before != _catalog(empty_db_url)
    migrations.downgrade(empty_db_url, "0003")
    assert before == _catalog(empty_db_url)
