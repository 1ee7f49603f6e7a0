"""The worker's own engines: psycopg, READ COMMITTED, one connection for each lane.

A connection may lead through a pooler such as PgBouncer, which gives out a server process for one
transaction at a time. Whoever sets something for the session there sets it for strangers, and what
was prepared is somewhere else the next time. So each new connection finds out what it is: a pooler
has to invent the process id that it tells its client, the server knows the true one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from weakref import WeakSet

from psycopg import pq
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from pgtask_sa.errors import ConfigurationError
from pgtask_sa.ground import MADE, POOLED
from pgtask_sa.guards import guard_driver, heed_farewell, lend_savepoints, watch_errors

DRIVER = "postgresql+psycopg"
LIBPQ_DRIVERS = ("", "psycopg", "psycopg_async", "psycopg2")  # their options are ours, too

CONNECT_ARGS = {
    # a connection that died silently (a cable, a firewall) is noticed in about half a minute
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 30_000,
    "connect_timeout": 10,
    "client_encoding": "utf8",  # whatever the database's is; of SQL_ASCII psycopg returns bytes
}

# What a worker needs to be set; for good on a connection of its own, and through a pooler for each
# transaction.
# A server process does not look at its socket while it runs a query. With this it notices within
# a quarter of a second that its worker was killed, and gives the row back.
CHECK_CLIENT = ("client_connection_check_interval", "250ms")
# Of the other styles, which a role or a database may have, psycopg reads no timestamps.
DATE_STYLE = ("datestyle", "ISO")
# While a handler computes, or asks somebody else, its transaction is idle. Its own timeout decides.
IDLE_TIMEOUT = ("idle_in_transaction_session_timeout", "0")
LIMIT = "pgtask_limit"  # key in the info of a connection: milliseconds for a transaction
LIMITS_SINCE = 170_000  # the version of the server that knows transaction_timeout
# In milliseconds; on Linux it counts in place of keepalives_count. Longer than ours: for the server
# it also runs while a handler takes its time to read a large answer.
SERVER_USER_TIMEOUT = 60_000


def database_url(given: str | URL | Engine | AsyncEngine) -> URL:
    """Return the URL of a database with our driver, psycopg, whatever driver was named.

    Raises:
        ConfigurationError: it is not the URL of a Postgres database.

    Example:
        >>> database_url("postgres://bob@db/app").drivername
        'postgresql+psycopg'
    """
    if isinstance(given, (Engine, AsyncEngine)):
        given = given.url
    try:
        url = make_url(given)
    except ArgumentError as error:
        raise ConfigurationError(f"not a database URL: {error}") from error
    if url.get_backend_name() not in ("postgresql", "postgres"):
        raise ConfigurationError(f"a Postgres database is needed, not {url.get_backend_name()!r}")
    driver = url.drivername.partition("+")[2]
    query = url.query if driver in LIBPQ_DRIVERS else libpq_query(url)
    return url.set(drivername=DRIVER, query=query)


def libpq_query(url: URL) -> dict[str, Any]:
    """Keep what libpq understands of the options that were meant for another driver.

    Example:
        >>> libpq_query(make_url("postgresql+asyncpg://db/app?ssl=prefer&command_timeout=5"))
        {'sslmode': 'prefer'}
    """
    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    query = dict(url.query)
    if "ssl" in query:  # asyncpg's name for it
        query.setdefault("sslmode", query["ssl"])
    return {key: value for key, value in query.items() if key in known}


def given_url(option: str | None) -> URL:
    """Return the URL that an option names, or else the environment variable DATABASE_URL.

    Raises:
        ConfigurationError: neither is set, or it is not the URL of a Postgres database.

    Example:
        >>> given_url("postgresql+asyncpg://db/app").database
        'app'
    """
    url = option or os.environ.get("DATABASE_URL")
    if not url:
        raise ConfigurationError("name the database with --database-url or DATABASE_URL")
    return database_url(url)


def given_direct_url(option: str | None) -> URL | None:
    """Return the URL that an option names, or else DATABASE_DIRECT_URL; None if neither is set.

    Raises:
        ConfigurationError: it is not the URL of a Postgres database.

    Example:
        >>> given_direct_url("postgres://db/app").database
        'app'
    """
    url = option or os.environ.get("DATABASE_DIRECT_URL")
    return database_url(url) if url else None


def _options(size: int, *, show_values: bool) -> dict[str, Any]:
    return {
        "pool_size": size,
        "max_overflow": -1,  # a lane that is stuck in a handler keeps its own for good
        "pool_reset_on_return": "rollback",
        "isolation_level": "READ COMMITTED",  # under a higher one SKIP LOCKED fails, not skips
        "connect_args": CONNECT_ARGS,
        "hide_parameters": not show_values,  # a handler may log the text of an error
    }


def worker_engine(
    url: URL, size: int, limit: float | None = None, *, show_values: bool = False
) -> Engine:
    """Build the engine of the sync lanes and of the worker's side connections.

    With a limit, in seconds, a server that can (17 and newer) ends transactions that take longer.
    With ``show_values`` the text of an error holds the parameters of its statement.
    """
    engine = create_engine(url, **_options(size, show_values=show_values))
    _prepare(engine, limit)
    return engine


def worker_async_engine(
    url: URL, size: int, limit: float | None = None, *, show_values: bool = False
) -> AsyncEngine:
    """Build the engine of the async lanes; limit and values as of `worker_engine`."""
    engine = create_async_engine(url, **_options(size, show_values=show_values))
    _prepare(engine.sync_engine, limit)
    return engine


@contextmanager
def unlimited(connection: Connection) -> Iterator[None]:
    """Lift the limit for the transactions inside; there is none open at the start, nor at the end.

    Through a pooler it stays.
    """
    limit = connection.info.get(LIMIT)
    if limit is None or is_pooled(connection):
        yield
        return
    _set_limit(connection, 0)
    try:
        yield
    finally:
        if not connection.invalidated:
            _set_limit(connection, limit)


def _set_limit(connection: Connection, milliseconds: int) -> None:
    with connection.begin():
        connection.exec_driver_sql(f"set transaction_timeout = {milliseconds}")


def is_pooled(connection: Connection) -> bool:
    """Say whether a connection of ours leads through a pooler: no session of its own behind it."""
    return connection.info.get(POOLED) is not None


def _prepare(engine: Engine, limit: float | None) -> None:
    watch_errors(engine)
    lend_savepoints(engine)
    milliseconds = None if limit is None else round(limit * 1000)
    event.listen(engine, "connect", partial(_prepare_connection, milliseconds))
    event.listen(engine, "begin", _prepare_transaction)


def server_keepalives() -> list[tuple[str, str]]:
    """Return what makes the server, too, notice a connection that died silently.

    Left to itself it keeps the row of a worker behind such a connection for two hours and more;
    with this for a minute.

    Example:
        >>> server_keepalives()[0]
        ('tcp_keepalives_idle', '10')
    """
    names = ("keepalives_idle", "keepalives_interval", "keepalives_count")
    settings = [(f"tcp_{name}", str(CONNECT_ARGS[name])) for name in names]
    return [*settings, ("tcp_user_timeout", str(SERVER_USER_TIMEOUT))]


# A process that a handler forks inherits our sockets. It could speak on them; and as long as it
# lives the server takes a killed worker for alive, and keeps its rows.
_OURS: WeakSet[Any] = WeakSet()
EARS: set[int] = set()  # further numbers of their sockets


def _let_go_of_sockets() -> None:
    """Put nothing in the place of our sockets, in a process that was forked just now.

    Not closed: their numbers would be given to other files, on which libpq would say farewell.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for driver in list(_OURS):
        with suppress(Exception):  # it was closed
            os.dup2(nothing, driver.pgconn.socket)
    for ear in EARS:
        os.dup2(nothing, ear)
    os.close(nothing)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_of_sockets)


def _prepare_connection(limit: int | None, dbapi_connection: Any, record: Any) -> None:
    driver = getattr(dbapi_connection, "driver_connection", dbapi_connection)
    _OURS.add(driver)
    guard_driver(driver, record.info)
    heed_farewell(driver)
    settings = [CHECK_CLIENT, DATE_STYLE, IDLE_TIMEOUT]
    own = server_keepalives()  # of a socket: through a pooler it is the pooler's
    if limit is not None and driver.info.server_version >= LIMITS_SINCE:
        settings.append(("transaction_timeout", str(limit)))
        record.info[LIMIT] = limit
    pid = driver.info.backend_pid
    pooled = _set(dbapi_connection, pid, settings + own)
    if pooled is None:  # not every platform's server can check
        settings, own = (
            [each for each in some if _set(dbapi_connection, pid, [each]) is not None]
            for some in (settings, own)
        )
        pooled = _set(dbapi_connection, pid, [])
    if pooled:
        driver.prepare_threshold = None
        record.info[POOLED] = _text("set local", settings)
    else:
        record.info[MADE] = _text("set", settings + own)


def _text(how: str, settings: list[tuple[str, str]]) -> str:
    return "; ".join(f"{how} {name} = '{value}'" for name, value in settings)


def _set(dbapi_connection: Any, pid: int, settings: list[tuple[str, str]]) -> bool | None:
    """Make settings, and say whether there is a pooler; None: one of them was refused.

    In one round trip, which does not yet know the answer: through a pooler they end with this
    transaction.
    """
    pooled = f"pg_backend_pid() <> {pid}"
    made = [f"set_config('{name}', '{value}', {pooled})" for name, value in settings]
    cursor = dbapi_connection.cursor()
    try:
        cursor.execute(f"select {', '.join([pooled, *made])}")
        found = bool(cursor.fetchone()[0])
        dbapi_connection.commit()
    except Exception:  # noqa: BLE001 - what matters will come back at the first claim
        dbapi_connection.rollback()
        return None
    finally:
        cursor.close()
    return found


def _prepare_transaction(connection: Connection) -> None:
    """Set what a transaction needs, in a statement more, if its session is not ours to set."""
    settings = connection.info.get(POOLED)
    if settings and not _autocommits(connection):
        connection.exec_driver_sql(settings)


def _autocommits(connection: Connection) -> bool:
    dbapi_connection: Any = connection.connection.dbapi_connection
    return bool(dbapi_connection.autocommit)
