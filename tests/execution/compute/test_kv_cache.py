"""The pool stores each vector where the layout says, and performs copies in order."""

import numpy as np
import pytest
import torch

from streamserve.execution.compute.kv_cache import KVCache, bytes_per_block
from streamserve.execution.compute.kv_vectors import dequantize_vectors, quantize_vectors
from tests.execution.kv_spec import BLOCKS, DIM, HEADS, LAYERS, SLOTS, SPEC


@pytest.fixture(params=[False, True], ids=["float32", "int8"])
def cache(request) -> KVCache:
    """Return a pool in which every vector is different: floats, or integers and a scale."""
    cache = KVCache(SPEC, BLOCKS, SLOTS, torch.float32, quantized=request.param)
    numbers = torch.arange(LAYERS * BLOCKS * 2 * HEADS * SLOTS * DIM).view(*cache.data.shape[:-1], DIM)
    cache.data.copy_(quantize_vectors(numbers) if request.param else numbers)
    return cache


def stored(cache: KVCache, vectors: torch.Tensor) -> torch.Tensor:
    """Return vectors in the form in which this cache stores them."""
    return quantize_vectors(vectors) if cache.quantized else vectors


def test_layout_is_layer_block_kind_head_slot_dim(cache):
    slots = np.array([1 * SLOTS + 2, 4 * SLOTS + 0])
    keys, values = torch.randn(2, 2, HEADS, DIM)
    before = cache.data.clone()
    cache.write(1, cache.write_index(slots), keys, values)
    for row, (block, slot) in enumerate([(1, 2), (4, 0)]):
        assert torch.equal(cache.data[1, block, 0, :, slot], stored(cache, keys[row]))
        assert torch.equal(cache.data[1, block, 1, :, slot], stored(cache, values[row]))
        before[1, block, :, :, slot] = cache.data[1, block, :, :, slot]
    assert torch.equal(cache.data, before)


def test_read_gives_the_slots_of_blocks_in_table_order(cache):
    table = [5, 0, 3]
    keys, values = cache.read(1, cache.read_index(table))
    assert keys.shape == (HEADS, len(table) * SLOTS, DIM)
    assert keys.dtype == values.dtype == cache.dtype
    data = dequantize_vectors(cache.data, cache.dtype) if cache.quantized else cache.data
    for index, block in enumerate(table):
        part = slice(index * SLOTS, (index + 1) * SLOTS)
        assert torch.equal(keys[:, part], data[1, block, 0])
        assert torch.equal(values[:, part], data[1, block, 1])


def test_block_copies_happen_one_after_another_in_all_layers(cache):
    before = cache.data.clone()
    cache.copy_blocks([(0, 1), (1, 2), (3, 0)])
    assert torch.equal(cache.data[:, 1], before[:, 0])
    assert torch.equal(cache.data[:, 2], before[:, 0])
    assert torch.equal(cache.data[:, 0], before[:, 3])
    assert torch.equal(cache.data[:, 3:], before[:, 3:])


def test_slots_move_all_at_once_even_where_they_overlap(cache):
    before = cache.data.clone()
    cache.move_slots(np.array([6, 9, 5]), np.array([5, 6, 20]))

    def at(data: torch.Tensor, slot: int) -> torch.Tensor:
        return data[:, slot // SLOTS, :, :, slot % SLOTS]

    for source, destination in [(6, 5), (9, 6), (5, 20), (7, 7), (9, 9)]:
        assert torch.equal(at(cache.data, destination), at(before, source))


def test_moving_nothing_changes_nothing(cache):
    before = cache.data.clone()
    cache.move_slots(np.array([], dtype=np.int64), np.array([], dtype=np.int64))
    assert torch.equal(cache.data, before)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_blocks_bytes_are_what_the_pool_takes_for_it(dtype, quantized):
    size = bytes_per_block(SPEC, SLOTS, dtype, quantized)
    assert size == 2 * LAYERS * HEADS * SLOTS * (DIM + 4 if quantized else DIM * dtype.itemsize)
    assert size * BLOCKS == KVCache(SPEC, BLOCKS, SLOTS, dtype, quantized=quantized).data.nbytes
    memory = torch.empty(size * BLOCKS, dtype=torch.uint8)
    cache = KVCache(SPEC, BLOCKS, SLOTS, dtype, memory, quantized=quantized)
    assert cache.data.data_ptr() == memory.data_ptr()
    assert cache.as_bytes().shape == (LAYERS, BLOCKS, size // LAYERS)
