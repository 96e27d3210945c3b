"""The kernels choose the same tokens as numpy, for any settings, ties and forbidden tokens."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamserve.execution.backends.native.sampling import NativeChooser
from streamserve.execution.compute.sampling import Row, Sampler
from streamserve.protocol.sampling import SamplingParams

NO_TOKENS = np.array([], dtype=np.int64)
EOS = (1,)

settings_of_requests = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.001, 0.3, 0.7, 1.0, 2.5, 100.0]),
    min_p=st.sampled_from([0.0, 1e-4, 0.02, 0.3, 0.5, 1.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 4, 20, 50, 1000, 2**31]),
    top_p=st.sampled_from([1e-6, 0.1, 0.3, 0.5, 0.9, 0.999, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    logit_bias=st.sampled_from([{}, {}, {0: 5.0, 2: -100.0}]),
    min_tokens=st.sampled_from([0, 0, 3]),
)


@pytest.fixture(scope="module")
def chooser(pool) -> NativeChooser:
    return NativeChooser(pool(2))


def logits_of(kind: str, rows: int, vocab: int, scale: float, seed: int) -> torch.Tensor:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    if kind == "ties":
        logits = logits.round()
    elif kind == "all equal":
        logits = torch.full_like(logits, scale)
    elif kind == "some forbidden":
        logits[torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed)) < 0.5] = -torch.inf
    elif kind == "all forbidden":
        logits[:] = -torch.inf
    return logits


@given(
    kind=st.sampled_from(["plain", "plain", "ties", "all equal", "some forbidden", "all forbidden"]),
    vocab=st.sampled_from([2, 11, 64, 300, 4096]),
    scale=st.sampled_from([0.1, 1.5, 5.0, 60.0]),
    seed=st.integers(0, 1000),
    requests=st.lists(settings_of_requests, min_size=1, max_size=6),
    data=st.data(),
)
def test_tokens_are_those_of_numpy(chooser, kind, vocab, scale, seed, requests, data):
    logits = logits_of(kind, 3, vocab, scale, seed)
    rows = [
        Row(
            data.draw(st.integers(0, 2)),
            params,
            data.draw(st.integers(0, 3)),
            NO_TOKENS,
            data.draw(st.lists(st.integers(0, vocab - 1), max_size=5)),
        )
        for params in requests
        if vocab > 2 or not params.logit_bias
    ]
    assert Sampler(logits, EOS, chooser).sample(rows) == Sampler(logits, EOS).sample(rows)


@pytest.mark.parametrize(
    "limits",
    [{}, {"top_p": 0.95}, {"top_k": 50}, {"temperature": 0.7, "top_p": 0.9, "top_k": 200, "min_p": 0.001}],
    ids=str,
)
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_many_draws_over_a_large_vocabulary(chooser, spread, limits, scale):
    logits, draws = logits_of("plain", 4, 32_000, spread, 7), scale.pick(40, 1000)
    rows = [
        Row(
            seed % 4,
            SamplingParams(seed=seed * 0x9E3779B97F4A7C15 % 2**64, **limits),
            0,
            NO_TOKENS,
            [0] * seed,
        )
        for seed in range(draws)
    ]
    tokens = Sampler(logits, (), chooser).sample(rows)
    assert tokens == Sampler(logits, ()).sample(rows)
    assert len(set(tokens)) > 8  # the draws were draws


def test_the_first_of_equals_is_best(chooser):
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [3.0, 3.0, 3.0, 3.0]])
    params = SamplingParams(temperature=0.0)
    rows = [Row(number, params, 0, NO_TOKENS, []) for number in range(2)]
    assert Sampler(logits, (), chooser).sample(rows) == [1, 0]


def test_a_sampled_request_without_a_seed_is_an_error(chooser):
    with pytest.raises(ValueError, match="seed"):
        Sampler(torch.zeros(1, 4), (), chooser).sample([Row(0, SamplingParams(), 0, NO_TOKENS, [])])


def test_other_logits_than_the_kernels_are_refused(chooser):
    with pytest.raises(ValueError, match="bfloat16"):
        Sampler(torch.zeros(1, 4).bfloat16(), (), chooser).sample(
            [Row(0, SamplingParams(seed=1), 0, NO_TOKENS, [])]
        )
