"""What an outcome means: how long to wait, when to give up. Nothing here touches a database."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgtask_sa import Backoff, ConfigurationError, Discard, Retry, Snooze
from pgtask_sa.retry import LONGEST_DELAY, Policy, Verdict, as_backoff, as_seconds, decide

YEAR = LONGEST_DELAY.total_seconds()
ATTEMPTS = [-1, 0, 1, 2, 31, 32, 63, 64, 65, 1023, 1024, 1025, 10**6]

seconds = st.floats(0, YEAR)
factors = st.floats(1, 1000)


@given(st.integers(0, 10**6), seconds, factors, seconds, st.floats(0, 1))
def test_a_delay_is_always_bounded(
    attempt: int, base: float, factor: float, maximum: float, jitter: float
) -> None:
    """Whatever the settings and the attempt, a delay is within the cap and its jitter."""
    delay = Backoff(base, factor, maximum, jitter).delay(attempt)
    assert 0 <= delay <= maximum * (1 + jitter) * 1.000001
    assert timedelta(seconds=delay) <= 2 * LONGEST_DELAY + timedelta(days=1)


@pytest.mark.parametrize("attempt", ATTEMPTS)
@pytest.mark.parametrize("factor", [1, 2, 1000])
def test_extreme_attempts(attempt: int, factor: int) -> None:
    """No number of attempts overflows, and the largest ones wait for the cap."""
    delay = Backoff(base=1, factor=factor, maximum=3600, jitter=0).delay(attempt)
    assert 1 <= delay <= 3600
    if attempt >= 31 and factor > 1:
        assert 3600 == delay


def test_delays_double_up_to_the_cap() -> None:
    """By default delays are 2, 4, 8 s and so on, and never over an hour."""
    backoff = Backoff(jitter=0)
    expected = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 3600, 3600]
    assert expected == [backoff.delay(attempt) for attempt in range(1, 14)]


def test_jitter_spreads_both_ways() -> None:
    """Delays of tasks that failed together are spread over the range of the jitter."""
    delays = [Backoff(base=8, jitter=0.25).delay(1) for _ in range(2000)]
    assert 6 <= min(delays) < 6.3
    assert 9.7 < max(delays) <= 10
    assert 7.8 < sum(delays) / len(delays) < 8.2


def test_the_first_retry_is_not_at_once() -> None:
    """With default settings ten attempts take over half an hour, not one poll."""
    assert sum(Backoff(jitter=0).delay(n) for n in range(1, 10)) > 1000
    assert min(Backoff().delay(1) for _ in range(100)) >= 1.5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("base", -1),
        ("base", float("nan")),
        ("base", float("inf")),
        ("base", "2"),
        ("base", True),
        ("maximum", timedelta(days=366)),
        ("maximum", None),
        ("factor", 0.5),
        ("factor", 1001),
        ("factor", float("nan")),
        ("jitter", -0.1),
        ("jitter", 1.1),
        ("jitter", float("nan")),
    ],
)
def test_a_backoff_out_of_range_is_refused(field: str, value: Any) -> None:
    """A setting that makes no sense is refused, with its name."""
    with pytest.raises(ConfigurationError, match=f"backoff {field} must be"):
        Backoff(**{field: value})


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        (0, 0.0),
        (2.5, 2.5),
        (timedelta(minutes=1), 60.0),
        (LONGEST_DELAY, YEAR),
        (lambda attempt: attempt * 10, 30.0),
        (lambda attempt: timedelta(hours=attempt), 10800.0),
        (Backoff(base=1, jitter=0), 4.0),
    ],
)
def test_backoffs_a_user_may_write(given_: Any, expected: float) -> None:
    """A number, a timedelta, a function of the attempt and a Backoff all give seconds."""
    assert expected == as_backoff(given_)(3)


@pytest.mark.parametrize("value", [-1, "5", None, True, YEAR + 1, float("nan"), 10**400, object()])
def test_seconds_are_checked(value: Any) -> None:
    """What is no time span is refused with a name and the value, whatever it is."""
    with pytest.raises(ConfigurationError, match="grace must be"):
        as_seconds(value, "grace")


@pytest.mark.parametrize("word", [Retry, Snooze])
@pytest.mark.parametrize("value", [-1, "soon", float("inf")])
def test_delays_in_words_of_command_are_checked(word: Any, value: Any) -> None:
    """Retry and Snooze refuse a delay that makes no sense where they are raised."""
    with pytest.raises(ConfigurationError, match=f"{word.__name__}.* must be"):
        word(after=value) if word is Retry else word(value)


@pytest.mark.parametrize("value", [0, -1, 1.0, "3", None, True, 1_000_001])
def test_max_attempts_is_checked(value: Any) -> None:
    """A number of attempts is a positive integer up to a million."""
    with pytest.raises(ConfigurationError, match="max_attempts must be"):
        Policy(max_attempts=value)


POLICY = Policy(max_attempts=3, backoff=lambda attempt: attempt * 100.0)
ERROR = ValueError("x")


@pytest.mark.parametrize(
    ("error", "attempts", "expected"),
    [
        (None, 0, Verdict("done")),
        (None, 99, Verdict("done")),
        (ERROR, 0, Verdict("retry", 1, 100.0, "failed")),
        (ERROR, 1, Verdict("retry", 2, 200.0, "failed")),
        (ERROR, 2, Verdict("bury", 3, 0.0, "failed")),
        (ERROR, 99, Verdict("bury", 100, 0.0, "failed")),
        (KeyboardInterrupt(), 0, Verdict("retry", 1, 100.0, "failed")),
        (Retry(), 0, Verdict("retry", 1, 100.0, "failed")),
        (Retry(after=7), 0, Verdict("retry", 1, 7.0, "failed")),
        (Retry(after=0), 0, Verdict("retry", 1, 0.0, "failed")),
        (Retry(after=7), 2, Verdict("bury", 3, 0.0, "failed")),
        (Snooze(60), 0, Verdict("retry", 0, 60.0, "snoozed")),
        (Snooze(timedelta(hours=1)), 99, Verdict("retry", 99, 3600.0, "snoozed")),
        (Discard("no"), 0, Verdict("bury", 1, 0.0, "discarded")),
        (Discard(), 2, Verdict("bury", 3, 0.0, "discarded")),
    ],
)
def test_decide(error: BaseException | None, attempts: int, expected: Verdict) -> None:
    """Each outcome has one meaning, and only a failure and a discard burn an attempt."""
    assert expected == decide(error, attempts, POLICY)


@pytest.mark.parametrize("attempts", [0, 2, 10**6])
def test_the_database_is_to_blame(attempts: int) -> None:
    """A failure of the database itself burns no attempt, and comes back soon but not at once."""
    verdict = decide(ERROR, attempts, POLICY, blameless=1)
    assert ("retry", attempts, "database") == (verdict.action, verdict.attempts, verdict.reason)
    assert 0.02 <= verdict.delay <= 0.2


@pytest.mark.parametrize(
    ("error", "expected"),
    [(Snooze(60), "snoozed"), (Discard(), "discarded"), (None, "")],
)
def test_words_of_command_go_first(error: BaseException | None, expected: str) -> None:
    """What the handler asked for is done, though the database had trouble as well."""
    assert expected == decide(error, 0, POLICY, blameless=1).reason


def raising(_attempt: int) -> float:
    raise RuntimeError("no idea")


@pytest.mark.parametrize(
    "backoff",
    [raising, lambda _: -1, lambda _: None, lambda _: 10**400, lambda _: float("nan"), lambda: 1],
)
def test_a_broken_backoff_does_not_lose_the_failure(backoff: Any) -> None:
    """A backoff of the user's that fails, or gives nonsense, is replaced by the default one."""
    verdict = decide(ERROR, 0, Policy(backoff=as_backoff(backoff)))
    assert ("retry", 1) == (verdict.action, verdict.attempts)
    assert 1.5 <= verdict.delay <= 2.5


@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_a_failing_task_ends(attempts: int, most: int) -> None:
    """A failed task is buried exactly from its last attempt on."""
    verdict = decide(ERROR, attempts, Policy(max_attempts=most))
    assert ("bury" if attempts + 1 >= most else "retry") == verdict.action
    assert attempts + 1 == verdict.attempts
