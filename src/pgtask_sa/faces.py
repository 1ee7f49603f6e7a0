"""The two kinds of handlers: plain functions in a thread, coroutine functions on an event loop."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.util import await_only

from pgtask_sa.aside import aside
from pgtask_sa.calls import T, in_one_process, in_one_process_async
from pgtask_sa.errors import TaskFailed
from pgtask_sa.handlers import Handler
from pgtask_sa.settle import Claimed, timed_out
from pgtask_sa.watchdog import Guarded, Watchdog

SECOND_GRACE = 2.0  # for a coroutine that was cancelled, until its connection is cut


class SyncFace:
    """Plain functions, called in the lane's own thread."""

    def __init__(
        self,
        connection: Connection,
        make: Callable[..., Session],
        lane: Guarded,
        watchdog: Watchdog,
    ) -> None:
        self.connection = connection
        self.make = make
        self.lane = lane
        self.watchdog = watchdog
        self.place = watchdog.see(lane)

    def open(self, **options: Any) -> tuple[Session, Any]:
        """Open a Session on the lane's connection."""
        session = self.make(bind=self.connection, **options)
        return session, session

    def aside(self, work: Callable[[], T]) -> T:
        """Do it here; it is this thread's own time."""
        return work()

    def call(self, handler: Handler, arguments: tuple[Any, ...], claimed: Claimed) -> None:
        """Call the function; a coroutine that it returns would never run, so that is a failure."""
        claimed.started = time.monotonic()
        self.place.begin(handler.timeout, handler.lease)
        try:
            with self.watchdog.guard(handler.timeout, self.lane, claimed):
                result = in_one_process(handler.function, arguments)
        finally:
            self.place.end()
        if result is not None and inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()
            raise TaskFailed("the handler returned something to be awaited; make it `async def`")


class AsyncFace:
    """Coroutine functions, awaited on the event loop from within the synchronous code."""

    def __init__(
        self,
        connection: AsyncConnection,
        make: Callable[..., AsyncSession],
        lane: Guarded,
        watchdog: Watchdog,
    ) -> None:
        self.connection = connection
        self.make = make
        self.lane = lane
        self.watchdog = watchdog
        self.place = watchdog.see(lane)
        self._running: asyncio.Future[Any] | None = None

    def open(self, **options: Any) -> tuple[Session, Any]:
        """Open an AsyncSession on the lane's connection, and the Session inside it."""
        session = self.make(bind=self.connection, **options)
        return session.sync_session, session

    def aside(self, work: Callable[[], T]) -> T:
        """Do it in a thread, while the event loop goes on."""
        return self.wait(aside(work))

    def wait(self, awaitable: Awaitable[T]) -> T:
        """Await something, from within the synchronous code."""
        return await_only(awaitable)  # also where the connection is lost

    def call(self, handler: Handler, arguments: tuple[Any, ...], claimed: Claimed) -> None:
        """Await the coroutine; within its time, if there is a limit."""
        claimed.started = time.monotonic()
        # the watchdog is for a coroutine that blocks the loop, where no other timer runs
        grace = 2 * SECOND_GRACE
        self.place.begin(handler.timeout, handler.lease)
        try:
            with self.watchdog.guard(handler.timeout, self.lane, claimed, grace=grace):
                self.wait(self._await(handler, arguments, claimed))
        finally:
            self.place.end()

    async def _await(self, handler: Handler, arguments: tuple[Any, ...], claimed: Claimed) -> None:
        running = self._running = asyncio.ensure_future(_outcome(handler.function(*arguments)))
        try:
            await asyncio.wait([running], timeout=handler.timeout)
        except asyncio.CancelledError:  # the worker stops
            await self._cancel(running)
            raise
        finally:
            self._running = None
        if not running.done():
            if not await self._cancel(running):
                await aside(partial(self.watchdog.expire, self.lane, claimed))
            raise timed_out(handler.timeout or 0.0)
        error = running.result()
        if error is not None:
            raise error

    def interrupt(self) -> None:
        """Cancel the handler that runs; call it on the event loop."""
        if self._running is not None:
            self._running.cancel()

    @staticmethod
    async def _cancel(running: asyncio.Future[Any]) -> bool:
        running.cancel()
        await asyncio.wait([running], timeout=SECOND_GRACE)
        return running.done()


async def _outcome(coroutine: Any) -> BaseException | None:
    """Return what a coroutine raises: SystemExit must not get out, it would end the event loop."""
    try:
        await in_one_process_async(coroutine)
    except BaseException as error:  # noqa: BLE001
        return error
    return None
