"""Workers that die or fall silent at any lifecycle event of a request change no text, in virtual time:
sixteen requests on a pair with speculation, swapping and edits."""

from collections import Counter
from collections.abc import Callable
from typing import get_args

import pytest

from streamserve.engine.observer import LifecycleEvent
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Drain
from streamserve.fleet.worker_state import Topology, pairs
from streamserve.simulate.faults import FaultInjection
from streamserve.simulate.simulation import Simulation
from streamserve.simulate.worker import WorkerSpec
from tests.conftest import Scale
from tests.engine.drive import model_info
from tests.simulate.lifecycle import ENGINE, RandomDrafter, check, submit_requests

EVENTS: tuple[LifecycleEvent, ...] = get_args(LifecycleEvent)
VICTIMS = (("prefill-0",), ("decode-0",), ("prefill-0", "decode-0"))
ROUNDS = 2


def make_pair(topology: Topology) -> Simulation:
    fleet = FleetConfig(topology=topology, stuck_after=1.0, max_attempts=4)
    return Simulation(
        fleet,
        WorkerSpec(
            ENGINE,
            model_info(96),
            lambda tokens, context: 0.01 + tokens * 0.001,
            wire_seconds=0.004,
            policy="fixed:2",
            drafter=RandomDrafter,
        ),
    )


@pytest.mark.each_value
@pytest.mark.parametrize("stop", [False, True], ids=["kill", "stop"])
@pytest.mark.parametrize("victims", VICTIMS, ids=["prefill", "decode", "both"])
@pytest.mark.parametrize("event", EVENTS)
def test_a_worker_lost_at_an_event_costs_time_never_text(
    event: LifecycleEvent, victims: tuple[str, ...], stop: bool, scale: Scale, record: Callable[..., None]
) -> None:
    undisturbed = make_pair(pairs(1))
    undisturbed_end = check(undisturbed, submit_requests(undisturbed, 0))
    seconds_lost: list[float] = []
    for number in range(1, 1 + scale.pick(1, ROUNDS)):
        simulation = make_pair(pairs(1))
        expected_texts = submit_requests(simulation, 0)
        simulation.faults.inject(FaultInjection(event, number, victims, stop))
        seconds_lost.append(round(check(simulation, expected_texts) - undisturbed_end, 2))
        assert simulation.faults.injected == [event]
        for worker in victims:
            assert simulation.fleet.workers[worker].incarnation == 2
    record(deaths=len(seconds_lost), streams=16, virtual_seconds_lost=seconds_lost)


@pytest.mark.parametrize("stop", [False, True], ids=["kill", "stop"])
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_a_worker_lost_while_it_drains_costs_time_never_text(victim: str, stop: bool) -> None:
    simulation = make_pair(pairs(2))
    expected_texts = submit_requests(simulation, 0)
    simulation.at(1.5, Drain(victim, True))
    simulation.faults.inject(FaultInjection("finishing", 3, (victim,), stop))
    check(simulation, expected_texts)
    assert simulation.faults.injected == ["finishing"]
    assert simulation.fleet.workers[victim].draining


def test_every_event_occurs_at_the_right_worker() -> None:
    reached: Counter[tuple[str, str]] = Counter()
    simulation = make_pair(pairs(1))
    simulation.faults.reach_event = lambda worker, event: reached.update([(worker, event)])  # type: ignore[method-assign]
    check(simulation, submit_requests(simulation, 0))
    assert {event for _, event in reached} == set(EVENTS)
    for event in ("mid-layer push", "last layer landed"):
        assert {worker for worker, name in reached if name == event} == {"prefill-0"}
    for event in ("reserved", "mid-draft"):
        assert ("decode-0", event) in reached
