"""Greedy text and log-probabilities equal those of transformers, however prompts are chunked and
preempted."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from streamserve.protocol.config import Backend
from streamserve.protocol.sampling import SamplingParams
from tests.checkpoints import make_checkpoint, reference_model
from tests.conftest import Scale
from tests.exact.generating import MAX_OUTPUT, MODELS, Case, generate, make_engine, make_prompts

CLOSE = 1e-4
"""If two reference logits are closer than this, float32 may decide either way: a tie."""


EVERY_CASE = ("llama", "mistral", "qwen2", "qwen3")
"""Models that run in every case. The others differ from them only in what a single layer computes."""

RIGHT_SINCE = {"gemma2": (5, 21), "gpt_oss": (5, 19)}
"""The first version of transformers that computes a model as this project does: 5.17 did not."""

MIXTURES = ("qwen2_moe", "qwen3_moe", "olmoe", "mixtral", "gpt_oss", "glm4_moe")
"""Models in which a row's computation involves other rows, in experts. With the kernels they run in every
case."""


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

    On a GPU all runs are. With the kernels, each model runs preempted, and each case with every third model.
    On the slow backends, each case runs with llama or with one more model."""
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


@torch.no_grad()
def compare(
    reference: Any, prompt: list[int], tokens: list[int], logprobs: list[float]
) -> tuple[int, int, float]:
    """Return the numbers of ties decided differently and of other mismatches, and the largest difference of a
    log-probability. Every token is compared given the text before it: so a tie hides no later mismatch."""
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
        case = replace(case, longest=min(case.longest, 250))
    count = scale.pick(min(24, max(5, case.concurrency * 3 // 2)), 36)
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
    """Seeded text is the same alone, in a batch, chunked and preempted. In small runs each model has one case
    besides "alone", and each case every third model."""
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
