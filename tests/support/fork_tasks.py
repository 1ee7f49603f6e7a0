"""Handlers that fork, for worker processes."""

from __future__ import annotations

import os
import signal
import sys
import time

from sqlalchemy import text

from pgtask_sa import TaskRegistry

tasks = TaskRegistry()

DONE = text("insert into done (i, pid) values (:i, :child)")


def fork(how: str) -> int:
    """Fork; the child leaves in some way, and the parent waits for its end."""
    child = os.fork()
    if child == 0:
        if how == "exit":
            sys.exit(7)
        if how == "raise":
            raise ValueError("in the child")
        return 0
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == {"exit": 7, "raise": 1, "return": 0}[how]
    return child


@tasks.handler("FORK", max_attempts=1)
def forks(session, params):
    session.execute(DONE, {"i": params["i"], "child": 0})
    fork(params["how"])


@tasks.handler("ASYNC_FORK", max_attempts=1)
async def async_forks(session, params):
    await session.execute(DONE, {"i": params["i"], "child": 0})
    fork(params["how"])


@tasks.handler("ORPHAN", max_attempts=2, backoff=0)
def orphan(session, params):
    """Leave a child behind that sleeps, and be killed; the second time all is well."""
    if session.scalar(text("select count(*) from first")):
        session.execute(DONE, {"i": params["i"], "child": 0})
    elif os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    else:
        os.kill(os.getpid(), signal.SIGKILL)
