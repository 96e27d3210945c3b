"""Division of a step's query token budget between draft tokens and prompt chunks."""

from collections.abc import Sequence

from streamserve.contracts.tree import TokenTree


def divide(
    budget: int, limits: Sequence[int], due: Sequence[int], trees: Sequence[TokenTree | None]
) -> list[tuple[int, TokenTree | None]]:
    """Return, for each request in rank order, how many of its `limits[i]` committed tokens to compute, and
    the tree to verify after them. All query tokens together stay within `budget`, as the `limits` do.

    What is `due`, and at least one token for each request, comes first, then whole trees, then longer chunks.
    A tree only makes sense after the last token, so a request with a tree gets all of its `limits[i]` tokens
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
