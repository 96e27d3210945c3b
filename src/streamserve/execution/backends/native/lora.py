"""Pack LoRA adapters for the kernels."""

from collections.abc import Sequence
from ctypes import POINTER, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from streamserve.execution.backends.native.library import ThreadPool
from streamserve.execution.backends.native.linear import NativeLinear
from streamserve.execution.backends.native.structures import (
    CHUNK,
    LORA_MAPS,
    LoraStruct,
    LowRankColumnsStruct,
    LowRankStruct,
)
from streamserve.execution.model.linear import LinearMap
from streamserve.execution.model.lora.types import PackedAdapter, StepAdapters
from streamserve.execution.model.lora.weights import AdapterWeights, LowRankPart

COLUMNS = 16
"""Columns of a packed weight for which B is stored together, with the ranks that any of them needs."""

_RANKS = np.dtype(LowRankColumnsStruct)


def pack_adapter(
    weights: AdapterWeights, maps: Sequence[LinearMap | None], pool: ThreadPool
) -> PackedAdapter:
    """Return an adapter packed for a model with the linear maps `maps` [layers × LORA_MAPS]. All matrices are
    in one piece of memory on large pages, so that they are read at full speed."""
    packed = {}
    for (layer, kind), parts in weights.parts.items():
        linear = maps[layer * LORA_MAPS + kind]
        assert isinstance(linear, NativeLinear)
        packed[layer * LORA_MAPS + kind] = _packed(parts, linear)
    tensors = [tensor for each in packed.values() for tensor in each]
    memory = pool.memory(sum(_aligned(tensor.nbytes) for tensor in tensors))
    addresses, offset = [], 0
    for tensor in tensors:
        memory[offset : offset + tensor.nbytes] = tensor.contiguous().view(torch.uint8).flatten()
        addresses.append(memory.data_ptr() + offset)
        offset += _aligned(tensor.nbytes)
    structs = (LowRankStruct * len(maps))()
    for number, (place, (a, _, scales, _)) in enumerate(packed.items()):
        struct = structs[place]
        struct.a, struct.b, struct.scales, struct.columns = addresses[4 * number : 4 * number + 4]
        struct.rank, struct.chunks = len(scales), a.shape[1]
    return PackedAdapter(structs, memory, max(struct.rank for struct in structs))


def _aligned(size: int) -> int:
    """Return a size in bytes, rounded up to whole cache lines."""
    return -(-size // 64) * 64


def step_struct(lora: StepAdapters) -> LoraStruct:
    """Return the structure of a step's adapters for the kernels."""
    packed = [adapter.packed for adapter in lora.adapters]
    pointers = (POINTER(LowRankStruct) * len(packed))()
    for number, adapter in enumerate(packed):
        assert adapter is not None
        pointers[number] = cast(adapter.maps, POINTER(LowRankStruct))
    return LoraStruct(
        adapters=cast(pointers, POINTER(POINTER(LowRankStruct))),
        adapter_of=lora.adapter_of.ctypes.data,
        count=len(packed),
        max_rank=max(adapter.rank for adapter in packed if adapter),
    )


def _packed(parts: Sequence[LowRankPart], linear: NativeLinear) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the matrices A and B of a map's parts in the layout of cpp/lora.h, the scales of the ranks, and
    the table of B's columns."""
    sizes = [part.rank + part.rank % 2 for part in parts]  # ranks are computed in pairs
    a = torch.cat([pad(part.a, (0, -part.a.shape[1] % CHUNK, 0, part.rank % 2)) for part in parts])
    scales = torch.cat([pad(torch.full((part.rank,), part.scale), (0, part.rank % 2)) for part in parts])
    order = linear.column_order().long()
    rows = torch.zeros(linear.out_features + 1, len(a), dtype=a.dtype)  # the last one is padding
    first_of = torch.full((linear.out_features + 1,), len(a))
    last_of = torch.zeros(linear.out_features + 1, dtype=torch.int64)
    rank = 0
    for part, size in zip(parts, sizes, strict=True):
        own = slice(part.first, part.first + part.b.shape[0])
        rows[own, rank : rank + part.rank] = part.b
        first_of[own], last_of[own] = rank, rank + size
        rank += size
    first = first_of[order].view(-1, COLUMNS).amin(1)
    ranks = (last_of[order].view(-1, COLUMNS).amax(1) - first).clamp(min=0)
    first = torch.where(ranks > 0, first, 0)
    table = np.zeros(len(first), _RANKS)
    table["first"], table["ranks"] = first.numpy(), ranks.numpy()
    pieces: list[Tensor] = []
    offset = 0
    for low, count in sorted(set(zip(first.tolist(), ranks.tolist(), strict=True))):
        groups = ((first == low) & (ranks == count)).nonzero().flatten()
        table["offset"][groups.numpy()] = offset + np.arange(len(groups)) * count * COLUMNS
        lines = rows[order.view(-1, COLUMNS)[groups], low : low + count]  # [groups, columns, ranks]
        pieces.append(lines.transpose(1, 2).flatten())
        offset += pieces[-1].numel()
    pairs = a.view(rank // 2, 2, -1, CHUNK).transpose(1, 2).contiguous()
    return pairs, torch.cat(pieces), scales, torch.from_numpy(table.view(np.uint8))
