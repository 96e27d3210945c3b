"""Verification of token trees and compaction of the KV cache, in plain torch."""

from torch import Tensor

from streamserve.execution.compute.sampling import NOT_FINITE


def walk_trees(
    chosen: Tensor,
    tokens: Tensor,
    parents: Tensor,
    firsts: Tensor,
    tokens_out: Tensor,
    paths_out: Tensor,
    lengths_out: Tensor,
) -> None:
    """Follow the `chosen` tokens down each tree (compute/verify.py). Tree t has the nodes `firsts[t]` to
    `firsts[t + 1]` - 1, with draft `tokens` and `parents` [nodes]; parents are numbered from the tree's root.
    Writes the tokens and the nodes of each path [trees, depth], and the path's length [trees], which is 0 for
    an empty tree."""
    starts = firsts.tolist()
    for tree in range(len(lengths_out)):
        first, end = starts[tree], starts[tree + 1]
        node, length = 0, 0
        while first + node < end and length < tokens_out.shape[1]:
            token = int(chosen[first + node])
            tokens_out[tree, length], paths_out[tree, length] = token, node
            length += 1
            children = (
                child
                for child in range(node + 1, end - first)
                if parents[first + child] == node and tokens[first + child] == token != NOT_FINITE
            )
            child = next(children, None)
            if child is None:
                break
            node = child
        lengths_out[tree] = length


def compact(data: Tensor, slots: Tensor, firsts: Tensor, paths: Tensor, lengths: Tensor) -> None:
    """Move the keys and values of each path's nodes to the slots after its root, in order. `data` is [layer,
    block, k|v, kv head, slot, dim]; `slots` [nodes] has the slots of the trees' nodes."""
    block_size = data.shape[4]
    for tree, length in enumerate(lengths.tolist()):
        first = int(firsts[tree])
        for step in range(1, length):
            source, target = int(slots[first + int(paths[tree, step])]), int(slots[first + step])
            if source != target:
                moved = data[:, source // block_size, :, :, source % block_size]
                data[:, target // block_size, :, :, target % block_size] = moved
