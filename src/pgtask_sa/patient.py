"""Whom the doctor examines: a connection, the tables, the handlers, and what was asked once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cached_property

from sqlalchemy import Connection, text

from pgtask_sa.doctor import Facts, Finding, read_facts
from pgtask_sa.handlers import Handler
from pgtask_sa.settle import Tables

_SETTINGS = text("select name, setting from pg_catalog.pg_settings")
OLD = 600.0  # seconds; a transaction that is older holds back vacuum too long

# What workers cannot do whose every connection leads through a pooler.
BLIND = (
    "a task that kills its process is tried without a limit, `workers` cannot tell what runs nor "
    "who died, `cancel` cannot stop a running task"
)
NAME_IT = "--tasks PACKAGE.MODULE:NAME or PGTASK_TASKS"  # a registry, for its tables
GIVE_DIRECT_URL = "give workers --direct-url (DATABASE_DIRECT_URL): the same database, no pooler"


class Patient:
    """A database as a worker would meet it.

    Args:
        connection: as the worker's role, with no settings but the role's and the database's.
        tables: the worker's tables.
        handlers: those of the worker; empty if they are not known.
        connections: how many the workers need in all.
        has_direct_url: whether workers are given one.
        clock: seconds since 1970, of this machine.
        old: seconds; transactions that are older are reported.
    """

    def __init__(
        self,
        connection: Connection,
        tables: Tables,
        handlers: Mapping[str, Handler],
        *,
        connections: int,
        has_direct_url: bool = False,
        clock: Callable[[], float] = time.time,
        old: float = OLD,
    ) -> None:
        self.connection = connection
        self.tables = tables
        self.handlers = handlers
        self.connections = connections
        self.has_direct_url = has_direct_url
        self.clock = clock
        self.old = old

    @cached_property
    def settings(self) -> Mapping[str, str]:
        """The server's settings as this session got them; times in milliseconds."""
        return {row.name: row.setting for row in self.connection.execute(_SETTINGS)}

    @cached_property
    def facts(self) -> Mapping[str, Facts]:
        """What the catalog says about the three tables."""
        return read_facts(self.connection, self.tables)

    @property
    def has_tables(self) -> bool:
        """Whether all three tables are there."""
        return all(found.exists for found in self.facts.values())

    def is_on(self, setting: str) -> bool:
        """Say whether a setting is on."""
        return self.settings.get(setting) == "on"

    def number(self, setting: str) -> int:
        """Return a setting that is a number; 0 where the server does not have it."""
        return int(self.settings.get(setting, "0"))


def ok(name: str, message: str) -> Finding:
    """Say that all is well."""
    return Finding(name, "ok", message)


def warning(name: str, message: str, remedy: str) -> Finding:
    """Say that something is slow, late, or at risk in a crash of the server."""
    return Finding(name, "warning", message, remedy)


def error(name: str, message: str, remedy: str) -> Finding:
    """Say that tasks would be lost, or workers kept from working."""
    return Finding(name, "error", message, remedy)
