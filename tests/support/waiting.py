"""Waiting for something to become true, the only way in which a test waits."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

# Tests say how long things take where nothing else runs. Where something does they take longer, and
# a test that waits longer for what comes in the end proves the same.
PATIENCE = 3.0

# Seconds: at once, or within a second or two, and something else runs. What would happen without
# that which is tested (a look of habit, a time limit) must be far away.
SOON = 5.0


def wait_until(
    condition: Callable[[], T],
    timeout: float = 10,
    interval: float = 0.01,
    message: str | Callable[[], str] = "the condition did not come true",
) -> T:
    """Call `condition` every `interval` seconds until it returns something true, and return that.

    After `timeout` seconds (times `PATIENCE`) the test fails with `message`, which may be a
    callable, evaluated at the end.
    """
    timeout *= PATIENCE
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
