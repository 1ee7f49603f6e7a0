"""The command line: ``python -m pgtask_sa``, and the same as ``pgtask``.

Exit codes: 0 done, 1 not done (the reason is one line on standard error), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy.exc import DBAPIError

from pgtask_sa import cli_commands, cli_running, worker
from pgtask_sa import cli_output as out
from pgtask_sa.cli_commands import COUNTED, EXIT_FAILED, EXIT_OK, Place
from pgtask_sa.errors import TaskError
from pgtask_sa.worker import EXIT_USAGE
from pgtask_sa.worker_arguments import Usage

EXIT_INTERRUPTED = 130


class Command(NamedTuple):
    """A command: what runs it, its own options, and what its help says."""

    run: Callable[[Place], int]
    options: Callable[[Any], None]
    about: str
    example: str


def _type_and_limit(add: Any) -> None:
    add("--type", type=_text, help="only tasks of this type")
    add("--limit", type=_count, default=20, metavar="N", help="at most so many (20)")


def _migrate_options(add: Any) -> None:
    add("--revision", default="head", help="as on Alembic's command line (head)")


def _todo_options(add: Any) -> None:
    add("registry", nargs="?", metavar="PACKAGE.MODULE:NAME", help="the same as --tasks")


def _dead_options(add: Any) -> None:
    _type_and_limit(add)
    add("--show", type=_task_id, metavar="ID", help="one task, with its whole error and params")


def _requeue_options(add: Any) -> None:
    add("ids", nargs="*", type=_task_id, metavar="ID", help="numbers of dead tasks")
    add("--type", type=_text, help="all dead tasks of this type")
    add("--all", action="store_true", help="all dead tasks")


def _enqueue_options(add: Any) -> None:
    add("task_type", metavar="TYPE")
    add("params", nargs="?", default="{}", metavar="PARAMS_JSON", help="an object; - reads stdin")
    add("--delay", type=float, metavar="SECONDS", help="not before so long from now")
    add("--run-at", type=_moment, metavar="ISO", help="not before, as 2030-01-31T08:00+01:00")
    add("--priority", type=int, default=0, metavar="N", help="lower goes first (0)")
    add("--coalesce", action="store_true", help="not if an equal coalesced task waits already")


def _cancel_options(add: Any) -> None:
    add("ids", nargs="+", type=_task_id, metavar="TASK_ID", help="numbers of tasks")


def _doctor_options(add: Any) -> None:
    add("--concurrency", type=_count, default=4, metavar="N", help="of the worker (4)")
    add("--processes", type=_count, default=1, metavar="N", help="of all workers together (1)")
    add("--direct-url", metavar="URL", help="of the worker; default: DATABASE_DIRECT_URL")


COMMANDS = {
    "migrate": Command(
        cli_commands.migrate,
        _migrate_options,
        "Create the library's own tables, or bring them up to date. Not for a task table on your "
        "own Base: that one is in your own migrations.",
        "migrate --database-url postgresql://localhost/shop",
    ),
    "todo": Command(
        cli_commands.todo,
        _todo_options,
        "List the task types that wait and have no handler in your registry; without one, all "
        f"types that wait. Of each type no more than {COUNTED:,} tasks are looked at.",
        "todo shop.tasks:tasks",
    ),
    "list": Command(
        cli_commands.list_tasks,
        _type_and_limit,
        "List tasks in the table, the oldest first: waiting, planned and running ones.",
        "list --type SEND_EMAIL_WELCOME --limit 50",
    ),
    "dead": Command(
        cli_commands.dead,
        _dead_options,
        "List the error queue: tasks that used up their attempts or were discarded.",
        "dead --show 4711",
    ),
    "requeue": Command(
        cli_commands.requeue,
        _requeue_options,
        "Bring dead tasks back, with fresh attempts and their old numbers. They are ready at once, "
        "also one that was planned for later when it was cancelled. Those that somebody else has "
        "locked are left. Exit code 1 when nothing was brought back.",
        "requeue 4711 4712",
    ),
    "stats": Command(
        cli_commands.stats,
        lambda _: None,
        "Count tasks by type: ready, running in a transaction, planned for later, leased to a "
        "running handler, retrying (of the first three, those that failed before), dead. Reads "
        "both tables whole.",
        "stats --json",
    ),
    "enqueue": Command(
        cli_commands.enqueue,
        _enqueue_options,
        "Enqueue a task and print its number. With --tasks the params are checked by the "
        "annotation of the handler.",
        """enqueue SEND_EMAIL_WELCOME '{"usr_id": 1}' --delay 60""",
    ),
    "workers": Command(
        cli_running.workers,
        lambda _: None,
        "List the workers that are alive, and what each of their lanes runs, for how long. Of one "
        "behind a pooler without a direct URL neither is known, only that it was seen within the "
        "last minute (in JSON: null).",
        "workers --json",
    ),
    "cancel": Command(
        cli_running.cancel,
        _cancel_options,
        "Cancel tasks: move them to the error queue, from where `requeue` brings them back. One "
        "that runs is stopped: what its handler did in the database is undone, other tasks of its "
        "batch run again. Exit code 1 when one of them was not cancelled.",
        "cancel 4711 4712",
    ),
    "doctor": Command(
        cli_running.doctor,
        _doctor_options,
        "Check the server, the tables and the rights of this role, and say what to do about what "
        "is wrong. Exit code 1 when tasks would be lost or workers kept from working; warnings "
        "alone are 0. A trial task is written, run through and rolled back. With --tasks the "
        "time limits of handlers are compared with the server's.",
        "doctor --tasks shop.tasks:tasks --concurrency 8 --processes 2",
    ),
}
WORKER = "Run tasks; the same as python -m pgtask_sa.worker."


def _count(text: str) -> int:
    return _integer(text, 1, 1_000_000)


def _text(text: str) -> str:
    try:
        text.encode()  # bytes of a terminal that does not speak UTF-8
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"is not UTF-8: {text!a}") from None
    return text


def _task_id(text: str) -> int:
    return _integer(text, 1, 2**63 - 1)


def _integer(text: str, least: int, most: int) -> int:
    if text.isdecimal() and least <= int(text) <= most:
        return int(text)
    raise argparse.ArgumentTypeError(f"must be a number from {least} to {most}, got {text!r}")


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if moment.tzinfo is None:
        raise argparse.ArgumentTypeError(f"say in which time zone: {moment.isoformat()}+00:00")
    return moment


def _program() -> str:
    name = Path(sys.argv[0]).name
    return "python -m pgtask_sa" if name == "__main__.py" else name


def _version() -> str:
    try:
        return f"pgtask_sa {metadata.version('pgtask_sa')}"
    except metadata.PackageNotFoundError:
        return "pgtask_sa (not installed)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_program(),
        description="Look after the task table of a database.",
        epilog="Exit codes: 0 done, 1 not done, 2 wrong usage.",
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for name, command in COMMANDS.items():
        _add_command(commands, name, command)
    commands.add_parser("worker", help=WORKER, add_help=False)
    return parser


def _add_command(commands: Any, name: str, command: Command) -> None:
    about = command.about.replace("%", "%%")
    summary = about.partition(". ")[0].partition(":")[0].removesuffix(".")
    epilog = f"example: {_program()} {command.example}"
    parser = commands.add_parser(name, help=summary, description=about, epilog=epilog)
    command.options(parser.add_argument)
    add = parser.add_argument
    add("--database-url", metavar="URL", help="default: the environment variable DATABASE_URL")
    add("--json", action="store_true", help="one JSON document, for programs")
    if command.run is not cli_commands.migrate:
        add(
            "--tasks",
            metavar="PACKAGE.MODULE:NAME",
            default=os.environ.get("PGTASK_TASKS"),
            help="your TaskRegistry, for its handlers and its task class (PGTASK_TASKS)",
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code.

    Args:
        argv: the command line without the program's name; by default that of the process.

    Returns:
        0 done, 1 not done, 2 wrong usage.

    Example:
        >>> main(["--version"])
        Traceback (most recent call last):
        SystemExit: 0
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["worker"]:
        return worker.main(argv[1:])
    out.prepare_output()
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return EXIT_USAGE
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        out.reader_left()
        return EXIT_OK
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code


def _run(arguments: argparse.Namespace) -> int:
    try:
        place = Place(arguments)
        try:
            return COMMANDS[arguments.command].run(place)
        except DBAPIError as error:
            told = out.database_problem(error, place.url, create=place.how_to_create)
            out.complain(f"error: {told}")
    except Usage as error:
        out.complain(f"error: {error}")
        return EXIT_USAGE
    except TaskError as error:
        out.complain(f"error: {error}")
    return EXIT_FAILED
