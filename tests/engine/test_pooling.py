"""Requests whose result is a vector work with prompts in chunks, shared prefixes, preemption and
cancellation."""

from random import Random

import numpy as np
import pytest

from streamserve.contracts.engine_config import EngineConfig
from streamserve.protocol.messages import Cancel
from streamserve.protocol.sampling import Pooling, SamplingParams
from tests.engine.drive import VOCAB, Collected, finish, make_engine, submit

POOLED = SamplingParams(max_tokens=0, pooling=Pooling())
CONFIG = EngineConfig(num_blocks=40, block_size=4, max_num_batched_tokens=24, max_chunk=10, max_num_seqs=4)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("preempt_every", [0, 3])
def test_each_request_gets_its_vector_once(seed: int, preempt_every: int) -> None:
    rng = Random(seed)
    config = EngineConfig(**{name: getattr(CONFIG, name) for name in CONFIG.__struct_fields__} | {
        "preempt_every": preempt_every, "swap_blocks": rng.choice((0, 20)),
    })  # fmt: skip
    engine, collected = make_engine(config), Collected()
    shared = [rng.randrange(VOCAB) for _ in range(20)]
    prompts = {
        f"r{n}": shared[: rng.randrange(20)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 60))]
        for n in range(20)
    }
    cancelled = set(rng.sample(sorted(prompts), 4))
    for name, prompt in prompts.items():
        collected.take(engine.handle(submit(name, prompt, POOLED)))
        collected.take(engine.step())
        if name in cancelled and name not in collected.vectors:
            collected.take(engine.handle(Cancel(name)))
    finish(engine, collected)
    assert not collected.tokens
    for name, prompt in prompts.items():
        if name in collected.vectors:
            assert np.frombuffer(collected.vectors[name], "<f4").astype(int).tolist() == prompt
            assert collected.finish[name, 0] == "stop"
        else:
            assert name in cancelled
            assert collected.finish[name, 0] == "abort"
    assert len(collected.vectors) >= 16
    assert engine.report().prefix_hits > 0
    assert bool(engine.report().preemptions) == bool(preempt_every)


def test_a_drafter_drafts_nothing_for_them() -> None:
    engine, collected = make_engine(CONFIG, draft_model=0.9), Collected()
    engine.handle(submit("vector", [1, 2, 3], POOLED))
    engine.handle(submit("text", [1, 2, 3], SamplingParams(max_tokens=9, seed=1)))
    finish(engine, collected)
    assert np.frombuffer(collected.vectors["vector"], "<f4").tolist() == [1, 2, 3]
    assert len(collected.tokens["text", 0]) == 9
    assert ("vector", 0) not in collected.tokens


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 1},
        {"n": 2},
        {"prompt_logprobs": 0},
        {"pooling": Pooling("logits")},
        {"pooling": Pooling("last", (1,))},
    ],
)
def test_pooling_has_no_output(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="pooling"):
        SamplingParams(**{"max_tokens": 0, "pooling": Pooling(), **fields})
