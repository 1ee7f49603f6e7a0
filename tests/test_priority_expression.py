"""`priority=` as SQL: a CASE over types is read as ranks, anything else is what is sorted by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from claiming import TASK, claimer, sweep, sweep_all
from own_models import EnumJob, Kind, PlainJob
from plans import explain
from sqlalchemy import case, create_engine, func, literal, select, text
from sqlalchemy.dialects import postgresql

from pgtask_sa import ConfigurationError, Task, TaskRegistry, Worker
from pgtask_sa.claim_orders import ClaimOptions
from pgtask_sa.custom_claims import expression_claim
from pgtask_sa.priorities import LAST, plain, ranks_of_case, read

if TYPE_CHECKING:
    from collections.abc import Iterator

    from databases import Databases
    from sqlalchemy import Engine

T = Task.task_type


# -- a CASE over types ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (case({"A": 1, "B": -2}, value=T, else_=7), ({"A": 1, "B": -2}, 7)),
        (case({"A": 1}, value=TASK.c.task_type), ({"A": 1}, LAST)),
        (case((T == "A", 1), (T == "B", 2), else_=0), ({"A": 1, "B": 2}, 0)),
        (case((T == "A", 1), (T == "A", 2), else_=0), ({"A": 1}, 0)),
        (case((T == "A", 1), else_=None), ({"A": 1}, LAST)),
        (case((T == "A", 1), (Task.attempts == 0, 2), else_=0), None),
        (case((T == "A", Task.attempts), else_=0), None),
        (case({"A": 1}, value=T, else_=Task.attempts), None),
        (case({"A": 1.5}, value=T, else_=0), None),
        (case({0: 1}, value=Task.attempts, else_=0), None),
        (case((T != "A", 1), else_=0), None),
        (Task.attempts, None),
    ],
)
def test_a_case_over_types_is_read_as_ranks(expression: Any, expected: Any) -> None:
    """With types and integers it costs what ranks cost; any other CASE is left as it is."""
    assert expected == ranks_of_case(Task, expression)


def test_a_case_over_an_enum_is_read_as_ranks() -> None:
    """Types that are an enum count by their labels."""
    first = next(iter(Kind))
    expression = case((EnumJob.task_type == first, 3), else_=0)
    assert ({first.value: 3}, 0) == ranks_of_case(EnumJob, expression)


def test_what_a_worker_makes_of_its_priority() -> None:
    """Ranks, ranks by a CASE, or an expression."""
    assert {"ranks": {}} == read(Task, None)
    assert {"ranks": {"A": 1}} == read(Task, {"A": 1})
    assert {"ranks": {"A": 1}, "rank_else": 4} == read(Task, case({"A": 1}, value=T, else_=4))
    assert ["expression"] == list(read(Task, Task.attempts))


@pytest.mark.parametrize("order", ["fair", "random"])
def test_the_rank_of_all_others(engine: Engine, order: Any) -> None:
    """Types that a CASE does not name have the rank of its else."""
    enqueue(engine, "A", "B", "C")
    ranks = read(Task, case({"A": 9, "C": 1}, value=T, else_=5))
    claims = sweep_all(engine, claimer(["A", "B", "C"], order=order, **ranks))
    assert ["C", "B", "A"] == [rows[0].task_type for rows in claims]


# -- any expression ------------------------------------------------------------------------------

URGENCY = Task.params["urgency"].as_integer()
INDEX = """create index task_urgency_idx on task
    (priority, (cast(params ->> 'urgency' as integer)), ticket)"""


def enqueue(engine: Engine, *kinds: str, **more: str) -> None:
    """Add a task of each type; ``more`` are columns and their SQL."""
    names = "".join(f", {name}" for name in more)
    values = "".join(f", {value}" for value in more.values())
    with engine.begin() as connection:
        for kind in kinds:
            statement = f"insert into task (task_type{names}) values (:kind{values})"
            connection.execute(text(statement), {"kind": kind})


def test_constants_stand_as_literals() -> None:
    """An expression has no parameters, or the planner could not match it with an index."""
    expression = plain(Task, case((URGENCY > 3, literal("it's")), else_="100 %"))
    compiled = expression.compile(dialect=postgresql.dialect(paramstyle="named"))
    shown = str(compiled)
    assert "CAST((task.params ->> 'urgency') AS INTEGER) > 3" in shown
    assert "'it''s'" in shown
    assert {} == compiled.params


@pytest.mark.parametrize("order", ["fair", "random"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_order_by_an_expression(engine: Engine, order: Any, batch_size: int) -> None:
    """Tasks go by priority, then by the expression, nulls last; a batch in that order, too."""
    for urgency in (5, 2, None, 9, 1):
        params = "'{}'" if urgency is None else f"""'{{"urgency": {urgency}}}'"""
        enqueue(engine, "A", params=params)
        enqueue(engine, "B", params=params, priority="1", run_at="now()")
    options = {"order": order, "batch_size": batch_size, **read(Task, URGENCY)}
    claims = sweep_all(engine, claimer(["A", "B"], **options))
    found = [(row.task_type, row.params) for rows in claims for row in rows]
    expected = [f'{{"urgency": {n}}}' for n in (1, 2, 5, 9)] + ["{}"]
    assert [("A", p) for p in expected] + [("B", p) for p in expected] == found


def test_descending(engine: Engine) -> None:
    """The expression may say in which direction."""
    for attempts in (1, 3, 2):
        enqueue(engine, "A", attempts=str(attempts))
    claims = sweep_all(engine, claimer(**read(Task, Task.attempts.desc())))
    assert [3, 2, 1] == [rows[0].attempts for rows in claims]


def test_per_cent_signs(engine: Engine) -> None:
    """A per cent sign in a constant is one in the database."""
    enqueue(engine, "A", "10 %")
    expression = case((func.strpos(Task.task_type, "%") > 0, 0), else_=1)
    claims = sweep_all(engine, claimer(["A", "10 %"], **read(Task, expression)))
    assert ["10 %", "A"] == [rows[0].task_type for rows in claims]


@pytest.mark.parametrize("order", ["fair", "random"])
def test_what_others_hold_is_skipped(engine: Engine, order: Any) -> None:
    """Two lanes get different tasks, and not one whose time has not come."""
    enqueue(engine, "A", "A")
    enqueue(engine, "A", run_at="now() + interval '1 h'")
    lanes = [claimer(order=order, **read(Task, Task.attempts)) for _ in range(3)]
    with engine.connect() as one, engine.connect() as two, engine.connect() as three:
        found = [sweep(c, lane) for c, lane in zip((one, two, three), lanes, strict=True)]
    assert [1, 1, 0] == [len(rows) for rows in found]


def test_a_worker_runs_in_the_order_of_an_expression(engine: Engine, db_url: str) -> None:
    """A worker's batches run in the order of an expression over params."""
    ran: list[int] = []
    tasks = TaskRegistry()
    tasks.handler("A")(lambda session, params: ran.append(params["urgency"]))
    for urgency in (5, 2, 9, 1, 7):
        enqueue(engine, "A", params=f"""'{{"urgency": {urgency}}}'""")
    options = {"concurrency": 1, "drain": True, "batch_size": 3}
    assert 0 == Worker(tasks, db_url, priority=URGENCY, **options).run()
    assert [1, 2, 5, 7, 9] == ran


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("priority", "problem"),
    [
        ("A", "priority must be a mapping of task types to ranks or an SQL expression: 'A'"),
        (PlainJob.attempts, "is no column of task"),
        (select(func.max(Task.attempts)).scalar_subquery(), "over the columns of the task"),
        (Task.attempts + literal(object()), "has no literal form"),
    ],
)
def test_expressions_that_cannot_work(priority: Any, problem: str) -> None:
    """What is no expression over the task alone is an error of the worker's call."""
    tasks = TaskRegistry()
    tasks.handler("A")(lambda session, params: None)
    with pytest.raises(ConfigurationError, match=problem):
        Worker(tasks, "postgresql://localhost/none", priority=priority)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"order": "tablesample"}, "cannot be had from a sample"),
        ({"weights": {"A": 2}}, "weights and a priority by an expression exclude each other"),
    ],
)
def test_options_that_exclude_it(options: Any, problem: str) -> None:
    """Turns and samples have no meaning beside an order by an expression."""
    with pytest.raises(ConfigurationError, match=problem):
        ClaimOptions(expression=TASK.c.attempts, **options)


# -- what it costs -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep(databases: Databases, template_db: str) -> Iterator[Engine]:
    """20,000 tasks of some urgencies, with the index of the documentation."""
    with databases.temporary(template_db) as url:
        engine = create_engine(url)
        with engine.begin() as connection:
            connection.execute(text("alter table task set (autovacuum_enabled = off)"))
            connection.execute(
                text(
                    "insert into task (task_type, params)"
                    " select 'A', jsonb_build_object('urgency', g % 7)"
                    " from generate_series(1, 20000) as g"
                )
            )
            connection.execute(text(INDEX))
            connection.execute(text("analyze task"))
        yield engine
        engine.dispose()


@pytest.mark.parametrize("limit", [1, 20])
def test_the_index_is_used(deep: Engine, limit: int) -> None:
    """With an index on priority, expression and ticket a claim reads what it takes."""
    claim = expression_claim(TASK, limit, plain(Task, URGENCY))
    with deep.connect() as connection:
        plan = explain(connection, claim, types=["A"])
    assert "task_urgency_idx" in plan.indexes
    assert (limit, limit) == (plan.locked, plan.rows_touched)
    assert plan.buffers <= 60 + 12 * limit


def test_without_the_index_it_reads_everything(deep: Engine) -> None:
    """The check above fails without the index."""
    claim = expression_claim(TASK, 1, plain(Task, URGENCY))
    with deep.connect() as connection:
        connection.execute(text("drop index task_urgency_idx"))
        plan = explain(connection, claim, types=["A"])
        connection.rollback()
    assert plan.rows_touched == 20_000
