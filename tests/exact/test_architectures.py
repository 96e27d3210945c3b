"""The text of a seed is the same for every architecture, whatever changes when tokens arrive: batches,
speculation, preemption, eviction; also with quantized weights and KV."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from streamserve.text.tokenizer import Tokenizer
from tests.conftest import Scale
from tests.exact.pair_models import MODELS
from tests.exact.speculating import Case, make_engine, make_pair, make_requests, serve


@pytest.mark.parametrize("architecture", MODELS)
def test_a_seeds_text_is_that_of_the_request_alone_and_without_drafts(
    tmp_path_factory: pytest.TempPathFactory, architecture: str, scale: Scale, record: Callable[..., None]
) -> None:
    model = MODELS[architecture]
    folders = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft")
    pair = make_pair(*folders, architecture, **model.fields)
    case = replace(model.case, dtype="bfloat16")
    plain = make_engine(pair, Case(
        draft="none", dtype="bfloat16", quantization=case.quantization, kv_cache_dtype=case.kv_cache_dtype,
    ))  # fmt: skip
    speculating = make_engine(pair, case)
    requests = make_requests(random.Random(scale.seed), scale.pick(6, 48), plain.model.vocab_size)
    tokenizer = Tokenizer.from_folder(pair[0])
    expected = serve(plain, requests, 1, tokenizer).texts
    served = serve(speculating, requests, 8, tokenizer).texts
    assert {key: [token.token for token in text] for key, text in served.items()} == {
        key: [token.token for token in text] for key, text in expected.items()
    }
    report = speculating.report()
    assert report.speculation is not None
    assert report.speculation.accepted > 0
    assert report.preemptions > 0 or not (case.preempt_every or case.blocks < 100)
    record(requests=len(requests), accepted=report.speculation.accepted, preemptions=report.preemptions)
