"""A Worker in a thread of the test, with a list of everything it told."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from sqlalchemy import create_engine, text
from waiting import PATIENCE, wait_until

from pgtask_sa import TaskRegistry, TaskSession, Worker
from pgtask_sa.engines import database_url

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from pgtask_sa.events import Event


class Running:
    """Runs a worker inside a ``with`` block, and stops it at the end.

    Register handlers on ``tasks`` before the block, or give a registry.
    """

    def __init__(self, url: str, tasks: TaskRegistry | None = None, **options: Any) -> None:
        self.url = database_url(url)
        self.tasks = tasks or TaskRegistry()
        self.options = options
        self.events: list[Event] = []
        self.code: int | None = None
        self.admin = create_engine(self.url)
        self.execute("create table if not exists mark (i int)")

    def __enter__(self) -> Self:
        options = {"concurrency": 2, "grace": 10, **self.options}
        listeners = [*options.pop("listeners", []), self.events.append]
        self.worker = Worker(self.tasks, self.url, listeners=listeners, **options)
        self._thread = threading.Thread(target=self._run, name="worker under test", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.worker.stop(now=exc_info[0] is not None)
        self.wait()
        self.admin.dispose()

    def _run(self) -> None:
        self.code = self.worker.run()

    def wait(self, timeout: float = 20) -> int | None:
        """Wait for the worker's end and return its exit code."""
        self._thread.join(timeout * PATIENCE)
        assert not self._thread.is_alive(), "the worker did not end"
        return self.code

    def listener_alive(self) -> bool:
        return any(t.name == "pgtask-listener" for t in threading.enumerate())

    # -- the database ------------------------------------------------------------------------

    def enqueue(self, task_type: str, *params: dict[str, Any], **options: Any) -> None:
        with TaskSession(self.admin, task_class=self.tasks.task_class) as session:
            for each in params or ({},):
                session.enqueue(task_type, each, **options)
            session.commit()

    def execute(self, statement: str, **values: Any) -> None:
        with self.admin.begin() as connection:
            connection.execute(text(statement), values)

    def rows(self, statement: str, **values: Any) -> list[tuple[Any, ...]]:
        with self.admin.connect() as connection:
            return [tuple(row) for row in connection.execute(text(statement), values)]

    def count(self, table: str = "task") -> int:
        return self.rows(f"select count(*) from {table}")[0][0]

    def marks(self) -> list[int]:
        return [i for (i,) in self.rows("select i from mark order by i")]

    def dead(self) -> list[tuple[str, int, str]]:
        return self.rows("select task_type, attempts, reason from dead_task order by task_id")

    # -- waiting -----------------------------------------------------------------------------

    def until(
        self, condition: Callable[[], Any], timeout: float = 15, interval: float = 0.01
    ) -> Any:
        told = lambda: f"told: {self.events[-20:]}"  # noqa: E731
        return wait_until(condition, timeout, interval, message=told)

    def until_empty(self, timeout: float = 20) -> None:
        """Wait until no task is left, waiting or running."""
        self.until(lambda: self.count() == 0, timeout)

    def until_idle(self, timeout: float = 10) -> None:
        """Wait until the worker has told its inserts to notify it."""
        self.until(self.sleeps, timeout)

    def sleeps(self) -> bool:
        """Say whether a worker has announced that it sleeps; through a pooler none ever does."""
        return bool(self.told("listener.polling")) or bool(
            self.rows(
                "select 1 from pg_locks where locktype = 'advisory' and mode = 'ShareLock'"
                " and database = (select oid from pg_database where datname = current_database())"
            )
        )

    def told(self, *names: str) -> list[str]:
        """Return the names of the events so far, or those among ``names``."""
        return [e.name for e in self.events if not names or e.name in names]

    def first(self, name: str) -> Event:
        """Wait for an event and return it."""
        return self.until(lambda: next((e for e in list(self.events) if e.name == name), None))
