"""The registry that the tests give to worker processes; its tables are made by `create_tables`."""

from __future__ import annotations

import asyncio
import os
import time

from sqlalchemy import text

from pgtask_sa import TaskRegistry

tasks = TaskRegistry()

INSERT = text("insert into done (i, pid) values (:i, :pid)")


def create_tables(engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("create table done (i int, pid int)"))


def _row(params):
    return {"i": params["i"], "pid": os.getpid()}


@tasks.handler("ROW")
def row(session, params):
    session.execute(INSERT, _row(params))


@tasks.handler("ASYNC_ROW")
async def async_row(session, params):
    await session.execute(INSERT, _row(params))


@tasks.handler("SLEEP")
def sleep(session, params):
    session.execute(INSERT, _row(params))
    time.sleep(params["seconds"])


@tasks.handler("ASYNC_SLEEP")
async def async_sleep(session, params):
    await session.execute(INSERT, _row(params))
    await asyncio.sleep(params["seconds"])


@tasks.handler("QUERY")
def query(session, params):
    session.execute(INSERT, _row(params))
    session.execute(text("select pg_sleep(:seconds)"), params)


@tasks.handler("FAIL", max_attempts=1)
def fail(session, params):
    raise ValueError(f"for {params}")
