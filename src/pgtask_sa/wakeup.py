"""Rings the doorbell when there is work: by LISTEN at once, by polling in any case.

One thread and one connection for each worker process, in autocommit: no transaction is ever open
while it waits. The protocol with the insert trigger:

1. A lane goes to sleep. The listener announces it with a shared advisory lock; again, if an insert
   tries for the lock in the same instant.
2. It looks again (`peek`): what was committed before the lock could be seen is found here.
3. From now on every insert notifies, since its trigger cannot get the lock exclusively.
4. One race is left: an insert whose trigger ran before 1 and whose commit came after 2. Polling at
   growing intervals finds it, at most about three times as late as that transaction was long.
5. A notification that comes while nobody sleeps: the announcement is withdrawn, and from then on
   inserts cost nothing extra.

All workers that sleep hear of a task, and one can have it. Where there are many, each decides by
lot: a few wake a lane at once, the others look milliseconds later whether it is still there.

Through a pooler neither LISTEN nor the lock can be had: they belong to a session, and there is
none. Then polling alone must do, once a second at least while lanes sleep.
"""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import psycopg
from sqlalchemy import Connection, Engine, Executable, Table
from sqlalchemy.exc import SQLAlchemyError

from pgtask_sa import statements
from pgtask_sa.doorbell import Doorbell
from pgtask_sa.engines import is_pooled
from pgtask_sa.events import Events
from pgtask_sa.failures import headline, in_one_line
from pgtask_sa.pipeline import readable
from pgtask_sa.roster import Roster
from pgtask_sa.tail import Lookout
from pgtask_sa.wire import AllWired, Row

FIRST_POLL = 0.02
GROWTH = 3.0
AFTER_NOTIFY = 0.1
GIVE_WAY = 0.002  # seconds for a lane that was woken, in which no look is to be in its way
FEW = 3  # workers that answer a notification at once, on the average
SECOND_LOOK = (0.005, 0.002)  # seconds until the others look: at least, and for each of them
RUNNING_POLL = 0.4
POOLED_POLL = 1.0  # at most, where nobody tells us
FOREVER = 3600.0
RECONNECT = (0.1, 1.0)
DEAF_AFTER = 8  # failures in a row, about five seconds
DOWN_AFTER = 1.0  # seconds in which nobody had success
REMIND = 60.0  # until what fails on and on for the same reason is told again
CANCEL = "cancel "  # what a payload begins with that names a task to stop
DATABASE_ERRORS = (SQLAlchemyError, psycopg.Error, OSError)


class Health:
    """Knows whether the database serves the lanes, and tells once for each change.

    Only lanes speak to it: reading, which is all that a listener does, also works where nothing
    can be claimed, on a standby.
    """

    def __init__(self, events: Events) -> None:
        self.events = events
        self.up = True
        self._good = 0.0
        self._refusal = ("", 0.0)
        self._lock = threading.Lock()

    def failed(self, error: BaseException, since: float) -> bool:
        """Note trouble on a connection opened at ``since``; only the first of a row is told.

        A connection that is older than the last success of anybody says nothing: when a server is
        restarted, each lane finds its old connection dead at some time, long after the others
        work again. Nor is the database away as long as it serves other lanes. False: try again.
        """
        with self._lock:
            if since <= self._good or time.monotonic() < self._good + DOWN_AFTER:
                return False
            if self.up:
                self.up = False
                message = f"the database does not serve, the worker waits for it: {one_line(error)}"
                self.events.emit("database.down", message, level=logging.ERROR)
            return True

    def refused(self, error: BaseException) -> None:
        """Note that a claim failed in a database that works; told once for each new message."""
        message = one_line(error, values=self.events.shows_values)
        now = time.monotonic()
        with self._lock:
            told, when = self._refusal
            if message == told and now < when + REMIND:
                return
            self._refusal = message, now
        self.events.emit("claim.failed", f"a claim failed: {message}", level=logging.ERROR)

    def worked(self) -> None:
        """Note success; told only after trouble."""
        self._good = time.monotonic()
        if self.up:
            return
        with self._lock:
            if not self.up:
                self.up = True
                self.events.emit("database.up", "the database serves again")


class Listener(threading.Thread):
    """The thread that waits for the lanes while they sleep.

    ``on_cancel`` is called, in this thread, with the number of each task that somebody wants to be
    stopped. It must be quick, and leave this thread's connection alone.
    """

    def __init__(
        self,
        engine: Engine,
        roster: Roster,
        bell: Doorbell,
        health: Health,
        *,
        idle_interval: float,
        report_interval: float,
    ) -> None:
        super().__init__(name="pgtask-listener", daemon=True)
        self.engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        self.roster = roster
        self.table = roster.table
        self.bell = bell
        self.health = health
        self.idle_interval = idle_interval
        self.report_interval = report_interval
        self._wired = AllWired()
        self._driver: Any = None  # psycopg's connection
        self.on_cancel: Callable[[int], object] = lambda _task_id: None
        self.count_others: Callable[[], int] = lambda: 0  # workers
        self._ear, self._mouth = socket.socketpair()
        self._ear.setblocking(False)
        self._mouth.setblocking(False)
        self._stopping = False
        self._announced = False
        self._watching = False
        self._notified = False
        self._failures = 0
        self._deaf = False
        self._polling = False
        self._found = False
        self._longest = idle_interval
        self._interval = FIRST_POLL
        self._next_poll = self._planned = 0.0
        self._next_report = 0.0
        bell.on_sleep = self.lane_sleeps

    # -- called by other threads ------------------------------------------------------------

    def lane_sleeps(self) -> None:
        """Hear that a lane went to sleep; only the first one after a busy time matters."""
        if not self._watching:
            self._poke()

    def stop(self) -> None:
        """End the thread soon; its connection is closed."""
        self._stopping = True
        self._poke()

    def _poke(self) -> None:
        with suppress(BlockingIOError):  # so many pokes are on their way already
            self._mouth.send(b"!")

    # -- the thread ---------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until stopped; a lost connection is made again, for ever."""
        while not self._stopping:
            try:
                with self.engine.connect() as connection:
                    driver = connection.connection.driver_connection
                    connection.detach()  # its lock and its LISTEN must end with it
                    self._serve(connection, driver)
            except Exception as error:  # noqa: BLE001 - without this thread nobody would look
                if not self._stopping:
                    self._be_deaf(error)

    def _be_deaf(self, error: BaseException) -> None:
        """Wait before the next try; until then the lanes must look by themselves."""
        self._failures += 1
        # They also find out whether it is the whole database; that is theirs to tell.
        self.bell.ring()
        if self._failures >= DEAF_AFTER and self.health.up and not self._deaf:
            self._deaf = True
            self.health.events.emit(
                "listener.down",
                f"cannot listen for new tasks, looking every second instead: {one_line(error)}",
                level=logging.WARNING,
            )
        pause = min(RECONNECT[0] * 2.0 ** min(self._failures, 10), RECONNECT[1])
        self._rest(pause * random.uniform(0.5, 1.0))  # noqa: S311

    def _hear_again(self) -> None:
        self._failures = 0
        if self._deaf:
            self._deaf = False
            self.health.events.emit("listener.up", "listening for new tasks")

    def _rest(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._stopping and (left := end - time.monotonic()) > 0:
            readable([self._ear.fileno()], left)  # lanes that fall asleep poke us, too
            self._drain_pokes()

    def _serve(self, connection: Connection, driver: Any) -> None:
        oid = connection.execute(statements.table_oid(self.table)).scalar()
        if oid is None:
            raise no_table(self.table)
        turn = self._set_up(connection, driver, int(oid))
        self._announced, self._notified, self._watching = False, False, False
        self.bell.ring()  # whatever was missed while we were away
        patience = 0.0  # one quick turn shows that all of it works
        while not self._stopping:
            turn(patience)
            patience = FOREVER
            self._hear_again()

    def _set_up(self, connection: Connection, driver: Any, oid: int) -> Callable[[float], None]:
        """Listen, if that can be had here; return what a turn is then."""
        self._lookout, self._driver = Lookout(self.table), driver
        if is_pooled(connection):
            self._longest = min(POOLED_POLL, self.idle_interval)
            self._tell_of_polling()
            return partial(self._pooled_turn, connection)
        self._longest = self.idle_interval
        driver.add_notify_handler(self._on_notify)
        connection.exec_driver_sql(f"LISTEN pgtask_{oid}")
        return partial(self._turn, connection, driver, oid)

    def _tell_of_polling(self) -> None:
        if self._polling:
            return
        self._polling = True
        self.health.events.emit(
            "listener.polling",
            f"through a pooler: no LISTEN, looking every {self._longest:g} s instead; "
            "give --direct-url",
            level=logging.WARNING,
        )

    def _pooled_turn(self, connection: Connection, most: float) -> None:
        """Look at growing intervals while lanes sleep; in between no transaction is open."""
        watched, self._watching = self._watching, False
        self._watching = self.bell.anyone_asleep()
        if self._watching and not watched:
            self._interval, self._next_poll = FIRST_POLL, 0.0
        readable([self._ear.fileno()], min(most, self._patience()))
        self._drain_pokes()
        if time.monotonic() >= self._next_poll and self.bell.anyone_asleep():
            self._poll(connection)
        if time.monotonic() >= self._next_report:
            self._report(connection)

    def _turn(self, connection: Connection, driver: Any, oid: int, most: float) -> None:
        self._watching = False  # first: a lane that falls asleep from here on pokes us
        self._watching = self.bell.anyone_asleep()
        if self._watching and not self._announced:
            self._announce(connection, oid)
        # a notification may have come along with the answer to our own last look
        wait = 0.0 if self._notified else min(most, self._patience())
        ear = self._ear.fileno()
        if ear in readable([driver.fileno(), ear], wait):
            self._drain_pokes()
        self._hear(driver)
        if self._notified:
            self._on_work(connection, oid)
        elif self._announced and time.monotonic() >= self._next_poll and self.bell.anyone_asleep():
            self._poll(connection)
        if time.monotonic() >= self._next_report:
            self._report(connection)

    def _announce(self, connection: Connection, oid: int) -> None:
        """Ask inserts to notify; the lock may be taken, for an instant, by one that looks for us.

        It would not notify, nor would any other after it: so this is tried again in the next turn,
        soon, and what was missed in between is found by looking.
        """
        result = connection.execute(statements.announce_sleep(), {"oid": oid})
        self._announced = bool(result.scalar())
        self._interval = FIRST_POLL
        self._poll(connection)

    def _patience(self) -> float:
        now = time.monotonic()
        wakes = [self._next_report]
        if self._watching:
            wakes.append(self._next_poll)
        return max(0.0, min(wakes) - now)

    def _hear(self, driver: Any) -> None:
        driver.pgconn.consume_input()
        while notice := driver.pgconn.notifies():
            self._understand(notice.extra.decode())

    def _on_notify(self, notify: Any) -> None:
        """Take what came along with the answer to a statement."""
        self._understand(notify.payload)

    def _understand(self, payload: str) -> None:
        task_id = payload.removeprefix(CANCEL)
        if task_id != payload and task_id.isdecimal():
            self.on_cancel(int(task_id))
        else:
            self._notified = True

    def _on_work(self, connection: Connection, oid: int) -> None:
        self._notified = False
        if self.bell.anyone_asleep():
            # it may be a delayed task: look soon when it falls due
            self._interval, wait = AFTER_NOTIFY, AFTER_NOTIFY
            others = self.count_others()
            if random.random() * (others + 1) >= FEW:  # noqa: S311
                last = min(SECOND_LOOK[0] + SECOND_LOOK[1] * others, AFTER_NOTIFY)
                wait = random.uniform(SECOND_LOOK[0], last)  # noqa: S311
            elif self.bell.ring_first():
                wait = GIVE_WAY  # there may be a task of another kind as well
            now = time.monotonic()
            # not earlier, but the look that was planned is not put off for ever
            clear = min(now + GIVE_WAY, self._planned + GIVE_WAY)
            self._next_poll = max(clear, min(self._next_poll, now + wait))
        elif self._announced:
            connection.execute(statements.withdraw_sleep(), {"oid": oid})
            self._announced = False

    def _poll(self, connection: Connection) -> None:
        """Look for work without a lock; ring if there is some, and plan the next look."""
        ready, seconds = self._look(connection)
        if ready:
            self.bell.ring()
            if self._polling and not self._found:
                self._interval = FIRST_POLL  # it may be the first of many
        self._found = ready
        wait = self._interval * random.uniform(0.9, 1.0)  # noqa: S311
        if seconds is not None and seconds > 0:
            wait = min(wait, seconds)
        self._planned = self._next_poll = time.monotonic() + wait
        # A task that runs is seen, too. When its worker is killed it comes back without a word.
        longest = min(RUNNING_POLL, self._longest) if ready else self._longest
        self._interval = min(self._interval * GROWTH, longest)

    def _look(self, connection: Connection) -> tuple[bool, float | None]:
        """Say whether something is ready, and in how many seconds the next task falls due."""
        return self._lookout.look(partial(self._ask, connection), self.roster.all())

    def _ask(
        self, connection: Connection, statement: Executable, given: Mapping[str, Any]
    ) -> list[Row]:
        """Read something, quickly, since no notification is heard meanwhile."""
        keep = not is_pooled(connection)
        rows = self._wired[statement].read(self._driver, given, keep=keep)
        self._hear(self._driver)  # what came along with the answer
        return rows

    def _drain_pokes(self) -> None:
        with suppress(BlockingIOError):
            while self._ear.recv(4096):
                pass

    def _report(self, connection: Connection) -> None:
        self.roster.refresh(connection)
        self.roster.report(connection)
        self._next_report = time.monotonic() + self.report_interval  # last: a failure must show


def one_line(error: BaseException, *, values: bool = False) -> str:
    """Return the text of a database error as one line that is not too long.

    With ``values`` whole, with the SQL and its parameters.
    """
    if values:
        return in_one_line(error, values=True)
    text = headline(getattr(error, "orig", None) or error)
    return " ".join(text.removeprefix("OSError: ").split())[:300]


def no_table(table: Table) -> OSError:
    """Say what to do about a table that is not there."""
    return OSError(
        f'table "{table.fullname}" does not exist; create it with "python -m pgtask_sa migrate", '
        "or with your own migrations"
    )
