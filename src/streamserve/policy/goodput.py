"""Goodput-optimal speculation: as many expected tokens a second as the machine can give, guess by guess.

Before anything is drafted, the best shape is compared with plain decoding by what each is expected to bring.
Once trees are there (and their cost is spent), the likeliest nodes of all requests are taken together, as
many as maximise expected tokens over time. What prompt chunks cost in the same step is paid in any case and
left out, or guesses would seem cheap beside them. Measured cost curves are staircases, so every number of
nodes is looked at, not only up to the first that does not pay.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streamserve.policy.tree import TokenTree

Seconds = Callable[[int], float]
"""Seconds of a step with so many query rows."""

SLOWEST = 0.9
"""Requests without guesses keep this share of the speed they would have without speculation."""

WIDTHS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Shape:
    """What to ask of a drafter: levels, nodes a level, nodes in all (the root not counted)."""

    depth: int
    width: int

    @property
    def nodes(self) -> int:
        return self.depth * self.width


PLAIN = Shape(0, 0)


def expected_tokens(cover: float, depth: int) -> float:
    """Tokens that a step brings one request if each level has the next token with probability `cover`: the
    accepted ones and the target's own, (1 - c^(d+1)) / (1 - c)."""
    return depth + 1.0 if cover >= 1.0 else (1.0 - cover ** (depth + 1)) / (1.0 - cover)


def best_shape(
    requests: int,
    others: int,
    covers: Sequence[float],
    step: Seconds,
    draft: Callable[[Shape], float],
    depth: int,
    nodes: int,
) -> Shape:
    """The shape with the most expected tokens a second for `requests` that decode beside `others` rows that
    cannot be guessed for; PLAIN if none beats plain decoding.

    `covers[w - 1]` is the chance that the next token is among a node's best w guesses; `draft` is the cost of
    drafting a shape; `depth` and `nodes` are the largest allowed for a request.
    """
    if not requests:
        return PLAIN
    paid = step(requests + others) - step(requests)
    best, best_rate = PLAIN, requests / step(requests)
    for width in WIDTHS[: len(covers)]:
        for levels in range(1, depth + 1):
            shape = Shape(levels, width)
            if shape.nodes > nodes:
                break
            seconds = draft(shape) + step(requests * (1 + shape.nodes) + others) - paid
            rate = requests * expected_tokens(covers[width - 1], levels) / seconds
            if rate > best_rate:
                best, best_rate = shape, rate
    return best


def select(
    trees: Sequence[TokenTree], plain: int, decoding: int, spent: float, step: Seconds, budget: int
) -> list[list[int]]:
    """Which nodes of each tree to verify, ascending and with the root: those that together maximise
    F(k) / (spent + T(k)), F the expected tokens of the k likeliest nodes.

    `plain` are the step's rows without guesses, `decoding` of them of requests that decode, with a tree or
    without; `spent` seconds went into drafting; `budget` bounds the guessed nodes of all trees. Where some
    decode without a tree, the step stays short enough for them.
    """
    ranked = sorted(
        (-tree.accept[node], number, node)
        for number, tree in enumerate(trees)
        for node in range(1, len(tree))
    )[: max(budget, 0)]
    expected = float(len(trees))
    paid = step(plain) - step(decoding)
    limit = step(plain) / SLOWEST if decoding > len(trees) else float("inf")
    best, best_rate = 0, expected / (spent + step(decoding))
    for count, (accept, _, _) in enumerate(ranked, start=1):
        expected -= accept
        seconds = spent + step(plain + count)
        if seconds <= limit and expected / (seconds - paid) > best_rate:
            best, best_rate = count, expected / (seconds - paid)
    kept: list[list[int]] = [[0] for _ in trees]
    for _, number, node in ranked[:best]:
        kept[number].append(node)
    return [sorted(nodes) for nodes in kept]
