"""Steps that are planned before the previous step's results give the same texts, with an executor that holds
two steps at a time and returns the results of the first only on request."""

import random
from collections import deque
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.contracts.engine_config import EngineConfig
from streamserve.contracts.plan import Span, StepPlan, StepResult
from streamserve.contracts.tree import root
from streamserve.protocol.messages import Cancel
from streamserve.protocol.sampling import SamplingParams
from streamserve.simulate.executor import CostExecutor
from tests.engine.drive import Collected, assert_engine_empty, expected, make_engine, submit
from tests.engine.requests import random_requests

ENDS = tuple(range(90, 97))
"""Tokens that end a text: one in 14."""
CONFIG = EngineConfig(num_blocks=400, block_size=4, max_model_len=96, max_num_batched_tokens=128)


class AsyncExecutor:
    """An executor whose tokens are unknown until the step is finished."""

    def __init__(self, executor: CostExecutor) -> None:
        self._executor = executor
        self._queue: deque[tuple[StepPlan, StepResult]] = deque()
        self.deepest = 0

    def __getattr__(self, name: str):
        return getattr(self._executor, name)

    def launch(self, plan: StepPlan) -> None:
        plan = replace(plan, spans=[self._known(span) if span.follows else span for span in plan.spans])
        self._queue.append((plan, self._executor.run(plan)))
        self.deepest = max(self.deepest, len(self._queue))

    def _known(self, span: Span) -> Span:
        """Return the span with the token that the previous step sampled for it."""
        (last,) = (
            one.outputs[0][-1].token for one in self._queue[-1][1].spans if one.sequence == span.sequence
        )
        return msgspec.structs.replace(span, tokens=[last], tree=root(last))

    def can_follow(self) -> bool:
        return True

    def finish(self) -> StepResult:
        return self._queue.popleft()[1]

    def run(self, plan: StepPlan) -> StepResult:
        raise AssertionError("an asynchronous executor is asked to launch and to finish")


def run(config: EngineConfig, requests, rng: random.Random, cancels: float = 0.0, draft_model=None):
    """Serve requests that arrive at random times; some are cancelled at random times."""
    engine = make_engine(config, eos=ENDS, draft_model=draft_model, wrap=AsyncExecutor)
    collected, waiting, cancelled = Collected(), list(requests), set()
    while waiting or engine.has_work:
        while waiting and (rng.random() < 0.3 or not engine.has_work):
            collected.take(engine.handle(waiting.pop(0)))
        live = [s.request for s in engine.scheduler.sequences.values()]
        if live and rng.random() < cancels:
            cancelled.add(name := rng.choice(live))
            collected.take(engine.handle(Cancel(name)))
        if engine.has_work:
            collected.take(engine.step())
    assert_engine_empty(engine)
    return engine, collected, cancelled


def assert_exact(requests, collected: Collected, cancelled: set[str]) -> None:
    for request in requests:
        for choice in request.outputs:
            tokens = expected(request.prompt, request.params, choice, CONFIG.max_model_len)
            end = next((number + 1 for number, token in enumerate(tokens) if token in ENDS), len(tokens))
            found = collected.tokens[request.request, choice]
            if request.request in cancelled:
                assert found == tokens[:end][: len(found)]
            else:
                assert found == tokens[:end]


@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.sampled_from((24, 40, 400)),
    budget=st.sampled_from((8, 24, 128)),
    preempt_every=st.sampled_from((0, 0, 5)),
    swap=st.booleans(),
    caching=st.booleans(),
    draft_model=st.sampled_from((None, None, 0.0, 0.7)),
)
def test_any_schedule_gives_each_request_its_own_text(
    seed, num_blocks, budget, preempt_every, swap, caching, draft_model
):
    config = replace_config(num_blocks, budget, preempt_every, swap, caching)
    rng = random.Random(seed)
    requests = random_requests(rng, 10, 96)
    _, collected, cancelled = run(config, requests, rng, 0.05, draft_model)
    assert_exact(requests, collected, cancelled)


def replace_config(num_blocks, budget, preempt_every, swap, caching) -> EngineConfig:
    return msgspec.structs.replace(
        CONFIG, num_blocks=num_blocks, max_num_batched_tokens=budget, preempt_every=preempt_every,
        eviction="swap" if swap else "recompute", swap_blocks=30 * swap, enable_prefix_caching=caching,
    )  # fmt: skip


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("draft_model", [None, 0.7])
def test_preempted_sequences_give_their_own_text(swap, draft_model):
    config, rng = replace_config(40, 24, 5, swap, True), random.Random(1)
    requests = random_requests(rng, 20, 96)
    engine, collected, cancelled = run(config, requests, rng, 0.05, draft_model)
    assert_exact(requests, collected, cancelled)
    assert engine.report().preemptions > 3


def test_steps_are_ahead_and_rows_of_ended_sequences_are_dropped():
    rng = random.Random(1)
    requests = random_requests(rng, 40, 96)
    engine, collected, cancelled = run(CONFIG, requests, rng, 0.05)
    assert_exact(requests, collected, cancelled)
    assert cancelled
    assert engine.steps_ahead > 20
    assert engine.rows_dropped > 5
    assert engine.executor.deepest == 2


def test_a_lone_request_is_planned_ahead_but_for_its_first_step():
    request = submit("r", [1, 2, 3], SamplingParams(temperature=0, max_tokens=30))
    engine, collected = make_engine(CONFIG, wrap=AsyncExecutor), Collected()
    engine.handle(request)
    while engine.has_work:
        collected.take(engine.step())
    assert collected.tokens["r", 0] == expected(request.prompt, request.params, 0, 96)
    assert engine.steps_ahead == 29
    assert engine.rows_dropped == 0
