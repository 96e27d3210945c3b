"""The engine gives every request the text that it would have alone, whatever other requests are in the
batch."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.baselines.orders import ORDERS
from streamserve.baselines.speculation import parse_policy
from streamserve.contracts.engine_config import EngineConfig
from streamserve.contracts.tree import TokenTree, chain
from streamserve.protocol.messages import Admitted, Cancel, DraftVerified, Token
from streamserve.protocol.sampling import SamplingParams, SpeculationLimits
from streamserve.speculation.controller import Speculation
from tests.engine.drive import (
    VOCAB,
    Collected,
    assert_engine_empty,
    expected,
    expected_outputs,
    finish,
    make_engine,
    submit,
)
from tests.engine.requests import random_requests

CONFIG = EngineConfig(num_blocks=64, block_size=4, max_model_len=96, max_num_batched_tokens=32, max_chunk=16)


def run_all(config: EngineConfig, requests, drafter=None, eos=(), draft_model=None):
    engine = make_engine(config, drafter, eos, draft_model=draft_model)
    collected = Collected()
    for request in requests:
        collected.take(engine.handle(request))
    finish(engine, collected)
    return engine, collected


def assert_exact(requests, collected: Collected, max_model_len: int) -> None:
    for request in requests:
        for choice in request.outputs:
            expected_tokens = expected(request.prompt, request.params, choice, max_model_len)
            assert collected.tokens[request.request, choice] == expected_tokens
            assert collected.finish[request.request, choice] == "length"
        if request.params.prompt_logprobs is not None:
            assert collected.prompt_logprobs[request.request] == request.prompt[1:]


@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.sampled_from((24, 30, 60, 400)),
    max_chunk=st.sampled_from((1, 7, 64)),
    budget=st.sampled_from((4, 16, 128)),
    preempt_every=st.sampled_from((0, 0, 3)),
    caching=st.booleans(),
    order=st.sampled_from(tuple(ORDERS)),
    share=st.sampled_from((None, 0.0, 0.5)),
)
def test_any_schedule_gives_each_request_its_own_text(
    seed, num_blocks, max_chunk, budget, preempt_every, caching, order, share
):
    if order == "prefill-first":
        preempt_every = 0  # A preempted prompt is recomputed while no request decodes, which takes long.
    config = EngineConfig(
        num_blocks=num_blocks, block_size=4, max_model_len=96, max_num_seqs=8, max_num_batched_tokens=budget,
        max_chunk=max_chunk, preempt_every=preempt_every, enable_prefix_caching=caching, order=order,
        prefill_share=share,
    )  # fmt: skip
    requests = random_requests(random.Random(seed), 12, 96)
    engine, collected = run_all(config, requests)
    assert_exact(requests, collected, 96)
    if preempt_every:
        assert engine.report().preemptions > 0


def test_a_tiny_cache_preempts_and_changes_nothing():
    config = EngineConfig(num_blocks=24, block_size=4, max_model_len=96, max_num_batched_tokens=32)
    requests = random_requests(random.Random(1), 20, 96)
    engine, collected = run_all(config, requests)
    assert_exact(requests, collected, 96)
    assert engine.report().preemptions > 0


def test_a_shared_prefix_is_computed_once():
    head = list(range(40))
    first = submit("first", [*head, 1], SamplingParams(temperature=0, max_tokens=4))
    engine = make_engine(CONFIG)
    collected = Collected()
    engine.handle(first)
    finish(engine, collected)
    engine.handle(submit("second", [*head, 2], SamplingParams(temperature=0, max_tokens=4)))
    events = engine.step()
    assert [e.cached for e in events if isinstance(e, Admitted)] == [40]
    collected.take(events)
    finish(engine, collected)
    assert collected.tokens["second", 0] == expected_outputs([*head, 2], first.params, 0, 4, VOCAB)
    assert engine.report().prefix_hits == 40


def test_a_shared_prefix_is_computed_once_even_when_all_arrive_together():
    head, params = list(range(40)), SamplingParams(temperature=0, max_tokens=4)
    requests = [submit(f"r{number}", [*head, 50 + number], params, arrival=number) for number in range(6)]
    engine, collected = run_all(CONFIG, requests)
    assert_exact(requests, collected, 96)
    assert engine.report().prefix_hits == 5 * 40


def test_waiting_for_a_shared_prefix_does_not_delay_other_requests():
    head, params = list(range(80)), SamplingParams(temperature=0, max_tokens=2)
    engine = make_engine(CONFIG)
    for number, prompt in enumerate(([*head, 1], [*head, 2], [90, 91, 92])):
        engine.handle(submit(f"r{number}", prompt, params, arrival=number))
    first, collected = engine.step(), Collected()
    collected.take(first)
    assert [event.request for event in first if isinstance(event, Admitted)] == ["r0", "r2"]
    finish(engine, collected)
    assert engine.report().prefix_hits == 80


def test_the_same_prompt_again_still_computes_its_last_token():
    prompt = list(range(40))
    params = SamplingParams(temperature=0, max_tokens=4)
    engine = make_engine(CONFIG)
    for name in ("first", "second"):
        collected = Collected()
        engine.handle(submit(name, prompt, params))
        finish(engine, collected)
        assert collected.tokens[name, 0] == expected_outputs(prompt, params, 0, 4, VOCAB)
    assert engine.report().prefix_hits == 36


@pytest.mark.parametrize("draft_model", [None, 0.8])
def test_prefix_statistics_count_a_request_when_it_is_first_scheduled(draft_model):
    config = EngineConfig(
        num_blocks=40, block_size=4, max_model_len=96, max_num_batched_tokens=32, preempt_every=3
    )
    requests = random_requests(random.Random(5), 12, 96)
    engine, collected = run_all(config, requests, draft_model=draft_model)
    assert_exact(requests, collected, 96)
    report = engine.report()
    assert report.preemptions > 0
    assert report.prefix_queries == sum(len(request.prompt) for request in requests)
    assert 0 < report.prefix_hits < report.prefix_queries


def test_prefix_statistics_do_not_count_what_was_scheduled_elsewhere_before():
    engine = make_engine(CONFIG)
    params = SamplingParams(n=2, temperature=0, max_tokens=4, seed=1)
    again = {"outputs": {0: [5], 1: [7, 8]}, "began": {0: 0.0, 1: 0.0}, "rescheduled": True}
    engine.handle(submit("r", list(range(20)), params, attempt=1, **again))
    while engine.has_work:
        engine.step()
    assert_engine_empty(engine)
    assert engine.report().prefix_queries == engine.report().prefix_hits == 0


def test_draft_tokens_after_the_end_of_a_text_are_not_accepted_ones():
    prompt = list(range(9))
    outputs = expected_outputs(prompt, SamplingParams(temperature=0), 0, 20, VOCAB)
    last = next(number for number in range(3, 20) if outputs[number] not in outputs[:number])
    params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=(outputs[last],))
    engine = make_engine(CONFIG, draft_model=1.0)
    engine.handle(submit("r", prompt, params))
    accepted, sampled = 0, 0
    while engine.has_work:
        events = engine.step()
        verified = sum(event.accepted for event in events if isinstance(event, DraftVerified))
        tokens = sum(isinstance(event, Token) for event in events)
        accepted, sampled = accepted + verified, sampled + (tokens > verified)
    counters = engine.report().speculation
    assert accepted + sampled == engine.report().generation_tokens == last + 1
    assert counters.accepted == sum(counters.accepted_at) == accepted
    assert counters.verified > accepted, "the draft model continued after the end of the request"


def test_a_cache_salt_keeps_prefixes_apart():
    engine = make_engine(CONFIG)
    for salt in ("a", "b"):
        engine.handle(submit(salt, list(range(40)), SamplingParams(max_tokens=1, seed=0), cache_salt=salt))
        finish(engine, Collected())
    assert engine.report().prefix_hits == 0


def test_choices_share_their_prompt_and_copy_on_write():
    params = SamplingParams(n=4, seed=3, max_tokens=9)
    request = submit("r", list(range(10)), params)
    engine, collected = run_all(CONFIG, [request])
    assert_exact([request], collected, 96)
    assert len({tuple(tokens) for tokens in collected.tokens.values()}) == 4
    assert engine.report().copies_on_write == 3  # the last of the four writes in place
    assert engine.report().steps == 1 + 8 + 1  # one prefill for all, eight more tokens, one step to release


def test_steps_are_counted_by_their_tokens():
    config = EngineConfig(num_blocks=64, block_size=4, max_model_len=200, max_num_batched_tokens=40)
    request = submit("r", list(range(60)), SamplingParams(temperature=0, max_tokens=5))
    engine, _ = run_all(config, [request])
    steps = engine.report().step_tokens
    assert steps.total == 60 + 5
    assert steps.counts[0] == 4  # one token each
    assert sum(steps.counts) == 2 + 4  # two chunks of the prompt, the second with the first token


def test_chunks_interleave_with_decoding():
    config = EngineConfig(
        num_blocks=64, block_size=4, max_model_len=200, max_num_batched_tokens=8, max_chunk=8
    )
    short = submit("short", [1, 2], SamplingParams(temperature=0, max_tokens=10))
    long = submit("long", list(range(60)), SamplingParams(temperature=0, max_tokens=2), arrival=1)
    engine = make_engine(config)
    collected = Collected()
    engine.handle(short)
    collected.take(engine.step())
    engine.handle(long)
    for step in range(2, 9):
        collected.take(engine.step())
        assert len(collected.tokens["short", 0]) == step, "decoding continues in a batch with a long prompt"
    finish(engine, collected)
    assert_exact([short, long], collected, 200)


def test_a_request_from_the_future_ages_from_now_on():
    engine = make_engine(CONFIG)
    engine.clock = lambda: 10.0
    engine.handle(submit("past", [1, 2], SamplingParams(max_tokens=3, seed=1), arrival=4.0))
    engine.handle(submit("future", [3, 4], SamplingParams(max_tokens=3, seed=1), arrival=1e6))
    assert [sequence.submitted.arrival for sequence in engine.scheduler.sequences.values()] == [4.0, 10.0]
    engine.clock = lambda: 11.0
    waited = [event.queued for event in engine.step() if isinstance(event, Admitted)]
    assert waited == [7.0, 1.0]


def test_cancelling_frees_at_once():
    engine = make_engine(CONFIG)
    engine.handle(submit("r", list(range(30)), SamplingParams(n=3, seed=1, max_tokens=50)))
    for _ in range(5):
        engine.step()
    assert engine.report().blocks_live > 0
    assert len(engine.handle(Cancel("r", 1))) == 1
    assert engine.report().running == 2
    assert len(engine.handle(Cancel("r"))) == 2
    assert engine.report().blocks_live == 0
    finish(engine, Collected())


def test_a_choice_cancelled_before_the_fork_never_runs():
    params = SamplingParams(n=3, seed=1, max_tokens=5)
    request = submit("r", list(range(30)), params)
    engine = make_engine(CONFIG)
    engine.handle(request)
    engine.step()
    engine.handle(Cancel("r", 0))
    collected = Collected()
    finish(engine, collected)
    assert set(collected.tokens) == {("r", 1), ("r", 2)}
    for choice in (1, 2):
        assert collected.tokens["r", choice] == expected(request.prompt, params, choice, 96)


def test_a_request_resumes_after_its_emitted_tokens():
    params = SamplingParams(n=2, seed=5, max_tokens=12)
    prompt = list(range(20))
    full_outputs = {choice: expected(prompt, params, choice, 96) for choice in (0, 1)}
    outputs = {0: full_outputs[0][:7], 1: full_outputs[1][:3]}
    engine = make_engine(CONFIG)
    engine.handle(submit("r", prompt, params, attempt=1, outputs={c: list(o) for c, o in outputs.items()}))
    tokens = {0: list(outputs[0]), 1: list(outputs[1])}
    while engine.has_work:
        for event in engine.step():
            if not isinstance(event, Admitted):
                assert event.attempt == 1
                assert event.index == len(tokens[event.choice])
                tokens[event.choice].append(event.token)
    assert tokens == full_outputs
    assert_engine_empty(engine)


def test_end_of_text_and_stop_ids_end_a_sequence():
    prompt = [1, 2, 3]
    params = SamplingParams(temperature=0, max_tokens=20)
    text = expected_outputs(prompt, params, 0, 20, VOCAB)
    cases = (
        (params, (text[4],), "stop", text[:5]),
        (SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), (text[4],), "length", text),
        (SamplingParams(temperature=0, max_tokens=20, stop_token_ids=(text[2],)), (), "stop", text[:3]),
        (SamplingParams(temperature=0, max_tokens=20, min_tokens=5), (text[4],), "length", text),
    )
    for case, eos, reason, tokens in cases:
        first = tokens.index(tokens[-1]) + 1 if reason == "stop" else len(tokens)
        _, collected = run_all(CONFIG, [submit("r", prompt, case)], eos=eos)
        assert collected.tokens["r", 0] == tokens[:first]
        assert collected.finish["r", 0] == reason


def test_max_tokens_zero_only_reads_the_prompt():
    params = SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0)
    _, collected = run_all(CONFIG, [submit("r", list(range(50)), params)])
    assert collected.tokens == {}
    assert collected.finish["r", 0] == "length"
    assert collected.prompt_logprobs["r"] == list(range(1, 50))


@pytest.mark.parametrize(
    ("prompt", "n", "message"),
    [
        ([], 1, "empty"),
        (list(range(97)), 1, "limit is 96"),
        ([1], 65, "at most 64"),
        ([VOCAB], 1, "vocabulary"),
    ],
)
def test_requests_that_can_never_run_are_refused(prompt, n, message):
    engine = make_engine(CONFIG)
    events = engine.handle(submit("r", prompt, SamplingParams(n=n, seed=1)))
    assert len(events) == n
    assert all(event.reason == "error" and message in event.error for event in events)
    assert_engine_empty(engine)


@pytest.mark.parametrize("outputs", [{}, {3: []}, {-1: [1]}, {0: [VOCAB]}])
def test_a_request_with_invalid_choices_or_tokens_is_refused(outputs):
    engine = make_engine(CONFIG)
    events = engine.handle(submit("r", [1, 2], SamplingParams(seed=1), outputs=outputs))
    assert [event.reason for event in events] == ["error"] * len(outputs)
    assert_engine_empty(engine)


class Oracle:
    """A drafter that knows the model and sometimes drafts wrong tokens on purpose."""

    group = None

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.params: dict[int, SamplingParams] = {}
        self.tokens: dict[int, tuple[int, list[int]]] = {}
        self.requests: list = []

    def begin(self, requests) -> None:
        for request in requests:
            tokens = request.tokens[: request.length]
            epoch, known = self.tokens.get(request.id, (request.epoch, []))
            assert epoch != request.epoch or tokens[: len(known)] == known, (
                "within an epoch, tokens are only appended"
            )
            self.tokens[request.id] = request.epoch, tokens
        self.requests = list(requests)

    def collect(self, deadline: float) -> dict[int, TokenTree]:
        trees = {}
        for request in self.requests:
            if self.rng.random() < 0.2:
                continue  # too late for this step
            depth = self.rng.randint(0, min(request.depth, request.nodes))
            params = SamplingParams(temperature=0)
            tokens = request.tokens[: request.length]
            draft_tokens = expected_outputs(tokens, params, 0, depth, VOCAB)
            draft_tokens = [t if self.rng.random() < 0.8 else (t + 1) % VOCAB for t in draft_tokens]
            trees[request.id] = chain([tokens[-1], *draft_tokens])
        return trees

    def release(self, ids) -> None:
        for id in ids:
            self.tokens.pop(id, None)


@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.sampled_from((24, 40, 400)),
    budget=st.sampled_from((8, 24, 64)),
    accuracy=st.sampled_from((0.0, 0.5, 1.0)),
    caching=st.booleans(),
)
def test_a_draft_model_changes_when_tokens_come_never_which(seed, num_blocks, budget, accuracy, caching):
    """A draft model changes when tokens arrive, never which tokens: its KV is in the target's blocks, which
    are trimmed, shared, copied and evicted."""
    config = EngineConfig(
        num_blocks=num_blocks, block_size=4, max_model_len=96, max_num_batched_tokens=budget, preempt_every=3,
        enable_prefix_caching=caching, eviction="swap", swap_blocks=30,
    )  # fmt: skip
    requests = random_requests(random.Random(seed), 10, 96)
    engine, collected = run_all(config, requests, draft_model=accuracy)
    assert_exact(requests, collected, 96)
    assert engine.report().preemptions > 0
    assert engine.drafter.trees > 0
    assert engine.executor.accepted > 0 or accuracy < 1


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_a_swapped_sequence_comes_back_into_a_pool_that_it_fills(blocks):
    """A swapped sequence that fills the whole pool returns: it needs every block for its KV, so it must not
    wait for one more."""
    length = 4 * blocks
    config = EngineConfig(
        num_blocks=blocks,
        block_size=4,
        max_model_len=length,
        preempt_every=2,
        eviction="swap",
        swap_blocks=30,
    )
    params = SamplingParams(temperature=0, max_tokens=length)
    requests = [submit(str(number), [number], params) for number in range(3)]
    engine, collected = run_all(config, requests)
    assert_exact(requests, collected, length)
    assert engine.report().evictions.blocks_back > 0


@given(seed=st.integers(0, 2**32), num_blocks=st.sampled_from((24, 40, 400)), budget=st.sampled_from((8, 64)))
def test_draft_tokens_change_when_tokens_come_never_which(seed, num_blocks, budget):
    config = EngineConfig(
        num_blocks=num_blocks, block_size=4, max_model_len=96, max_num_batched_tokens=budget, preempt_every=7
    )
    requests = random_requests(random.Random(seed), 10, 96)
    drafter = Oracle(seed)
    engine, collected = run_all(config, requests, drafter)
    assert_exact(requests, collected, 96)
    assert engine.report().preemptions > 0
    assert not drafter.tokens, "every sequence was released"


def test_accepted_draft_tokens_save_steps():
    params = SamplingParams(temperature=0, max_tokens=40)
    request = submit("r", [1, 2, 3], params)
    engine, collected = run_all(CONFIG, [request], Oracle(3))
    assert_exact([request], collected, 96)
    assert engine.executor.accepted > 10
    assert engine.report().steps < 30


class RecordingSpeculation(Speculation):
    """A policy that records how many latency requirements limit the choice of draft tokens."""

    def begin(self, batch):
        self.decoding = len(batch.requirements)
        return super().begin(batch)


@pytest.mark.parametrize(("tokens_left", "decoding"), [(1, 1), (2, 2)])
def test_a_request_that_gets_its_last_token_does_not_limit_draft_tokens_of_others(tokens_left, decoding):
    """A request that gets its last token does not limit the draft tokens of others. Steps stay short for
    requests without draft tokens, unless these have no further steps."""
    speculation = RecordingSpeculation(parse_policy("fixed:4"), lambda rows, kv_tokens: 1.0)
    engine = make_engine(CONFIG, Oracle(3), speculation=speculation)
    params = SamplingParams(temperature=0, max_tokens=30)
    alone = SamplingParams(
        temperature=0, max_tokens=1 + tokens_left, speculation=SpeculationLimits(enabled=False)
    )
    engine.handle(submit("drafted", [1, 2, 3], params))
    engine.handle(submit("co-batched", [4, 5, 6], alone))
    engine.step()
    engine.step()
    assert speculation.decoding == decoding
