"""The library's own migrations, and a helper for yours.

Two ways to get the tables, for two kinds of projects:

* **Your own Alembic history** (the usual way). Put `TaskMixin` and `DeadTaskMixin` on your own Base
  and type ``alembic revision --autogenerate``; see `pgtask_sa.autogenerate`.
* **Ours.** ``python -m pgtask_sa migrate``, or `upgrade` in code, creates the library's own tables.
  This history has a version table of its own, so it never meets yours.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import URL, Connection, Engine, NullPool, create_engine, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from pgtask_sa.autogenerate import VERSION_TABLE, escape
from pgtask_sa.engines import libpq_query
from pgtask_sa.errors import ConfigurationError, TaskError
from pgtask_sa.failures import LOCK_NOT_AVAILABLE, sqlstate
from pgtask_sa.mapping import LOCK_CLASS, TaskBase
from pgtask_sa.retry import Backoff

if TYPE_CHECKING:
    from alembic.operations import Operations
    from sqlalchemy.ext.asyncio import AsyncEngine

Database: TypeAlias = "str | URL | Engine | AsyncEngine"

# Of our class of advisory locks; the others in it are ids of tables, and no table has the id 1.
MIGRATION_LOCK = 1
# An ALTER that waits for a long task makes every enqueue wait behind it. So it must give up while
# nobody has noticed yet, and come again.
LOCK_TIMEOUT = 0.5
ATTEMPTS = 30
_PAUSE = Backoff(base=0.2, factor=1.5, maximum=2.0)
_DEADLOCK = "40P01"

_log = logging.getLogger(__name__)


class MigrationBlocked(TaskError):  # noqa: N818 - as EnqueueBlocked
    """A migration could not get its locks: tasks ran, or somebody else migrated, for too long.

    Nothing was changed. Stop the workers, or wait for the long tasks, and migrate again.

    Example:
        >>> issubclass(MigrationBlocked, TaskError)
        True
    """


def script_location() -> Path:
    """Return the directory of our migrations: in the installed package, or in the source tree.

    Example:
        >>> (script_location() / "versions" / "0001_task_tables.py").is_file()
        True
    """
    here = Path(__file__).resolve()
    installed = here.parent / "alembic"
    return installed if installed.is_dir() else here.parents[2] / "alembic"


def upgrade(
    database: Database,
    revision: str = "head",
    *,
    lock_timeout: float = LOCK_TIMEOUT,
    attempts: int = ATTEMPTS,
) -> None:
    """Create the library's own tables in a database, or bring them up to date.

    Safe to run from several machines at once, and while workers run: when the tables are in use,
    the migration gives its place in the queue for the lock up again and again, so that nobody who
    enqueues waits behind it for longer than ``lock_timeout``.

    Args:
        database: URL or engine. A URL needs no driver (psycopg is taken), and may name an async
            one (psycopg is taken as well).
        revision: as on Alembic's command line: ``head``, ``+1``, ``0001``, ..
        lock_timeout: seconds to wait for a lock, in one attempt.
        attempts: how many times the migration is tried before it gives up.

    Raises:
        MigrationBlocked: others held locks on the tables through all attempts.
        ConfigurationError: the URL is not of a Postgres, or there is no such revision.
        sqlalchemy.exc.DBAPIError: anything else that the database has to say.

    Example:
        >>> upgrade("mysql://localhost/shop")
        Traceback (most recent call last):
        pgtask_sa.errors.ConfigurationError: not a Postgres database: mysql://localhost/shop
    """
    engine = _engine(database)
    if revision in ("head", "heads", "0003", "0004"):
        _prepare(engine, lock_timeout, attempts)
    _run("upgrade", engine, revision, lock_timeout=lock_timeout, attempts=attempts)


def downgrade(
    database: Database,
    revision: str = "base",
    *,
    lock_timeout: float = LOCK_TIMEOUT,
    attempts: int = ATTEMPTS,
) -> None:
    """Take migrations back; down to ``base`` this drops the tables, with all tasks in them.

    Args:
        database: as for `upgrade`.
        revision: as on Alembic's command line: ``base``, ``-1``, ``0001``, ..
        lock_timeout: as for `upgrade`.
        attempts: as for `upgrade`.

    Raises:
        MigrationBlocked: others held locks on the tables through all attempts.
        ConfigurationError: the URL is not of a Postgres, or there is no such revision.
        sqlalchemy.exc.DBAPIError: anything else that the database has to say.

    Example:
        >>> downgrade("sqlite://")
        Traceback (most recent call last):
        pgtask_sa.errors.ConfigurationError: not a Postgres database: sqlite://
    """
    _run("downgrade", database, revision, lock_timeout=lock_timeout, attempts=attempts)


def current(database: Database) -> str | None:
    """Return the revision of our migrations that a database is at; None before the first.

    Args:
        database: as for `upgrade`.

    Raises:
        ConfigurationError: the URL is not of a Postgres.
        sqlalchemy.exc.DBAPIError: the database cannot be reached.

    Example:
        >>> current("postgres:/oops")
        Traceback (most recent call last):
        pgtask_sa.errors.ConfigurationError: the database URL cannot be read
    """
    with _engine(database).connect() as connection:
        options = {"version_table": VERSION_TABLE}
        return MigrationContext.configure(connection, opts=options).get_current_revision()


def head() -> str:
    """Return the newest revision of our migrations, which `upgrade` goes to.

    Example:
        >>> head() >= "0001"
        True
    """
    revision = ScriptDirectory.from_config(_config()).get_current_head()
    return str(revision)


def add_task_type(op: Operations, enum_name: str, label: str, *, schema: str | None = None) -> None:
    """Add a label to the enum of ``task_type``, in a migration of yours.

    Autogenerate does not see new labels. The statement is committed at once, together with what the
    migration did before: Postgres lets nobody use a label in the transaction that added it. There
    is no way back: a label cannot be dropped. Adding one that exists does nothing.

    Args:
        op: Alembic's ``op``.
        enum_name: the name of the enum type in the database.
        label: the new task type.
        schema: of the enum type; None takes the search path.

    Example:
        >>> def upgrade():
        ...     add_task_type(op, "task_type", "SEND_INVOICE")
    """
    context = op.get_context()
    quote = context.dialect.identifier_preparer.quote
    name = f"{quote(schema)}." if schema else ""
    name += quote(enum_name)
    literal = "'" + label.replace("'", "''") + "'"
    with context.autocommit_block():
        op.execute(escape(f"alter type {name} add value if not exists {literal}"))


# -- running our own migrations --------------------------------------------------------------------


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(script_location()).replace("%", "%%"))
    return config


def _run(verb: str, database: Database, revision: str, **options: Any) -> None:
    config = _config()
    config.attributes.update(options, engine=_engine(database))
    try:
        getattr(command, verb)(config, revision)
    except CommandError as error:
        raise ConfigurationError(str(error)) from error


def _engine(database: Database) -> Engine:
    if isinstance(database, Engine):
        return database
    url = database if isinstance(database, (str, URL)) else database.url
    return create_engine(_sync_url(url), poolclass=NullPool)


def _sync_url(url: str | URL) -> URL:
    """Return the URL with a driver that works without an event loop; psycopg unless it has one."""
    try:
        url = _read(url)
        backend, _, driver = url.drivername.partition("+")
        if backend not in ("postgres", "postgresql"):
            raise ConfigurationError(f"not a Postgres database: {url!r}")
        named = url.set(drivername=f"postgresql+{driver or 'psycopg'}")
        if not named.get_dialect().is_async:
            return named
    except (ArgumentError, NoSuchModuleError) as error:
        # not the URL itself: it may hold a password that could not be told apart
        problem = f"no such driver: {driver}" if isinstance(error, NoSuchModuleError) else None
        raise ConfigurationError(problem or "the database URL cannot be read") from None
    return named.set(drivername="postgresql+psycopg", query=libpq_query(named))


def _read(url: str | URL) -> URL:
    try:
        return make_url(url)
    except ValueError as error:  # of a port that is no number
        raise ArgumentError(str(error)) from None


def run_environment(context: Any) -> None:
    """Run an Alembic command in our own environment; ``alembic/env.py`` consists of it.

    Args:
        context: ``alembic.context``. Without an engine in the attributes of its config, which is
            how `upgrade` passes one, the database is the one that ``DATABASE_URL`` names.

    Raises:
        MigrationBlocked: others held locks on the tables through all attempts.
        ConfigurationError: ``DATABASE_URL`` is not set or not of a Postgres.

    Example:
        >>> run_environment.__module__
        'pgtask_sa.migrations'
    """
    options = context.config.attributes
    lock_timeout = options.get("lock_timeout", LOCK_TIMEOUT)
    if context.is_offline_mode():
        _configure(context, dialect_name="postgresql", literal_binds=True)
        _migrate(context, lock_timeout)
        return
    engine = options.get("engine") or _engine(_database_url())
    with engine.connect() as connection:
        # With a snapshot from before the wait for the lock we would migrate a second time.
        connection.execution_options(isolation_level="READ COMMITTED")
        _migrate_patiently(context, connection, lock_timeout, options.get("attempts", ATTEMPTS))


def _database_url() -> str:
    try:
        return os.environ["DATABASE_URL"]
    except KeyError:
        raise ConfigurationError("DATABASE_URL is not set: it names the database") from None


def _configure(context: Any, **options: Any) -> None:
    tables = TaskBase.metadata.tables
    context.configure(
        version_table=VERSION_TABLE,
        target_metadata=TaskBase.metadata,
        # the database is the user's, and so are all other tables in it
        include_name=lambda name, kind, _parents: kind != "table" or name in tables,
        **options,
    )


def _migrate(context: Any, lock_timeout: float) -> None:
    with context.begin_transaction():
        context.execute(f"set local lock_timeout = {max(1, round(lock_timeout * 1000))}")
        context.execute(f"select pg_advisory_xact_lock({LOCK_CLASS}, {MIGRATION_LOCK})")
        context.run_migrations()


def _migrate_patiently(
    context: Any, connection: Connection, lock_timeout: float, attempts: int
) -> None:
    for attempt in range(1, attempts + 1):
        try:
            _configure(context, connection=connection)
            return _migrate(context, lock_timeout)
        except DBAPIError as error:
            if sqlstate(error) not in (LOCK_NOT_AVAILABLE, _DEADLOCK):
                raise
            blocked = error
        _log.info("the tables are in use; attempt %d of %d to migrate", attempt, attempts)
        if attempt < attempts:
            time.sleep(_PAUSE.delay(attempt))
    raise MigrationBlocked(
        f"gave up after {attempts} attempts, nothing was changed: other transactions hold locks on "
        f"the tables ({_lock_holders(connection)}). Stop the workers, or wait for their long tasks."
    ) from blocked


# Of 0003, what takes long on a table with many rows and need not keep anybody out.
_PREPARATION = (
    "alter table task add column if not exists priority smallint not null default 0",
    "drop index concurrently if exists task_ready_0003_idx",  # left over, and perhaps not valid
    "drop index concurrently if exists task_due_0003_idx",
    (
        "create index concurrently task_ready_0003_idx on task (priority, task_type, ticket)"
        " where run_at is null"
    ),
    (
        "create index concurrently task_due_0003_idx on task (priority, task_type, run_at)"
        " where run_at is not null"
    ),
)


def _prepare(engine: Engine, lock_timeout: float, attempts: int) -> None:
    """Build the indexes of 0003 beside the old ones, where there is a table at 0002.

    What waits here for locks and for older transactions holds nobody up. Another machine that
    migrates, too, finds the lock taken, and goes on to wait for its turn. Through a pooler the lock
    and the settings would be left to whoever comes next; there the migration builds the indexes.
    """
    if current(engine) != "0002":
        return
    keys = {"class": LOCK_CLASS, "lock": MIGRATION_LOCK}
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        if _is_pooled(connection):
            _log.info("through a pooler: writes to the task table wait for its new indexes")
            return
        if not connection.scalar(text("select pg_try_advisory_lock(:class, :lock)"), keys):
            return
        try:
            for attempt in range(1, attempts + 1):
                if _try_to_prepare(connection, lock_timeout):
                    return
                time.sleep(_PAUSE.delay(attempt))
        finally:
            connection.execute(text("select pg_advisory_unlock(:class, :lock)"), keys)
            connection.execute(text("reset lock_timeout"))


def _is_pooled(connection: Connection) -> bool:
    """Say whether a pooler lies between, which invents the process id that it tells."""
    driver: Any = connection.connection.driver_connection
    told = getattr(getattr(driver, "info", None), "backend_pid", None)  # psycopg, psycopg2
    return told is not None and told != connection.scalar(text("select pg_backend_pid()"))


def _try_to_prepare(connection: Connection, lock_timeout: float) -> bool:
    """Return whether it went well; a lock that cannot be had is left to the next attempt."""
    column, *indexes = _PREPARATION
    try:
        connection.exec_driver_sql(f"set lock_timeout = {max(1, round(lock_timeout * 1000))}")
        connection.exec_driver_sql(column)
        connection.exec_driver_sql("set lock_timeout = 0")
        for statement in indexes:
            connection.exec_driver_sql(statement)
    except DBAPIError as error:
        if sqlstate(error) not in (LOCK_NOT_AVAILABLE, _DEADLOCK):
            raise
        return False
    return True


def _lock_holders(connection: Connection) -> str:
    holders = text(
        "select distinct format('pid %s %s', pid, application_name) from pg_stat_activity"
        " join pg_locks using (pid) where pid <> pg_backend_pid() and granted and"
        " (relation = any (array[to_regclass('task'), to_regclass('dead_task')])"
        " or locktype = 'advisory' and classid = :class and objid = :lock)"
    )
    found = connection.scalars(holders, {"class": LOCK_CLASS, "lock": MIGRATION_LOCK}).all()
    return ", ".join(holder.strip() for holder in found) or "gone by now"
