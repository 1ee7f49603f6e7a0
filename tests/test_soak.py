"""Some seconds of steady load while somebody holds a snapshot; `make soak` does it for minutes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text
from waiting import wait_until

sys.path.append(str(Path(__file__).with_name("benchmarks")))

from soak import Soak
from soak_samples import explain_claim, held_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Engine

RATE, SECONDS = 200, 8
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
