"""The default host pool, for models without a setting of `swap_space`. The pool takes memory that weights and
KV caches leave, committed when its blocks are first used.

The pool is only made if copies were measured, so that the cost of swapping is known, and if the KV cache is
too small for all sequence slots, so that sequences may be evicted.
"""

import logging
from dataclasses import replace

import msgspec

from streamserve.contracts.engine_config import EngineConfig
from streamserve.execution.compute.executor import TorchExecutor
from streamserve.execution.compute.swap import HostPool
from streamserve.execution.loading.loaded import Loaded
from streamserve.execution.profile.profile import Profile
from streamserve.protocol.config import ModelConfig

log = logging.getLogger(__name__)

SPARE_FRACTION = 0.25
"""Maximum share of the memory that weights and KV caches leave."""


def default_swap_blocks(limits: EngineConfig, block_bytes: int, spare_bytes: int) -> int:
    """Return the number of host blocks: the blocks that the KV cache lacks for all sequence slots at the
    longest context, but no more than the cache has, and no more than fit into `SPARE_FRACTION` of
    `spare_bytes`."""
    contexts = limits.max_num_seqs * -(-limits.max_model_len // limits.block_size)
    affordable = int(spare_bytes * SPARE_FRACTION) // block_bytes
    return max(0, min(contexts - limits.num_blocks, limits.num_blocks, affordable))


def with_default_swap(loaded: Loaded, model: ModelConfig, profile: Profile | None) -> Loaded:
    """Return the loaded model with a default host pool, if the settings leave its size open and evict by
    cost, and `profile` has the cost of copies; otherwise return it unchanged."""
    limits = loaded.engine_config
    measured = profile is not None and profile.swap is not None
    if model.swap_space is not None or limits.eviction != "cost" or not measured:
        return loaded
    if not isinstance(loaded.executor, TorchExecutor):
        return loaded  # a device's host pool is pinned memory, which is committed at once
    blocks = default_swap_blocks(limits, loaded.kv_cache_bytes // limits.num_blocks, loaded.spare_bytes)
    if not blocks:
        return loaded
    try:
        host = HostPool(loaded.caches, blocks)
    except RuntimeError as error:  # a limit of address space, or no overcommitment of memory
        log.warning("evicted KV is recomputed, because no memory can be allocated to swap it to: %s", error)
        return loaded
    loaded.executor.swap_to(host)
    return replace(loaded, engine_config=msgspec.structs.replace(limits, swap_blocks=blocks))
