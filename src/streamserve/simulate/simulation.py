"""Simulates fleet and workers on a virtual clock: fast and deterministic.

clients, operators ─ at ──▶ Fleet.handle ── Send ──▶ SimulatedWorker.receive ─▶ WorkerLoop, Engine
                                  ▲                                │
                                  └───────── WorkerMessage ◀───────┘
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import inf

from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import (
    ClientEdit,
    Close,
    Command,
    Deliver,
    FleetEvent,
    Heartbeat,
    Kill,
    Open,
    Operation,
    Refuse,
    Retire,
    Send,
    Start,
    Tick,
    WorkerLost,
    WorkerMessage,
)
from streamserve.fleet.fleet import Fleet
from streamserve.fleet.worker_state import role
from streamserve.protocol.config import Role
from streamserve.protocol.messages import Adopt, FromWorker, Leave, Stop
from streamserve.simulate.clock import VirtualClock
from streamserve.simulate.executor import CostExecutor
from streamserve.simulate.faults import FaultInjector
from streamserve.simulate.worker import Life, SimulatedWorker, WorkerSpec

TICK_SECONDS = 0.5
ROLES: tuple[Role, ...] = ("unified", "prefill", "decode")


@dataclass(frozen=True)
class ClientEvent:
    """A message that a client received, and the time."""

    time: float
    message: Deliver | Refuse


class Simulation:
    """Runs requests added with `at` on a fleet. All workers are like `worker`, or like the worker of their
    role. `run` returns everything that clients receive, in order of time. `faults` accepts injected crashes
    and poison requests."""

    def __init__(self, fleet: FleetConfig, worker: WorkerSpec | Mapping[Role, WorkerSpec]) -> None:
        self.clock = VirtualClock()
        self.fleet = Fleet(fleet)
        self.faults = FaultInjector(self._fail)
        self.workers: dict[str, SimulatedWorker] = {}
        """The latest process of each worker by name."""
        self.retired: list[SimulatedWorker] = []
        """The processes that ran until their workers were removed."""
        self.deaths = 0
        self._specs = dict.fromkeys(ROLES, worker) if isinstance(worker, WorkerSpec) else worker
        self._client_events: list[ClientEvent] = []
        self._do(self.fleet.start(0.0))

    def at(self, time: float, event: Open | ClientEdit | Close | Operation) -> None:
        """Schedule an event of a client or an operator at `time`."""
        self.clock.at(time, lambda: self._handle(event))

    def kill(self, time: float, worker: str) -> None:
        """Let a worker's process die at `time`."""
        self.clock.at(time, lambda: self._die(self.workers[worker]))

    def schedule_ticks(self) -> None:
        """Let the fleet check its workers twice a second, as a server does, while events are pending."""
        self._tick()
        if self.clock.pending:
            self.clock.after(TICK_SECONDS, self.schedule_ticks)

    def run(self, until: float = inf) -> list[ClientEvent]:
        """Run all events, or all events up to the time `until`; return what clients received."""
        self.clock.run(until)
        return self._client_events

    def _handle(self, event: FleetEvent) -> None:
        if isinstance(event, Open):
            self._deliver_due_reports()
        self._do(self.fleet.handle(event, self.clock.now))

    def _hear(self, worker: SimulatedWorker, message: FromWorker) -> None:
        """Let the fleet handle a worker's message."""
        self._handle(WorkerMessage(worker.name, worker.incarnation, message))

    def _do(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Start():
                    self._start(command)
                case Send():
                    self._receive(command)
                case Kill():
                    self._die(self.workers[command.worker])
                case Retire():
                    self._retire(self.workers.pop(command.worker))
                case Deliver() | Refuse():
                    self._client_events.append(ClientEvent(self.clock.now, command))

    def _start(self, command: Start) -> None:
        name = command.worker
        own = role(name)
        worker = SimulatedWorker(
            name, command.incarnation, own, self._specs[own], self.clock, self.faults, self._pool,
            self._hear, reports_prefixes=self.fleet.config.workers > 1,
        )  # fmt: skip
        self.workers[name] = worker
        worker.start(command.after)

    def _pool(self, path: str) -> CostExecutor | None:
        """Return the KV pool at an address; None if its worker is gone."""
        name, _, incarnation = path.rpartition("/")
        worker = self.workers.get(name)
        if worker is None or worker.incarnation != int(incarnation) or worker.life is Life.DEAD:
            return None
        return worker.executor

    def _receive(self, command: Send) -> None:
        if not isinstance(command.message, Stop | Leave | Adopt):
            self.workers[command.worker].receive(command.message)

    def _deliver_due_reports(self) -> None:
        """Deliver the reports that idle workers would have sent by now. They are created only when they
        matter."""
        for name, worker in self.workers.items():
            if self.fleet.workers[name].ready:
                worker.report_if_due()

    def _tick(self) -> None:
        """Let the fleet check its workers."""
        self._deliver_due_reports()
        self._handle(Tick(self._heartbeats()))

    def _heartbeats(self) -> dict[tuple[str, int], Heartbeat]:
        """Return the heartbeats that workers leave in their journals."""
        return {
            (name, worker.incarnation): worker.heartbeat()
            for name, worker in self.workers.items()
            if worker.life is Life.RUNNING
        }

    def _fail(self, name: str, silent: bool) -> None:
        """Let a worker die or fall silent when the present action has returned."""
        self.clock.after(0.0, partial(self._silence if silent else self._die, self.workers[name]))

    def _die(self, worker: SimulatedWorker) -> None:
        """Kill a worker's process. Its engine, and messages that it has not sent, are lost."""
        if worker.life is Life.DEAD:
            return
        worker.life = Life.DEAD
        self.deaths += 1
        phase, suspects = worker.last_phase()
        self._handle(WorkerLost(worker.name, worker.incarnation, "it was killed", suspects, phase))

    def _retire(self, worker: SimulatedWorker) -> None:
        """End the process of a worker that was removed."""
        if worker.life is Life.RUNNING:
            self.retired.append(worker)
        worker.life = Life.DEAD

    def _silence(self, worker: SimulatedWorker) -> None:
        """Silence a worker: it does nothing more. The fleet can detect it only by the passing of time."""
        if worker.life is Life.DEAD:
            return
        worker.life = Life.SILENT
        self._tick()
        self.clock.after(TICK_SECONDS, partial(self._silence, worker))
