"""Handlers of a worker whose transactions the server ends soon."""

from __future__ import annotations

import asyncio

from poison_tasks import DONE, freeze

from pgtask_sa import TaskRegistry, plan

TIMEOUT = 4.0
plan.LIMIT_MARGIN = 1.0

tasks = TaskRegistry()


@tasks.handler("FROZEN", timeout=TIMEOUT)
def frozen(session, params):
    session.execute(DONE, {"i": freeze(params), "attempt": 0})


@tasks.handler("ASYNC_FROZEN", timeout=TIMEOUT)
async def async_frozen(session, params):
    start = await asyncio.to_thread(freeze, params)
    await session.execute(DONE, {"i": start, "attempt": 0})


@tasks.handler("GOOD", timeout=TIMEOUT)
def good(session, params):
    session.execute(DONE, {"i": params["i"], "attempt": 0})
