"""The random numbers of sampling: a pure function of seed, choice, output index and token.

Bit for bit, the noise of token t for output number i of choice c under seed s is

    (w0, w1, w2, w3) = Philox4x32-10(counter = (c, i, t, 0), key = (s mod 2³², s div 2³²))   as in Random123
    u = min(((w1·2³² + w0) div 2¹¹ + 0.5) · 2⁻⁵³, 1 − 2⁻⁵³)      in float64, each step rounded to nearest even
    g = −log(−log(u))                                             in float64

so u is in (0, 1), and g, which has the Gumbel distribution, between LOWEST and HIGHEST. The token that
maximizes log p + g is a sample of p. (The logarithm is the platform's: two platforms may differ in the last
bit.)
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

LOWEST, HIGHEST = -3.63, 36.74
"""Bounds of the noise: tokens whose score is lower than the best by more than their difference cannot win."""

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_ROUNDS = 10
_SLICE = 8192  # tokens at a time, so that the rounds stay in the CPU cache

Words = NDArray[np.uint64]


def philox(
    counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]
) -> tuple[Words, Words, Words, Words]:
    """Return Philox4x32-10 (Salmon et al. 2011), elementwise. Every word is below 2³², in a uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = (product1 >> _HALF) ^ c1 ^ k0, product1 & _LOW
        c2, c3 = (product0 >> _HALF) ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def philox_of_one(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return `philox` of a single counter, in plain integers: for a few numbers arrays are slower."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (product1 >> 32) ^ c1 ^ k0, product1 & 0xFFFFFFFF
        c2, c3 = (product0 >> 32) ^ c3 ^ k1, product0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def gumbel(
    seeds: ArrayLike, choices: ArrayLike, indices: ArrayLike, tokens: ArrayLike
) -> NDArray[np.float64]:
    """Return the noise for each (seed, choice, output index, token). The arguments are arrays of one length,
    or scalars."""
    columns = np.broadcast_arrays(
        *(np.asarray(x, dtype=np.uint64) for x in (seeds, choices, indices, tokens))
    )
    noise = np.empty(columns[0].shape)
    for start in range(0, noise.size, _SLICE):
        part = slice(start, start + _SLICE)
        noise[part] = _gumbel(*(column[part] for column in columns))
    return noise


def _gumbel(seeds: Words, choices: Words, indices: Words, tokens: Words) -> NDArray[np.float64]:
    counter = (choices & _LOW, indices & _LOW, tokens & _LOW, np.zeros_like(tokens))
    w0, w1, _, _ = philox(counter, (seeds & _LOW, seeds >> _HALF))
    noise: NDArray[np.float64] = -np.log(-np.log(uniform(w0, w1)))
    return noise


def uniform(w0: Words, w1: Words) -> NDArray[np.float64]:
    """Return a number in (0, 1), both ends excluded, made of two random words below 2³²."""
    bits = ((w1 << _HALF) | w0) >> np.uint64(11)
    return np.minimum((bits.astype(np.float64) + 0.5) * 2.0**-53, 1.0 - 2.0**-53)
