"""How far a drain has come: done, left and rate, on a terminal."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typing_extensions import Self

from pgtask_sa.events import Event

FINISHED = ("task.done", "task.buried")
RECOUNT_EVERY = 5.0


class DrainProgress:
    """Counts finished tasks over all processes of a worker and draws a bar while inside.

    Args:
        count_left: asks the database how many tasks can be claimed now.
        console: where to draw.
    """

    def __init__(self, count_left: Callable[[], int], console: Console) -> None:
        self.count_left = count_left
        self.console = console
        self.finished: Any = multiprocessing.get_context("fork").Value("Q", 0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._draw, daemon=True)

    def on_event(self, event: Event) -> None:
        """Count; give it to the worker as a listener."""
        if event.name in FINISHED:
            with self.finished.get_lock():
                self.finished.value += 1

    def __enter__(self) -> Self:
        """Start drawing."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Draw a last time and stop."""
        self._over.set()
        self._thread.join(5.0)

    def _draw(self) -> None:
        columns = (
            TextColumn("drain"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]} left, {task.fields[rate]}/s"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console, transient=False) as progress:
            bar = progress.add_task("drain", total=None, left="?", rate="0")
            since_count = RECOUNT_EVERY
            total = 0
            while not self._over.wait(0.2):
                since_count += 0.2
                if since_count >= RECOUNT_EVERY:
                    total, since_count = self.finished.value + self._left(), 0.0
                self._update(progress, bar, total)
            self._update(progress, bar, self.finished.value + self._left())

    def _left(self) -> int:
        try:
            return self.count_left()
        except Exception:  # noqa: BLE001 - a bar is no reason to stop
            return 0

    def _update(self, progress: Progress, bar: Any, total: int) -> None:
        done = self.finished.value
        elapsed = progress.tasks[bar].elapsed or 0.0
        rate = f"{done / elapsed:,.0f}" if elapsed else "0"
        left = f"{max(total - done, 0):,}"
        progress.update(bar, completed=done, total=max(total, done), left=left, rate=rate)
