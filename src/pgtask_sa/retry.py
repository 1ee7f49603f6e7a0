"""What the outcome of an attempt means: retry, bury or give back. Pure: no database, no clock."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeAlias

from pgtask_sa.errors import ConfigurationError, WorkerDied

Seconds: TypeAlias = "float | timedelta"

DEFAULT_MAX_ATTEMPTS = 10
LONGEST_DELAY = timedelta(days=365)


def as_seconds(value: Seconds, name: str) -> float:
    """Turn a number of seconds or a timedelta into seconds; refuse anything negative or odd."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise ConfigurationError(f"{name} must be seconds or a timedelta, got {value!r}")
    if not 0 <= seconds <= LONGEST_DELAY.total_seconds():  # also catches NaN
        if seconds > 0:
            raise ConfigurationError(f"{name} must be at most 365 days, got {value!r}")
        raise ConfigurationError(f"{name} must be 0 or more seconds, got {value!r}")
    return float(seconds)


class Retry(Exception):  # noqa: N818 - raised by handlers as a word of command
    """Raise it in a handler to fail this attempt and be tried again after a delay of your choice.

    The attempt counts: after the handler's ``max_attempts`` the task is buried all the same.

    Args:
        reason: kept with the task as its last error.
        after: seconds or timedelta until the next attempt; None takes the handler's backoff.

    Example:
        >>> raise Retry("rate limited", after=30)
        Traceback (most recent call last):
        pgtask_sa.retry.Retry: rate limited
    """

    after: Seconds | None = None  # also for a subclass that does not call our __init__

    def __init__(self, reason: str = "", *, after: Seconds | None = None) -> None:
        super().__init__(reason)
        self.after = None if after is None else as_seconds(after, "Retry after")


class Snooze(Exception):  # noqa: N818
    """Raise it in a handler to run the task later without burning an attempt.

    Args:
        delay: seconds or timedelta until the task is looked at again.

    Example:
        >>> Snooze(timedelta(minutes=5)).delay
        300.0
    """

    delay: Seconds = 60.0

    def __init__(self, delay: Seconds) -> None:
        super().__init__(f"snoozed for {delay}")
        self.delay = as_seconds(delay, "Snooze delay")


class Discard(Exception):  # noqa: N818
    """Raise it in a handler to give the task up at once; it is buried with your reason.

    Args:
        reason: kept with the dead task.

    Example:
        >>> raise Discard("the account is gone")
        Traceback (most recent call last):
        pgtask_sa.retry.Discard: the account is gone
    """

    def __init__(self, reason: str = "discarded") -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Backoff:
    """Exponential delays between attempts, with jitter and a cap.

    Args:
        base: delay after the first failed attempt (seconds or timedelta).
        factor: how much longer each further delay is (1 or more).
        maximum: no delay is longer than this (seconds or timedelta, before jitter).
        jitter: share of the delay that is random, from 0 (none) to 1: with 0.25 a delay of 8 s
            becomes something between 6 s and 10 s, so that tasks that failed together do not
            come back together.

    Raises:
        ConfigurationError: a value is out of its range.

    Example:
        >>> [Backoff(base=2, jitter=0).delay(attempt) for attempt in (1, 2, 3, 1_000_000)]
        [2.0, 4.0, 8.0, 3600.0]
    """

    base: Seconds = 2.0
    factor: float = 2.0
    maximum: Seconds = 3600.0
    jitter: float = 0.25

    def __post_init__(self) -> None:
        as_seconds(self.base, "backoff base")
        as_seconds(self.maximum, "backoff maximum")
        if not 1 <= self.factor <= 1000:  # noqa: PLR2004
            raise ConfigurationError(f"backoff factor must be 1 to 1000, got {self.factor!r}")
        if not 0 <= self.jitter <= 1:
            raise ConfigurationError(f"backoff jitter must be 0 to 1, got {self.jitter!r}")

    def delay(self, attempt: int) -> float:
        """Return the seconds to wait after failed attempt number ``attempt`` (1 is the first)."""
        base = as_seconds(self.base, "backoff base")
        maximum = as_seconds(self.maximum, "backoff maximum")
        # 64 doublings exceed any cap; more would overflow a float
        delay = min(maximum, base * self.factor ** min(max(attempt, 1) - 1, 64))
        return delay * random.uniform(1 - self.jitter, 1 + self.jitter)  # noqa: S311


BackoffLike: TypeAlias = "Backoff | float | timedelta | Callable[[int], Seconds]"


def as_backoff(value: BackoffLike) -> Callable[[int], float]:
    """Turn what a user may write for ``backoff=`` into a function of the attempt number.

    Example:
        >>> as_backoff(5)(3)
        5.0
        >>> as_backoff(lambda attempt: timedelta(minutes=attempt))(3)
        180.0
    """
    if isinstance(value, Backoff):
        return value.delay
    if callable(value):
        chosen = value
        return lambda attempt: as_seconds(chosen(attempt), "backoff")
    seconds = as_seconds(value, "backoff")
    return lambda _attempt: seconds


@dataclass(frozen=True)
class Policy:
    """How often and how soon a failed task is tried again.

    Example:
        >>> Policy(max_attempts=3).max_attempts
        3
    """

    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    backoff: Callable[[int], float] = Backoff().delay

    def __post_init__(self) -> None:
        if isinstance(self.max_attempts, bool) or not isinstance(self.max_attempts, int):
            raise ConfigurationError(f"max_attempts must be an integer, got {self.max_attempts!r}")
        if not 1 <= self.max_attempts <= 1_000_000:  # noqa: PLR2004
            raise ConfigurationError(
                f"max_attempts must be 1 to 1,000,000, got {self.max_attempts!r}"
            )


@dataclass(frozen=True)
class Verdict:
    """What becomes of a task after an attempt.

    ``done``: it stays deleted. ``retry``: back to the table with ``attempts`` and ``delay``.
    ``bury``: to the error queue with ``reason``.
    """

    action: Literal["done", "retry", "bury"]
    attempts: int = 0
    delay: float = 0.0
    reason: str = ""


def decide(
    error: BaseException | None, attempts: int, policy: Policy, *, blameless: int = 0
) -> Verdict:
    """Decide what an attempt's outcome means.

    Args:
        error: what the handler raised, or None when it returned.
        attempts: how many attempts had been counted before this one.
        policy: the handler's.
        blameless: how often in a row the error was the database's (a deadlock, a lost serialisation
            race): the task is tried again, soon at first, and no attempt is burnt. 0: it is not.

    Example:
        >>> decide(None, 0, Policy()).action
        'done'
        >>> decide(ValueError("x"), 2, Policy(max_attempts=3))
        Verdict(action='bury', attempts=3, delay=0.0, reason='failed')
        >>> decide(Snooze(60), 2, Policy(max_attempts=3))
        Verdict(action='retry', attempts=2, delay=60.0, reason='snoozed')
    """
    if error is None:
        return Verdict("done")
    if isinstance(error, Snooze):
        return Verdict("retry", attempts, as_seconds(error.delay, "Snooze delay"), "snoozed")
    if isinstance(error, Discard):
        return Verdict("bury", attempts + 1, 0.0, "discarded")
    if blameless:
        longest = min(0.1 * 2.0 ** min(blameless, 20), 5.0)
        return Verdict("retry", attempts, random.uniform(0.02, longest), "database")  # noqa: S311
    reason = "worker died" if isinstance(error, WorkerDied) else "failed"
    if attempts + 1 >= policy.max_attempts:
        return Verdict("bury", attempts + 1, 0.0, reason)
    return Verdict("retry", attempts + 1, _delay(error, attempts + 1, policy), reason)


def _delay(error: BaseException, attempt: int, policy: Policy) -> float:
    try:
        if isinstance(error, Retry) and error.after is not None:
            return as_seconds(error.after, "Retry after")
        return policy.backoff(attempt)
    except Exception:  # noqa: BLE001 - a user's backoff must not lose the task's failure
        return Backoff().delay(attempt)
