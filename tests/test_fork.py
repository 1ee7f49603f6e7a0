"""Handlers that fork: the child is nobody's worker, and keeps nothing of a worker alive."""

from __future__ import annotations

import pytest
from fleet import Fleet
from sqlalchemy import text

QUIET = ("--log-format", "json", "--idle-interval", "0.5")


@pytest.fixture
def fleet(db_url: str) -> Fleet:
    return Fleet(db_url, target="fork_tasks:tasks")


@pytest.mark.parametrize("how", ["exit", "raise", "return"])
@pytest.mark.parametrize("kind", ["FORK", "ASYNC_FORK"])
def test_a_child_that_comes_back(fleet: Fleet, kind, how):
    """It ends there; the parent settles the task, once, and goes on."""
    fleet.enqueue(kind, *[{"i": i, "how": how} for i in range(3)])
    with fleet.worker(*QUIET) as worker:
        fleet.until(lambda: fleet.count() == 0)
        assert worker.running
    assert ([0, 1, 2], 0) == (fleet.done(), fleet.count("dead_task")), worker.output


def test_a_child_that_outlives_its_worker(fleet: Fleet):
    """The server sees the worker's end all the same: the task runs elsewhere, soon."""
    with fleet.engine.begin() as connection:
        connection.execute(text("create table first (i int)"))
    fleet.enqueue("ORPHAN", {"i": 1})
    with fleet.worker(*QUIET) as first:  # at its end its child is ended as well
        assert -9 == first.wait(20)
        with fleet.engine.begin() as connection:
            connection.execute(text("insert into first values (1)"))
        with fleet.worker(*QUIET):
            fleet.until(lambda: [1] == fleet.done(), 5)  # the child sleeps for 30 s
