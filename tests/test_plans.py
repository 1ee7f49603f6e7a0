"""What a statement costs does not grow with the backlog: indexes serve it, whatever is known."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from claiming import TASK, analyze, fill, take
from plans import Plan, explain
from sqlalchemy import create_engine, text

from pgtask_sa.claim import fair_claim
from pgtask_sa.claiming import REPLAN
from pgtask_sa.statements import count_waiting, peek, survey, waiting_kinds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from databases import Databases
    from sqlalchemy import Connection, Engine

BACKLOG = 100_000
READY, DUE, KEY = "task_ready_idx", "task_due_idx", "task_pkey"
LIMITS = pytest.mark.parametrize("limit", [1, 100])
DUE_FIRST = pytest.mark.parametrize("due_first", [False, True])


def backlog(url: str, *parts: tuple[str, str], known: bool) -> Engine:
    """Fill a database with a part of 100,000 tasks each of a type and a `run_at`."""
    engine = create_engine(url)
    with engine.begin() as connection:
        # statistics are part of the test: nobody else may take them meanwhile
        connection.execute(text("alter table task set (autovacuum_enabled = off)"))
        for task_type, run_at in parts:
            fill(connection, BACKLOG, task_type, run_at=run_at)
    if known:
        analyze(engine)
    return engine


@pytest.fixture(scope="module")
def full(databases: Databases, template_db: str) -> Iterator[Engine]:
    """100,000 tasks ready, as many due, and as many delayed; the planner knows."""
    with databases.temporary(template_db) as url:
        engine = backlog(
            url,
            ("READY", "null"),
            ("DUE", "now() - interval '1 s' * random()"),
            ("LATER", "now() + interval '1 day'"),
            known=True,
        )
        yield engine
        engine.dispose()


@pytest.fixture(scope="module", params=["READY", "DUE"])
def unknown(
    databases: Databases, template_db: str, request: pytest.FixtureRequest
) -> Iterator[tuple[str, Engine]]:
    """100,000 tasks of one type in a table without any statistics, as in a new queue."""
    run_at = {"READY": "null", "DUE": "now() - interval '1 s' * random()"}[request.param]
    with databases.temporary(template_db) as url:
        engine = backlog(url, (request.param, run_at), known=False)
        yield request.param, engine
        engine.dispose()


def plan_of_claim(
    connection: Connection, limit: int, types: list[str], *, due_first: bool = False
) -> Plan:
    claim = fair_claim(TASK, limit, due_first=due_first)
    return explain(connection, claim, levels=[0] * len(types), types=types, pivot=0.5)


def check_claim(plan: Plan, limit: int, taken: int, *indexes: str) -> None:
    """Assert what makes a claim's cost independent of the backlog."""
    assert plan.whole_table_scans == 0
    assert {*indexes, KEY} <= plan.indexes
    assert taken == plan.locked
    assert taken == plan.nodes[0]["Actual Rows"]
    assert plan.rows_touched <= max(limit, 10)
    assert plan.buffers <= 60 + 12 * limit


@LIMITS
@DUE_FIRST
@pytest.mark.parametrize(("task_type", "index"), [("READY", READY), ("DUE", DUE)])
def test_claim(full: Engine, limit: int, due_first: bool, task_type: str, index: str) -> None:
    """A claim walks the index of ready or of due tasks, and locks no more than it takes."""
    with full.connect() as connection:
        plan = plan_of_claim(connection, limit, [task_type], due_first=due_first)
    check_claim(plan, limit, limit, index)
    assert 1 == plan.lock_loops


@DUE_FIRST
def test_claim_with_nothing_but_delayed_tasks(full: Engine, due_first: bool) -> None:
    """100,000 tasks whose time has not come cost a claim nothing."""
    with full.connect() as connection:
        plan = plan_of_claim(connection, 1, ["LATER", "NONE"], due_first=due_first)
    check_claim(plan, 1, 0, READY, DUE)
    assert 2 == plan.lock_loops  # once for each type


@LIMITS
def test_claim_of_two_hundred_types(full: Engine, limit: int) -> None:
    """With handlers for 200 types, of which one has tasks, a claim is three probes for each."""
    types = [f"TYPE_{n}" for n in range(199)] + ["READY"]
    with full.connect() as connection:
        plan = plan_of_claim(connection, limit, types)
    assert plan.whole_table_scans == 0
    assert limit == plan.nodes[0]["Actual Rows"]
    assert plan.lock_loops <= 200
    assert plan.rows_touched <= 200
    assert plan.buffers <= 200 * 3 * 4 + 12 * limit


@LIMITS
@DUE_FIRST
def test_claim_in_a_new_queue(unknown: tuple[str, Engine], limit: int, due_first: bool) -> None:
    """Right after creation, before anybody took statistics, a claim walks the index as well."""
    task_type, engine = unknown
    with engine.connect() as connection:
        plan = plan_of_claim(connection, limit, [task_type, "NONE"], due_first=due_first)
    check_claim(plan, limit, limit, READY if task_type == "READY" else DUE)


PEEKS: dict[str, tuple[list[str], set[str]]] = {
    "ready": (["READY"], {READY}),
    "due": (["DUE"], {READY, DUE}),
    "delayed": (["LATER"], {READY, DUE}),
    "nothing": (["NONE", "NEITHER"], {READY, DUE}),
}


def check_read(plan: Plan, indexes: set[str], rows: int = 10) -> None:
    assert plan.whole_table_scans == 0
    assert indexes <= plan.indexes
    assert plan.rows_touched <= rows
    assert plan.buffers <= 60


@pytest.mark.parametrize("case", PEEKS)
def test_peek(full: Engine, case: str) -> None:
    """A look at the queue is a few probes, above all when there is nothing for this worker."""
    types, indexes = PEEKS[case]
    with full.connect() as connection:
        check_read(explain(connection, peek(TASK), types=types), indexes)


def test_peek_in_a_new_queue(unknown: tuple[str, Engine]) -> None:
    """A look at a queue without statistics is a few probes, too."""
    _, engine = unknown
    with engine.connect() as connection:
        check_read(explain(connection, peek(TASK), types=["NONE"]), {READY, DUE})


def test_peek_at_a_crowd_of_others(unknown: tuple[str, Engine]) -> None:
    """Where all tasks are of one type, looking for another type does not read them all."""
    _, engine = unknown
    with engine.connect() as connection:
        connection.execute(text("analyze task"))  # undone with the transaction
        check_read(explain(connection, peek(TASK), types=["NONE"]), {READY, DUE})


@pytest.mark.parametrize(
    ("types", "expected"),
    [(["READY"], [(0, "READY")]), (["DUE"], [(0, "DUE")]), (["LATER", "NONE"], [])],
)
def test_survey(full: Engine, types: list[str], expected: list[Any]) -> None:
    """A survey finds what waits now by some probes, and passes over types of others."""
    with full.connect() as connection:
        assert expected == [
            tuple(row) for row in connection.execute(survey(TASK), {"types": types})
        ]
        check_read(explain(connection, survey(TASK), types=types), {READY, DUE})


def test_survey_in_a_new_queue(unknown: tuple[str, Engine]) -> None:
    """A survey of a queue without statistics is some probes, too."""
    task_type, engine = unknown
    with engine.connect() as connection:
        check_read(explain(connection, survey(TASK), types=[task_type, "NONE"]), {READY, DUE})


@pytest.fixture(scope="module", params=["fresh", "stale"])
def levels(
    databases: Databases, template_db: str, request: pytest.FixtureRequest
) -> Iterator[Engine]:
    """20,000 tasks, ready and due, of 5 priorities and 4 types.

    Statistics are fresh, or from a time when there was one task.
    """
    with databases.temporary(template_db) as url:
        engine = backlog(url, known=False)
        with engine.begin() as connection:
            fill(connection, 1)
        analyze(engine)
        with engine.begin() as connection:
            connection.execute(
                text(
                    "insert into task (task_type, priority, run_at)"
                    " select 'K' || g % 4, g % 5 - 2, case when g % 2 = 0 then now() end"
                    " from generate_series(1, 20000) as g"
                )
            )
        if request.param == "fresh":
            analyze(engine)
        yield engine
        engine.dispose()


@LIMITS
@DUE_FIRST
def test_claim_in_turns(levels: Engine, limit: int, due_first: bool) -> None:
    """Of many priorities and types a claim locks what it takes, and nothing else."""
    pairs = [(level, f"K{n}") for level in range(-2, 3) for n in range(4)]
    claim = fair_claim(TASK, limit, due_first=due_first)
    given = {"levels": [level for level, _ in pairs], "types": [kind for _, kind in pairs]}
    with levels.connect() as connection:
        plan = explain(connection, claim, **given, pivot=0.5)
    check_claim(plan, limit, limit, DUE if due_first else READY)


def test_survey_of_priorities(levels: Engine) -> None:
    """Of 20 pairs among 20,000 tasks each costs some probes."""
    statement = survey(TASK)
    with levels.connect() as connection:
        rows = connection.execute(statement, {"types": ["K0", "K3"]}).all()
        plan = explain(connection, statement, types=["K0", "K3"])
    assert {(level, kind) for level in range(-2, 3) for kind in ("K0", "K3")} == set(
        map(tuple, rows)
    )
    assert 0 == plan.whole_table_scans
    assert {READY, DUE} <= plan.indexes
    assert plan.rows_touched <= 50
    assert plan.buffers <= 21 * 2 * 3 * 4


def test_waiting_kinds(full: Engine) -> None:
    """The types that wait are found by one probe each, however many tasks there are."""
    with full.connect() as connection:
        check_read(explain(connection, waiting_kinds(TASK)), {READY, DUE})


def test_count_waiting(full: Engine) -> None:
    """Counting a type reads no more than that type, and no further than asked."""
    with full.connect() as connection:
        plan = explain(connection, count_waiting(TASK, 50), kind="LATER")
        check_read(plan, {READY, DUE}, rows=50)


# -- the bounds above are worth something -------------------------------------------------------


def without(connection: Connection, index: str) -> None:
    """Drop an index for this transaction."""
    connection.execute(text(f"drop index {index}"))


@pytest.mark.parametrize(("index", "task_type"), [(READY, "READY"), (DUE, "DUE")])
def test_a_claim_without_its_index_is_noticed(full: Engine, index: str, task_type: str) -> None:
    """Without the index the checks of a claim fail: it reads and sorts the backlog."""
    with full.connect() as connection:
        without(connection, index)
        plan = plan_of_claim(connection, 1, [task_type])
        connection.rollback()
    assert plan.rows_touched >= BACKLOG
    with pytest.raises(AssertionError):
        check_claim(plan, 1, 1, index)


@pytest.mark.parametrize("index", [READY, DUE])
@pytest.mark.parametrize(
    ("statement", "parameters"),
    [
        (peek(TASK), {"types": ["NONE"]}),
        (waiting_kinds(TASK), {}),
        (survey(TASK), {"types": ["READY", "DUE"]}),
        (count_waiting(TASK, 50), {"kind": "LATER"}),
    ],
    ids=["peek", "waiting_kinds", "survey", "count_waiting"],
)
def test_a_look_without_its_index_is_noticed(
    full: Engine, index: str, statement: Any, parameters: dict[str, Any]
) -> None:
    """Without one of the indexes the checks of the reading statements fail."""
    with full.connect() as connection:
        without(connection, index)
        plan = explain(connection, statement, **parameters)
        connection.rollback()
    with pytest.raises(AssertionError):
        check_read(plan, {READY, DUE}, rows=50)


# -- plans that are kept ------------------------------------------------------------------------


def pages_of_a_prepared_claim(connection: Connection) -> int:
    """Execute the claim as a statement prepared before, and count the pages it looked at."""
    command = "explain (analyze, buffers, timing off, format json) execute claim('{0}', '{A}', 0.5)"
    top = connection.exec_driver_sql(command).scalar_one()[0]["Plan"]
    connection.rollback()
    return int(top["Shared Hit Blocks"] + top["Shared Read Blocks"])


def test_a_plan_from_a_small_queue_is_given_up(engine: Engine) -> None:
    """A claim prepared while the queue was small reads a big one whole, until `REPLAN`."""
    with engine.begin() as connection:
        connection.execute(text("alter table task set (autovacuum_enabled = off)"))
        fill(connection, 1)
    analyze(engine)
    claim = fair_claim(TASK, 1, due_first=False)
    with engine.connect() as connection:
        compiled = str(claim.compile(connection))
        body = compiled.replace("%(levels)s", "$1").replace("%(types)s", "$2")
        body = body.replace("%(pivot)s", "$3")
        connection.exec_driver_sql(f"prepare claim (int[], text[], real) as {body}")
        connection.commit()
        connection.exec_driver_sql("set plan_cache_mode = force_generic_plan")
        connection.commit()
        pages_of_a_prepared_claim(connection)
        fill(engine, 50_000)
        stale = pages_of_a_prepared_claim(connection)
        connection.exec_driver_sql(REPLAN.decode())
        fresh = pages_of_a_prepared_claim(connection)
    assert stale > 500
    assert fresh < 40


def test_replan_is_allowed_inside_a_claim(engine: Engine) -> None:
    """Plans can be given up inside a transaction, and claims go on."""
    fill(engine, 2)
    claim = fair_claim(TASK, 1, due_first=False)
    with engine.connect() as connection:
        assert 1 == len(take(connection, claim))
        connection.exec_driver_sql(REPLAN.decode())
        assert 1 == len(take(connection, claim))
