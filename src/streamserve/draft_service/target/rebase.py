"""Rebases a draft tree onto tokens committed since it was requested."""

from collections.abc import Sequence

from streamserve.contracts.tree import TokenTree


def rebase(tree: TokenTree, tokens: Sequence[int]) -> TokenTree | None:
    """Return the subtree of `tree` below the path `tokens`, which were committed since the tree was
    requested. None if the tree does not contain this path, or ends with it."""
    if not tokens:
        return tree if len(tree) > 1 else None
    path = tree.follow(tokens)
    if len(path) <= len(tokens):
        return None
    root = path[-1]
    below = {root}
    for node in range(root + 1, len(tree)):
        if tree.parents[node] in below:
            below.add(node)
    if len(below) == 1:
        return None
    nodes = sorted(below)
    index = {node: number for number, node in enumerate(nodes)}
    root_accept = tree.accept[root] or 1.0
    return TokenTree(
        tuple(tree.tokens[node] for node in nodes),
        (-1, *(index[tree.parents[node]] for node in nodes[1:])),
        (1.0, *(tree.scores[node] for node in nodes[1:])),
        (1.0, *(min(1.0, tree.accept[node] / root_accept) for node in nodes[1:])),
    )
