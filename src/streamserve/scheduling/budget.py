"""Division of a step's query token budget between draft tokens and prompt chunks."""

from collections.abc import Sequence

from streamserve.contracts.tree import TokenTree


def divide(
    budget: int, limits: Sequence[int], due: Sequence[int], trees: Sequence[TokenTree | None]
) -> list[tuple[int, TokenTree | None]]:
    """Return, for each request in service order, how many of its `limits[i]` committed tokens to compute, and
    the tree to verify after them. All query tokens together stay within `budget`; the sum of `limits` must be
    within it.

    Each request first gets the tokens that are `due`, at least one. Then whole trees are added, then longer
    chunks. A tree can only follow the last token: a request gets all of its `limits[i]` tokens with its tree,
    or loses the tree.
    """
    chunks = [min(limit, max(minimum, 1)) for limit, minimum in zip(limits, due, strict=True)]
    left = budget - sum(chunks)
    selected: list[TokenTree | None] = [None] * len(limits)
    for i, tree in enumerate(trees):
        cost = (len(tree) - 1 if tree else 0) + limits[i] - chunks[i]
        if tree and cost <= left:
            selected[i], chunks[i] = tree, limits[i]
            left -= cost
    for i, limit in enumerate(limits):
        extra = min(limit - chunks[i], max(left, 0))
        chunks[i] += extra
        left -= extra
    return list(zip(chunks, selected, strict=True))
