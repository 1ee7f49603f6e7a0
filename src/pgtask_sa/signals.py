"""Being told to stop, by SIGTERM or SIGINT, while a worker starts and while it works."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class routed:  # noqa: N801 - reads as a clause
    """Route both signals to a stop function while inside; in the main thread only."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self.stop = stop
        self.before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self.before[number] = signal.signal(number, lambda *_: self.stop())

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


@contextmanager
def early() -> Iterator[list[bool]]:
    """End the program in order, exit code 0, when it is told to stop before it has begun to work.

    To import the handlers may take long, and so may whoever stops a service that only starts. What
    is imported may swallow the SystemExit, too: then the list is not empty.
    """
    told: list[bool] = []

    def leave() -> None:
        told.append(True)
        raise SystemExit(0)

    with routed(leave):
        yield told


@contextmanager
def blocked() -> Iterator[None]:
    """Let both signals wait while inside."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
