"""A pair that is taken out of service while requests come: none fails, and no new one goes there."""

import random

import pytest

from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Open, Refuse, Rest
from streamserve.fleet.worker_state import Topology, pairs, pools, unified
from streamserve.protocol.sampling import SamplingParams
from streamserve.simulate.simulation import Simulation
from tests.engine.drive import model_info
from tests.simulate.test_simulation import ENGINE, assert_all_answered


def play(topology: Topology, rests: list[tuple[float, Rest]], kill: tuple[float, str] | None = None):
    """Forty requests over four seconds."""
    fleet = FleetConfig(topology=topology, max_attempts=9)
    simulation = Simulation(
        fleet, ENGINE, model_info(96), lambda rows, context: 0.02 + rows * 0.002, wire_seconds=0.01
    )
    rng = random.Random(3)
    opened = []
    for number in range(40):
        prompt = [rng.randrange(90) for _ in range(rng.randint(1, 40))]
        opened.append(Open(f"r{number}", prompt, SamplingParams(seed=number, max_tokens=rng.randint(2, 40))))
        simulation.at(1.1 + number / 10, opened[-1])
    for time, rest in rests:
        simulation.at(time, rest)
    if kill:
        simulation.kill(*kill)
    return simulation, opened, simulation.run()


@pytest.mark.parametrize(("topology", "victim"), [(pairs(2), "decode-0"), (pools(2, 1), "prefill-0")])
def test_draining_costs_no_request(topology: Topology, victim: str) -> None:
    simulation, opened, given = play(topology, [(2.0, Rest(victim, True))])
    assert_all_answered(simulation, opened, given)
    front = victim.replace("decode", "prefill")
    chosen = _chosen(simulation)
    assert any(front in place for time, place in chosen if time < 2.0)
    assert not any(front in place for time, place in chosen if time > 2.0)
    assert simulation.fleet.open_at(victim) == 0


def test_a_drained_pair_comes_back() -> None:
    simulation, opened, given = play(
        pairs(2), [(2.0, Rest("prefill-0", True)), (3.0, Rest("prefill-0", False))]
    )
    assert_all_answered(simulation, opened, given)
    assert any("prefill-0" in place for time, place in _chosen(simulation) if time > 3.0)


def test_what_comes_while_the_only_other_pair_is_started_again_waits_for_it() -> None:
    simulation, opened, given = play(pairs(2), [(2.0, Rest("prefill-0", True))], kill=(3.05, "decode-1"))
    assert_all_answered(simulation, opened, given)
    assert simulation.deaths == 1


def test_with_all_at_rest_new_requests_are_told_to_come_back() -> None:
    simulation, _, given = play(unified(1), [(2.0, Rest("unified-0", True))])
    refused = [item.what for item in given if isinstance(item.what, Refuse)]
    assert refused
    for one in refused:
        assert (one.error.status, one.error.retry_after) == (503, 5.0)
        assert "draining: unified-0" in str(one.error)
    assert not simulation.fleet.health()[0]


def _chosen(simulation: Simulation) -> list[tuple[float, str]]:
    """When requests were routed, and where to."""
    return [(one.time, one.places[one.decision.chosen]) for one in simulation.fleet.placement.recent]
