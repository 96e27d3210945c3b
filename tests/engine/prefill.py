"""A prefill worker that computes a prompt and pushes its KV blocks."""

from collections.abc import Callable

from streamserve.baselines.speculation import parse_policy
from streamserve.contracts.engine_config import EngineConfig
from streamserve.engine.engine import Engine
from streamserve.engine.observer import Observer
from streamserve.engine.ports import EnginePorts
from streamserve.protocol.messages import Pushed
from streamserve.protocol.sampling import SamplingParams
from streamserve.protocol.transfers import CacheAddress, Push, TransferReservation
from streamserve.simulate.executor import CostExecutor
from streamserve.simulate.transport import SimulatedTransport
from streamserve.speculation.controller import Speculation, default_cost
from tests.engine.drive import VOCAB, model_info, submit

CONFIG = EngineConfig(num_blocks=32, block_size=4, max_model_len=64)
PROMPT = list(range(10))
GOOD = TransferReservation(
    "decode/0", "r", 0, (0,), len(PROMPT), 0, [3, 1, 2], CacheAddress("decode", 0, 8, "fake")
)


def run_prefill(
    reservation: TransferReservation,
    twice: bool = False,
    wire: list[Callable[[], None]] | None = None,
    clock: Callable[[], float] = lambda: 0.0,
    observer: Observer | None = None,
) -> tuple[Engine, list[tuple[int, int]], list[Pushed]]:
    """Return a prefill worker that has computed the prompt and received this reservation, the list of its
    copies, and its notifications. With a `wire`, a copy completes when the test calls it."""
    own, other = (CostExecutor(n, 4, VOCAB, lambda rows, context: 1.0) for n in (CONFIG.num_blocks, 8))
    written: list[tuple[int, int]] = []
    receive = other.receive

    def record(source: CostExecutor, copies: list[tuple[int, int]]) -> None:
        written.extend(copies)
        receive(source, copies)

    other.receive = record  # type: ignore[method-assign]

    def schedule(seconds: float, land: Callable[[], None]) -> None:
        land() if wire is None else wire.append(land)

    transport = SimulatedTransport(own, lambda path: other if path == "decode" else None, schedule, 0.0)
    speculation = Speculation(parse_policy("off"), default_cost)
    ports = EnginePorts("prefill", transport, observer=observer)
    engine = Engine(CONFIG, model_info(64), own, clock, None, speculation, ports)
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=5)
    engine.handle(submit("r", PROMPT, params, phase="prefill"))
    engine.step()
    engine.handle(Push(reservation))
    if twice:
        engine.handle(Push(reservation))
    closed = [update for update in engine.transfers.take_updates() if isinstance(update, Pushed)]
    return engine, written, closed
