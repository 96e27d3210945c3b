"""Fleet and engines on one event heap and a virtual clock: a day of serving in seconds, the same each time.

heap: (time, number, action)      an action may push others
Fleet.handle ── Send ──▶ worker's inbox ── Engine.step, costing what its executor says ──▶ Heard
"""

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from streamserve.control.events import (
    Close,
    Command,
    Deliver,
    Edit,
    FleetEvent,
    Heard,
    Kill,
    Lost,
    Open,
    Refuse,
    Rest,
    Send,
    Start,
)
from streamserve.control.fleet import Fleet, FleetConfig
from streamserve.engine.engine import Engine
from streamserve.engine.plan import Drafter
from streamserve.engine.speculation import Speculation
from streamserve.policy.cost import SwapCost
from streamserve.policy.eviction import GUESSED_SWAP
from streamserve.policy.speculation import parse_policy
from streamserve.protocol.config import EngineConfig
from streamserve.protocol.messages import (
    PROTOCOL_VERSION,
    Event,
    Events,
    FromWorker,
    ModelInfo,
    Ready,
    Stop,
    ToEngine,
    Transfers,
)
from streamserve.protocol.tickets import CacheAddress
from streamserve.simulate.executor import Cost, CostExecutor
from streamserve.simulate.transport import SimulatedTransport

REPORT_SECONDS = 0.5


class VirtualClock:
    """Time that moves only when the simulation says so; calling it gives seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class _Worker:
    """A pretended process: an engine, the messages it has not taken yet, and whether a step is under way."""

    engine: Engine
    executor: CostExecutor
    incarnation: int
    inbox: list[ToEngine] = field(default_factory=list)
    busy: bool = False


@dataclass(frozen=True)
class Given:
    """What a client got, and when."""

    time: float
    what: Deliver | Refuse


class Simulation:
    """Requests go in with `at`, everything that clients are given comes out of `run`, in order of time.

    A worker takes `start_seconds` from its start until it is ready; a KV block `wire_seconds` from one to
    another.
    """

    def __init__(
        self,
        fleet: FleetConfig,
        engine: EngineConfig,
        model: ModelInfo,
        cost: Cost,
        start_seconds: float = 1.0,
        swap_cost: SwapCost = GUESSED_SWAP,
        wire_seconds: float = 0.0,
        policy: str = "goodput",
        drafter: Callable[[CostExecutor], Drafter] | None = None,
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
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._given: list[Given] = []
        self._do(self.fleet.start(0.0))

    def at(self, time: float, event: Open | Edit | Close | Rest) -> None:
        """Let a client or an operator do something at `time`."""
        self._push(time, lambda: self._handle(event))

    def kill(self, time: float, worker: str) -> None:
        """Let a worker's process die at `time`."""
        self._push(time, lambda: self._die(worker))

    def run(self) -> list[Given]:
        """Play everything to its end."""
        while self._heap:
            self.clock.now, _, action = heapq.heappop(self._heap)
            action()
        return self._given

    def _push(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (time, next(self._numbers), action))

    def _handle(self, event: FleetEvent) -> None:
        if isinstance(event, Open):
            self._hear_reports()
        self._do(self.fleet.handle(event, self.clock.now))

    def _hear_reports(self) -> None:
        """What workers would have told meanwhile: they report at least every half second."""
        for name, worker in self.workers.items():
            known = self.fleet.workers[name]
            if known.ready and worker.incarnation >= 0 and self.clock.now - known.heard_at >= REPORT_SECONDS:
                self._do(self.fleet.handle(self._report(name, worker), self.clock.now))

    def _report(self, name: str, worker: _Worker) -> Heard:
        return Heard(name, worker.incarnation, worker.engine.report())

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
                    self._given.append(Given(self.clock.now, command))

    def _start(self, command: Start) -> None:
        config = self._engine_config
        executor = CostExecutor(
            config.num_blocks, config.block_size, self._model.vocab_size, self._cost,
            swap_blocks=config.swap_blocks, swap_cost=self._swap_cost,
        )  # fmt: skip
        name, topology = command.worker, self.fleet.config.topology
        here = f"{name}/{command.incarnation}"
        engine = Engine(
            config,
            self._model,
            executor,
            lambda: self.clock.now + executor.seconds,
            self._drafter(executor) if self._drafter else None,
            Speculation(self._policy, self._cost),
            transport=self._transport(name, executor) if name in topology.prefill else None,
            cache=CacheAddress(here, 0, config.num_blocks, self._model.fingerprint)
            if name in topology.decode
            else None,
            name=here,
            swap_cost=self._swap_cost,
        )
        self.workers[name] = _Worker(engine, executor, command.incarnation)
        ready = Ready(
            version=PROTOCOL_VERSION,
            model=self._model,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            kv_cache_bytes=0,
            load_seconds=self._start_seconds,
        )
        self._say(command.worker, command.incarnation, ready, command.after + self._start_seconds)

    def _transport(self, name: str, executor: CostExecutor) -> SimulatedTransport:
        """Writes into the pools of the workers that live when a push lands, and wakes its own worker then."""

        def pool(path: str) -> CostExecutor | None:
            target, _, incarnation = path.rpartition("/")
            worker = self.workers[target]
            return worker.executor if worker.incarnation == int(incarnation) else None

        def later(seconds: float, land: Callable[[], None]) -> None:
            worker = self.workers[name]

            def arrive() -> None:
                if self.workers[name] is worker and worker.incarnation >= 0:
                    land()
                    self._step(name, worker)

            self._push(self.clock.now + seconds, arrive)

        return SimulatedTransport(executor, pool, later, self._wire_seconds)

    def _say(self, worker: str, incarnation: int, message: FromWorker, delay: float) -> None:
        """What a worker says arrives after `delay`, unless it died by then."""

        def arrive() -> None:
            if self.workers[worker].incarnation == incarnation:
                self._handle(Heard(worker, incarnation, message))

        self._push(self.clock.now + delay, arrive)

    def _receive(self, command: Send) -> None:
        worker = self.workers[command.worker]
        if isinstance(command.message, Stop):
            return
        worker.inbox.append(command.message)
        self._push(self.clock.now, lambda: self._step(command.worker, worker))

    def _step(self, name: str, worker: _Worker) -> None:
        """Start a step if the worker is idle and there is something to do."""
        if worker.busy or self.workers[name] is not worker:
            return
        inbox, worker.inbox = worker.inbox, []
        worker.executor.seconds = 0.0
        events: list[Event] = []
        for message in inbox:
            events += worker.engine.handle(message)
        self._tell_transfers(name, worker)
        if worker.engine.has_work:
            events += worker.engine.step()
        seconds = worker.executor.seconds
        if events or seconds:
            worker.busy = True
            self._push(self.clock.now + seconds, lambda: self._step_done(name, worker, events))
        else:
            self._tell_transfers(name, worker)

    def _tell_transfers(self, name: str, worker: _Worker) -> None:
        if news := worker.engine.exchange.news():
            self._handle(Heard(name, worker.incarnation, Transfers(news)))

    def _step_done(self, name: str, worker: _Worker, events: list[Event]) -> None:
        worker.busy = False
        if self.workers[name] is worker:
            self._handle(Heard(name, worker.incarnation, Events(events)))
            self._tell_transfers(name, worker)
            self._handle(self._report(name, worker))
            self._step(name, worker)

    def _die(self, name: str) -> None:
        """A dead worker's engine is dropped with all that was on its way from it."""
        incarnation = self.workers[name].incarnation
        self.workers[name].incarnation = -1
        self._handle(Lost(name, incarnation, "it was killed"))
