"""Measures of enqueueing: one by one, in bulk, and from many clients at once."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import bare
import ours
import plain
from figures import Figure, in_turns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stage import Stage

RIVALS = 16
RIVAL_INSERT = "insert into task (task_type, params) values ('nap', '{\"i\": 1}');\n"
DROP_TRIGGER = "drop trigger task_wakeup on task"


def one_by_one(stage: Stage) -> Iterator[Figure]:
    """Enqueue in a session, a commit each."""
    own, orm, core, psycopg = in_turns(
        stage.rounds,
        partial(rate, stage, ours, ours.sender),
        partial(rate, stage, plain, plain.by_orm),
        partial(rate, stage, plain, plain.by_text),
        partial(rate, stage, bare, bare.sender),
    )
    what = "enqueue in a session, a commit each"
    yield Figure(what, "tasks/s", own, "a mapped row, session.add()", orm, limit=0.9)
    yield Figure(what, "tasks/s", own, "a plain row, text of an INSERT", core, limit=0.9)
    yield Figure(what, "tasks/s", own, "bare psycopg, INSERT and NOTIFY", psycopg)


def rate(stage: Stage, side: Any, sender: Any) -> float:
    """Return the tasks per second of one sender."""
    stage.fresh(side)
    count = stage.sizes["enqueue"]
    with sender(stage.url(side.DATABASE)) as send:
        for number in range(20):  # until statements are prepared
            send("noop", number)
        start = time.perf_counter()
        for number in range(count):
            send("noop", number)
        return float(count / (time.perf_counter() - start))


def in_bulk(stage: Stage) -> Iterator[Figure]:
    """Enqueue many in one transaction."""
    own, other = in_turns(
        stage.rounds, partial(bulk_rate, stage, ours), partial(bulk_rate, stage, bare)
    )
    what = f"enqueue {stage.sizes['bulk']:,} in bulk"
    yield Figure(what, "tasks/s", own, "bare psycopg, COPY, no index of a queue", other)


def bulk_rate(stage: Stage, side: Any) -> float:
    """Return the tasks per second of one call."""
    stage.fresh(side)
    count, url = stage.sizes["bulk"], stage.url(side.DATABASE)
    start = time.perf_counter()
    side.bulk(url, count)
    return float(count / (time.perf_counter() - start))


def rivals(stage: Stage) -> Iterator[Figure]:
    """Enqueue from many clients at once while a worker is busy, with the wake-up and without."""
    own, other = in_turns(
        stage.rounds,
        partial(rival_rate, stage, wakeup=True),
        partial(rival_rate, stage, wakeup=False),
    )
    what = f"{RIVALS} clients enqueue, a commit each, beside a busy worker"
    yield Figure(what, "tasks/s", own, "the same without the wake-up's trigger", other, limit=0.9)


def rival_rate(stage: Stage, *, wakeup: bool) -> float:
    """Return the tasks per second of all of them; the lanes of the worker are busy, not the CPU."""
    stage.fresh(ours)
    if not wakeup:
        stage.execute(ours.DATABASE, DROP_TRIGGER)
    stage.fill(ours, "nap", stage.sizes["crowd"] // 10)
    stage.rest(ours)
    with stage.workers(ours, concurrency=4, batch=1, only=("nap",)) as running:
        while running.count < 10:
            time.sleep(0.01)
        return clients_rate(stage)


def clients_rate(stage: Stage) -> float:
    """Let pgbench be the clients; Python would measure itself."""
    seconds = max(1, round(stage.sizes["rival_seconds"]))
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as script:
        script.write(RIVAL_INSERT)
        script.flush()
        program = [stage.server.bin_dir / "pgbench", "-n", "-M", "prepared", "-f", script.name]
        load = ["-c", str(RIVALS), "-j", "2", "-T", str(seconds), stage.url(ours.DATABASE)]
        done = subprocess.run([*program, *load], check=True, capture_output=True, text=True)
    found = re.search(r"tps = ([\d.]+)", done.stdout)
    if found is None:
        raise SystemExit(f"{Path(program[0]).name} says: {done.stdout}{done.stderr}")
    return float(found[1])
