"""A load that never pauses while something is broken, and what must be true of it afterwards."""

from __future__ import annotations

import ctypes
import random
import socket
import struct
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from fleet import Fleet, events
from proxy import TcpProxy
from sqlalchemy import NullPool, create_engine, make_url, text
from sqlalchemy.exc import DBAPIError
from waiting import wait_until

from pgtask_sa import insert_task

if TYPE_CHECKING:
    from collections.abc import Callable

    from processes import WorkerProcess
    from running import Running
    from typing_extensions import Self

KINDS = ("ROW", "ASYNC_ROW")
WINDOW = 0.5  # seconds over which it is said how many are done in a second


class Load:
    """Enqueues one task in each commit, from some threads, and notes what was confirmed.

    The handlers of process_tasks insert the number of their task into ``done``, which has no
    constraint: a task that was run twice is there twice. They have one attempt, so a task of which
    an attempt was counted is in the error queue. With ``through``, the URL of a pooler, that is
    their way.
    """

    def __init__(
        self, fleet: Fleet, *, threads: int = 2, pause: float = 0.002, through: str | None = None
    ) -> None:
        self.fleet = fleet
        self._engine = fleet.engine
        if through:
            unprepared = {"prepare_threshold": None}
            self._engine = create_engine(through, poolclass=NullPool, connect_args=unprepared)
        self.pause = pause
        self.confirmed: list[int] = []
        self.unknown: list[int] = []  # the COMMIT was sent, or may have been, and not answered
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._enqueue, args=(n, threads), daemon=True)
            for n in range(threads)
        ]
        with fleet.engine.begin() as connection:
            connection.execute(
                text("alter table done add at timestamptz default clock_timestamp()")
            )

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(10)

    def _enqueue(self, first: int, step: int) -> None:
        number = first
        while not self._stop.is_set():
            try:
                with self._engine.connect() as connection:
                    while not self._stop.wait(self.pause):
                        self._commit_one(connection, number)
                        number += step
            except DBAPIError:
                number += step
                self._stop.wait(0.02)

    def _commit_one(self, connection: Any, number: int) -> None:
        sent = False
        try:
            with connection.begin():
                kind = KINDS[(number // len(self._threads)) % 2]
                connection.execute(insert_task(kind, {"i": number}))
                sent = True
        except DBAPIError:
            if sent:
                self.unknown.append(number)
            raise
        self.confirmed.append(number)

    def first_done_after(self, moment: float, timeout: float = 15) -> float:
        """Wait for something to be done after a moment of `time.time`; return how long it took."""
        query = (
            f"select extract(epoch from min(at))::float from done where at > to_timestamp({moment})"
        )
        return wait_until(lambda: self._ask(query), timeout, 0.02) - moment

    def rate(self, seconds: float = 1.0) -> float:
        """Return how many were done in each of the last seconds."""
        query = (
            "select count(*)::float from done"
            f" where at > clock_timestamp() - interval '{seconds} s'"
        )
        return self.fleet.rows(query)[0][0] / seconds

    def half_as_fast_after(self, moment: float, rate: float, timeout: float = 15) -> float:
        """Wait until half as many as ``rate`` are done in a second; return how long it took.

        Until the first of them, that is.
        """
        return wait_until(lambda: self._first_of_many(moment, rate / 2), timeout, 0.1) - moment

    def _first_of_many(self, moment: float, rate: float) -> float | None:
        least = max(1, round(rate * WINDOW))
        return self._ask(
            "select extract(epoch from min(at))::float from"
            f" (select at, lead(at, {least - 1}) over (order by at) - at as took from done"
            f" where at > to_timestamp({moment})) t where took <= interval '{WINDOW} s'"
        )

    def _ask(self, query: str) -> float | None:
        try:
            return self.fleet.rows(query)[0][0]
        except DBAPIError:
            return None

    def drain(self, timeout: float = 20) -> None:
        """Wait until everything that was enqueued is gone from the task table."""
        self.fleet.until(lambda: self.fleet.count() == 0, timeout)

    def lost_and_doubled(self) -> tuple[list[int], list[int], int]:
        """Return what was confirmed and not done, done twice, and the count of dead tasks."""
        done = Counter(self.fleet.done())
        lost = sorted(set(self.confirmed) - set(done))
        return lost, [i for i, n in done.items() if n > 1], self.fleet.count("dead_task")


def changes(worker: WorkerProcess) -> list[str]:
    """Return what a worker told of the state of its database, in order."""
    return [event["event"] for event in events(worker, "database.down", "database.up")]


def alternate(told: list[str]) -> bool:
    """Say whether down and up came in turns: one line for each change of state."""
    return told == ["database.down", "database.up"] * (len(told) // 2)


def connections(fleet: Fleet) -> int:
    """Count the connections to the database, but for the one that asks."""
    query = (
        "select count(*) from pg_stat_activity where datname = current_database()"
        " and pid <> pg_backend_pid() and backend_type = 'client backend'"
    )
    return int(fleet.rows(query)[0][0])


def quiet(fleet: Fleet | Running, seconds: float = 0.7) -> bool:
    """Say whether no connection but ours did anything for a while."""
    busy = (
        "select 1 from pg_stat_activity where datname = current_database()"
        " and pid <> pg_backend_pid() and backend_type = 'client backend'"
        f" and (state <> 'idle' or state_change > clock_timestamp() - interval '{seconds} s')"
    )
    return fleet.rows(busy) == []


def pickup(fleet: Fleet, number: int) -> float:
    """Return how long one task takes on an idle system: its commit to the start of its handler."""
    wait_until(lambda: quiet(fleet), 15, 0.05)
    began = time.time()
    fleet.enqueue("ROW", {"i": number})
    query = f"select extract(epoch from at)::float from done where i = {number}"
    return wait_until(lambda: fleet.rows(query), 10)[0][0] - began


class Terminator(threading.Thread):
    """Ends server processes of one database at random, until told to stop."""

    def __init__(self, url: str, every: float, seed: int = 1) -> None:
        super().__init__(daemon=True)
        self.database = make_url(url).database
        self.every = every
        self.ended = 0
        self._dice = random.Random(seed)
        self._stop_asked = threading.Event()
        self._engine = create_engine(
            make_url(url).set(database="postgres"),
            poolclass=NullPool,
            isolation_level="AUTOCOMMIT",
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_asked.set()
        self.join(10)

    def run(self) -> None:
        query = text("select pid from pg_stat_activity where datname = :name order by pid")
        end = text("select pg_terminate_backend(:pid)")
        with self._engine.connect() as connection:
            while not self._stop_asked.wait(self._dice.uniform(0, 2 * self.every)):
                pids = connection.execute(query, {"name": self.database}).scalars().all()
                if pids:
                    pid = self._dice.choice(pids)
                    self.ended += bool(connection.execute(end, {"pid": pid}).scalar())


class Transactions:
    """Counts the transactions of one database, seen from another one so as not to count itself."""

    def __init__(self, url: str) -> None:
        parsed = make_url(url)
        self.name = parsed.database
        self._engine = create_engine(parsed.set(database="postgres"), poolclass=NullPool)

    def count(self) -> int:
        statement = text(
            "select xact_commit + xact_rollback from pg_stat_database where datname = :name"
        )
        with self._engine.connect() as connection:
            return int(connection.execute(statement, {"name": self.name}).scalar_one())

    def rate(self, seconds: float, wait: Callable[[float], None]) -> float:
        """Return how many there were in each second of a time to come."""
        before, began = self.count(), time.monotonic()
        wait(seconds)
        return (self.count() - before) / (time.monotonic() - began)


class DarkProxy(TcpProxy):
    """A proxy whose connections can go dark, as behind a firewall that forgot them.

    `stall` does not show what keepalives are good for: the proxy's own kernel goes on confirming
    what arrives. Here packets are thrown away before that, by a filter on both sockets.
    """

    def go_dark(self) -> int:
        """Confirm nothing any more of what arrives on the open connections; return their number."""
        with self._change:
            for connection in self._connections:
                # neither side is told when the other gives up
                connection.torn = True
                for end in (connection.client, connection.server):
                    _drop_all_packets(end)
            return len(self._connections)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


_SO_ATTACH_FILTER = 26
_RETURN_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K: keep 0 bytes of each packet


def _drop_all_packets(end: socket.socket) -> None:
    instruction = ctypes.create_string_buffer(_RETURN_NOTHING)
    program = _Program(1, ctypes.cast(instruction, ctypes.c_void_p))
    end.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, bytes(program))
