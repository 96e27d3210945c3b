"""Frequencies equal those of transformers, and a product of rotated vectors depends only on the distance of
the two positions."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamserve.execution.model.rope import Rotations, inverse_frequencies, rotate
from streamserve.execution.model.rope_spec import RopeSpec

LLAMA3 = RopeSpec(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192)


YARN = RopeSpec(1_000_000.0, "yarn", 4.0, original_positions=32768)


@pytest.mark.parametrize(
    "rope",
    [
        RopeSpec(10_000.0),
        RopeSpec(10_000.0, "linear", 4.0),
        LLAMA3,
        YARN,
        replace(YARN, factor=40.0, original_positions=64, theta=10_000.0),
        replace(YARN, beta_fast=8.0, beta_slow=0.5, truncate=False),
        replace(YARN, original_positions=6),
    ],
    ids=str,
)
def test_frequencies_are_those_of_transformers(rope):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": rope.scaling, "rope_theta": rope.theta}
    if rope.scaling != "default":
        parameters["factor"] = rope.factor
    if rope.scaling == "llama3":
        parameters |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_positions,
        }
    if rope.scaling == "yarn":
        names = ("beta_fast", "beta_slow", "truncate")
        parameters |= {name: getattr(rope, name) for name in names}
        parameters["original_max_position_embeddings"] = rope.original_positions
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=parameters)
    torch.testing.assert_close(
        inverse_frequencies(rope, 128), LlamaRotaryEmbedding(config).inv_freq, rtol=1e-6, atol=0
    )


def test_llama3_keeps_short_wavelengths_stretches_long_ones_and_blends_between():
    plain = inverse_frequencies(RopeSpec(LLAMA3.theta), 128)
    stretch = plain / inverse_frequencies(LLAMA3, 128)
    assert stretch[0] == 1.0
    assert stretch[-1] == pytest.approx(LLAMA3.factor)
    assert ((stretch > 1.01) & (stretch < LLAMA3.factor - 0.01)).any()


@given(first=st.integers(0, 1000), second=st.integers(0, 1000), shift=st.integers(1, 1000))
def test_products_depend_on_distance_alone(first, second, shift):
    q, k = torch.randn(2, 1, 1, 16, generator=torch.Generator().manual_seed(0))
    single = Rotations.of([RopeSpec(10_000.0)], 16)
    rotations = Rotations(single.frequencies.double(), single.amplitudes)

    def product(a: int, b: int) -> float:
        cos, sin = rotations.at(torch.tensor([a, b]), torch.float64)
        turned = rotate(torch.cat((q, k)).double(), cos[0], sin[0])
        return float((turned[0] * turned[1]).sum())

    assert product(first, second) == pytest.approx(product(first + shift, second + shift), abs=1e-4)


def test_a_table_has_the_rounded_cosines_and_sines_of_its_positions():
    rotations, count = Rotations.of([replace(YARN, factor=2.0), LLAMA3], 32), 700
    angles = torch.arange(count).float()[:, None] * rotations.frequencies[:, None]
    exact = angles.double().cos(), angles.double().sin()
    others = rotations.at(torch.arange(count), torch.float32)
    for table, value, other in zip(rotations.table(count, torch.float32), exact, others, strict=True):
        assert torch.equal(table, value.float() * rotations.amplitudes)
        torch.testing.assert_close(table, other, rtol=0, atol=3e-7)
