"""Requests on a simulated pair with speculation, swapping and edits, and the check of their texts."""

import random
from collections.abc import Sequence

import numpy as np

from streamserve.contracts.engine_config import EngineConfig
from streamserve.contracts.plan import DraftRequest
from streamserve.contracts.tree import TokenTree
from streamserve.fleet.events import ClientEdit, Open
from streamserve.protocol.sampling import SamplingParams
from streamserve.simulate.executor import CostExecutor, next_token
from streamserve.simulate.simulation import Simulation
from tests.engine.drive import VOCAB, assert_engine_empty, expected
from tests.simulate.streaming import texts

ENGINE = EngineConfig(
    num_blocks=30, block_size=4, max_model_len=96, max_num_seqs=8, max_num_batched_tokens=24, max_chunk=12,
    eviction="swap", swap_blocks=80,
)  # fmt: skip


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
            simulation.at(at + 0.3, ClientEdit(name, 1, 15, prompt[15:]))
            simulation.at(at + 0.4, ClientEdit(name, 2, len(prompt), [7], finish=True))
            prompt = [*prompt, 7]
        for choice in range(params.n):
            expected_texts[name, choice] = expected(prompt, params, choice, 96)
    return expected_texts


def check(simulation: Simulation, expected_texts: ExpectedTexts) -> float:
    """Assert that each request has its text and nothing is leaked; return the time of the last token."""
    received = simulation.run()
    assert texts(received)[0] == expected_texts
    assert not simulation.fleet.requests
    assert not len(simulation.fleet.transfers.reservations)
    for worker in simulation.workers.values():
        assert_engine_empty(worker.engine)
    return received[-1].time
