"""Lanes that add, claim, give back and wait in any order, and skip nothing for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from claiming import fill, ids, left, sweep
from hypothesis import strategies as st
from sqlalchemy import text

from pgtask_sa import tail

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

    from pgtask_sa.turns import Claimer

RUN_AT = ["null", "now()", "now() - interval '1 hour'"]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 3), st.sampled_from(RUN_AT)),
        st.tuples(st.just("add later"), st.integers(0, 1), st.just("")),
        st.tuples(st.just("claim"), st.integers(0, 2), st.just("")),
        st.tuples(st.sampled_from(["commit", "rollback"]), st.integers(0, 2), st.just("")),
        st.tuples(st.just("wait"), st.sampled_from([0.01, 0.6, 1.5]), st.just("")),
    ),
    min_size=8,
    max_size=40,
)
WAITS: list[Any] = [("wait", 1.5, "")] * 4  # until floors have risen
LATE: list[Any] = [("add later", 0, ""), ("add", 1, "null"), *WAITS]
HELD: list[Any] = [("add", 3, "null"), ("claim", 0, ""), ("add", 1, "null"), *WAITS]


class Lanes:
    """Three lanes, and two transactions that enqueue and take long over it."""

    def __init__(self, engine: Engine, clock: list[float], choosers: list[Claimer]) -> None:
        self.engine, self.clock = engine, clock
        self.lanes = [(engine.connect(), chooser) for chooser in choosers]
        self.late: list[Connection | None] = [None, None]
        self.held: dict[int, list[int]] = {n: [] for n in range(3)}
        self.done: list[int] = []

    def step(self, what: str, number: Any, run_at: str) -> None:
        """Do one thing."""
        if what == "add":
            fill(self.engine, number, "AB"[number % 2], run_at=run_at)
        elif what == "add later":
            self._late(number)
        elif what == "wait":
            self.clock[0] += number
            for lane in range(3):  # each looks, and its floor rises
                self.step("claim", lane, "")
        elif what == "claim":
            connection, chooser = self.lanes[number]
            self.held[number] += ids(sweep(connection, chooser))
        else:
            self.end(number, commit=what == "commit")

    def _late(self, number: int) -> None:
        connection = self.late[number]
        if connection is None:
            connection = self.late[number] = self.engine.connect()
            fill(connection, 1, "A")
        else:
            connection.commit()
            connection.close()
            self.late[number] = None

    def end(self, number: int, *, commit: bool) -> None:
        """End what a lane has claimed."""
        connection, _ = self.lanes[number]
        connection.commit() if commit else connection.rollback()
        self.done += self.held[number] if commit else []
        self.held[number] = []

    def finish(self) -> None:
        """Let the third lane claim all that is left; the others have died."""
        for number, connection in enumerate(self.late):
            if connection is not None:
                self._late(number)
        for number in range(3):
            self.end(number, commit=False)
        for _ in range(100):
            self.step("claim", 2, "")
            if not self.held[2]:
                self.clock[0] += tail.PAUSE
                self.step("claim", 2, "")
            if not self.held[2]:
                break
            self.end(2, commit=True)
        for connection, _ in self.lanes:
            connection.close()

    def check(self, steps: list[Any]) -> None:
        """Do all steps, and assert that each task was done once."""
        for step in steps:
            self.step(*step)
        self.finish()
        assert 0 == left(self.engine)
        last_value = text("select last_value * is_called::int from task_task_id_seq")
        with self.engine.connect() as connection:
            last = connection.scalar(last_value)
        assert list(range(1, last + 1)) == sorted(self.done)
