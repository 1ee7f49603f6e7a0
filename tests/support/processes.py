"""Real processes under test: started, watched, killed, and never left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from guardian import Guardian
from waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self

_KILL_GROUP = 'kill -KILL "-$1"'


class WatchedProcess:
    """A process in a process group of its own, whose output can be read while it runs.

    Standard output and standard error arrive together, in order, in `lines`. At the end of the
    `with` block, and when the test run itself is killed, the whole group is killed.
    """

    def __init__(
        self,
        *command: str,
        pythonpath: Sequence[str | Path] = (),
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.command = command
        self._cwd = cwd
        self._env = _environment(pythonpath, env or {})
        self._lines: list[str] = []
        self._ended = False
        self._news = threading.Condition()

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self.command,
            cwd=self._cwd,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._guardian = Guardian(_KILL_GROUP, str(self.pid))
        self._reader = threading.Thread(
            target=self._read, name=f"output of {self.pid}", daemon=True
        )
        self._reader.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._guardian.dismiss()
        self._reader.join(timeout=5)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()

    @property
    def pid(self) -> int:
        """The process id, which is the id of the group as well."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process has not ended yet."""
        return self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    @property
    def lines(self) -> list[str]:
        """A copy of the lines printed so far, without their line ends."""
        with self._news:
            return list(self._lines)

    @property
    def output(self) -> str:
        """Everything printed so far."""
        return "\n".join(self.lines)

    def kill(self) -> None:
        """SIGKILL, to this process alone: the end that nobody can prepare for."""
        self._process.kill()

    def terminate(self) -> None:
        """SIGTERM, to this process alone, as an init system stops a service."""
        self._process.terminate()

    def interrupt(self) -> None:
        """SIGINT, to the whole group, as a Ctrl-C at the terminal."""
        os.killpg(self.pid, signal.SIGINT)

    def suspend(self) -> None:
        """SIGSTOP, to the whole group: alive, connected, and doing nothing."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT, to the whole group: the end of `suspend`."""
        os.killpg(self.pid, signal.SIGCONT)

    def wait(self, timeout: float = 10) -> int:
        """Wait for the end and return the exit code; the test fails if it does not come in time."""
        timeout *= PATIENCE
        try:
            returncode = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout:g} s. {self._report()}") from None
        # What it printed last may still be in the pipe. A grandchild that holds the pipe open is no
        # reason to wait for ever.
        self._reader.join(timeout=1)
        return returncode

    def wait_for_line(self, pattern: str, timeout: float = 10, start: int = 0) -> re.Match[str]:
        """Wait for a line (from number `start` on) with `pattern` in it; return the match."""
        timeout *= PATIENCE
        deadline = time.monotonic() + timeout
        with self._news:
            while True:
                for line in self._lines[start:]:
                    if found := re.search(pattern, line):
                        return found
                start = max(start, len(self._lines))
                left = deadline - time.monotonic()
                if self._ended or left <= 0:
                    break
                self._news.wait(left)
        reason = "the output ended" if self._ended else f"waited {timeout:g} s"
        raise AssertionError(f"no line like {pattern!r} ({reason}). {self._report()}")

    def _read(self) -> None:
        stdout = self._process.stdout
        for line in stdout or ():
            with self._news:
                self._lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def _report(self) -> str:
        return f"{' '.join(self.command)} (exit code {self.returncode}) printed:\n{self.output}"


class WorkerProcess(WatchedProcess):
    """`python -m pgtask_sa.worker TARGET --database-url URL ..` as a process of its own."""

    def __init__(
        self,
        target: str,
        url: str,
        *args: str,
        pythonpath: Sequence[str | Path] = (),
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        worker = (sys.executable, "-m", "pgtask_sa.worker", target, "--database-url", url)
        super().__init__(*worker, *args, pythonpath=pythonpath, cwd=cwd, env=env)


def _environment(pythonpath: Sequence[str | Path], extra: Mapping[str, str]) -> dict[str, str]:
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths = [*(str(Path(path).resolve()) for path in pythonpath), *inherited]
    return {
        **os.environ,
        # Lines must arrive when they are printed, not when the process ends.
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        **extra,
    }
