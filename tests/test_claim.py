"""Claims are exact: never a task too many, none twice, none lost, whatever the planner does."""

from __future__ import annotations

import itertools
import threading
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import own_models
import pytest
from claiming import CLAIMS, TASK, analyze, claimer, fill, ids, left, sweep, sweep_all, take
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from own_models import EnumJob, HstoreJob
from sqlalchemy import create_engine, delete, func, make_url, select, text

from pgtask_sa import ConfigurationError
from pgtask_sa.claim import claim_by_force, claim_by_id, fair_claim
from pgtask_sa.claim_orders import ClaimOptions
from pgtask_sa.engines import worker_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection, Engine

ORDERS = pytest.mark.parametrize("order", list(CLAIMS))

PLANNER = [
    f"enable_{method}"
    for method in (
        *("hashjoin", "mergejoin", "hashagg", "sort", "material", "nestloop"),
        *("indexscan", "bitmapscan", "seqscan"),
    )
]
WITHOUT = [(), *((name,) for name in PLANNER), *itertools.combinations(PLANNER, 2)]


@pytest.fixture
def hostile(db_url: str) -> Iterator[Engine]:
    """60 tasks, and statistics that say there is one: an idle queue that was filled just now."""
    engine = create_engine(db_url, connect_args={"prepare_threshold": 0})
    fill(engine, 1)
    analyze(engine)
    fill(engine, 59)
    yield engine
    engine.dispose()


def set_planner(connection: Connection, off: tuple[str, ...], cache_mode: str) -> None:
    """Switch ways of the planner off for this transaction, and forget all plans made before."""
    connection.exec_driver_sql("discard plans")
    for name in off:
        connection.exec_driver_sql(f"set local {name} = off")
    connection.exec_driver_sql(f"set local plan_cache_mode = {cache_mode}")


def force_parallel(connection: Connection) -> None:
    """Make every plan parallel that can be."""
    version = connection.connection.driver_connection.info.server_version  # type: ignore[union-attr]
    mode = "debug_parallel_query" if version >= 160000 else "force_parallel_mode"
    for setting in (
        f"{mode} = on",
        "parallel_setup_cost = 0",
        "parallel_tuple_cost = 0",
        "min_parallel_table_scan_size = 0",
        "max_parallel_workers_per_gather = 2",
    ):
        connection.exec_driver_sql(f"set {setting}")


def count_each(connection: Connection, order: str, cache_mode: str) -> set[tuple[int, int]]:
    """Claim under every planner setting; return the pairs of what was asked for and what came."""
    counts = set()
    for off, limit in itertools.product(WITHOUT, (1, 5, 10)):
        set_planner(connection, off, cache_mode)
        rows = take(connection, CLAIMS[order](TASK, limit))
        counts.add((limit, len(set(ids(rows)))))
        connection.rollback()
    return counts


@ORDERS
@pytest.mark.parametrize("cache_mode", ["force_generic_plan", "force_custom_plan"])
def test_exact_under_every_plan(hostile: Engine, order: str, cache_mode: str) -> None:
    """A claim of n takes n of 60 tasks, whichever ways of the planner are switched off."""
    with hostile.connect() as connection:
        assert {(1, 1), (5, 5), (10, 10)} == count_each(connection, order, cache_mode)


@ORDERS
def test_exact_under_parallel_plans(hostile: Engine, order: str) -> None:
    """A claim of n takes n of 60 tasks where parallel plans are forced."""
    with hostile.connect() as connection:
        force_parallel(connection)
        assert {(1, 1), (5, 5), (10, 10)} == count_each(connection, order, "auto")


@ORDERS
def test_takes_what_there_is(engine: Engine, order: str) -> None:
    """A claim of more than wait takes all of them, each once."""
    fill(engine, 3)
    fill(engine, 3, run_at="now()")
    with engine.connect() as connection:
        rows = take(connection, CLAIMS[order](TASK, 10))
        assert list(range(1, 7)) == sorted(ids(rows))


@pytest.mark.parametrize("cache_mode", ["force_generic_plan", "force_custom_plan"])
def test_turns_are_kept_under_every_plan(hostile: Engine, cache_mode: str) -> None:
    """Whatever ways of the planner are switched off, turns are taken in the order given."""
    fill(hostile, 2, "B")
    fill(hostile, 2, "B", run_at="now()")
    with hostile.begin() as connection:
        connection.execute(text("update task set priority = 3 where task_id % 2 = 0"))
    turns = {"levels": [3, 0, 0], "types": ["B", "B", "A"]}
    found = set()
    with hostile.connect() as connection:
        for off, due_first in itertools.product(WITHOUT, (False, True)):
            set_planner(connection, off, cache_mode)
            claim = fair_claim(TASK, 5, due_first=due_first)
            rows = list(connection.execute(claim, {**turns, "pivot": 0.5}))
            found.add(tuple(sorted((row.task_type, row.priority) for row in rows)))
            connection.rollback()
    assert {(("A", 0), ("B", 0), ("B", 0), ("B", 3), ("B", 3))} == found


def test_the_trap_is_set(hostile: Engine) -> None:
    """The same setup makes the naive `in (select .. limit 1)` take every task."""
    chosen = select(TASK.c.task_id).order_by(TASK.c.task_id).limit(1)
    naive = delete(TASK).where(TASK.c.task_id.in_(chosen.with_for_update(skip_locked=True)))
    with hostile.connect() as connection:
        assert 60 == len(take(connection, naive.returning(TASK.c.task_id)))


@pytest.mark.parametrize("size", [None, 0, -1, "5", True, 10_001, 1.0])
def test_batch_size_must_be_a_number(size: Any) -> None:
    """A batch size that Postgres might read as no limit at all is refused."""
    with pytest.raises(ConfigurationError, match="batch_size must be an integer from 1 to 10000"):
        ClaimOptions(batch_size=size)


@pytest.mark.parametrize("count", [1, 5, 50])
def test_an_empty_sample_is_no_empty_queue(engine: Engine, count: int) -> None:
    """With tablesample a small queue drains without a break: an empty sample is followed at once.

    As a fact: of 50 rows on one page `system (1)` sees nothing 99 times in 100.
    """
    fill(engine, count)
    claims = sweep_all(engine, claimer(order="tablesample"))
    assert [1] * count == [len(rows) for rows in claims]


def test_the_only_ready_task_among_delayed_ones(engine: Engine) -> None:
    """With tablesample the first claim finds the one ready task among 20,000 delayed ones."""
    fill(engine, 20_000, run_at="now() + interval '1 day'")
    fill(engine, 1)
    with engine.connect() as connection:
        assert [20_001] == ids(sweep(connection, claimer(order="tablesample")))


@ORDERS
def test_two_claims_share_the_tasks(engine: Engine, order: str) -> None:
    """Two connections never get the same task, and together they get all."""
    fill(engine, 10)
    with engine.connect() as one, engine.connect() as two:
        first = ids(take(one, CLAIMS[order](TASK, 6)))
        second = ids(take(two, CLAIMS[order](TASK, 6)))
        assert (6, 4) == (len(first), len(second))
        assert list(range(1, 11)) == sorted(first + second)


@ORDERS
def test_a_task_that_is_edited_is_skipped(engine: Engine, order: str) -> None:
    """A row that somebody is editing is passed over, and claimable with its new content after."""
    fill(engine, 2)
    claim = CLAIMS[order](TASK, 5)
    with engine.connect() as editor, engine.connect() as worker:
        editor.execute(text("""update task set params = '{"new": 1}' where task_id = 1"""))
        assert [2] == ids(take(worker, claim))
        editor.commit()
        assert [(1, '{"new": 1}')] == [(r.task_id, r.params) for r in take(worker, claim)]


def test_a_task_that_was_put_off_in_between(engine: Engine) -> None:
    """A task put off after the claim's snapshot was taken, and before its lock, stays."""
    with engine.begin() as connection:
        connection.execute(text(SLOW_CLOCK))
    fill(engine, 1, run_at="now()")
    rows: list[Any] = []

    def claim() -> None:
        with engine.begin() as connection:
            now = func.slow_clock()
            rows.extend(take(connection, fair_claim(TASK, 1, due_first=True, now=now)))

    with engine.connect() as connection:
        connection.execute(text("select pg_advisory_lock(7)"))
        thread = threading.Thread(target=claim)
        thread.start()
        connection.execute(text("select wait_for_waiter()"))
        connection.execute(text("update task set run_at = now() + interval '1 day'"))
        connection.commit()
        connection.execute(text("select pg_advisory_unlock(7)"))
        thread.join(10)
    assert [] == rows
    assert 1 == left(engine)


SLOW_CLOCK = """
create function slow_clock() returns timestamptz language plpgsql stable as $$
begin
  perform pg_advisory_xact_lock_shared(7);
  return clock_timestamp();
end $$;
create function wait_for_waiter() returns void language plpgsql volatile as $$
begin
  loop
    exit when exists (select from pg_locks where locktype = 'advisory' and not granted);
    perform pg_stat_clear_snapshot();
  end loop;
end $$;
"""


@ORDERS
def test_nothing_else_is_locked(engine: Engine, order: str) -> None:
    """Tasks that refer to the same row of another table are claimed side by side."""
    with engine.begin() as connection:
        connection.execute(text("create table tenant (tenant_id int primary key)"))
        connection.execute(text("alter table task add tenant_id int references tenant"))
        connection.execute(text("insert into tenant values (1)"))
        fill(connection, 2)
        connection.execute(text("update task set tenant_id = 1"))
    with engine.connect() as one, engine.connect() as two, engine.connect() as other:
        claim = CLAIMS[order](TASK, 1)
        assert [1, 2] == sorted(ids(take(one, claim)) + ids(take(two, claim)))
        assert 1 == other.scalar(text("select tenant_id from tenant for update nowait"))


@ORDERS
def test_partitioned_table(engine: Engine, order: str) -> None:
    """On a table that is partitioned by hand a claim is exact, and finds the tasks of each part."""
    with engine.begin() as connection:
        connection.execute(text("alter table task rename to old_task"))
        connection.execute(
            text(
                "create table task (like old_task including defaults including identity)"
                " partition by range (task_id)"
            )
        )
        connection.execute(text("alter table task add primary key (task_id)"))
        for name, low, high in (("low", 0, 21), ("high", 21, 1000)):
            part = f"create table task_{name} partition of task for values from ({low}) to ({high})"
            connection.execute(text(part))
        fill(connection, 40)
    with engine.connect() as one, engine.connect() as two:
        claim = CLAIMS[order](TASK, 1)
        assert 1 == len({*ids(take(one, claim))})
        rest = ids(take(two, CLAIMS[order](TASK, 50)))
        assert 39 == len(set(rest))


Step = tuple[int, str]
STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["claim", "claim", "commit", "rollback"])),
    max_size=30,
)


WAYS: list[dict[str, Any]] = [
    {},
    {"ranks": {"B": -1}},
    {"weights": {"A": 3}},
    {"order": "random"},
    {"order": "tablesample", "sample": 50},
    {"expression": TASK.c.ticket},
]


def play(engine: Engine, steps: list[Step], options: dict[str, Any]) -> list[int]:
    """Let three connections claim, commit and roll back; return what was committed, in order."""
    done: list[int] = []
    held: dict[int, list[int]] = {0: [], 1: [], 2: []}
    choosers = [claimer("AB", **options) for _ in held]
    connections = [engine.connect() for _ in held]
    for who, action in steps:
        if action == "claim":
            held[who] += ids(sweep(connections[who], choosers[who]))
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
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    steps=STEPS,
    batch_size=st.sampled_from([1, 3]),
    priorities=st.lists(st.integers(-1, 2), min_size=12, max_size=12),
    options=st.sampled_from(WAYS),
)
def test_any_interleaving(
    engine: Engine, steps: list[Step], batch_size: int, priorities: list[int], options: Any
) -> None:
    """However claims, commits and rollbacks interleave: no task twice, and none is lost."""
    with engine.begin() as connection:
        connection.execute(text("truncate task restart identity"))
        fill(connection, 6)
        fill(connection, 6, run_at="now()")
        connection.execute(
            text("update task set priority = (cast(:priorities as int[]))[task_id]"),
            {"priorities": priorities},
        )
        connection.execute(text("update task set task_type = 'B' where task_id % 3 = 0"))
    options = {**options, "batch_size": batch_size}
    done = play(engine, steps, options)
    rest = [row for rows in sweep_all(engine, claimer("AB", **options)) for row in rows]
    if options.get("order") != "tablesample":  # nobody else claims any more
        assert sorted(row.priority for row in rest) == [row.priority for row in rest]
    done += ids(rest)
    assert list(range(1, 13)) == sorted(done)


def test_many_threads(engine: Engine) -> None:
    """Four threads that drain the queue at once run each of 400 tasks once."""
    fill(engine, 400)
    done: list[list[Any]] = []
    threads = [
        threading.Thread(target=lambda: done.extend(sweep_all(engine, claimer()))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert list(range(1, 401)) == sorted(ids([row for rows in done for row in rows]))


@ORDERS
def test_read_committed_whatever_the_default(engine: Engine, order: str) -> None:
    """On a database that defaults to repeatable read, a worker's claims skip what others took."""
    database = engine.url.database
    with engine.begin() as connection:
        fill(connection, 3)
        setting = "default_transaction_isolation = 'repeatable read'"
        connection.execute(text(f"alter database {database} set {setting}"))
    workers = worker_engine(make_url(engine.url), 3)
    with workers.connect() as one, workers.connect() as two:
        first = ids(take(one, CLAIMS[order](TASK, 1)))
        two.execute(text("select 1"))  # under repeatable read the snapshot is taken here
        one.commit()
        second = ids(take(two, CLAIMS[order](TASK, 5)))
        assert [1, 2, 3] == sorted(first + second)
    workers.dispose()


@ORDERS
def test_enum_types_in_an_own_schema(engine: Engine, order: str) -> None:
    """Types that are a native enum come as text, from a table in any schema."""
    own_models.create_all(engine)
    fill(engine, 2, "bye-mail", table="jobs.enum_job")
    fill(engine, 2, "welcome-mail", table="jobs.enum_job")
    with engine.connect() as connection:
        rows = take(connection, CLAIMS[order](EnumJob.__table__, 10), ["bye-mail"])
        assert [(1, "bye-mail"), (2, "bye-mail")] == sorted((r.task_id, r.task_type) for r in rows)


def test_hstore_params(engine: Engine) -> None:
    """Params that are an hstore come as a dict."""
    own_models.create_all(engine)
    with engine.connect() as connection:
        insert = "insert into hstore_job (task_type, params) values ('A', 'a=>1, b=>NULL')"
        connection.execute(text(insert))
        rows = take(connection, fair_claim(HstoreJob.__table__, 1, due_first=False))
        assert [{"a": "1", "b": None}] == [row.params for row in rows]


def test_params_come_to_the_last_digit(engine: Engine) -> None:
    """JSON params come as the text that the database holds, numbers unrounded."""
    exact = '{"n": 12345678901234567890.1234567890, "z": 1.0}'
    with engine.connect() as connection:
        insert = text("insert into task (task_type, params) values ('A', cast(:params as jsonb))")
        connection.execute(insert, {"params": exact})
        rows = take(connection, fair_claim(TASK, 1, due_first=False))
        assert [exact] == [row.params for row in rows]


def test_a_claim_shows_in_the_activity_view(engine: Engine) -> None:
    """While a task runs its backend is named after it; when the transaction ends, no more."""
    fill(engine, 1, "é" * 60)
    name = text("select current_setting('application_name')")
    with engine.connect() as connection:
        before = connection.scalar(name)
        take(connection, fair_claim(TASK, 1, due_first=False), ["é" * 60])
        assert str(connection.scalar(name)).startswith("pgtask 1 ")
        connection.commit()
        assert before == connection.scalar(name)


def test_claim_by_id(engine: Engine) -> None:
    """One certain task is claimed, unless somebody else holds it, or it is gone."""
    fill(engine, 2)
    with engine.connect() as one, engine.connect() as two:
        assert [2] == ids(take(one, claim_by_id(TASK), task_id=2))
        assert [] == ids(take(two, claim_by_id(TASK), task_id=2))
        one.commit()
        assert [] == ids(take(two, claim_by_id(TASK), task_id=2))


def test_claim_by_force(engine: Engine) -> None:
    """A task is taken from the process that holds it; a task that is gone ends no process."""
    fill(engine, 1)
    pid = text("select pg_backend_pid()")
    with engine.connect() as holder, engine.connect() as other, engine.connect() as bystander:
        take(holder, claim_by_id(TASK), task_id=1)
        force = {"task_id": 1, "begun": None}
        rows = take(other, claim_by_force(TASK), pid=holder.scalar(pid), **force)
        assert [1] == ids(rows)
        other.commit()
        assert [] == take(other, claim_by_force(TASK), pid=bystander.scalar(pid), **force)
        assert 0 == left(engine)
        assert 0 == bystander.scalar(text("select count(*) from task"))
        holder.invalidate()


def test_claim_by_force_names_a_transaction(engine: Engine) -> None:
    """With the moment when it began, no other transaction of the same process is ended."""
    fill(engine, 1)
    with engine.connect() as holder, engine.connect() as other:
        (row,) = take(holder, claim_by_id(TASK), task_id=1)
        force = {"task_id": 1, "pid": row.pgtask_pid}
        # from another time zone
        other.execute(text("set timezone = 'Asia/Kolkata'"))
        earlier = str(datetime.fromisoformat(row.pgtask_begun) - timedelta(microseconds=1))
        assert [] == ids(take(other, claim_by_force(TASK), begun=earlier, **force))
        assert 1 == holder.scalar(text("select 1"))
        assert [1] == ids(take(other, claim_by_force(TASK), begun=row.pgtask_begun, **force))
        holder.invalidate()
