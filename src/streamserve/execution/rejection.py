"""Rejection sampling for trees whose draft tokens were drawn at random: same distribution, not same text.

The draft drew the children of a node independently from its distribution q. The target, whose distribution
there is p, tests them in order: a child x is accepted with probability min(1, p(x) / q(x)); after a rejection
p becomes norm(max(0, p - q)). If none is accepted, the token is drawn from the final p. (Leviathan et al.
2023; for siblings Miao et al. 2024, "multi-step speculative sampling".)

Which of a node's children are tested must not depend on their tokens: a drafter's features of drawn tokens
encode only their position in the tree.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from streamserve.execution.noise import philox_of_one, uniform
from streamserve.execution.verify import Walk

Probabilities = NDArray[np.float64]

DRAFTING, TESTING = 2, 1
"""The last word of the Philox counter: 0 is the noise of sampling (execution/noise.py)."""


def uniforms(seed: int, choice: int, output: int, purpose: int, count: int) -> Probabilities:
    """Return `count` numbers in (0, 1) for one output index: a pure function of the arguments."""
    key = seed & 0xFFFFFFFF, seed >> 32
    words = [
        philox_of_one((choice & 0xFFFFFFFF, output, number, purpose), key)[:2] for number in range(count)
    ]
    w0, w1 = np.array(words, dtype=np.uint64).reshape(count, 2).T
    return uniform(w0, w1)


def draw(probabilities: Probabilities, number: float) -> int:
    """Return the token at `number` in (0, 1) of the cumulative distribution."""
    cumulated = np.cumsum(probabilities)
    index = np.searchsorted(cumulated, number * cumulated[-1], side="right")
    return int(min(index, np.flatnonzero(probabilities)[-1]))


def verify_by_rejection(
    walk: Walk, target: Callable[[], Probabilities], seed: int, choice: int, output: int
) -> None:
    """Complete `walk` over a tree that carries `draws`. `target()` returns the distribution [vocabulary] at
    the path's last node, after the path's tokens so far; the first of them is output number `output`."""
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
    """Return norm(max(0, p - q)), or p itself where nothing is left, which only rounding can cause."""
    left = np.maximum(p - q, 0.0)
    total = left.sum()
    return left / total if total > 0.0 else p
