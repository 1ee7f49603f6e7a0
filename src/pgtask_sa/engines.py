"""The worker's own engines: psycopg, READ COMMITTED, one connection for each lane."""

from __future__ import annotations

import os
from typing import Any

from psycopg import pq
from sqlalchemy import URL, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from pgtask_sa.errors import ConfigurationError
from pgtask_sa.ground import guard_driver, watch_errors

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

# A server process does not look at its socket while it runs a query. With this it notices within
# a quarter of a second that its worker was killed, and gives the row back.
CHECK_CLIENT = "set client_connection_check_interval = '250ms'"
# Of the other styles, which a role or a database may have, psycopg reads no timestamps.
DATE_STYLE = "set datestyle = 'ISO'"
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


def _options(size: int) -> dict[str, Any]:
    return {
        "pool_size": size,
        "max_overflow": -1,  # a lane that is stuck in a handler keeps its own for good
        "pool_reset_on_return": "rollback",
        "isolation_level": "READ COMMITTED",  # under a higher one SKIP LOCKED fails, not skips
        "connect_args": CONNECT_ARGS,
        "hide_parameters": True,  # a handler may log the text of an error
    }


def worker_engine(url: URL, size: int) -> Engine:
    """Build the engine of the sync lanes and of the worker's side connections."""
    engine = create_engine(url, **_options(size))
    _prepare(engine)
    return engine


def worker_async_engine(url: URL, size: int) -> AsyncEngine:
    """Build the engine of the async lanes."""
    engine = create_async_engine(url, **_options(size))
    _prepare(engine.sync_engine)
    return engine


def _prepare(engine: Engine) -> None:
    watch_errors(engine)

    @event.listens_for(engine, "connect")
    def _prepare_connection(dbapi_connection: Any, record: Any) -> None:
        guard_driver(getattr(dbapi_connection, "driver_connection", dbapi_connection), record.info)
        settings = (CHECK_CLIENT, DATE_STYLE, server_keepalives())
        if not _set(dbapi_connection, "; ".join(settings)):  # in one round trip
            for statement in settings:  # not every platform's server can check
                _set(dbapi_connection, statement)


def server_keepalives() -> str:
    """Return what makes the server, too, notice a connection that died silently.

    Left to itself it keeps the row of a worker behind such a connection for two hours and more;
    with this for a minute.

    Example:
        >>> server_keepalives().partition(";")[0]
        'set tcp_keepalives_idle = 10'
    """
    names = ("keepalives_idle", "keepalives_interval", "keepalives_count")
    settings = [f"set tcp_{name} = {CONNECT_ARGS[name]}" for name in names]
    return "; ".join([*settings, f"set tcp_user_timeout = {SERVER_USER_TIMEOUT}"])


def _set(dbapi_connection: Any, statement: str) -> bool:
    cursor = dbapi_connection.cursor()
    try:
        cursor.execute(statement)
        dbapi_connection.commit()
    except Exception:  # noqa: BLE001 - what matters will come back at the first claim
        dbapi_connection.rollback()
        return False
    finally:
        cursor.close()
    return True
