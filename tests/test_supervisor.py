"""The supervisor of several processes: a child that dies is replaced, but not in a hot loop."""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from waiting import wait_until

from pgtask_sa import supervisor
from pgtask_sa.events import Event, Events
from pgtask_sa.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Iterator


class Recorded(Supervisor):
    """Notes the pause before each start of a child."""

    def __init__(self) -> None:
        self.told: list[Event] = []
        super().__init__(lambda: os._exit(1), 1, Events([self.told.append]), drain=False)
        self.pauses: list[float] = []
        self.began = time.monotonic()

    def _start(self, pause: float = 0.0) -> None:
        self.pauses.append(round(pause, 3))
        super()._start(pause)


@contextmanager
def _running() -> Iterator[Recorded]:
    """Run children that die at once, until the end of the block."""
    supervised = Recorded()
    thread = threading.Thread(target=supervised.run, daemon=True)
    thread.start()
    try:
        yield supervised
    finally:
        supervised.stopping = True
        thread.join(20)
        assert not thread.is_alive()


def test_a_child_that_dies_at_once_again_and_again():
    """Each pause is about twice as long as the one before, and was waited for."""
    with _running() as supervised:
        wait_until(lambda: len(supervised.pauses) == 5)
        took = time.monotonic() - supervised.began
    assert [0.0, 0.1, 0.3, 0.7, 1.5] == supervised.pauses
    assert took > sum(supervised.pauses)
    told = [event.message.partition("unasked; ")[2] for event in supervised.told[:4]]
    assert [f"another is started in {pause} s" for pause in supervised.pauses[1:]] == told


def test_the_longest_pause(monkeypatch: pytest.MonkeyPatch):
    """A program that somebody mends comes up again without a restart of everything."""
    monkeypatch.setattr(supervisor, "LONGEST_PAUSE", 0.2)
    with _running() as supervised:
        wait_until(lambda: len(supervised.pauses) == 5)
    assert [0.0, 0.1, 0.2, 0.2, 0.2] == supervised.pauses


def test_a_child_that_had_lived(monkeypatch: pytest.MonkeyPatch):
    """It is replaced without a pause, as often as that happens."""
    monkeypatch.setattr(supervisor, "HEALTHY_AFTER", 0.0)
    with _running() as supervised:
        wait_until(lambda: len(supervised.pauses) == 4)
    assert [0.0] * 4 == supervised.pauses[:4]
    assert "another is started at once" in supervised.told[0].message
