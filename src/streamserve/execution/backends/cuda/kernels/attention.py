"""Attention over the paged KV cache: one Triton kernel for prefill chunks, decoding and token trees.

A unit of work is an item (cuda/attention.py) with a key-value head. Program p takes units p, p + programs, …

    q   [tile, dim]      the item's rows x the query heads of the kv head
    for KEYS slots at a time:             block table -> addresses, one step ahead of the keys and values
      scores = q kᵀ                       masked only in steps where some row does not see every slot
      online softmax in float32: maximum, sum of weights, acc += weights v
    -> out, or the workspace if the item has a part of the keys: see _combine

Scores are in units of log2, so that exponentials are powers of two.
"""
# mypy: ignore-errors

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from streamserve.execution.backends.cuda.attention import ITEM_FIELDS, TILES, AttentionWork, padded_group

LOG2_E = tl.constexpr(1.4426950408889634)

ALL_TILES = (True,) * len(TILES)

COMBINED_PARTS = 16
"""Partial results of a row that `_combine` reads at a time."""


@dataclass(frozen=True)
class AttentionLaunch:
    """Launch of the kernel for one tile size: keys of a step, warps, steps whose loads are in flight, and
    programs per multiprocessor."""

    keys: int
    warps: int
    stages: int
    resident: int


@triton.jit
def _table_entries(table, key, begin, end, BLOCK_SIZE: tl.constexpr):
    """Return the blocks of the slots `key`, and 0 for slots outside of the item."""
    return tl.load(table + key // BLOCK_SIZE, (key >= begin) & (key < end), 0)


@triton.jit
def _tree_mask(bits, row, node, live, WORDS: tl.constexpr):
    """Return, for tree nodes `node` [tile, keys], whether the row sees the node."""
    seen = node != node  # none
    for word in tl.static_range(WORDS):
        own = tl.load(bits + row * WORDS + word, live, 0)
        inside = (node > 0) & (node >= word * 32) & (node < word * 32 + 32)
        seen = seen | (inside & (((own[:, None] >> (node & 31)) & 1) != 0))
    return seen


@triton.jit
def _operand(x, dtype: tl.constexpr, UPCAST: tl.constexpr):
    """Return `x` in `dtype` for tl.dot. UPCAST: widened to float32, as the interpreter's dot takes bf16 bits
    as integers."""
    if x.dtype.is_int():
        x = x.to(tl.float32)
    x = x.to(dtype)
    return x.to(tl.float32) if UPCAST else x


@triton.jit
def _accumulate(
    acc, peak, total, queries, cache, cache_scales, table, bits, row, live, limit, first, kv_head,
    begin, end, steps, front, gap, qk_scale, softcap,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WORDS: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, UPCAST: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Add `steps` steps to `acc`, `peak` and `total`. Step i has group i of KEYS slots of the item, or group
    i + `gap` from i = `front` on."""
    WIDTH: tl.constexpr = DIM + 4 * QUANTIZED
    dims = tl.arange(0, PADDED_DIM)
    lanes = tl.arange(0, KEYS)
    origin = begin // KEYS * KEYS
    key = origin + tl.where(front > 0, 0, gap) * KEYS + lanes
    block = _table_entries(table, key, begin, end, BLOCK_SIZE)
    for i in range(0, steps):
        if QUANTIZED:  # in the other form, Triton 3.6 assumes vectors of 132 bytes to be aligned to 16
            offset = (block.to(tl.int64) * (2 * KV_HEADS) + kv_head) * (BLOCK_SIZE * WIDTH)
            offset += (key % BLOCK_SIZE) * WIDTH
        else:  # in the other form, code for 9.0 would wait for a step's blocks before it attends its keys
            offset = (block.to(tl.int64) * (2 * KV_HEADS) + kv_head) * BLOCK_SIZE + key % BLOCK_SIZE
            offset *= WIDTH
        pointers = cache + offset[:, None] + dims[None, :]
        if MASKED:
            inside = (key >= begin) & (key < end)
            loaded = inside[:, None] & (dims < DIM)[None, :]
            k = tl.load(pointers, loaded, 0.0)
            v = tl.load(pointers + KV_HEADS * BLOCK_SIZE * WIDTH, loaded, 0.0)
        elif DIM < PADDED_DIM:
            k = tl.load(pointers, (dims < DIM)[None, :], 0.0)
            v = tl.load(pointers + KV_HEADS * BLOCK_SIZE * WIDTH, (dims < DIM)[None, :], 0.0)
        else:
            k = tl.load(pointers)
            v = tl.load(pointers + KV_HEADS * BLOCK_SIZE * WIDTH)
        if QUANTIZED:
            scaled = (key >= begin) & (key < end)
            scales = cache_scales + (offset + DIM) // 4
            k_scales = tl.load(scales, scaled, 0.0)
            v_scales = tl.load(scales + KV_HEADS * BLOCK_SIZE * (WIDTH // 4), scaled, 0.0)
        next_key = origin + (i + 1 + tl.where(i + 1 < front, 0, gap)) * KEYS + lanes
        block = _table_entries(table, next_key, begin, end, BLOCK_SIZE)

        k = _operand(k, queries.dtype, UPCAST)
        v = _operand(v, queries.dtype, UPCAST)
        scores = tl.dot(_operand(queries, queries.dtype, UPCAST), tl.trans(k), input_precision=PRECISION)
        if QUANTIZED:
            scores *= k_scales[None, :]
        factor = qk_scale
        if SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            scores = softcap - 2.0 * softcap / (tl.exp2(scores * qk_scale) + 1.0)
            factor = 1.0
        if MASKED:
            seen = (key[None, :] < limit[:, None]) & (key[None, :] >= first[:, None])
            if WORDS > 0:
                seen = seen | _tree_mask(bits, row, key[None, :] - limit[:, None] + 1, live, WORDS)
            scores = tl.where(seen & inside[None, :], scores, float("-inf"))
        highest = tl.maximum(peak, tl.max(scores, 1) * factor)
        base = highest
        if MASKED:  # a row that has not seen a key yet has no maximum
            base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores * factor - base[:, None])
        keep = tl.exp2(peak - base)
        total = total * keep + tl.sum(weights, 1)
        acc = acc * keep[:, None]
        if QUANTIZED:
            weights *= v_scales[None, :]
        weights = _operand(weights, queries.dtype, UPCAST)
        acc = tl.dot(weights, v, acc, input_precision=PRECISION)
        peak = highest
        key = next_key
    return acc, peak, total


@triton.jit(do_not_specialize=["table_stride"])
def _attend(
    q, cache, cache_scales, sinks, tables, limits, firsts, bits, items, starts, out, partials, partial_sums,
    table_stride, qk_scale, softcap, v_scale,
    INDEX: tl.constexpr, Q_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, PADDED_GROUP: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WORDS: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    TILE: tl.constexpr, KEYS: tl.constexpr, ITEM_FIELDS: tl.constexpr, UPCAST: tl.constexpr,
    QUANTIZED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Attend all items of tile size number INDEX."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    dims = tl.arange(0, PADDED_DIM)
    token = tl.arange(0, TILE) // PADDED_GROUP
    member = tl.arange(0, TILE) % PADDED_GROUP
    first_unit = tl.load(starts + INDEX) * KV_HEADS + tl.program_id(0)
    end_unit = tl.load(starts + INDEX + 1) * KV_HEADS
    for unit in range(first_unit, end_unit, tl.num_programs(0)):
        item = items + unit // KV_HEADS * ITEM_FIELDS
        kv_head = unit % KV_HEADS
        table = tables + tl.load(item).to(tl.int64) * table_stride
        row = tl.load(item + 1) + token
        live = (token < tl.load(item + 2)) & (member < GROUP)
        begin = tl.load(item + 3)
        end = tl.load(item + 4)
        partial = tl.load(item + 5)
        head = kv_head * GROUP + member
        stored = live[:, None] & (dims < DIM)[None, :]
        row_head = row.to(tl.int64) * Q_STRIDE + head * DIM
        queries = tl.load(q + row_head[:, None] + dims[None, :], stored, 0.0)
        limit = tl.load(limits + row, live, 0)
        first = tl.load(firsts + row, live, 0)
        peak = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        acc = tl.zeros([TILE, PADDED_DIM], tl.float32)
        origin = begin // KEYS * KEYS
        steps = tl.cdiv(end - origin, KEYS)
        if TILE > 16:
            # All rows see all slots of the steps from `full` up to `full_end`.
            seen_from = tl.maximum(tl.max(first), begin)
            seen_to = tl.minimum(tl.min(tl.where(live, limit, 2147483647)), end)
            full = tl.minimum(tl.cdiv(seen_from - origin, KEYS), steps)
            full_end = tl.maximum((tl.maximum(seen_to - origin, 0)) // KEYS, full)
            acc, peak, total = _accumulate(
                acc, peak, total, queries, cache, cache_scales, table, bits, row, live, limit, first, kv_head,
                begin, end, full_end - full, 0, full, qk_scale, softcap,
                KV_HEADS, DIM, PADDED_DIM, BLOCK_SIZE, WORDS, SOFTCAP, PRECISION, KEYS, False, UPCAST,
                QUANTIZED,
            )  # fmt: skip
        else:
            # Masks cost little here, and a second loop would wait for its first keys.
            full = 0
            full_end = 0
        acc, peak, total = _accumulate(
            acc, peak, total, queries, cache, cache_scales, table, bits, row, live, limit, first, kv_head,
            begin, end, steps - (full_end - full), full, full_end - full, qk_scale, softcap,
            KV_HEADS, DIM, PADDED_DIM, BLOCK_SIZE, WORDS, SOFTCAP, PRECISION, KEYS, True, UPCAST, QUANTIZED,
        )  # fmt: skip
        if partial < 0:
            if SINKS:
                sink = tl.load(sinks + head, live, 0.0) * LOG2_E
                highest = tl.maximum(peak, sink)
                keep = tl.exp2(peak - highest)
                acc = acc * keep[:, None]
                total = total * keep + tl.exp2(sink - highest)
            result = acc * (v_scale / tl.where(total == 0.0, 1.0, total))[:, None]
            vector = row.to(tl.int64) * OUT_STRIDE + head * DIM
            tl.store(out + vector[:, None] + dims[None, :], result.to(out.dtype.element_ty), stored)
        else:
            vector = (partial + token).to(tl.int64) * HEADS + head
            tl.store(partials + vector[:, None] * DIM + dims[None, :], acc * v_scale, stored)
            tl.store(partial_sums + vector * 2, peak, live)
            tl.store(partial_sums + vector * 2 + 1, total, live)


@triton.jit
def _combine(
    combine, partials, partial_sums, sinks, out,
    OUT_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    PARTS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Write the output of one row and head from the row's partial results, if there are any."""
    row, head = tl.program_id(0), tl.program_id(1)
    count = tl.load(combine + row * 3 + 2)
    if count > 0:
        first = tl.load(combine + row * 3)
        stride = tl.load(combine + row * 3 + 1)
        dims = tl.arange(0, PADDED_DIM)
        peak = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        acc = tl.zeros([PADDED_DIM], tl.float32)
        for start in range(0, count, PARTS):
            part = start + tl.arange(0, PARTS)
            inside = part < count
            vector = (first + part * stride).to(tl.int64) * HEADS + head
            peaks = tl.load(partial_sums + vector * 2, inside, float("-inf"))
            totals = tl.load(partial_sums + vector * 2 + 1, inside, 0.0)
            loaded = inside[:, None] & (dims < DIM)[None, :]
            values = tl.load(partials + vector[:, None] * DIM + dims[None, :], loaded, 0.0)
            highest = tl.maximum(peak, tl.max(peaks, 0))
            base = tl.where(highest == float("-inf"), 0.0, highest)
            weights = tl.exp2(peaks - base)
            keep = tl.exp2(peak - base)
            total = total * keep + tl.sum(weights * totals, 0)
            acc = acc * keep + tl.sum(weights[:, None] * values, 0)
            peak = highest
        if SINKS:
            sink = tl.load(sinks + head) * LOG2_E
            highest = tl.maximum(peak, sink)
            keep = tl.exp2(peak - highest)
            acc = acc * keep
            total = total * keep + tl.exp2(sink - highest)
        vector = row.to(tl.int64) * OUT_STRIDE + head * DIM
        tl.store(out + vector + dims, (acc / total).to(out.dtype.element_ty), dims < DIM)


def attend(
    q: Tensor,
    cache_layer: Tensor,
    work: AttentionWork[Tensor],
    tables: Tensor,
    limits: Tensor,
    out: Tensor,
    scale: float,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: Tensor | None = None,
    *,
    workspace: Tensor,
    tiles: Sequence[bool] = ALL_TILES,
    combined: bool = True,
) -> None:
    """Attend `q` [rows, heads, dim] to the slots that each row sees, and write `out`. See
    `plain.attention.attend`; scores and values are rounded as the tensor cores do.

    `workspace` holds the partial results (attention.workspace_size). `tiles`: whether each tile size has
    items and must be launched. `combined`: whether any row may have partial results. `scale` is positive.
    Raises ValueError for heads that are not contiguous.
    """
    heads, dim = q.shape[1:]
    kv_heads, block_size = cache_layer.shape[2:4]
    if q.stride()[1:] != (dim, 1) or out.stride()[1:] != (dim, 1) or not cache_layer.is_contiguous():
        raise ValueError("attention needs contiguous heads and a contiguous cache")
    capacity = workspace.numel() // (dim + 2)
    partials, partial_sums = workspace[: capacity * dim], workspace[capacity * dim :]
    qk_scale = scale * k_scale * LOG2_E.value
    if softcap:
        qk_scale = 2.0 * qk_scale / softcap
    padded_dim = max(16, triton.next_power_of_2(dim))
    quantized = cache_layer.shape[-1] != dim
    cache_scales = cache_layer.view(torch.float32) if quantized else cache_layer
    for index, launched in enumerate(tiles):
        if not launched:
            continue
        launch = choose_launch(
            TILES[index], padded_dim, q.dtype, _capability(q.device), quantized, work.bits.shape[1] > 0
        )
        programs = launch.resident * _multiprocessors(q.device)
        _attend[(programs,)](
            q, cache_layer, cache_scales, q if sinks is None else sinks, tables, limits,
            work.firsts, work.bits, work.items, work.starts, out, partials, partial_sums,
            tables.stride(0), qk_scale, softcap * LOG2_E.value, v_scale,
            INDEX=index, Q_STRIDE=q.stride(0), OUT_STRIDE=out.stride(0), HEADS=heads, KV_HEADS=kv_heads,
            PADDED_GROUP=padded_group(heads // kv_heads), DIM=dim, PADDED_DIM=padded_dim,
            BLOCK_SIZE=block_size, WORDS=work.bits.shape[1], SOFTCAP=softcap != 0.0,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32", TILE=TILES[index], KEYS=launch.keys,
            ITEM_FIELDS=ITEM_FIELDS, UPCAST=triton.knobs.runtime.interpret and q.dtype == torch.bfloat16,
            QUANTIZED=quantized, SINKS=sinks is not None,
            num_warps=launch.warps, num_stages=launch.stages,
        )  # fmt: skip
    if combined:
        combine(work.combine, partials, partial_sums, out, sinks)


def combine(
    places: Tensor, partials: Tensor, partial_sums: Tensor, out: Tensor, sinks: Tensor | None = None
) -> None:
    """Write the rows of `out` [rows, heads, dim] that have partial results, by their `places` [rows, 3]
    (AttentionWork.combine). `partials`: weighted sums, flat [partials, heads, dim]. `partial_sums`: maxima
    and sums of weights, flat [partials, heads, 2]."""
    rows, heads, dim = out.shape
    _combine[(rows, heads)](
        places, partials, partial_sums, partials if sinks is None else sinks, out,
        OUT_STRIDE=out.stride(0), HEADS=heads, DIM=dim, PADDED_DIM=max(16, triton.next_power_of_2(dim)),
        PARTS=COMBINED_PARTS, SINKS=sinks is not None, num_warps=4,
    )  # fmt: skip


def choose_launch(
    tile: int,
    padded_dim: int,
    dtype: torch.dtype,
    capability: int,
    quantized: bool = False,
    trees: bool = False,
) -> AttentionLaunch:
    """Return the launch for a tile size. It depends on the bytes of a query head, the device's compute
    capability (90 for 9.0), and on whether KV is quantized and rows have tree masks."""
    if quantized or (trees and tile > 16):
        if tile == 128:  # before 9.0, two steps with loads in flight would spill registers
            return AttentionLaunch(32, 8, 2 if capability >= 90 else 1, 1)
        if tile > 16:
            return AttentionLaunch(32, 8, 3, 1)
        return AttentionLaunch(32, 4, 3, 3 if capability >= 90 else 2)
    if padded_dim * dtype.itemsize > 256:
        return AttentionLaunch(32, 8 if tile == 128 else 4, 2, 1)
    if tile == 16:  # four programs fit (128 registers a thread, 37 KiB each); on 8.0: 142 registers
        return AttentionLaunch(32, 4, 3, 4 if capability >= 90 else 3)
    if tile == 64:
        return AttentionLaunch(64 if capability >= 90 else 32, 4, 3, 2)
    return AttentionLaunch(64, 8, 3, 1)


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU, or a small number for the interpreter."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


@lru_cache
def _capability(device: torch.device) -> int:
    """Return the compute capability of a GPU (90 for 9.0); 90 for the interpreter."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return 10 * major + minor
