"""The processes on the demo's stage: started, watched, and never left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

EXAMPLES = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "support")]

from guardian import Guardian  # noqa: E402

T = TypeVar("T")


class DemoError(Exception):
    """Something did not happen that should have."""


def wait_for(condition: Callable[[], T], what: str, timeout: float = 20) -> T:
    """Look every few milliseconds until the condition returns something true; return that."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise DemoError(f"waited {timeout:g} s in vain: {what}")
        time.sleep(0.005)
    return value


class Program:
    """A process of ours, `python -m ..` in the examples' directory; its output is kept."""

    def __init__(self, *arguments: str, env: dict[str, str]) -> None:
        self.name = arguments[0]
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=EXAMPLES,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            # A Ctrl-C at the terminal is for the demo, which ends its processes in order.
            start_new_session=True,
        )
        self._guardian = Guardian('kill -KILL "-$1"', str(self.process.pid))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.append(line.rstrip("\n"))
            self.heard(self.lines[-1])

    def heard(self, line: str) -> None:
        """Do something about a line of output; for subclasses."""

    def find(self, pattern: str, timeout: float = 20) -> re.Match[str]:
        """Wait for a line of output with this in it."""

        def look() -> re.Match[str] | None:
            found = next(
                filter(None, (re.search(pattern, line) for line in list(self.lines))), None
            )
            if found is None and self.process.poll() is not None:
                raise DemoError(f"{self.name} ended")
            return found

        return wait_for(look, f"{self.name} printing {pattern!r}", timeout)

    def kill(self) -> None:
        """SIGKILL: the end that no program can prepare for."""
        self.process.kill()
        self.process.wait()

    def wait(self, timeout: float = 20) -> int:
        """Wait for the end; return the exit code, which is -9 if the end had to be brought."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
        self._reader.join(timeout=1)
        return self.process.returncode

    def stop(self) -> int:
        """SIGTERM; return the exit code."""
        self.process.terminate()
        return self.wait()

    def close(self) -> None:
        """Leave nothing behind, whatever state it is in."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._guardian.dismiss()


class WorkerProgram(Program):
    """A worker, whose log lines are events in JSON."""

    def __init__(self, tell: Callable[[dict[str, Any]], None], env: dict[str, str]) -> None:
        self.events: list[dict[str, Any]] = []
        self._tell = tell
        options = ("--concurrency", "4", "--report-interval", "1", "--log-format", "json")
        super().__init__("pgtask_sa.worker", "signup.handlers:tasks", *options, env=env)

    def heard(self, line: str) -> None:
        with contextlib.suppress(ValueError):
            self.events.append(json.loads(line))
            self._tell(self.events[-1])

    def count(self, event: str) -> int:
        return sum(e.get("event") == event for e in list(self.events))
