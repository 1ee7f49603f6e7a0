"""The test infrastructure: servers, databases, processes, proxies and waits do what they say."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import textwrap
from pathlib import Path

import psycopg
import pytest
from databases import Databases, with_psycopg
from postgres_server import PostgresServer, ServerError
from processes import WatchedProcess, WorkerProcess
from proxy import TcpProxy
from sqlalchemy import create_engine, make_url, text
from waiting import wait_until

SUPPORT = Path(__file__).parents[1] / "examples" / "support"


def connect(url: str) -> psycopg.Connection:
    """Return a bare connection, to see the driver's own errors."""
    return psycopg.connect(plain(url), autocommit=True, connect_timeout=5)


def plain(url: str) -> str:
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def process_exists(pid: int) -> bool:
    """Whether a process runs; one that ended and that nobody waited for does not count."""
    if Path("/proc/self/stat").exists():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            return state != "Z"
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def stopped(pid: int) -> bool:
    """Whether a child of ours is stopped by SIGSTOP."""
    return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None


def readable(connection: psycopg.Connection, within: float) -> bool:
    """Whether anything arrives from the server in time."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(within * 1000))


class TestWaitUntil:
    def test_returns_the_true_value(self):
        """The value that ended the wait is the result."""
        values = iter([0, None, "there"])

        assert "there" == wait_until(lambda: next(values))

    def test_fails_with_the_message(self):
        """A condition that never comes true fails the test, with the last value seen."""
        with pytest.raises(AssertionError, match=r"no tea \(waited 0.06 s, last value 0\)"):
            wait_until(lambda: 0, timeout=0.02, message="no tea")

    def test_message_is_evaluated_at_the_end(self):
        """A callable message describes the state at the time of the failure."""
        seen: list[int] = []

        with pytest.raises(AssertionError, match=r"saw [1-9]"):
            wait_until(lambda: seen.append(1), timeout=0.02, message=lambda: f"saw {len(seen)}")


class TestPostgresServer:
    @pytest.mark.parametrize("mode", ["fast", "immediate"])
    def test_restart_keeps_port_and_data(self, restartable_server, mode):
        """A restart ends all sessions and keeps what was committed."""
        with Databases(restartable_server.admin_url).temporary() as url:
            session = connect(url)
            session.execute("create table t as select 42 as a")
            port = restartable_server.port

            restartable_server.restart(mode)

            with pytest.raises(psycopg.OperationalError):
                session.execute("select 1")
            with connect(url) as again:
                assert (42,) == again.execute("select a from t").fetchone()
            assert port == restartable_server.port

    def test_stopped_server_refuses_until_started(self, restartable_server):
        """Between stop and start nobody gets in, and both may be called twice."""
        restartable_server.stop()
        restartable_server.stop()
        with pytest.raises(psycopg.OperationalError):
            connect(restartable_server.admin_url)

        restartable_server.start()
        restartable_server.start()

        connect(restartable_server.admin_url).close()

    def test_reachable_by_socket(self, restartable_server):
        """The unix socket leads to the same server."""
        with connect(restartable_server.url(over_socket=True)) as connection:
            row = connection.execute("select inet_server_addr()").fetchone()

        assert (None,) == row

    def test_tcp_needs_the_password(self, restartable_server):
        """Other users of the machine do not get in."""
        url = make_url(restartable_server.admin_url).set(password="guess")

        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            connect(url.render_as_string(hide_password=False))

    def test_settings_suit_the_tests(self, restartable_server):
        """Many connections, two-phase transactions, and no fsync."""
        names = ["max_connections", "max_prepared_transactions", "fsync", "autovacuum"]
        with connect(restartable_server.admin_url) as connection:
            values = [connection.execute(f"show {name}").fetchone()[0] for name in names]

        assert ["200", "10", "off", "on"] == values

    def test_close_leaves_nothing(self, restartable_server):
        """Process and files are gone, and the object says so."""
        server = PostgresServer(restartable_server.bin_dir, fsync=False)
        with server:
            home = server.home
            assert home.is_dir()

        assert not home.exists()
        assert not server.running
        with pytest.raises(ServerError):
            _ = server.home

    def test_bad_setting_shows_the_log(self, restartable_server):
        """A server that cannot start says why, and leaves nothing."""
        server = PostgresServer(restartable_server.bin_dir, settings={"shared_buffers": "much"})

        with pytest.raises(ServerError, match="shared_buffers"):
            server.start()

        assert not server.running

    def test_killed_owner_takes_the_server_along(self, restartable_server):
        """After SIGKILL of the process that started it, neither the server nor its files remain."""
        script = textwrap.dedent(f"""
            import signal
            from postgres_server import PostgresServer
            server = PostgresServer({str(restartable_server.bin_dir)!r}, fsync=False)
            server.start()
            print("home", server.home, "pid", server._process.pid)
            signal.pause()
        """)
        with WatchedProcess(sys.executable, "-c", script, pythonpath=[SUPPORT]) as owner:
            found = owner.wait_for_line(r"home (\S+) pid (\d+)", timeout=30)
            home, pid = Path(found[1]), int(found[2])

            owner.kill()

            wait_until(lambda: not home.exists(), message="the data directory is still there")
            wait_until(lambda: not process_exists(pid), message="the server still runs")


class TestDatabases:
    def test_each_is_new_and_dropped(self, databases, server_url):
        """A temporary database starts empty and is gone afterwards, whoever is still connected."""
        with databases.temporary() as url:
            name = make_url(url).database
            session = connect(url)
            session.execute("create table t ()")
        with connect(server_url) as connection:
            found = connection.execute(
                "select from pg_database where datname = %s", [name]
            ).fetchone()

        assert found is None
        with pytest.raises(psycopg.OperationalError):
            session.execute("select 1")

    def test_clones_have_the_tables_of_the_template(self, databases):
        """A clone has the rows and tables of its template, and changes do not go back."""
        with databases.temporary() as template_url:
            with connect(template_url) as connection:
                connection.execute("create table t as select 1 as a")
            template = make_url(template_url).database
            for _ in range(2):
                with databases.temporary(template) as url, connect(url) as connection:
                    rows = connection.execute("delete from t returning a").fetchall()
                    assert [(1,)] == rows

    @pytest.mark.parametrize(
        "url",
        [
            "postgres://me:p%40ss@host:5433/db",
            "postgresql://me:p%40ss@host:5433/db",
            "postgresql+asyncpg://me:p%40ss@host:5433/db",
        ],
    )
    def test_any_url_becomes_one_of_psycopg(self, url):
        """Scheme and driver are replaced, and nothing else; the password stays readable."""
        assert "postgresql+psycopg://me:p%40ss@host:5433/db" == with_psycopg(url)

    def test_other_backends_are_refused(self):
        """A URL of another database is a clear error."""
        with pytest.raises(ValueError, match="not a PostgreSQL URL"):
            with_psycopg("sqlite:///tasks.db")

    def test_code_under_test_sees_no_database_url(self):
        """The developer's own database is out of reach of a test that names none."""
        assert "DATABASE_URL" not in os.environ

    def test_fixture_databases_work_with_an_engine(self, empty_db_url):
        """The URL that fixtures give has its password, so that an engine can be made of it."""
        engine = create_engine(empty_db_url)
        with engine.connect() as connection:
            assert 1 == connection.scalar(text("select 1"))
        engine.dispose()


class TestWatchedProcess:
    def test_lines_can_be_read_while_it_runs(self):
        """Output arrives line by line, from both streams, and before the end."""
        script = "import sys, signal; print('out'); print('err', file=sys.stderr); signal.pause()"
        with WatchedProcess(sys.executable, "-c", script) as process:
            process.wait_for_line("^err$")

            assert ["out", "err"] == process.lines
            assert process.running

    def test_exit_code_and_last_words(self):
        """After the wait everything that was printed is there."""
        with WatchedProcess(sys.executable, "-c", "print('bye'); raise SystemExit(3)") as process:
            assert 3 == process.wait()
            assert ["bye"] == process.lines

    def test_wait_for_line_ends_with_the_output(self):
        """A line that can no longer come is not waited for; the failure shows what came instead."""
        failure = pytest.raises(AssertionError, match="output ended(.|\n)*something else")
        command = (sys.executable, "-c", "print('something else')")
        with WatchedProcess(*command) as process, failure:
            process.wait_for_line("something$", timeout=60)

    def test_wait_fails_in_time(self):
        """A process that does not end fails the test."""
        failure = pytest.raises(AssertionError, match="still running")
        with WatchedProcess("sleep", "60") as process, failure:
            process.wait(timeout=0.05)

    @pytest.mark.parametrize(
        ("method", "number"),
        [("kill", signal.SIGKILL), ("terminate", signal.SIGTERM), ("interrupt", signal.SIGINT)],
    )
    def test_signals(self, method, number):
        """Each method sends its signal."""
        with WatchedProcess("sleep", "60") as process:
            getattr(process, method)()

            assert -number == process.wait()

    def test_suspended_process_goes_on_when_resumed(self):
        """Between suspend and resume nothing happens."""
        script = "import time\nwhile True: print('tick'); time.sleep(0.01)"
        with WatchedProcess(sys.executable, "-c", script) as process:
            process.wait_for_line("tick")
            process.suspend()
            wait_until(lambda: stopped(process.pid), message="never stopped")
            before = len(process.lines)

            process.resume()

            wait_until(lambda: len(process.lines) > before + 1)

    def test_grandchildren_die_with_the_group(self):
        """The end of the block kills what the process started, though that itself has ended."""
        with WatchedProcess("/bin/sh", "-c", "sleep 60 & echo $!") as process:
            pid = int(process.wait_for_line(r"^\d+$")[0])
            process.wait()
            assert process_exists(pid)

        wait_until(lambda: not process_exists(pid))

    def test_killed_test_run_takes_its_processes_along(self):
        """After SIGKILL of the process that watches, the watched one is killed as well."""
        script = textwrap.dedent("""
            import signal
            from processes import WatchedProcess
            with WatchedProcess("sleep", "60") as process:
                print("pid", process.pid)
                signal.pause()
        """)
        paths = [SUPPORT, Path(__file__).parent / "support"]
        with WatchedProcess(sys.executable, "-c", script, pythonpath=paths) as owner:
            pid = int(owner.wait_for_line(r"pid (\d+)")[1])

            owner.kill()

            wait_until(lambda: not process_exists(pid))

    def test_environment_and_path(self, tmp_path):
        """Directories given are importable, variables given are set, and the rest is inherited."""
        (tmp_path / "found_here.py").write_text("import os; print(os.environ['COLOUR'])")
        command = (sys.executable, "-m", "found_here")
        with WatchedProcess(*command, pythonpath=[tmp_path], env={"COLOUR": "teal"}) as process:
            assert 0 == process.wait()
            assert ["teal"] == process.lines

    def test_worker_command(self):
        """A worker is started as its documentation says."""
        worker = WorkerProcess("app:tasks", "postgresql:///x", "--drain")
        expected = "-m pgtask_sa.worker app:tasks --database-url postgresql:///x --drain"

        assert (sys.executable, *expected.split()) == worker.command


class TestGuardian:
    def test_dismissed_guardian_does_nothing(self, tmp_path):
        """A guardian that was sent away leaves everything as it is."""
        target = tmp_path / "target"
        script = (
            f"from guardian import Guardian\nGuardian('touch \"$1\"', {str(target)!r}).dismiss()"
        )
        with WatchedProcess(sys.executable, "-c", script, pythonpath=[SUPPORT]) as process:
            assert 0 == process.wait()

        assert not target.exists()

    def test_guardian_acts_after_the_end(self, tmp_path):
        """A guardian that nobody sent away runs its script with its arguments."""
        target = tmp_path / "a name with spaces"
        script = f"from guardian import Guardian\ng = Guardian('touch \"$1\"', {str(target)!r})"
        with WatchedProcess(sys.executable, "-c", script, pythonpath=[SUPPORT]) as process:
            process.wait()

            wait_until(target.exists)


@pytest.fixture
def proxied(proxy, server_url):
    """Give a session that leads through the proxy."""
    connection = connect(proxy.url(server_url))
    yield connection
    connection.close()


class TestTcpProxy:
    def test_passes_everything_on(self, proxy, proxied):
        """Bytes of both directions arrive and are counted."""
        big = "x" * 300_000

        assert (big,) == proxied.execute("select %s::text", [big]).fetchone()
        assert 1 == proxy.accepted == proxy.open
        assert proxy.bytes["up"] > len(big)
        wait_until(lambda: proxy.bytes["down"] > len(big))

    def test_stalled_session_waits_and_goes_on(self, proxy, proxied):
        """During a stall no answer arrives, and after it all that was held back does."""
        proxy.stall()
        proxied.pgconn.send_query(b"select 1")
        assert not readable(proxied, within=0.1)

        proxy.resume()

        assert readable(proxied, within=5)

    def test_stall_holds_new_connections(self, proxy, server_url):
        """A client that connects during a stall runs into its own time limit."""
        proxy.stall()

        with pytest.raises(psycopg.errors.ConnectionTimeout):
            psycopg.connect(plain(proxy.url(server_url)), connect_timeout=2)

    def test_lost_answer_of_a_commit(self, proxy, empty_db_url):
        """Stalled downwards, a commit is made though its client never learns of it."""
        with (
            contextlib.closing(connect(proxy.url(empty_db_url))) as client,
            connect(empty_db_url) as observer,
        ):
            observer.execute("create table t (a int)")
            proxy.stall("down")

            client.pgconn.send_query(b"insert into t values (1)")

            wait_until(lambda: observer.execute("select from t").fetchone() is not None)
            assert client.pgconn.is_busy()
            proxy.drop_all()

    def test_dropped_session_fails_at_once(self, proxy, proxied):
        """A drop ends the open connections, and the next one works."""
        proxy.drop_all()

        with pytest.raises(psycopg.OperationalError):
            proxied.execute("select 1")
        assert 0 == proxy.open

    def test_drop_ends_the_stalled(self, proxy, proxied):
        """A connection can be dropped while it is stalled, and later ones pass."""
        proxy.stall()
        proxied.pgconn.send_query(b"select 1")
        proxy.drop_all()
        proxy.resume()

        with pytest.raises(psycopg.OperationalError):
            proxied.execute("select 1")

    def test_server_sees_the_drop(self, proxy, proxied, server_url):
        """The server ends the session of a dropped connection."""
        pid = proxied.info.backend_pid
        with connect(server_url) as observer:
            proxy.drop_all()

            wait_until(
                lambda: not session_exists(observer, pid), message="the session is still there"
            )

    def test_half_close_leaves_the_server_alone(self, proxy, proxied, server_url):
        """The client finds its connection gone, and the server keeps the session."""
        pid = proxied.info.backend_pid

        proxy.half_close()

        with pytest.raises(psycopg.OperationalError):
            proxied.execute("select 1")
        proxied.close()
        with connect(server_url) as observer:
            assert session_exists(observer, pid)
            proxy.drop_all()
            wait_until(
                lambda: not session_exists(observer, pid), message="the session is still there"
            )

    def test_half_close_of_the_server_side(self, proxy, proxied, server_url):
        """The server ends the session, and the client does not learn of it."""
        pid = proxied.info.backend_pid
        with connect(server_url) as observer:
            proxy.half_close("server")

            wait_until(
                lambda: not session_exists(observer, pid), message="the session is still there"
            )
        assert 1 == proxy.open

    def test_refused_connections(self, proxy, proxied, server_url):
        """While new connections are refused, the old ones work."""
        proxy.refuse()
        with pytest.raises(psycopg.OperationalError):
            connect(proxy.url(server_url))
        assert (1,) == proxied.execute("select 1").fetchone()

        proxy.refuse(False)

        connect(proxy.url(server_url)).close()
        assert proxy.refused >= 1

    def test_nobody_behind_it(self):
        """A proxy before a server that is away resets its clients."""
        with TcpProxy("127.0.0.1", 1) as proxy, pytest.raises(psycopg.OperationalError):
            connect(f"postgresql://x@127.0.0.1:{proxy.port}/x")


def session_exists(observer: psycopg.Connection, pid: int) -> bool:
    found = observer.execute("select from pg_stat_activity where pid = %s", [pid])
    return found.fetchone() is not None
