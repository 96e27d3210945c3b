"""While a pair drains and requests arrive, no request fails, and no new request goes to that pair."""

import random

import pytest

from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Drain, Open, Refuse
from streamserve.fleet.worker_state import Topology, mixed, pairs, pools, unified
from streamserve.protocol.sampling import SamplingParams
from streamserve.simulate.simulation import Simulation
from streamserve.simulate.worker import WorkerSpec
from tests.engine.drive import model_info
from tests.simulate.answering import ENGINE, assert_all_answered


def run_simulation(
    topology: Topology, drains: list[tuple[float, Drain]], kill: tuple[float, str] | None = None
):
    """Run forty requests over four seconds."""
    fleet = FleetConfig(topology=topology, max_attempts=9)
    simulation = Simulation(
        fleet,
        WorkerSpec(ENGINE, model_info(96), lambda tokens, context: 0.02 + tokens * 0.002, wire_seconds=0.01),
    )
    rng = random.Random(3)
    opened = []
    for number in range(40):
        prompt = [rng.randrange(90) for _ in range(rng.randint(1, 40))]
        opened.append(Open(f"r{number}", prompt, SamplingParams(seed=number, max_tokens=rng.randint(2, 40))))
        simulation.at(1.1 + number / 10, opened[-1])
    for time, drain in drains:
        simulation.at(time, drain)
    if kill:
        simulation.kill(*kill)
    return simulation, opened, simulation.run()


@pytest.mark.parametrize(
    ("topology", "victim"),
    [
        (pairs(2), "decode-0"),
        (pools(2, 1), "prefill-0"),
        (unified(2), "unified-0"),
        (mixed(1, 1, 1), "decode-0"),
        (mixed(1, 1, 2), "unified-0"),
    ],
)
def test_draining_costs_no_request(topology: Topology, victim: str) -> None:
    simulation, opened, received = run_simulation(topology, [(2.0, Drain(victim, True))])
    assert_all_answered(simulation, opened, received)
    prefill = victim.replace("decode", "prefill")
    chosen = _chosen(simulation)
    assert any(prefill in candidate for time, candidate in chosen if time < 2.0)
    assert not any(prefill in candidate for time, candidate in chosen if time > 2.0)
    assert simulation.fleet.open_at(victim) == 0


def test_a_drained_pair_comes_back() -> None:
    simulation, opened, received = run_simulation(
        pairs(2), [(2.0, Drain("prefill-0", True)), (3.0, Drain("prefill-0", False))]
    )
    assert_all_answered(simulation, opened, received)
    assert any("prefill-0" in candidate for time, candidate in _chosen(simulation) if time > 3.0)


def test_requests_wait_while_the_only_other_pair_is_restarted() -> None:
    simulation, opened, received = run_simulation(
        pairs(2), [(2.0, Drain("prefill-0", True))], kill=(3.05, "decode-1")
    )
    assert_all_answered(simulation, opened, received)
    assert simulation.deaths == 1


def test_with_all_drained_new_requests_are_refused_with_retry_after() -> None:
    simulation, _, received = run_simulation(unified(1), [(2.0, Drain("unified-0", True))])
    refused = [item.message for item in received if isinstance(item.message, Refuse)]
    assert refused
    for refusal in refused:
        assert (refusal.error.status, refusal.error.retry_after) == (503, 5.0)
        assert "draining: unified-0" in str(refusal.error)
    assert not simulation.fleet.health()[0]


def _chosen(simulation: Simulation) -> list[tuple[float, str]]:
    """Return when requests were routed, and the chosen candidates."""
    return [
        (record.time, record.candidates[record.decision.chosen])
        for record in simulation.fleet.placement.recent
    ]
