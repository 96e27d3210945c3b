"""Requests that crash every worker get one error each, and all others get their text, in virtual time."""

import math
import random
from collections.abc import Callable
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamserve.contracts.engine_config import EngineConfig
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Deliver, Open, Refuse
from streamserve.fleet.worker_state import Topology, pairs, pools, unified
from streamserve.protocol.messages import Token
from streamserve.protocol.sampling import SamplingParams
from streamserve.simulate.faults import Poison, PoisonPhase
from streamserve.simulate.simulation import ClientEvent, Simulation
from streamserve.simulate.worker import WorkerSpec
from tests.conftest import Scale
from tests.engine.drive import assert_engine_empty, expected, model_info
from tests.simulate.lifecycle import RandomDrafter

MAX_ATTEMPTS = 3
ENGINE = EngineConfig(
    num_blocks=90, block_size=4, max_model_len=96, max_num_seqs=64, max_num_batched_tokens=48, max_chunk=12,
    eviction="swap", swap_blocks=200,
)  # fmt: skip
PHASES: tuple[PoisonPhase, ...] = get_args(PoisonPhase)
TOPOLOGIES = {
    "one": unified(1),
    "three": unified(3),
    "pair": pairs(1),
    "pairs": pairs(2),
    "pools": pools(1, 2),
}


def serve(
    topology: Topology, requests: int, poisons: tuple[Poison, ...], seed: int = 0, kills: int = 0
) -> tuple[Simulation, list[Open], list[ClientEvent]]:
    """Run requests in a burst on a fleet with speculation and swapping; the poison requests are among
    them."""
    rng = random.Random(seed)
    simulation = Simulation(
        FleetConfig(topology=topology, max_attempts=MAX_ATTEMPTS),
        WorkerSpec(
            ENGINE,
            model_info(96),
            lambda tokens, context: 0.01 + tokens * 0.001,
            wire_seconds=0.004,
            policy="fixed:2",
            drafter=RandomDrafter,
        ),
    )
    opened = []
    for number in range(requests):
        prompt = [rng.randrange(90) for _ in range(rng.randint(2, 40))]
        params = SamplingParams(n=rng.choice((1, 1, 2)), seed=number, max_tokens=rng.randint(4, 40))
        opened.append(Open(f"r{number}", prompt, params))
        simulation.at(1.1 + rng.uniform(0, 0.3), opened[-1])
    for poison in poisons:
        simulation.faults.poison(poison)
    for _ in range(kills):
        simulation.kill(rng.uniform(1.2, 6), rng.choice(topology.names))
    simulation.schedule_ticks()
    return simulation, opened, simulation.run()


def check(simulation: Simulation, opened: list[Open], received: list[ClientEvent]) -> set[str]:
    """Assert that each request has its own text or exactly one error with its id, that nothing is leaked, and
    that all workers serve; return the requests with an error."""
    tokens: dict[tuple[str, int], list[int]] = {}
    refused: dict[str, Refuse] = {}
    for item in received:
        if isinstance(item.message, Deliver):
            assert item.message.request not in refused
            for event in item.message.events:
                if isinstance(event, Token):
                    tokens.setdefault((event.request, event.choice), []).append(event.token)
        else:
            assert item.message.request not in refused, "one error"
            refused[item.message.request] = item.message
            assert item.message.error.status == 500
            assert item.message.request in item.message.error.message
    for request in opened:
        for choice in range(request.params.n):
            expected_text, text = (
                expected(request.prompt, request.params, choice, 96),
                tokens.get((request.request, choice), []),
            )
            assert text == (expected_text[: len(text)] if request.request in refused else expected_text)
    fleet = simulation.fleet
    assert not fleet.requests
    assert not len(fleet.transfers.reservations)
    assert not len(fleet.quarantine)
    assert not fleet.quarantine.reserved(simulation.clock.now)
    assert fleet.health() == (True, "ready")
    for worker in simulation.workers.values():
        assert_engine_empty(worker.engine)
    for state in fleet.workers.values():
        assert not any((state.prompts, state.incoming, state.decoding))
    return set(refused)


def max_deaths(requests: int, poisons: int) -> int:
    """Return the number of deaths that suffice to find this number of poison requests and to try each
    alone."""
    return poisons * (2 * math.ceil(math.log2(requests)) + MAX_ATTEMPTS + 2)


@pytest.mark.parametrize("co_batched", [False, True], ids=["always", "co-batched"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_poison_gets_one_error_and_the_others_their_text(
    topology: str, phase: PoisonPhase, co_batched: bool, scale: Scale, record: Callable[..., None]
) -> None:
    if not scale.full and topology not in ("one", "pairs"):
        pytest.skip("with --full; the property below draws from all topologies")
    requests = scale.pick(16, 64)
    simulation, opened, received = serve(TOPOLOGIES[topology], requests, (Poison("r12", phase, co_batched),))
    refused = check(simulation, opened, received)
    assert refused <= {"r12"}
    if co_batched:
        assert not refused, "a request that is harmless alone must be answered"
    if phase in ("prefill", "decode") and not co_batched:
        assert refused == {"r12"}
    assert simulation.deaths <= max_deaths(requests, 1)
    if simulation.deaths:
        assert simulation.fleet.incidents().suspects
    record(deaths=simulation.deaths, refused=len(refused), virtual_seconds=round(received[-1].time, 2))


@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_is_reached(phase: PoisonPhase) -> None:
    """Every phase of the test above occurs."""
    topology = pairs(1) if phase == "transfer" else unified(1)
    assert serve(topology, 16, tuple(Poison(f"r{n}", phase) for n in range(4, 16)))[0].deaths


poisons = st.lists(
    st.builds(
        Poison, st.integers(0, 15).map("r{}".format), st.sampled_from(PHASES), st.booleans()
    ), max_size=3,
).map(tuple)  # fmt: skip


@settings(max_examples=settings.default.max_examples * 2 // 3)
@given(
    seed=st.integers(0, 2**32), topology=st.sampled_from(list(TOPOLOGIES.values())), poisons=poisons,
    requests=st.integers(1, 16),
)  # fmt: skip
def test_requests_that_are_not_poisonous_get_their_text(
    seed: int, topology: Topology, poisons: tuple[Poison, ...], requests: int
) -> None:
    simulation, opened, received = serve(topology, requests, poisons, seed)
    assert check(simulation, opened, received) <= {poison.request for poison in poisons}
    assert simulation.deaths <= max_deaths(max(requests, 2), max(len(poisons), 1))


@settings(max_examples=settings.default.max_examples // 3)
@given(seed=st.integers(0, 2**32), topology=st.sampled_from(list(TOPOLOGIES.values())))
def test_workers_killed_from_outside_in_the_middle_of_trials(seed: int, topology: Topology) -> None:
    """Workers may be killed from outside in the middle of trials: a harmless request may be under trial when
    its worker is killed, but hardly three times alone."""
    simulation, opened, received = serve(topology, 12, (Poison("r3", "prefill"),), seed, kills=2)
    assert check(simulation, opened, received) == {"r3"}


def test_a_single_lost_step_costs_no_request_an_attempt(scale: Scale) -> None:
    simulation, opened, received = serve(unified(1), 16, (), scale.seed, kills=1)
    assert check(simulation, opened, received) == set()
    assert simulation.deaths == 1
