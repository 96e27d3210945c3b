"""Workers that die or fall silent at each named moment of a request's life, in virtual time: sixteen requests
on a pair that speculates, swaps and takes edits, and every answer is what it would have been."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import get_args

import numpy as np
import pytest

from streamserve.engine.observer import LifecycleEvent
from streamserve.engine.plan import DraftRequest
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Edit, Open, Rest
from streamserve.fleet.worker_state import Topology, pairs
from streamserve.protocol.config import EngineConfig
from streamserve.protocol.sampling import SamplingParams
from streamserve.simulate.executor import CostExecutor, next_token
from streamserve.simulate.simulation import FaultInjection, Simulation
from streamserve.speculation.tree import TokenTree
from tests.conftest import Scale
from tests.engine.drive import VOCAB, assert_engine_empty, expected, model_info
from tests.simulate.test_streams import texts

ENGINE = EngineConfig(
    num_blocks=30, block_size=4, max_model_len=96, max_num_seqs=8, max_num_batched_tokens=24, max_chunk=12,
    eviction="swap", swap_blocks=80,
)  # fmt: skip
MOMENTS: tuple[LifecycleEvent, ...] = get_args(LifecycleEvent)
VICTIMS = (("prefill-0",), ("decode-0",), ("prefill-0", "decode-0"))
ROUNDS = 5


class Guesser:
    """Guesses the next token rightly, and the one after it wrongly."""

    plane = None

    def __init__(self, executor: CostExecutor) -> None:
        self._known: dict[int, list[int]] = {}
        self._trees: dict[int, TokenTree] = {}

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self._trees = {request.id: self._guess(request) for request in requests}

    def collect(self, deadline: float) -> dict[int, TokenTree]:
        return self._trees

    def release(self, ids: Sequence[int]) -> None:
        for id in ids:
            self._known.pop(id, None)

    def _guess(self, request: DraftRequest) -> TokenTree:
        tokens = self._known.get(request.id, [])[: request.keep] + request.new_tokens
        self._known[request.id] = tokens
        right = next_token(np.array(tokens, np.int64), request.params, request.choice, VOCAB)
        chain = (tokens[-1], right, (right + 1) % VOCAB)[: 1 + min(request.depth, request.nodes)]
        ones = (1.0,) * len(chain)
        return TokenTree(chain, tuple(range(-1, len(chain) - 1)), ones, ones)


Answers = dict[tuple[str, int], list[int]]


def pair(topology: Topology) -> Simulation:
    fleet = FleetConfig(topology=topology, stuck_after=1.0, max_attempts=4)
    return Simulation(
        fleet, ENGINE, model_info(96), lambda rows, context: 0.01 + rows * 0.001,
        wire_seconds=0.004, policy="fixed:2", drafter=Guesser,
    )  # fmt: skip


def ask(simulation: Simulation, seed: int) -> Answers:
    """Sixteen requests, every fourth of them edited while it arrives; returns what they are to get."""
    rng = random.Random(seed)
    answers: Answers = {}
    for number in range(16):
        name, at = f"r{number}", 1.1 + rng.uniform(0, 0.5)
        prompt = [rng.randrange(90) for _ in range(rng.randint(20, 50))]
        params = SamplingParams(n=rng.choice((1, 1, 2)), seed=number, max_tokens=rng.randint(3, 30))
        arriving = number % 4 == 0
        simulation.at(at, Open(name, list(prompt), params, open=arriving, answer_early=number % 8 == 0))
        if arriving:
            prompt = prompt[:15] + [rng.randrange(90) for _ in range(20)]
            simulation.at(at + 0.3, Edit(name, 1, 15, prompt[15:]))
            simulation.at(at + 0.4, Edit(name, 2, len(prompt), [7], finish=True))
            prompt = [*prompt, 7]
        for choice in range(params.n):
            answers[name, choice] = expected(prompt, params, choice, 96)
    return answers


def check(simulation: Simulation, answers: Answers) -> float:
    """Everybody has their answer and nothing is left; returns when the last one came."""
    given = simulation.run()
    assert texts(given)[0] == answers
    assert not simulation.fleet.requests
    assert not len(simulation.fleet.tickets)
    for worker in simulation.workers.values():
        assert_engine_empty(worker.engine)
    return given[-1].time


@pytest.mark.parametrize("stop", [False, True], ids=["kill", "stop"])
@pytest.mark.parametrize("victims", VICTIMS, ids=["prefill", "decode", "both"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_worker_lost_at_a_moment_costs_time_never_text(
    moment: LifecycleEvent, victims: tuple[str, ...], stop: bool, scale: Scale, record: Callable[..., None]
) -> None:
    calm = pair(pairs(1))
    calm_end = check(calm, ask(calm, 0))
    took: list[float] = []
    for number in range(1, 1 + scale.pick(1, ROUNDS)):
        simulation = pair(pairs(1))
        answers = ask(simulation, 0)
        simulation.destine(FaultInjection(moment, number, victims, stop))
        took.append(round(check(simulation, answers) - calm_end, 2))
        assert simulation.met == [moment]
        for worker in victims:
            assert simulation.fleet.workers[worker].incarnation == 2
    record(deaths=len(took), streams=16, virtual_seconds_lost=took)


@pytest.mark.parametrize("stop", [False, True], ids=["kill", "stop"])
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_a_worker_lost_while_it_drains_costs_time_never_text(victim: str, stop: bool) -> None:
    simulation = pair(pairs(2))
    answers = ask(simulation, 0)
    simulation.at(1.5, Rest(victim, True))
    simulation.destine(FaultInjection("finishing", 3, (victim,), stop))
    check(simulation, answers)
    assert simulation.met == ["finishing"]
    assert simulation.fleet.workers[victim].draining


def test_every_moment_comes_at_its_own_half() -> None:
    came: Counter[tuple[str, str]] = Counter()
    simulation = pair(pairs(1))
    simulation.meet = lambda worker, moment: came.update([(worker, moment)])  # type: ignore[method-assign]
    check(simulation, ask(simulation, 0))
    assert {moment for _, moment in came} == set(MOMENTS)
    for moment in ("mid-layer push", "last layer landed"):
        assert {worker for worker, name in came if name == moment} == {"prefill-0"}
    for moment in ("reserved", "mid-draft"):
        assert ("decode-0", moment) in came
