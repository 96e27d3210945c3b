"""Blocks of all KV cache groups return unchanged from the host pool while other blocks are written."""

import pytest
import torch

from streamserve.contracts.plan import StepPlan
from streamserve.execution.compute.executor import TorchExecutor
from streamserve.execution.compute.kv_cache import KVCache
from streamserve.execution.compute.memory import size_swap
from streamserve.execution.compute.swap import HostPool
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.errors import CheckpointError
from tests.execution.kv_spec import SPEC


def cache(num_blocks: int = 6, quantized: bool = False) -> KVCache:
    cache = KVCache(SPEC, num_blocks, 4, torch.float32, quantized=quantized)
    cache.data.copy_(100 * torch.rand(cache.data.shape))
    return cache


@pytest.mark.parametrize("quantized", [False, True])
def test_blocks_of_all_groups_come_back_unchanged(quantized: bool) -> None:
    groups = [cache(quantized=quantized), cache(quantized=quantized)]
    before = [group.data.clone() for group in groups]
    host = HostPool(groups, 3)
    with host.copying([(1, 2), (4, 0)], []) as copies:
        for group in groups:
            group.data[:, 5] = 9.0  # The concurrent step continues.
    assert copies.seconds > 0
    for group in groups:
        group.data[:, 1] = group.data[:, 4] = 0.0
    with host.copying([(5, 1)], [(2, 0), (0, 3)]):
        pass
    for group, old in zip(groups, before, strict=True):
        assert torch.equal(group.data[:, 0], old[:, 1])
        assert torch.equal(group.data[:, 3], old[:, 4])
    host.close()


def test_what_goes_wrong_in_a_copy_is_raised() -> None:
    host = HostPool([cache()], 1)
    with pytest.raises(IndexError), host.copying([(99, 0)], []):
        pass
    host.close()


def test_an_executor_without_a_host_pool_refuses_swaps() -> None:
    executor = TorchExecutor(None, cache(), None, ())
    with pytest.raises(ValueError, match="no host pool"):
        executor.run(StepPlan(1, [], [], [], [], swap_out=[(0, 0)]))


def test_swap_space_is_sized_and_checked() -> None:
    settings = ModelConfig(path="x", swap_space=1.0)
    assert size_swap(settings, 1 << 20, 2 << 30) == 1024
    assert size_swap(ModelConfig(path="x"), 1 << 20, 2 << 30) == 0
    with pytest.raises(CheckpointError, match="--swap-space 1"):
        size_swap(settings, 1 << 20, 1 << 20)
    with pytest.raises(CheckpointError, match="--eviction swap needs"):
        size_swap(ModelConfig(path="x", eviction="swap"), 1 << 20, 2 << 30)
    with pytest.raises(CheckpointError, match="holds no KV block"):
        size_swap(ModelConfig(path="x", swap_space=0.0005), 1 << 20, 2 << 30)
