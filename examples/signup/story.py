"""What the demo shows on the terminal: what happens, while it happens, and the count at the end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table


@dataclass(frozen=True)
class Check:
    """Something that was counted, and what it should be."""

    what: str
    expected: object
    actual: object

    @property
    def holds(self) -> bool:
        return self.expected == self.actual


class Story:
    """Prints lines with the time that has passed; readable in a log file as well."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        if not self._console.is_terminal:
            self._console.width = 100
        self._start = time.monotonic()
        self._told: set[str] = set()
        self.tell_done = False

    def chapter(self, title: str) -> None:
        self._console.print(f"\n[bold]{escape(title)}[/bold]")

    def tell(self, who: str, what: str, style: str = "default") -> None:
        elapsed = time.monotonic() - self._start
        line = f"{elapsed:6.2f} s  [cyan]{who:<8}[/cyan]  {escape(what)}"
        self._console.print(line, style=style, soft_wrap=True)

    def hear(self, event: dict[str, Any]) -> None:
        """Tell what a worker tells, less the trivial."""
        name = event.get("event")
        if name == "task.retry":
            self.tell("worker", _retry_line(event), "yellow")
        elif name in ("task.unhandled", "task.buried") and event["message"] not in self._told:
            self._told.add(event["message"])  # what waits is reported every second
            self.tell("worker", event["message"], "yellow")
        elif name == "task.done" and self.tell_done:
            self.tell("worker", _done_line(event))

    def show(self, checks: list[Check]) -> None:
        table = Table("what", "expected", "counted", "", box=SIMPLE_HEAD)
        for check in checks:
            mark = "[green]ok[/]" if check.holds else "[bold red]WRONG[/]"
            table.add_row(check.what, escape(str(check.expected)), escape(str(check.actual)), mark)
        self.chapter("Counted at the end")
        self._console.print(table)


def _done_line(event: dict[str, Any]) -> str:
    attempt = f", in attempt {event['attempt']}" if event["attempt"] > 1 else ""
    return f"task {event['task_id']} {event['task_type']} is done{attempt}"


def _retry_line(event: dict[str, Any]) -> str:
    return (
        f"task {event['task_id']} {event['task_type']} failed in attempt {event['attempt']}"
        f" ({event['error']}); again in {event['delay']:.1f} s"
    )
