"""A request with a more urgent `priority` does not wait for other requests."""

import random

import pytest

from streamserve.baselines.orders import ORDERS
from streamserve.contracts.engine_config import EngineConfig
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Deliver, Open
from streamserve.protocol.messages import Token
from streamserve.protocol.sampling import SamplingParams
from streamserve.simulate.simulation import Simulation
from streamserve.simulate.worker import WorkerSpec
from tests.engine.drive import model_info

SECONDS = 10.0
URGENT_AT = 5.0


def first_token(order: str, priority: int) -> float:
    """Return the virtual seconds to the first token of a prompt of 1,500 tokens, under a load of 2.2
    requests per second, each with a prompt of 120 tokens and 64 output tokens."""
    engine = EngineConfig(num_blocks=2000, max_model_len=2048, order=order)  # type: ignore[arg-type]
    cost = lambda tokens, context: 0.004 + 0.002 * tokens  # noqa: E731
    simulation = Simulation(FleetConfig(), WorkerSpec(engine, model_info(2048), cost))
    rng, at = random.Random(1), 1.0
    while (at := at + rng.expovariate(2.2)) < URGENT_AT + SECONDS:
        params = SamplingParams(seed=1, max_tokens=64, ignore_eos=True)
        simulation.at(at, Open(f"at {at}", [rng.randrange(90) for _ in range(120)], params))
    params = SamplingParams(seed=1, max_tokens=8)
    simulation.at(URGENT_AT, Open("urgent", [rng.randrange(90) for _ in range(1500)], params, priority))
    for item in simulation.run():
        match item.message:
            case Deliver(request="urgent", events=events) if any(isinstance(e, Token) for e in events):
                return item.time - URGENT_AT
    raise AssertionError("it has no first token")


@pytest.mark.parametrize("order", ["slo", "fcfs", "chunked", "prefill-first"])
def test_an_urgent_prompt_does_not_wait(order: str) -> None:
    """An urgent prompt does not wait. Alone it would take 3.0 seconds."""
    assert first_token(order, -10) < 4.0


def test_without_priority_the_default_order_serves_those_that_answer_soon() -> None:
    assert first_token("slo", 0) > first_token("slo", -10)
    assert set(ORDERS) >= {"slo", "fcfs"}
