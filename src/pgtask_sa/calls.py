"""Calling a handler: the session it gets, its arguments, and the end of the session."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from pgtask_sa.events import Events
from pgtask_sa.failures import headline
from pgtask_sa.handlers import Handler, TaskView
from pgtask_sa.settle import Claimed, Tables

T = TypeVar("T")
OPTIONS = "pgtask_options"  # key in the info of a handler's session


class Face(Protocol):
    """How handlers of one kind, sync or async, get their session and are called."""

    def open(self, **options: Any) -> tuple[Session, Any]:
        """Return a new session as this code sees it, and as the handler does."""

    def call(self, handler: Handler, arguments: tuple[Any, ...], claimed: Claimed) -> None:
        """Run the handler to its end."""

    def aside(self, work: Callable[[], T]) -> T:
        """Do something that waits for the network, without holding up an event loop."""


def arguments(handler: Handler, handed: Any, claimed: Claimed, tables: Tables) -> tuple[Any, ...]:
    """Return what the handler is called with: session, params and, if it wants it, the task."""
    raw = claimed.params()
    given = (handed, handler.load_params(raw))
    return (*given, _view(handler, claimed, raw, tables)) if handler.takes_task else given


def _view(handler: Handler, claimed: Claimed, raw: Any, tables: Tables) -> TaskView:
    columns = {key: claimed.values[name] for key, name in tables.own_columns.items()}
    return TaskView(
        task_id=claimed.task_id,
        task_type=claimed.task_type,
        params=raw,
        created_at=claimed.values["created_at"],
        attempt=claimed.attempts + 1,
        max_attempts=handler.policy.max_attempts,
        columns=columns,
    )


_FORKS: list[None] = []  # one for each fork between the first process and this one
if hasattr(os, "register_at_fork"):  # to ask for the pid is a system call, and tasks are many
    os.register_at_fork(after_in_child=lambda: _FORKS.append(None))


def in_one_process(function: Callable[..., T], given: tuple[Any, ...]) -> T:
    """Call a handler, and let only the process that called come back: the handler may fork.

    A child that returned, or raised something, would otherwise settle the task as well, and claim
    the next one.
    """
    before, code = len(_FORKS), 1
    try:
        result = function(*given)
        code = 0
    except SystemExit as end:
        code = _exit_code(end)
        raise
    finally:
        if len(_FORKS) != before:
            os._exit(code)
    return result


async def in_one_process_async(coroutine: Any) -> None:
    """Await a handler, as `in_one_process` calls one."""
    before, code = len(_FORKS), 1
    try:
        await coroutine
        code = 0
    except SystemExit as end:
        code = _exit_code(end)
        raise
    finally:
        if len(_FORKS) != before:
            os._exit(code)


def _exit_code(end: SystemExit) -> int:
    return end.code if isinstance(end.code, int) else bool(end.code)


def remember_options(session: Session) -> None:
    """Note the options of a connection that is not the worker's own, before a handler begins."""
    if isinstance(session.bind, Connection):
        session.info[OPTIONS] = session.bind.get_execution_options()


def _restore_options(session: Session) -> None:
    """Take back the options that a handler has set for the connection, and not for a statement.

    SQLAlchemy would keep them: a ``schema_translate_map`` would send the worker's own statements,
    and with them the task, into the tables of another schema.
    """
    connection = session.bind
    if not isinstance(connection, Connection):
        return
    own = connection.engine.get_execution_options()  # those of a connection to which nobody added
    now = connection.get_execution_options()
    if now is own or connection.closed:
        return
    before = session.info.get(OPTIONS, own)
    changed = [name for name in now if now[name] is not before.get(name)]
    if changed:
        connection.execution_options(**{name: before.get(name) for name in changed})


def close(session: Session, events: Events) -> Exception | None:
    """End a session for good; return the error if something is amiss with it."""
    try:
        if session.in_transaction() or any(True for _ in session):
            session.close()  # which takes its time, also when there is nothing to do
    except Exception as error:  # noqa: BLE001 - a connection in trouble, or a task left behind
        events.emit("session.close", f"not closed: {headline(error)}", level=logging.DEBUG)
        return error
    finally:
        _restore_options(session)
        session.bind = None  # a handler that kept it cannot write into the next one's work
    return None
