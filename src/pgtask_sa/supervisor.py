"""Several worker processes under one parent: children that die are replaced."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from typing import NamedTuple

from pgtask_sa.events import Events
from pgtask_sa.signals import STOP_SIGNALS, blocked, routed

HEALTHY_AFTER = 10.0  # a child that lived this long resets the backoff
LONGEST_PAUSE = 5.0  # seconds; each child has its own
CUT_OFF = 3  # the exit code when tasks were still running at the end
REPLACE_ME = 4  # the exit code of a child in which a handler is stuck


class _Child(NamedTuple):
    process: BaseProcess
    since: float
    came_back: Event  # set at the end of its run
    pause: float  # before it was started
    ear: Connection  # where it says that it is about to be replaced


class Supervisor:
    """Runs ``run`` in ``count`` forked processes; it never touches the database itself.

    A child that dies is replaced, with growing pauses when it dies at once again and again. One
    that is stuck is replaced as soon as it says so, while it finishes what else it runs.
    SIGTERM and SIGINT are passed on, as often as they come.
    """

    def __init__(self, run: Callable[[], int], count: int, events: Events, *, drain: bool) -> None:
        self.run_child = run
        self.count = count
        self.events = events
        self.drain = drain
        self.children: dict[int, _Child] = {}
        self.context = multiprocessing.get_context("fork")
        self.due: list[tuple[float, float]] = []  # when others are started, after which pause
        self.stopping = False
        self.worst = 0
        self._replaced: set[int] = set()  # children that end, in whose place there is another
        self._mouth: Connection | None = None  # in a child

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
        self.stopping = True
        for pid in self.children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def _start(self, pause: float = 0.0) -> None:
        came_back = self.context.Event()
        ear, mouth = self.context.Pipe(duplex=False)
        process = self.context.Process(target=self._be_child, args=(came_back, mouth))
        # A signal in between would miss the child here, and run our own handler over there.
        with blocked():
            if self.stopping:
                return
            process.start()
            assert process.pid is not None  # noqa: S101 - it was just started
            self.children[process.pid] = _Child(process, time.monotonic(), came_back, pause, ear)
        mouth.close()

    def _be_child(self, came_back: Event, mouth: Connection) -> None:
        self._mouth = mouth
        _child_main(self.run_child, came_back)

    def _wait(self) -> None:
        sentinels = [child.process.sentinel for child in self.children.values()]
        ears = [child.ear for pid, child in self.children.items() if self._heeds(pid)]
        wait_for_any([*sentinels, *ears], timeout=0.05 if self.due else 1.0)
        for pid, child in list(self.children.items()):
            if child.process.exitcode is not None:
                del self.children[pid]
                self._ended(child)
            elif self._heeds(pid) and _asks(child.ear):
                self._replaced.add(pid)
                self._start()
        self._start_due()

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
        code, in_order = child.process.exitcode or 0, child.came_back.is_set()
        child.ear.close()
        is_replaced = child.process.pid in self._replaced
        self._replaced.discard(child.process.pid or 0)
        if code == REPLACE_ME and is_replaced:
            return
        if code == REPLACE_ME and not self.stopping:
            self._start()
        elif self.stopping or (self.drain and in_order):
            self.worst = max(self.worst, self._last_code(child, code, in_order=in_order))
        else:
            self._tell_of_death(child, code, "another takes its place")
            if is_replaced:
                return
            lived = time.monotonic() - child.since
            pause = 0.0 if lived > HEALTHY_AFTER else min(LONGEST_PAUSE, child.pause * 2 + 0.1)
            self.due.append((time.monotonic() + pause, pause))

    def _last_code(self, child: _Child, code: int, *, in_order: bool) -> int:
        """Say what the end of a child means for the exit code of all."""
        if in_order:
            return code
        if code == -signal.SIGTERM:
            return 0  # it was told to stop before it had begun
        self._tell_of_death(child, code, "what it ran is back in the table")
        return CUT_OFF

    def _tell_of_death(self, child: _Child, code: int, then: str) -> None:
        self.events.emit(
            "worker.died",
            f"worker process {child.process.pid} ended unasked; {then}",
            level=logging.ERROR,
            exit_code=code,
        )


def _asks(ear: Connection) -> bool:
    try:
        return ear.poll() and bool(ear.recv_bytes())
    except EOFError:  # it dies this very moment
        return False


def _child_main(run: Callable[[], int], came_back: Event) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # a terminal sends Ctrl-C to parent and children alike; the parent passes it on, as SIGTERM
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    _die_with_parent(os.getppid())
    code = run()
    came_back.set()  # not so when a handler ends the process, whatever the exit code
    sys.exit(code)


def _die_with_parent(parent: int) -> None:
    """End when the parent is killed: a worker that nobody supervises must not live on."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="pgtask-orphan-watch", daemon=True).start()
