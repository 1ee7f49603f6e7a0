"""What a worker process is told when it starts: its options, and all that comes with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import URL
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from pgtask_sa import priorities
from pgtask_sa.claim_orders import ClaimOptions, Order
from pgtask_sa.errors import ConfigurationError
from pgtask_sa.events import Events
from pgtask_sa.handlers import Handler
from pgtask_sa.retry import Seconds, as_seconds
from pgtask_sa.settle import Tables

LIMIT_MARGIN = 30.0  # seconds; a worker that is well enforces its own deadlines before


@dataclass(frozen=True)
class Options:
    """How a worker works; see `pgtask_sa.Worker` for each value."""

    concurrency: int = 4
    processes: int = 1
    claim: ClaimOptions = field(default_factory=ClaimOptions)
    drain: bool = False
    grace: float = 30.0
    idle_interval: float = 5.0
    report_interval: float = 60.0
    supervised: bool = False

    def __post_init__(self) -> None:
        for name, most in (("concurrency", 1000), ("processes", 1000)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigurationError(f"{name} must be an integer from 1 to {most}: {value!r}")
        if self.idle_interval <= 0 or self.report_interval <= 0:
            raise ConfigurationError("idle_interval and report_interval must be over 0 seconds")


def read_options(
    task_class: type[Any],
    *,
    processes: int | None = None,
    order: Order = "fair",
    batch_size: int = 1,
    sample: float = 1.0,
    weights: Mapping[str, float] | None = None,
    fair_by: Any = None,
    priority: Any = None,
    grace: Seconds = 30.0,
    idle_interval: Seconds = 5.0,
    report_interval: Seconds = 60.0,
    **rest: Any,
) -> Options:
    """Read the options of a `pgtask_sa.Worker`.

    Raises:
        ConfigurationError: one is out of range, or does not go with another or with the tables.

    Example:
        >>> from pgtask_sa import Task
        >>> read_options(Task, processes=0)
        Traceback (most recent call last):
        pgtask_sa.errors.ConfigurationError: processes must be an integer from 1 to 1000: 0
    """
    return Options(
        processes=1 if processes is None else processes,
        supervised=processes is not None,
        claim=ClaimOptions(
            order,
            batch_size,
            sample=sample,
            weights=dict(weights or {}),
            fair_by=None if fair_by is None else priorities.fair_key(task_class, fair_by),
            **priorities.read(task_class, priority),
        ),
        grace=as_seconds(grace, "grace"),
        idle_interval=as_seconds(idle_interval, "idle_interval"),
        report_interval=as_seconds(report_interval, "report_interval"),
        **rest,
    )


@dataclass(frozen=True)
class Plan:
    """All that a crew needs to know."""

    url: URL
    options: Options
    tables: Tables
    handlers: Mapping[str, Handler]
    events: Events
    session: Callable[..., Session]
    async_session: Callable[..., AsyncSession]
    direct_url: URL | None = None


def transaction_limit(handlers: Mapping[str, Handler], batch_size: int) -> float | None:
    """Return the seconds after which the server is to end a transaction by itself, if any.

    For a worker that cannot do it any more: one that stands still, or is cut off.
    """
    limits = [handler.timeout for handler in handlers.values() if handler.lease is None]
    known = [limit for limit in limits if limit is not None]
    if not known or len(known) < len(limits):
        return None
    return max(known) * batch_size + LIMIT_MARGIN
