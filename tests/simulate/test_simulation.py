"""In virtual time, deaths of workers cost time and never change the text, and simulations are
deterministic."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Close, Open, Refuse
from streamserve.fleet.worker_state import Topology, pairs, unified
from streamserve.protocol.sampling import SamplingParams
from streamserve.simulate.simulation import Simulation
from streamserve.simulate.worker import WorkerSpec
from tests.engine.drive import assert_engine_empty, model_info
from tests.simulate.answering import ENGINE, assert_all_answered, texts, topologies


def simulate(
    seed: int, requests: int = 12, kills: int = 0, topology: Topology | None = None, wire: float = 0.0
):
    rng = random.Random(seed)
    topology = topology or unified(1)
    names = topology.names
    fleet = FleetConfig(topology=topology, max_attempts=kills + 1)
    simulation = Simulation(
        fleet,
        WorkerSpec(ENGINE, model_info(96), lambda tokens, context: 0.01 + tokens * 0.001, wire_seconds=wire),
    )
    opened = []
    for number in range(requests):
        prompt = [rng.randrange(90) for _ in range(rng.randint(1, 40))]
        params = SamplingParams(n=rng.choice((1, 1, 3)), seed=number, max_tokens=rng.randint(1, 40))
        opened.append(Open(f"r{number}", prompt, params))
        simulation.at(rng.uniform(0, 3), opened[-1])
    for _ in range(kills):
        simulation.kill(rng.uniform(1.2, 4), rng.choice(names))
    return simulation, opened, simulation.run()


wires = st.sampled_from((0.0, 0.003, 0.1))


@given(seed=st.integers(0, 2**32), topology=topologies, wire=wires)
def test_every_client_gets_its_own_text(seed: int, topology: Topology, wire: float) -> None:
    assert_all_answered(*simulate(seed, topology=topology, wire=wire))


@given(seed=st.integers(0, 2**32), topology=topologies, kills=st.integers(1, 4), wire=wires)
def test_killed_workers_cost_time_never_text(seed: int, topology: Topology, kills: int, wire: float) -> None:
    simulation, opened, received = simulate(seed, kills=kills, topology=topology, wire=wire)
    assert sum(worker.incarnation - 1 for worker in simulation.fleet.workers.values()) == kills
    assert_all_answered(simulation, opened, received)


@pytest.mark.parametrize("topology", [unified(2), pairs(2)])
def test_a_simulation_is_deterministic(topology: Topology) -> None:
    first, second = (simulate(7, kills=2, topology=topology)[2] for _ in range(2))
    assert first == second
    assert first[-1].time > 1


def test_a_death_costs_time() -> None:
    undisturbed, killed = (simulate(7, kills=kills)[2][-1].time for kills in (0, 2))
    assert killed > undisturbed


def test_a_disconnect_frees_the_engine() -> None:
    simulation = Simulation(FleetConfig(), WorkerSpec(ENGINE, model_info(96), lambda tokens, context: 0.1))
    simulation.at(0, Open("r", [1, 2, 3], SamplingParams(seed=1, max_tokens=80)))
    simulation.at(3, Close("r"))
    received = simulation.run()
    assert 0 < len(texts(received)["r", 0]) < 80
    assert_engine_empty(simulation.workers["unified-0"].engine)


def test_over_the_limit_requests_are_refused_with_retry_after() -> None:
    simulation = Simulation(
        FleetConfig(max_requests=2), WorkerSpec(ENGINE, model_info(96), lambda tokens, context: 0.1)
    )
    for number in range(3):
        simulation.at(0, Open(f"r{number}", [1], SamplingParams(seed=1, max_tokens=2)))
    refused = [item.message for item in simulation.run() if isinstance(item.message, Refuse)]
    assert [(item.request, item.error.status) for item in refused] == [("r2", 429)]
    assert refused[0].error.retry_after
