"""What happens to tasks and workers, as values, and as structured log lines of the stdlib."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

log = logging.getLogger("pgtask_sa")

LATELY = 10.0  # seconds


@dataclass(frozen=True)
class Event:
    """Something that happened, with the fields that belong to it.

    Args:
        name: such as ``task.done``, ``task.retry``, ``task.buried``, ``worker.started``.
        message: one line for people.
        fields: the same for programs: task_id, task_type, attempt, seconds, ..
        level: of the stdlib's logging.

    Example:
        >>> Event("task.done", "task 7 A done", {"task_id": 7}).fields["task_id"]
        7
    """

    name: str
    message: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    level: int = logging.INFO


Listener: TypeAlias = Callable[[Event], None]


class Events:
    """Tells the log, and whoever else listens, what happens.

    Args:
        listeners: called with every `Event`.
        shows_values: what is told and kept of errors may hold params, rows and SQL parameters.

    Example:
        >>> seen = []
        >>> Events([seen.append]).emit("worker.started", "started", concurrency=4)
        >>> seen[0].name, seen[0].fields
        ('worker.started', {'concurrency': 4})
    """

    def __init__(
        self, listeners: list[Listener] | None = None, *, shows_values: bool = False
    ) -> None:
        self.shows_values = shows_values
        self._told: dict[str, float] = {}
        self.listeners = [] if listeners is None else listeners  # the caller may still add some

    def is_news(self, what: str, lately: float = LATELY) -> bool:
        """Say whether this has not been told lately, of what may happen again and again.

        Args:
            what: names it; there may be few of them.
            lately: seconds.
        """
        now = time.monotonic()
        if now - self._told.get(what, -math.inf) < lately:
            return False
        self._told[what] = now
        return True

    def wants(self, level: int) -> bool:
        """Say whether anybody would notice an event; spares a busy worker the making of it."""
        return bool(self.listeners) or log.isEnabledFor(level)

    def emit(self, name: str, message: str, *, level: int = logging.INFO, **fields: Any) -> None:
        """Tell it. A listener that fails is logged and never stops the worker."""
        if not self.wants(level):
            return
        event = Event(name, message, fields, level)
        log.log(level, "%s", message, extra={"pgtask": {"event": name, **fields}})
        for listener in self.listeners:
            try:
                listener(event)
            except Exception:
                log.exception("a listener failed on %s", name)


class TextFormatter(logging.Formatter):
    """Log lines for people: time, process, level, message, then the fields as ``key=value``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s [%(process)s] %(levelname)-7s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Append the fields of our own records."""
        line = super().format(record)
        fields = getattr(record, "pgtask", None)
        if not fields:
            return line
        return line + "  " + " ".join(f"{key}={value}" for key, value in fields.items())


class JsonFormatter(logging.Formatter):
    """Log lines for programs: one JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Render time, process, level, message, fields and the traceback, if there is one."""
        entry: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "process": record.process,  # not `pid`: that is a field, of a child that is told of
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "pgtask", {}),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)
