"""Handlers that do not come back, for worker processes; with a short patience."""

from __future__ import annotations

import time

from sqlalchemy import text

from pgtask_sa import TaskRegistry, faces, watchdog

watchdog.SECOND_GRACE = faces.SECOND_GRACE = 0.3

tasks = TaskRegistry()

DONE = text("insert into done (i, pid) values (:i, pg_backend_pid())")


@tasks.handler("STUCK", max_attempts=1, timeout=0.3)
def stuck(session, params):
    session.execute(DONE, {"i": -1})
    time.sleep(60)


@tasks.handler("ASYNC_STUCK", max_attempts=1, timeout=0.3)
async def async_stuck(session, params):
    await session.execute(DONE, {"i": -1})
    time.sleep(60)  # noqa: ASYNC251 - that is the point


@tasks.handler("SLOW")
def slow(session, params):
    session.execute(DONE, params)
    time.sleep(1.5)


@tasks.handler("GOOD")
def good(session, params):
    session.execute(DONE, params)


@tasks.handler("ASYNC_GOOD")
async def async_good(session, params):
    await session.execute(DONE, params)


@tasks.handler("ENDLESS")
def endless(session, params):
    session.execute(DONE, params)
    time.sleep(600)
