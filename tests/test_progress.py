"""The bar of a drain, on a real pseudo-terminal."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from sqlalchemy import Engine

from pgtask_sa import TaskSession

SUPPORT = Path(__file__).parent / "support"


def terminal_output(command: list[str], env: dict[str, str]) -> tuple[int, str]:
    """Run a command whose standard error is a terminal; return its exit code and what it shows."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs, env=env) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:  # Linux: the other side is closed
                break
            if not part:
                break
            shown += part
    os.close(ours)
    return process.returncode, re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())


def test_a_drain_shows_how_far_it_is(engine: Engine, db_url: str) -> None:
    """On a terminal a drain counts what is done and left, over all its processes."""
    with TaskSession(engine) as session:
        session.enqueue_many("NOTHING", [{"i": i} for i in range(40)])
        session.commit()
    worker = [sys.executable, "-m", "pgtask_sa.worker", "progress_tasks:tasks"]
    code, shown = terminal_output(
        [*worker, "--drain", "--processes", "2", "--database-url", db_url],
        {**os.environ, "PYTHONPATH": str(SUPPORT), "TERM": "xterm", "COLUMNS": "100"},
    )
    assert 0 == code
    assert "40/40" in shown
    assert "0 left" in shown
