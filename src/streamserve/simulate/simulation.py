"""Simulate fleet and engines on one event heap and a virtual clock: fast and deterministic.

heap: (time, number, action)      an action may push others
Fleet.handle ── Send ──▶ worker's inbox ── Engine.step, costing what its executor says ──▶ WorkerMessage
"""

import heapq
import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf

from streamserve.engine.engine import Engine
from streamserve.engine.observer import LifecycleEvent, NoObserver
from streamserve.engine.plan import Drafter
from streamserve.engine.ports import EnginePorts
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import (
    Close,
    Command,
    Deliver,
    Drain,
    Edit,
    FleetEvent,
    Heartbeat,
    Kill,
    Open,
    Refuse,
    Send,
    Start,
    Tick,
    WorkerLost,
    WorkerMessage,
)
from streamserve.fleet.fleet import Fleet
from streamserve.protocol.config import EngineConfig
from streamserve.protocol.messages import (
    PROTOCOL_VERSION,
    CostCurve,
    Event,
    Events,
    FromWorker,
    ModelInfo,
    Ready,
    Stop,
    ToEngine,
    Transfers,
)
from streamserve.protocol.transfers import CacheAddress
from streamserve.scheduling.cost import SwapCost
from streamserve.scheduling.eviction import DEFAULT_SWAP_COST
from streamserve.simulate.executor import Cost, CostExecutor
from streamserve.simulate.journal import InjectedCrash, Poison, PoisonPhase, SimulatedJournal
from streamserve.simulate.transport import SimulatedTransport
from streamserve.speculation.controller import Speculation
from streamserve.speculation.policies import parse_policy

REPORT_SECONDS = 0.5
STALLED_SECONDS = 0.01
"""Delay after which a worker that could not start any work tries again."""
TICK_SECONDS = 0.5


class VirtualClock:
    """A clock that only the simulation advances; calling it returns seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class _Worker:
    """A simulated worker process: an engine, its unread messages, and whether a step is in progress."""

    engine: Engine
    executor: CostExecutor
    incarnation: int
    journal: SimulatedJournal
    inbox: list[ToEngine] = field(default_factory=list)
    busy: bool = False
    since: float = 0.0
    until: float = 0.0
    stopped: bool = False


@dataclass
class FaultInjection:
    """An injected crash: when `event` occurs for the `number`-th time at any worker, the `victims` die, or
    with `stop` are silent from then on. The worker that reached the event does not continue its step if it
    is one of them."""

    event: LifecycleEvent
    number: int
    victims: tuple[str, ...]
    stop: bool = False


class _FaultObserver(NoObserver):
    """Counts one worker's lifecycle events, and raises InjectedCrash where the worker must not continue."""

    def __init__(self, simulation: "Simulation", worker: str) -> None:
        self._simulation = simulation
        self._worker = worker

    def on_event(self, name: LifecycleEvent, request: str = "") -> None:
        self._simulation.handle_lifecycle_event(self._worker, name)


@dataclass(frozen=True)
class ClientEvent:
    """What a client received, and when."""

    time: float
    message: Deliver | Refuse


class Simulation:
    """Runs requests added with `at`; `run` returns everything that clients receive, in order of time.

    A worker is ready `start_seconds` after its start; a KV block takes `wire_seconds` from one worker to
    another. With two `groups` (KV cache groups) the drafter is a model with separate KV, which prefill
    workers have as well. `curve`: the step costs that workers report.
    """

    def __init__(
        self,
        fleet: FleetConfig,
        engine: EngineConfig,
        model: ModelInfo,
        cost: Cost,
        start_seconds: float = 1.0,
        swap_cost: SwapCost = DEFAULT_SWAP_COST,
        wire_seconds: float = 0.0,
        policy: str = "goodput",
        drafter: Callable[[CostExecutor], Drafter] | None = None,
        groups: int = 1,
        curve: CostCurve | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.fleet = Fleet(fleet)
        self.workers: dict[str, _Worker] = {}
        self._engine_config = engine
        self._model = model
        self._cost = cost
        self._swap_cost = swap_cost
        self._start_seconds = start_seconds
        self._wire_seconds = wire_seconds
        self._policy = parse_policy(policy)
        self._drafter = drafter
        self._groups = groups
        self._curve = curve
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._client_events: list[ClientEvent] = []
        self._faults: list[FaultInjection] = []
        self._poisons: list[Poison] = []
        self.deaths = 0
        self.injected: list[LifecycleEvent] = []
        """The lifecycle events at which injected crashes have occurred."""
        self._do(self.fleet.start(0.0))

    def at(self, time: float, event: Open | Edit | Close | Drain) -> None:
        """Schedule an event of a client or an operator at `time`."""
        self._push(time, lambda: self._handle(event))

    def kill(self, time: float, worker: str) -> None:
        """Let a worker's process die at `time`."""
        self._push(time, lambda: self._die(worker))

    def inject_fault(self, fault: FaultInjection) -> None:
        """Let workers die or become silent at a lifecycle event."""
        self._faults.append(fault)

    def poison(self, poison: Poison) -> None:
        """Let a request crash every worker that reaches some phase with it."""
        self._poisons.append(poison)

    def handle_phase(self, worker: str, request: str, phase: PoisonPhase) -> None:
        """Handle that a worker reached `phase` of a request. Raises InjectedCrash if that crashes it."""
        reached = self.workers[worker]
        others = any(s.request != request for s in reached.engine.scheduler.sequences.values())
        for poison in self._poisons:
            if (poison.request, poison.phase) == (request, phase) and (others or not poison.co_batched):
                reached.stopped = True
                self._push(self.clock.now, partial(self._die, worker, reached))
                raise InjectedCrash

    def schedule_ticks(self) -> None:
        """Let the fleet check its workers twice a second, as a server does, while events are pending."""
        self._deliver_due_reports()
        self._handle(Tick(self._heartbeats()))
        if self._heap:
            self._push(self.clock.now + TICK_SECONDS, self.schedule_ticks)

    def handle_lifecycle_event(self, worker: str, event: LifecycleEvent) -> None:
        """Handle that a worker reached a lifecycle event, which may crash some. Raises InjectedCrash if this
        worker is one of them."""
        for fault in [fault for fault in self._faults if fault.event == event]:
            fault.number -= 1
            if fault.number:
                continue
            self._faults.remove(fault)
            self.injected.append(event)
            fail = self._stop if fault.stop else self._die
            for victim in fault.victims:
                if self.workers[victim].incarnation >= 0:
                    self._push(self.clock.now, partial(fail, victim, self.workers[victim]))
            if worker in fault.victims:
                self.workers[worker].stopped = True
                raise InjectedCrash

    def run(self, until: float = inf) -> list[ClientEvent]:
        """Run all events, or those up to the time `until`; return what clients received."""
        while self._heap and self._heap[0][0] <= until:
            self.clock.now, _, action = heapq.heappop(self._heap)
            action()
        return self._client_events

    def _push(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (time, next(self._numbers), action))

    def _handle(self, event: FleetEvent) -> None:
        if isinstance(event, Open):
            self._deliver_due_reports()
        self._do(self.fleet.handle(event, self.clock.now))

    def _deliver_due_reports(self) -> None:
        """Deliver the reports that are due: workers report at least every half second."""
        for name, worker in self.workers.items():
            known = self.fleet.workers[name]
            alive = worker.incarnation >= 0 and not worker.stopped and not worker.busy
            if known.ready and alive and self.clock.now - known.heard_at >= REPORT_SECONDS:
                self._do(self.fleet.handle(self._report(name, worker), self.clock.now))

    def _heartbeats(self) -> dict[tuple[str, int], Heartbeat]:
        """Return the heartbeats that workers leave in their journals, also during a step."""
        return {
            (name, worker.incarnation): Heartbeat(
                self.clock.now,
                worker.journal.step[0] if worker.busy else worker.journal.phase,
                worker.since,
                worker.journal.predicted if worker.busy else 0.0,
            )
            for name, worker in self.workers.items()
            if not worker.stopped
        }

    def _report(self, name: str, worker: _Worker) -> WorkerMessage:
        return WorkerMessage(name, worker.incarnation, worker.engine.report())

    def _do(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Start():
                    self._start(command)
                case Send():
                    self._receive(command)
                case Kill():
                    self._die(command.worker)
                case Deliver() | Refuse():
                    self._client_events.append(ClientEvent(self.clock.now, command))

    def _start(self, command: Start) -> None:
        config = self._engine_config
        executor = CostExecutor(
            config.num_blocks, config.block_size, self._model.vocab_size, self._cost, groups=self._groups,
            swap_blocks=config.swap_blocks, swap_cost=self._swap_cost,
        )  # fmt: skip
        name = command.worker
        half = name not in self.fleet.config.topology.unified
        path = f"{name}/{command.incarnation}"
        journal = SimulatedJournal(partial(self.handle_phase, name))
        engine = Engine(
            config,
            self._model,
            executor,
            lambda: self.clock.now + executor.seconds,
            self._drafter(executor) if self._drafter and self._has_drafter(name) else None,
            Speculation(self._policy, self._cost),
            EnginePorts(
                name=path,
                transport=self._transport(name, executor) if half else None,
                cache=CacheAddress(path, 0, config.num_blocks, self._model.fingerprint) if half else None,
                swap_cost=self._swap_cost,
                observer=_FaultObserver(self, name),
                journal=journal,
            ),
        )
        self.workers[name] = _Worker(engine, executor, command.incarnation, journal)
        ready = Ready(
            version=PROTOCOL_VERSION,
            model=self._model,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            kv_cache_bytes=0,
            load_seconds=self._start_seconds,
            cost=self._curve,
        )
        self._send_later(command.worker, command.incarnation, ready, command.after + self._start_seconds)

    def _has_drafter(self, name: str) -> bool:
        return self._groups > 1 or name not in self.fleet.config.topology.prefill

    def _transport(self, name: str, executor: CostExecutor) -> SimulatedTransport:
        """Return a transport into the pools of the workers that are alive when a push lands; it wakes its
        worker then."""

        def pool(path: str) -> CostExecutor | None:
            target, _, incarnation = path.rpartition("/")
            worker = self.workers[target]
            return worker.executor if worker.incarnation == int(incarnation) else None

        def schedule(seconds: float, complete: Callable[[], None]) -> None:
            worker = self.workers[name]

            def deliver() -> None:
                if self.workers[name] is worker and worker.incarnation >= 0 and not worker.stopped:
                    complete()
                    self._step(name, worker)

            self._push(self.clock.now + seconds, deliver)

        def step_left() -> float:
            worker = self.workers[name]
            return max(0.0, worker.until - self.clock.now) if worker.busy else 0.0

        return SimulatedTransport(executor, pool, schedule, self._wire_seconds, self.clock, step_left)

    def _send_later(self, worker: str, incarnation: int, message: FromWorker, delay: float) -> None:
        """Deliver a worker's message after `delay`, unless the worker has died by then."""

        def deliver() -> None:
            if self.workers[worker].incarnation == incarnation:
                self._handle(WorkerMessage(worker, incarnation, message))

        self._push(self.clock.now + delay, deliver)

    def _receive(self, command: Send) -> None:
        worker = self.workers[command.worker]
        if isinstance(command.message, Stop):
            return
        worker.inbox.append(command.message)
        self._push(self.clock.now, lambda: self._step(command.worker, worker))

    def _step(self, name: str, worker: _Worker) -> None:
        """Start a step if the worker is idle and has work."""
        if not worker.busy and not worker.stopped and self.workers[name] is worker:
            with suppress(InjectedCrash):
                self._step_now(name, worker)

    def _step_now(self, name: str, worker: _Worker) -> None:
        inbox, worker.inbox = worker.inbox, []
        worker.executor.seconds = 0.0
        events: list[Event] = []
        for message in inbox:
            events += worker.engine.handle(message)
        self._deliver_updates(name, worker)
        if worker.engine.has_work:
            events += worker.engine.step()
        seconds = worker.executor.seconds
        if events or seconds:
            worker.busy, worker.since, worker.until = True, self.clock.now, self.clock.now + seconds
            self._push(self.clock.now + seconds, lambda: self._step_done(name, worker, events))
        else:
            self._deliver_updates(name, worker)
            if worker.engine.has_work:  # no memory is free for it now, or it was just evicted
                self._push(self.clock.now + STALLED_SECONDS, lambda: self._step(name, worker))

    def _deliver_updates(self, name: str, worker: _Worker) -> None:
        if cached := worker.engine.take_cache_updates():
            self._handle(WorkerMessage(name, worker.incarnation, cached))
        if updates := worker.engine.transfers.take_updates():
            self._handle(WorkerMessage(name, worker.incarnation, Transfers(updates)))

    def _step_done(self, name: str, worker: _Worker, events: list[Event]) -> None:
        worker.busy = False
        if self.workers[name] is worker and not worker.stopped:
            self._handle(WorkerMessage(name, worker.incarnation, Events(events)))
            with suppress(InjectedCrash):
                self._deliver_updates(name, worker)
            if not worker.stopped:
                self._handle(self._report(name, worker))
            self._step(name, worker)

    def _die(self, name: str, worker: _Worker | None = None) -> None:
        """Kill a worker: drop its engine and the messages in flight from it. With `worker`, only if it is
        still that one."""
        if worker not in (None, self.workers[name]):
            return
        worker = self.workers[name]
        incarnation, worker.incarnation = worker.incarnation, -1
        if incarnation < 0:
            return
        self.deaths += 1
        journal = worker.journal
        phase, suspects = journal.step if worker.busy else (journal.phase, journal.suspects)
        self._handle(WorkerLost(name, incarnation, "it was killed", suspects, phase))

    def _stop(self, name: str, worker: _Worker) -> None:
        """Silence a worker: it does nothing more, and the fleet must detect it by the passing of time."""
        worker.stopped = True
        if self.workers[name] is worker and worker.incarnation >= 0:
            self._deliver_due_reports()
            self._handle(Tick(self._heartbeats()))
            self._push(self.clock.now + TICK_SECONDS, partial(self._stop, name, worker))
