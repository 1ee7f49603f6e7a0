"""Equal turns by a column of one's own, such as a tenant."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from claiming import claimer, ids, sweep, sweep_all
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plans import explain
from sqlalchemy import Index, Text, create_engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pgtask_sa import ConfigurationError, DeadTaskMixin, Task, TaskMixin, TaskRegistry, Worker
from pgtask_sa.custom_claims import keyed_claim
from pgtask_sa.priorities import fair_key
from pgtask_sa.worker import main

if TYPE_CHECKING:
    from collections.abc import Iterator

    from databases import Databases
    from sqlalchemy import Engine, Table


class Base(DeclarativeBase):
    """Apart from the other tests' tables."""


class Job(TaskMixin, Base):
    """A task of a tenant, or of nobody."""

    __tablename__ = "job"
    __fair_by__ = "tenant"
    tenant: Mapped[str | None] = mapped_column("tenant_id", Text)


class DeadJob(DeadTaskMixin, Base):
    __tablename__ = "dead_job"


JOB: Table = Job.__table__
FAIR = "job_fair_idx"


@pytest.fixture
def jobs(engine: Engine) -> Engine:
    Base.metadata.create_all(engine)
    return engine


def fill(
    engine: Engine,
    count: int,
    tenant: str | None,
    kind: str = "A",
    *,
    run_at: str = "null",
    priority: int = 0,
) -> None:
    """Add tasks of a tenant."""
    with engine.begin() as connection:
        statement = text(
            "insert into job (task_type, tenant_id, priority, run_at)"
            f" select :kind, :tenant, :priority, {run_at} from generate_series(1, {count}) as g"
        )
        connection.execute(statement, {"kind": kind, "tenant": tenant, "priority": priority})


def keyed(*types: str, **options: Any) -> Any:
    return claimer(types or ("A",), table=JOB, fair_by="tenant_id", **options)


def tenants(claims: list[list[Any]]) -> list[str | None]:
    return [row.tenant_id for rows in claims for row in rows]


def test_a_crowd_does_not_starve_a_tenant(jobs: Engine) -> None:
    """Beside a tenant with 1000 tasks two others with 5 are done within the first 20 claims."""
    fill(jobs, 1000, "crowd")
    fill(jobs, 5, "few")
    fill(jobs, 5, None)
    chooser = keyed()
    with jobs.connect() as connection:
        found = Counter(tenants([sweep(connection, chooser) for _ in range(20)]))
    assert (5, 5) == (found["few"], found[None])


def test_each_tenant_has_a_turn_in_each_round(jobs: Engine) -> None:
    """After the first claim, which is drawn, the tenants follow each other in order."""
    names = ["a", "b", "c", "d", None]
    for name in names:
        fill(jobs, 3, name)
    claims = tenants(sweep_all(jobs, keyed()))
    first = names.index(claims[0])
    expected = (names[first:] + names[:first])[1:] + [claims[0]]
    assert expected * 2 == claims[1:11]


def test_a_batch_is_in_the_order_of_the_round(jobs: Engine) -> None:
    """A batch goes on to the next tenants, and runs in that order."""
    for name in ("c", "a", "b"):
        fill(jobs, 2, name)
    chooser = keyed(batch_size=4)
    chooser._way.cursors[0] = "b"
    with jobs.connect() as connection:
        rows = sweep(connection, chooser)
        assert ["c", "c", "a", "a"] == tenants([rows])
        assert ["b", "b"] == tenants([sweep(connection, chooser)])


def test_priority_goes_before_turns(jobs: Engine) -> None:
    """The priority of a task goes before the turn of its tenant."""
    for priority in (2, 0, -1):
        for name in ("a", "b"):
            fill(jobs, 2, name, priority=priority)
    rows = [row for rows in sweep_all(jobs, keyed(batch_size=3)) for row in rows]
    assert [-1] * 4 + [0] * 4 + [2] * 4 == [row.priority for row in rows]


def test_planned_tasks_and_ready_ones_do_not_starve_each_other(jobs: Engine) -> None:
    """Of 60 claims both a few planned and a few ready tasks get theirs beside a crowd."""
    fill(jobs, 500, "a", run_at="now() - interval '1 s' * g")
    fill(jobs, 5, "b")
    fill(jobs, 5, "c", run_at="now() - interval '1 h'")
    chooser = keyed()
    with jobs.connect() as connection:
        found = Counter(tenants([sweep(connection, chooser) for _ in range(80)]))
    assert (5, 5) == (found["b"], found["c"])


def test_only_own_types(jobs: Engine) -> None:
    """Tasks of types without a handler are passed over, whoever's they are."""
    fill(jobs, 3, "a", "OTHER")
    fill(jobs, 3, "b")
    assert ["b", "b", "b"] == tenants(sweep_all(jobs, keyed()))


def test_everything_is_claimed_once(jobs: Engine) -> None:
    """Two lanes with their own rounds take all tasks, each once."""
    for n in range(10):
        fill(jobs, 4, f"t{n}", run_at="null" if n % 3 else "now()", priority=n % 2)
    lanes, done = [keyed(batch_size=3), keyed()], []
    with jobs.connect() as one, jobs.connect() as other:
        while found := [
            task_id
            for connection, lane in zip((one, other), lanes, strict=True)
            for task_id in ids(sweep(connection, lane))
        ]:
            done += found
            one.commit()
            other.rollback() if len(done) == 4 else other.commit()
            if len(done) == 4:
                done.pop()
    assert list(range(1, 41)) == sorted(done)


def test_lanes_start_anywhere(jobs: Engine) -> None:
    """The first claim of each lane is drawn by lottery."""
    for n in range(5):
        fill(jobs, 1, f"t{n}")
    with jobs.begin() as connection:
        connection.execute(text("update job set ticket = task_id / 5.0 - 0.1"))
    found = set()
    with jobs.connect() as connection:
        for _ in range(80):
            found.update(tenants([sweep(connection, keyed())]))
            connection.rollback()
    assert 5 == len(found)


# -- what is refused -----------------------------------------------------------------------------


def tasks_of(kind: type[Any]) -> TaskRegistry:
    tasks = TaskRegistry(task_class=kind)
    tasks.handler("A")(lambda session, params: None)
    return tasks


def test_names_of_the_column() -> None:
    """The column is named by its attribute, or by that attribute's name."""
    assert ["tenant_id"] * 2 == [fair_key(Job, Job.tenant), fair_key(Job, "tenant")]


@pytest.mark.parametrize(
    ("kind", "fair_by", "problem"),
    [
        (Task, "tenant", "fair_by: 'tenant' is no column of Task"),
        (Task, Job.tenant, "fair_by: Job.tenant is no column of Task"),
        (Task, 7, "fair_by: 7 is no column of Task"),
        (Job, "attempts", "fair_by: job has no index for turns by attempts; put `__fair_by__ = "),
    ],
)
def test_columns_that_cannot_take_turns(kind: Any, fair_by: Any, problem: str) -> None:
    """A column that is not there or has no index is an error of the worker's call."""
    with pytest.raises(ConfigurationError, match=problem):
        Worker(tasks_of(kind), "postgresql://localhost/none", fair_by=fair_by)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"order": "random"}, "fair_by need the order fair"),
        ({"priority": {"A": 1}}, "fair_by takes no turns by type"),
        ({"weights": {"A": 1}}, "fair_by takes no turns by type"),
        ({"priority": Job.attempts}, "exclude each other"),
    ],
)
def test_options_that_exclude_it(options: Any, problem: str) -> None:
    """Options that would mean nothing beside it are refused."""
    with pytest.raises(ConfigurationError, match=problem):
        Worker(tasks_of(Job), "postgresql://localhost/none", fair_by="tenant", **options)


def test_a_mapping_without_that_column() -> None:
    """`__fair_by__` that names no column is refused when the class is mapped."""
    body = {"__tablename__": "errand", "__fair_by__": "tenant", "__annotations__": {}}
    with pytest.raises(ConfigurationError, match="__fair_by__ must be the name of a column"):
        type("Errand", (TaskMixin, type("Own", (DeclarativeBase,), {})), body)


def test_the_command_line_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    """`--fair-by` with a column that is not there ends with one line."""
    code = main(
        ["poison_tasks:tasks", "--database-url", "postgresql://localhost/none", "--fair-by", "x"]
    )
    assert (2, "error: fair_by: 'x' is no column of Task\n") == (code, capsys.readouterr().err)


def test_an_index_of_ones_own_will_do() -> None:
    """An index that the mapping has anyway serves, if it is the same."""

    class Own(DeclarativeBase):
        pass

    class Errand(TaskMixin, Own):
        __tablename__ = "errand"
        tenant: Mapped[str] = mapped_column(Text)

    with pytest.raises(ConfigurationError, match="has no index for turns by tenant"):
        fair_key(Errand, "tenant")
    c = Errand.__table__.c
    Index("mine", c.priority, c.tenant, c.ticket)
    assert "tenant" == fair_key(Errand, "tenant")


# -- what it costs -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def crowded(databases: Databases, template_db: str) -> Iterator[Engine]:
    """20,000 ready tasks of 2,000 tenants, and as many planned ones; statistics are fresh."""
    with databases.temporary(template_db) as url:
        engine = create_engine(url)
        Base.metadata.create_all(engine)
        with engine.begin() as connection:
            connection.execute(text("alter table job set (autovacuum_enabled = off)"))
            connection.execute(
                text(
                    "insert into job (task_type, tenant_id, run_at)"
                    " select 'A', 't' || g % 2000, case when g <= 20000 then null else now() end"
                    " from generate_series(1, 40000) as g"
                )
            )
            connection.execute(text("analyze job"))
        yield engine
        engine.dispose()


@pytest.mark.parametrize("cursor", ["t1500", "t999", None, "zzz"])
@pytest.mark.parametrize("limit", [1, 20])
@pytest.mark.parametrize("due_first", [False, True])
def test_a_turn_is_some_probes(
    crowded: Engine, cursor: str | None, limit: int, due_first: bool
) -> None:
    """A claim reads and locks as many rows as it takes, wherever its round is."""
    claim = keyed_claim(JOB, limit, "tenant_id", due_first=due_first)
    given = {
        "levels": [0],
        "cursors": [cursor],
        "types": ["A"],
        "due_levels": [0],
        "due_types": ["A"],
    }
    with crowded.connect() as connection:
        plan = explain(connection, claim, **given)
    assert 0 == plan.whole_table_scans
    assert ("job_due_idx" if due_first else FAIR) in plan.indexes
    assert (limit, limit) == (plan.locked, plan.nodes[0]["Actual Rows"])
    assert plan.rows_touched <= max(limit, 10)
    assert plan.buffers <= 60 + 12 * limit


def test_without_the_index_a_turn_reads_everything(crowded: Engine) -> None:
    """The checks above fail when the index is gone."""
    claim = keyed_claim(JOB, 1, "tenant_id", due_first=False)
    given = {"levels": [0], "cursors": ["t1500"], "types": ["A"], "due_levels": [], "due_types": []}
    with crowded.connect() as connection:
        connection.execute(text(f"drop index {FAIR}"))
        plan = explain(connection, claim, **given)
        connection.rollback()
    assert plan.rows_touched >= 10_000


# -- a whole worker ------------------------------------------------------------------------------


def test_a_worker_takes_turns_by_tenant(jobs: Engine, db_url: str) -> None:
    """With `fair_by` the tenants of a drain come in rounds, sync and async tasks alike."""
    ran: list[Any] = []
    tasks = TaskRegistry(task_class=Job)

    @tasks.handler("A")
    def plain(session: Any, params: Any, task: Any) -> None:
        ran.append(task.columns["tenant"])

    @tasks.handler("B")
    async def awaited(session: Any, params: Any, task: Any) -> None:
        ran.append(task.columns["tenant"])

    for kind in ("A", "B"):
        fill(jobs, 20, "crowd", kind)
        fill(jobs, 2, "few", kind)
    worker = Worker(tasks, db_url, concurrency=1, drain=True, fair_by=Job.tenant)
    assert 0 == worker.run()
    assert {"crowd": 40, "few": 4} == Counter(ran)
    assert "few" not in ran[14:]


# -- several lanes -------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["claim", "claim", "commit", "rollback"])),
    max_size=30,
)
ROWS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", None]), st.integers(-1, 1), st.booleans()),
    min_size=1,
    max_size=15,
)


def play(engine: Engine, steps: list[tuple[int, str]], batch_size: int) -> list[int]:
    """Let three lanes claim, commit and roll back; return what was committed."""
    done: list[int] = []
    held: dict[int, list[int]] = {0: [], 1: [], 2: []}
    lanes = [keyed(batch_size=batch_size) for _ in held]
    connections = [engine.connect() for _ in held]
    for who, action in steps:
        if action == "claim":
            held[who] += ids(sweep(connections[who], lanes[who]))
        else:
            getattr(connections[who], action)()
            done += held[who] if action == "commit" else []
            held[who] = []
        running = [task_id for several in held.values() for task_id in several]
        assert len(running) == len(set(running) - set(done))
    for connection in connections:
        connection.close()
    return done


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rows=ROWS, steps=STEPS, batch_size=st.sampled_from([1, 4]))
def test_any_interleaving(jobs: Engine, rows: Any, steps: Any, batch_size: int) -> None:
    """However lanes interleave: no task is claimed twice, none is lost, priorities are strict."""
    with jobs.begin() as connection:
        connection.execute(text("truncate job restart identity"))
    for tenant, priority, is_planned in rows:
        fill(jobs, 1, tenant, priority=priority, run_at="now()" if is_planned else "null")
    done = play(jobs, steps, batch_size)
    rest = [row for several in sweep_all(jobs, keyed(batch_size=batch_size)) for row in several]
    assert sorted(row.priority for row in rest) == [row.priority for row in rest]
    assert list(range(1, len(rows) + 1)) == sorted(done + ids(rest))
