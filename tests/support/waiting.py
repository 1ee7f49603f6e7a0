"""Waiting for something to become true, the only way in which a test waits."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T],
    timeout: float = 10,
    interval: float = 0.01,
    message: str | Callable[[], str] = "the condition did not come true",
) -> T:
    """Call `condition` every `interval` seconds until it returns something true, and return that.

    After `timeout` seconds the test fails with `message`, which may be a callable, evaluated at the
    end.
    """
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            text = message() if callable(message) else message
            raise AssertionError(f"{text} (waited {timeout:g} s, last value {value!r})")
        time.sleep(interval)
    return value


def let_pass(seconds: float) -> None:
    """Let time pass, in the few tests in which time itself is what matters."""
    end = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > end, seconds + 5)
