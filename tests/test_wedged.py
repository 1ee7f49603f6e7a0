"""Handlers that hold the interpreter, so that nothing else in their process runs: it is killed."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from fleet import Fleet, events, started
from waiting import SOON, let_pass, wait_until
from wedged_tasks import LAST_PATIENCE, SILENCE

from pgtask_sa import supervisor
from pgtask_sa.events import Event, Events
from pgtask_sa.faces import AsyncFace, SyncFace
from pgtask_sa.supervisor import Supervisor
from pgtask_sa.vital_signs import LANES, VitalSigns, is_stopped

JSON = ("--log-format", "json", "--idle-interval", "0.2")


@pytest.fixture
def fleet(db_url, direct_url) -> Fleet:
    return Fleet(db_url, target="wedged_tasks:tasks", direct_url=direct_url)


def _dead(fleet: Fleet) -> list[tuple]:
    return fleet.rows("select task_type, attempts, reason from dead_task")


def _killed(worker) -> list[str]:
    return [event["message"] for event in events(worker, "worker.killed")]


# -- silence --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["WEDGED", "LEASED_WEDGED"])
def test_a_handler_that_holds_the_interpreter(fleet: Fleet, kind):
    """Its process is killed and replaced, each start is counted, and others do their work.

    In the leased mode that is so when its lease must have run out, also without a time limit.
    """
    starts = 2
    with fleet.worker("--processes", "2", "--concurrency", "2", *JSON) as worker:
        started(worker, times=2)
        fleet.enqueue(kind, {})
        fleet.until(lambda: events(worker, "wedged"))
        fleet.enqueue("GOOD", *[{"i": i} for i in range(20)])
        fleet.until(lambda: list(range(20)) == fleet.done())
        fleet.until(lambda: _dead(fleet) and fleet.count() == 0, 20)
        started(worker, times=2 + starts)
        fleet.until(lambda: len(events(worker, "worker.died")) == starts)
        worker.terminate()
        assert 0 == worker.wait()
    assert [(kind, starts, "worker died")] == _dead(fleet)
    assert starts == len(events(worker, "wedged"))
    told = [event["level"] for event in events(worker, "worker.killed", "worker.died")]
    assert ["ERROR", "INFO"] * starts == told
    assert all("its handler seems to hold the interpreter" in line for line in _killed(worker))


def test_a_handler_that_holds_the_interpreter_within_its_time(fleet: Fleet):
    """That is its right, however short the supervisor's patience is, and whenever it began."""
    with fleet.worker("--processes", "1", "--concurrency", "1", *JSON) as worker:
        started(worker)
        fleet.enqueue("HOLDS", {"i": 1, "seconds": 1.5 * SILENCE})
        fleet.until(lambda: [1] == fleet.done(), 20)
        fleet.enqueue("ASYNC_HOLDS", {"i": 2, "seconds": 1.5 * SILENCE})
        fleet.until(lambda: [1, 2] == fleet.done(), 20)
        worker.terminate()
        assert 0 == worker.wait()
    assert [] == _killed(worker)


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_child_that_is_stopped(fleet: Fleet):
    """Somebody looks at it with a debugger, say: it is left alone, and goes on afterwards."""
    with fleet.worker("--processes", "1", *JSON) as worker:
        started(worker)
        [child] = _children(worker.pid)
        os.kill(child, signal.SIGSTOP)
        let_pass(1.5 * SILENCE)
        os.kill(child, signal.SIGCONT)
        fleet.enqueue("GOOD", {"i": 1})
        fleet.until(lambda: [1] == fleet.done())
        assert ([child], []) == (_children(worker.pid), _killed(worker))


def test_a_supervisor_that_stood_still(fleet: Fleet):
    """It does not know who else did: nobody is killed before another whole time of silence."""
    with fleet.worker("--processes", "1", *JSON) as worker:
        started(worker)
        fleet.enqueue("ASYNC_WEDGED", {})
        fleet.until(lambda: events(worker, "wedged"))
        os.kill(worker.pid, signal.SIGSTOP)
        let_pass(0.3 + 1.5 * SILENCE)
        went_on = time.monotonic()
        os.kill(worker.pid, signal.SIGCONT)
        worker.wait_for_line("worker.killed")
        assert SILENCE < time.monotonic() - went_on


# -- the end --------------------------------------------------------------------------------------


def test_a_wedged_child_at_the_end(fleet: Fleet):
    """It is killed some seconds after the grace; its task was cut off, and is in the table."""
    with fleet.worker("--processes", "2", "--grace", "0.5", *JSON) as worker:
        started(worker, times=2)
        fleet.enqueue("WEDGED_IN_TIME", {})
        fleet.until(lambda: events(worker, "wedged"))
        began = time.monotonic()
        worker.terminate()
        assert 3 == worker.wait(SOON)
        assert 0.5 + LAST_PATIENCE < time.monotonic() - began
    assert 1 == fleet.count()
    [line] = _killed(worker)
    assert "has not ended in time after it was told to; it is killed" in line


def test_a_wedged_child_at_a_second_signal(fleet: Fleet):
    """It is killed some seconds after that, whatever the grace is."""
    with fleet.worker("--processes", "2", "--grace", "600", *JSON) as worker:
        started(worker, times=2)
        fleet.enqueue("WEDGED_IN_TIME", {})
        fleet.until(lambda: events(worker, "wedged"))
        worker.terminate()
        wait_until(lambda: events(worker, "worker.stopped"))  # the other one
        let_pass(1.5 * LAST_PATIENCE)
        assert [] == _killed(worker)
        worker.terminate()
        assert 3 == worker.wait(SOON)
    assert (1, 1) == (fleet.count(), len(_killed(worker)))


def test_a_child_that_does_not_end_after_its_run(monkeypatch):
    """A handler has left a thread behind, say, for which the interpreter waits."""
    monkeypatch.setattr(supervisor, "LAST_PATIENCE", 0.1)

    def run() -> int:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it came before
        threading.Thread(target=time.sleep, args=(60,), daemon=False).start()
        return 0

    told: list[Event] = []
    supervised = Supervisor(run, 1, Events([told.append]), drain=False, grace=0.1, silence=5.0)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(supervised.run()), daemon=True)
    thread.start()
    wait_until(lambda: [True] == [each.signs.came_back for each in supervised.children.values()])
    supervised._pass_on()
    thread.join(20)
    assert ([3], ["worker.killed", "worker.died"]) == (codes, [event.name for event in told])


# -- how long silence is to be borne --------------------------------------------------------------


def test_silence_before_the_first_sign_of_life():
    signs = VitalSigns()
    signs.place().begin(1.0, None)
    assert math.inf == signs.bearable_until(10.0)


def test_silence_while_nothing_runs():
    signs = VitalSigns()
    signs.beat()
    place = signs.place()
    place.begin(300.0, None)
    place.end()
    assert signs.last + 10.0 == signs.bearable_until(10.0)
    assert signs.last + 13.0 == signs.bearable_until(10.0, since=signs.last + 3.0)


def test_a_handler_that_comes_back_after_long_silence():
    """It held the interpreter within its time, and nobody else could give a sign of life yet."""
    signs = VitalSigns()
    signs.beat()
    place = signs.place()
    place.begin(300.0, None)
    signs._times[0] -= 100.0
    place.end()
    assert signs.bearable_until(10.0) > time.monotonic() + 5.0


@pytest.mark.parametrize(
    ("running", "most"),
    [
        ([(300.0, None)], 310),
        ([(None, None)], math.inf),
        ([(None, None), (300.0, None), (60.0, None)], 70),
        ([(None, 60.0)], 60),
        ([(None, 1.0)], 10),
        ([(5.0, 60.0)], 15),
        ([(-100.0, None)], 10),
    ],
)
def test_silence_while_handlers_run(running, most):
    """Until the time of the first of them is over, and some seconds; a lease ends, too."""
    signs = VitalSigns()
    signs.beat()
    for seconds, lease in running:
        signs.place().begin(seconds, lease)
    assert most == pytest.approx(signs.bearable_until(10.0) - signs.last, abs=1.0)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("make", [SyncFace, AsyncFace])
def test_what_a_lane_tells(make, fails):
    """How long its handler may run, as long as it runs."""
    signs = VitalSigns()
    signs.beat()
    told = []

    def run() -> None:
        told.append(signs.bearable_until(10.0) - signs.last)
        if fails:
            raise ValueError

    async def run_async() -> None:
        run()

    watchdog = SimpleNamespace(guard=lambda *_, **__: nullcontext(), see=lambda _: signs.place())
    face = make(None, None, SimpleNamespace(), watchdog)
    face.wait = asyncio.run
    function = run if make is SyncFace else run_async
    with pytest.raises(ValueError) if fails else nullcontext():
        face.call(
            SimpleNamespace(timeout=60.0, lease=None, function=function), (), SimpleNamespace()
        )
    assert [pytest.approx(70, abs=1.0)] == told
    assert signs.last + 10.0 == signs.bearable_until(10.0)


def test_signs_of_another_process():
    """What one writes after the fork the other one reads, and their clocks are the same."""
    signs = VitalSigns()

    def live() -> None:
        signs.beat()
        signs.come_back()

    before = time.monotonic()
    process = multiprocessing.get_context("fork").Process(target=live)
    process.start()
    process.join()
    assert before < signs.last < time.monotonic()
    assert (True, False) == (signs.came_back, VitalSigns().came_back)


def test_more_lanes_than_there_are_places():
    """Those share one: in a worker without a supervisor stuck lanes are replaced without end."""
    signs = VitalSigns()
    signs.beat()
    for _ in range(LANES + 5):
        signs.place().begin(60.0, None)
    assert signs.bearable_until(10.0) == pytest.approx(time.monotonic() + 70, abs=5.0)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_process_that_is_stopped():
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: is_stopped(process.pid))
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: not is_stopped(process.pid))
        process.kill()
    assert not is_stopped(process.pid)
