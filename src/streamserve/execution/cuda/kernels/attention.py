"""Attention over the paged KV cache: one Triton kernel for prefill chunks, decoding and token trees.

grid (programs, kv heads): a program takes every `programs`-th item of one tile size

    item = sequence, query rows, keys        (cuda/attention.py)
      q   [tile, dim]     rows x the query heads of the kv head      in registers
      for the keys, KEYS at a time:           block table -> addresses
        scores = q kᵀ; softmax so far (maximum, sum) and acc += p v  float32
      complete -> out;  part of the keys -> workspace, for `_combine`
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

from streamserve.execution.cuda.attention import TILES, AttentionWork, padded_group
from streamserve.execution.cuda.kernels.example import KernelExample

LOG2_E = 1.4426950408889634

KEYS = {16: 64, 64: 64, 128: 64}
WARPS = {16: 4, 64: 4, 128: 8}
STAGES = {16: 3, 64: 3, 128: 3}
"""By tile size: keys of a step of the loop, warps, and steps whose loads are in flight."""

PROGRAMS = {16: 528, 64: 264, 128: 132}
"""Programs of a launch, by tile size: as many as a large device runs at a time."""


@triton.jit
def _attend(
    q, cache, tables, limits, firsts, bits, items, starts, out, partial_out, partial_sums,
    q_stride, table_stride, scale, softcap,
    TILE_INDEX: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WORDS: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    TILE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    program, kv_head = tl.program_id(0), tl.program_id(1)
    first_item, last_item = tl.load(starts + TILE_INDEX), tl.load(starts + TILE_INDEX + 1)
    tile = tl.arange(0, TILE)
    dims = tl.arange(0, PADDED_DIM)
    token, member = tile // PADDED_GROUP, tile % PADDED_GROUP
    head = kv_head * GROUP + member
    has_dim = dims < DIM
    for item in range(first_item + program, last_item, tl.num_programs(0)):
        sequence = tl.load(items + item * 8)
        first_row = tl.load(items + item * 8 + 1)
        rows = tl.load(items + item * 8 + 2)
        begin = tl.load(items + item * 8 + 3)
        end = tl.load(items + item * 8 + 4)
        partial = tl.load(items + item * 8 + 5)
        live = (token < rows) & (member < GROUP)
        row = first_row + token
        q_offset = row.to(tl.int64) * q_stride + head * DIM
        queries = tl.load(q + q_offset[:, None] + dims[None, :], live[:, None] & has_dim[None, :], 0.0)
        limit = tl.load(limits + row, live, 0)
        first = tl.load(firsts + row, live, 0)
        # All rows see the keys from `seen_from` up to `seen_to`: no mask there.
        seen_from = tl.max(first)
        seen_to = tl.min(tl.where(live, limit, 2147483647))
        peak = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        acc = tl.zeros([TILE, PADDED_DIM], tl.float32)
        table = tables + sequence.to(tl.int64) * table_stride
        for start in range(begin, end, KEYS):
            key = start + tl.arange(0, KEYS)
            inside = key < end
            block = tl.load(table + key // BLOCK_SIZE, inside, 0).to(tl.int64)
            slot = ((block * 2 * KV_HEADS + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE) * DIM
            k = tl.load(cache + slot[None, :] + dims[:, None], inside[None, :] & has_dim[:, None], 0.0)
            v_slot = slot + KV_HEADS * BLOCK_SIZE * DIM
            v = tl.load(cache + v_slot[:, None] + dims[None, :], inside[:, None] & has_dim[None, :], 0.0)
            scores = tl.dot(queries, k.to(queries.dtype), input_precision=PRECISION) * scale
            if SOFTCAP:
                scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)
            scores = scores * 1.4426950408889634
            if (start + KEYS > seen_to) | (start < seen_from) | (start + KEYS > end):
                seen = (key[None, :] < limit[:, None]) & (key[None, :] >= first[:, None])
                if WORDS > 0:
                    node = key[None, :] - limit[:, None] + 1
                    inside_tree = (node > 0) & (node < 32 * WORDS) & live[:, None]
                    word = tl.load(bits + row[:, None] * WORDS + node // 32, inside_tree, 0)
                    seen = seen | (inside_tree & (((word >> (node & 31)) & 1) != 0))
                scores = tl.where(seen & inside[None, :], scores, float("-inf"))
            highest = tl.maximum(peak, tl.max(scores, 1))
            # A row that has seen no key yet has no maximum.
            base = tl.where(highest == float("-inf"), 0.0, highest)
            weights = tl.exp2(scores - base[:, None])
            keep = tl.exp2(peak - base)
            total = total * keep + tl.sum(weights, 1)
            acc = acc * keep[:, None]
            acc = tl.dot(weights.to(queries.dtype), v.to(queries.dtype), acc, input_precision=PRECISION)
            peak = highest
        if partial < 0:
            result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
            offset = (row.to(tl.int64) * HEADS + head) * DIM
            mask = live[:, None] & has_dim[None, :]
            tl.store(out + offset[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask)
        else:
            place = (partial + token).to(tl.int64) * HEADS + head
            mask = live[:, None] & has_dim[None, :]
            tl.store(partial_out + place[:, None] * DIM + dims[None, :], acc, mask)
            tl.store(partial_sums + place * 2, peak, live)
            tl.store(partial_sums + place * 2 + 1, total, live)


@triton.jit
def _combine(
    combine, partial_out, partial_sums, out,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(combine + row * 3)
    stride = tl.load(combine + row * 3 + 1)
    count = tl.load(combine + row * 3 + 2)
    if count > 0:
        dims = tl.arange(0, PADDED_DIM)
        has_dim = dims < DIM
        peak = float("-inf")
        for part in range(count):
            place = (first + part * stride).to(tl.int64) * HEADS + head
            peak = tl.maximum(peak, tl.load(partial_sums + place * 2))
        total = 0.0
        acc = tl.zeros([PADDED_DIM], tl.float32)
        for part in range(count):
            place = (first + part * stride).to(tl.int64) * HEADS + head
            weight = tl.exp2(tl.load(partial_sums + place * 2) - peak)
            total += weight * tl.load(partial_sums + place * 2 + 1)
            acc += weight * tl.load(partial_out + place * DIM + dims, has_dim, 0.0)
        offset = (row.to(tl.int64) * HEADS + head) * DIM
        tl.store(out + offset + dims, (acc / total).to(out.dtype.element_ty), has_dim)


def attend(
    q: Tensor,
    cache_layer: Tensor,
    work: AttentionWork,
    tables: Tensor,
    limits: Tensor,
    out: Tensor,
    workspace: Tensor,
    scale: float,
    tiles: tuple[bool, ...],
    combined: bool,
    softcap: float = 0.0,
) -> None:
    """As plain.attention.attend. `workspace` (float32) holds the partial results."""
    rows, heads, dim = q.shape
    kv_heads, block_size = cache_layer.shape[2:4]
    partials = workspace.numel() // (heads * (dim + 2))
    partial_out, partial_sums = workspace[: partials * heads * dim], workspace[partials * heads * dim :]
    group = heads // kv_heads
    for index, tile in enumerate(TILES):
        if not tiles[index]:
            continue
        programs = max(1, PROGRAMS[tile] // kv_heads)
        _attend[(programs, kv_heads)](
            q, cache_layer, tables, limits, work.firsts, work.bits, work.items, work.starts, out,
            partial_out, partial_sums, q.stride(0), tables.stride(0), scale, softcap,
            TILE_INDEX=index, HEADS=heads, KV_HEADS=kv_heads, GROUP=group, PADDED_GROUP=padded_group(group),
            DIM=dim, PADDED_DIM=max(16, triton.next_power_of_2(dim)), BLOCK_SIZE=block_size,
            WORDS=work.bits.shape[1], SOFTCAP=softcap != 0.0,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            TILE=tile, KEYS=KEYS[tile], num_warps=WARPS[tile], num_stages=STAGES[tile],
        )  # fmt: skip
    if combined:
        _combine[(rows, heads)](
            work.combine, partial_out, partial_sums, out,
            HEADS=heads, DIM=dim, PADDED_DIM=triton.next_power_of_2(dim), num_warps=2,
        )  # fmt: skip


def examples() -> list[KernelExample]:
    """Return the launches of a model with 32 heads of 128 dimensions, four to a key-value head."""
    pointers = dict.fromkeys(("q", "cache", "out"), "*bf16")
    pointers |= dict.fromkeys(("tables", "limits", "firsts", "bits", "items", "starts"), "*i32")
    pointers |= {"partial_out": "*fp32", "partial_sums": "*fp32", "q_stride": "i32", "table_stride": "i32"}
    pointers |= {"scale": "fp32", "softcap": "fp32"}
    fixed = {
        "HEADS": 32, "KV_HEADS": 8, "GROUP": 4, "PADDED_GROUP": 4, "DIM": 128, "PADDED_DIM": 128,
        "BLOCK_SIZE": 16, "SOFTCAP": False, "PRECISION": "tf32",
    }  # fmt: skip
    launches = [
        KernelExample(
            f"attend tile {tile}, {32 * words} nodes", _attend, pointers,
            fixed | {"TILE_INDEX": index, "TILE": tile, "KEYS": KEYS[tile], "WORDS": words},
            WARPS[tile], STAGES[tile], ("q_stride",),
        )
        for index, tile in enumerate(TILES)
        for words in (0, 2)
    ]  # fmt: skip
    combining = {"combine": "*i32", "partial_out": "*fp32", "partial_sums": "*fp32", "out": "*bf16"}
    sizes = {"HEADS": 32, "DIM": 128, "PADDED_DIM": 128}
    return [*launches, KernelExample("combine", _combine, combining, sizes, num_warps=2)]
