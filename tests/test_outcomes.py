"""What a handler may raise, return or keep, and what becomes of its task then."""

from __future__ import annotations

import asyncio
import builtins
from collections import Counter
from typing import Any

import pytest
from sqlalchemy import text
from sweeping import KINDS, Sweeper, mark, sweepers

from pgtask_sa import Discard, Retry, Snooze
from pgtask_sa.arrears import MAX_BLAMELESS


@pytest.fixture(params=KINDS)
def sweeper(request, db_url):
    yield from sweepers(db_url, request.param)


class _Odd(BaseException):
    pass


RAISED = [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration, _Odd]
RAISED += [asyncio.CancelledError]
GROUP = getattr(builtins, "ExceptionGroup", None)  # Python 3.11


@pytest.mark.parametrize("timeout", [None, 30])
def test_whatever_a_handler_raises_is_a_failed_attempt(sweeper: Sweeper, timeout):
    """E7, E8: it is undone and counted, and the lane lives on."""
    errors: list[Any] = [*RAISED, *([lambda: GROUP("two", [ValueError(1)])] if GROUP else [])]

    @sweeper.handler(timeout=timeout)
    def body(session, params, task):
        mark(session, params["i"])
        if task.attempt == 1:
            error = errors[params["i"]]()
            raise error

    numbers = list(range(len(errors)))
    sweeper.enqueue(*[{"i": i} for i in numbers])
    sweeper.drain()
    assert (numbers, [], []) == (sweeper.marks(), sweeper.waiting(), sweeper.dead())
    assert Counter({"task.done": len(errors), "task.retry": len(errors)}) == Counter(sweeper.told())


def test_retry_snooze_and_discard(sweeper: Sweeper):
    """Retry counts and sets its delay, Snooze does not count, Discard buries; all are undone."""
    raised: dict[str, Exception] = {
        "RETRY": Retry("busy", after=60),
        "SNOOZE": Snooze(60),
        "DISCARD": Discard("gone"),
    }
    for name, error in raised.items():

        @sweeper.handler(name)
        def body(session, params, task, error=error):
            mark(session)
            raise error

        sweeper.enqueue(task_type=name)
    sweeper.drain()
    assert ([], [("RETRY", 1), ("SNOOZE", 0)]) == (sweeper.marks(), sweeper.waiting())
    assert [("DISCARD", 1, "discarded")] == sweeper.dead()
    seconds = "extract(epoch from run_at - now())"
    assert [(True,)] * 2 == sweeper.rows(f"select {seconds} between 50 and 60 from task")


def test_snooze_keeps_the_last_error(sweeper: Sweeper):
    """Why it failed before is still of interest while it sleeps."""

    @sweeper.handler()
    def body(session, params, task):
        raise Snooze(60) if task.attempt == 2 else ValueError("first")

    sweeper.enqueue()
    sweeper.sweep(2)
    assert sweeper.last_error().startswith("ValueError: first\n")


def test_a_deadlock_burns_no_attempt_but_not_for_ever(sweeper: Sweeper):
    """C2, B21: 40P01 and 40001 are nobody's fault, until there were too many of them."""
    calls = []

    @sweeper.handler(max_attempts=1)
    def body(session, params, task):
        calls.append(task.attempt)
        session.execute(text("do $$ begin raise exception 'x' using errcode = '40001'; end $$"))

    sweeper.enqueue()
    for _ in range(MAX_BLAMELESS + 1):
        sweeper.sweep()
        sweeper.execute("update task set run_at = null")
    assert [1] * (MAX_BLAMELESS + 1) == calls
    assert ([], [("A", 1, "failed")]) == (sweeper.waiting(), sweeper.dead())


def test_an_error_of_another_database_counts(sweeper: Sweeper):
    """Only what our own connection met is the database's trouble; the rest is the handler's."""

    @sweeper.handler()
    def body(session, params, task):
        import psycopg

        raise psycopg.errors.SerializationFailure("of somewhere else")

    sweeper.enqueue()
    sweeper.sweep()
    assert [("A", 1)] == sweeper.waiting()


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_higher_isolation_level_of_the_database(sweeper: Sweeper, level: str):
    """B20, B21: a claim is READ COMMITTED whatever the default is."""
    sweeper.execute(
        f"do $$ begin execute format('alter database %I set default_transaction_isolation = %L',"
        f" current_database(), '{level}'); end $$"
    )
    seen = []

    @sweeper.handler()
    def body(session, params, task):
        seen.append(session.scalar(text("show transaction_isolation")))

    sweeper.enqueue()
    sweeper.sweep()
    assert ["read committed"] == seen


def test_an_ended_session_is_dead(sweeper: Sweeper):
    """A handler that keeps its session cannot write into the transaction of the next task."""
    kept = []

    @sweeper.handler()
    def body(session, params, task):
        for old in kept:
            with pytest.raises(Exception, match="bind|closed"):
                mark(old, 9)
        mark(session, params["i"])
        kept.append(session)

    sweeper.enqueue({"i": 1}, {"i": 2})
    sweeper.drain()
    assert ([1, 2], 2) == (sweeper.marks(), len({id(session) for session in kept}))


def test_one_async_session_in_gather(db_url: str):
    """F14: all of it is there once, or the attempt fails and nothing is; the next task is sound."""
    sweeper = Sweeper("async", db_url)

    async def gather(session, params):
        await asyncio.gather(*[session.run_sync(mark, i) for i in range(3)])

    sweeper.tasks.handler("G", max_attempts=1)(gather)

    @sweeper.handler("GOOD")
    def good(session, params, task):
        mark(session, 7)

    sweeper.enqueue(task_type="G")
    try:
        sweeper.sweep()
    except Exception as error:  # a lane would take another connection
        assert "lost" in str(error)
    sweeper.enqueue(task_type="GOOD")
    sweeper.drain()
    assert [] == sweeper.waiting()
    failed = [7], [("G", 1, "failed")]
    assert (sweeper.marks(), sweeper.dead()) in (failed, ([0, 1, 2, 7], []))
    sweeper.close()


def test_a_plain_function_that_returns_a_coroutine(db_url: str):
    """F16: a coroutine that nobody awaits would look like success."""
    sweeper = Sweeper("sync", db_url)

    async def never(session):
        mark(session)

    sweeper.tasks.handler("A")(lambda session, params: never(session))
    sweeper.enqueue()
    sweeper.sweep()
    assert ([], [("A", 1)]) == (sweeper.marks(), sweeper.waiting())
    assert "async def" in sweeper.last_error()
    sweeper.close()
