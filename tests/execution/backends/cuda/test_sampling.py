"""The device chooses the same tokens as the host, with ties, filters and noise."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamserve.execution.backends.cuda.draws import DRAW_WORDS, Draw, pack_draws
from streamserve.execution.backends.cuda.operations import operations
from streamserve.execution.compute.noise import HIGHEST, LOWEST
from streamserve.execution.compute.sampling import NOT_FINITE, Row, Sampler, filtered_ids
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
    """Stands for a list of outputs; only its length is used."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length

    def __len__(self) -> int:
        return self._length


@settings(max_examples=5 if settings.default.max_examples < 200 else 200)  # the interpreter is slow
@given(
    chosen=st.lists(draws, min_size=1, max_size=4),
    vocabulary=st.sampled_from([1, 2, 50, 300, 2500, 5000]),
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


FILTERS = (
    {"top_p": 0.9}, {"top_p": 0.5, "temperature": 2.0}, {"top_p": 1 - 1e-9}, {"top_k": 40}, {"top_k": 3000},
    {"top_k": 3000, "top_p": 0.5}, {"top_k": 40, "top_p": 0.9, "min_p": 0.01}, {"min_p": 1.0},
    {"top_k": 50, "temperature": 1e-3}, {"top_p": 0.9, "temperature": 0.0}, {"top_p": 0.9, "min_p": 0.2},
)  # fmt: skip


def logits_of(kind: str, rows: int, vocabulary: int) -> torch.Tensor:
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(5))
    if kind == "equal":
        return torch.full_like(logits, 1.5)
    if kind == "peaked":
        logits = 4 * logits
    if kind == "two values":
        logits = logits.sign()
    if kind == "one far below":
        logits[:, 17] = -1e30
    if kind == "sure":  # One token has most of the probability; many others share the rest.
        logits[:, 1234] = 9.0
    if kind == "bf16":
        logits = (4 * logits).bfloat16().float()
    if kind == "large":
        logits -= 3e38
    return logits


@pytest.mark.each_value
@pytest.mark.parametrize("capacity", [4096, 64])
@pytest.mark.parametrize(
    "kind", ["flat", "peaked", "equal", "two values", "one far below", "large", "sure", "bf16"]
)
def test_filters_leave_the_hosts_tokens(monkeypatch, device, kind, capacity):
    """Filters keep the host's tokens. Where more tokens may pass a filter than are collected, the whole row
    is read."""
    from streamserve.execution.backends.cuda.kernels import filters

    monkeypatch.setattr(filters, "CAPACITY", capacity)
    chunks = 2
    vocabulary = chunks * filters.CHUNK
    logits = logits_of(kind, len(FILTERS), vocabulary)
    chosen = [Draw(SamplingParams(seed=1, **options), 0, 0) for options in FILTERS]
    on_device = logits.to(device)
    packed = torch.from_numpy(pack_draws(chosen).copy()).to(device)
    thresholds = filters.find_thresholds(on_device, packed, filters.survey(on_device)).tolist()
    for row, draw in enumerate(chosen):
        if draw.params.greedy:
            continue
        scores = logits[row].double().numpy() / draw.params.temperature
        left = (ranks_of(logits[row]) >= thresholds[row]) & (scores >= scores.max() - (HIGHEST - LOWEST))
        assert np.flatnonzero(left).tolist() == filtered_ids(scores, draw.params).tolist(), FILTERS[row]


def ranks_of(logits: torch.Tensor) -> np.ndarray:
    """Return ranks like kernels.filters.rank, for finite logits other than -0."""
    bits = logits.numpy().view(np.int32)
    keys = np.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits).astype(np.int64)
    return (keys << len(bits).bit_length()) - np.arange(len(bits))


def test_noise_that_rounding_hides_does_not_choose(device):
    """Noise that rounding hides does not choose: all tokens have equal scores, and the first one is taken as
    on the host."""
    draw = Draw(SamplingParams(seed=3), 0, 0)
    assert choose("kernels", torch.full((1, 5000), -3e38), [draw], device) == [0]


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
