"""Who is next: equal turns, chance, priorities, and the time that a task waits for."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from claiming import CLAIMS, TASK, claimer, fill, ids, sweep, sweep_all, take
from sqlalchemy import TIMESTAMP, cast, literal, text

from pgtask_sa import ConfigurationError, TaskRegistry, Worker
from pgtask_sa.claim import fair_claim, random_claim
from pgtask_sa.claim_orders import ClaimOptions
from pgtask_sa.turns import MANY_CLAIMS, REPLAN_INTERVAL, SLOW_CLAIM, Claimer

if TYPE_CHECKING:
    from sqlalchemy import Engine

EVERY_ORDER = pytest.mark.parametrize("order", ["fair", "random", "tablesample"])


def types_of(claims: list[list[Any]]) -> list[str]:
    return [row.task_type for rows in claims for row in rows]


def even_tickets(engine: Engine, count: int) -> None:
    """Spread the tickets of the tasks 1 to count evenly, so that all have the same chance."""
    with engine.begin() as connection:
        connection.execute(text(f"update task set ticket = (task_id - 0.5) / {count}"))


def first_of(engine: Engine, chooser: Claimer, times: int) -> Counter[int]:
    """Claim one task again and again, and count which it is."""
    found: Counter[int] = Counter()
    with engine.connect() as connection:
        for _ in range(times):
            found.update(ids(sweep(connection, chooser)))
            connection.rollback()
    return found


# -- equal turns --------------------------------------------------------------------------------


def test_a_flood_does_not_starve_another_type(engine: Engine) -> None:
    """With 1000 tasks of one type waiting, 10 of another are done within the first 100 claims."""
    fill(engine, 1000, "FLOOD")
    fill(engine, 10, "FEW")
    chooser = claimer(["FLOOD", "FEW"])
    with engine.connect() as connection:
        claims = [sweep(connection, chooser) for _ in range(100)]
    assert {"FEW": 10, "FLOOD": 90} == Counter(types_of(claims))


def test_types_get_equal_turns(engine: Engine) -> None:
    """Three types of very different numbers get about the same number of claims."""
    for task_type, count in (("A", 1500), ("B", 400), ("C", 200)):
        fill(engine, count, task_type)
    chooser = claimer(["A", "B", "C"])
    with engine.connect() as connection:
        turns = Counter(types_of([sweep(connection, chooser) for _ in range(300)]))
    assert 300 == sum(turns.values())
    assert all(60 < turns[task_type] < 140 for task_type in "ABC")


def test_types_without_tasks_cost_no_turn(engine: Engine) -> None:
    """A claim goes on to the next type until it has what it asked for."""
    fill(engine, 3, "K7")
    fill(engine, 3, "K3")
    with engine.connect() as connection:
        rows = sweep(connection, claimer([f"K{n}" for n in range(20)], batch_size=6))
        assert {"K3": 3, "K7": 3} == Counter(types_of([rows]))


def test_only_the_types_asked_for(engine: Engine) -> None:
    """Types that a worker has no handlers for are left to others, in every order."""
    fill(engine, 3, "MINE")
    fill(engine, 3, "OTHER")
    for order in ("fair", "random", "tablesample"):
        chooser = claimer(["MINE"], order=order, batch_size=10)
        with engine.connect() as connection:
            assert {"MINE": 3} == Counter(types_of([sweep(connection, chooser)]))


# -- chance -------------------------------------------------------------------------------------


@EVERY_ORDER
def test_each_task_is_first_sometimes(engine: Engine, order: str) -> None:
    """Of five tasks each one is claimed first sometimes."""
    fill(engine, 5)
    even_tickets(engine, 5)
    assert {1, 2, 3, 4, 5} == set(first_of(engine, claimer(order=order), 120))


def test_each_task_draws_its_own_ticket(engine: Engine) -> None:
    """Tickets are drawn per row, from 0 to 1, also in one bulk insert."""
    fill(engine, 100)
    with engine.connect() as connection:
        tickets = connection.scalars(text("select ticket from task")).all()
    assert len(set(tickets)) > 95
    assert 0 <= min(tickets) < 0.2
    assert 0.8 < max(tickets) < 1


@pytest.mark.parametrize("pivot", [0.0, 0.3, 0.999999, 1.0])
def test_the_lottery_wraps_around(engine: Engine, pivot: float) -> None:
    """Wherever the lottery starts, above all tickets too, a claim finds every waiting task."""
    fill(engine, 3)
    even_tickets(engine, 3)
    with engine.connect() as connection:
        rows = take(connection, fair_claim(TASK, 3, due_first=False), pivot=pivot)
        assert [1, 2, 3] == sorted(ids(rows))


def test_the_lottery_starts_at_its_pivot(engine: Engine) -> None:
    """The first task claimed is the one with the next higher ticket."""
    fill(engine, 4)
    even_tickets(engine, 4)  # 0.125, 0.375, 0.625, 0.875
    claim = fair_claim(TASK, 1, due_first=False)
    found = []
    with engine.connect() as connection:
        for pivot in (0.0, 0.2, 0.4, 0.7, 0.9):
            found += ids(take(connection, claim, pivot=pivot))
            connection.rollback()
    assert [1, 2, 3, 4, 1] == found


# -- priorities ---------------------------------------------------------------------------------


@EVERY_ORDER
@pytest.mark.parametrize("batch_size", [1, 4])
def test_ranks_are_strict(engine: Engine, order: str, batch_size: int) -> None:
    """Lower ranks are claimed before higher ones, planned tasks included; unnamed is rank 0."""
    for task_type in ("LATE", "PLAIN", "EARLY"):
        fill(engine, 4, task_type)
        fill(engine, 4, task_type, run_at="now()")
    ranks = {"EARLY": -5, "LATE": 7}
    options = {"order": order, "ranks": ranks, "batch_size": batch_size, "sample": 100}
    claims = sweep_all(engine, claimer(["LATE", "PLAIN", "EARLY"], **options))
    assert ["EARLY"] * 8 + ["PLAIN"] * 8 + ["LATE"] * 8 == types_of(claims)


@EVERY_ORDER
def test_a_batch_runs_in_the_order_of_ranks(engine: Engine, db_url: str, order: str) -> None:
    """A worker runs each batch by rank, though RETURNING gives rows in any order."""
    ran: list[str] = []
    tasks = TaskRegistry()
    for task_type in ("LATE", "PLAIN", "EARLY"):
        tasks.handler(task_type)(lambda session, params, task: ran.append(task.task_type))
        fill(engine, 10, task_type)
    ranks = {"EARLY": -5, "LATE": 7}
    options = {"order": order, "sample": 100, "priority": ranks, "batch_size": 25}
    assert 0 == Worker(tasks, db_url, concurrency=1, drain=True, **options).run()
    assert ["EARLY"] * 10 + ["PLAIN"] * 10 + ["LATE"] * 10 == ran


@pytest.mark.parametrize("rank", ["1", 1.5, None, True, 2**31])
def test_ranks_must_be_numbers(rank: Any) -> None:
    """A rank that is no integer, or none that Postgres can hold, is refused."""
    with pytest.raises(ConfigurationError, match="priority of A must be an integer"):
        ClaimOptions(ranks={"A": rank})


def test_a_type_name_cannot_break_the_case(engine: Engine) -> None:
    """A type named in a priority is a value, whatever characters it is made of."""
    name = """'; drop table task; -- %s :x "%" \\"""
    with engine.begin() as connection:
        insert = text("insert into task (task_type, params) values (:name, '{}'), ('A', '{}')")
        connection.execute(insert, {"name": name})
    claims = sweep_all(engine, claimer(["A", name], order="random", ranks={name: -1}))
    assert [name, "A"] == types_of(claims)


@pytest.mark.parametrize("sample", [0, -1, 101, float("nan")])
def test_samples_are_per_cents(sample: float) -> None:
    """A sample is over 0 and up to 100 per cent."""
    with pytest.raises(ConfigurationError, match="sample must be over 0 up to 100 per cent"):
        ClaimOptions(sample=sample)


def test_orders_are_known() -> None:
    """An order that does not exist is refused."""
    with pytest.raises(ConfigurationError, match="order must be one of"):
        ClaimOptions(order="fifo")


# -- time ---------------------------------------------------------------------------------------


def moment(value: str) -> Any:
    return cast(literal(value), TIMESTAMP(timezone=True))


@pytest.mark.parametrize("order", list(CLAIMS))
def test_not_before_its_time(engine: Engine, order: str) -> None:
    """A task is claimed from the moment on that it waits for, by the server's clock."""
    fill(engine, 1, run_at="statement_timestamp() + interval '1 hour'")
    claim = CLAIMS[order](TASK, 1)
    with engine.connect() as connection:
        assert [] == take(connection, claim)
        connection.execute(text("update task set run_at = statement_timestamp()"))
        assert [1] == ids(take(connection, claim))


@pytest.mark.parametrize(
    ("now", "expected"), [("2030-01-01 11:59:59.999999Z", []), ("2030-01-01 12:00Z", [1])]
)
def test_own_time(engine: Engine, now: str, expected: list[int]) -> None:
    """The clock of a claim can be given, as any expression."""
    fill(engine, 1, run_at="'2030-01-01 12:00Z'")
    for claim in (
        fair_claim(TASK, 5, due_first=True, now=moment(now)),
        random_claim(TASK, 5, now=moment(now)),
    ):
        with engine.connect() as connection:
            assert expected == ids(take(connection, claim))


@pytest.mark.parametrize("order", list(CLAIMS))
def test_moments_that_python_has_not(engine: Engine, order: str) -> None:
    """Tasks with infinite or ancient moments are claimed; one unreadable row would block all."""
    moments = ("'-infinity'", "'4000-01-01 BC'")
    for run_at in moments:
        fill(engine, 1, run_at=run_at)
    with engine.connect() as connection:
        for task_id, created_at in enumerate((*moments, "'infinity'", "'20000-01-01'"), 1):
            fill(connection, 1 if task_id > 2 else 0)
            update = f"update task set created_at = {created_at} where task_id = {task_id}"
            connection.execute(text(update))
        rows = take(connection, CLAIMS[order](TASK, 10))
    assert [(1, 1), (2, 1), (3, 9999), (4, 9999)] == sorted(
        (row.task_id, row.created_at.year) for row in rows
    )


def test_the_longest_due_goes_first(engine: Engine) -> None:
    """Among planned tasks of a type the one that is longest due is claimed first."""
    fill(engine, 5, run_at="now() - interval '1 minute' * g")
    claims = sweep_all(engine, claimer())
    assert [5, 4, 3, 2, 1] == ids([rows[0] for rows in claims])


@pytest.mark.parametrize(("flood", "few"), [("null", "now()"), ("now()", "null")])
def test_retries_and_new_tasks_do_not_starve_each_other(
    engine: Engine, flood: str, few: str
) -> None:
    """Of one type, 1000 new tasks do not hold up 5 retries for 60 claims, nor the reverse."""
    fill(engine, 1000, run_at=flood)
    fill(engine, 5, run_at=few)
    chooser = claimer()
    with engine.connect() as connection:
        found = [task_id for _ in range(60) for task_id in ids(sweep(connection, chooser))]
    assert {1001, 1002, 1003, 1004, 1005} == {task_id for task_id in found if task_id > 1000}


@pytest.mark.parametrize(("claims", "seconds"), [(MANY_CLAIMS, 0.0), (1, 2 * SLOW_CLAIM)])
def test_plans_are_renewed_now_and_then(
    monkeypatch: pytest.MonkeyPatch, claims: int, seconds: float
) -> None:
    """After many claims, or a slow one, a claimer asks for new plans, once in an interval."""
    clock = [100.0]
    monkeypatch.setattr("pgtask_sa.turns.time.monotonic", lambda: clock[0])
    chooser = claimer()
    asked = []
    for step in (0.0, REPLAN_INTERVAL, 0.0, REPLAN_INTERVAL / 2, REPLAN_INTERVAL / 2):
        clock[0] += step
        asked.append(chooser.must_replan())
        for _ in range(claims):
            next(iter(chooser.statements()))
            clock[0] += seconds
            chooser.learn([])
    assert [False, True, False, False, True] == asked


def test_a_lane_with_little_to_do_keeps_its_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """To plan anew would take as long as all the rest until a single task starts."""
    clock = [100.0]
    monkeypatch.setattr("pgtask_sa.turns.time.monotonic", lambda: clock[0])
    chooser = claimer()
    asked = []
    for _ in range(10):
        next(iter(chooser.statements()))
        chooser.learn([])
        clock[0] += REPLAN_INTERVAL
        asked.append(chooser.must_replan())
    assert [False] * 10 == asked


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Keep the worker's log lines out of the reports."""
    caplog.set_level(logging.CRITICAL, "pgtask_sa")
