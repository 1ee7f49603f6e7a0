"""Measures of an idle worker: how soon it starts a task, and what it costs meanwhile."""

from __future__ import annotations

import random
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import bare
import ours
import psycopg
from figures import Figure, in_turns, percentile
from stage import wait_for

from pgtask_sa.wakeup import FIRST_POLL, GROWTH

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stage import Stage

PARTS = {"p50": 0.5, "p99": 0.99}
PICKUP_LIMITS = {"p50": 1.0, "p99": 2.0}
SETTLED = 10.0  # seconds after which an idle worker looks at its longest interval
LONGEST = 0.01  # seconds between an insert and its commit, at most
INSERT = "insert into task (task_type, params) values ('stamp', jsonb_build_object('i', %s::int))"
IN_TRANSACTION = (
    "select count(*) from pg_stat_activity where datname = %s and xact_start is not null"
)
COUNTED = """
select s.query, s.calls from pg_stat_statements s join pg_database d on d.oid = s.dbid
where d.datname = '{database}' and s.toplevel"""


def pickups(stage: Stage) -> Iterator[Figure]:
    """Measure how soon a task starts on an idle worker, by kind of handler."""
    sync, awaited, other = in_turns(
        stage.rounds,
        partial(pickup_times, stage, ours, "stamp"),
        partial(pickup_times, stage, ours, "async_stamp"),
        partial(pickup_times, stage, bare, "stamp"),
    )
    for name, own in (("sync", sync), ("async", awaited)):
        for part, share in PARTS.items():
            yield Figure(
                f"pickup by an idle worker, {name} handler, {part}",
                "ms",
                [percentile(times, share) for times in own],
                "bare psycopg, LISTEN and one claim",
                [percentile(times, share) for times in other],
                PICKUP_LIMITS[part],
                absolute=True,
                most=True,
            )


def pickup_times(stage: Stage, side: Any, kind: str) -> list[float]:
    """From the return of the enqueue to the start of the handler, 50 ms apart: in ms."""
    with stage.idle_worker(side, kind) as (running, send):
        return trickle(running, send, kind, stage.sizes["pickups"])


def trickle(running: Any, send: Any, kind: str, count: int, every: float = 0.05) -> list[float]:
    """Enqueue one after another; return how long each waited for its start, in ms."""
    return waits(running, send_all(send, kind, count, every))


def send_all(send: Any, kind: str, count: int, every: float) -> list[int]:
    """Enqueue one after another; return when each call came back."""
    returned = []
    for number in range(count):
        time.sleep(every)
        send(kind, number)
        returned.append(time.monotonic_ns())
    return returned


def waits(running: Any, returned: list[int]) -> list[float]:
    """Return how long each waited for its start, in ms, once all have started."""
    (tally,) = running.tallies
    wait_for(lambda: all(tally.started(number) for number in range(len(returned))), 120)
    return [max(0, tally.started(number) - at) / 1e6 for number, at in enumerate(returned)]


def around_sleep(stage: Stage) -> Iterator[Figure]:
    """Enqueue at random moments around falling asleep: nobody may lose a wake-up."""
    bound = 1000 * (GROWTH * LONGEST + FIRST_POLL)
    times, count = sleeper_times(stage), stage.sizes["around_sleep"]
    what = f"{count:,} enqueues at random moments around falling asleep"
    yield Figure(f"{what}, pickup p50", "ms", [percentile(times, 0.5)])
    yield Figure(f"{what}, pickup p99", "ms", [percentile(times, 0.99)])
    yield Figure(
        f"{what}, slowest pickup",
        "ms",
        [max(times)],
        limit=bound,
        absolute=True,
        most=True,
        note=f"Bound: {GROWTH:g} x the enqueuing transaction (here up to {1000 * LONGEST:g} ms) "
        f"and the first poll ({1000 * FIRST_POLL:g} ms). An insert whose trigger looked before the "
        "worker was asleep and whose commit came after its last look is found by polling, "
        "at intervals that grow that fast",
    )


def sleeper_times(stage: Stage) -> list[float]:
    """Enqueue each just when the one before is done, in transactions of up to `LONGEST`."""
    chance, found = random.Random(1), []
    with (
        stage.idle_worker(ours, "stamp") as (running, _),
        psycopg.connect(stage.url(ours.DATABASE)) as connection,
    ):
        (tally,) = running.tallies
        for number in range(stage.sizes["around_sleep"]):
            time.sleep(chance.choice((0.002, 0.02)) * chance.random())
            connection.execute(INSERT, (number,), prepare=True)
            time.sleep(chance.choice((0, LONGEST)) * chance.random())
            connection.commit()
            returned = time.monotonic_ns()
            wait_for(partial(tally.started, number))
            found.append(max(0, tally.started(number) - returned) / 1e6)
    return found


def idle(stage: Stage) -> Iterator[Figure]:
    """Count what a worker with nothing to do sends, and whether it holds a transaction."""
    own, other = in_turns(1, partial(idle_work, stage, ours), partial(idle_work, stage, bare))
    seconds = stage.sizes["idle"]
    what = f"idle worker, {seconds:g} s"
    yield Figure(
        f"{what}, statements",
        "statements/s",
        [calls for calls, _ in own],
        "bare psycopg, LISTEN alone",
        [calls for calls, _ in other],
        limit=0.5,
        absolute=True,
        most=True,
    )
    yield Figure(
        f"{what}, looks that found a transaction open",
        "%",
        [share for _, share in own],
        limit=0.0,
        absolute=True,
        most=True,
    )


def idle_work(stage: Stage, side: Any) -> tuple[float, float]:
    """Return statements per second, and the share of looks that found a transaction."""
    with stage.idle_worker(side):
        time.sleep(min(SETTLED, stage.sizes["idle"]))
        stage.execute("postgres", "select pg_stat_statements_reset()")
        start, looks = time.monotonic(), []
        with psycopg.connect(stage.server.url(driver=None), autocommit=True) as connection:
            while time.monotonic() - start < stage.sizes["idle"]:
                time.sleep(0.1)
                row = connection.execute(IN_TRANSACTION, (side.DATABASE,)).fetchone()
                looks.append(row is not None and row[0] > 0)
        seconds = time.monotonic() - start
        return sum(calls_by_query(stage, side).values()) / seconds, 100 * sum(looks) / len(looks)


def calls_by_query(stage: Stage, side: Any) -> dict[str, int]:
    """Return how often each statement was sent in the database of a side; seen from another one."""
    rows = stage.execute("postgres", COUNTED.format(database=side.DATABASE))
    return {query: int(calls) for query, calls in rows}


def herd(stage: Stage) -> Iterator[Figure]:
    """Enqueue one task for many idle lanes, and count how many try to claim it."""
    lanes = stage.sizes["idle_workers"]
    for processes, each in ((lanes, 1), (max(1, lanes // 10), min(lanes, 10))):
        found = [herd_claims(stage, processes, each) for _ in range(stage.rounds)]
        yield Figure(
            f"{processes} idle worker processes, lanes: {each} each, one enqueue: claims",
            "claims",
            [claims for claims, _ in found],
            "all statements in the database, until one second later",
            [calls for _, calls in found],
            limit=5,
            absolute=True,
            most=True,
        )


def herd_claims(stage: Stage, processes: int, lanes: int) -> tuple[int, int]:
    """Return the number of claims, and of all statements."""
    stage.fresh(ours)
    options = {"concurrency": lanes, "batch": 1, "only": ("stamp",)}
    with (
        stage.workers(ours, processes, **options) as running,
        ours.sender(stage.url(ours.DATABASE)) as send,
    ):
        wait_for(lambda: listeners(stage) >= processes, 300)
        send("stamp", 0)  # until here the sender has prepared what it needs
        wait_for(lambda: running.count == 1)
        time.sleep(min(SETTLED, stage.sizes["idle"]))
        stage.execute("postgres", "select pg_stat_statements_reset()")
        send("stamp", 1)
        wait_for(lambda: running.count == 2)
        time.sleep(1)
        calls = calls_by_query(stage, ours)
    claims = sum(n for query, n in calls.items() if is_claim(query))
    return claims, sum(calls.values())


def is_claim(query: str) -> bool:
    """Whether a statement, as pg_stat_statements has it, is a claim."""
    folded = " ".join(query.lower().split())
    return "delete from task " in folded and "skip locked" in folded


def listeners(stage: Stage) -> int:
    """Count the workers that sleep: each holds the lock that asks for a notification."""
    held = (
        "select count(*) from pg_locks l join pg_database d on d.oid = l.database"
        f" where l.locktype = 'advisory' and d.datname = '{ours.DATABASE}' and l.mode = 'ShareLock'"
    )
    return int(stage.execute("postgres", held)[0][0])
