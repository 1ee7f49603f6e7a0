"""What each command of the command line does; `pgtask_sa.cli` parses, `cli_output` prints."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import URL, Connection, Engine, NullPool, Table, create_engine, event

from pgtask_sa import cli_output as out
from pgtask_sa import migrations, reports, statements
from pgtask_sa.engines import CONNECT_ARGS, DATE_STYLE, given_url
from pgtask_sa.enqueue import TaskSession
from pgtask_sa.errors import ConfigurationError
from pgtask_sa.insert_statements import set_lock_timeout
from pgtask_sa.intake import Target
from pgtask_sa.labels import task_label
from pgtask_sa.mapping import Task, dead_task_class, mapped_table, task_table
from pgtask_sa.patient import NAME_IT
from pgtask_sa.worker import load_registry
from pgtask_sa.worker_arguments import Usage

EXIT_OK, EXIT_FAILED = 0, 1
COUNTED = 10_000  # rows that `todo` looks at for each type
BATCH = 1000  # dead tasks brought back in one transaction
LOCK_TIMEOUT = "5s"


class Place:
    """What all commands need: which database, which tables, which handlers."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.json: bool = arguments.json
        self.url = _database_url(arguments.database_url)
        target = getattr(arguments, "registry", None) or getattr(arguments, "tasks", None)
        self.registry = load_registry(target) if target else None
        self.task_class: type[Any] = self.registry.task_class if self.registry else Task
        self.table = task_table(self.task_class)

    @property
    def dead_table(self) -> Table:
        """The error queue."""
        return mapped_table(dead_task_class(self.task_class))  # type: ignore[no-any-return]

    @property
    def how_to_create(self) -> str:
        """What somebody is to do whose tables are not there."""
        if self.task_class is not Task:
            return "create it with your migrations (alembic upgrade head)"
        ours = "create it with: python -m pgtask_sa migrate"
        if self.registry is not None:
            return ours
        # else he might get a second set of tables, which no worker reads
        return f"{ours}; or, if your tables are your own, name your registry: {NAME_IT}"

    def engine(self) -> Engine:
        """Return an engine without a pool: a command uses one connection, once."""
        options: Any = {"poolclass": NullPool, "isolation_level": "READ COMMITTED"}
        # it may lead through a pooler, where what was prepared is somewhere else the next time
        arguments = {**CONNECT_ARGS, "prepare_threshold": None}
        engine = create_engine(self.url, connect_args=arguments, **options)
        event.listen(engine, "begin", _set_date_style)
        return engine

    def connect(self) -> Connection:
        """Open a connection."""
        return self.engine().connect()

    def document(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Turn a row that was listed into JSON."""
        params = row["params"]
        decoded = out.from_json(params) if statements.is_json(self.table) else params
        return {**row, "params": decoded}


def _set_date_style(connection: Connection) -> None:
    # for the transaction: through a pooler the session is not ours
    name, value = DATE_STYLE
    connection.exec_driver_sql(f"set local {name} = '{value}'")


def _database_url(option: str | None) -> URL:
    try:
        return given_url(option)
    except ConfigurationError:
        raise
    except ValueError:  # of a port that is no number
        # not the URL itself: it may hold a password
        problem = "the database URL cannot be read; is the port a number?"
        raise ConfigurationError(problem) from None


def migrate(place: Place) -> int:
    """Create or update the library's own tables."""
    if place.arguments.revision == "base" or place.arguments.revision.startswith("-"):
        raise Usage("migrate only goes up; pgtask_sa.migrations.downgrade() goes back")
    before = migrations.current(place.url)
    with _told("pgtask_sa.migrations"):
        migrations.upgrade(place.url, place.arguments.revision)
    after = migrations.current(place.url)
    if place.json:
        out.print_json({"before": before, "after": after})
    elif before == after:
        out.say(f"nothing to do: {place.url.database} is at revision {after}")
    else:
        out.say(f"migrated {place.url.database} from {before or 'nothing'} to {after}")
    return EXIT_OK


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Let people see the log of a part of the library: it may have to wait for others."""
    logger, handler = logging.getLogger(name), logging.StreamHandler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def todo(place: Place) -> int:
    """List the task types that wait without a handler."""
    with place.connect() as connection:
        kinds = connection.scalars(statements.waiting_kinds(place.table)).all()
        handled = place.registry or ()
        types = [_waiting(connection, place, kind) for kind in kinds if kind not in handled]
    if place.json:
        out.print_json({"types": types})
    else:
        nothing = "every type that waits has a handler" if place.registry else "nothing waits"
        out.print_types(types, nothing)
    return EXIT_OK


def _waiting(connection: Connection, place: Place, kind: str) -> dict[str, Any]:
    summary = reports.summarize_waiting(place.table, COUNTED)
    row = connection.execute(summary, {"kind": kind}).mappings().one()
    return {"task_type": kind, **row, "exact": row["count"] < COUNTED}


def list_tasks(place: Place) -> int:
    """List tasks that wait or run."""
    rows, more, now = _listed(place, place.table)
    if place.json:
        out.print_json({"tasks": [place.document(row) for row in rows], "more": more})
    else:
        out.print_waiting(rows, now, more=more)
    return EXIT_OK


def dead(place: Place) -> int:
    """List the error queue, or show one dead task whole."""
    if place.arguments.show is not None:
        return _show(place, place.arguments.show)
    rows, more, now = _listed(place, place.dead_table)
    if place.json:
        out.print_json({"tasks": [place.document(row) for row in rows], "more": more})
    else:
        out.print_dead(rows, now, more=more)
    return EXIT_OK


def _show(place: Place, task_id: int) -> int:
    with place.connect() as connection:
        found = connection.execute(reports.rows_by_ids(place.dead_table), {"ids": [task_id]})
        rows = [dict(row) for row in found.mappings()]
    if not rows:
        out.complain(f"task {task_id} is not in the error queue")
        return EXIT_FAILED
    if place.json:
        out.print_json(place.document(rows[0]))
    else:
        out.print_whole(rows[0])
    return EXIT_OK


def _listed(place: Place, table: Table) -> tuple[list[dict[str, Any]], bool, datetime]:
    """Fetch rows, whether there are more, and the server's clock."""
    limit = place.arguments.limit
    listing = reports.listing(table, task_type=place.arguments.type, limit=limit + 1)
    with place.connect() as connection:
        now = connection.scalars(reports.clock()).one()
        rows = [dict(row) for row in connection.execute(listing).mappings()]
    return rows[:limit], len(rows) > limit, now


class Requeued(NamedTuple):
    """What became of the dead tasks that should come back, by their numbers."""

    requeued: list[int]
    merged: list[int]  # an equal task waits, and only one may exist
    locked: list[int]
    missing: list[int]


def requeue(place: Place) -> int:
    """Bring dead tasks back."""
    ids: list[int] = place.arguments.ids
    if [bool(ids), place.arguments.type is not None, place.arguments.all].count(True) != 1:
        raise Usage("say which: either task numbers, or --type, or --all")
    with place.connect() as connection:
        done = _requeue_ids(connection, place, ids) if ids else _requeue_all(connection, place)
    if place.json:
        out.print_json({"count": len(done.requeued), **done._asdict()})
    else:
        out.print_requeued(done._asdict())
    return EXIT_OK if done.requeued or done.merged else EXIT_FAILED


def _requeue_ids(connection: Connection, place: Place, ids: list[int]) -> Requeued:
    hold = reports.hold_dead_by_ids(place.dead_table)
    with connection.begin():
        held, back = _bring_back(connection, place, hold, {"ids": ids})
        left = connection.execute(reports.rows_by_ids(place.dead_table), {"ids": ids})
        locked = {row["task_id"] for row in left.mappings()}
    missing = set(ids) - set(held) - locked
    return Requeued(back, sorted(set(held) - set(back)), sorted(locked), sorted(missing))


def _requeue_all(connection: Connection, place: Place) -> Requeued:
    """Bring back all of a type, or all, in batches that do not lock the queue for long."""
    done = Requeued([], [], [], [])
    hold = reports.hold_dead(place.dead_table, task_type=place.arguments.type, limit=BATCH)
    after = 0  # upwards: what dies again meanwhile is not brought back again
    while True:
        with connection.begin():
            held, back = _bring_back(connection, place, hold, {"after": after})
        if not held:
            return done
        done.requeued.extend(back)
        done.merged.extend(sorted(set(held) - set(back)))
        after = held[-1]


def _bring_back(
    connection: Connection, place: Place, hold: Any, parameters: Mapping[str, Any]
) -> tuple[list[int], list[int]]:
    """Lock dead tasks, passing over what others have locked; move them; return both lists."""
    # where only one equal task may exist, an insert waits for the one that runs
    connection.execute(set_lock_timeout(LOCK_TIMEOUT))
    held = list(connection.scalars(hold, dict(parameters)))
    dead = place.dead_table
    # of the catalog, not of a mapping: without --tasks own columns are not known, and would be lost
    kept = connection.scalars(statements.stored_names(place.table)).all()
    names = [n for n in connection.scalars(statements.stored_names(dead)) if n in kept]
    move = statements.requeue(place.table, dead, reports.by_ids(dead), names)
    back = list(connection.scalars(move, {"ids": held})) if held else []
    return held, sorted(back)


def stats(place: Place) -> int:
    """Count tasks by type and state."""
    with place.connect() as connection:
        counted = connection.execute(reports.statistics(place.table, place.dead_table))
        rows = [dict(row) for row in counted.mappings()]
    if place.json:
        out.print_json({"types": rows})
    else:
        out.print_statistics(rows)
    return EXIT_OK


def enqueue(place: Place) -> int:
    """Enqueue a task."""
    options = place.arguments
    label, params = _validated(place, options.task_type, _read_params(options.params))
    with TaskSession(place.engine(), task_class=place.task_class) as session:
        task: Any = session.enqueue(
            label,
            params,
            delay=options.delay,
            run_at=options.run_at,
            priority=options.priority,
            coalesce=options.coalesce,
        )
        session.commit()
    task_id = None if task is None else task.task_id
    if place.json:
        out.print_json({"task_id": task_id, "task_type": label})
    else:
        out.say("an equal task waits already" if task_id is None else str(task_id))
    return EXIT_OK


def _read_params(text: str) -> dict[str, Any]:
    text = sys.stdin.read() if text == "-" else text
    try:
        params = json.loads(text)
    except ValueError as error:
        raise Usage(f"PARAMS_JSON is not JSON: {error}") from None
    except RecursionError:
        raise Usage("PARAMS_JSON is nested too deeply") from None
    if not isinstance(params, dict):
        raise Usage(f"PARAMS_JSON must be an object such as '{{\"usr_id\": 1}}', got {text[:80]}")
    return params


def _validated(place: Place, task_type: str, raw: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Check the type, and the params by the annotation of its handler."""
    label = task_label(place.task_class, task_type)
    if place.registry is None:
        return label, raw
    handler = place.registry.handlers.get(label)
    if handler is None:
        known = ", ".join(place.registry)
        out.complain(f"no handler for {label!r} in --tasks yet, which has: {known}; the task waits")
        return label, raw
    # as JSON first: a strict model takes text for a date there, and only there
    value = handler.load_params(raw)
    return label, Target(place.task_class, label, handler.codec).dump(value)
