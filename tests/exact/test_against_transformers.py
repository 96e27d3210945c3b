"""Greedy text and log-probabilities are those of transformers, however prompts are chunked and preempted."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from streamserve.engine.engine import Engine
from streamserve.execution.load import load
from streamserve.protocol.config import Backend, ModelConfig
from streamserve.protocol.messages import Admitted, Submit, Token
from streamserve.protocol.sampling import SamplingParams
from tests.checkpoints import make_checkpoint, reference_model
from tests.conftest import Scale

MAX_OUTPUT = 64
MAX_PROMPT = 1500
CLOSE = 1e-4
"""Reference logits closer than this are a tie that float32 may decide either way."""

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
    }},
    "mistral": {"sliding_window": 48, "head_dim": 16},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "phi3": {"sliding_window": 300, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096,
        "factor": 8.0, "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5], "long_factor": [3.0] * 8,
    }},
    "granite": {
        "embedding_multiplier": 1.7, "residual_multiplier": 0.6, "attention_multiplier": 0.4,
        "logits_scaling": 0.9,
    },
    "smollm3": {"no_rope_layer_interval": 2},
    "olmo2": {},
    "olmo3": {"sliding_window": 48, "num_hidden_layers": 4},
    "gemma2": {
        "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 48, "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 6.0,
    },
    "gemma3_text": {
        "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 48, "sliding_window_pattern": 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "qwen2_moe": {
        "num_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80, "num_hidden_layers": 3, "mlp_only_layers": [1],
    },
    "qwen3_moe": {
        "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "head_dim": 32,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 48},
    "gpt_oss": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 48,
        "swiglu_limit": 1.5, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "truncate": False,
            "original_max_position_embeddings": 256,
        },
    },
}  # fmt: skip


EVERY_CASE = ("llama", "mistral", "qwen2", "qwen3")
"""The models that run in every case. The others differ from them in what a layer computes alone."""

RIGHT_SINCE = {"gemma2": (5, 21), "gpt_oss": (5, 19)}
"""The versions of transformers since which it computes these models as here: 5.17 did not."""

MIXTURES = ("qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss")
"""Models whose rows meet others in their experts: with the kernels they run in every case."""


@dataclass(frozen=True)
class Case:
    """The settings of an engine, and its number of concurrent requests."""

    chunk: int = 512
    concurrency: int = 3
    blocks: int = 1024
    preempt_every: int = 0
    longest: int = MAX_PROMPT


CASES = {
    "alone": Case(concurrency=1),
    "many": Case(concurrency=32),
    "one-token-chunks": Case(chunk=1, longest=300),
    "odd-chunks": Case(chunk=7),
    "chunks-of-64": Case(chunk=64, concurrency=8),
    "preempted": Case(chunk=64, preempt_every=5),
    "tiny-cache": Case(concurrency=16, blocks=110),
}


BOTH: tuple[Backend, ...] = ("auto", "reference")
RUNS: list[tuple[str, Backend]] = [
    *((name, backend) for name in CASES for backend in BOTH),
    *((name, "device") for name in ("many", "odd-chunks", "preempted", "tiny-cache")),
]


def all_runs() -> list[tuple[str, str, Backend]]:
    """Return the model, case and backend of every run."""
    others = [model for model in MODELS if model not in EVERY_CASE]
    return [
        *((model, *run) for model in EVERY_CASE for run in RUNS),
        *((model, "preempted", backend) for model in others for backend in BOTH),
        *((model, name, "auto") for model in MIXTURES for name in CASES if name != "preempted"),
        *((model, "preempted", "device") for model in others),
    ]


def in_small_runs(model: str, name: str, backend: Backend) -> bool:
    """Return whether a run is among the small counts.

    Of a GPU all are; of the kernels each model preempted, and each case with every third model; of the
    slow backends each case with llama, or with one more model."""
    models, cases = list(MODELS), list(CASES)
    if backend == "device":
        some = (("llama", "odd-chunks"), ("llama", "tiny-cache"), ("gpt_oss", "preempted"))
        return torch.cuda.is_available() or (model, name) in some
    if backend == "reference" and name != "preempted":
        return model == "llama"
    every = 2 if backend == "reference" else 1 if name == "preempted" else 3
    return (models.index(model) + cases.index(name)) % every == 0


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make_checkpoint(folder, request.param, max_position_embeddings=2048, **MODELS[request.param])
    return folder


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Any:
    since = RIGHT_SINCE.get(json.loads((checkpoint / "config.json").read_text())["model_type"], (0, 0))
    if tuple(map(int, version("transformers").split(".")[:2])) < since:
        pytest.skip("transformers before {}.{} computes this model otherwise".format(*since))
    torch.set_num_threads(1)
    return reference_model(checkpoint)


def make_engine(checkpoint: Path, case: Case, backend: Backend = "auto") -> Engine:
    config = ModelConfig(
        path=str(checkpoint), dtype="float32", backend=backend, threads=1, num_blocks=case.blocks,
        max_model_len=MAX_PROMPT + MAX_OUTPUT, max_num_seqs=32, max_num_batched_tokens=max(512, case.chunk),
        max_chunk=case.chunk, preempt_every=case.preempt_every,
    )  # fmt: skip
    loaded = load(config)
    return Engine(loaded.engine_config, loaded.model_info, loaded.executor, lambda: 0.0)


def make_prompts(rng: random.Random, count: int, longest: int, vocabulary: int) -> list[list[int]]:
    """Make prompts of 1 to `longest` tokens, half of them with a shared prefix."""
    head = [rng.randrange(4, vocabulary) for _ in range(longest // 2)]
    prompts = []
    for number in range(count):
        length = (1, longest)[number] if number < 2 else int(longest ** rng.random())
        prompt = [rng.randrange(4, vocabulary) for _ in range(max(1, length))]
        prompts.append((head + prompt)[:longest] if number % 2 else prompt)
    return prompts


@dataclass
class Outcome:
    """Each prompt's tokens with their log-probabilities, and how many prompt tokens were found cached."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    cached: int = 0


def generate(engine: Engine, prompts: list[list[int]], params: SamplingParams, concurrency: int) -> Outcome:
    """Run all prompts, `concurrency` at a time; nothing may be left in the engine afterwards."""
    outcome = Outcome([[] for _ in prompts], [[] for _ in prompts])
    waiting, active = list(enumerate(prompts)), set()
    while waiting or active:
        while waiting and len(active) < concurrency:
            number, prompt = waiting.pop(0)
            seeded = msgspec.structs.replace(params, seed=number)
            engine.handle(Submit(str(number), 0, prompt, seeded, {0: []}, float(number)))
            active.add(number)
        for event in engine.step():
            if isinstance(event, Admitted):
                outcome.cached += event.cached
            if isinstance(event, Token):
                outcome.tokens[int(event.request)].append(event.token)
                if event.logprob is not None:
                    outcome.logprobs[int(event.request)].append(event.logprob)
                if event.finish:
                    active.discard(int(event.request))
    while engine.has_work:
        engine.step()
    assert engine.report().blocks_live == 0
    return outcome


@torch.no_grad()
def compare(
    reference: Any, prompt: list[int], tokens: list[int], logprobs: list[float]
) -> tuple[int, int, float]:
    """Return the numbers of ties decided differently and of other mismatches, and the largest difference of a
    log-probability. Every token is compared given the text before it: a tie hides no later
    mismatch."""
    rows = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :].float()
    expected = torch.log_softmax(rows, dim=-1)
    ours = torch.tensor(tokens)
    best = expected.max(dim=-1).values
    chosen = expected.gather(1, ours[:, None])[:, 0]
    differ = ours != expected.argmax(dim=-1)
    ties = int((differ & (best - chosen < CLOSE)).sum())
    error = float((chosen - torch.tensor(logprobs)).abs().max())
    return ties, int(differ.sum()) - ties, error


@pytest.mark.parametrize(("checkpoint", "name", "backend"), all_runs(), indirect=["checkpoint"])
def test_greedy_text_is_the_references(
    request: pytest.FixtureRequest,
    checkpoint: Path,
    name: str,
    backend: Backend,
    scale: Scale,
    record: Callable[..., None],
) -> None:
    if not scale.full and not in_small_runs(request.node.callspec.params["checkpoint"], name, backend):
        pytest.skip("with --full")
    case, reference = CASES[name], request.getfixturevalue("reference")
    if not scale.full:
        case = replace(case, longest=min(case.longest, 400))
    count = scale.pick(min(36, max(6, case.concurrency * 3 // 2)), 36)
    engine = make_engine(checkpoint, case, backend)
    prompts = make_prompts(random.Random(scale.seed), count, case.longest, engine.model.vocab_size)
    params = SamplingParams(temperature=0, max_tokens=MAX_OUTPUT, ignore_eos=True, logprobs=0)
    outcome = generate(engine, prompts, params, case.concurrency)
    ties, largest = 0, 0.0
    for prompt, tokens, logprobs in zip(prompts, outcome.tokens, outcome.logprobs, strict=True):
        assert len(tokens) == MAX_OUTPUT
        tie, wrong, error = compare(reference, prompt, tokens, logprobs)
        assert wrong == 0
        ties += tie
        largest = max(largest, error)
    report = engine.report()
    total = count * MAX_OUTPUT
    assert ties <= total / 1000
    assert largest < 1e-4
    assert outcome.cached > 0
    assert max(map(len, prompts)) > case.chunk or case.chunk > case.longest
    if case.preempt_every or case.blocks < 200:
        assert report.preemptions > 0
    record(prompts=count, tokens=total, ties=ties, largest_logprob_error=largest, steps=report.steps,
           preemptions=report.preemptions, cached_tokens=outcome.cached, seed=scale.seed)  # fmt: skip


def test_seeded_text_is_the_same_alone_in_a_batch_chunked_and_preempted(
    request: pytest.FixtureRequest, checkpoint: Path, scale: Scale, record: Callable[..., None]
) -> None:
    """In small runs each model has one of the cases besides "alone"; each case has every third model."""
    others = ["many", "odd-chunks", "preempted"]
    if not scale.full:
        others = others[list(MODELS).index(request.node.callspec.params["checkpoint"]) % 3 :][:1]
    count = scale.pick(8, 64)
    params = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=MAX_OUTPUT, ignore_eos=True)
    texts, preemptions = {}, 0
    for name in ("alone", *others):
        engine = make_engine(checkpoint, CASES[name])
        prompts = make_prompts(random.Random(scale.seed), count, 200, engine.model.vocab_size)
        texts[name] = generate(engine, prompts, params, CASES[name].concurrency).tokens
        preemptions += engine.report().preemptions
    for name in others:
        assert texts[name] == texts["alone"], name
    assert (preemptions > 0) == ("preempted" in others)
    assert len({tuple(text) for text in texts["alone"]}) > count // 2
    record(requests=count, tokens=count * MAX_OUTPUT, preemptions=preemptions, seed=scale.seed)
