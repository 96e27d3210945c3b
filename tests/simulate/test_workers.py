"""Several unified workers, alone and with pairs, in virtual time: every router uses all of them, and a
request goes to the worker that has its prefix cached."""

import random

import pytest

from streamserve.baselines.routers import ROUTERS, parse_router
from streamserve.contracts.engine_config import EngineConfig
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import ClientEdit, Open
from streamserve.fleet.worker_state import Topology, mixed, unified
from streamserve.protocol.sampling import SamplingParams, Slo
from streamserve.simulate.simulation import Simulation
from streamserve.simulate.worker import WorkerSpec
from tests.conftest import Scale
from tests.engine.drive import expected, model_info
from tests.simulate.answering import assert_all_answered, texts
from tests.simulate.curves import CURVE

ENGINE = EngineConfig(num_blocks=80, block_size=4, max_model_len=96, max_num_seqs=8)
TOPOLOGIES = [unified(3), mixed(1, 1, 1), mixed(1, 1, 2), mixed(2, 2, 1)]
PREFIXES = 6


def make_simulation(topology: Topology, router: str) -> Simulation:
    spec = WorkerSpec(
        ENGINE,
        model_info(96),
        lambda tokens, context: 0.01 + tokens * 0.002,
        wire_seconds=0.002,
        curve=CURVE,
        kv_token_bytes=100,
    )
    fleet = FleetConfig(topology=topology, router=parse_router(router), max_attempts=9)
    return Simulation(fleet, spec)


def make_requests(seed: int, count: int = 40) -> list[Open]:
    """Requests of several groups with a common prefix each, and of three classes of targets."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(90) for _ in range(24)] for _ in range(PREFIXES)]
    return [
        Open(
            f"r{number}",
            rng.choice(prefixes) + [rng.randrange(90) for _ in range(rng.randint(1, 16))],
            SamplingParams(
                seed=number, max_tokens=rng.randint(2, 30), slo=Slo(tpot_ms=rng.choice((15.0, 40.0, None)))
            ),
        )
        for number in range(count)
    ]


def prefix_hits(simulation: Simulation) -> int:
    return sum(worker.engine.report().prefix_hits for worker in simulation.workers.values())


@pytest.mark.each_value
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: "-".join(topology.names))
@pytest.mark.parametrize("router", [*ROUTERS, "classes:20,50"])
def test_every_router_uses_all_workers(router: str, topology: Topology) -> None:
    if router.startswith("classes") and topology.unified and not topology.paired:
        pytest.skip("refused by name, see test_pairs.py")
    simulation = make_simulation(topology, router)
    opened = make_requests(3)
    for number, request in enumerate(opened):
        simulation.at(1.1 + number * 0.05, request)
    assert_all_answered(simulation, opened, simulation.run())
    for name, worker in simulation.workers.items():
        assert worker.engine.report().steps, f"{router} sends nothing to {name}"


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: "-".join(topology.names))
def test_a_killed_worker_costs_time_never_text(topology: Topology, scale: Scale) -> None:
    for victim in topology.names[:: scale.pick(2, 1)]:
        simulation = make_simulation(topology, "flowguard")
        opened = make_requests(4)
        for number, request in enumerate(opened):
            simulation.at(1.1 + number * 0.05, request)
        simulation.kill(2.0, victim)
        assert_all_answered(simulation, opened, simulation.run())
        assert simulation.deaths == 1


@pytest.mark.parametrize("router", ["flowguard", "cache-aware", "predictive"])
@pytest.mark.parametrize("topology", [unified(3), mixed(1, 1, 2)], ids=["unified", "mixed"])
def test_requests_go_where_their_prefix_is_cached(topology: Topology, router: str) -> None:
    def hits(router: str) -> int:
        simulation = make_simulation(topology, router)
        opened = make_requests(5)
        for number, request in enumerate(opened):
            simulation.at(1.1 + number * 0.4, request)
        assert_all_answered(simulation, opened, simulation.run())
        return prefix_hits(simulation)

    assert hits(router) > 1.2 * hits("round-robin") > 0


def test_reports_of_the_prefix_indexes_correct_the_estimates() -> None:
    """Reports of the prefix indexes correct the router's estimates: prompts of other requests have replaced
    the first prompt's blocks."""
    simulation = make_simulation(unified(2), "round-robin")
    opened = [
        Open(f"r{n}", [n % 90] * 60, SamplingParams(seed=n, max_tokens=9), cache_salt=str(n))
        for n in range(20)
    ]
    for number, request in enumerate(opened):
        simulation.at(1.1 + number, request)
    simulation.run()
    view = simulation.fleet.placement.view
    for name, worker in simulation.workers.items():
        known = set(worker.engine.scheduler.tables.pool._cached)
        assert set(view._blocks[name]) <= known, "dropped blocks are forgotten"
        assert len(view._blocks[name]) > len(known) / 2


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda topology: "-".join(topology.names))
def test_prompt_streams_are_placed_on_all_kinds_of_workers(topology: Topology) -> None:
    """Prompt streams are placed on all kinds of workers. A stream is placed when it is opened, and its edits
    go to that worker; when it is finished, the router may move it."""
    simulation = make_simulation(topology, "least-loaded")
    params = SamplingParams(seed=1, max_tokens=12)
    prompts = {f"s{number}": [number * 7 + token for token in range(20)] for number in range(4)}
    for number, (name, prompt) in enumerate(prompts.items()):
        simulation.at(1.1 + number * 0.01, Open(name, [], params, open=True))
        for version in range(1, 5):
            chunk = prompt[5 * (version - 1) : 5 * version]
            edit = ClientEdit(name, version, 5 * (version - 1), chunk, finish=version == 4)
            simulation.at(1.2 + version * 0.3, edit)
    received = texts(simulation.run())
    for name, prompt in prompts.items():
        assert received[name, 0] == expected(prompt, params, 0, 96)
    chosen = [record.candidates[record.decision.chosen] for record in simulation.fleet.placement.recent]
    assert len(set(chosen)) > 1
    if topology == unified(3):
        assert len(chosen) == 2 * len(prompts)
