"""A real PgBouncer in front of the server, pooling by transaction, as most people run it."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from guardian import Guardian
from sqlalchemy import Engine, event, make_url

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_STOP_AND_REMOVE = 'kill -KILL "$1"\nrm -rf -- "$2"'

# Any client may come in, as whoever the server's URL names. A database that is made later is found
# as well. What is not here is as it comes.
_CONFIG = """
[databases]
* = host={host} port={port} user={user} password='{password}'
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen_port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
"""
_SETTINGS = {"default_pool_size": 20, "max_client_conn": 1000, "server_login_retry": 1}

# Nobody's outgoing connection gets one of these while the pooler is down.
_PORTS = range(20_000, 32_000)


def program() -> str | None:
    """Return where PgBouncer is, if it is anywhere."""
    return shutil.which("pgbouncer", path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")


class PgBouncer:
    """A pooler on `port`, configured by a file in `home`, which may be killed and started again."""

    def __init__(self, program: str, port: int, home: Path) -> None:
        self.port = port
        self.home = home
        # it refuses to be root; it reads its file before it becomes somebody else
        account = ["-u", "nobody"] if os.geteuid() == 0 else []
        self._command = [program, "-q", *account, str(home / "pgbouncer.ini")]

    def url(self, db_url: str) -> str:
        """Return the URL of the same database through the pooler."""
        through = make_url(db_url).set(host="127.0.0.1", port=self.port)
        return through.render_as_string(hide_password=False)

    def start(self) -> None:
        """Start it and wait until it takes connections."""
        with (self.home / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._guardian = Guardian(_STOP_AND_REMOVE, str(self._process.pid), str(self.home))
        _wait_until_ready(self._process, self.port, self.home / "log")

    def kill(self) -> None:
        """SIGKILL: all connections through it end, and nobody is told why."""
        self._process.kill()
        self._process.wait()
        self._guardian.dismiss()


@contextmanager
def pgbouncer(server_url: str, **settings: int | str) -> Iterator[PgBouncer]:
    """Start a PgBouncer in front of the server; `settings` are lines of its `[pgbouncer]`."""
    found = program()
    if found is None:
        raise FileNotFoundError("no pgbouncer")
    home = Path(tempfile.mkdtemp(prefix="pgtask-pgbouncer-"))
    port = _free_port()
    config = home / "pgbouncer.ini"
    config.write_text(_config(server_url, port, {**_SETTINGS, **settings}))
    pooler = PgBouncer(found, port, home)
    pooler.start()
    try:
        yield pooler
    finally:
        pooler.kill()
        shutil.rmtree(home, ignore_errors=True)


def _config(server_url: str, port: int, settings: Mapping[str, Any]) -> str:
    url = make_url(server_url)
    lines = _CONFIG.format(
        host=url.host,
        port=url.port or 5432,
        user=url.username,
        password=str(url.password or "").replace("'", "''"),
        listen_port=port,
    )
    return lines + "".join(f"{name} = {value}\n" for name, value in settings.items())


def _free_port() -> int:
    for port in random.sample(_PORTS, 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the pooler does it
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"no free port in {_PORTS}")


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 10
    while not _answers(port):
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"pgbouncer does not run:\n{log.read_text(errors='replace')}")
        time.sleep(0.01)


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def as_the_readme_says() -> None:
    """Let all engines from now on prepare nothing, but for the worker's, which see to it."""

    @event.listens_for(Engine, "do_connect")
    def _unprepared(dialect: Any, _record: Any, _args: Any, options: dict[str, Any]) -> None:
        if dialect.driver.startswith("psycopg") and dialect.driver != "psycopg2":
            if "tcp_user_timeout" not in options:
                options.setdefault("prepare_threshold", None)
        elif dialect.driver == "asyncpg":
            options["statement_cache_size"] = options["prepared_statement_cache_size"] = 0
            options["prepared_statement_name_func"] = _fresh_name


def _fresh_name() -> str:
    return f"__pgtask_{os.urandom(8).hex()}__"
