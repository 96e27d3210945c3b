"""Rejection sampling for trees whose draft tokens were drawn at random. It preserves the distribution of
plain decoding, not the text.

The drafter drew the children of a node independently from its distribution q. The target's distribution at
the node is p. The children are tested in order: a child x is accepted with probability min(1, p(x) / q(x));
after a rejection p becomes norm(max(0, p - q)). If no child is accepted, the token is drawn from the final p.
(Leviathan et al. 2023; for siblings Miao et al. 2024, "multi-step speculative sampling".)

The distribution is only preserved if the choice of a node's children to test does not depend on their tokens.
So a drafter's features of drawn tokens encode their position in the tree alone.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from streamserve.execution.compute.noise import philox_of_one, uniform
from streamserve.execution.compute.verify import Walk

Probabilities = NDArray[np.float64]

DRAFTING, TESTING = 2, 1
"""Values of the Philox counter's last word, which keep these numbers apart from the noise of sampling, whose
last word is 0 (execution/compute/noise.py)."""


def uniforms(seed: int, choice: int, output: int, purpose: int, count: int) -> Probabilities:
    """Return `count` random numbers in (0, 1) for one output index, as a pure function of the arguments."""
    key = seed & 0xFFFFFFFF, seed >> 32
    words = [
        philox_of_one((choice & 0xFFFFFFFF, output, number, purpose), key)[:2] for number in range(count)
    ]
    w0, w1 = np.array(words, dtype=np.uint64).reshape(count, 2).T
    return uniform(w0, w1)


def draw(probabilities: Probabilities, number: float) -> int:
    """Return the token whose interval of the cumulative distribution contains `number`, in (0, 1)."""
    cumulated = np.cumsum(probabilities)
    index = np.searchsorted(cumulated, number * cumulated[-1], side="right")
    return int(min(index, np.flatnonzero(probabilities)[-1]))


def verify_by_rejection(
    walk: Walk, target: Callable[[], Probabilities], seed: int, choice: int, output: int
) -> None:
    """Complete `walk` over a tree with `draws`. `target()` returns the target's distribution [vocabulary] at
    the path's last node, given the walk's tokens so far. The first token of the walk is output number
    `output`."""
    while not walk.done:
        node = walk.path[-1]
        children = [n for n in range(node + 1, len(walk.tree)) if walk.tree.parents[n] == node]
        numbers = uniforms(seed, choice, output + len(walk.tokens), TESTING, len(children) + 1)
        p = target()
        for child, number in zip(children, numbers, strict=False):
            q, token = walk.tree.draws[node], walk.tree.tokens[child]
            if number * q[token] < p[token]:
                walk.tokens.append(token)
                walk.path.append(child)
                break
            p = residual(p, q)
        else:
            walk.tokens.append(draw(p, numbers[-1]))


def residual(p: Probabilities, q: NDArray[np.floating]) -> Probabilities:
    """Return norm(max(0, p - q)). Returns p itself if the difference is 0, which only rounding can cause."""
    left = np.maximum(p - q, 0.0)
    total = left.sum()
    return left / total if total > 0.0 else p
