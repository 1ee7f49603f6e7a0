"""E1: tasks that kill their worker are started as often as they may be, and no other is lost."""

from __future__ import annotations

import time

import pytest
from fleet import Fleet
from sqlalchemy import text
from waiting import wait_until

QUIET = ("--log-level", "warning", "--idle-interval", "0.2")


@pytest.fixture
def fleet(db_url, direct_url) -> Fleet:
    return Fleet(db_url, direct_url=direct_url, target="poison_tasks:tasks")


@pytest.fixture
def starts(tmp_path):
    """Give a file to which each start of the poison adds a byte."""
    file = tmp_path / "starts"
    file.touch()
    return file


def _enqueue_around(fleet: Fleet, kind: str, starts, how: str, count: int = 30) -> None:
    """Enqueue one poison task among good ones of both kinds."""
    half = count // 2
    fleet.enqueue("GOOD", *[{"i": i} for i in range(half)])
    fleet.enqueue(kind, {"file": str(starts), "how": how})
    fleet.enqueue("ASYNC_GOOD", *[{"i": i} for i in range(half, count)])


def _dead(fleet: Fleet) -> list[tuple]:
    return fleet.rows("select task_type, attempts, reason, last_error from dead_task")


def _execute(fleet: Fleet, statement: str) -> None:
    with fleet.engine.begin() as connection:
        connection.execute(text(statement))


DIED = "WorkerDied: the worker died while it ran this task"

CASES = [
    ("POISON", "sigkill", ("--processes", "2", "--concurrency", "4")),
    ("POISON", "exit", ("--processes", "1", "--concurrency", "1")),
    ("POISON", "segfault", ("--processes", "2", "--batch-size", "10")),
    ("POISON", "memory", ("--processes", "2", "--concurrency", "2")),
    ("ASYNC_POISON", "sigkill", ("--processes", "2", "--concurrency", "4")),
    ("ASYNC_POISON", "exit", ("--processes", "1", "--batch-size", "10")),
    ("ASYNC_POISON", "exit", ("--processes", "1", "--concurrency", "4")),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join((*case[:2], *case[2][2:])))
def test_a_task_that_kills_its_worker(fleet: Fleet, starts, case, figures):
    """It is buried after exactly its attempts, and all the others are done exactly once."""
    kind, how, options = case
    _enqueue_around(fleet, kind, starts, how)
    began = time.monotonic()
    with fleet.worker(*QUIET, *options) as worker:
        wait_until(lambda: fleet.count() == 0, 20, message=lambda: worker.output)
        assert worker.running
    count, took = len(starts.read_bytes()), time.monotonic() - began
    figures(f"{count} starts, {len(fleet.done())} others done, {took:.1f} s")
    assert [(kind, 3, "worker died", DIED)] == _dead(fleet)
    assert (b"xxx", list(range(30))) == (starts.read_bytes(), fleet.done())


def test_among_several_programs(fleet: Fleet, starts):
    """Whoever claims it next counts the death, be it another program."""
    _enqueue_around(fleet, "POISON", starts, "sigkill")
    options = (*QUIET, "--processes", "1")
    with fleet.worker(*options), fleet.worker(*options):
        fleet.until(lambda: fleet.count() == 0, 20)
    assert [("POISON", 3, "worker died", DIED)] == _dead(fleet)
    assert (b"xxx", list(range(30))) == (starts.read_bytes(), fleet.done())


KINDS = pytest.mark.parametrize("kind", ["POISON", "ASYNC_POISON"])


@KINDS
def test_when_all_die_together(fleet: Fleet, starts, kind):
    """Supervisor and all, as a container that is killed whole: the next program counts it."""
    _enqueue_around(fleet, kind, starts, "group")
    for death in range(3):
        with fleet.worker(*QUIET, "--processes", "2") as worker:
            assert -9 == worker.wait(15)
        assert death + 1 == len(starts.read_bytes())
    with fleet.worker(*QUIET):
        fleet.until(lambda: fleet.count() == 0)
    assert [(kind, 3, "worker died", DIED)] == _dead(fleet)
    assert (b"xxx", list(range(30))) == (starts.read_bytes(), fleet.done())


@pytest.fixture
def many(tmp_path, fleet: Fleet):
    """Give a function that enqueues some poisons among good ones, and one that counts starts."""
    files = []

    def enqueue(kind: str, how: str, count: int = 4) -> None:
        files.extend(tmp_path / f"starts-{i}" for i in range(count))
        for file in files:
            file.touch()
        good = kind.replace("POISON", "GOOD")
        fleet.enqueue(kind, *[{"file": str(file), "how": how} for file in files])
        fleet.enqueue(good, *[{"i": i} for i in range(30)])

    return enqueue, lambda: [len(file.read_bytes()) for file in files]


# A single process that dies and dies is replaced after longer and longer pauses.
MANY = [
    ("POISON", "sigkill", ("--processes", "2"), 4),
    ("ASYNC_POISON", "exit", ("--processes", "2", "--concurrency", "4"), 4),
    ("ASYNC_POISON", "exit", ("--processes", "1", "--concurrency", "4"), 2),
]


@pytest.mark.parametrize("case", MANY, ids=lambda case: " ".join((*case[:2], *case[2])))
@pytest.mark.timeout(240)
def test_many_at_once(fleet: Fleet, many, case, figures):
    """None is started too often, and nobody who was beside them is taken for one of them."""
    (kind, how, options, count), (enqueue, starts) = case, many
    enqueue(kind, how, count)
    with fleet.worker(*QUIET, *options):
        fleet.until(lambda: fleet.count() == 0, 60)
    figures(f"starts of {count} that kill at once: {starts()}")
    assert [(kind, 3, "worker died", DIED)] * count == _dead(fleet)
    assert list(range(30)) == fleet.done()
    assert {2, 3} >= set(starts())  # two that kill in the same instant may be charged one too many


@KINDS
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_many_at_once_that_take_all_along(fleet: Fleet, many, kind, figures):
    """As above where each death is that of the whole program, which somebody starts again."""
    enqueue, starts = many
    enqueue(kind, "group")
    deaths = 0
    while fleet.count():
        with fleet.worker(*QUIET, "--processes", "2") as worker:
            fleet.until(lambda worker=worker: not worker.running or fleet.count() == 0, 30)
            deaths += not worker.running
    figures(f"starts of four that kill at once, and all along: {starts()}; {deaths} deaths of all")
    assert [(kind, 3, "worker died", DIED)] * 4 == _dead(fleet)
    assert list(range(30)) == fleet.done()
    assert {2, 3} >= set(starts())  # two that kill in the same instant may be charged one too many


def test_whom_a_killer_takes_along(fleet: Fleet, starts, figures):
    """Those beside its first start; from then on it runs alone."""
    fleet.enqueue("SLOW_GOOD", *[{"i": i} for i in range(300)])
    fleet.enqueue("ASYNC_POISON", {"file": str(starts), "how": "sigkill"})
    with fleet.worker(*QUIET, "--processes", "1", "--concurrency", "4"):
        fleet.until(lambda: fleet.count("dead_task") == 1, 30)
        left = fleet.count()
        fleet.until(lambda: fleet.count() == 0, 30)
    charged = fleet.rows("select count(*), max(pid) from done where pid > 1")
    figures(f"charged beside it, and with how many starts: {charged}; {left} left when it was dead")
    assert left
    assert b"xxx" == starts.read_bytes()
    assert [(3, 2)] >= charged


def test_beside_a_handler_that_does_not_end(fleet: Fleet, starts, tmp_path):
    """Others go on; one that may not begin beside it is put back, and begins when it can."""
    go, held = tmp_path / "go", tmp_path / "held"
    fleet.enqueue("HOLD", {"file": str(held), "go": str(go)})
    with fleet.worker(*QUIET, "--processes", "1", "--concurrency", "4") as worker:
        fleet.until(held.exists)
        _execute(  # two starts are counted, the last one is left
            fleet,
            "insert into task (task_type, attempts, last_error, params) values ('POISON', 2, "
            f"'{DIED}', jsonb_build_object('file', '{starts}', 'how', 'sigkill'))",
        )
        fleet.enqueue("GOOD", *[{"i": i} for i in range(50)])
        fleet.until(lambda: list(range(50)) == fleet.done())
        waits = "select attempts, last_error, run_at > now() from task where task_type = 'POISON'"
        fleet.until(lambda: [(2, DIED, True)] == fleet.rows(waits))
        assert b"" == starts.read_bytes()
        go.touch()
        fleet.until(lambda: 1 == fleet.count())
        _execute(fleet, "update task set run_at = now()")
        fleet.until(lambda: 0 == fleet.count())
    assert "task.postponed" in worker.output
    assert [("POISON", 3, "worker died", DIED)] == _dead(fleet)
    assert b"x" == starts.read_bytes()


def test_a_drain_goes_on(fleet: Fleet, starts):
    """A child that leaves in the middle of its work is replaced, whatever its exit code."""
    _enqueue_around(fleet, "POISON", starts, "leave")
    with fleet.worker(*QUIET, "--drain", "--processes", "1", "--concurrency", "1") as worker:
        assert 0 == worker.wait(20), worker.output
    assert list(range(30)) == fleet.done()


def test_failures_and_deaths_share_the_attempts(fleet: Fleet, starts):
    """Two failures and two deaths make four attempts."""
    fleet.enqueue("FRAGILE", {"file": str(starts), "how": "sigkill"})
    with fleet.worker(*QUIET, "--processes", "1"):
        fleet.until(lambda: fleet.count() == 0)
    assert [("FRAGILE", 4, "worker died", DIED)] == _dead(fleet)
    assert b"xxxx" == starts.read_bytes()


def test_one_attempt_is_one_start(fleet: Fleet, starts):
    """With max_attempts=1 it never runs again."""
    _enqueue_around(fleet, "ONCE", starts, "sigkill")
    with fleet.worker(*QUIET, "--processes", "1", "--concurrency", "1"):
        fleet.until(lambda: fleet.count() == 0)
    assert [("ONCE", 1, "worker died", DIED)] == _dead(fleet)
    assert (b"x", list(range(30))) == (starts.read_bytes(), fleet.done())


def test_the_backoff_between_deaths(fleet: Fleet, starts):
    """The first time it runs again at once; then it waits as after any failure."""
    fleet.enqueue("PATIENT", {"file": str(starts), "how": "sigkill"})
    waits = "select attempts, last_error, run_at > now() + interval '30 s' from task"
    with fleet.worker(*QUIET, "--processes", "1"):
        fleet.until(lambda: [(2, DIED, True)] == fleet.rows(waits))
    assert b"xx" == starts.read_bytes()


def test_memory_that_runs_out(fleet: Fleet, starts):
    """Where Python notices it that is an error like any other; the worker lives."""
    fleet.enqueue("GLUTTON", {"file": str(starts)})
    with fleet.worker(*QUIET) as worker:
        fleet.until(lambda: fleet.count() == 0)
        assert worker.running
    [(kind, attempts, reason, error)] = _dead(fleet)
    assert ("GLUTTON", 2, "failed") == (kind, attempts, reason)
    assert error.startswith("MemoryError")


def test_in_leased_mode(fleet: Fleet, starts):
    """The lease counts the start; each death costs the length of a lease."""
    _enqueue_around(fleet, "LEASED_POISON", starts, "sigkill")
    with fleet.worker(*QUIET, "--processes", "2", "--batch-size", "10"):
        fleet.until(lambda: fleet.count() == 0, 20)
    error = (
        "WorkerDied: the lease of this task ran out: its worker died, stood still or was cut off"
    )
    assert [("LEASED_POISON", 2, "worker died", error)] == _dead(fleet)
    assert (b"xx", list(range(30))) == (starts.read_bytes(), fleet.done())
