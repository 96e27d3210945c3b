"""Divide the free memory of this process: the sizes of the KV pool and the host pool that fit."""

import errno
import logging
from dataclasses import dataclass

from streamserve.protocol.config import ModelConfig
from streamserve.protocol.errors import CheckpointError
from streamserve.system.available_memory import address_limit, available_bytes

log = logging.getLogger(__name__)

KV_FRACTION = 0.4
"""Default share of the free memory that the KV pool takes."""


@dataclass(frozen=True)
class HostShare:
    """A worker's share of its machine. The machine's `workers` divide memory and GPUs evenly; this one is
    number `number`, counted from 0."""

    number: int = 0
    workers: int = 1

    @property
    def memory(self) -> float:
        """The worker's fraction of the free memory."""
        return 1 / self.workers


ALONE = HostShare()
"""The share of a machine's only worker."""


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error is a failed allocation: in Python, in a system call, or in torch, whose errors
    can only be told by their text."""
    by_system = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return by_system or isinstance(error, MemoryError) or "allocate memory" in str(error)


def out_of_memory_text() -> str:
    """Return the message for a model whose loading failed by lack of memory."""
    limit = address_limit()
    of_addresses = "" if limit is None else f" (ulimit -v allows {_mib(limit)} of addresses)"
    return (
        f"memory ran out while the model was loaded; {_mib(available_bytes())} are free{of_addresses}: raise "
        "the limit, set less --kv-cache-bytes, or load a smaller model"
    )


def after_weights(weight_bytes: int, available: int) -> int:
    """Return the bytes that the weights leave of `available`. Raises CheckpointError if they do not fit."""
    if weight_bytes > available:
        raise CheckpointError(
            f"the weights need {_mib(weight_bytes)}, but {_mib(available)} of memory are free"
        )
    return available - weight_bytes


def after_adapters(adapter_bytes: int, available: int) -> int:
    """Return the bytes that LoRA adapters leave of `available`. Raises CheckpointError if they do not fit."""
    if adapter_bytes > available:
        raise CheckpointError(
            f"--max-loras and --max-lora-rank reserve {_mib(adapter_bytes)} for adapters, but "
            f"{_mib(available)} of memory are free: lower them, or set --max-lora-bytes"
        )
    return available - adapter_bytes


def size_pool(
    config: ModelConfig, block_bytes: int, model_limit: int, available: int, fraction: float = KV_FRACTION
) -> tuple[int, int]:
    """Return the number of KV blocks and `max_model_len`, for a model with `model_limit` positions in
    `available` bytes of memory. By default the pool takes `fraction` of the memory. Raises CheckpointError,
    which names the flag to change, if the settings conflict."""
    max_len = config.max_model_len or model_limit
    if max_len > model_limit:
        raise CheckpointError(f"--max-model-len {max_len} is above the checkpoint's {model_limit} positions")
    context = -(-max_len // config.block_size)
    blocks, source = _requested_blocks(config, block_bytes, context, available, fraction)
    if not 0 < blocks * block_bytes <= available:
        raise CheckpointError(
            f"{source} makes a KV pool of {blocks} blocks of {_mib(block_bytes)}, but it must hold at "
            f"least one block, and {_mib(available)} of memory are free"
        )
    if blocks < context and config.max_model_len is not None:
        raise CheckpointError(
            f"--max-model-len {max_len} needs {context} KV blocks, but {source} makes a pool of {blocks}"
        )
    if blocks < context:
        _warn_of_context(config, max_len, blocks * config.block_size, context, block_bytes, source)
    return blocks, min(max_len, blocks * config.block_size)


def _warn_of_context(
    config: ModelConfig, positions: int, max_len: int, context: int, block_bytes: int, source: str
) -> None:
    """Warn that a KV pool has fewer tokens than the model's context, which takes `context` blocks."""
    whole = f"--kv-cache-bytes {context * block_bytes}"
    if config.num_blocks is not None:
        whole = f"--num-blocks {context}"
    log.warning(
        "the context is limited to %d tokens instead of the model's %d, because %s makes a KV pool of "
        "that size; for the model's whole context give %s, or set --max-model-len to accept the limit",
        max_len, positions, source, whole,
    )  # fmt: skip


def size_swap(config: ModelConfig, block_bytes: int, available: int) -> int:
    """Return the number of blocks of the host pool that the settings ask for. Raises CheckpointError if they
    do not fit into `available` bytes, or if the pool has no block although the settings ask for one."""
    blocks = int((config.swap_space or 0.0) * 2**30) // block_bytes
    if blocks * block_bytes > available:
        raise CheckpointError(
            f"--swap-space {config.swap_space:g} is too large: {_mib(available)} of memory are free"
        )
    if config.eviction == "swap" and not blocks:
        raise CheckpointError(
            f"--eviction swap needs --swap-space for at least one block of {_mib(block_bytes)}"
        )
    if config.swap_space and not blocks:
        raise CheckpointError(
            f"--swap-space {config.swap_space:g} holds no KV block of {_mib(block_bytes)}: give more, or 0"
        )
    return blocks


def _requested_blocks(
    config: ModelConfig, block_bytes: int, context: int, available: int, fraction: float
) -> tuple[int, str]:
    """Return the size of the KV pool in blocks, and the setting that determines it, for messages."""
    if config.num_blocks is not None:
        return config.num_blocks, f"--num-blocks {config.num_blocks}"
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes // block_bytes, f"--kv-cache-bytes {config.kv_cache_bytes}"
    affordable = int(available * fraction) // block_bytes
    blocks = min(config.max_num_seqs * context, affordable)
    if config.max_model_len is not None:
        return max(blocks, context), f"--max-model-len {config.max_model_len}"
    return blocks, f"{fraction:.0%} of the free memory"


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
