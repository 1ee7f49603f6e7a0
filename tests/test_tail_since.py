"""Planned tasks beside a crowd, past all that had been planned and is dead."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import pytest
from claiming import TASK, analyze, claimer, fill, ids, sweep
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from plans import explain
from sqlalchemy import create_engine, text
from tail_lanes import HELD, LATE, STEPS, Lanes

from pgtask_sa import since, tail
from pgtask_sa.claim import fair_claim
from pgtask_sa.since import LAG, Since
from pgtask_sa.since_survey import survey_since
from pgtask_sa.statements import survey
from pgtask_sa.tail_claims import tail_claim, tail_look
from pgtask_sa.turns import SURVEY_INTERVAL

if TYPE_CHECKING:
    from collections.abc import Iterator

    from databases import Databases
    from sqlalchemy import Connection, Engine

    from pgtask_sa.turns import Claimer

HOUR_AGO = "now() - interval '1 hour'"
PAIR = (0, "A")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Stop the clock; a test moves it."""
    now = [1000.0]
    monkeypatch.setattr("pgtask_sa.turns.time.monotonic", lambda: now[0])
    return now


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> list[float]:
    """Let every claim be slow, and every queue a crowd; thorough looks are put off for long."""
    monkeypatch.setattr(tail, "SLOW", -1.0)
    monkeypatch.setattr(tail, "MOST_WAITING", 0)
    monkeypatch.setattr(tail, "QUICK", -1.0)
    monkeypatch.setattr(tail, "FEW", -1)
    monkeypatch.setattr(since, "QUICK", -1.0)
    for module, pause in ((tail, 5000.0), (since, 1000.0)):
        monkeypatch.setattr(module, "PAUSE", pause)
        monkeypatch.setattr(module, "RAREST", 2 * pause)
    return clock


def beside_a_crowd(
    connection: Connection, clock: list[float], types: Any = ("A",), **options: Any
) -> Claimer:
    """Return a lane that knows since when tasks may be due; those that waited before are gone."""
    chooser = claimer(types, **options)
    while sweep(connection, chooser):
        pass
    clock[0] += LAG
    assert [] == sweep(connection, chooser)
    assert bound_of(chooser) > -math.inf
    return chooser


def bound_of(chooser: Claimer) -> float:
    """Return since when a lane looks."""
    assert chooser._detours is not None
    assert chooser._detours.since.on
    return chooser._detours.since.bound


# -- when ------------------------------------------------------------------------------------------


def rows_of(*due: float, now: float, dead: int | None = 100_000) -> list[dict[str, Any]]:
    """Return what a survey finds."""
    rows = [{"level": 0, "kind": "A", "due": moment, "dead": None} for moment in due]
    return [*rows, {"level": None, "kind": None, "due": now, "dead": dead}]


def surveyed(bound: Since, clock: list[float], rows: list[Any], took: float = 0.01) -> Any:
    """Survey, and return what was sent."""
    _, given = bound.look([PAIR], ["A"])
    clock[0] += took
    bound.learn(rows)
    return given


@pytest.mark.parametrize(("survey_takes", "on"), [(0.02, True), (0.008, False)])
def test_surveys_that_are_slow_beside_claims(survey_takes: float, on: bool) -> None:
    """A bound is set where surveys are slow, but not where the machine is."""
    bound = Since(TASK)
    for _ in range(50):
        bound.claimed(0.007)
        bound.surveyed(survey_takes)
    assert on == bound.on


def test_quick_surveys_need_no_bound(clock: list[float]) -> None:
    """When thorough surveys are as quick as claims again, there is none."""
    bound = Since(TASK)
    bound.begin()
    seen = []
    for _ in range(40):
        surveyed(bound, clock, rows_of(now=5000.0), 0.0005)
        clock[0] += since.PAUSE
        seen.append(bound.on)
    assert [True, False] == [seen[0], seen[-1]]


@pytest.mark.parametrize(("dead", "on"), [(1_000, False), (None, True)])
def test_few_dead_rows_need_no_bound(clock: list[float], dead: int | None, on: bool) -> None:
    """Where few are dead it is something else that is slow; it may be that nobody can tell."""
    bound = Since(TASK)
    bound.begin()
    surveyed(bound, clock, rows_of(now=5000.0, dead=dead), 0.1)
    assert on == bound.on


def test_the_first_that_is_due_is_the_bound(clock: list[float]) -> None:
    """Or the time of the survey, if none is; that of the server, whatever our clock says."""
    bound = Since(TASK)
    bound.begin()
    assert -math.inf == bound.bound
    for rows in (rows_of(4000.0, 4500.0, now=5000.0), rows_of(now=5001.0)):
        surveyed(bound, clock, rows)
        clock[0] += 0.1
    assert 5001.0 - LAG == bound.bound
    surveyed(bound, clock, rows_of(4700.0, now=5002.0))
    assert 4700.0 - LAG == bound.bound


@pytest.mark.parametrize("moment", [-math.inf, -2e11])
def test_a_task_of_the_dawn_of_time(clock: list[float], moment: float) -> None:
    """Where one is due before any date that there may be, there is no bound."""
    bound = Since(TASK)
    bound.begin()
    surveyed(bound, clock, rows_of(moment, now=5000.0))
    assert -math.inf == bound.bound


def test_thorough_surveys_take_a_fiftieth_of_all_time(clock: list[float]) -> None:
    """After one that took 0.1 s come five seconds of surveys with a bound."""
    bound, found = Since(TASK), []
    bound.begin()
    for seconds in (1.0, 3.0, 1.5, 0.0):
        given = surveyed(bound, clock, rows_of(now=5000.0), 0.1)
        clock[0] += seconds
        found.append((given["thorough"], given["since"] == math.inf))
    assert [(True, True), (False, False), (False, False), (True, True)] == found


# -- what is claimed -------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 4])
def test_new_tasks_and_due_ones_are_claimed(
    engine: Engine, crowded: list[float], batch_size: int
) -> None:
    """Everything that waits, and no task twice."""
    with engine.connect() as connection:
        chooser = beside_a_crowd(connection, crowded, batch_size=batch_size)
        fill(engine, 10)
        fill(engine, 10, run_at="now()")
        found: list[int] = []
        while rows := sweep(connection, chooser):
            found += ids(rows)
    assert list(range(1, 21)) == sorted(found)


def test_a_task_that_is_held_keeps_the_bound(engine: Engine, crowded: list[float]) -> None:
    """One that another lane runs for long is claimed at once when it is given back."""
    with engine.connect() as holder, engine.connect() as connection:
        fill(engine, 1, run_at=HOUR_AGO)
        assert [1] == ids(sweep(holder, claimer()))
        chooser = beside_a_crowd(connection, crowded)
        assert bound_of(chooser) < time.time() - 3000
        holder.rollback()
        assert [1] == ids(sweep(connection, chooser))


@pytest.mark.parametrize("look", [since, tail], ids=["survey", "look at the end"])
def test_an_old_time_waits_for_a_thorough_look(
    engine: Engine, crowded: list[float], look: Any
) -> None:
    """A task that comes with a time long past is found by it, and not before."""
    with engine.connect() as connection:
        chooser = beside_a_crowd(connection, crowded)
        fill(engine, 1, run_at=HOUR_AGO)
        fill(engine, 1, run_at="now()")
        found = [ids(sweep(connection, chooser)) for _ in range(2)]
        assert [[2], []] == found
        crowded[0] += look.PAUSE
        assert [1] == ids(sweep(connection, chooser))


def test_a_pair_that_was_never_met(engine: Engine, crowded: list[float]) -> None:
    """A planned task of a priority that is new is found by a thorough survey."""
    with engine.connect() as connection:
        chooser = beside_a_crowd(connection, crowded)
        with engine.begin() as other:
            urgent = "insert into task (task_type, priority, run_at) values ('A', -3, now())"
            other.execute(text(urgent))
        assert [] == sweep(connection, chooser)
        crowded[0] += since.PAUSE
        assert [-3] == [row.priority for row in sweep(connection, chooser)]


def test_no_cold_pair_is_looked_for(engine: Engine, crowded: list[float]) -> None:
    """A pair of which nothing waits costs a claim a walk over all its dead: surveys find it."""
    with engine.connect() as connection:
        chooser = beside_a_crowd(connection, crowded, "ABC")
        fill(engine, 9, "A")
        sweep(connection, chooser)
        claims = [next(iter(chooser.statements()))[1]["types"] for _ in range(3)]
        assert [["A"]] * 3 == claims
        fill(engine, 1, "B")
        crowded[0] += 2 * SURVEY_INTERVAL
        found = {row.task_type for _ in range(3) for row in sweep(connection, chooser)}
        assert {"A", "B"} == found


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps=STEPS, batch_size=st.sampled_from([1, 3]))
@example(steps=LATE, batch_size=1)
@example(steps=HELD, batch_size=3)
def test_nothing_is_skipped_for_ever(
    engine: Engine, crowded: list[float], steps: list[Any], batch_size: int
) -> None:
    """Late commits, rollbacks, old times: a thorough survey finds what a bound leaves behind."""
    choosers = []
    with engine.begin() as connection:
        connection.execute(text("truncate task restart identity"))
    with engine.connect() as connection:
        for _ in range(3):
            choosers.append(beside_a_crowd(connection, crowded, "AB", batch_size=batch_size))
    Lanes(engine, crowded, choosers).check(steps)


# -- what it costs ---------------------------------------------------------------------------------

DEAD, CROWD = 20_000, 500


@pytest.fixture(scope="module", params=["unknown", "taken"])
def haunted(
    databases: Databases, template_db: str, request: pytest.FixtureRequest
) -> Iterator[Engine]:
    """20,000 dead planned tasks that a snapshot holds beside a crowd of new ones, and one due."""
    with databases.temporary(template_db) as url:
        engine = create_engine(url)
        holder = engine.connect().execution_options(isolation_level="REPEATABLE READ")
        holder.execute(text("alter table task set (autovacuum_enabled = off)"))
        holder.commit()
        holder.execute(text("select count(*) from task"))
        fill(engine, DEAD, run_at=HOUR_AGO)
        with engine.begin() as connection:
            connection.execute(text("delete from task"))
        fill(engine, CROWD)
        fill(engine, 1, run_at="now()")
        if request.param == "taken":
            analyze(engine)
        yield engine
        holder.close()
        engine.dispose()


@pytest.mark.parametrize("limit", [1, 10])
def test_a_bound_spares_claims_the_dead(haunted: Engine, limit: int) -> None:
    """A claim that looks for due tasks first takes one without walking over the dead."""
    buffers = {}
    with haunted.connect() as connection:
        for bounded in (True, False):
            claim = fair_claim(TASK, limit, due_first=True, bounded=bounded)
            given = {"since": time.time() - 600} if bounded else {}
            plan = explain(connection, claim, levels=[0], types=["A"], pivot=0.5, **given)
            connection.rollback()
            assert {"task_due_idx"} <= plan.indexes
            assert limit == plan.nodes[0]["Actual Rows"]
            assert plan.locked == limit
            buffers[bounded] = plan.buffers
    assert buffers[True] <= 60 + 12 * limit
    assert buffers[False] > 3 * buffers[True]


def test_a_bound_spares_surveys_the_dead(haunted: Engine) -> None:
    """A survey with a bound is some probes; a thorough one sees all, as one without does."""
    pairs = {"levels": [0], "kinds": ["A"]}
    near = {**pairs, "types": ["A"], "since": time.time() - 600, "thorough": False}
    whole = {**near, "since": math.inf, "thorough": True}
    with haunted.connect() as connection:
        plans = [explain(connection, survey_since(TASK), **given) for given in (near, whole)]
        plans.append(explain(connection, survey(TASK), types=["A"]))
    assert [0, 0, 0] == [plan.whole_table_scans for plan in plans]
    bounded, thorough, plain = (plan.buffers for plan in plans)
    assert bounded <= 60
    assert bounded < thorough / 3
    assert thorough < plain  # which walks over them twice


GIVEN: dict[str, Any] = {
    "levels": [0, 0],
    "types": ["A", "B"],
    "kinds": ["A", "B"],
    "mine": ["A", "B"],
    "floor": 1,
    "since": 0.0,
    "others": [],
    "new_first": True,
    "thorough": False,
}
STATEMENTS = {
    "claim": tail_claim(TASK, 1),
    "batch": tail_claim(TASK, 10),
    "look": tail_look(TASK),
    "lookout": tail_look(TASK, next_due=True),
    "survey": survey_since(TASK),
}


@pytest.mark.direct  # through a pooler nothing is prepared
@pytest.mark.parametrize("name", STATEMENTS)
def test_plans_are_kept(engine: Engine, name: str) -> None:
    """The server does not make a new plan each time, which takes longer than all the rest."""
    fill(engine, 3000)
    analyze(engine)
    kept = "select generic_plans from pg_prepared_statements where statement like '%statement_t%'"
    with engine.connect() as connection:
        compiled = STATEMENTS[name].compile(connection)
        with connection.connection.driver_connection.cursor() as cursor:
            for _ in range(8):
                cursor.execute(str(compiled), compiled.construct_params(GIVEN), prepare=True)
            assert [(3,)] == cursor.execute(kept).fetchall()
