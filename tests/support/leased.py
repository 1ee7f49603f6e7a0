"""Handlers of the leased mode for tests, written once for both kinds, sync and async."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from sqlalchemy import text

if TYPE_CHECKING:
    from running import Running

KINDS = ("sync", "async")


def mark(session: Any, i: int) -> None:
    """Write a number in the handler's transaction."""
    session.execute(text("insert into mark values (:i)"), {"i": i})


def nothing(_session: Any, _task: Any) -> None:
    """Do nothing, for a body that has no such part."""


class Long:
    """A handler that does something, waits until it is released, and does something more.

    Attributes:
        starts: the number of the attempt, for each start.
        release: what it waits for; set it.
        waiting: how many wait now.
    """

    def __init__(self, first: Any = nothing, last: Any = nothing) -> None:
        self.first = first
        self.last = last
        self.starts: list[int] = []
        self.errors: list[BaseException] = []
        self.release = threading.Event()
        self.waiting = 0

    def register(self, running: Running, kind: str, name: str = "LONG", **options: Any) -> Long:
        """Register it as sync or async; in the leased mode unless the options say otherwise."""
        options = {"mode": "leased", "backoff": 0, **options}
        if options["mode"] == "leased":
            options.setdefault("lease", 2)
        chosen = self._sync if kind == "sync" else self._awaited

        if kind == "sync":

            def sync(session, params, task):
                chosen(session, task)

            running.tasks.handler(name, **options)(sync)
        else:

            async def awaited(session, params, task):
                await chosen(session, task)

            running.tasks.handler(name, **options)(awaited)
        return self

    def _sync(self, session: Any, task: Any) -> None:
        self._begin(session, task)
        self.waiting += 1
        self.release.wait(100)
        self.waiting -= 1
        self._end(session, task)

    async def _awaited(self, session: Any, task: Any) -> None:
        await session.run_sync(self._begin, task)
        self.waiting += 1
        try:
            while not self.release.is_set():  # noqa: ASYNC110 - it is set by another thread
                await asyncio.sleep(0.01)
        finally:
            self.waiting -= 1
        await session.run_sync(self._end, task)

    def _begin(self, session: Any, task: Any) -> None:
        self.starts.append(task.attempt)
        self.first(session, task)

    def _end(self, session: Any, task: Any) -> None:
        try:
            self.last(session, task)
        except BaseException as error:
            self.errors.append(error)
            raise


def brief(running: Running, kind: str, name: str, body: Any, **options: Any) -> Long:
    """Register a leased handler that does not wait."""
    handler = Long(body)
    handler.release.set()
    return handler.register(running, kind, name, **options)
