"""Tokens chosen on the device are those that the host chooses: ties, filters and noise included."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamserve.execution.cuda.draws import DRAW_WORDS, Draw, pack_draws
from streamserve.execution.cuda.operations import operations
from streamserve.execution.sampling import NOT_FINITE, Row, Sampler
from streamserve.protocol.sampling import SamplingParams

IMPLEMENTATIONS = ("plain", "kernels")

params = st.builds(
    lambda temperature, top_k, top_p, min_p, seed: SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    ),
    st.sampled_from([0.0, 1e-3, 0.3, 0.7, 1.0, 2.0, 100.0]),
    st.sampled_from([0, -1, 1, 2, 5, 40, 10_000]),
    st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
    st.sampled_from([0.0, 0.0, 0.01, 0.2, 1.0]),
    st.integers(0, 2**64 - 1),
)
draws = st.builds(Draw, params, st.integers(0, 127), st.integers(0, 2**31))


def choose(implementation: str, logits: torch.Tensor, chosen: list[Draw], device) -> list[int]:
    device = torch.device("cpu") if implementation == "plain" else device
    out = torch.full((len(chosen),), -7, dtype=torch.int32, device=device)
    packed = torch.from_numpy(pack_draws(chosen).copy()).to(device)
    operations(implementation).sampling.choose_tokens(logits.to(device), packed, out)
    return out.tolist()


def on_the_host(logits: torch.Tensor, chosen: list[Draw]) -> list[int]:
    rows = [
        Row(number, draw.params, draw.choice, np.empty(0, np.int64), [0] * 0)
        for number, draw in enumerate(chosen)
    ]
    sampler = Sampler(logits, ())
    tokens = []
    for row, draw in zip(rows, chosen, strict=True):
        outputs = _Length(draw.output)
        tokens += sampler.sample([Row(row.logits, row.params, row.choice, row.prompt, outputs)])
    return tokens


class _Length(list):
    """A list of outputs of which only the length matters."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def __len__(self) -> int:
        return self._length


@settings(max_examples=5 if settings.default.max_examples < 200 else 200)  # the interpreter is slow
@given(
    chosen=st.lists(draws, min_size=1, max_size=4),
    vocabulary=st.sampled_from([1, 2, 50, 300, 2500]),
    spread=st.sampled_from([0.0, 1.0, 4.0, 30.0]),
    coarse=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_hosts_tokens(device, chosen, vocabulary, spread, coarse, seed):
    logits = spread * torch.randn(len(chosen), vocabulary, generator=torch.Generator().manual_seed(seed))
    if coarse:  # many equal logits, zeros of both signs among them
        logits = (logits * 2).round() / 2
    expected = on_the_host(logits, chosen)
    for implementation in IMPLEMENTATIONS:
        assert choose(implementation, logits, chosen, device) == expected


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_have_no_token(implementation, device, value):
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0))
    logits[1, 4321] = value
    greedy = Draw(SamplingParams(temperature=0.0), 0, 0)
    sampled = Draw(SamplingParams(temperature=1.0, top_p=0.9, seed=1), 0, 0)
    tokens = choose(implementation, logits, [greedy, sampled, sampled], device)
    assert tokens[1] == NOT_FINITE
    assert tokens[0] == int(logits[0].argmax())
    assert 0 <= tokens[2] < 5000


def test_draws_have_the_size_that_kernels_read():
    packed = pack_draws([Draw(SamplingParams(temperature=0.5, seed=7), 1, 2)] * 3)
    assert packed.shape == (3, DRAW_WORDS)
    assert packed[0, :2].view(np.float64)[0] == 0.5
    assert packed[0, 6:10].tolist() == [7, 0, 1, 2]
