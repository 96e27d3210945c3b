"""The noise has the bits that its specification defines, and a Gumbel distribution."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamserve.execution.compute.noise import HIGHEST, LOWEST, gumbel, philox, philox_of_one, uniform

WORD = st.integers(0, 2**32 - 1)


def words(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], dtype=np.uint64) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ),
        (
            (0xFFFFFFFF,) * 4,
            (0xFFFFFFFF,) * 2,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(counter, key, expected):
    assert philox_of_one(counter, key) == expected
    result = philox(words(*counter), words(*key))
    assert tuple(int(word[0]) for word in result) == expected


def reference_noise(seed: int, choice: int, index: int, token: int) -> float:
    """Return the noise, computed with Python's integers from the specification."""
    c0, c1, c2, c3 = choice, index, token, 0
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    u = min((float((c1 << 32 | c0) >> 11) + 0.5) * 2.0**-53, 1.0 - 2.0**-53)
    return -math.log(-math.log(u))


@given(seed=st.integers(0, 2**64 - 1), choice=st.integers(0, 127), index=WORD, token=WORD)
def test_noise_follows_its_specification(seed, choice, index, token):
    assert gumbel(seed, choice, [index], token)[0] == pytest.approx(
        reference_noise(seed, choice, index, token), rel=1e-14, abs=1e-14
    )


@settings(deadline=None)
@given(tokens=st.lists(st.integers(0, 200_000), min_size=1, max_size=40))
def test_a_tokens_noise_does_not_depend_on_other_tokens(tokens):
    together = gumbel(7, 1, 5, tokens)
    assert together.tolist() == [gumbel(7, 1, 5, [token])[0] for token in tokens]


def test_long_vectors_are_the_same_as_their_pieces():
    tokens = np.arange(20_001)
    assert np.array_equal(
        gumbel(2**63 + 5, 0, 3, tokens),
        np.concatenate([gumbel(2**63 + 5, 0, 3, piece) for piece in np.array_split(tokens, 7)]),
    )


def test_every_part_of_the_key_and_counter_matters():
    assert (
        len({gumbel(*key, [9])[0] for key in [(1, 2, 3), (1 + 2**32, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4)]})
        == 5
    )


def test_the_extreme_words_give_finite_noise_within_the_bounds():
    u = np.concatenate([uniform(*words(0, 0)), uniform(*words(2**32 - 1, 2**32 - 1))])
    assert 0.0 < u[0] < 2.0**-52
    assert u[1] == 1.0 - 2.0**-53
    lowest, highest = -np.log(-np.log(u))
    assert LOWEST <= lowest < LOWEST + 0.02
    assert HIGHEST - 0.02 < highest <= HIGHEST


def test_noise_is_distributed_as_gumbel():
    noise = gumbel(3, 0, np.repeat(np.arange(200), 500), np.tile(np.arange(500), 200))
    expected = np.arange(1, 20) / 20  # the distribution function at its 5 % quantiles
    quantiles = -np.log(-np.log(expected))
    measured = np.array([(noise <= quantile).mean() for quantile in quantiles])
    # Kolmogorov's distance of 100,000 draws exceeds 0.0075 once in 40,000 times.
    assert np.abs(measured - expected).max() < 0.0075
