"""Worker processes for the model test: real connections, but a test that decides every next step.

A process is some lanes, each a thread while it claims; they stop inside a handler until the test
says what the handler is to do. Every round trip to the server is counted, so that the process can
be made to die, or to lose its connection, just before any of them or just after; or another process
gets its turn at that moment.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg
from model_database import ModelDatabase
from psycopg.pq import TransactionStatus
from sqlalchemy import event
from sqlalchemy.orm import Session, sessionmaker

from pgtask_sa import TaskRegistry, TaskSession
from pgtask_sa.admission import Admission
from pgtask_sa.arrears import Arrears
from pgtask_sa.claim_orders import ClaimOptions
from pgtask_sa.claiming import Claiming
from pgtask_sa.enforcement import Enforcer
from pgtask_sa.engines import worker_engine
from pgtask_sa.events import Events
from pgtask_sa.execution import Execution
from pgtask_sa.faces import SyncFace
from pgtask_sa.ground import Ground
from pgtask_sa.leases import Keeper, LeasedRuns
from pgtask_sa.notes import Notes
from pgtask_sa.presence import Presence
from pgtask_sa.settle import Claimed, Settler
from pgtask_sa.solitude import Gate, Solitary
from pgtask_sa.turns import Claimer
from pgtask_sa.watchdog import Watchdog

PATIENCE = 60.0  # seconds for a lane to stop in a handler or to come to its end
ENDS = {"_commit_gen": "commit", "_rollback_gen": "rollback"}  # in psycopg
OPEN = (TransactionStatus.INTRANS, TransactionStatus.INERROR)
Order = Callable[[Session], bool]  # True: the handler returns


class Crashed(BaseException):
    """The process is dead: its thread has only to end, and nothing can reach the server."""


@dataclass
class Fault:
    """What happens at the ``countdown``-th round trip from now."""

    kind: str  # the process crashes, a connection is cut, or a rival takes its turn
    when: str  # before it is sent, or after it was answered
    countdown: int
    rival: int = 0  # which of those that there are


@dataclass(frozen=True)
class Plan:
    """How a process is set up."""

    batch_sizes: tuple[int, ...] = (1,)  # of each lane
    planner_off: tuple[str, ...] = ()


class Process:
    """One worker process."""

    def __init__(
        self,
        plan: Plan,
        database: ModelDatabase,
        tasks: TaskRegistry,
        chance: random.Random,
        number: int,
    ) -> None:
        self.plan = plan
        self.number = number
        self.kill = database.kill
        self.database = database
        self.tasks = tasks
        self.chance = chance
        self.make_session = sessionmaker(class_=TaskSession, task_class=database.task_class)
        self.tables = database.tables
        self.is_dead = False
        self.pids: set[int] = set()
        self.threads: dict[int, Lane] = {}
        engine = worker_engine(database.url, len(plan.batch_sizes) + 2)
        event.listen(engine, "do_connect", self._before_connect)
        event.listen(engine, "connect", self._after_connect)
        self.engine = engine.execution_options(compiled_cache=database.compiled)
        self.events = Events()
        self.presence = _Presence(self)
        self.keeper = Keeper(self.engine, self.tables, self.presence, self.events)
        self.watchdog = Watchdog(Enforcer(self.engine, self._settler))
        self.gate = Gate()
        self.blameless: dict[int, int] = {}
        self.lanes = [Lane(self, number, size) for number, size in enumerate(plan.batch_sizes, 1)]

    def _settler(self, connection: Any) -> Settler:
        return Settler(connection, self.tables, self.tasks.handlers, self.events)

    def _before_connect(self, *_: Any) -> None:
        if self.is_dead:
            raise Crashed

    def _after_connect(self, driver: Any, _record: Any) -> None:
        self.pids.add(driver.info.backend_pid)
        for method in self.plan.planner_off:
            driver.execute(f"set enable_{method} = off")
        driver.commit()
        driver.wait = partial(self._wait, driver, driver.wait)

    def _wait(
        self, driver: Any, wait: Callable[..., Any], steps: Any, *args: Any, **kw: Any
    ) -> Any:
        send = partial(wait, steps, *args, **kw)
        lane = self.current()
        if lane is None:
            return send()
        end = ENDS.get(steps.__name__)
        if end and driver.info.transaction_status in OPEN:
            return lane.round_trip(driver, send, (end,))
        return lane.round_trip(driver, send)

    def current(self) -> Lane | None:
        """Return the lane whose thread this is."""
        return self.threads.get(threading.get_ident())

    def crash(self) -> None:
        """Die: all connections go at once, and no new ones are made."""
        self.is_dead = True
        self.kill(self.pids)

    def close(self) -> None:
        """Clear away what is left in this Python process."""
        if self.is_dead:
            self.presence._close()
        else:
            self.presence.leave()
        for lane in self.lanes:
            lane.disconnect()
        self.engine.dispose()


class _Notes(Notes):
    """Counts the statement of each claim too, which goes past psycopg's connection."""

    def __init__(self, process: Process, presence: _Presence) -> None:
        super().__init__(process.tables.task)
        self.process = process
        self.presence = presence

    def _execute(self, pgconn: Any, wired: Any, values: dict[str, Any]) -> Any:
        send = partial(super()._execute, pgconn, wired, values)
        lane = self.process.current()
        if lane is None:
            return send()
        driver = self.presence._driver
        pairs = zip(values["task_ids"], values["row_versions"], strict=True)
        counted = [task_id for task_id, version in pairs if version > 0]
        return lane.round_trip(driver, send, ("note", counted))


class _Presence(Presence):
    """Takes such notes."""

    def __init__(self, process: Process) -> None:
        super().__init__(process.engine, process.tables.task, process.events)
        self._notes = _Notes(process, self)

    def is_own(self, driver: Any) -> bool:
        """Say whether that is the connection of this entry."""
        return driver is None or driver is self._driver


class _Admission(Admission):
    """Tells what was claimed and is to be settled."""

    lane: Lane

    def take_turn(self) -> None:
        """Look whether nobody else runs a suspect, but do not wait: he would not end meanwhile."""
        self.settler.connection.execute(self._turn)

    def _demand_solitude(self, batch: Sequence[Claimed]) -> None:
        super()._demand_solitude(batch)
        self.lane.log.append(("claimed", [claimed.task_id for claimed in batch]))


class _Ground(Ground):
    """Counts what goes past psycopg's connection too."""

    def __init__(self, connection: Any, lane: Lane) -> None:
        super().__init__(connection)
        self.lane = lane

    def _execute(self, statement: str) -> None:
        driver = self.connection.connection.driver_connection
        logged = ("commit",) if "COMMIT" in statement else None
        self.lane.round_trip(driver, partial(super()._execute, statement), logged)

    def _answer(self) -> None:
        self.lane.round_trip(self.driver, super()._answer)


class _Claiming(Claiming):
    """Counts the claim too, which goes past psycopg's connection."""

    lane: Lane

    def _fetch(self, statement: Any, parameters: Any) -> Any:
        driver = self.connection.connection.driver_connection
        return self.lane.round_trip(driver, partial(super()._fetch, statement, parameters))

    def chain(self, ends: Any) -> None:
        driver = self.connection.connection.driver_connection
        self.lane.round_trip(driver, partial(self._chain, ends))

    def _chain(self, ends: Any) -> None:
        self._notes: list[tuple[str, list[int]]] = []
        super().chain(ends)
        self.lane.log += [("commit",), *self._notes]

    def _was_noted(self, noted: Any, rows: Any) -> bool:
        if noted.ntuples:
            process, entry = self.lane.process, self.lane.entry
            self._notes.append(("note", process.database.noted(process.presence.worker_id, entry)))
        return super()._was_noted(noted, rows)


class Lane:
    """One lane, and the log of what it did: claimed, note, start, commit, rollback, end."""

    kind = "sync"

    def __init__(self, process: Process, number: int, batch_size: int) -> None:
        self.process = process
        self.number = number
        self.batch_size = batch_size
        self.execution: Execution | None = None
        self._arrears = Arrears(process.events, process.blameless)
        self.watch: Any = None
        self.entry: int | None = None
        self.fault: Fault | None = None
        self.let_in: Callable[[int], Lane | None] = lambda _pick: None  # a rival, for one step
        self.log: list[tuple[Any, ...]] = []
        self.is_busy = False
        self.answers_itself = False  # its handlers return at once
        self._connection: Any = None
        self._leased: LeasedRuns | None = None
        self._orders: queue.Queue[Order] = queue.Queue()
        self._quiet: queue.Queue[str] = queue.Queue()

    def __repr__(self) -> str:
        return f"<{self.process.number}.{self.number}>"

    # -- steps; called by the test -----------------------------------------------------------------

    def claim(self, fault: Fault | None = None) -> None:
        """Claim, and wait until a handler has begun or all is over."""
        self.fault = fault
        self.is_busy = True
        threading.Thread(target=self._run, daemon=True).start()
        self._wait()

    def obey(self, order: Order, fault: Fault | None = None) -> None:
        """Have the handler do something, and wait until it did or all is over."""
        self.fault = fault
        self._orders.put(order)
        self._wait()

    def _wait(self) -> None:
        try:
            self.is_busy = self._quiet.get(timeout=PATIENCE) != "end"
        except queue.Empty:
            raise AssertionError(f"{self} hangs; it did {self.log}") from None
        self.fault = None

    def pid(self) -> int:
        """Return the server process of its connection."""
        return self._connection.connection.driver_connection.info.backend_pid

    def execution_is_cut(self) -> None:
        """Keep what runs from committing: the worker stops."""
        if self.execution is not None:
            self.execution.cut = True

    def owed(self) -> list[int]:
        """Return the tasks whose attempts it has still to count."""
        return [lost.claimed.task_id for lost in self._arrears.owed]

    def left(self) -> list[int]:
        """Return of what it owes that which is left to whoever claims it first."""
        return [lost.claimed.task_id for lost in self._arrears.owed if lost.claimed.noted]

    # -- inside its thread -------------------------------------------------------------------------

    def _run(self) -> None:
        self.process.threads[threading.get_ident()] = self
        error: BaseException | None = None
        try:
            if self._connection is None:
                self._connect()
            while self._sweep():
                self._leased.run()
                if not self._goes_on():
                    break
            else:
                self.process.presence.rest(self.entry)
        except BaseException as raised:
            error = raised
            self.disconnect()
        finally:
            del self.process.threads[threading.get_ident()]
        self.log.append(("end", error))
        self._quiet.put("end")

    def _goes_on(self) -> bool:
        """Say whether to run what was claimed ahead; or let it go, as a lane that has to wait."""
        if self.execution.claiming.holds and self.process.chance.random() < 0.5:
            self.log.append(("goes_on",))
            return True
        self.execution.pause()
        return False

    def _connect(self) -> None:
        """Set the lane up; as `lanes.Shared.execution` does."""
        process = self.process
        self._connection = connection = process.engine.connect()
        face = SyncFace(connection, process.make_session, self, process.watchdog)
        if self.entry is None:
            self.entry = face.aside(process.presence.enlist)
        options = ClaimOptions(batch_size=self.batch_size)
        claimer = Claimer(process.tables.task, list(process.tasks), options)
        claimer._random = claimer.turns.chance = process.chance
        handlers = process.tasks.handlers
        execution = Execution(connection, face, claimer, handlers, process.tables, process.events)
        execution.ground.close()
        execution.ground = _Ground(connection, self)
        execution.claiming = _Claiming(connection, execution.ground, claimer, process.tables)
        execution.claiming.lane = self
        execution.claiming.leased = [each for each in handlers if handlers[each].lease is not None]
        execution.claiming.own_row = partial(process.presence.own_row, self.entry)
        execution.claiming.moved = partial(process.presence.moved, self.entry)
        execution.arrears = self._arrears
        note = partial(process.presence.note, self.entry)
        execution.admission = _Admission(
            process.presence, self.entry, face, execution.settler, handlers, note=note
        )
        execution.admission.lane = self
        self.execution = execution
        self._leased = LeasedRuns(execution, process.keeper)

    def disconnect(self) -> None:
        """Give no connection back: it met an error, or is not used any more."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.invalidate()
            connection.close()

    def _sweep(self) -> int:
        """Claim and run; as `lanes.SyncLane` does, but for waiting until others are done."""
        gate = self.process.gate
        if not gate.enter(self):
            self.execution.pause()
            return 0
        try:
            return self.execution.sweep()
        except Solitary as demand:
            return self._run_alone(demand, strictly=demand.strictly)
        finally:
            gate.leave(self)

    def _run_alone(self, demand: Solitary, *, strictly: bool) -> int:
        others = any(lane.is_busy for lane in self.process.lanes if lane is not self)
        if strictly and others:
            self.log.append(("waits",))
            return 0
        self.process.gate.close(self, 0.0)  # without waiting for a moment
        if strictly:
            assert self.process.gate.keep(self)
        try:
            self.execution.sweep_alone(demand.task_ids)
        finally:
            self.process.gate.open(self)
        return 1

    def handle(self, session: Session, task_id: int, attempt: int) -> None:
        """Be the handler."""
        self.log.append(("start", task_id, attempt))
        if self.answers_itself:
            return
        while True:
            self._quiet.put("blocked")
            if self._orders.get()(session):
                return

    def round_trip(
        self, driver: Any, send: Callable[[], Any], logged: tuple[Any, ...] | None = None
    ) -> Any:
        """Send something and get the answer, unless this is the moment for the fault."""
        fault = self.fault if self._is_hit(driver) else None
        if fault is not None and fault.when == "before":
            self._strike(fault, driver)
        answer = self._send(driver, send, logged)
        if fault is not None and fault.when == "after":
            self._strike(fault, driver)
            if fault.kind == "cut":
                driver.pgconn.exec_(b"")  # it finds the connection dead
                raise psycopg.OperationalError("the connection was lost")
        return answer

    def _send(self, driver: Any, send: Callable[[], Any], logged: tuple[Any, ...] | None) -> Any:
        try:
            answer = send()
        except BaseException:
            # a broken constraint that was found before COMMIT: the rows are still held
            is_held = driver.info.transaction_status == TransactionStatus.INERROR
            if logged == ("commit",) and not is_held:
                self.log.append(("rollback",))
            raise
        if logged is not None:
            self.log.append(logged)
        return answer

    def _is_hit(self, driver: Any) -> bool:
        if self.fault is None or self.process.is_dead:
            return False
        if self.fault.kind == "cut" and self.process.presence.is_own(driver):
            return False
        self.fault.countdown -= 1
        return self.fault.countdown == 0

    def _strike(self, fault: Fault, driver: Any) -> None:
        if fault.kind == "rival":
            rival = self.let_in(fault.rival)
            self.log += [] if rival is None else [("rival", rival)]
            return
        self.log.append((fault.kind,))
        if fault.kind == "crash":
            self.process.crash()
            raise Crashed
        self.process.kill({driver.info.backend_pid})


def register(
    tasks: TaskRegistry, processes: Sequence[Process], task_type: str, **options: Any
) -> None:
    """Register a handler that does what the test tells the lane on which it runs."""

    @tasks.handler(task_type, backoff=0, **options)
    def handle(session, params, task):
        lane = next(lane for process in processes if (lane := process.current()))
        lane.handle(session, task.task_id, task.attempt)
