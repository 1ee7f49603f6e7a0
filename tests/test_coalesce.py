"""coalesce: one waiting task per key, never blocked by a running one, and none is lost."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from faces import FACES, Face, committed
from own_models import EnumJob, HstoreJob, Kind, PlainJob, Usr, create_all
from sqlalchemy import Connection, Engine, event, inspect, select, text
from sqlalchemy.orm import sessionmaker
from waiting import wait_until

from pgtask_sa import EnqueueBlocked, EnqueueError, ParamsError, Task, TaskSession
from pgtask_sa.insert_statements import NewTask, insert_unless_waiting


@pytest.fixture
def maker(engine: Engine) -> sessionmaker[TaskSession]:
    create_all(engine)
    return sessionmaker(engine, class_=TaskSession)


CLAIM = text(
    "delete from task where task_id = any(array("
    "select task_id from task for update skip locked limit 1)) returning task_type"
)


def claim(connection: Connection) -> list[str]:
    """Claim as a worker does; the transaction stays open."""
    return list(connection.scalars(CLAIM))


def waits_for_a_lock(engine: Engine) -> bool:
    query = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
    with engine.connect() as connection:
        return bool(connection.scalar(text(query)))


@pytest.mark.parametrize("kind", FACES)
def test_an_equal_task_that_waits_is_enough(db_url: str, kind: str) -> None:
    """The second enqueue of a key adds nothing and says so, in and across transactions."""
    face = Face(kind, db_url)

    def work(session):
        first = session.enqueue("A", {"a": 1}, coalesce=True)
        return first, session.enqueue("A", {"a": 1}, coalesce=True)

    (first, second), third = face.run(work), face.run(work)

    assert (first.params, second, third) == ({"a": 1}, None, (None, None))
    assert inspect(first).detached
    assert face.rows("task_id, task_type, params") == [(first.task_id, "A", {"a": 1})]


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ({"a": 1}, {"a": 1.0}, True),
        ({"a": 10**20}, {"a": 1e20}, True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({}, None, True),
        ({"a": True}, {"a": 1}, False),
        ({"a": None}, {}, False),
        ({"a": "\u00e9"}, {"a": "e\u0301"}, False),
        ({"a": [1, 2]}, {"a": [2, 1]}, False),
    ],
)
def test_equal_means_equal_as_jsonb(maker: Any, one: Any, other: Any, equal: bool) -> None:
    """One rule for equal params, that of the database (C6, C7)."""
    with maker.begin() as session:
        session.enqueue("A", one, coalesce=True)

        assert (session.enqueue("A", other, coalesce=True) is None) is equal
        assert session.enqueue("B", one, coalesce=True) is not None


@pytest.mark.parametrize(
    ("task_class", "task_type", "params"),
    [(HstoreJob, "A", {"a": "x", "b": None}), (EnumJob, Kind.BYE, {"a": [1]})],
)
def test_coalesce_on_own_tables(maker: Any, task_class: Any, task_type: Any, params: Any) -> None:
    """HSTORE has its own hash, and an enum its own type."""
    with maker.begin() as session:
        options = {"coalesce": True, "task_class": task_class}

        assert session.enqueue(task_type, params, **options).task_type == task_type
        assert session.enqueue(task_type, params, **options) is None
        assert session.enqueue(task_type, {**params, "c": "d"}, **options) is not None


def test_a_running_task_does_not_count_and_does_not_block(maker: Any, engine: Engine) -> None:
    """An enqueue during the run leads to one more run, at once and without waiting (C1, C8)."""
    with maker.begin() as session:
        session.enqueue("A", coalesce=True)
    with engine.connect() as worker:
        assert claim(worker) == ["A"]
        with maker.begin() as session:
            session.execute(text("set local lock_timeout = '2s'"))
            assert session.enqueue("A", coalesce=True) is not None
            assert session.enqueue("A", coalesce=True) is None
        with maker.begin() as session:
            assert session.enqueue("A", coalesce=True) is None
        worker.commit()

    assert committed(engine) == [("A", {})]


def test_the_waiting_task_is_held_until_the_caller_commits(maker: Any, engine: Engine) -> None:
    """Else a worker could run it before the caller's data is visible, and nobody after."""
    with maker.begin() as session:
        session.enqueue("A", coalesce=True)
    with maker() as session, engine.connect() as worker:
        session.add(Usr(usr_id=1))
        assert session.enqueue("A", coalesce=True) is None
        assert claim(worker) == []
        worker.rollback()
        session.commit()

        assert claim(worker) == ["A"]
        assert worker.scalar(select(Usr.usr_id)) == 1


def test_two_callers_may_hold_the_same_task(maker: Any) -> None:
    """Holding is shared: the second caller waits for nobody once the first one's lock is free."""
    with maker.begin() as session:
        session.enqueue("A", coalesce=True)
    with maker() as one, maker() as two:
        two.execute(text("select 1"))
        assert one.enqueue("A", coalesce=True) is None
        one.commit()
        assert two.enqueue("A", coalesce=True) is None


class Rival(threading.Thread):
    """Enqueues in a thread of its own, and keeps what came of it."""

    def __init__(self, maker: Any, **options: Any) -> None:
        super().__init__()
        self.maker, self.options = maker, options
        self.result: Any = "nothing yet"

    def run(self) -> None:
        with self.maker.begin() as session:
            try:
                self.result = session.enqueue("A", {"a": 1}, coalesce=True, **self.options)
            except EnqueueBlocked as error:
                session.enqueue("AFTER")
                self.result = error


@pytest.mark.parametrize("ending", ["commit", "rollback"])
def test_an_uncommitted_rival_is_waited_for(maker: Any, engine: Engine, ending: str) -> None:
    """If it commits there is one task; if it rolls back there is one task all the same (C10)."""
    with maker() as session:
        assert session.enqueue("A", {"a": 1.0}, coalesce=True) is not None
        rival = Rival(maker)
        rival.start()
        wait_until(lambda: waits_for_a_lock(engine), message="the rival did not wait")
        getattr(session, ending)()
    rival.join(10)

    assert (rival.result is None) is (ending == "commit")
    assert [row[0] for row in committed(engine)] == ["A"]


def test_the_wait_for_a_rival_is_bounded(engine: Engine, maker: Any) -> None:
    """After enqueue_lock_timeout it is an error, and the session goes on."""

    class Impatient(TaskSession):
        enqueue_lock_timeout = 0.05

    with maker() as session:
        session.enqueue("A", {"a": 1}, coalesce=True)
        rival = Rival(sessionmaker(engine, class_=Impatient))
        rival.start()
        rival.join(10)
        assert isinstance(rival.result, EnqueueBlocked)
        session.rollback()

    assert committed(engine) == [("AFTER", {})]


def test_many_rivals_leave_one_task(maker: Any, engine: Engine) -> None:
    """Eight threads, one key: one row, one object, seven times None."""
    rivals = [Rival(maker) for _ in range(8)]
    for rival in rivals:
        rival.start()
    for rival in rivals:
        rival.join(30)

    assert sum(rival.result is not None for rival in rivals) == 1
    assert len(committed(engine)) == 1


def test_a_rolled_back_savepoint_takes_the_task_and_the_lock_along(maker: Any) -> None:
    """Coalescing inside a savepoint that fails leaves the key free."""
    with maker.begin() as session:
        with session.begin_nested() as savepoint:
            assert session.enqueue("A", coalesce=True) is not None
            savepoint.rollback()
        with maker.begin() as other:
            assert other.enqueue("A", coalesce=True) is not None


def test_plain_tasks_do_not_count(maker: Any, engine: Engine) -> None:
    """Only tasks enqueued with coalesce are looked at: the index holds no others."""
    with maker.begin() as session:
        session.enqueue("A")
        session.flush()
        session.enqueue("A", coalesce=True)

    assert committed(engine) == [("A", {}), ("A", {})]


def test_a_delayed_task_waits_too(maker: Any, engine: Engine) -> None:
    """It is due when the first enqueue said."""
    with maker.begin() as session:
        first = session.enqueue("A", coalesce=True, delay=60)
        assert session.enqueue("A", coalesce=True) is None

    assert committed(engine, "task_type, run_at") == [("A", first.run_at)]


def test_a_task_that_came_back_keeps_its_key(maker: Any, engine: Engine) -> None:
    """A retried task waits like any other, so an equal one is not added."""
    with maker.begin() as session:
        session.enqueue("A", coalesce=True)
    with engine.begin() as connection:
        connection.execute(text("update task set attempts = 1, run_at = now() + interval '1h'"))
    with maker.begin() as session:
        assert session.enqueue("A", coalesce=True) is None


def test_callables_are_evaluated_at_the_call(maker: Any, engine: Engine) -> None:
    """The session is flushed first; a missing key is refused there."""
    with maker.begin() as session:
        usr = Usr()
        with pytest.raises(ParamsError, match=r"params.usr_id: None"):
            session.enqueue("A", lambda: {"usr_id": usr.usr_id}, coalesce=True)
        session.add(usr)
        session.enqueue("A", lambda: {"usr_id": usr.usr_id}, coalesce=True)

    assert committed(engine) == [("A", {"usr_id": 1})]


def test_the_callers_rows_are_flushed_as_before_any_statement(maker: Any) -> None:
    """An error at the call does not take them along."""
    with maker.begin() as session:
        session.add(Usr(usr_id=1))
        session.enqueue("A", coalesce=True)
        with pytest.raises(EnqueueError, match="not both"):
            session.enqueue("A", coalesce=True, delay=1, run_at=text("now()"))

        assert session.connection().scalar(select(Usr.usr_id)) == 1


def test_inside_a_flush_event(maker: Any, engine: Engine) -> None:
    """A listener may coalesce: there the session cannot be flushed, and need not be (C16)."""
    with maker() as session:
        event.listen(session, "before_flush", lambda s, *_: s.enqueue("SEEN", coalesce=True))
        session.add(Usr())
        session.flush()
        session.add(Usr())
        session.commit()

    assert committed(engine) == [("SEEN", {})]


def test_the_search_uses_its_index(maker: Any, engine: Engine) -> None:
    """Among ten thousand tasks the look-up is one probe, and it locks what it finds."""
    with maker.begin() as session:
        session.enqueue_many("A", [{"n": n} for n in range(10_000)])
        session.execute(text("update task set coalesce_key = jsonb_hash_extended(params, 0)"))
        session.flush()
    with engine.connect() as connection:
        connection.execute(text("analyze task"))
        statement = insert_unless_waiting(NewTask(Task, "A", {"n": 5}))
        compiled = statement.compile(engine, compile_kwargs={"render_postcompile": True})
        plan = "\n".join(
            connection.exec_driver_sql(
                "explain (analyze, costs off, timing off, summary off) " + str(compiled),
                compiled.params
                | {key: '{"n": 5}' for key, value in compiled.params.items() if value == {"n": 5}},
            ).scalars()
        )

    assert "task_coalesce_idx" in plan, plan
    assert "LockRows (actual rows=1" in plan, plan


def test_own_columns_are_part_of_the_key(engine):
    """Equal tasks of two tenants are two tasks, and both wait."""
    create_all(engine)
    with TaskSession(engine, task_class=PlainJob) as session:
        written = [
            session.enqueue("A", {"i": 1}, tenant_id=tenant, coalesce=True) is not None
            for tenant in (1, 2, 1, None, None)
        ]
        assert [True, True, False, True, False] == written
        session.rollback()
