"""The kernels guess what numpy guesses: the same tokens, as sure of them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamserve.execution.drafters.guesses import CANDIDATES, best_guesses
from streamserve.execution.native.sampling import NativeGuesser
from streamserve.protocol.sampling import SamplingParams

settings_of_requests = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.5]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5]),
    top_k=st.sampled_from([0, 0, 1, 3, 20]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5]),
    seed=st.integers(0, 2**64 - 1),
)


@pytest.fixture(scope="module")
def guesser(team) -> NativeGuesser:
    return NativeGuesser(team(2))


@given(
    vocabulary=st.sampled_from([2, 3, CANDIDATES, 300, 4096]),
    spread=st.sampled_from([0.5, 3.0, 20.0]),
    seed=st.integers(0, 1000),
    params=st.lists(settings_of_requests, min_size=1, max_size=6),
    count=st.integers(1, 4),
    forbidden=st.booleans(),
)
def test_guesses_are_those_of_numpy(guesser, vocabulary, spread, seed, params, count, forbidden):
    logits = torch.randn(len(params), vocabulary, generator=torch.Generator().manual_seed(seed)) * spread
    adjusted = {}
    if forbidden:
        adjusted[0] = logits[0].double().numpy()
        adjusted[0][1:] = -np.inf
    choices, outputs = [3] * len(params), list(range(len(params)))
    ours = guesser(logits, params, choices, outputs, count, adjusted)
    plain = best_guesses(logits, params, choices, outputs, count, adjusted)
    for a, b in zip(ours, plain, strict=True):
        sure = [guess for guess in b if guess[1] > 0]
        assert [token for token, _ in a if a][: len(sure)] == [token for token, _ in sure]
        assert [share for _, share in a][: len(sure)] == pytest.approx([share for _, share in sure], abs=1e-5)
        assert all(share == pytest.approx(0, abs=1e-9) for _, share in a[len(sure) :])


@pytest.mark.parametrize("count", [1, 3])
def test_many_requests_over_a_large_vocabulary(guesser, count):
    logits = torch.randn(64, 4096, generator=torch.Generator().manual_seed(1)) * 4
    params = [
        SamplingParams(seed=row, temperature=row % 2 * 0.7, top_p=(1.0, 0.9)[row % 4 // 2])
        for row in range(64)
    ]
    ours = guesser(logits, params, [0] * 64, [5] * 64, count)
    plain = best_guesses(logits, params, [0] * 64, [5] * 64, count)
    assert [[token for token, _ in row] for row in ours] == [[token for token, _ in row] for row in plain]
    for a, b in zip(ours, plain, strict=True):
        assert [share for _, share in a] == pytest.approx([share for _, share in b], abs=1e-5)
