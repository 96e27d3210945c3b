"""Speculation changes when tokens arrive, never which tokens, for every drafter, shape and interruption."""

import random
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from streamserve.baselines.speculation import parse_policy
from streamserve.contracts.plan import AsyncExecutor
from streamserve.execution.drafters.model import ModelDrafter
from streamserve.protocol.config import Backend, SpeculationMode
from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.messages import DraftVerified, Submit, Token
from streamserve.protocol.reports import SpeculationReport
from streamserve.protocol.sampling import SamplingParams, SpeculationLimits
from streamserve.speculation.controller import Speculation
from streamserve.text.tokenizer import Tokenizer
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.exact.speculating import (
    MAX_OUTPUT,
    Case,
    Watched,
    make_engine,
    make_pair,
    make_requests,
    run,
    serve,
    with_padding,
)

CASES = {
    "chain": Case(),
    "tree": Case(policy="fixed-tree:3x3"),
    "goodput": Case(policy="goodput"),
    "self": Case(draft="self:1"),
    "self-tree": Case(draft="self:1", policy="fixed-tree:2x3"),
    "ngram": Case(draft="ngram"),
    "reference": Case(backend="reference", policy="fixed-tree:2x2"),
    "device": Case(backend="device", policy="fixed-tree:2x2"),
    "device-chain": Case(backend="device", policy="fixed:5"),
    "device-goodput": Case(backend="device", policy="goodput", preempt_every=9),
    "int8": Case(quantization="int8", policy="fixed-tree:2x3"),
    "int4-self": Case(quantization="int4:32", draft="self:1", preempt_every=7),
    "int8-kv": Case(kv_cache_dtype="int8", policy="fixed-tree:2x3", chunk=7),
    "int8-kv-self": Case(kv_cache_dtype="int8", draft="self:1", policy="fixed-tree:2x3", preempt_every=7),
    "int8-kv-ngram": Case(kv_cache_dtype="int8", draft="ngram", quantization="int8", blocks=24),
    "odd-chunks": Case(chunk=7, policy="fixed-tree:2x4"),
    "preempted": Case(chunk=64, preempt_every=5, policy="fixed:6"),
    "tiny-cache": Case(blocks=24, policy="fixed-tree:2x3"),
}
ROW_INVARIANT = [name for name, case in CASES.items() if case.backend == "auto"]


def dtype_in_small_runs(name: str) -> str:
    """Return the data type of a case in small runs: every second row-invariant case is in bfloat16."""
    return "bfloat16" if name in ROW_INVARIANT[1::2] else "float32"


ALWAYS = (
    "all draft tokens accepted", "accepted by a sampled request", "stop string",
    "ended by a token or a grammar", "found in the prefix index", "copied on write",
)  # fmt: skip
"""Events that must have happened in every case. (These names are keys of committed results.)"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft"))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in CASES), *((name, "bfloat16") for name in ROW_INVARIANT)],
)
def test_text_is_that_of_plain_decoding(
    pair: tuple[Path, Path], name: str, dtype: str, scale: Scale, record: Callable[..., None]
) -> None:
    if not scale.full and dtype != dtype_in_small_runs(name):
        pytest.skip("with --full")
    case, rng = replace(CASES[name], dtype=dtype), random.Random(scale.seed)
    tokenizer = Tokenizer.from_folder(pair[0])
    kept = {
        "backend": case.backend, "dtype": case.dtype, "quantization": case.quantization,
        "kv_cache_dtype": case.kv_cache_dtype,
    }  # fmt: skip
    plain = make_engine(pair, Case(draft="none", **kept))
    speculating = make_engine(pair, case)
    assert isinstance(speculating.speculation, Watched)
    assert isinstance(speculating.executor, AsyncExecutor) == (case.backend == "device")
    requests = make_requests(rng, scale.pick(8, 64), plain.model.vocab_size)
    expected = serve(plain, requests, 1 if case.dtype == "float32" else 8, tokenizer)
    served = serve(speculating, requests, rng.choice((3, 8, 16)), tokenizer)
    assert (plain.steps_ahead > 0) == (case.backend == "device")
    assert served.texts.keys() == expected.texts.keys()
    for key, one in expected.texts.items():
        other = served.texts[key]
        assert [token.token for token in one] == [token.token for token in other], key
        assert [token.finish for token in one] == [token.finish for token in other], key
        for a, b in zip(one, other, strict=True):
            assert a.logprob is None or abs(a.logprob - b.logprob) < (
                1e-4 if case.dtype == "float32" else 1e-9
            )
    counters, report = speculating.speculation.counters, speculating.report()
    assert counters.accepted > 0
    assert counters.verified >= counters.accepted
    tokens_per_step = 1 + counters.accepted / counters.drafts
    assert tokens_per_step >= 1.5, "tokens of a step with draft tokens"
    assert sum(counters.trees_by_nodes) == sum(counters.trees_by_depth) > 0
    assert sum(n * count for n, count in enumerate(counters.trees_by_nodes, 1)) == counters.verified
    parts = report.step_parts
    assert parts is not None
    assert min(parts.scheduling, parts.draft, parts.target) > 0
    assert parts.scheduling + parts.draft + parts.target <= report.step_seconds
    assert report.speculation == SpeculationReport(**asdict(counters))
    events = served.events + speculating.speculation.events
    events["preempted"], events["found in the prefix index"] = report.preemptions, report.prefix_hits
    events["copied on write"] = report.copies_on_write
    required = list(ALWAYS)
    required += ["a sibling accepted", "KV moved"] if "tree" in case.policy else []
    required += ["preempted"] if case.preempt_every or case.blocks < 100 else []
    required += ["all draft tokens rejected"] if case.policy != "goodput" else []
    if case.policy != "goodput" and case.draft != "ngram":
        required += ["drafted after a prompt", *(["cut by what ends a text"] if scale.full else [])]
    missing = [event for event in required if not events[event]]
    assert not missing
    record(requests=len(requests), sampled=sum(not one.params.greedy for one in requests),
           hot=sum(one.params.temperature >= 0.8 for one in requests), choices=len(served.texts),
           whole=sum(len(text) == MAX_OUTPUT for text in served.texts.values()),
           tokens=sum(map(len, served.texts.values())), steps=report.steps, drafted=counters.drafted,
           verified=counters.verified, accepted=counters.accepted, tokens_a_guessing_step=tokens_per_step,
           events=dict(sorted(events.items())), seed=scale.seed)  # fmt: skip
    speculating.executor.close()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"frequency_penalty": 0.6, "repetition_penalty": 1.2},
        {"presence_penalty": 0.5, "min_tokens": 60, "ignore_eos": False},
        {"logit_bias": {7: 4.0}, "allowed_token_ids": tuple(range(5, 60))},
    ],
)
def test_a_draft_model_equal_to_the_target_is_always_accepted(
    pair: tuple[Path, Path], settings: dict[str, Any]
) -> None:
    """A draft model that is the target itself is always accepted: greedy and sampled with the shared noise,
    whatever the sampling parameters do to the logits. (top_k is set because a draft model considers only its
    likeliest tokens.)"""
    target, _ = pair
    engine = make_engine((target, target), Case(policy="fixed:5"))
    for temperature in (0.0, 1.0):
        requests = [
            Submit(str(n), [5 + n, 9], SamplingParams(**{
                "temperature": temperature, "top_k": 20, "seed": n, "max_tokens": 60, "ignore_eos": True,
                **settings}), outputs={0: []})
            for n in range(4)
        ]  # fmt: skip
        before = (engine.speculation.counters.verified, engine.speculation.counters.accepted)
        run(engine, requests, 4)
        verified = engine.speculation.counters.verified - before[0]
        accepted = engine.speculation.counters.accepted - before[1]
        assert verified > 100
        # Draft tokens after the last requested token count as verified, not as rejected.
        assert accepted >= verified - 4 * 5


def test_forked_choices_speculate_independently(pair: tuple[Path, Path]) -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=40, ignore_eos=True)
    request = Submit("r", [7, 8, 9, 10, 11] * 5, params, outputs={0: [], 1: [], 2: []}, arrival=0.0)
    texts = []
    for case in (Case(draft="none"), Case(policy="fixed:4")):
        engine, outputs = make_engine(pair, case), {0: [], 1: [], 2: []}
        engine.handle(request)
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, Token):
                    outputs[event.choice].append(event.token)
        texts.append(outputs)
        assert engine.report().blocks_live == 0
        assert engine.report().copies_on_write > 0
    assert texts[0] == texts[1]
    assert engine.speculation.counters.accepted > 0


def test_a_draft_model_prefills_along_with_the_target(pair: tuple[Path, Path]) -> None:
    """A draft model prefills one chunk after the target, so little is left to prefill at the first draft
    request."""
    prompt, chunk = list(range(5, 165)), 16
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    request = Submit("r", prompt, params, outputs={0: []})
    engine = make_engine(pair, Case(policy="fixed:3", chunk=chunk, preempt_every=7))
    assert isinstance(engine.drafter, ModelDrafter)
    received, begin = [], engine.drafter.begin
    engine.drafter.begin = lambda requests: (received.extend(requests), begin(requests))[1]
    found = run(engine, [request], 1)["r"]
    prefills = [request for request in received if not request.depth]
    drafts = [request for request in received if request.depth]
    assert len(prefills) >= len(prompt) // chunk - 2  # The last chunk is read with the first draft request.
    assert all(one.length - one.computed <= chunk for one in prefills)
    assert drafts[0].computed >= len(prompt) - 2 * chunk
    plain = run(make_engine(pair, Case(draft="none")), [request], 1)["r"]
    assert [token.token for token in found] == [token.token for token in plain]
    assert engine.speculation.counters.accepted > 0


@pytest.mark.parametrize(("left", "drafted"), [(3, True), (64, True), (65, False)])
def test_a_step_that_ends_a_prompt_has_draft_tokens_if_little_is_left(
    pair: tuple[Path, Path], left: int, drafted: bool
) -> None:
    """A step that ends a prompt has draft tokens if the draft model has little left to prefill. The first
    output token does not wait for a draft model that has much left."""
    target, _ = pair
    engine = make_engine((target, target), Case(policy="fixed:4", chunk=100))
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    engine.handle(Submit("r", list(range(5, 105 + left)), params, outputs={0: []}))
    found: list[Token] = []
    while not found:
        found = [event for event in engine.step() if isinstance(event, Token)]
    assert (len(found) > 1) == drafted


@pytest.mark.parametrize("policy", ["fixed:4", "fixed-tree:2x3", "goodput"])
def test_rejection_keeps_greedy_text_and_accepts_sampled_draft_tokens(
    pair: tuple[Path, Path], policy: str, scale: Scale
) -> None:
    """Rejection sampling keeps greedy text, and accepts sampled draft tokens.
    tests/execution/compute/test_rejection.py compares the distribution with the target's."""
    plain = make_engine(pair, Case(draft="none"))
    engine = make_engine(pair, Case(policy=policy), mode="rejection")
    requests = make_requests(random.Random(scale.seed), scale.pick(8, 40), plain.model.vocab_size)
    tokenizer = Tokenizer.from_folder(pair[0])
    expected, texts = (serve(one, requests, 4, tokenizer).texts for one in (plain, engine))
    for request in requests:
        for key in ((request.request, choice) for choice in request.outputs):
            greedy = request.params.greedy
            assert not greedy or [t.token for t in expected[key]] == [t.token for t in texts[key]]
            assert texts[key], "sampled requests end as well"
    other = make_engine(pair, Case(policy=policy), mode="rejection")
    again = serve(other, requests, 4, tokenizer).texts
    if policy != "goodput":  # verification may choose other nodes as it learns other costs
        assert [t.token for one in again.values() for t in one] == [
            t.token for one in texts.values() for t in one
        ]
    assert engine.speculation.counters.accepted > 0


def test_the_policy_may_be_changed_between_steps(pair: tuple[Path, Path]) -> None:
    engine, cost = make_engine(pair, Case(policy="off")), lambda rows, kv_tokens: 1.0
    drafted = []
    for policy in ("off", "fixed:3", "off"):
        engine.speculation = Speculation(parse_policy(policy), cost)
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        run(engine, [Submit(policy, [5, 6, 7], params, outputs={0: []})], 1)
        assert engine.report().speculation == engine.speculation.report()
        drafted.append(engine.speculation.counters.drafts)
    assert drafted[0] == drafted[2] == 0 < drafted[1]


def test_a_request_may_limit_or_disable_speculation(pair: tuple[Path, Path]) -> None:
    engine = make_engine(pair, Case(policy="fixed:6"))
    for limits, limit in (
        (SpeculationLimits(enabled=False), 0),
        (SpeculationLimits(max_depth=2), 2),
        (SpeculationLimits(max_nodes=1), 1),
    ):
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, speculation=limits)
        engine.handle(Submit("r", [5, 6, 7], params, outputs={0: []}))
        drafted = []
        while engine.has_work:
            drafted += [event.drafted for event in engine.step() if isinstance(event, DraftVerified)]
        assert max(drafted, default=0) == limit


@pytest.mark.parametrize("backend", ["auto", "device"])
@pytest.mark.parametrize("mode", ["coupled", "rejection"])
@pytest.mark.parametrize(("target_rows", "draft_rows"), [(352, 320), (320, 384)])
def test_a_draft_model_with_other_padding_changes_no_text(
    pair: tuple[Path, Path],
    tmp_path: Path,
    target_rows: int,
    draft_rows: int,
    mode: SpeculationMode,
    backend: Backend,
) -> None:
    """A draft model with other padding changes no text. Requests have prompts and biases with padding tokens,
    and some output them. With rejection sampling, only greedy text equals plain decoding."""
    shutil.copytree(pair[0], tmp_path / "target")
    shutil.copytree(pair[1], tmp_path / "draft")
    padded = with_padding(tmp_path / "target", target_rows), with_padding(tmp_path / "draft", draft_rows)
    tokenizer = Tokenizer.from_folder(padded[0])
    plain = make_engine(padded, Case(draft="none", backend=backend))
    speculating = make_engine(padded, Case(backend=backend), mode)
    requests = make_requests(random.Random(1), 8, target_rows)
    greedy = {request.request for request in requests if request.params.greedy}
    expected = serve(plain, requests, 8, tokenizer).texts
    served = serve(speculating, requests, 8, tokenizer).texts
    assert served.keys() == expected.keys()
    for key, text in served.items():
        if mode == "coupled" or key[0] in greedy:
            assert [token.token for token in text] == [token.token for token in expected[key]], key
    tokens = {token.token for text in served.values() for token in text}
    assert max(tokens) < target_rows
    assert target_rows <= draft_rows or max(tokens) >= draft_rows
    assert speculating.speculation.counters.accepted > 0


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        ("self:0", "1 to 1 of the 2 layers"),
        ("self:2", "1 to 1 of the 2 layers"),
        ("vocabulary", "both need a row for each of the tokenizer's"),
        ("without a tokenizer", "has another vocabulary than"),
        ("tokens", "another vocabulary than"),
    ],
)
def test_a_draft_model_that_does_not_fit_is_refused(
    pair: tuple[Path, Path], tmp_path: Path, draft: str, words: str
) -> None:
    if draft == "vocabulary":
        draft = str(with_padding(make_checkpoint(tmp_path), 290))
    elif draft == "without a tokenizer":
        draft = str(with_padding(make_checkpoint(tmp_path), 330))
        (tmp_path / "tokenizer.json").unlink()
    elif draft == "tokens":
        draft = str(make_checkpoint(tmp_path))
        text = (tmp_path / "tokenizer.json").read_text()
        (tmp_path / "tokenizer.json").write_text(text.replace("<|im_start|>", "<|begin_of|>"))
    with pytest.raises(CheckpointError, match=words):
        make_engine(pair, Case(draft=draft))
