"""The commands about what runs: `workers` and `cancel`; for `doctor` see test_doctor.py."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import noting
import pytest
from fleet import Fleet
from sqlalchemy import text

from pgtask_sa import Task, TaskSession, cli
from pgtask_sa.presence_table import LOCK_CLASS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Connection, Engine


@pytest.fixture
def run(db_url, capsys, monkeypatch) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.setenv("DATABASE_URL", db_url)

    def run(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        return (cli.main(argv), *capsys.readouterr())

    return run


@pytest.fixture
def document(run) -> Callable[..., dict[str, Any]]:
    return lambda *argv: json.loads(run(*argv, "--json")[1])


@pytest.fixture
def worker(engine: Engine) -> Iterator[Connection]:
    """Give a connection to write the lanes of a worker with that lives."""
    with noting.alive(engine.url) as connection:
        yield connection


@pytest.fixture
def held(engine: Engine) -> Iterator[Callable[[int], None]]:
    """Give a function that enqueues so many tasks and holds them, as a claim does."""
    with engine.connect() as connection:

        def hold(count: int) -> None:
            with TaskSession(engine) as session:
                session.enqueue_many("MAIL", [{}] * count)
                session.commit()
            connection.execute(text("delete from task"))

        yield hold
        connection.invalidate()


def _running(entry: dict[str, Any]) -> list[tuple[int, list[int]]]:
    return [(lane["lane"], [t["task_id"] for t in lane["tasks"]]) for lane in entry["lanes"]]


class TestWorkers:
    def test_a_line_for_each_lane(self, run, worker, held):
        """What a lane runs, for how long; how many more are in its batch; or that it idles."""
        held(3)
        noting.write_lane(worker, 1, lane=1)
        noting.write_lane(worker, 2, 3, lane=2)
        noting.write_lane(worker, lane=3)
        code, out, _ = run("workers")
        lines = [line.split() for line in out.splitlines()]
        assert 0 == code
        assert ["HOST", "PID", "STARTED", "LANE", "RUNS", "FOR"] == lines[0]
        first = r"web1 4711 0 s ago 1 1 MAIL \d+ s"
        assert re.fullmatch(first, " ".join(lines[1]))
        assert re.fullmatch(r"2 2 MAIL and 1 more \d+ s", " ".join(lines[2]))
        assert ["3", "idle"] == lines[3]

    def test_for_programs(self, document, worker, held):
        """Every lane with its tasks, and of each its number, type and mode."""
        held(2)
        noting.write_lane(worker, 1, 2, lane=1)
        noting.write_lane(worker, lane=2)
        found = document("workers")
        (entry,) = found["workers"]
        assert [] == found["gone"]
        assert ("web1", 4711, True) == (entry["host"], entry["pid"], entry["alive"])
        assert [(1, [1, 2]), (2, [])] == _running(entry)
        busy, idle = entry["lanes"]
        assert {"task_id": 1, "task_type": "MAIL", "leased": False} == busy["tasks"][0]
        assert 0 <= busy["seconds"] < 60
        assert (None, None) == (idle["begun_at"], idle["seconds"])

    def test_a_worker_that_runs_something(self, db_url, direct_url):
        """What it has noted itself: its host and number, the task that it runs, and since when."""
        fleet = Fleet(db_url, direct_url=direct_url)
        command = [sys.executable, "-m", "pgtask_sa", "workers", "--json", "--database-url", db_url]

        def look() -> list[dict[str, Any]]:
            out = subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
            return json.loads(out)["workers"]

        with fleet.worker("--concurrency", "2") as worker:
            fleet.enqueue("SLEEP", {"i": 1, "seconds": 60})
            fleet.until(fleet.runner)
            (entry,), [(task_id,)] = look(), fleet.rows("select task_id from task")
            (busy,) = (lane for lane in entry["lanes"] if lane["tasks"])
            (later,) = (lane for lane in look()[0]["lanes"] if lane["tasks"])
            assert (socket.gethostname(), worker.pid) == (entry["host"], entry["pid"])
        expected = [{"task_id": task_id, "task_type": "SLEEP", "leased": False}]
        assert (True, expected, expected) == (entry["alive"], busy["tasks"], later["tasks"])
        assert 0 <= busy["seconds"] < later["seconds"] < 60
        assert busy["begun_at"] == later["begun_at"]

    def test_what_is_done_does_not_run(self, document, worker, held, engine):
        """A number is noted until the next claim: the row is gone, or of another version."""
        held(2)
        with TaskSession(engine) as session:
            session.enqueue("MAIL")
            session.commit()
        noting.write_lane(worker, 1, 2, 3, 4711, row_versions=[1, 1, 1, 1])
        assert [(1, [])] == _running(document("workers")["workers"][0])

    def test_a_lease(self, document, worker, engine):
        """A leased row is of a newer version than the one that was claimed, and runs."""
        with TaskSession(engine) as session:
            session.enqueue("MAIL")
            session.commit()
        with engine.begin() as connection:
            connection.execute(text("update task set lease_token = gen_random_uuid()"))
        noting.write_lane(worker, 1, row_versions=[1])
        (lane,) = document("workers")["workers"][0]["lanes"]
        assert [{"task_id": 1, "task_type": "MAIL", "leased": True}] == lane["tasks"]

    @pytest.mark.parametrize(("seconds", "is_alive"), [(50, True), (70, False)])
    def test_behind_a_pooler(self, document, run, engine, seconds, is_alive):
        """Without a lock it counts when the worker was last seen; no more is claimed to be known.

        Nobody notes what its lanes run.
        """
        with engine.connect() as connection:
            noting.write_lane(connection, is_direct=False)
            late = f"update task_worker set seen_at = now() - interval '{seconds} s'"
            connection.execute(text(late))
            connection.commit()
        found = document("workers")
        assert (int(is_alive), int(not is_alive)) == (len(found["workers"]), len(found["gone"]))
        (entry,) = found["workers"] + found["gone"]
        assert (None if is_alive else False, None) == (entry["alive"], entry["lanes"][0]["tasks"])
        _, out, err = run("workers")
        assert (is_alive, is_alive) == (
            bool(re.search(r"1 +unknown", out)),
            "give them --direct-url" in err,
        )

    def test_gone(self, run, document, engine, held):
        """A worker whose lock is free is shown apart, and runs nothing."""
        held(1)
        with engine.connect() as connection:
            noting.write_lane(connection, 1)
        assert (0, "no worker runs\ngone, but still noted: web1 pid 4711\n", "") == run("workers")
        (entry,) = document("workers")["gone"]
        assert ([(1, [])], False) == (_running(entry), entry["alive"])

    @pytest.mark.parametrize(
        "key", [f"{LOCK_CLASS << 32 | noting.WORKER_ID}", f"1, {noting.WORKER_ID}"]
    )
    def test_the_lock_of_somebody_else(self, document, engine, key):
        """An application may hold the same number in another class, or as one bigint."""
        with engine.connect() as connection, engine.connect() as other:
            other.execute(text(f"select pg_advisory_xact_lock({key})"))
            noting.write_lane(connection)
            assert [] == document("workers")["workers"]

    def test_a_negative_number(self, document, engine):
        """Locks are shown without a sign; a negative number is found as well."""
        with noting.alive(engine.url, -7) as connection:
            noting.write_lane(connection, worker_id=-7)
            assert 1 == len(document("workers")["workers"])


class TestCancel:
    def test_says_what_was_done(self, run, worker, held, engine):
        """Each task on a line; what was not cancelled on standard error, and exit code 1."""
        held(1)
        noting.write_lane(worker, 1)
        with TaskSession(engine) as session:
            session.enqueue("MAIL")
            session.commit()
        code, out, err = run("cancel", "2", "1", "77")
        running = r"task 1 was running \(since 20\d\d-.*, on web1 pid 4711\): cancelled"
        assert 1 == code
        assert re.fullmatch(rf"task 2 was waiting: cancelled\n{running}\n", out)
        assert "task 77 is not there\n" == err

    def test_exit_code(self, run, engine):
        """0 when all were cancelled."""
        with TaskSession(engine) as session:
            session.enqueue_many("MAIL", [{}] * 2)
            session.commit()
        assert 0 == run("cancel", "1", "2")[0]
        assert 1 == run("cancel", "1")[0]

    def test_for_programs(self, run, document, worker, held):
        """One document, with what was found of each task."""
        held(1)
        noting.write_lane(worker, 1)
        running, missing = document("cancel", "1", "77")["tasks"]
        assert (1, "running", True) == (
            running["task_id"],
            running["found"],
            running["cancelled"],
        )
        assert ("web1", 4711) == (running["host"], running["pid"])
        assert 0 <= running["seconds"] < 60
        assert (77, "missing", False) == (
            missing["task_id"],
            missing["found"],
            missing["cancelled"],
        )

    def test_another_date_style(self, run, engine):
        """A role may have one that the driver cannot read."""
        with engine.begin() as connection:
            name = engine.url.database
            connection.execute(text(f"alter database {name} set datestyle = 'German'"))
        with TaskSession(engine) as session:
            session.add(Task(task_type="MAIL", params={}))
            session.commit()
        assert (0, "task 1 was waiting: cancelled\n", "") == run("cancel", "1")
        assert 0 == run("dead")[0]
