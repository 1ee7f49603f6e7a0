"""Worker processes on one database, and what can be seen of them there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from process_tasks import create_tables
from processes import WorkerProcess
from sqlalchemy import NullPool, create_engine, text
from waiting import wait_until

from pgtask_sa import TaskSession

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent


class Fleet:
    """Starts workers with a registry, enqueues for them, looks at the tables."""

    def __init__(
        self,
        url: str,
        *,
        create: bool = True,
        target: str = "process_tasks:tasks",
        direct_url: str | None = None,
    ) -> None:
        self.url = url
        self.direct_url = direct_url
        self.target = target
        self.engine = create_engine(url, poolclass=NullPool)
        if create:
            create_tables(self.engine)

    def worker(self, *args: str, url: str | None = None) -> WorkerProcess:
        """Return a worker process, to be used in a ``with`` statement."""
        if self.direct_url:
            args = ("--direct-url", self.direct_url, *args)
        return WorkerProcess(self.target, url or self.url, *args, pythonpath=[HERE], cwd=HERE)

    def enqueue(self, task_type: str, *params: dict[str, Any]) -> None:
        with TaskSession(self.engine) as session:
            session.enqueue_many(task_type, params)
            session.commit()

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        with self.engine.connect() as connection:
            return [tuple(row) for row in connection.execute(text(statement))]

    def count(self, table: str = "task") -> int:
        return self.rows(f"select count(*) from {table}")[0][0]

    def done(self) -> list[int]:
        return [i for (i,) in self.rows("select i from done order by i")]

    def attempts(self) -> list[int]:
        """Return the attempts of all rows that nobody holds."""
        return [n for (n,) in self.rows("select attempts from task for update skip locked")]

    def runner(self) -> int | None:
        """Return the server process of a task that sleeps, if there is one."""
        found = self.rows(
            "select pid from pg_stat_activity where application_name like 'pgtask %'"
            " and datname = current_database() and (query like 'select pg_sleep%'"
            " or state = 'idle in transaction' and query like 'insert into done%')"
        )
        return found[0][0] if found else None

    def until(self, condition: Callable[[], Any], timeout: float = 15) -> Any:
        return wait_until(condition, timeout)


def started(*workers: WorkerProcess, times: int = 1) -> None:
    """Wait until each of them says that it has started."""
    for worker in workers:
        wait_until(
            lambda worker=worker: worker.output.count("worker started") >= times,
            20,
            message=lambda worker=worker: worker.output,
        )


def events(worker: WorkerProcess, *names: str) -> list[dict[str, Any]]:
    """Return what a worker with ``--log-format json`` told, all or some."""
    told = [json.loads(line) for line in worker.lines]
    return [event for event in told if not names or event.get("event") in names]
