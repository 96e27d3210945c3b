"""Division of a step's query token budget between draft tokens and prompt chunks."""

from collections.abc import Sequence

from streamserve.speculation.tree import TokenTree


def divide(
    budget: int, rooms: Sequence[int], due: Sequence[int], trees: Sequence[TokenTree | None]
) -> list[tuple[int, TokenTree | None]]:
    """Return, for each request in rank order, how many of its `rooms[i]` committed tokens to compute, and the
    tree to verify after them. All query tokens together stay within `budget`, as the `rooms` do.

    What is `due`, and at least one token for each request, comes first, then whole trees, then longer chunks.
    A tree only makes sense after the last token, so a request that has one gets all of its `rooms[i]` tokens
    or loses the tree.
    """
    chunks = [min(room, max(least, 1)) for room, least in zip(rooms, due, strict=True)]
    left = budget - sum(chunks)
    kept: list[TokenTree | None] = [None] * len(rooms)
    for i, tree in enumerate(trees):
        cost = (len(tree) - 1 if tree else 0) + rooms[i] - chunks[i]
        if tree and cost <= left:
            kept[i], chunks[i] = tree, rooms[i]
            left -= cost
    for i, room in enumerate(rooms):
        more = min(room - chunks[i], max(left, 0))
        chunks[i] += more
        left -= more
    return list(zip(chunks, kept, strict=True))
