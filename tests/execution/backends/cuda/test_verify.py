"""The device walks down trees and compacts KV in the same way as the host."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamserve.execution.backends.cuda.operations import operations
from streamserve.execution.compute.verify import Walk, verify
from tests.execution.strategies import trees

IMPLEMENTATIONS = ("plain", "kernels")
DEPTH = 10


def int32(values, device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@given(
    forest=st.lists(trees(vocab_size=3), min_size=1, max_size=5),
    padding=st.integers(0, 3),
    block_size=st.sampled_from([1, 3, 16]),
    data=st.data(),
)
def test_walks_and_compaction(implementation, device, forest, padding, block_size, data):
    size = sum(len(tree) for tree in forest)
    chosen = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    walks = [Walk(tree) for tree in forest]
    starts = np.cumsum([0, *(len(tree) for tree in forest)]).tolist()
    verify(walks, lambda active: [chosen[starts[n] + walks[n].path[-1]] for n in active])
    module = operations(implementation).verify
    count = len(forest) + padding
    tokens = torch.full((count, DEPTH), -9, dtype=torch.int32, device=device)
    paths, lengths = tokens.clone(), int32([-9] * count, device)
    firsts = int32([*starts, *[size] * padding], device)
    module.walk_trees(
        int32(chosen, device),
        int32([token for tree in forest for token in tree.tokens], device),
        int32([parent for tree in forest for parent in tree.parents], device),
        firsts, tokens, paths, lengths,
    )  # fmt: skip
    assert lengths.tolist() == [len(walk.tokens) for walk in walks] + [0] * padding
    for number, walk in enumerate(walks):
        assert tokens[number, : len(walk.tokens)].tolist() == walk.tokens
        assert paths[number, : len(walk.path)].tolist() == walk.path

    blocks = -(-size // block_size) + 1
    slots = np.random.default_rng(size).permutation(blocks * block_size)[:size]
    cache = torch.arange(2 * blocks * 2 * 2 * block_size * 3).view(2, blocks, 2, 2, block_size, 3).float()
    expected = cache.clone()
    for number, walk in enumerate(walks):
        for step, node in enumerate(walk.path):
            source, target = slots[starts[number] + node], slots[starts[number] + step]
            expected[:, target // block_size, :, :, target % block_size] = cache[
                :, source // block_size, :, :, source % block_size
            ]
    on_device = cache.to(device)
    module.compact(on_device, int32(slots.tolist(), device), firsts, paths, lengths)
    assert torch.equal(on_device.cpu(), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_that_is_not_finite_ends_the_walk(implementation, device):
    tokens = torch.zeros(1, DEPTH, dtype=torch.int32, device=device)
    paths, lengths = tokens.clone(), int32([0], device)
    operations(implementation).verify.walk_trees(
        int32([5, -1, 7], device), int32([1, 5, -1], device), int32([-1, 0, 1], device),
        int32([0, 3], device), tokens, paths, lengths,
    )  # fmt: skip
    assert lengths.tolist() == [2]
    assert tokens[0, :2].tolist() == [5, -1]
