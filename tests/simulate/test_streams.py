"""On a fleet whose workers die, prompt streams lose no edit, and the text is the answer to the final
prompt."""

import random

from hypothesis import example, given
from hypothesis import strategies as st

from streamserve.contracts.engine_config import EngineConfig
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import ClientEdit, Open
from streamserve.fleet.worker_state import Topology, mixed, pairs, pools, unified
from streamserve.protocol.sampling import SamplingParams
from streamserve.simulate.simulation import Simulation
from streamserve.simulate.worker import WorkerSpec
from tests.engine.drive import assert_engine_empty, expected, model_info
from tests.simulate.streaming import texts


def run_simulation(seed: int, kills: int, topology: Topology):
    """Run eight streams with edits at random times, on workers with little memory that are killed now and
    then. Returns the simulation, final prompts with their parameters, and what clients received."""
    rng = random.Random(seed)
    engine = EngineConfig(
        num_blocks=30, block_size=4, max_model_len=96, max_num_seqs=8, max_num_batched_tokens=24,
        swap_blocks=60, eviction=rng.choice(("recompute", "swap", "cost")),
        order=rng.choice(("slo", "fcfs", "lcas", "mcps", "arrival")),
    )  # fmt: skip
    fleet = FleetConfig(topology=topology, max_attempts=kills + 1)
    cost = lambda tokens, context: 0.01 + tokens * 0.002  # noqa: E731
    simulation = Simulation(
        fleet, WorkerSpec(engine, model_info(96), cost, wire_seconds=rng.choice((0.0, 0.01)))
    )
    streams = {}
    for number in range(8):
        time, name = rng.uniform(0, 3), f"r{number}"
        prompt = [rng.randrange(90) for _ in range(rng.randint(0, 20))]
        params = SamplingParams(n=rng.choice((1, 1, 2)), seed=number, max_tokens=rng.randint(1, 12))
        early = rng.random() < 0.5
        simulation.at(time, Open(name, list(prompt), params, open=True, answer_early=early))
        edits = rng.randint(1, 5)
        for version in range(1, edits + 1):
            time += rng.expovariate(4)
            retained = rng.choice((len(prompt), rng.randint(0, len(prompt))))
            new = [rng.randrange(90) for _ in range(rng.randint(0, 12))]
            if not prompt[:retained] + new:
                new = [7]
            prompt = prompt[:retained] + new
            simulation.at(time, ClientEdit(name, version, retained, new, finish=version == edits))
        streams[name] = (prompt, params)
    for _ in range(kills):
        simulation.kill(rng.uniform(1.2, 4), rng.choice(topology.names))
    return simulation, streams, simulation.run()


def check(seed: int, kills: int, topology: Topology) -> tuple[int, int]:
    simulation, streams, received = run_simulation(seed, kills, topology)
    tokens, progress, withdrawn = texts(received)
    for name, (prompt, params) in streams.items():
        for choice in range(params.n):
            assert tokens[name, choice] == expected(prompt, params, choice, 96)
    assert not simulation.fleet.requests
    assert not len(simulation.fleet.transfers.reservations)
    for worker in simulation.workers.values():
        assert_engine_empty(worker.engine)
    return progress, withdrawn


topologies = st.sampled_from((unified(1), unified(2), pairs(1), pools(1, 2), mixed(1, 1, 1)))


@given(seed=st.integers(0, 2**32), kills=st.integers(0, 3), topology=topologies)
@example(seed=5072, kills=0, topology=pairs(1))  # The KV to hand over is in the host pool.
def test_no_edit_is_lost(seed: int, kills: int, topology: Topology) -> None:
    check(seed, kills, topology)


def test_clients_receive_progress_and_withdrawals() -> None:
    counts_by_seed = [check(seed, 1, unified(1)) for seed in range(6)]
    assert all(sum(counts) > 0 for counts in zip(*counts_by_seed, strict=True))
