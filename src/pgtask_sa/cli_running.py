"""The commands about what runs: `workers`, `cancel` and `doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import groupby
from typing import Any

from sqlalchemy import Connection, RowMapping
from sqlalchemy.exc import DBAPIError

from pgtask_sa import cli_output as out
from pgtask_sa import reports
from pgtask_sa.cancel import Cancellation, Canceller, running_in
from pgtask_sa.checkup import examine, worst
from pgtask_sa.cli_commands import EXIT_FAILED, EXIT_OK, Place
from pgtask_sa.crew import SIDE_CONNECTIONS
from pgtask_sa.doctor import Finding
from pgtask_sa.engines import given_direct_url
from pgtask_sa.patient import Patient
from pgtask_sa.presence_table import worker_table
from pgtask_sa.settle import Tables

WORKER_COLUMNS = ("worker_id", "host", "pid", "started_at", "seen_at", "is_direct")


def workers(place: Place) -> int:
    """List the workers, and what each of their lanes runs."""
    with place.connect() as connection:
        now = connection.scalars(reports.clock()).one()
        found = connection.execute(reports.lanes(worker_table(place.table))).mappings().all()
        tasks = _noted_tasks(connection, place, found)
    listed = [
        _worker(list(lanes), tasks, now) for _, lanes in groupby(found, lambda r: r["worker_id"])
    ]
    live = [worker for worker in listed if worker["alive"] is not False]
    gone = [worker for worker in listed if worker["alive"] is False]
    if place.json:
        out.print_json({"workers": live, "gone": gone})
    else:
        out.print_workers(live, gone, now)
    return EXIT_OK


def _noted_tasks(connection: Connection, place: Place, lanes: Any) -> Mapping[int, RowMapping]:
    ids = sorted({task_id for lane in lanes for task_id in lane["task_ids"]})
    rows = connection.execute(reports.versions_by_ids(place.table), {"ids": ids}).mappings()
    return {row["task_id"]: row for row in rows}


def _worker(lanes: list[RowMapping], tasks: Mapping[int, RowMapping], now: Any) -> dict[str, Any]:
    """Make one entry of the rows of one worker; through a pooler much of it is not known: None."""
    latest = max(lanes, key=lambda lane: lane["seen_at"])
    entry = {name: latest[name] for name in WORKER_COLUMNS}
    alive = (True if latest["is_direct"] else None) if any(n["alive"] for n in lanes) else False
    return {**entry, "alive": alive, "lanes": [_lane(lane, tasks, now) for lane in lanes]}


def _lane(lane: RowMapping, tasks: Mapping[int, RowMapping], now: Any) -> dict[str, Any]:
    running = running_in(lane, tasks)
    if not lane["is_direct"]:
        return {"lane": lane["lane"], "tasks": None, "begun_at": None, "seconds": None}
    begun = lane["begun_at"] if running else None
    seconds = None if begun is None else round((now - begun).total_seconds(), 3)
    listed = [
        {"task_id": task_id, "task_type": row["task_type"], "leased": row["leased"]}
        for task_id, row in running.items()
    ]
    return {"lane": lane["lane"], "tasks": listed, "begun_at": begun, "seconds": seconds}


def cancel(place: Place) -> int:
    """Cancel tasks, whether they wait or run."""
    with place.connect() as connection:
        canceller = Canceller(connection, place.task_class)
        done = [_told(place, canceller.cancel(task_id)) for task_id in place.arguments.ids]
    if place.json:
        out.print_json({"tasks": [{**asdict(each), "cancelled": each.is_done} for each in done]})
    return EXIT_OK if all(each.is_done for each in done) else EXIT_FAILED


def _told(place: Place, done: Cancellation) -> Cancellation:
    """Tell each at once: the next may have to wait."""
    if not place.json:
        (out.say if done.is_done else out.complain)(out.printable(str(done)))
    return done


def doctor(place: Place) -> int:
    """Examine the database."""
    findings = _examined(place)
    level = worst(findings)
    if place.json:
        out.print_json({"level": level, "checks": [asdict(finding) for finding in findings]})
    else:
        out.print_findings(findings)
    return EXIT_FAILED if level == "error" else EXIT_OK


def _examined(place: Place) -> list[Finding]:
    try:
        with place.connect() as connection:
            where = f"to {place.url.database} on {place.url.host or 'the local socket'}"
            return [Finding("connects", "ok", where), *examine(_patient(place, connection))]
    except DBAPIError as error:
        problem = out.database_problem(error, place.url, create=place.how_to_create)
        return [Finding("connects", "error", problem, "see that server, address and password")]


def _patient(place: Place, connection: Connection) -> Patient:
    options = place.arguments
    handlers = place.registry.handlers if place.registry else {}
    kinds = len({handler.is_async for handler in handlers.values()}) or 1
    need = options.processes * (options.concurrency * kinds + SIDE_CONNECTIONS)
    tables, is_direct = Tables(place.task_class), given_direct_url(options.direct_url) is not None
    return Patient(connection, tables, handlers, connections=need, has_direct_url=is_direct)
