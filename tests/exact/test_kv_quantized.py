"""With 8-bit KV, text is a function of the request alone. Every query reads keys and values as they are
stored, including those of its own step, so chunks, batches, preemption, swaps and shared blocks change no
bit."""

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from streamserve.engine.engine import Engine
from streamserve.execution.loading.load import load
from streamserve.protocol.config import Eviction, KVCacheDType, ModelConfig
from streamserve.protocol.messages import Submit, Token
from streamserve.protocol.sampling import SamplingParams
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.exact.generating import Outcome, generate, make_prompts

LONGEST = 300
MAX_OUTPUT = 40
SAMPLED = SamplingParams(temperature=1.0, max_tokens=MAX_OUTPUT, ignore_eos=True, logprobs=0)


@dataclass(frozen=True)
class Case:
    """The settings of an engine, and the number of its concurrent requests."""

    chunk: int = 512
    concurrency: int = 16
    blocks: int = 1024
    preempt_every: int = 0
    eviction: Eviction = "recompute"
    kv: KVCacheDType = "int8"


ALONE = Case(concurrency=1)
CASES = {
    "batched": Case(),
    "one-token-chunks": Case(chunk=1),
    "chunks-of-7": Case(chunk=7),
    "chunks-of-64": Case(chunk=64),
    "swapped": Case(chunk=64, preempt_every=5, eviction="swap"),
    "recomputed": Case(chunk=64, preempt_every=5),
    "few-blocks": Case(blocks=60),
}


@pytest.fixture(scope="module", params=["llama-float32", "llama-bfloat16", "mistral-bfloat16"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, dtype = request.param.split("-")
    window = {"sliding_window": 48} if architecture == "mistral" else {}
    folder = tmp_path_factory.mktemp(request.param)
    return make_checkpoint(folder, architecture, dtype, head_dim=24, max_position_embeddings=1024, **window)


def make_engine(checkpoint: Path, case: Case) -> Engine:
    config = ModelConfig(
        path=str(checkpoint), threads=2, num_blocks=case.blocks, max_model_len=LONGEST + MAX_OUTPUT,
        max_num_seqs=32, max_chunk=case.chunk, preempt_every=case.preempt_every, eviction=case.eviction,
        swap_space=0.01 if case.eviction == "swap" else 0.0, kv_cache_dtype=case.kv, check=True,
    )  # fmt: skip
    loaded = load(config)
    assert loaded.model_info.row_invariant
    assert loaded.cache.quantized == (case.kv == "int8")
    return Engine(loaded.engine_config, loaded.model_info, loaded.executor, lambda: 0.0)


@pytest.fixture(scope="module")
def prompts(checkpoint: Path, scale: Scale) -> list[list[int]]:
    vocabulary = make_engine(checkpoint, ALONE).model.vocab_size
    return make_prompts(random.Random(scale.seed), scale.pick(10, 48), LONGEST, vocabulary)


@pytest.fixture(scope="module")
def alone(checkpoint: Path, prompts: list[list[int]]) -> Outcome:
    return generate(make_engine(checkpoint, ALONE), prompts, SAMPLED, 1)


@pytest.mark.each_value
@pytest.mark.parametrize("name", CASES)
def test_text_is_that_of_a_request_alone(
    checkpoint: Path, prompts: list[list[int]], alone: Outcome, name: str
) -> None:
    case = CASES[name]
    engine = make_engine(checkpoint, case)
    outcome = generate(engine, prompts, SAMPLED, case.concurrency)
    assert outcome.tokens == alone.tokens
    assert outcome.logprobs == alone.logprobs
    report = engine.report()
    assert report.prefix_hits > 0
    assert max(map(len, prompts)) > case.chunk or case.chunk > LONGEST
    if case.preempt_every or case.blocks < 100:
        assert report.preemptions > 0
    if case.eviction == "swap":
        assert report.evictions is not None
        assert report.evictions.blocks_back > 0


def test_log_probabilities_are_near_those_of_plain_kv_and_not_equal(
    checkpoint: Path, prompts: list[list[int]], alone: Outcome
) -> None:
    """Log-probabilities of the first token, before texts can differ, are close to those with plain KV and not
    equal."""
    plain = generate(make_engine(checkpoint, Case(kv="auto")), prompts, SAMPLED, 16)
    differences = [
        abs(ours[0] - theirs[0])
        for ours, theirs, tokens, other in zip(
            alone.logprobs, plain.logprobs, alone.tokens, plain.tokens, strict=True
        )
        if tokens[0] == other[0]
    ]
    assert len(differences) > len(prompts) // 2
    assert 0 < max(differences) < 0.5


def test_choices_that_copy_on_write_are_those_of_a_choice_alone(
    checkpoint: Path, prompts: list[list[int]]
) -> None:
    params = SamplingParams(n=3, seed=4, temperature=1.0, max_tokens=MAX_OUTPUT, ignore_eos=True)
    together, single = make_engine(checkpoint, Case(chunk=64)), make_engine(checkpoint, ALONE)
    for number, prompt in enumerate(prompts[:4]):
        texts = run(
            together,
            Submit(str(number), prompt, params, outputs={choice: [] for choice in range(3)}),
        )
        for choice, tokens in texts.items():
            assert run(single, Submit("r", prompt, params, outputs={choice: []})) == {choice: tokens}
        assert len(texts) == 3
        assert len(set(map(tuple, texts.values()))) > 1
    assert together.report().copies_on_write > 0


def run(engine: Engine, request: Submit) -> dict[int, list[int]]:
    """Return the tokens of each choice of a request."""
    texts: dict[int, list[int]] = {}
    engine.handle(request)
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Token):
                texts.setdefault(event.choice, []).append(event.token)
    assert engine.report().blocks_live == 0
    return texts
