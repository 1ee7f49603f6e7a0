"""The thread of the event loop, on which the async lanes of a worker process live."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

from sqlalchemy import URL

from pgtask_sa.aside import Helpers
from pgtask_sa.engines import worker_async_engine
from pgtask_sa.failures import headline
from pgtask_sa.lanes import AsyncLane, Shared
from pgtask_sa.scribe import Scribe


class LoopThread(threading.Thread):
    """The thread of the event loop, with the async lanes on it."""

    def __init__(self, shared: Shared, url: URL, count: int) -> None:
        super().__init__(name="pgtask-loop", daemon=True)
        self.shared = shared
        self.url = url
        self.count = count
        self.lanes: list[AsyncLane] = []
        self.loop: asyncio.AbstractEventLoop | None = None
        self.on_death: Callable[[BaseException], object] = lambda _error: None
        self.limit: float | None = None  # seconds for a transaction
        self._running = count
        self._abandoned = False

    def run(self) -> None:
        """Run all lanes to their end."""
        # psycopg cannot work with the loop that is the default on Windows
        loop = asyncio.SelectorEventLoop() if sys.platform == "win32" else asyncio.new_event_loop()
        try:
            self._run_to_end(loop)
        except BaseException as error:  # noqa: BLE001 - whatever it is, somebody must hear of it
            self.on_death(error)
        finally:
            loop.close()

    def _run_to_end(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run the loop on when a handler stops it.

        asyncio lets SystemExit and KeyboardInterrupt of any task out of the loop, after it has
        handed them to whoever awaits that task. So the handler fails as with any other error, if
        only the loop goes on.
        """
        main = loop.create_task(self._main())
        while not (main.done() or loop.is_closed()):
            try:
                loop.run_until_complete(main)
            except BaseException as error:  # noqa: BLE001
                if not main.done():
                    self._tell(error)
        main.result()

    def _tell(self, error: BaseException) -> None:
        self.shared.events.emit(
            "loop.interrupted",
            f"an async handler has stopped the event loop, which goes on: {headline(error)}",
            level=logging.ERROR,
        )

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.loop.set_default_executor(Helpers())
        shown = self.shared.events.shows_values
        engine = worker_async_engine(self.url, self.count, self.limit, show_values=shown)
        scribe = Scribe(self.shared.presence)
        self.lanes = [AsyncLane(self.shared, engine, scribe, n + 1) for n in range(self.count)]
        running = [lane.start() for lane in self.lanes]
        for task in running:
            await asyncio.wait([task])
            self._running -= 1
        scribe.close()
        await engine.dispose()

    def give_up(self) -> None:
        """Let the lanes end on a loop that nobody runs any more; call it in the loop's thread."""
        left = [lane.task for lane in self.lanes if lane.task is not None and not lane.task.done()]
        if not left or self.loop is None or self.loop.is_closed():
            return
        for lane in self.lanes:
            lane.cut()
        with suppress(BaseException):
            self.loop.run_until_complete(asyncio.wait(left, timeout=1.0))

    def busy(self) -> int:
        """Count the lanes that have not ended yet."""
        return self._running if self.is_alive() and not self._abandoned else 0

    def abandon(self) -> None:
        """Leave the loop to itself, that a handler blocks; when it comes back, it ends."""
        self._abandoned = True
        self.cut()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread, if it was ever started."""
        if self.ident is not None:
            super().join(timeout)

    def cut(self) -> None:
        """Cut off all lanes."""
        if self.loop is not None and self.is_alive():
            with suppress(RuntimeError):  # it has ended this very moment
                for lane in self.lanes:
                    self.loop.call_soon_threadsafe(lane.cut)
