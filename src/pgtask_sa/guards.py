"""Guards on the worker's connections: what a handler may not do there is refused at the call.

Set up once for each engine and each connection of the driver; they ask each time whether a `Ground`
stands guard there. They also have its savepoint opened before a handler uses the driver itself, and
remember what went wrong.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, MutableMapping
from functools import lru_cache, partial
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, event

from pgtask_sa.errors import TaskFailed
from pgtask_sa.ground import ARMED, ENDED, FAREWELL, LENDER, TROUBLE, Ground

ON_GUARD = "pgtask_on_guard"  # attribute of a driver's: finds who stands guard there
LOOK = "pgtask_look"  # attribute of a driver's: looks at what its cursors are given to execute


def watch_errors(engine: Engine) -> None:
    """Remember on each connection its last database error: a handler may swallow it."""

    @event.listens_for(engine, "handle_error")
    def _remember(context: Any) -> None:
        if context.connection is None or context.connection.invalidated:
            return
        with contextlib.suppress(NotImplementedError):  # not yet in the pool: an engine's first one
            context.connection.info[TROUBLE] = context.original_exception


def heed_farewell(driver: Any) -> None:
    """Remember why the server ends a connection on which nothing is being asked.

    When something is asked later, all that libpq knows is that the connection is gone.
    """

    def remember(diagnostic: Any) -> None:
        if diagnostic.severity_nonlocalized == "FATAL":
            kind = psycopg.errors.lookup(diagnostic.sqlstate)
            setattr(driver, FAREWELL, kind(diagnostic.message_primary))

    driver.add_notice_handler(remember)


def lend_savepoints(engine: Engine) -> None:
    """Lend handlers' sessions the savepoint of the ground in place of their own."""
    for name in ("do_savepoint", "do_release_savepoint", "do_rollback_to_savepoint"):
        setattr(engine.dialect, name, _lending(name, getattr(engine.dialect, name)))


def _lending(name: str, otherwise: Callable[..., None]) -> Callable[..., None]:
    def lent(connection: Connection, savepoint: str) -> None:
        ground: Ground | None = connection.info.get(LENDER)
        if ground is None or not getattr(ground, name)(savepoint):
            otherwise(connection, savepoint)

    return lent


def guard_driver(driver: Any, info: MutableMapping[Any, Any]) -> None:
    """Refuse ``commit()`` and ``rollback()`` of a driver's connection while a handler runs on it.

    And open the savepoint for a handler that goes to the driver without its session: when it asks a
    sync one for a cursor, and before an async one's first ``execute``, which can be awaited.
    """

    def on_guard() -> Ground | None:
        ground: Ground | None = info.get(ARMED)
        # a connection that was taken out of its pool shares this info with the one that replaced it
        return ground if ground is not None and ground.driver is driver else None

    for name in ("commit", "rollback"):
        setattr(driver, name, _guarded(getattr(driver, name), on_guard))
    driver.cursor_factory = _looking(driver.cursor_factory)
    setattr(driver, LOOK, partial(_look, on_guard))
    if not inspect.iscoroutinefunction(driver.commit):
        for name in ("cursor", "transaction"):
            setattr(driver, name, _standing(getattr(driver, name), on_guard))
    else:
        driver.cursor_factory = _standing_cursors(driver.cursor_factory)
        setattr(driver, ON_GUARD, on_guard)


def _look(on_guard: Callable[[], Ground | None], query: Any) -> None:
    ground = on_guard()
    if ground is not None:
        ground.look_at(query)


@lru_cache
def _looking(factory: Any) -> Any:
    """Return the class of cursors that look at what they are given to execute."""

    class Looking(factory):  # type: ignore[misc]
        __slots__ = ()

    for name in ("execute", "executemany", "stream", "copy"):
        setattr(Looking, name, _after_a_look(getattr(factory, name)))
    return Looking


def _after_a_look(method: Callable[..., Any]) -> Callable[..., Any]:
    def looking(self: Any, query: Any, *args: Any, **kw: Any) -> Any:
        look_at = getattr(self.connection, LOOK, None)
        if look_at is not None:
            look_at(query)
        return method(self, query, *args, **kw)  # or what is to be awaited

    return looking


def _guarded(method: Callable[[], Any], on_guard: Callable[[], Ground | None]) -> Callable[[], Any]:
    def sync() -> Any:
        if on_guard():
            raise TaskFailed(ENDED)
        return method()

    async def awaited() -> Any:
        return await sync()

    return awaited if inspect.iscoroutinefunction(method) else sync


def _standing(
    method: Callable[..., Any], on_guard: Callable[[], Ground | None]
) -> Callable[..., Any]:
    def opened(*args: Any, **kw: Any) -> Any:
        ground = on_guard()
        if ground is not None:
            ground.stand()
        return method(*args, **kw)

    return opened


@lru_cache
def _standing_cursors(factory: Any) -> Any:
    """Return the class of async cursors that open the savepoint before they execute anything."""

    class Standing(factory):  # type: ignore[misc]
        __slots__ = ()

        async def execute(self, *args: Any, **kw: Any) -> Any:
            await _stand(self.connection)
            return await super().execute(*args, **kw)

        async def executemany(self, *args: Any, **kw: Any) -> Any:
            await _stand(self.connection)
            return await super().executemany(*args, **kw)

    return Standing


async def _stand(driver: Any) -> None:
    ground: Ground | None = getattr(driver, ON_GUARD, _nobody)()
    if ground is not None and not ground.open:
        await ground.stand_awaited()


def _nobody() -> None:
    pass
