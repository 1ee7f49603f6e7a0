"""Handlers that kill their worker, for worker processes; each start adds a byte to a file."""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import time
from pathlib import Path

from sqlalchemy import text

from pgtask_sa import TaskRegistry

tasks = TaskRegistry()

DONE = text("insert into done (i, pid) values (:i, :attempt)")


def note_start(params) -> int:
    """Add a byte to the file of this task, at once and for good; return how many there are."""
    with Path(params["file"]).open("ab", buffering=0) as file:
        file.write(b"x")
        return file.tell()


_MALLOC = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(("malloc", ctypes.CDLL(None)))


def _limit_memory() -> tuple[int, int]:
    """Allow this process 100 MB more than it has; return the limits that it had."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 100_000_000
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    return before


def die(how: str) -> None:
    """End this process, without a word."""
    if how == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exit":
        os._exit(1)
    elif how == "leave":
        os._exit(0)
    elif how == "segfault":
        ctypes.string_at(0)
    elif how == "memory":
        _limit_memory()
        ctypes.memset(_MALLOC(1_000_000_000), 0, 1)  # as C code that does not look what it got
    elif how == "group":  # the supervisor and its other children as well
        os.killpg(0, signal.SIGKILL)


@tasks.handler("POISON", max_attempts=3, backoff=0.05)
def poison(session, params):
    note_start(params)
    session.execute(DONE, {"i": -1, "attempt": 0})
    die(params["how"])


@tasks.handler("ASYNC_POISON", max_attempts=3, backoff=0.05)
async def async_poison(session, params):
    note_start(params)
    await session.execute(DONE, {"i": -1, "attempt": 0})
    die(params["how"])


@tasks.handler("ONCE", max_attempts=1)
def once(session, params):
    note_start(params)
    die(params["how"])


@tasks.handler("PATIENT", max_attempts=3, backoff=60)
def patient(session, params):
    note_start(params)
    die(params["how"])


@tasks.handler("FRAGILE", max_attempts=4, backoff=0.05)
def fragile(session, params):
    if note_start(params) % 2:
        raise ValueError("an ordinary failure")
    die(params["how"])


@tasks.handler("GLUTTON", max_attempts=2, backoff=0.05)
def glutton(session, params):
    note_start(params)
    before = _limit_memory()
    try:
        bytearray(1_000_000_000)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@tasks.handler("LEASED_POISON", max_attempts=2, backoff=0.05, mode="leased", lease=1)
def leased_poison(session, params):
    note_start(params)
    die(params["how"])


@tasks.handler("HANG")
def hang(session, params, task):
    """Hang the first time; the second time, tell the number of the attempt."""
    if note_start(params) == 1:
        time.sleep(60)
    session.execute(DONE, {"i": 1, "attempt": task.attempt})


def freeze(params) -> int:
    """Wait, the first time, for a file; return which time this is."""
    start = note_start(params)
    while start == 1 and not Path(params["go"]).exists():
        time.sleep(0.02)
    return start


@tasks.handler("HOLD", timeout=None)
def hold(session, params):
    freeze(params)


@tasks.handler("FROZEN", mode="leased", lease=1)
def frozen(session, params):
    session.execute(DONE, {"i": freeze(params), "attempt": 0})


@tasks.handler("ASYNC_FROZEN", mode="leased", lease=1)
async def async_frozen(session, params):
    start = await asyncio.to_thread(freeze, params)
    await session.execute(DONE, {"i": start, "attempt": 0})
    await session.commit()


@tasks.handler("GOOD")
def good(session, params, task):
    session.execute(DONE, {"i": params["i"], "attempt": task.attempt})


@tasks.handler("ASYNC_GOOD")
async def async_good(session, params, task):
    await session.execute(DONE, {"i": params["i"], "attempt": task.attempt})


@tasks.handler("SLOW_GOOD")
async def slow_good(session, params, task):
    await asyncio.sleep(0.05)
    await async_good(session, params, task)
