"""The pool of KV blocks of one KV cache group: one tensor [layer][block][k|v][head][slot][vector].

A vector is a token's key or value of one head: `dim` numbers of the model's dtype or, quantized, `dim` 8-bit
integers with their scale (kv_vectors.py). Copies of blocks and slots are the same for both.

A block has `block_size` slots, one for each token. Slots are numbered over the whole pool: slot s is slot
s % block_size of block s // block_size. The engine decides which sequence owns which block.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from streamserve.execution.compute.kv_vectors import dequantize_vectors, quantize_vectors, vector_bytes
from streamserve.execution.model.layout import Ints
from streamserve.execution.model.spec import ModelSpec


def bytes_per_block(spec: ModelSpec, block_size: int, dtype: torch.dtype, quantized: bool = False) -> int:
    """Return the bytes of one block over all layers."""
    size = vector_bytes(spec.head_dim, dtype, quantized)
    return 2 * spec.num_layers * spec.num_kv_heads * block_size * size


class KVCache:
    """Keys and values of all layers, written and read in `dtype`.

    `data` [layers, blocks, 2, heads, block size, width] stores them, as int8 if `quantized`. It is a view of
    `memory`, a tensor of bytes, if that is given. `written` counts the layers that were written in all steps;
    each step writes all layers in order.
    """

    def __init__(
        self,
        spec: ModelSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        memory: Tensor | None = None,
        device: torch.device | None = None,
        quantized: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.written = np.zeros(1, np.int64)
        self.dtype = dtype
        self.quantized = quantized
        self._heads = spec.num_kv_heads
        stored = torch.int8 if quantized else dtype
        width = vector_bytes(spec.head_dim, dtype, quantized) // stored.itemsize
        shape = (spec.num_layers, num_blocks, 2, spec.num_kv_heads, block_size, width)
        # Not cleared: no slot is read before it is written, and so memory is committed only when it is used.
        self.data = (
            torch.empty(shape, dtype=stored, device=device)
            if memory is None
            else memory.view(stored).view(shape)
        )
        self._vectors = [layer.view(-1, width) for layer in self.data]
        self._head_blocks = [layer.view(-1, block_size * width) for layer in self.data]

    def as_bytes(self) -> Tensor:
        """Return `data` as a view of bytes [layer, block, bytes]."""
        return self.data.view(torch.uint8).view(self.data.shape[0], self.num_blocks, -1)

    def write_index(self, slots: Ints) -> Tensor:
        """Return the indices of these slots' vectors for `write`: [k|v, slot, head], flattened."""
        head = np.arange(2 * self._heads).reshape(2, 1, self._heads)
        block, offset = np.divmod(slots.reshape(1, -1, 1), self.block_size)
        return torch.from_numpy(((block * 2 * self._heads + head) * self.block_size + offset).ravel())

    def write(self, layer: int, index: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store `keys` and `values` [rows, head, dim] in the slots of `index`, which `write_index`
        returned."""
        vectors = torch.stack((keys, values))
        if self.quantized:
            vectors = quantize_vectors(vectors)
        self._vectors[layer].index_copy_(0, index, vectors.view(-1, vectors.shape[-1]))
        self.written += 1

    def read_index(self, blocks: Sequence[int]) -> Tensor:
        """Return the indices of these blocks for `read`: [k|v, head, block], flattened."""
        head = np.arange(2 * self._heads)[:, None]
        return torch.from_numpy((np.asarray(blocks, dtype=np.int64) * 2 * self._heads + head).ravel())

    def read(self, layer: int, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [head, slot, dim] of all slots of the blocks in `index`, in order."""
        gathered = self._head_blocks[layer].index_select(0, index)
        vectors = gathered.view(2, self._heads, -1, self.data.shape[-1])
        keys, values = dequantize_vectors(vectors, self.dtype) if self.quantized else vectors
        return keys, values

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination), in order."""
        for source, destination in copies:
            self.data[:, destination] = self.data[:, source]

    def move_slots(self, sources: Ints, destinations: Ints) -> None:
        """Copy slots. Every source is read before any destination is written, so they may overlap."""
        if not len(sources):
            return
        from_block, from_slot = np.divmod(sources, self.block_size)
        to_block, to_slot = np.divmod(destinations, self.block_size)
        self.data[:, to_block, :, :, to_slot] = self.data[:, from_block, :, :, from_slot]
