"""Claims at the end of a queue that is all but empty, past all that is dead."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import own_models
import pytest
from claiming import TASK, analyze, claimer, fill, ids, sweep, sweep_all
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from own_models import EnumJob
from plans import Plan, explain
from sqlalchemy import NullPool, create_engine, text
from tail_lanes import HELD, LATE, STEPS, Lanes
from waiting import wait_until

from pgtask_sa import since, tail
from pgtask_sa.claim import fair_claim
from pgtask_sa.statements import peek
from pgtask_sa.tail import LAG, Lookout, Tail
from pgtask_sa.tail_claims import MOST_WAITING, tail_claim, tail_look
from pgtask_sa.turns import SURVEY_INTERVAL, Claimer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from databases import Databases
    from sqlalchemy import Engine

KINDS = ("A", "B", "C")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Stop the clock; a test moves it."""
    now = [1000.0]
    monkeypatch.setattr("pgtask_sa.turns.time.monotonic", lambda: now[0])
    return now


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> list[float]:
    """Let every claim be slow, and every look; the next thorough look is put off for long."""
    monkeypatch.setattr(tail, "SLOW", -1.0)
    monkeypatch.setattr(tail, "QUICK", -1.0)
    monkeypatch.setattr(tail, "FEW", -1)
    monkeypatch.setattr(tail, "PAUSE", 1000.0)
    return clock


def at_the_end(engine: Engine, clock: list[float], types: Any = ("A",), **options: Any) -> Claimer:
    """Return a lane that claims at the end; tasks that there are now are below its floor."""
    chooser = claimer(types, **options)
    with engine.connect() as connection:
        for _ in range(3):
            for statement, parameters in chooser.statements():
                rows = connection.execute(statement, parameters).mappings().all()
                if chooser.learn(rows):
                    break
            connection.rollback()
            clock[0] += LAG
    assert chooser._detours is not None
    assert chooser._detours.tail.in_use
    return chooser


def look_again(clock: list[float]) -> None:
    """Let a lane look before its next claim, and its floor rise."""
    clock[0] += LAG


# -- when ------------------------------------------------------------------------------------------


def rows_of(
    *task_ids: int, newest: int | None, now: float = 0.0, dead: int | None = 100_000
) -> list[dict[str, Any]]:
    """Return what a look finds."""
    row = {"level": 0, "kind": "A", "due": None}
    found: list[dict[str, Any]] = [{**row, "task_id": n} for n in task_ids]
    return [*found, {"task_id": newest, "level": None, "kind": None, "due": now, "dead": dead}]


def looked(end: Tail, clock: list[float], rows: list[dict[str, Any]], took: float = 0.01) -> Any:
    """Look, and return what was sent."""
    _, given = end.look([(0, "A")], ["A"])
    clock[0] += took
    end.learn(rows)
    return given


def test_slow_claims_lead_to_the_end(clock: list[float]) -> None:
    """After some slow claims a lane looks, and once more after a second; then it claims there."""
    end, found = Tail(TASK), []
    for _ in range(5):
        end.timed(0.02)
    for newest in (90, 95):
        found.append((end.must_look(), end.in_use))
        assert tail.FIRST == looked(end, clock, rows_of(7, newest=newest))["floor"]
        found.append((end.must_look(), end.in_use))
        clock[0] += LAG
    assert [(True, False), (False, False), (True, False), (False, True)] == found
    _, given = end.claim([(0, "A")], ["A"], new_first=True)
    assert (95, [7]) == (given["floor"], given["others"])  # what is newer than the last look


def test_one_slow_claim_is_not_enough(clock: list[float]) -> None:
    """Once it may be the machine's fault, and with a COMMIT that of the disk."""
    end = Tail(TASK)
    end.timed(5.0)
    assert not end.must_look()
    for _ in range(50):
        end.timed(0.0095, along=True)
    assert not end.must_look()
    for _ in range(50):
        end.timed(0.0095)
    assert end.must_look()


def test_claims_that_are_quick_again_need_no_end(clock: list[float]) -> None:
    """If in the second between the two looks claims are quick again, they stay as they are."""
    end = Tail(TASK)
    for _ in range(5):
        end.timed(0.02)
    looked(end, clock, rows_of(newest=90))
    for _ in range(50):
        end.timed(0.0005)
    clock[0] += LAG
    assert not end.must_look()


@pytest.mark.parametrize(
    ("count", "took", "dead"),
    [(MOST_WAITING, 0.1, None), (3, 0.0005, None), (3, 0.1, 1_000)],
    ids=["many wait", "the look is quick", "few are dead"],
)
def test_a_look_leads_back_to_the_lottery(
    slow: list[float], count: int, took: float, dead: int | None
) -> None:
    """Where many tasks wait, or where dead rows are not the cause, the lottery is as good."""
    end = Tail(TASK)
    for _ in range(2):
        looked(end, slow, rows_of(newest=90))
        slow[0] += LAG
    assert end.in_use
    tail.QUICK, tail.FEW = 0.001, 2_000
    slow[0] += 5000
    looked(end, slow, rows_of(*range(count), newest=90, dead=dead), took)
    assert not end.in_use


@pytest.mark.parametrize(("claims_take", "seconds"), [(0.02, 2.5), (0.0005, 10.0)])
def test_when_a_crowd_may_be_gone(clock: list[float], claims_take: float, seconds: float) -> None:
    """A lane that knows of dead rows looks now and then, and sooner if claims are slow again."""
    end = Tail(TASK)
    end.is_wanted = True
    looked(end, clock, rows_of(*range(MOST_WAITING), newest=2000), 0.05)
    for _ in range(10):
        end.timed(claims_take)
    found = []
    for wait in (seconds - 0.1, 0.2):
        clock[0] += wait
        found.append(end.must_look())
    assert [False, True] == found


def test_thorough_looks_take_a_fiftieth_of_all_time(
    slow: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one that took 0.1 s come five seconds of looks from the floor on."""
    monkeypatch.setattr(tail, "PAUSE", 0.5)
    end, found = Tail(TASK), []
    for seconds in (LAG, 4.0, 1.5):
        looked(end, slow, rows_of(newest=90), 0.1)
        slow[0] += seconds
        found.append(end.thorough)
    looked(end, slow, rows_of(newest=90), 0.1)
    found.append(end.thorough)
    assert [True, True, False, True] == found


def test_lanes_by_key_stay_as_they_are() -> None:
    """Turns by a key, and orders that a statement makes by itself, know no end."""
    key = claimer(table=own_models.PlainJob.__table__, fair_by="tenant")
    assert [None, None] == [chooser._detours for chooser in (key, claimer(order="random"))]


# -- what is claimed -------------------------------------------------------------------------------


def add_urgent(engine: Engine, priority: int, kind: str, count: int) -> None:
    """Add tasks of a priority."""
    values = f"select '{kind}', {priority} from generate_series(1, {count})"
    with engine.begin() as connection:
        connection.execute(text(f"insert into task (task_type, priority) {values}"))


def test_what_waited_before_is_claimed(engine: Engine, slow: list[float]) -> None:
    """Tasks below the floor, that were known when it rose, and those above, in any order."""
    fill(engine, 3)
    fill(engine, 2, run_at="now() - interval '1 hour'")
    chooser = at_the_end(engine, slow)
    fill(engine, 4)
    claims = sweep_all(engine, chooser)
    assert list(range(1, 10)) == sorted(ids([row for rows in claims for row in rows]))


def test_priorities_ranks_and_turns_hold(engine: Engine, slow: list[float]) -> None:
    """At the end as everywhere: priority, then rank; then types have equal turns."""
    add_urgent(engine, -5, "B", 2)  # else it would be known after the first claim only
    chooser = at_the_end(engine, slow, KINDS, ranks={"C": -1})
    for kind, count in (("A", 6), ("B", 3), ("C", 2)):
        fill(engine, count, kind)
    found = [(row.priority, row.task_type) for rows in sweep_all(engine, chooser) for row in rows]
    assert [(-5, "B"), (-5, "B"), (0, "C"), (0, "C")] == found[:4]
    assert {(0, "A"): 3, (0, "B"): 3} == Counter(found[4:10])


def test_an_urgent_task_is_noticed_in_time(engine: Engine, slow: list[float]) -> None:
    """One of a priority that was never met is claimed as soon as the interval is over."""
    chooser = at_the_end(engine, slow)
    fill(engine, 3)
    with engine.connect() as connection:
        sweep(connection, chooser)
        add_urgent(engine, -7, "A", 1)
        slow[0] += SURVEY_INTERVAL
        assert [-7] == [row.priority for row in sweep(connection, chooser)]


def test_the_order_is_random(engine: Engine, slow: list[float]) -> None:
    """Of ten that wait each comes first at some time."""
    chooser = at_the_end(engine, slow)
    fill(engine, 10)
    found: set[int] = set()
    with engine.connect() as connection:
        for _ in range(150):
            found.update(ids(sweep(connection, chooser)))
            connection.rollback()
    assert set(range(1, 11)) == found


def test_new_and_planned_tasks_cannot_starve_each_other(engine: Engine, slow: list[float]) -> None:
    """Of both kinds some are claimed, whichever is the crowd."""
    chooser = at_the_end(engine, slow)
    fill(engine, 90)
    fill(engine, 90, run_at="now()")
    with engine.connect() as connection:
        found = ids([row for _ in range(40) for row in sweep(connection, chooser)])
    assert {True, False} == {task_id <= 90 for task_id in found}


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_claim_takes_no_more_than_it_may(
    engine: Engine, slow: list[float], batch_size: int
) -> None:
    """No claim takes or locks more than the batch, and two lanes never get the same."""
    chooser = at_the_end(engine, slow, batch_size=batch_size)
    other = at_the_end(engine, slow, batch_size=batch_size)
    fill(engine, 20)
    with engine.connect() as one, engine.connect() as two:
        found = [ids(sweep(*each)) for each in [(one, chooser), (two, other)] * 2]
    assert [batch_size] * 4 == list(map(len, found))
    assert 4 * batch_size == len({task_id for each in found for task_id in each})


def test_a_task_that_was_held_while_the_floor_rose(engine: Engine, slow: list[float]) -> None:
    """When another lane gives it back it is claimed at once."""
    chooser = at_the_end(engine, slow)
    with engine.connect() as holder, engine.connect() as connection:
        fill(engine, 1)
        assert [1] == ids(sweep(holder, claimer()))
        for _ in range(3):
            assert [] == ids(sweep(connection, chooser))
            look_again(slow)
        fill(engine, 1)
        assert [2] == ids(sweep(connection, chooser))
        assert [] == ids(sweep(connection, chooser))
        holder.rollback()
        assert [1] == ids(sweep(connection, chooser))


def test_a_task_that_falls_due_below_the_floor(engine: Engine, slow: list[float]) -> None:
    """A planned task is claimed when its time has come, however old its number."""
    fill(engine, 1, run_at="now() + interval '1 day'")
    chooser = at_the_end(engine, slow)
    with engine.connect() as connection:
        assert [] == ids(sweep(connection, chooser))
        connection.commit()
        with engine.begin() as other:
            other.execute(text("update task set run_at = now() - interval '0.5 s'"))
        assert [1] == ids(sweep(connection, chooser))


def test_a_task_that_fell_due_while_nobody_looked(slow: list[float]) -> None:
    """However long ago the last look was, its time is where the next claim and look begin."""
    end = Tail(TASK)
    for now in (5000.0, 5001.0):
        looked(end, slow, rows_of(newest=int(now) + 90, now=now))
        slow[0] += LAG
    slow[0] += 5  # and no thorough look is due
    _, claim = end.claim([(0, "A")], ["A"], new_first=True)
    look = looked(end, slow, rows_of(newest=90, now=5007.0))
    assert [5001.0 - LAG] * 2 == [claim["since"], look["since"]]
    assert [5091, 5090] == [claim["floor"], look["floor"]]  # what was committed late is looked for
    assert 5007.0 - LAG == looked(end, slow, rows_of(newest=90))["since"]


def test_a_commit_a_moment_later_is_found_by_the_next_look(
    engine: Engine, slow: list[float]
) -> None:
    """A task that got its number before a look and is committed after it is above the floor."""
    chooser = at_the_end(engine, slow)
    with engine.connect() as late, engine.connect() as connection:
        fill(late, 1)
        fill(engine, 1)
        assert [[2], []] == [ids(sweep(connection, chooser)) for _ in range(2)]  # then it looks
        late.commit()
        fill(engine, 1)
        assert [[3], []] == [ids(sweep(connection, chooser)) for _ in range(2)]
        assert [1] == ids(sweep(connection, chooser))


def test_a_crowd_leads_to_the_lottery_with_a_bound_and_back(
    engine: Engine, slow: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While many wait they are claimed by lottery; when they are done, at the end again."""
    monkeypatch.setattr(since, "QUICK", -1.0)
    chooser = at_the_end(engine, slow, "AB", batch_size=500)
    ways = chooser._detours
    assert ways is not None
    fill(engine, 2 * MOST_WAITING, "A")
    fill(engine, 200, "B", run_at="now()")
    found: Counter[str] = Counter()
    with engine.connect() as connection:
        for _ in range(7):
            found.update(row.task_type for row in sweep(connection, chooser))
            slow[0] += SURVEY_INTERVAL
        assert (False, True) == (ways.tail.in_use, ways.since.on)
        assert {"A": 2 * MOST_WAITING, "B": 200} == found
        connection.commit()
        for _ in range(2):
            slow[0] += tail.PAUSE
            sweep(connection, chooser)
    assert ways.tail.in_use


def test_a_late_commit_waits_for_a_thorough_look(engine: Engine, slow: list[float]) -> None:
    """A task whose number is older than the floor is found by it, and not before."""
    with engine.connect() as late, engine.connect() as connection:
        fill(late, 1)
        fill(engine, 1)
        chooser = at_the_end(engine, slow)
        late.commit()
        assert [[2], []] == [ids(sweep(connection, chooser)) for _ in range(2)]
        slow[0] += tail.PAUSE
        assert [1] == ids(sweep(connection, chooser))


def test_a_batch_at_the_end_of_an_enum(engine: Engine, slow: list[float]) -> None:
    """Types that are a native enum, in a schema of their own, are no matter."""
    own_models.create_all(engine)
    fill(engine, 3, "bye-mail", table="jobs.enum_job")
    chooser = at_the_end(
        engine, slow, ["bye-mail", "welcome-mail"], table=EnumJob.__table__, batch_size=2
    )
    fill(engine, 3, "welcome-mail", table="jobs.enum_job")
    claims = sweep_all(engine, chooser)
    assert {"bye-mail": 3, "welcome-mail": 3} == Counter(
        r.task_type for rows in claims for r in rows
    )


def test_a_role_that_may_not_read_the_sequence(engine: Engine, slow: list[float]) -> None:
    """Then the greatest number that is seen must do."""
    fill(engine, 5)
    with engine.begin() as connection:
        connection.execute(text("create role plain"))
        connection.execute(text("grant select, delete, update on task to plain"))
        connection.execute(text("set local role plain"))
        given = {"levels": [0], "types": ["A"], "mine": ["A"], "floor": 2, "since": 0.0}
        rows = connection.execute(tail_look(TASK), {**given, "others": [1]}).all()
        connection.rollback()
    expected = {(n, 0, "A") for n in range(1, 6)} | {(5, None, None)}
    assert expected == {tuple(row)[:3] for row in rows}


def test_the_last_number_is_that_of_the_sequence(engine: Engine) -> None:
    """Also if no task is left that has it."""
    fill(engine, 5)
    given = {"levels": [0], "types": ["A"], "mine": ["A"], "floor": 2, "since": 0.0}
    with engine.begin() as connection:
        connection.execute(text("delete from task"))
        rows = connection.execute(tail_look(TASK), {**given, "others": []}).all()
    assert [(5, None, None)] == [tuple(row)[:3] for row in rows]


def test_dead_rows_are_told(engine: Engine) -> None:
    """A look tells how many there are, as soon as the server process that left them has said so."""
    fill(engine, 50)
    end = create_engine(engine.url, poolclass=NullPool)  # its processes tell it when they end
    with end.begin() as connection:
        connection.execute(text("alter table task set (autovacuum_enabled = off)"))
        connection.execute(text("delete from task"))
    given = {"levels": [], "types": [], "mine": [], "floor": 1, "since": 0.0, "others": []}

    def dead() -> Any:
        with end.connect() as connection:
            (last,) = connection.execute(tail_look(TASK), given)
            return last.dead == 50  # noqa: PLR2004

    wait_until(dead)


# -- looking for work ------------------------------------------------------------------------------


def test_a_lookout_finds_what_a_peek_finds(engine: Engine, slow: list[float]) -> None:
    """Ready or not, and how soon the next task falls due."""
    lookout = Lookout(TASK)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:

        def ask(statement: Any, given: Any) -> Any:
            return connection.execute(statement, given).mappings().all()

        def both() -> list[bool]:
            slow[0] += LAG
            found = connection.execute(peek(TASK), {"types": ["A"]}).one()
            ready, seconds = lookout.look(ask, ["A"])
            assert (seconds is None) == (found.seconds is None)
            assert seconds is None or abs(seconds - found.seconds) < 5
            return [found.ready, ready]

        found = [both() for _ in range(3)]
        assert lookout._tail.in_use
        for run_at in ("now() + interval '1 hour'", "now() - interval '0.5 s'", "null"):
            fill(engine, 1, run_at=run_at)
            found.append(both())
        with engine.begin() as other:
            other.execute(text("delete from task where run_at < now() or run_at is null"))
        found.append(both())
    assert [[False] * 2] * 4 + [[True] * 2] * 2 + [[False] * 2] == found


# -- nothing is skipped for ever -------------------------------------------------------------------


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(steps=STEPS, batch_size=st.sampled_from([1, 3]))
@example(steps=LATE, batch_size=1)
@example(steps=HELD, batch_size=3)
def test_nothing_is_skipped_for_ever(
    engine: Engine, slow: list[float], steps: list[Any], batch_size: int
) -> None:
    """Late commits, rollbacks, rising floors: a thorough look finds what they leave behind."""
    with engine.begin() as connection:
        connection.execute(text("truncate task restart identity"))
    choosers = [at_the_end(engine, slow, "AB", batch_size=batch_size) for _ in range(3)]
    Lanes(engine, slow, choosers).check(steps)


# -- what it costs ---------------------------------------------------------------------------------

DEAD = 30_000


@pytest.fixture(scope="module", params=["unknown", "taken"])
def haunted(
    databases: Databases, template_db: str, request: pytest.FixtureRequest
) -> Iterator[Engine]:
    """30,000 dead tasks that a snapshot holds, and 5 that wait; without statistics, or with."""
    with databases.temporary(template_db) as url:
        engine = create_engine(url)
        holder = engine.connect().execution_options(isolation_level="REPEATABLE READ")
        holder.execute(text("alter table task set (autovacuum_enabled = off)"))
        holder.commit()
        holder.execute(text("select count(*) from task"))
        for run_at, count in (("null", DEAD - 2000), ("now() - interval '1 hour'", 2000)):
            fill(engine, count, run_at=run_at)
        with engine.begin() as connection:
            connection.execute(text("delete from task"))
        fill(engine, 5)
        if request.param == "taken":
            analyze(engine)
        yield engine
        holder.close()
        engine.dispose()


END: dict[str, Any] = {
    "levels": [0, 0],
    "types": ["A", "B"],
    "mine": ["A", "B"],
    "floor": DEAD - 500,
    "since": time.time() - 1.5,  # the server is on this machine
    "others": [],
}


@pytest.mark.parametrize("others", [[], list(range(1, 50))], ids=["no others", "others"])
@pytest.mark.parametrize("limit", [1, 10])
def test_dead_rows_cost_a_claim_nothing(haunted: Engine, limit: int, others: list[int]) -> None:
    """At the end a claim touches some pages where one by lottery walks over the dead."""
    given = {**END, "others": others}
    with haunted.connect() as connection:
        plan = explain(connection, tail_claim(TASK, limit), **given, new_first=True)
        connection.rollback()
        lottery = explain(
            connection,
            fair_claim(TASK, 10, due_first=True),
            levels=[0],
            types=["A"],
            pivot=0.5,
        )
        connection.rollback()
    assert min(limit, 5) == plan.nodes[0]["Actual Rows"]
    assert plan.locked == min(limit, 5)
    assert lottery.buffers > 600
    if limit == 1:
        check_end(plan, 4 * len(others))
    else:  # to delete several, the whole of a table that is so small may be read once
        assert plan.buffers < 600


def check_end(plan: Plan, more: int = 0) -> None:
    """Assert that nothing but the end was walked."""
    assert 0 == plan.whole_table_scans
    assert plan.indexes <= {"task_pkey", "task_due_idx"}
    assert plan.buffers <= 150 + more


@pytest.mark.parametrize("next_due", [False, True])
def test_dead_rows_cost_a_look_nothing(haunted: Engine, next_due: bool) -> None:
    """A look from a floor on is some pages, too."""
    with haunted.connect() as connection:
        plan = explain(connection, tail_look(TASK, next_due=next_due), **END)
    check_end(plan)


def test_a_thorough_look_passes_by_them_once(haunted: Engine) -> None:
    """From the first number on it walks the primary key, page after page."""
    with haunted.connect() as connection:
        plan = explain(connection, tail_look(TASK), **{**END, "floor": tail.FIRST})
    assert 0 == plan.whole_table_scans
    assert plan.buffers < DEAD / 10
