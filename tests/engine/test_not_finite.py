"""A request whose logits are not finite ends with an error, and its KV is not cached."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.contracts.engine_config import EngineConfig
from streamserve.contracts.plan import StepPlan, StepResult
from streamserve.protocol.messages import Admitted, Finished
from streamserve.protocol.sampling import SamplingParams
from tests.engine.drive import VOCAB, Collected, expected, finish, make_engine, submit
from tests.engine.requests import random_requests

BAD = 95
"""The token for which the fake executor's logits are not finite."""

CONFIG = EngineConfig(num_blocks=64, block_size=4, max_model_len=96, max_num_batched_tokens=64, max_chunk=16)


class NonFiniteExecutor:
    """An executor whose logits are not finite for spans that contain the token `bad`."""

    def __init__(self, executor, bad: int) -> None:
        self._executor = executor
        self._bad = bad

    def __getattr__(self, name: str):
        return getattr(self._executor, name)

    def run(self, plan: StepPlan) -> StepResult:
        result = self._executor.run(plan)
        spans = [
            msgspec.structs.replace(outcome, outputs=[], not_finite=True)
            if self._bad in span.tokens
            else outcome
            for span, outcome in zip(plan.spans, result.spans, strict=True)
        ]
        return StepResult(spans, result.seconds, result.swap_seconds)


def non_finite_engine(bad: int = BAD):
    return make_engine(CONFIG, wrap=lambda executor: NonFiniteExecutor(executor, bad))


@pytest.mark.parametrize("position", [3, 20, 38])
def test_only_it_ends_and_none_of_its_blocks_is_cached(position):
    params = SamplingParams(temperature=0, max_tokens=5)
    prompt = [number % 90 for number in range(40)]
    corrupt_prompt = [*prompt[:position], BAD, *prompt[position:]]
    engine, collected = non_finite_engine(), Collected()
    for request in (
        submit("good", list(range(10, 30)), params),
        submit("bad", corrupt_prompt, params, arrival=1),
    ):
        engine.handle(request)
    events = []
    while engine.has_work:
        new = engine.step()
        events += [event for event in new if isinstance(event, Finished)]
        collected.take(new)
    (ended,) = events
    assert (ended.request, ended.reason, ended.status) == ("bad", "error", 500)
    assert "not finite" in ended.error
    assert collected.tokens["good", 0] == expected(list(range(10, 30)), params, 0, 96)
    assert engine.report().corrupted_requests == 1
    engine.handle(submit("again", prompt, params))
    again = engine.step()
    assert [event.cached for event in again if isinstance(event, Admitted)] == [0]
    collected.take(again)
    finish(engine, collected)
    assert collected.tokens["again", 0] == expected(prompt, params, 0, 96)


def test_a_shared_prefix_is_recomputed_and_its_other_holders_continue():
    """A shared prefix is recomputed. Other requests that share blocks with a failed request keep these blocks
    and their text."""
    params = SamplingParams(temperature=0, max_tokens=30)
    head = list(range(16))
    engine, collected = non_finite_engine(), Collected()
    good, bad = [*head, 1, 2], [*head, 1, BAD]
    engine.handle(submit("good", good, params))
    collected.take(engine.step())
    engine.handle(submit("bad", bad, params))
    new = engine.step()
    assert [event.cached for event in new if isinstance(event, Admitted)] == [16]
    collected.take(new)
    assert collected.finish["bad", 0] == "error"
    finish(engine, collected)
    assert collected.tokens["good", 0] == expected(good, params, 0, 96)


def test_each_choice_ends_by_its_own_logits():
    params = SamplingParams(n=4, seed=3, max_tokens=20)
    prompt = list(range(10))
    texts = {choice: expected(prompt, params, choice, 96) for choice in range(4)}
    bad = next(token for token in range(10, VOCAB) if sum(token in text[:-1] for text in texts.values()) == 1)
    engine, collected = non_finite_engine(bad), Collected()
    engine.handle(submit("r", prompt, params))
    finish(engine, collected)
    ended = {choice for (_, choice), reason in collected.finish.items() if reason == "error"}
    assert ended == {choice for choice, text in texts.items() if bad in text[:-1]}
    for choice in set(texts) - ended:
        assert collected.tokens["r", choice] == texts[choice]
    assert engine.report().corrupted_requests == 1


@given(seed=st.integers(0, 2**32), num_blocks=st.sampled_from((30, 400)), swap=st.sampled_from((0, 40)))
def test_any_schedule_ends_exactly_the_requests_with_the_bad_token(seed, num_blocks, swap):
    config = EngineConfig(
        num_blocks=num_blocks, block_size=4, max_model_len=96, max_num_seqs=8, max_num_batched_tokens=32,
        max_chunk=7, preempt_every=5, swap_blocks=swap,
    )  # fmt: skip
    requests = random_requests(random.Random(seed), 10, 96)
    engine, collected = make_engine(config, wrap=lambda e: NonFiniteExecutor(e, BAD)), Collected()
    for request in requests:
        engine.handle(request)
    finish(engine, collected)
    affected = 0
    for request in requests:
        for choice in request.outputs:
            full_outputs = expected(request.prompt, request.params, choice, 96)
            tokens = collected.tokens[request.request, choice]
            text = [*request.prompt, *full_outputs[:-1]]  # the tokens that are read: all but the last
            if BAD in text:
                affected += 1
                until = max(0, text.index(BAD) + 1 - len(request.prompt))
                assert (tokens, collected.finish[request.request, choice]) == (full_outputs[:until], "error")
            else:
                assert tokens == full_outputs
    assert (engine.report().corrupted_requests > 0) == (affected > 0)
