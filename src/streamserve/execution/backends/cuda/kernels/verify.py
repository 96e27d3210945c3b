"""Verification of token trees and compaction of the KV cache, as Triton kernels."""
# mypy: ignore-errors

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _walk(
    chosen, tokens, parents, firsts, tokens_out, paths_out, lengths_out,
    DEPTH: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    tree = tl.program_id(0)
    first = tl.load(firsts + tree)
    size = tl.load(firsts + tree + 1) - first
    node = 0
    length = 0
    going = size > 0
    for level in range(DEPTH):
        if going:
            token = tl.load(chosen + first + node)
            tl.store(tokens_out + tree * DEPTH + level, token)
            tl.store(paths_out + tree * DEPTH + level, node)
            length = level + 1
            child = size
            for start in range(0, size, NODES):
                other = start + tl.arange(0, NODES)
                inside = (other > node) & (other < size)
                parent = tl.load(parents + first + other, inside, -2)
                drafted = tl.load(tokens + first + other, inside, -2)
                fits = inside & (parent == node) & (drafted == token) & (token >= 0)
                child = tl.minimum(child, tl.min(tl.where(fits, other, size)))
            going = child < size
            node = tl.where(going, child, node)
    tl.store(lengths_out + tree, length)


@triton.jit
def _compact(
    data, slots, firsts, paths, lengths, layer_stride,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    tree, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + tree)
    if length > 1:
        first = tl.load(firsts + tree)
        head = tl.program_id(2)  # key heads, then value heads
        dims = tl.arange(0, PADDED_DIM)
        inside = dims < DIM
        for step in range(1, length):
            # Nodes ascend along a path: a target is never the source of a later step.
            source = tl.load(slots + first + tl.load(paths + tree * DEPTH + step)).to(tl.int64)
            target = tl.load(slots + first + step).to(tl.int64)
            if source != target:
                start = data + layer * layer_stride
                read = ((source // BLOCK_SIZE) * 2 * KV_HEADS + head) * BLOCK_SIZE + source % BLOCK_SIZE
                write = ((target // BLOCK_SIZE) * 2 * KV_HEADS + head) * BLOCK_SIZE + target % BLOCK_SIZE
                tl.store(start + write * DIM + dims, tl.load(start + read * DIM + dims, inside), inside)


def walk_trees(
    chosen: Tensor,
    tokens: Tensor,
    parents: Tensor,
    firsts: Tensor,
    tokens_out: Tensor,
    paths_out: Tensor,
    lengths_out: Tensor,
) -> None:
    """See `plain.verify.walk_trees`."""
    trees, depth = tokens_out.shape
    _walk[(trees,)](
        chosen, tokens, parents, firsts, tokens_out, paths_out, lengths_out,
        DEPTH=depth, NODES=64, num_warps=1,
    )  # fmt: skip


def compact(data: Tensor, slots: Tensor, firsts: Tensor, paths: Tensor, lengths: Tensor) -> None:
    """See `plain.verify.compact`."""
    layers, _, _, kv_heads, block_size, dim = data.shape
    _compact[(len(lengths), layers, 2 * kv_heads)](
        data, slots, firsts, paths, lengths, data.stride(0),
        KV_HEADS=kv_heads, BLOCK_SIZE=block_size, DIM=dim, PADDED_DIM=triton.next_power_of_2(dim),
        DEPTH=paths.shape[1], num_warps=1,
    )  # fmt: skip
