"""The output of a prompt stream is the output of the final prompt submitted as a whole."""

import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.contracts.engine_config import EngineConfig
from streamserve.contracts.tree import chain
from streamserve.engine.status import SequenceStatus
from streamserve.protocol.messages import Cancel, Edit, OutputWithdrawn, Progress
from streamserve.protocol.sampling import SamplingParams
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
from tests.engine.edits import PARAMS, StreamClient, opened, run_scripts

CONFIG = EngineConfig(num_blocks=64, block_size=4, max_model_len=96, max_num_batched_tokens=32, max_chunk=16)


def steps(engine, collected, limit=100) -> int:
    """Run steps until the engine has no work, though prompt streams are still open; return the number of
    steps."""
    for count in range(limit):
        if not engine.has_work:
            return count
        collected.take(engine.step())
    raise AssertionError("the engine still has work")


def test_a_prompt_stream_is_computed_and_waits() -> None:
    engine, collected = make_engine(CONFIG), Collected()
    collected.take(engine.handle(opened(list(range(20)))))
    steps(engine, collected)
    assert collected.progress["r"] == Progress("r", 0, 0, computed=19, tokens=20)
    assert not collected.tokens
    collected.take(engine.handle(Edit("r", 0, 1, 20, [50, 51], finish=True)))
    assert steps(engine, collected) == 6 + 1
    assert collected.tokens["r", 0] == expected_outputs([*range(20), 50, 51], PARAMS, 0, 6, VOCAB)
    assert_engine_empty(engine)
    streams = engine.report().streams
    assert (streams.chunks, streams.finished, streams.tokens, streams.computed_before) == (1, 1, 22, 19)


def test_an_idle_prompt_stream_is_swapped_out_and_back_in_for_as_many_new_tokens() -> None:
    config = msgspec.structs.replace(CONFIG, num_blocks=18, eviction="swap", swap_blocks=36)
    engine, collected = make_engine(config), Collected()
    first, second = list(range(32)), list(range(40, 88))
    for name, prompt in (("first", first), ("second", second)):
        collected.take(engine.handle(opened(prompt, name)))
        steps(engine, collected)
    (waiting,), (there,) = engine.scheduler.of("first"), engine.scheduler.of("second")
    assert waiting.status is SequenceStatus.SWAPPED, "the second stream is computed while the first is idle"
    assert there.status is SequenceStatus.RUNNING
    collected.take(engine.handle(Edit("first", 0, 1, 32, list(range(8)))))
    assert not waiting.todo(idle=False), (
        "a quarter more tokens do not justify swapping it in while others have work"
    )
    collected.take(engine.handle(Edit("first", 0, 2, 40, list(range(24)))))
    assert waiting.todo(idle=False) == 32
    prompts = {"first": [*first, *range(8), *range(24)], "second": second}
    for name, prompt in prompts.items():
        version = engine.scheduler.of(name)[0].stream.version + 1
        collected.take(engine.handle(Edit(name, 0, version, len(prompt), [7], finish=True)))
    finish(engine, collected)
    for name, prompt in prompts.items():
        assert collected.tokens[name, 0] == expected_outputs([*prompt, 7], PARAMS, 0, 6, VOCAB)
    assert engine.report().evictions.blocks_back > 0
    assert_engine_empty(engine)


def test_an_empty_prompt_may_be_opened_but_not_finished() -> None:
    engine, collected = make_engine(CONFIG), Collected()
    assert engine.handle(opened([])) == []
    assert not engine.has_work
    collected.take(engine.handle(Edit("r", 0, 1, 0, [1, 2, 3])))
    steps(engine, collected)
    (event,) = engine.handle(Edit("r", 0, 2, 0, [], finish=True))
    assert event.error == "the prompt is empty"
    steps(engine, collected)
    assert_engine_empty(engine)


@pytest.mark.parametrize(
    ("edit", "error"),
    [
        (Edit("r", 0, 1, 0, [1] * 97), "limit"),
        (Edit("r", 0, 1, 0, [VOCAB]), "vocabulary"),
        (Edit("r", 0, 1, 9, []), "keeps 9 of 3"),
    ],
)
def test_an_edit_that_cannot_be_served_ends_the_request(edit: Edit, error: str) -> None:
    engine = make_engine(CONFIG)
    engine.handle(opened([1, 2, 3]))
    engine.step()
    (event,) = engine.handle(edit)
    assert error in event.error
    finish(engine, Collected())


def test_edits_of_unknown_or_finished_prompts_are_ignored() -> None:
    engine = make_engine(CONFIG)
    engine.handle(opened([1, 2, 3]))
    assert engine.handle(Edit("other", 0, 1, 0, [9])) == []
    assert engine.handle(Edit("r", 7, 1, 0, [9])) == []
    engine.handle(Edit("r", 0, 1, 3, [], finish=True))
    assert engine.handle(Edit("r", 0, 2, 0, [9])) == [], "its prompt is finished"
    collected = Collected()
    finish(engine, collected)
    assert collected.tokens["r", 0] == expected_outputs([1, 2, 3], PARAMS, 0, 6, VOCAB)


def test_a_retained_prefix_is_not_recomputed() -> None:
    engine, collected = make_engine(CONFIG), Collected()
    engine.handle(opened(list(range(22))))
    steps(engine, collected)
    (progress,) = engine.handle(Edit("r", 0, 1, 10, [60, 61, 62], finish=True))
    assert progress == Progress("r", 0, 1, computed=10, tokens=13)
    assert steps(engine, collected) == 6 + 1
    prompt = [*range(10), 60, 61, 62]
    assert collected.tokens["r", 0] == expected_outputs(prompt, PARAMS, 0, 6, VOCAB)
    assert engine.report().streams.invalidated == 21 - 10


def test_a_partly_retained_shared_block_is_copied() -> None:
    engine, collected = make_engine(CONFIG), Collected()
    engine.handle(opened(list(range(24)), "first"))
    steps(engine, collected)
    engine.handle(opened(list(range(24)), "second"))
    steps(engine, collected)
    engine.handle(Edit("second", 0, 1, 10, [60], finish=True))
    engine.handle(Edit("first", 0, 1, 24, [], finish=True))
    steps(engine, collected)
    assert engine.report().copies_on_write == 1
    assert collected.tokens["first", 0] == expected_outputs(list(range(24)), PARAMS, 0, 6, VOCAB)
    assert collected.tokens["second", 0] == expected_outputs([*range(10), 60], PARAMS, 0, 6, VOCAB)
    assert_engine_empty(engine)


def test_the_tail_is_computed_when_nothing_else_can_run() -> None:
    engine, collected = make_engine(CONFIG), Collected()
    engine.handle(submit("other", [1] * 20, SamplingParams(temperature=0, max_tokens=12)))
    engine.handle(opened(list(range(20)), tail=8))
    for _ in range(8):
        collected.take(engine.step())
    assert engine.scheduler.of("other")
    assert collected.progress["r"].computed == 12
    steps(engine, collected)
    assert collected.progress["r"].computed == 19
    (progress,) = engine.handle(Edit("r", 0, 1, 12, [70, 71, *range(12, 20)], tail=8))
    assert progress.computed == 12
    engine.handle(Cancel("r"))
    finish(engine, collected)


def computed(engine) -> dict[str, int]:
    return {sequence.request: sequence.kv.computed[0] for sequence in engine.scheduler.sequences.values()}


@pytest.mark.parametrize("order", ["slo", "fcfs"])
def test_a_prompt_stream_gets_the_budget_that_complete_prompts_leave(order) -> None:
    engine, collected = make_engine(msgspec.structs.replace(CONFIG, order=order)), Collected()
    engine.handle(opened(list(range(40)), "early", arrival=1.0))
    collected.take(engine.step())
    begun = computed(engine)["early"]
    engine.handle(submit("late", [9] * 50, PARAMS, arrival=2.0))
    while computed(engine)["late"] < 50:
        collected.take(engine.step())
        assert computed(engine)["early"] == begun
    steps(engine, collected)
    assert computed(engine) == {"early": 39}
    engine.handle(Cancel("early"))
    finish(engine, collected)


def test_a_complete_prompt_does_not_wait_for_the_prefix_of_a_prompt_stream() -> None:
    engine, collected = make_engine(CONFIG), Collected()
    engine.handle(opened(list(range(60)), "early", arrival=1.0))
    collected.take(engine.step())
    engine.handle(submit("late", list(range(60)), PARAMS, arrival=2.0))
    collected.take(engine.step())
    assert computed(engine)["late"] > 0
    steps(engine, collected)
    engine.handle(Cancel("early"))
    finish(engine, collected)


def test_edit_stable_tokens_are_computed_first() -> None:
    """Edit-stable tokens are computed first: two prompts are edited, one after its first eight tokens, the
    other after its second."""
    engine, collected = make_engine(CONFIG), Collected()
    for name, retained in (("loose", 2), ("firm", 8)):
        engine.handle(opened(list(range(12)), name))
        for version in (1, 2, 3):
            engine.handle(Edit(name, 0, version, retained, [50 + version, 60, 61, 62]))
    collected.take(engine.step())
    assert computed(engine)["firm"] == 8
    assert computed(engine)["loose"] == 2
    steps(engine, collected)
    for name in ("loose", "firm"):
        engine.handle(Cancel(name))
    finish(engine, collected)


def test_an_early_answer_stands_if_nothing_changes() -> None:
    engine, collected = make_engine(CONFIG), Collected()
    engine.handle(opened([1, 2, 3], answer_early=True))
    steps(engine, collected)
    want = expected_outputs([1, 2, 3], PARAMS, 0, 6, VOCAB)
    assert collected.tokens["r", 0] == want[:-1], "the last token is held back: more may come"
    collected.take(engine.handle(Edit("r", 0, 1, 3, [], finish=True)))
    assert collected.tokens["r", 0] == want
    assert collected.finish["r", 0] == "length"
    assert collected.withdrawn == 0
    finish(engine, collected)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("count", [2, 20])
def test_an_early_answer_is_withdrawn_if_the_prompt_changes(n: int, count: int) -> None:
    params = SamplingParams(n=n, seed=5, max_tokens=9)
    engine, collected = make_engine(CONFIG), Collected()
    engine.handle(opened([1, 2, 3], params=params, answer_early=True))
    for _ in range(count):
        collected.take(engine.step())
    assert len(collected.tokens) == n
    events = engine.handle(Edit("r", 0, 1, 2, [7, 8], finish=True))
    assert OutputWithdrawn("r", 0, 1) in events
    collected.take(events)
    finish(engine, collected)
    assert engine.report().streams.withdrawn > 0
    for choice in range(n):
        assert collected.tokens["r", choice] == expected([1, 2, 7, 8], params, choice, 96)


def test_an_edit_during_a_step_is_applied_after_its_commit() -> None:
    engine, collected = make_engine(CONFIG), Collected()
    engine.handle(opened(list(range(30))))
    run = engine.executor.run

    def run_and_edit(plan):
        engine.executor.run = run
        result = run(plan)
        assert engine.handle(Edit("r", 0, 1, 5, [80], finish=True)) == []
        return result

    engine.executor.run = run_and_edit
    events = engine.step()
    assert Progress("r", 0, 1, computed=5, tokens=6) in events
    finish(engine, collected)
    assert collected.tokens["r", 0] == expected_outputs([0, 1, 2, 3, 4, 80], PARAMS, 0, 6, VOCAB)


def test_prompt_logprobs_of_a_prompt_stream_are_refused() -> None:
    (event,) = make_engine(CONFIG).handle(opened([1], params=SamplingParams(prompt_logprobs=1)))
    assert "prompt_logprobs" in event.error


class Oracle:
    """A drafter whose draft tokens are accepted about half of the time."""

    group = None

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.requests = rng, []

    def begin(self, requests) -> None:
        self.requests = requests

    def collect(self, deadline):
        trees = {}
        for request in self.requests:
            tokens = request.tokens[: request.length]
            prompt = tokens[: len(tokens) - request.output]
            draft_tokens = expected_outputs(
                prompt, request.params, request.choice, request.output + request.depth, VOCAB
            )[request.output :]
            if self.rng.random() < 0.3:
                draft_tokens[-1] = (draft_tokens[-1] + 1) % VOCAB
            if request.nodes:
                trees[request.id] = chain([tokens[-1], *draft_tokens[: request.nodes]])
        return trees

    def release(self, ids) -> None:
        pass


def run_scripts_on_fake_model(
    rng: random.Random, config: EngineConfig, drafter: str, scripts: int
) -> Counter:
    """Run clients on the fake model, and assert that every output is the output of the final prompt.
    `drafter`: with KV (model), without (oracle), or none."""
    oracle = Oracle(rng) if drafter == "oracle" else None
    engine = make_engine(config, oracle, draft_model=0.6 if drafter == "model" else None)
    clients = [StreamClient(rng, number, 60) for number in range(scripts)]
    count, collected = run_scripts(rng, engine, clients)
    for client in clients:
        for choice in range(client.params.n):
            want = expected(client.prompt, client.params, choice, config.max_model_len)
            assert collected.tokens[client.name, choice] == want
            assert (client.name, choice) in collected.finish
    assert_engine_empty(engine)
    count["accepted"] = engine.executor.accepted
    return count


@given(
    seed=st.integers(0, 2**32),
    order=st.sampled_from(("slo", "arrival", "fcfs", "lcas", "mcps")),
    eviction=st.sampled_from(("recompute", "swap", "cost")),
    num_blocks=st.sampled_from((24, 26, 40)),
    swap_blocks=st.sampled_from((0, 6, 40, 400)),
    preempt_every=st.sampled_from((0, 0, 2, 5)),
    caching=st.booleans(),
    drafter=st.sampled_from(("none", "oracle", "model")),
)
def test_any_script_gives_the_text_of_its_final_prompt(
    seed, order, eviction, num_blocks, swap_blocks, preempt_every, caching, drafter
) -> None:
    config = EngineConfig(
        num_blocks=num_blocks, block_size=4, max_model_len=96, max_num_seqs=6, max_num_batched_tokens=24,
        max_chunk=10, preempt_every=preempt_every, enable_prefix_caching=caching, order=order,
        eviction=eviction, swap_blocks=swap_blocks,
    )  # fmt: skip
    run_scripts_on_fake_model(random.Random(seed), config, drafter, scripts=8)


def test_hundreds_of_scripts_with_everything_at_once(scale, record) -> None:
    rng, total = random.Random(scale.seed), Counter()
    while total["scripts"] < scale.pick(60, 300):
        config = EngineConfig(
            num_blocks=26, block_size=4, max_model_len=96, max_num_seqs=6, max_num_batched_tokens=24,
            max_chunk=10, preempt_every=rng.choice((0, 3)), eviction=rng.choice(("swap", "cost")),
            swap_blocks=60, order=rng.choice(("slo", "arrival", "fcfs", "lcas", "mcps")),
        )  # fmt: skip
        total += run_scripts_on_fake_model(rng, config, rng.choice(("oracle", "model")), scripts=10)
    record(**total)
    for what in ("mid_step", "invalidated", "withdrawn", "swaps", "swapped_back", "copies", "accepted"):
        assert total[what] > 0, what
