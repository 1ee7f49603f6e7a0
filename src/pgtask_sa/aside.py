"""Threads for what would hold an event loop up: those of the handlers, and the worker's own."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
MOST_HELPERS = min(32, (os.cpu_count() or 1) + 4)  # as many as asyncio's own


class Helpers(ThreadPoolExecutor):
    """The threads of ``asyncio.to_thread`` on an event loop; no exit of a process waits for them.

    The interpreter joins those of the standard executor at its end. One that waits for a network
    which is dead, or for whatever a handler began there, would keep a stopped worker from ending.

    Args:
        most: threads at once; more work than that waits its turn.
        name: of the threads, which are numbered.

    Example:
        >>> Helpers(1).submit(divmod, 7, 3).result()
        (2, 1)
    """

    def __init__(self, most: int = MOST_HELPERS, name: str = "pgtask-helper") -> None:
        super().__init__(1)  # of which no thread is ever started; asyncio insists on the class
        self._most, self._name = most, name
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._jobs = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._started = 0

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Have a function called in one of the threads."""
        future: Future[T] = Future()
        self._jobs.put((future, partial(fn, *args, **kwargs)))
        if not self._idle.acquire(blocking=False) and self._started < self._most:
            self._started += 1
            name = f"{self._name}-{self._started}"
            threading.Thread(target=self._work, name=name, daemon=True).start()
        return future

    def shutdown(self, *_args: Any, **_options: Any) -> None:
        """Let each thread end when it has nothing more to do; wait for none, whatever is asked."""
        for _ in range(self._started):
            self._jobs.put(None)

    def _work(self) -> None:
        while job := self._jobs.get():
            _call(*job)
            del job  # what it holds may be large
            self._idle.release()


def _call(future: Future[T], function: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:  # noqa: BLE001 - it is for whoever waits for the result
        future.set_exception(error)


# A handler that was cancelled leaves its `asyncio.to_thread()` behind. If the worker had its
# threads from there too, a handful of these would be the end of all lanes.
_OWN = Helpers(name="pgtask-own")


async def aside(work: Callable[[], T]) -> T:
    """Call something in a thread of the worker's own, while the event loop goes on."""
    return await asyncio.get_running_loop().run_in_executor(_OWN, work)
