"""Some seconds of steady load while somebody holds a snapshot; `make soak` does it for minutes."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text
from waiting import wait_until

sys.path.append(str(Path(__file__).with_name("benchmarks")))

from soak import Soak
from soak_load import TYPES
from soak_samples import explain_claim, held_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Engine

RATE, SECONDS = 200, 8
TOLD_WITHIN = 1.5  # seconds
DEAD, TRICKLE = 100_000, 30
CLEAN = 150  # buffers of a claim that finds nothing, of three types, where nothing is in its way
SETTLED = {"task": 0, "dead_task": 0}


@pytest.fixture
def soak(db_url: str) -> Iterator[Soak]:
    """Run a worker of two lanes, and an enqueuer."""
    run = Soak(db_url, RATE, SECONDS, workers=1, lanes=2)
    with run.running():
        yield run


def buffers(engine: Engine) -> int:
    """Count what the dearer of the two claims touches now."""
    with engine.connect() as connection:
        return max(explain_claim(connection, due_first=first)[1] for first in (False, True))


def walked(engine: Engine) -> int:
    """Count the entries of the lottery's index that were read until now."""
    reads = "select idx_tup_read from pg_stat_user_indexes where indexrelname = 'task_ready_idx'"
    with engine.connect() as connection:
        return int(connection.scalar(text(reads)) or 0)  # each server process tells once a second


def until_told(engine: Engine) -> None:
    """Wait until nothing more is told for longer than that."""
    last = [(walked(engine), time.monotonic())]

    def is_still() -> bool:
        if (now := walked(engine)) != last[0][0]:
            last[0] = now, time.monotonic()
        return time.monotonic() - last[0][1] > TOLD_WITHIN

    wait_until(is_still, 30, 0.2)


def leave_dead(engine: Engine) -> None:
    """Leave many tasks of the first type dead."""
    fill = f"insert into task (task_type) select '{TYPES[0]}' from generate_series(1, {DEAD})"
    for statement in (fill, "delete from task"):
        with engine.begin() as connection:
            connection.execute(text(statement))


def vacuumed(engine: Engine) -> bool:
    """Clean up; true once that was enough for a claim to find nothing in its way."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("vacuum task"))
    return buffers(engine) <= CLEAN


def test_soak(soak: Soak, figures: Callable[[str], None]) -> None:
    """Under a held snapshot nothing is lost, and a claim costs no more than the dead rows.

    Each is looked at once at most: by the lottery of its type or in the order of `run_at`. They
    cost nothing any more when the snapshot is gone and they have been cleaned up.
    """
    engine = soak.sampler.engine
    with held_snapshot(engine):
        samples = list(soak.samples(every=2))
        assert soak.drained(timeout=30)
        sent = soak.sent.value
        rows = sent + soak.sampler.counted()[1]  # a retried one is a second row
        # at least half of what was asked for, on a machine that has other work, too
        assert sent >= RATE * SECONDS / 2
        assert soak.sampler.done() == sent
        wait_until(lambda: soak.left() == SETTLED)  # the commit of the last one
        assert samples
        figures(
            f"{sent} tasks in {SECONDS} s under a snapshot: a claim touches"
            f" {', '.join(str(each.buffers) for each in samples)} buffers"
        )
        assert [] == [each for each in samples if each.buffers > CLEAN + 1.5 * rows]
        assert buffers(engine) <= CLEAN + 1.5 * rows
    wait_until(lambda: vacuumed(engine), 10, 0.2)


def done_one_by_one(soak: Soak, count: int) -> None:
    """Enqueue tasks, each when the one before is done."""
    params = '{"i": 0, "starts": 0, "delayed": false}'
    insert = f"insert into task (task_type, params) values ('{TYPES[0]}', '{params}')"
    start = soak.sampler.done()
    for number in range(1, count + 1):
        with soak.sampler.engine.begin() as connection:
            connection.exec_driver_sql(insert)
        wait_until(lambda number=number: soak.sampler.done() == start + number, 20, 0.005)


def test_a_crowd_of_dead_rows_is_not_walked_over(soak: Soak) -> None:
    """When workers have found the end of the queue, all tasks are done past the dead.

    By lottery each look at an empty queue walks over all of them.
    """
    engine = soak.sampler.engine
    with held_snapshot(engine):
        leave_dead(engine)
        assert list(soak.samples(every=1))
        assert soak.drained(timeout=60)
        until_told(engine)
        start = walked(engine)
        done_one_by_one(soak, TRICKLE)
        until_told(engine)
        assert walked(engine) - start < DEAD * TRICKLE / 3  # by lottery several times that
        wait_until(lambda: soak.left() == SETTLED)
