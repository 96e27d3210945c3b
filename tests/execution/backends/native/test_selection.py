"""The kernels select the same draft tokens as numpy, with the same scores."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamserve.execution.backends.native.sampling import NativeDraftSelector
from streamserve.execution.compute.draft_selection import CANDIDATES, select_draft_tokens
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
def selector(pool) -> NativeDraftSelector:
    return NativeDraftSelector(pool(2))


@given(
    vocabulary=st.sampled_from([2, 3, CANDIDATES, 300, 4096]),
    spread=st.sampled_from([0.5, 3.0, 20.0]),
    seed=st.integers(0, 1000),
    params=st.lists(settings_of_requests, min_size=1, max_size=6),
    count=st.integers(1, 4),
    forbidden=st.booleans(),
)
def test_draft_tokens_are_those_of_numpy(selector, vocabulary, spread, seed, params, count, forbidden):
    logits = torch.randn(len(params), vocabulary, generator=torch.Generator().manual_seed(seed)) * spread
    adjusted = {}
    if forbidden:
        adjusted[0] = logits[0].double().numpy()
        adjusted[0][1:] = -np.inf
    choices, outputs = [3] * len(params), list(range(len(params)))
    native = selector(logits, params, choices, outputs, count, adjusted)
    reference = select_draft_tokens(logits, params, choices, outputs, count, adjusted)
    for a, b in zip(native, reference, strict=True):
        certain = [token for token in b if token[1] > 0]
        assert [token for token, _ in a if a][: len(certain)] == [token for token, _ in certain]
        assert [score for _, score in a][: len(certain)] == pytest.approx(
            [score for _, score in certain], abs=1e-5
        )
        assert all(score == pytest.approx(0, abs=1e-9) for _, score in a[len(certain) :])


@pytest.mark.parametrize("count", [1, 3])
def test_many_requests_over_a_large_vocabulary(selector, count):
    logits = torch.randn(64, 4096, generator=torch.Generator().manual_seed(1)) * 4
    params = [
        SamplingParams(seed=row, temperature=row % 2 * 0.7, top_p=(1.0, 0.9)[row % 4 // 2])
        for row in range(64)
    ]
    native = selector(logits, params, [0] * 64, [5] * 64, count)
    reference = select_draft_tokens(logits, params, [0] * 64, [5] * 64, count)
    assert [[token for token, _ in row] for row in native] == [
        [token for token, _ in row] for row in reference
    ]
    for a, b in zip(native, reference, strict=True):
        assert [score for _, score in a] == pytest.approx([score for _, score in b], abs=1e-5)
