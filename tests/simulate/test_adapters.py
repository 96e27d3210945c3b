"""LoRA adapters in virtual time: requests keep their adapter across deaths of workers, transfers and
evictions, and never use KV of another adapter."""

import random

from hypothesis import given
from hypothesis import strategies as st

from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import AddAdapter, Open, Refuse, RemoveAdapter
from streamserve.fleet.worker_state import Topology, pairs, unified
from streamserve.protocol.adapters import Adapter
from streamserve.protocol.sampling import SamplingParams
from streamserve.simulate.simulation import Simulation
from streamserve.simulate.worker import WorkerSpec
from tests.engine.drive import VOCAB, assert_engine_empty, expected_outputs, model_info
from tests.simulate.answering import ENGINE, texts, topologies

GIVEN = tuple(Adapter(name, f"/adapters/{name}", f"hash of {name}") for name in ("a", "b"))
LATER = Adapter("c", "/adapters/c", "hash of c")
SHARED = list(range(1, 25))


def simulation_of(topology: Topology, kills: int = 0) -> Simulation:
    fleet = FleetConfig(topology=topology, max_attempts=kills + 1, adapters=GIVEN)
    return Simulation(
        fleet, WorkerSpec(ENGINE, model_info(96), lambda tokens, context: 0.01 + tokens * 0.001)
    )


def expected(request: Open, choice: int = 0) -> list[int]:
    count = request.params.max_tokens or 0
    return expected_outputs(request.prompt, request.params, choice, count, VOCAB, request.adapter)


@given(seed=st.integers(0, 2**32), topology=topologies, kills=st.integers(0, 3))
def test_requests_keep_their_adapter(seed: int, topology: Topology, kills: int) -> None:
    rng = random.Random(seed)
    simulation = simulation_of(topology, kills)
    simulation.at(0.5, AddAdapter(LATER))
    adapters = ["", *(adapter.fingerprint for adapter in (*GIVEN, LATER))]
    opened = []
    for number in range(16):
        params = SamplingParams(
            seed=number, max_tokens=rng.randint(1, 30), n=rng.choice((1, 1, 2)), ignore_eos=True
        )
        prompt = SHARED[: rng.randint(1, 24)]
        opened.append(Open(f"r{number}", prompt, params, adapter=adapters[number % 4]))
        simulation.at(rng.uniform(0.6, 3), opened[-1])
    for _ in range(kills):
        simulation.kill(rng.uniform(1.2, 4), rng.choice(topology.names))
    tokens = texts(simulation.run())
    for request in opened:
        for choice in range(request.params.n):
            assert tokens[request.request, choice] == expected(request, choice)
    assert sum(worker.incarnation - 1 for worker in simulation.fleet.workers.values()) == kills
    for worker in simulation.workers.values():
        assert_engine_empty(worker.engine)
    hits = sum(worker.engine.report().prefix_hits for worker in simulation.workers.values())
    assert hits > 0 or kills or len(topology.names) > 1


def test_a_restarted_worker_loads_what_was_loaded_since_the_start() -> None:
    simulation = simulation_of(unified(1), kills=1)
    simulation.at(1.5, AddAdapter(LATER))
    params = SamplingParams(seed=1, max_tokens=60, ignore_eos=True)
    request = Open("r", SHARED, params, adapter=LATER.fingerprint)
    simulation.at(2.0, request)
    simulation.kill(2.3, "unified-0")
    assert texts(simulation.run())["r", 0] == expected(request)
    assert simulation.fleet.workers["unified-0"].incarnation == 2
    state = simulation.fleet.adapters.adapters[LATER.fingerprint]
    assert state.settled
    assert state.loaded == {"unified-0"}


def test_an_unloaded_adapter_takes_no_new_requests_and_leaves_with_its_last_open_one() -> None:
    simulation = simulation_of(pairs(1))
    adapter = GIVEN[0].fingerprint
    params = SamplingParams(seed=1, max_tokens=60, ignore_eos=True)
    first, second = (Open(name, SHARED, params, adapter=adapter) for name in ("first", "second"))
    simulation.at(1.5, first)
    simulation.at(1.7, RemoveAdapter(adapter))
    simulation.at(1.8, second)
    received = simulation.run(until=1.9)
    assert simulation.fleet.adapters.adapters[adapter].leaving
    received = simulation.run()
    refused = [item.message for item in received if isinstance(item.message, Refuse)]
    assert [(each.request, each.error.status) for each in refused] == [("second", 404)]
    tokens = texts([item for item in received if not isinstance(item.message, Refuse)])
    assert tokens["first", 0] == expected(first)
    assert adapter not in simulation.fleet.adapters.adapters
    for worker in simulation.workers.values():
        refusal = worker.engine.adapters.refusal
        assert refusal(adapter)
        assert not refusal(GIVEN[1].fingerprint)


def test_kv_is_shared_by_requests_of_one_adapter_alone() -> None:
    simulation = simulation_of(unified(1))
    params = SamplingParams(seed=1, max_tokens=3, ignore_eos=True)
    for number, adapter in enumerate(("", GIVEN[0].fingerprint, GIVEN[1].fingerprint) * 2):
        simulation.at(2.0 + number, Open(f"r{number}", SHARED, params, adapter=adapter))
        simulation.run(until=2.9 + number)
        hits = simulation.workers["unified-0"].engine.report().prefix_hits
        assert (hits == 0) == (number < 3)
