"""With LoRA adapters, speculation, preemption, swapping and the prefix cache, the text of a seed equals the
text of the request alone, without draft tokens."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as changed

from streamserve.engine.engine import Engine
from streamserve.engine.ports import EnginePorts
from streamserve.execution.loading.load import load
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.messages import LoadAdapter, Submit, UnloadAdapter
from streamserve.text.grammar import vocabulary
from streamserve.text.tokenizer import Tokenizer
from tests.adapters import opened, write_adapter
from tests.conftest import Scale
from tests.exact.speculating import (
    MAX_OUTPUT,
    MAX_PROMPT,
    Case,
    Watched,
    make_pair,
    make_requests,
    run,
    serve,
)

CASES = {
    "draft model": Case(policy="fixed-tree:2x3"),
    "draft model, preempted and swapped": Case(policy="fixed:4", blocks=30, preempt_every=3),
    "self": Case(draft="self:1", policy="fixed-tree:2x3", chunk=7),
    "ngram": Case(draft="ngram", policy="fixed:4"),
    "int8": Case(policy="fixed:4", quantization="int8", kv_cache_dtype="int8"),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module")
def adapters(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> list[LoadAdapter]:
    """Return adapters that change only part of the target's text, so that its drafter remains useful."""
    folder = tmp_path_factory.mktemp("adapters")
    found = [
        opened(f"a{seed}", write_adapter(folder / f"a{seed}", pair[0], rank=3 + seed, seed=seed, gain=0.15))
        for seed in range(3)
    ]
    return [LoadAdapter(adapter.fingerprint, adapter.path) for adapter in found]


def make_engine(pair: tuple[Path, Path], case: Case, adapters: list[LoadAdapter]) -> Engine:
    target, draft = pair
    loaded = load(
        ModelConfig(
            path=str(target), dtype=case.dtype, threads=1, num_blocks=case.blocks, max_num_seqs=32,
            max_model_len=MAX_PROMPT + MAX_OUTPUT, max_chunk=case.chunk, preempt_every=case.preempt_every,
            quantization=case.quantization, kv_cache_dtype=case.kv_cache_dtype, max_loras=len(adapters),
            draft=str(draft) if case.draft == "model" else case.draft, check=True,
            swap_space=0.01 if case.preempt_every else 0.0,
            eviction="swap" if case.preempt_every else "cost",
        ),
        lambda size, eos: vocabulary(Tokenizer.from_folder(target), size, eos),
    )  # fmt: skip
    ticks = iter(range(10**9))
    engine = Engine(
        loaded.engine_config, loaded.model_info, loaded.executor, lambda: float(next(ticks)),
        loaded.drafter, Watched(case.policy), EnginePorts(adapters=loaded.adapters),
    )  # fmt: skip
    for adapter in adapters:
        assert engine.handle(adapter) == []
    assert [answer.error for answer in engine.adapters.take_answers()] == [""] * len(adapters)
    return engine


def requests_with(adapters: list[LoadAdapter], requests: list[Submit]) -> list[Submit]:
    """Give three of every four requests an adapter."""
    names = ["", *(adapter.fingerprint for adapter in adapters)]
    return [
        changed(request, adapter=names[number % len(names)], request=f"{number}")
        for number, request in enumerate(requests)
    ]


@pytest.mark.parametrize("name", CASES)
def test_text_is_that_of_the_request_alone_without_draft_tokens(
    pair: tuple[Path, Path],
    adapters: list[LoadAdapter],
    name: str,
    scale: Scale,
    record: Callable[..., None],
) -> None:
    case, tokenizer = CASES[name], Tokenizer.from_folder(pair[0])
    plain = make_engine(pair, replace(case, draft="none", preempt_every=0, blocks=1024), adapters)
    engine = make_engine(pair, case, adapters)
    requests = requests_with(
        adapters, make_requests(random.Random(scale.seed), scale.pick(8, 48), plain.model.vocab_size)
    )
    expected = serve(plain, requests, 1, tokenizer)
    served = serve(engine, requests, 8, tokenizer)
    assert served.texts.keys() == expected.texts.keys()
    for key, tokens in expected.texts.items():
        assert [token.token for token in served.texts[key]] == [token.token for token in tokens], key
        assert [token.logprob for token in served.texts[key]] == [token.logprob for token in tokens], key
    counters, report = engine.speculation.counters, engine.report()
    assert counters.accepted > 0
    if case.preempt_every:
        assert report.preemptions > 0
        assert report.evictions.blocks_back > 0
    record(accepted=counters.accepted, preempted=report.preemptions)


def test_draft_tokens_of_the_base_are_accepted_for_adapters(
    pair: tuple[Path, Path], adapters: list[LoadAdapter]
) -> None:
    engine = make_engine(pair, Case(policy="fixed:4"), adapters)
    (request,) = make_requests(random.Random(2), 1, engine.model.vocab_size)
    alone = changed(request, adapter=adapters[0].fingerprint)
    tokens = run(engine, [alone], 1)[alone.request]
    assert engine.speculation.counters.accepted > 0
    assert tokens != run(engine, [changed(alone, adapter="")], 1)[alone.request]


def test_the_prefix_cache_keeps_adapters_apart(pair: tuple[Path, Path], adapters: list[LoadAdapter]) -> None:
    engine = make_engine(pair, Case(draft="none", policy="off"), adapters)
    (request,) = make_requests(random.Random(5), 1, engine.model.vocab_size)
    request = changed(request, prompt=(request.prompt * 40)[:100])
    texts = []
    for adapter in ("", *(each.fingerprint for each in adapters)):
        hits = engine.report().prefix_hits
        first = run(engine, [changed(request, adapter=adapter)], 1)[request.request]
        assert engine.report().prefix_hits == hits
        again = run(engine, [changed(request, adapter=adapter)], 1)[request.request]
        assert engine.report().prefix_hits >= hits + 96
        assert [(token.token, token.logprob) for token in again] == [
            (token.token, token.logprob) for token in first
        ]
        texts.append([token.token for token in first])
    assert len({tuple(text) for text in texts}) > 1


def test_requests_whose_adapter_is_not_loaded_are_refused(
    pair: tuple[Path, Path], adapters: list[LoadAdapter]
) -> None:
    engine = make_engine(pair, Case(draft="none", policy="off"), adapters)
    (request,) = make_requests(random.Random(5), 1, engine.model.vocab_size)
    gone, kept = adapters[0].fingerprint, adapters[1].fingerprint
    engine.handle(changed(request, adapter=gone))
    engine.step()
    events = engine.handle(UnloadAdapter(gone))
    assert [event.reason for event in events] == ["abort"]
    (refused,) = engine.handle(changed(request, adapter=gone))
    assert (refused.status, refused.reason) == (503, "error")
    assert "LoRA adapter" in refused.error
    assert run(engine, [changed(request, adapter=kept)], 1)[request.request]
