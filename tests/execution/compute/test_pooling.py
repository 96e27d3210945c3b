"""Vectors have the same bits in any chunks, after a preemption, and next to sampled requests."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamserve.execution.compute.running_sum import RunningSum


@given(st.integers(1, 40), st.lists(st.integers(1, 9), max_size=40), st.integers(0, 40))
def test_a_mean_has_the_same_bits_in_any_chunks(rows: int, chunks: list[int], again: int) -> None:
    hidden = torch.randn(rows, 5, generator=torch.Generator().manual_seed(rows))
    whole, pieces = RunningSum.of(5), RunningSum.of(5)
    whole.add(0, hidden)
    start = 0
    for chunk in [*chunks, rows]:
        pieces.add(start, hidden[start : start + chunk])
        start = min(start + chunk, rows)
        if start >= again > 0:  # preempted: recomputed from an earlier position
            start, again = start // 2, 0
    pieces.add(start, hidden[start:])
    assert pieces.count == whole.count == rows
    assert torch.equal(pieces.mean(), whole.mean())
    assert np.allclose(whole.mean(), hidden.mean(0), atol=1e-6)


def test_missing_positions_are_found() -> None:
    total = RunningSum.of(3)
    total.add(0, torch.ones(2, 3))
    with pytest.raises(ValueError, match="positions 2 to 3 are missing"):
        total.add(4, torch.ones(1, 3))
