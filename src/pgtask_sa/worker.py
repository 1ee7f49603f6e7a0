"""The worker: sweeps the task table until it is told to stop. ``python -m pgtask_sa.worker``."""

from __future__ import annotations

import argparse
import importlib
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from sqlalchemy import URL, ColumnElement, Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from pgtask_sa import priorities
from pgtask_sa.claim_orders import Order
from pgtask_sa.crew import Crew
from pgtask_sa.engines import database_url, given_direct_url, given_url
from pgtask_sa.enqueue import TaskSession
from pgtask_sa.enqueue_async import AsyncTaskSession
from pgtask_sa.errors import ConfigurationError, TaskError
from pgtask_sa.events import Events, JsonFormatter, Listener, TextFormatter
from pgtask_sa.handlers import TaskRegistry
from pgtask_sa.pipeline import readable
from pgtask_sa.plan import Plan, read_options
from pgtask_sa.progress import DrainProgress
from pgtask_sa.reports import count_claimable
from pgtask_sa.retry import Seconds
from pgtask_sa.settle import Tables
from pgtask_sa.signals import early, routed
from pgtask_sa.supervisor import CUT_OFF, REPLACE_ME, Supervisor
from pgtask_sa.worker_arguments import TAKEN_OVER, Usage, make_parser, ranks_of, weights_of

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_STUCK = REPLACE_ME  # a handler does not come back: another process is to take over
EXIT_CUT = CUT_OFF  # when the grace was over, at a second signal, or in a child that died


class Worker:
    """Runs the tasks of a registry: claims, calls the handlers, commits; until it is stopped.

    Args:
        tasks: the registry with the handlers. Other task types are left in the table.
        database: URL of the database, or an engine, of which nothing but the URL is taken: not its
            ``connect_args``, ``creator`` or ``schema_translate_map``, nor its events. Put options
            of the connection into the URL. The worker makes its own connections, with psycopg: one
            for each lane, one that listens, some for deadlines. It may lead through a pooler.
        direct_url: URL (or engine) of the same database without a pooler between, for what needs a
            session of its own: LISTEN, the notes of what runs, deaths, `cancel`. Without it such a
            worker looks every second, and counts no deaths.
        concurrency: how many sync handlers run at once (each in a thread), and how many async ones.
        processes: how many child processes do that, under the eyes of this one: one that dies, in
            which a handler is stuck, or whose interpreter a handler holds, is replaced. None does
            it in this process.
        batch_size: tasks per claim and transaction. 1 (the default) repeats one e-mail after a
            crash; larger batches are faster, and good for handlers that only touch the database.
        order: ``fair`` (equal turns for each type), ``random`` or ``tablesample``.
        priority: task type to rank; lower ranks are claimed first, a type not named has rank 0.
            The priority of a task itself goes before the rank of its type. Or an SQL expression
            over the columns of the task: a ``case()`` over ``task_type`` with integers is as fast
            as a mapping; any other reads and sorts the whole queue for each claim, unless there is
            an index on ``(priority, (expression), ticket)``.
        weights: task type to its share of the turns, with ``fair``: numbers over 0, of a type not
            named 1. Of two types that wait, one of weight 3 gets three turns of four.
        fair_by: a column of the task, or its name, whose values get equal turns instead of the
            types, with ``fair``; the mapping must have ``__fair_by__`` for it.
        sample: per cent of the table that ``tablesample`` looks at.
        drain: stop when nothing is left to claim.
        grace: seconds that running tasks get to finish after the first signal.
        idle_interval: seconds between looks at the table when nothing happens (a wake-up makes it
            look at once).
        report_interval: seconds between reports of task types without a handler.
        show_values: keep in ``last_error``, and tell the log, all that errors say: parameters of
            SQL, and whatever else the server, SQLAlchemy or pydantic quote of rows and params.
            Otherwise these are left out. What a handler writes into an error of its own is kept
            in any case.
        session: a sessionmaker for the sessions handed to sync handlers; `TaskSession` by default.
        async_session: likewise for async handlers; `AsyncTaskSession` by default.
        listeners: called with every `pgtask_sa.events.Event`.

    Raises:
        ConfigurationError: an option is out of range, or there are no handlers.

    Example:
        >>> tasks = TaskRegistry()
        >>> @tasks.handler("GREET")
        ... def greet(session, params): print("hello", params["name"])
        >>> worker = Worker(tasks, "postgresql://localhost/app", concurrency=2, drain=True)
        >>> worker.run()  # doctest: +SKIP
        0
    """

    def __init__(
        self,
        tasks: TaskRegistry,
        database: str | URL | Engine | AsyncEngine,
        *,
        direct_url: str | URL | Engine | AsyncEngine | None = None,
        concurrency: int = 4,
        processes: int | None = None,
        batch_size: int = 1,
        order: Order = "fair",
        priority: Mapping[str, int] | ColumnElement[Any] | None = None,
        weights: Mapping[str, float] | None = None,
        fair_by: Any = None,
        sample: float = 1.0,
        drain: bool = False,
        grace: Seconds = 30.0,
        idle_interval: Seconds = 5.0,
        report_interval: Seconds = 60.0,
        show_values: bool = False,
        session: Callable[..., Session] | None = None,
        async_session: Callable[..., AsyncSession] | None = None,
        listeners: list[Listener] | None = None,
    ) -> None:
        if not isinstance(tasks, TaskRegistry):
            raise ConfigurationError(f"a TaskRegistry is needed, got {tasks!r}")
        if not len(tasks):
            raise ConfigurationError("the registry has no handlers: is its module imported?")
        self.options = read_options(
            tasks.task_class,
            concurrency=concurrency,
            processes=processes,
            batch_size=batch_size,
            order=order,
            priority=priority,
            weights=weights,
            fair_by=fair_by,
            sample=sample,
            drain=drain,
            grace=grace,
            idle_interval=idle_interval,
            report_interval=report_interval,
        )
        self.tasks = tasks
        self.url = database_url(database)
        self.direct_url = None if direct_url is None else database_url(direct_url)
        self.events = Events(listeners, shows_values=show_values)
        claim = self.options.claim
        priorities.warn_of_strangers(
            self.events, tasks.handlers, priority=claim.ranks, weights=claim.weights
        )
        self.tables = Tables(tasks.task_class)
        self._session = session or sessionmaker(class_=TaskSession, task_class=tasks.task_class)
        self._async_session = async_session or async_sessionmaker(
            class_=AsyncTaskSession, task_class=tasks.task_class
        )
        self._stopping = threading.Event()
        self._supervisor: Supervisor | None = None
        self._stop_asked = False
        self._cut_asked = False
        self._signals = 0
        self._alarm: socket.socket | None = None

    # -- public ------------------------------------------------------------------------------

    def run(self) -> int:
        """Work until stopped or, with ``drain``, until nothing is left.

        Returns:
            The exit code: 0 after a clean end, 3 if running tasks had to be cut off, or a child
            process died while it was to end (they were rolled back and wait in the table), 1 if
            the event loop ended and took all async handlers along, 4 if a handler does not come
            back and another process is to take over.
        """
        o = self.options
        if o.supervised:
            self._supervisor = Supervisor(
                self._run_here, o.processes, self.events, drain=o.drain, grace=o.grace
            )
            return self._supervisor.run()
        return self._run_here()

    def stop(self, *, now: bool = False) -> None:
        """Stop claiming and let the running tasks finish; with ``now`` cut them off at once.

        May be called from another thread or from a signal handler, and more than once. It stops
        the process that it is called in, not the other ones of ``processes``.
        """
        self._stop_asked = True
        self._cut_asked = self._cut_asked or now
        self._wake()

    def _on_signal(self) -> None:
        self._signals += 1
        self._wake()

    def _wake(self) -> None:
        # Not by a threading.Event: a signal handler runs in the middle of anything, also of a
        # wait() of this same thread, and would wait for ever for the lock in there.
        alarm = self._alarm
        if alarm is not None:
            with suppress(OSError):
                alarm.send(b"!")

    def count_left(self) -> int:
        """Count the tasks that could be claimed now; reads the whole table."""
        engine = create_engine(self.url)
        try:
            with engine.connect() as connection:
                types = {"types": list(self.tasks.handlers)}
                count = connection.execute(count_claimable(self.tables.task), types)
                return int(count.scalar_one())
        finally:
            engine.dispose()

    # -- inside ------------------------------------------------------------------------------

    def _plan(self) -> Plan:
        return Plan(
            self.url,
            self.options,
            self.tables,
            self.tasks.handlers,
            self.events,
            self._session,
            self._async_session,
            self.direct_url,
        )

    def _run_here(self) -> int:
        crew = Crew(self._plan(), self._stopping, self.stop)
        if self._supervisor is not None:  # this is one of its children
            crew.on_leaving = self._supervisor.ask_for_another
            crew.watchdog.signs = self._supervisor.signs
        with routed(self._on_signal):
            self.events.emit("worker.started", "worker started", **self._summary())
            crew.start()
            self._wait()
            code = self._wind_up(crew)
        self.events.emit("worker.stopped", "worker stopped", exit_code=code)
        return code

    def _wait(self) -> None:
        """Wait until somebody asks to stop."""
        ear, alarm = socket.socketpair()
        alarm.setblocking(False)
        self._alarm = alarm
        with ear, alarm:
            while not (self._stop_asked or self._signals):
                readable([ear.fileno()], 1.0)
            self._alarm = None
        self._stopping.set()

    def _must_cut(self) -> bool:
        return self._cut_asked or self._signals >= 2  # noqa: PLR2004

    def _summary(self) -> dict[str, Any]:
        o = self.options
        return {
            "types": len(self.tasks),
            "concurrency": o.concurrency,
            "batch_size": o.claim.batch_size,
            "order": o.claim.order,
        }

    def _wind_up(self, crew: Crew) -> int:
        """First signal: finish what runs, within the grace. Second signal, or grace over: cut."""
        crew.close()
        if running := crew.running():
            self.events.emit(
                "worker.stopping",
                f"stopping; still running: {running}, for up to {self.options.grace:g} s "
                "(a second signal cuts them off)",
                running=running,
            )
        deadline = time.monotonic() + self.options.grace
        while crew.busy() and not self._must_cut() and time.monotonic() < deadline:
            crew.wait(0.05)
        cut = crew.running()
        if cut:
            self.events.emit(
                "worker.cut", f"cutting off {cut} running tasks", level=logging.WARNING
            )
        if crew.busy():
            crew.cut()
        crew.end()
        if cut and (self._signals or not crew.stuck):
            return EXIT_CUT
        if crew.stuck:  # why this process ends, unless it was told to; others may have been cut off
            return EXIT_STUCK
        return EXIT_FAILED if crew.failed else EXIT_OK


def load_registry(target: str) -> TaskRegistry:
    """Import the registry that ``package.module:name`` names.

    Raises:
        ConfigurationError: the module or the name is not there, or is no registry.

    Example:
        >>> load_registry("no.such:tasks")
        Traceback (most recent call last):
        pgtask_sa.errors.ConfigurationError: cannot import 'no.such': No module named 'no'
    """
    module_name, _, name = target.partition(":")
    if not module_name or module_name.startswith("."):
        raise ConfigurationError(f"name the registry as package.module:name, got {target!r}")
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigurationError(f"cannot import {module_name!r}: {error}") from error
    found = getattr(module, name or "tasks", None)
    if not isinstance(found, TaskRegistry):
        raise ConfigurationError(f"{module_name} has no TaskRegistry named {name or 'tasks'!r}")
    return found


def set_up_logging(level: str, style: str) -> None:
    """Send log lines to standard error, for people or for programs."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _worker(arguments: argparse.Namespace, listeners: list[Listener]) -> Worker:
    tasks = load_registry(arguments.tasks)
    return Worker(
        tasks,
        given_url(arguments.database_url),
        direct_url=given_direct_url(arguments.direct_url),
        show_values=arguments.show_values,
        listeners=listeners,
        **_checked(arguments, tasks),
    )


def _checked(arguments: argparse.Namespace, tasks: TaskRegistry) -> dict[str, Any]:
    """Return the options of a worker, of which each by itself is right, and all together."""
    chosen = {name: getattr(arguments, name) for name in TAKEN_OVER}
    try:
        chosen["priority"] = ranks_of(arguments.priority)
        chosen["weights"] = weights_of(arguments.weight)
        read_options(tasks.task_class, **chosen)
    except ConfigurationError as error:
        raise Usage(str(error)) from error
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker as the command line says; return the exit code."""
    with early() as told_to_stop:
        arguments = make_parser().parse_args(argv)
        bar = arguments.drain and not arguments.no_progress and sys.stderr.isatty()
        level = arguments.log_level or ("WARNING" if bar else "INFO")
        listeners: list[Listener] = []
        try:
            set_up_logging(level, arguments.log_format)
            worker = _worker(arguments, listeners)
        except (Usage, TaskError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)  # noqa: T201
            return EXIT_USAGE if isinstance(error, Usage) else EXIT_FAILED
        if told_to_stop:
            return EXIT_OK
        return _run_with_bar(worker, listeners) if bar else worker.run()


def _run_with_bar(worker: Worker, listeners: list[Listener]) -> int:
    progress = DrainProgress(worker.count_left, Console(stderr=True))
    listeners.append(progress.on_event)
    with progress:
        return worker.run()


if __name__ == "__main__":
    sys.exit(main())
