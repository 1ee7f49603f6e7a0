"""Several worker processes under one parent: children that die or hang are replaced."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.process import BaseProcess

from pgtask_sa.events import Events
from pgtask_sa.signals import STOP_SIGNALS, blocked, routed
from pgtask_sa.vital_signs import VitalSigns, is_stopped

HEALTHY_AFTER = 10.0  # a child that lived this long resets the backoff
LONGEST_PAUSE = 5.0  # seconds; each child has its own
SILENCE = 10.0  # seconds without a sign of life, beyond what its handlers may take
LAST_PATIENCE = 5.0  # seconds for a child to end after its grace, or after a second signal
CUT_OFF = 3  # the exit code when tasks were still running at the end
REPLACE_ME = 4  # the exit code of a child in which a handler is stuck


@dataclass
class _Child:
    process: BaseProcess
    since: float
    pause: float  # before it was started
    ear: Connection  # where it says that it is about to be replaced
    signs: VitalSigns
    excused: float = 0.0  # when it was last seen to be silent for a good reason
    is_killed: bool = False  # by its supervisor

    @property
    def pid(self) -> int:
        assert self.process.pid is not None  # noqa: S101 - it was started
        return self.process.pid


class Supervisor:
    """Runs ``run`` in ``count`` forked processes; it never touches the database itself.

    A child that dies is replaced, with growing pauses when it dies at once again and again. One
    that is stuck is replaced as soon as it says so, while it finishes what else it runs. One that
    gives no sign of life for ``silence`` seconds longer than its handlers may take is killed.
    SIGTERM and SIGINT are passed on, as often as they come; who has not ended some seconds after
    its ``grace``, or after the second one, is killed.
    """

    def __init__(
        self,
        run: Callable[[], int],
        count: int,
        events: Events,
        *,
        drain: bool,
        grace: float = 30.0,
        silence: float | None = None,
    ) -> None:
        self.run_child = run
        self.count = count
        self.events = events
        self.drain = drain
        self.grace = grace
        self.silence = SILENCE if silence is None else silence
        self.signs = VitalSigns()  # in a child: its own
        self.children: dict[int, _Child] = {}
        self.context = multiprocessing.get_context("fork")
        self.due: list[tuple[float, float]] = []  # when others are started, after which pause
        self.stopping = False
        self.worst = 0
        self._replaced: set[int] = set()  # children that end, in whose place there is another
        self._mouth: Connection | None = None  # in a child
        self._beat = min(1.0, self.silence / 10)  # seconds between signs of life, and looks at them
        self._looked = time.monotonic()
        self._kill_at = math.inf  # all that have not ended by then

    def ask_for_another(self) -> None:
        """Have another process started in the place of this one; call it in a child."""
        if self._mouth is not None:
            self._mouth.send_bytes(b"!")

    def run(self) -> int:
        """Start the children, keep them alive, wait for their end."""
        with routed(self._pass_on):
            for _ in range(self.count):
                self._start()
            while self.children or (self.due and not self.stopping):
                self._wait()
        return self.worst

    def _pass_on(self) -> None:
        patience = LAST_PATIENCE if self.stopping else self.grace + LAST_PATIENCE
        self._kill_at = min(self._kill_at, time.monotonic() + patience)
        self.stopping = True
        for pid in self.children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def _start(self, pause: float = 0.0) -> None:
        ear, mouth = self.context.Pipe(duplex=False)
        signs = VitalSigns()
        process = self.context.Process(target=self._be_child, args=(mouth, signs))
        # A signal in between would miss the child here, and run our own handler over there.
        with blocked():
            if self.stopping:
                return
            process.start()
            child = _Child(process, time.monotonic(), pause, ear, signs)
            self.children[child.pid] = child
        mouth.close()

    def _be_child(self, mouth: Connection, signs: VitalSigns) -> None:
        self._mouth, self.signs = mouth, signs
        _child_main(self.run_child, signs, self._beat)

    def _wait(self) -> None:
        sentinels = [child.process.sentinel for child in self.children.values()]
        ears = [child.ear for pid, child in self.children.items() if self._heeds(pid)]
        wait_for_any([*sentinels, *ears], timeout=0.05 if self.due else self._beat)
        self._allow_for_a_freeze()
        for pid, child in list(self.children.items()):
            if child.process.exitcode is not None:
                del self.children[pid]
                self._ended(child)
            elif self._heeds(pid) and _asks(child.ear):
                self._replaced.add(pid)
                self._start()
            elif not child.is_killed:
                self._judge(child)
        self._start_due()

    # -- who hangs ---------------------------------------------------------------------------

    def _allow_for_a_freeze(self) -> None:
        """Blame nobody for a time in which this process stood still itself: so did all, maybe."""
        now = time.monotonic()
        late, self._looked = now - self._looked - self._beat, now
        if late > self.silence / 4:
            self._kill_at += late
            for child in self.children.values():
                child.excused = now

    def _judge(self, child: _Child) -> None:
        """Kill a child that hangs."""
        now = time.monotonic()
        silent = now - child.signs.last
        if now > self._kill_at:
            self._kill(child, "has not ended in time after it was told to")
        elif silent < self.silence / 2:
            return
        elif is_stopped(child.pid):
            child.excused = now  # at each look: when it goes on it needs a moment to give a sign
        elif now > child.signs.bearable_until(self.silence, child.excused):
            hangs = "its handler seems to hold the interpreter"
            self._kill(child, f"gave no sign of life for {silent:.0f} s, {hangs}")

    def _kill(self, child: _Child, why: str) -> None:
        child.is_killed = True
        child.process.kill()
        self.events.emit(
            "worker.killed",
            f"worker process {child.pid} {why}; it is killed",
            level=logging.ERROR,
        )

    # -- who ends ----------------------------------------------------------------------------

    def _heeds(self, pid: int) -> bool:
        """Say whether another may be started beside a child that ends.

        Not ever more of them: the next one may be stuck soon, too, while the first still finishes
        what else it runs.
        """
        room = len(self._replaced) < self.count
        return room and pid not in self._replaced and not self.stopping

    def _start_due(self) -> None:
        now = time.monotonic()
        ready = [each for each in self.due if each[0] <= now]
        self.due = [each for each in self.due if each[0] > now]
        for _, pause in ready:
            self._start(pause)

    def _ended(self, child: _Child) -> None:
        code, in_order = child.process.exitcode or 0, child.signs.came_back
        child.ear.close()
        is_replaced = child.pid in self._replaced
        self._replaced.discard(child.pid)
        if code == REPLACE_ME and is_replaced:
            return
        if code == REPLACE_ME and not self.stopping:
            self._start()
        elif self.stopping or (self.drain and in_order):
            self.worst = max(self.worst, self._last_code(child, code, in_order=in_order))
        elif is_replaced:
            self._tell_of_death(child, code, "another has taken its place")
        else:
            lived = time.monotonic() - child.since
            pause = 0.0 if lived > HEALTHY_AFTER else min(LONGEST_PAUSE, child.pause * 2 + 0.1)
            when = f"in {pause:.1f} s" if pause else "at once"
            self._tell_of_death(child, code, f"another is started {when}")
            self.due.append((time.monotonic() + pause, pause))

    def _last_code(self, child: _Child, code: int, *, in_order: bool) -> int:
        """Say what the end of a child means for the exit code of all."""
        if in_order and not child.is_killed:
            return code
        if code == -signal.SIGTERM:
            return 0  # it was told to stop before it had begun
        self._tell_of_death(child, code, "what it ran is back in the table")
        return CUT_OFF

    def _tell_of_death(self, child: _Child, code: int, then: str) -> None:
        ended = "has ended" if child.is_killed else "ended unasked"
        self.events.emit(
            "worker.died",
            f"worker process {child.pid} {ended}; {then}",
            level=logging.INFO if child.is_killed else logging.ERROR,
            exit_code=code,
        )


def _asks(ear: Connection) -> bool:
    try:
        return ear.poll() and bool(ear.recv_bytes())
    except EOFError:  # it dies this very moment
        return False


def _child_main(run: Callable[[], int], signs: VitalSigns, beat: float) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # a terminal sends Ctrl-C to parent and children alike; the parent passes it on, as SIGTERM
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    _live_under(os.getppid(), signs, beat)
    code = run()
    signs.come_back()  # not so when a handler ends the process, whatever the exit code
    sys.exit(code)


def _live_under(parent: int, signs: VitalSigns, beat: float) -> None:
    """Give signs of life to the parent; end when it is killed, as nobody supervises us then.

    In a thread that does nothing else: it waits for no database and for no lock, so that only who
    holds the interpreter can silence it.
    """

    def live() -> None:
        while os.getppid() == parent:
            signs.beat()
            time.sleep(beat)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=live, name="pgtask-sign-of-life", daemon=True).start()
