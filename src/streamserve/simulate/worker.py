"""A simulated worker process: an engine, its inbox, and its turns in virtual time.

receive ─▶ inbox ─▶ begin turn ── the executor's seconds, in virtual time ──▶ end turn ─▶ send
KV that lands ────▶ begin turn
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from streamserve.baselines.orders import ORDERS
from streamserve.baselines.speculation import parse_policy
from streamserve.contracts.cost import DEFAULT_SWAP_COST, SwapCost
from streamserve.contracts.engine_config import EngineConfig
from streamserve.contracts.plan import Drafter
from streamserve.engine.engine import Engine
from streamserve.engine.ports import EnginePorts
from streamserve.engine.worker_loop import REPORT_SECONDS, WorkerLoop, wait_seconds
from streamserve.fleet.events import Heartbeat
from streamserve.protocol.config import Role
from streamserve.protocol.cost_curve import CostCurve
from streamserve.protocol.messages import (
    PROTOCOL_VERSION,
    FromWorker,
    ModelInfo,
    Ready,
    ToEngine,
)
from streamserve.protocol.transfers import CacheAddress
from streamserve.simulate.clock import Action, VirtualClock
from streamserve.simulate.executor import Cost, CostExecutor
from streamserve.simulate.faults import FaultInjector, FaultObserver, InjectedCrash, PoisonPhase
from streamserve.simulate.journal import SimulatedJournal
from streamserve.simulate.transport import LAYERS, Pool, SimulatedTransport
from streamserve.speculation.controller import Speculation


@dataclass(frozen=True)
class WorkerSpec:
    """The properties common to all workers of a simulation.

    - `start_seconds`: seconds from the start until a worker is ready.
    - `wire_seconds`: seconds of a KV block on the wire, which is sent in `layers`.
    - `groups`: KV cache groups; with two, the drafter is a model with separate KV, which prefill workers
      have, too.
    - `curve`: the step costs that they report, for KV of `kv_token_bytes` a token.
    """

    engine: EngineConfig
    model: ModelInfo
    cost: Cost
    start_seconds: float = 1.0
    swap_cost: SwapCost = DEFAULT_SWAP_COST
    wire_seconds: float = 0.0
    layers: int = LAYERS
    policy: str = "goodput"
    drafter: Callable[[CostExecutor], Drafter] | None = None
    groups: int = 1
    curve: CostCurve | None = None
    kv_token_bytes: int = 1

    @property
    def ready(self) -> Ready:
        """The message with which a worker reports that it is ready."""
        return Ready(
            version=PROTOCOL_VERSION,
            model=self.model,
            num_blocks=self.engine.num_blocks,
            block_size=self.engine.block_size,
            max_num_seqs=self.engine.max_num_seqs,
            kv_cache_bytes=0,
            load_seconds=self.start_seconds,
            cost=self.curve,
            kv_token_bytes=self.kv_token_bytes,
        )


class SimulatedAdapters:
    """The LoRA adapters of a simulated worker. Any adapter can be loaded (engine.adapters.Adapters)."""

    def __init__(self) -> None:
        self._loaded: set[str] = set()

    def __contains__(self, fingerprint: str) -> bool:
        return fingerprint in self._loaded

    def load(self, fingerprint: str, path: str) -> None:
        self._loaded.add(fingerprint)

    def unload(self, fingerprint: str) -> None:
        self._loaded.discard(fingerprint)


class Life(Enum):
    """Whether a worker does anything. A silent worker has stopped, but its process still exists."""

    RUNNING = "running"
    SILENT = "silent"
    DEAD = "dead"


@dataclass(frozen=True)
class Turn:
    """A turn in progress. Its step began at `since` and ends at `until`."""

    since: float
    until: float


class SimulatedWorker:
    """One process of the worker `name`: its `incarnation`-th. `send` passes its messages on to the fleet.
    `pool` returns the KV pool at another worker's address. With `reports_prefixes`, it reports changes of its
    prefix index even if it exchanges no KV."""

    def __init__(
        self,
        name: str,
        incarnation: int,
        role: Role,
        spec: WorkerSpec,
        clock: VirtualClock,
        faults: FaultInjector,
        pool: Pool,
        send: Callable[["SimulatedWorker", FromWorker], None],
        reports_prefixes: bool = False,
    ) -> None:
        self.name = name
        self.incarnation = incarnation
        self.life = Life.RUNNING
        self.turn: Turn | None = None
        self._spec = spec
        self._clock = clock
        self._faults = faults
        self._send = send
        self._reports_prefixes = reports_prefixes
        self._inbox: list[ToEngine] = []
        config = spec.engine
        self.executor = CostExecutor(
            config.num_blocks, config.block_size, spec.model.vocab_size, spec.cost, groups=spec.groups,
            swap_blocks=config.swap_blocks, swap_cost=spec.swap_cost,
        )  # fmt: skip
        self.journal = SimulatedJournal(self._reach_phase)
        self.engine = self._make_engine(role, pool)
        self._loop = WorkerLoop(self.engine)

    def start(self, delay: float) -> None:
        """Load the model in `delay` seconds, and serve."""
        self._clock.after(delay + self._spec.start_seconds, self._serve)

    def receive(self, message: ToEngine) -> None:
        """Put a message into the inbox. It is processed when the present turn is over."""
        self._inbox.append(message)
        self._clock.after(0.0, self._wake_for_messages)

    def report_if_due(self) -> None:
        """Let an idle worker run the turn in which it would have reported by now."""
        if not self.turn and self._clock.now - self._loop.reported >= REPORT_SECONDS:
            self._send_messages()

    def heartbeat(self) -> Heartbeat:
        """Return the worker's sign of life, which it also gives during a step."""
        journal, turn = self.journal, self.turn
        if turn is None:
            return Heartbeat(self._clock.now, journal.phase)
        return Heartbeat(self._clock.now, journal.step[0], turn.since, journal.predicted)

    def last_phase(self) -> tuple[str, frozenset[int] | None]:
        """Return the phase that the worker is in, and the attempts in it; None for all attempts."""
        return self.journal.step if self.turn else (self.journal.phase, self.journal.suspects)

    def _serve(self) -> None:
        for message in (self._spec.ready, self._loop.report(self._clock.now)):
            if self.life is Life.RUNNING:
                self._send(self, message)

    def _wake_for_messages(self) -> None:
        if self._inbox:
            self._begin_turn()

    def _begin_turn(self) -> None:
        """Begin a turn, unless the worker is in a turn or does nothing any more."""
        if self.turn or self.life is not Life.RUNNING:
            return
        inbox, self._inbox = self._inbox, []
        try:
            self._loop.begin_turn(inbox)
        except InjectedCrash:
            self.life = Life.SILENT
            return
        seconds, self.executor.seconds = self.executor.seconds, 0.0
        self.turn = Turn(self._clock.now, self._clock.now + seconds)
        self._clock.after(seconds, self._end_turn)

    def _end_turn(self) -> None:
        """End the turn, and begin the next one if there is work."""
        self.turn = None
        self._send_messages()
        if self.life is not Life.RUNNING:
            return
        engine = self.engine
        # KV that lands begins a turn (`_after`). `report_if_due` sends the reports of an idle worker.
        wait = wait_seconds(engine.has_work, engine.stalled, sending=False)
        if self._inbox or not wait:
            self._begin_turn()
        elif engine.has_work:
            self._clock.after(wait, self._begin_turn)

    def _send_messages(self) -> None:
        if self.life is not Life.RUNNING:
            return
        try:
            for message in self._loop.end_turn(self._clock.now):
                self._send(self, message)
        except InjectedCrash:
            self.life = Life.SILENT

    def _reach_phase(self, request: str, phase: PoisonPhase) -> None:
        alone = all(s.request == request for s in self.engine.scheduler.sequences.values())
        self._faults.reach_phase(self.name, request, phase, alone)

    def _after(self, seconds: float, complete: Action) -> None:
        """Call a function of the transport later, as long as this process runs. Then begin a turn: the worker
        may have waited for it."""

        def act() -> None:
            if self.life is Life.RUNNING:
                complete()
                self._begin_turn()

        self._clock.after(seconds, act)

    def _turn_left(self) -> float:
        """Return the seconds until the present turn is over; 0 without one."""
        return self.turn.until - self._clock.now if self.turn else 0.0

    def _make_engine(self, role: Role, pool: Pool) -> Engine:
        spec, clock, executor = self._spec, self._clock, self.executor
        path = f"{self.name}/{self.incarnation}"
        drafts = spec.groups > 1 or role != "prefill"
        transport = SimulatedTransport(
            executor, pool, self._after, spec.wire_seconds, clock, self._turn_left, spec.layers
        )
        cache = CacheAddress(path, 0, spec.engine.num_blocks, spec.model.fingerprint)
        return Engine(
            spec.engine,
            spec.model,
            executor,
            lambda: clock.now + executor.seconds,
            spec.drafter(executor) if spec.drafter and drafts else None,
            Speculation(parse_policy(spec.policy), spec.cost),
            EnginePorts(
                name=path,
                transport=None if role == "unified" else transport,
                cache=None if role == "unified" else cache,
                reports_prefixes=self._reports_prefixes,
                swap_cost=spec.swap_cost,
                observer=FaultObserver(self._faults, self.name),
                journal=self.journal,
                adapters=SimulatedAdapters(),
            ),
            ORDERS,
        )
