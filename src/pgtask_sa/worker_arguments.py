"""The command line of a worker."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from typing import TypeVar, get_args

from pgtask_sa.claim_orders import Order
from pgtask_sa.errors import ConfigurationError

T = TypeVar("T")
# What a worker takes as it is, under the same name.
TAKEN_OVER = (
    *("concurrency", "processes", "batch_size", "order", "fair_by", "sample"),
    *("drain", "grace", "idle_interval", "report_interval"),
)
LEVELS = "DEBUG, INFO, WARNING, ERROR or CRITICAL"


class Usage(Exception):  # noqa: N818 - not an error of the library
    """The command was typed wrongly, in a way that argparse cannot see."""


def make_parser() -> argparse.ArgumentParser:
    """Return what parses the arguments of ``python -m pgtask_sa.worker``."""
    parser = argparse.ArgumentParser(
        prog="python -m pgtask_sa.worker",
        description="Run the tasks that wait in the task table.",
        epilog="Exit codes: 0 clean end, 1 cannot start, 2 wrong usage, 3 running tasks were cut "
        "off (they are back in the table), 4 a handler is stuck in a child process.",
    )
    add = parser.add_argument
    add("tasks", metavar="PACKAGE.MODULE:NAME", help="where the TaskRegistry is")
    add("--database-url", default=None, help="default: the environment variable DATABASE_URL")
    add("--direct-url", help="the same without the pooler; default: DATABASE_DIRECT_URL")
    add("--concurrency", type=int, default=4, help="tasks at once in each process (4)")
    add(
        "--processes",
        type=int,
        help="child processes, replaced when they die or hang (none: work here)",
    )
    add("--batch-size", type=int, default=1, help="tasks per claim and transaction (1)")
    add("--order", choices=get_args(Order), default="fair", help="order of claims (fair)")
    add(
        "--priority",
        nargs="+",
        action="extend",
        default=[],
        metavar="TYPE=RANK",
        help="lower ranks go first",
    )
    add(
        "--weight",
        nargs="+",
        action="extend",
        default=[],
        metavar="TYPE=N",
        help="share of the turns (1), with --order fair",
    )
    add("--fair-by", metavar="COLUMN", help="equal turns for its values instead of the types")
    add("--sample", type=float, default=1.0, help="per cent of the table for tablesample (1)")
    add("--drain", action="store_true", help="stop when nothing is left to claim")
    add("--grace", type=float, default=30.0, help="seconds to finish after SIGTERM (30)")
    add("--idle-interval", type=float, default=5.0, help="seconds between looks when idle (5)")
    add(
        "--report-interval",
        type=float,
        default=60.0,
        help="seconds between reports of types without a handler (60)",
    )
    add("--show-values", action="store_true", help="keep and log values that errors quote")
    add("--log-level", type=_level, metavar="LEVEL", help=f"{LEVELS} (INFO; WARNING with a bar)")
    add("--log-format", choices=("text", "json"), default="text")
    add("--no-progress", action="store_true", help="no bar for --drain")
    return parser


def _level(text: str) -> str:
    level = text.upper()
    if not isinstance(logging.getLevelName(level), int):
        raise argparse.ArgumentTypeError(f"must be {LEVELS}, got {text!r}")
    return level


def ranks_of(pairs: list[str]) -> dict[str, int]:
    """Read the values of ``--priority``.

    Raises:
        ConfigurationError: one is not TYPE=RANK.

    Example:
        >>> ranks_of(["SEND_EMAIL_WELCOME=-1"])
        {'SEND_EMAIL_WELCOME': -1}
    """
    return _pairs("--priority", "RANK", "an integer", int, pairs)


def weights_of(pairs: list[str]) -> dict[str, float]:
    """Read the values of ``--weight``.

    Raises:
        ConfigurationError: one is not TYPE=N.

    Example:
        >>> weights_of(["SEND_EMAIL_WELCOME=2.5"])
        {'SEND_EMAIL_WELCOME': 2.5}
    """
    return _pairs("--weight", "N", "a number", float, pairs)


def _pairs(
    option: str, what: str, kind: str, read: Callable[[str], T], pairs: list[str]
) -> dict[str, T]:
    found = {}
    for pair in pairs:
        name, separator, value = pair.rpartition("=")
        if not separator or not name:
            raise ConfigurationError(f"{option} takes TYPE={what}, got {pair!r}")
        try:
            found[name] = read(value)
        except ValueError:
            problem = f"{option} {pair!r}: {what} must be {kind}"
            raise ConfigurationError(problem) from None
    return found
