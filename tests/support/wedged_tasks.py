"""Handlers that hold the interpreter, for worker processes under a supervisor of short patience."""

from __future__ import annotations

import ctypes
import json
import re

from sqlalchemy import text

from pgtask_sa import TaskRegistry, supervisor

SILENCE = supervisor.SILENCE = 1.2
LAST_PATIENCE = supervisor.LAST_PATIENCE = 0.8

tasks = TaskRegistry()

DONE = text("insert into done (i) values (:i)")
SOON = 0.05  # seconds of backoff


def _hold(seconds):
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # unlike CDLL, this keeps the interpreter


def _tell():
    print(json.dumps({"event": "wedged"}), flush=True)


def _wedge():
    _tell()
    _hold(600)


@tasks.handler("WEDGED", max_attempts=2, backoff=SOON, timeout=0.5)
def wedged(session, params):
    _tell()
    re.match(r"(a+)+$", "a" * 60 + "b")


@tasks.handler("LEASED_WEDGED", mode="leased", lease=2, max_attempts=2, backoff=SOON)
def leased_wedged(session, params):
    _wedge()


@tasks.handler("ASYNC_WEDGED", max_attempts=1, timeout=0.3)
async def async_wedged(session, params):
    _wedge()


@tasks.handler("WEDGED_IN_TIME", timeout=600)
def wedged_in_time(session, params):
    _wedge()


@tasks.handler("HOLDS", timeout=600)
def holds(session, params):
    session.execute(DONE, params)
    _hold(params["seconds"])


@tasks.handler("ASYNC_HOLDS", timeout=None)
async def async_holds(session, params):
    await session.execute(DONE, params)
    _hold(params["seconds"])


@tasks.handler("GOOD")
def good(session, params):
    session.execute(DONE, params)
