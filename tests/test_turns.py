"""Whose turn it is: priorities, shares, and what a lane knows of what waits."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from claiming import claimer, fill, ids, sweep, sweep_all
from sqlalchemy import create_engine, event, text

from pgtask_sa import ConfigurationError, TaskRegistry, Worker
from pgtask_sa.claim_orders import ClaimOptions
from pgtask_sa.turns import SURVEY_INTERVAL, Turns

if TYPE_CHECKING:
    from sqlalchemy import Engine

A, B, C = (0, "A"), (0, "B"), (0, "C")


def turns_of(*pairs: tuple[int, str], **options: Any) -> Turns:
    turns = Turns(ClaimOptions(**options), random.Random(7))
    turns.replace(set(pairs))
    return turns


def shares(turns: Turns, claims: int) -> Counter[str]:
    """Let each claim find one task of the pair whose turn it is; count the types."""
    found: Counter[str] = Counter()
    for _ in range(claims):
        asked = turns.next(50)
        turns.count(asked, {asked[0]: 1}, 1)
        found[asked[0][1]] += 1
    return found


# -- the policy, without a database --------------------------------------------------------------


def test_equal_turns_are_exact() -> None:
    """Three types that all wait get the same number of claims, give or take one."""
    found = shares(turns_of(A, B, C), 300)
    assert all(99 <= found[kind] <= 101 for kind in "ABC")


def test_weights_are_shares() -> None:
    """Over 10,000 claims each type gets its share within a hundredth."""
    found = shares(turns_of(A, B, C, weights={"A": 3, "B": 0.5}), 10_000)
    expected = {"A": 3 / 4.5, "B": 0.5 / 4.5, "C": 1 / 4.5}
    assert {k: round(v, 2) for k, v in expected.items()} == {
        kind: round(count / 10_000, 2) for kind, count in found.items()
    }


def test_priority_goes_before_rank_and_rank_before_turns() -> None:
    """The pairs are in the order of priority, then of rank, then of turns."""
    pairs = [(-5, "LOW"), (0, "HIGH"), (0, "LOW"), (3, "HIGH")]
    turns = turns_of(*reversed(pairs), ranks={"HIGH": -1, "LOW": 1})
    assert pairs == turns.next(50)


def test_what_was_looked_at_in_vain_is_cold() -> None:
    """Pairs before the last one that had a task are cold; those behind it were not looked at."""
    turns = turns_of((0, "A"), (1, "B"), (2, "C"))
    turns.count(turns.next(50), {(1, "B"): 1}, 1)
    assert {(1, "B"), (2, "C")} == turns.pairs()


def test_a_claim_that_is_not_full_has_looked_at_everything() -> None:
    """When a batch is not full all pairs without a task in it are cold."""
    turns = turns_of((0, "A"), (1, "B"), (2, "C"))
    turns.count(turns.next(50), {(1, "B"): 4}, 5)
    assert {(1, "B")} == turns.pairs()


def test_no_credit_is_saved_up() -> None:
    """A type that comes back after a long pause takes turns, and no more than its turns."""
    turns = turns_of(A, B)
    turns.count(turns.next(50), {}, 1)  # both are cold
    turns.replace({A})
    shares(turns, 1000)
    turns.replace({A, B})
    found = shares(turns, 100)
    assert all(49 <= found[kind] <= 51 for kind in "AB")


def test_no_debt_is_kept() -> None:
    """A type that had a thousand turns alone is not made to wait for them by one that is new."""
    turns = turns_of(A)
    shares(turns, 1000)
    turns.replace(set())
    turns.replace({B})
    turns.replace({A, B})
    found = shares(turns, 100)
    assert all(49 <= found[kind] <= 51 for kind in "AB")


def test_batches_count_by_what_they_took() -> None:
    """Where batches take unequal numbers, the tasks are shared equally, not the claims."""
    turns, found = turns_of(A, B), Counter[str]()
    for _ in range(1000):
        asked = turns.next(50)
        rows = {A: 10, B: 2}[asked[0]]
        taken = {asked[0]: rows} if rows == 10 else {B: 2, A: 8}
        turns.count(asked, taken, 10)
        for (_, kind), n in taken.items():
            found[kind] += n
        turns.replace({A, B})
    assert found["B"] > 0
    assert found["A"] > found["B"]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that has met very many pairs forgets those that do not wait."""
    monkeypatch.setattr("pgtask_sa.turns.MOST_PASSES", 10)
    turns = turns_of()
    for level in range(30):
        turns.replace({(level, "A")})
    assert len(turns._passes) <= 11


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf"), "3", None, True])
def test_weights_are_numbers_over_0(weight: Any) -> None:
    """A weight that is no number over 0 is refused, with its type."""
    with pytest.raises(ConfigurationError, match="weight of A must be a number over 0, got"):
        ClaimOptions(weights={"A": weight})


@pytest.mark.parametrize("order", ["random", "tablesample"])
def test_weights_need_turns(order: Any) -> None:
    """Weights together with an order that knows no turns are refused."""
    with pytest.raises(ConfigurationError, match=f"weights need the order fair, not {order}"):
        ClaimOptions(order=order, weights={"A": 2})


# -- what is sent --------------------------------------------------------------------------------


class Sent:
    """Counts the surveys and claims that a lane sends."""

    def __init__(self, engine: Engine) -> None:
        self.found: list[str] = []
        event.listen(engine, "before_cursor_execute", self._note)

    def _note(self, _c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        kind = "claim" if "DELETE FROM" in statement else "survey"
        self.found.append(kind)

    def take(self) -> list[str]:
        found, self.found = self.found, []
        return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Stop the clock; a test moves it."""
    now = [0.0]
    monkeypatch.setattr("pgtask_sa.turns.time.monotonic", lambda: now[0])
    return now


def many(count: int) -> list[str]:
    return [f"K{n}" for n in range(count)]


def test_statements_of_a_lane(engine: Engine, clock: list[float]) -> None:
    """At first a survey; then claims alone, until the interval is over or nothing is found."""
    fill(engine, 4)
    sent, chooser = Sent(engine), claimer()
    steps = [0.0, 0.0, SURVEY_INTERVAL, 0.0, 0.0]
    found = []
    with engine.connect() as connection:
        for step in steps:
            clock[0] += step
            sweep(connection, chooser)
            found.append(sent.take())
    assert [
        ["survey", "claim"],
        ["claim"],
        ["survey", "claim"],
        ["claim"],
        ["claim", "survey"],
    ] == found


def test_a_survey_that_takes_long_is_made_less_often(clock: list[float]) -> None:
    """Dead rows that somebody's snapshot holds slow it down, and must not slow down the rest."""
    chooser = claimer()
    next(chooser.statements())
    clock[0] += 1.0
    chooser.learn([{"level": 0, "kind": "A"}])
    late = []
    for seconds in (SURVEY_INTERVAL, 19.0, 1.0):
        clock[0] += seconds
        late.append(chooser._is_late())
    assert [False, False, True] == late


def test_a_lane_that_is_woken_claims_at_once(engine: Engine, clock: list[float]) -> None:
    """With few types a lane that knows of nothing asks for all of them; one round trip."""
    sent, chooser = Sent(engine), claimer(["A", "B"])
    with engine.connect() as connection:
        assert [] == sweep(connection, chooser)
        assert ["survey"] == sent.take()
        fill(engine, 1, "B")
        sent.take()
        clock[0] += 60
        assert [1] == ids(sweep(connection, chooser))
        assert ["claim"] == sent.take()


def test_a_lane_with_many_types_looks_first(engine: Engine, clock: list[float]) -> None:
    """With many types a lane that knows of nothing surveys, and claims only what is there."""
    sent, chooser = Sent(engine), claimer(many(100))
    with engine.connect() as connection:
        for expected in (["survey"], ["survey"]):
            assert [] == sweep(connection, chooser)
            assert expected == sent.take()
        fill(engine, 1, "K77")
        sent.take()
        assert [1] == ids(sweep(connection, chooser))
        assert ["survey", "claim"] == sent.take()


def test_a_claim_names_only_what_waits(engine: Engine, clock: list[float]) -> None:
    """Of 500 types those that wait are in the statement, and one other to be looked for."""
    fill(engine, 2, "K3")
    fill(engine, 2, "K400")
    chooser = claimer(many(500))
    with engine.connect() as connection:
        sweep(connection, chooser)
        (_, parameters) = next(iter(chooser.statements()))
    named = set(parameters["types"])
    assert ({"K3", "K400"}, 3) == (named & {"K3", "K400"}, len(named))


def test_the_trickle_of_one_type_does_not_wait_for_a_survey(
    engine: Engine, clock: list[float]
) -> None:
    """Beside a type that is always there, the others are looked for one by one."""
    fill(engine, 20, "MANY")
    chooser = claimer(["MANY", "OTHER", "RARE"])
    with engine.connect() as connection:
        sweep(connection, chooser)
        connection.commit()
        fill(engine, 1, "RARE")
        found = [row.task_type for _ in range(6) for row in sweep(connection, chooser)]
    assert "RARE" in found


def test_what_is_looked_for_does_not_go_before_what_is_more_urgent(
    engine: Engine, clock: list[float]
) -> None:
    """A cold type has its place by rank like any other."""
    fill(engine, 3, "URGENT")
    chooser = claimer(["URGENT", "LATER"], ranks={"URGENT": -1})
    with engine.connect() as connection:
        sweep(connection, chooser)
        connection.commit()
        fill(engine, 1, "LATER")
        found = [row.task_type for _ in range(3) for row in sweep(connection, chooser)]
    assert ["URGENT", "URGENT", "LATER"] == found


def test_tasks_that_others_hold_are_not_asked_for_again(engine: Engine, clock: list[float]) -> None:
    """When a survey finds no more than was claimed in vain, that is the end of it."""
    fill(engine, 1)
    with engine.connect() as holder, engine.connect() as other:
        assert [1] == ids(sweep(holder, claimer()))
        sent, chooser = Sent(engine), claimer()
        found = []
        for _ in range(2):
            assert [] == sweep(other, chooser)
            found.append(sent.take())
    assert [["survey", "claim"], ["claim", "survey"]] == found


# -- with tasks ----------------------------------------------------------------------------------


def with_priority(engine: Engine, priority: int, count: int, kind: str = "A", **more: Any) -> None:
    """Add tasks of a priority."""
    fill(engine, count, kind, **more)
    with engine.begin() as connection:
        connection.execute(
            text(f"update task set priority = {priority} where task_id > :last"),
            {"last": connection.scalar(text(f"select max(task_id) - {count} from task"))},
        )


@pytest.mark.parametrize("order", ["fair", "random", "tablesample"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_priority_is_strict(engine: Engine, order: str, batch_size: int) -> None:
    """Tasks of lower numbers go first whatever their types and ranks, in a batch as well."""
    with_priority(engine, 5, 3, "A")
    with_priority(engine, 0, 3, "B")
    with_priority(engine, -5, 3, "B", run_at="now()")
    with_priority(engine, -5, 3, "A")
    options = {"order": order, "ranks": {"A": 9}, "batch_size": batch_size, "sample": 100}
    claims = sweep_all(engine, claimer(["A", "B"], **options))
    expected = [(-5, "B")] * 3 + [(-5, "A")] * 3 + [(0, "B")] * 3 + [(5, "A")] * 3
    assert expected == [(row.priority, row.task_type) for rows in claims for row in rows]


def test_an_urgent_task_is_noticed_in_time(engine: Engine, clock: list[float]) -> None:
    """One of a priority that was not known is claimed as soon as the interval is over."""
    fill(engine, 5)
    chooser = claimer()
    found = []
    with engine.connect() as connection:
        found += ids(sweep(connection, chooser))
        with_priority(engine, -1, 1)
        for _ in range(2):
            found += ids(sweep(connection, chooser))
            clock[0] += SURVEY_INTERVAL / 2
        assert 6 not in found
        assert [6] == ids(sweep(connection, chooser))


def test_a_known_priority_is_asked_for_at_once(engine: Engine, clock: list[float]) -> None:
    """A lane that wakes up asks also for the priorities that it has met before."""
    with_priority(engine, -1, 1)
    chooser = claimer()
    with engine.connect() as connection:
        assert [[1], []] == [ids(sweep(connection, chooser)) for _ in range(2)]
        connection.commit()
        fill(engine, 1)
        with_priority(engine, -1, 1)
        assert [3] == ids(sweep(connection, chooser))


def test_a_few_beside_a_crowd(engine: Engine) -> None:
    """Beside 20,000 tasks of one type ten of another are done within the first 100 claims."""
    fill(engine, 20_000, "CROWD")
    fill(engine, 10, "FEW")
    chooser = claimer(["CROWD", "FEW"])
    with engine.connect() as connection:
        found = Counter(sweep(connection, chooser)[0].task_type for _ in range(100))
    assert 10 == found["FEW"]


def test_shares_of_real_claims(engine: Engine) -> None:
    """Two types of weights 3 and 1 are claimed three to one."""
    for kind in "AB":
        fill(engine, 400, kind)
    chooser = claimer(["A", "B"], weights={"A": 3})
    with engine.connect() as connection:
        found = Counter(sweep(connection, chooser)[0].task_type for _ in range(400))
    assert 299 <= found["A"] <= 301


def test_more_types_than_one_claim_names(engine: Engine) -> None:
    """With more types waiting than fit into one claim all of them come to their turn."""
    kinds = many(120)
    for kind in kinds:
        fill(engine, 1, kind)
    claims = sweep_all(engine, claimer(kinds))
    assert sorted(kinds) == sorted(rows[0].task_type for rows in claims)


def test_held_crowds_do_not_hide_others(db_url: str) -> None:
    """Types of which others hold all tasks are passed over, however many there are."""
    engine = create_engine(db_url)
    kinds = many(120)
    for kind in kinds[:-1]:
        fill(engine, 1, kind)
    with engine.connect() as holder, engine.connect() as other:
        held = claimer(kinds, batch_size=200)
        assert 119 == len(sweep(holder, held))
        fill(engine, 1, kinds[-1])
        assert [kinds[-1]] == [row.task_type for row in sweep(other, claimer(kinds))]
    engine.dispose()


def test_a_worker_runs_by_priority_and_weight(engine: Engine, db_url: str) -> None:
    """A worker honours the priority of each task first, and then the weights of types."""
    ran: list[str] = []
    tasks = TaskRegistry()
    for kind in "AB":
        tasks.handler(kind)(lambda session, params, task: ran.append(task.task_type))
        fill(engine, 40, kind)
    with_priority(engine, -1, 3, "B")
    options = {"concurrency": 1, "drain": True, "weights": {"A": 3}}
    assert 0 == Worker(tasks, db_url, **options).run()
    assert ["B"] * 3 == ran[:3]
    assert 29 <= ran[3:43].count("A") <= 31
