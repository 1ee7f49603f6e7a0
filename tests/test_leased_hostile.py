"""What a leased handler does past its session, and what the lane is like for the task after it."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest
from leased import KINDS, brief, mark
from running import Running
from sqlalchemy import select, text

from pgtask_sa import Task
from pgtask_sa.fence import NO_OPTION, PAST_FENCE


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def running(db_url) -> Running:
    return Running(db_url, concurrency=1, idle_interval=0.2)


def _adapted(session: Any) -> Any:
    return session.connection().connection.dbapi_connection


def _cursor(query: Any) -> Any:
    """Return what executes a query on a cursor of the driver, past the session."""

    def execute(session: Any) -> None:
        _on_driver(session, lambda driver: driver.cursor().execute(query))

    return execute


def _on_driver(session: Any, work: Any) -> None:
    """Do something with the driver's connection, and await it if that is to be done."""
    adapted = _adapted(session)
    if hasattr(adapted, "run_async"):
        adapted.run_async(_awaited(work))
    else:
        work(adapted)


def _awaited(work: Any) -> Any:
    async def awaited(driver: Any) -> None:
        found = work(driver)
        if hasattr(found, "__await__"):
            await found

    return awaited


def _transaction(session: Any) -> None:
    session.commit()
    _on_driver(session, lambda driver: driver.transaction())


PAST = {
    "two statements": lambda s: s.execute(text("select 1; commit")),
    "a comment first": lambda s: s.execute(text("-- so\n/* and so */ commit")),
    "after a literal": lambda s: s.connection().exec_driver_sql("select 'it''s; so'; end"),
    "a comment in another": lambda s: s.execute(text("/* /* */ */commit")),
    "dollars in a name": lambda s: s.connection().exec_driver_sql(
        "select 1 as a$b$; commit; select 1 as a$b$"
    ),
    "cursor": _cursor("commit"),
    "many": lambda s: _on_driver(s, lambda driver: driver.cursor().executemany("commit", [()])),
    "copy": lambda s: _on_driver(
        s, lambda driver: driver.cursor().copy("copy mark from stdin; commit")
    ),
    "cursor, bytes": _cursor(b"select 1; commit"),
    "driver": lambda s: _on_driver(s, lambda driver: driver.execute("rollback")),
    "transaction": _transaction,
}


@pytest.mark.parametrize("how", PAST)
def test_a_commit_past_the_session(running, kind, how):
    """It is refused by the call itself, which says why; nothing was committed."""
    if how == "transaction" and "PGTASK_TEST_POOLER" in os.environ:
        pytest.skip("there the session has begun one, and it is a savepoint")

    def body(session, task):
        session.commit()
        mark(session, 1)
        if task.attempt == 1:
            PAST[how](session)

    long = brief(running, kind, "LONG", body, max_attempts=2)
    with running:
        running.enqueue("LONG")
        assert PAST_FENCE in running.first("task.retry").fields["error"]
        running.until_empty()
    marks = [1, 1] if how == "transaction" else [1]  # it had to commit before
    assert ([1, 2], marks) == (long.starts, running.marks())


HARMLESS = {
    "do": lambda s: s.execute(text("do $$ begin perform 1; end $$")),
    "function": lambda s: s.execute(
        text("create function f() returns int begin atomic select 1; end")
    ),
    "literals": lambda s: s.execute(
        text('select \'x; commit\', "a; end" from (select 1) t("a; end")')
    ),
    "cursor": _cursor("select 1"),
    "savepoint": lambda s: s.execute(text("savepoint a; rollback to a; release a")),
}


@pytest.mark.parametrize("how", HARMLESS)
def test_what_looks_like_it(running, kind, how):
    """Literals, bodies and savepoints end no transaction."""
    brief(running, kind, "LONG", lambda s, _t: (mark(s, 1), HARMLESS[how](s)), max_attempts=1)
    with running:
        running.enqueue("LONG")
        running.until_empty()
    assert ([1], []) == (running.marks(), running.dead())


def test_an_option_that_would_stay(running, kind):
    """What a transaction is cannot be changed for the connection, and it is said what can be."""
    option = {"isolation_level": "AUTOCOMMIT"}
    brief(running, kind, "LONG", lambda s, _t: s.connection(execution_options=option))
    with running:
        running.enqueue("LONG")
        told = running.first("task.retry").fields["error"]
    assert NO_OPTION.format("isolation_level") in told


@pytest.mark.direct  # else each transaction begins with settings, and psycopg refuses it
def test_autocommit_of_the_driver(running, kind):
    """It is noticed at the next commit, and the lane goes on with another connection."""
    seen: list[bool] = []

    def body(session, task):
        if task.attempt == 1:
            _on_driver(session, lambda driver: driver.set_autocommit(True))
            mark(session, 1)
            session.commit()
        _on_driver(session, lambda driver: seen.append(driver.autocommit))

    brief(running, kind, "LONG", body, max_attempts=2)
    with running:
        running.enqueue("LONG")
        assert PAST_FENCE in running.first("task.retry").fields["error"]
        running.until_empty()
    assert [False] == seen


# -- the task after it ----------------------------------------------------------------------------

LOOK = "select current_setting('search_path'), current_setting('default_transaction_read_only')"
SETS = {
    "path": lambda s: s.execute(text("set search_path to public, pg_catalog")),
    "path by function": lambda s: s.execute(
        text("select set_config('search_path', 'public', false)")
    ),
    "path and more": lambda s: s.execute(text("select 1; set search_path to public")),
    "cursor": _cursor("set search_path to public"),
    "read only": lambda s: s.execute(text("set default_transaction_read_only = on")),
    "translated": lambda s: s.connection(
        execution_options={"schema_translate_map": {None: "elsewhere"}}
    ),
}


@pytest.mark.parametrize("mode", ["leased", "transactional"])
@pytest.mark.parametrize("how", SETS)
def test_settings_of_a_handler(running, kind, mode, how):
    """Neither they nor options of its connection meet its own row, or the lane's next task."""
    running.execute("create schema elsewhere")
    running.execute("create table elsewhere.task (like task including all)")
    running.execute("create table elsewhere.dead_task (like dead_task including all)")
    seen: list[Any] = []

    def sets(session, task):
        SETS[how](session)
        if mode == "leased":
            session.commit()
        raise ValueError("its row is put back")

    def look(session, task):
        waiting = session.scalars(select(Task.task_id).where(Task.task_type == "SETS")).all()
        seen.append((*session.execute(text(LOOK)).one(), waiting))

    brief(running, kind, "SETS", sets, mode=mode, max_attempts=2, backoff=3600)
    brief(running, kind, "LOOK", look, mode="transactional")
    with running:
        running.enqueue("SETS")
        running.first("task.retry")
        running.enqueue("LOOK")
        running.until(lambda: seen)
    assert [('"$user", public', "off", [1])] == seen
    assert [("SETS", 1)] == running.rows("select task_type, attempts from task")


@pytest.mark.direct  # through a pooler a setting ends with its transaction
def test_settings_do_not_hide_the_lease(running, kind):
    """Its commits find the row of its task, and what it set holds on for what it writes."""
    running.execute("create schema elsewhere")
    running.execute("create table elsewhere.mark (i int)")

    def body(session, task):
        session.execute(text("set search_path to elsewhere"))
        mark(session, 1)
        session.commit()
        mark(session, 2)
        session.commit()
        session.execute(text("set local role pg_monitor"))

    brief(running, kind, "LONG", body, max_attempts=1)
    with running:
        running.enqueue("LONG")
        running.until_empty()
    assert ([], []) == (running.dead(), running.marks())
    assert [(1,), (2,)] == running.rows("select i from elsewhere.mark order by i")


@pytest.mark.parametrize("last", ["nothing", "a commit", "a look"])
def test_what_comes_after_a_setting(running, kind, last):
    """Whatever a handler has done last, its end is committed."""

    def body(session, task):
        session.execute(text("set search_path to public, pg_catalog"))
        mark(session, 1)
        if last != "nothing":
            session.commit()
        if last == "a look":
            session.execute(text("select 1"))

    long = brief(running, kind, "LONG", body, max_attempts=2, lease=60)
    with running:
        running.enqueue("LONG")
        running.until_empty()
    assert ([1], [1]) == (long.starts, running.marks())


@pytest.mark.direct  # through a pooler a setting ends with its transaction
def test_a_handler_that_may_not_write_by_its_own_doing(running, kind):
    """A read-only server is nobody's fault; a setting of the handler is its own."""

    def body(session, task):
        session.execute(text("set default_transaction_read_only = on"))
        session.commit()
        with contextlib.suppress(ValueError):
            mark(session, 1)

    brief(running, kind, "LONG", body, max_attempts=2)
    with running:
        running.enqueue("LONG")
        running.until_empty()
    assert [("LONG", 2, "failed")] == running.dead()


@pytest.mark.parametrize("mode", ["leased", "transactional"])
def test_writes_on_the_drivers_own_cursor(running, kind, mode):
    """They are undone with the attempt that failed, also if the session was never used."""

    def body(session, task):
        _on_driver(session, lambda driver: driver.execute("insert into mark values (1)"))
        raise ValueError

    brief(running, kind, "WRITES", body, mode=mode, max_attempts=1)
    with running:
        running.enqueue("WRITES")
        running.until(running.dead)
    assert ([("WRITES", 1, "failed")], []) == (running.dead(), running.marks())
