"""Workers that die or fall silent at each lifecycle event of a request, in virtual time: sixteen requests on
a pair that speculates, swaps and takes edits, and every text is unchanged."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import get_args

import numpy as np
import pytest

from streamserve.engine.observer import LifecycleEvent
from streamserve.engine.plan import DraftRequest
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Drain, Edit, Open
from streamserve.fleet.worker_state import Topology, pairs
from streamserve.protocol.config import EngineConfig
from streamserve.protocol.sampling import SamplingParams
from streamserve.simulate.executor import CostExecutor, next_token
from streamserve.simulate.faults import FaultInjection
from streamserve.simulate.simulation import Simulation
from streamserve.simulate.worker import WorkerSpec
from streamserve.speculation.tree import TokenTree
from tests.conftest import Scale
from tests.engine.drive import VOCAB, assert_engine_empty, expected, model_info
from tests.simulate.test_streams import texts

ENGINE = EngineConfig(
    num_blocks=30, block_size=4, max_model_len=96, max_num_seqs=8, max_num_batched_tokens=24, max_chunk=12,
    eviction="swap", swap_blocks=80,
)  # fmt: skip
EVENTS: tuple[LifecycleEvent, ...] = get_args(LifecycleEvent)
VICTIMS = (("prefill-0",), ("decode-0",), ("prefill-0", "decode-0"))
ROUNDS = 2


class RandomDrafter:
    """Drafts a correct next token and a wrong one after it."""

    group = None

    def __init__(self, executor: CostExecutor) -> None:
        self._trees: dict[int, TokenTree] = {}

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self._trees = {request.id: self._draft(request) for request in requests}

    def collect(self, deadline: float) -> dict[int, TokenTree]:
        return self._trees

    def release(self, ids: Sequence[int]) -> None:
        pass

    def _draft(self, request: DraftRequest) -> TokenTree:
        tokens = request.tokens[: request.length]
        correct = next_token(np.array(tokens, np.int64), request.params, request.choice, VOCAB)
        chain = (tokens[-1], correct, (correct + 1) % VOCAB)[: 1 + min(request.depth, request.nodes)]
        ones = (1.0,) * len(chain)
        return TokenTree(chain, tuple(range(-1, len(chain) - 1)), ones, ones)


ExpectedTexts = dict[tuple[str, int], list[int]]


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


def submit_requests(simulation: Simulation, seed: int) -> ExpectedTexts:
    """Submit sixteen requests, every fourth a prompt stream with edits; returns their expected texts."""
    rng = random.Random(seed)
    expected_texts: ExpectedTexts = {}
    for number in range(16):
        name, at = f"r{number}", 1.1 + rng.uniform(0, 0.5)
        prompt = [rng.randrange(90) for _ in range(rng.randint(20, 50))]
        params = SamplingParams(n=rng.choice((1, 1, 2)), seed=number, max_tokens=rng.randint(3, 30))
        streaming = number % 4 == 0
        simulation.at(at, Open(name, list(prompt), params, open=streaming, answer_early=number % 8 == 0))
        if streaming:
            prompt = prompt[:15] + [rng.randrange(90) for _ in range(20)]
            simulation.at(at + 0.3, Edit(name, 1, 15, prompt[15:]))
            simulation.at(at + 0.4, Edit(name, 2, len(prompt), [7], finish=True))
            prompt = [*prompt, 7]
        for choice in range(params.n):
            expected_texts[name, choice] = expected(prompt, params, choice, 96)
    return expected_texts


def check(simulation: Simulation, expected_texts: ExpectedTexts) -> float:
    """Check that each request has its text and nothing is leaked; returns when the last token came."""
    received = simulation.run()
    assert texts(received)[0] == expected_texts
    assert not simulation.fleet.requests
    assert not len(simulation.fleet.transfers.reservations)
    for worker in simulation.workers.values():
        assert_engine_empty(worker.engine)
    return received[-1].time


@pytest.mark.each_pair
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
