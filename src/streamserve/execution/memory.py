"""Determine the free memory of this process, and the size of the KV pool that fits in it."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from streamserve.protocol.config import ModelConfig
from streamserve.protocol.errors import CheckpointError

log = logging.getLogger(__name__)

KV_FRACTION = 0.4
"""Default share of the free memory that the KV pool takes."""


@dataclass(frozen=True)
class HostShare:
    """A worker's share of its machine: it is number `number` of the `workers` there, which divide memory and
    GPUs evenly."""

    number: int = 0
    workers: int = 1

    @property
    def memory(self) -> float:
        """Its fraction of the free memory."""
        return 1 / self.workers


ALONE = HostShare()
"""The share of the only worker of a machine."""


def available_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes available without swapping: the machine's, or what a control group leaves if less."""
    return max(0, min([_machine_bytes(proc), *_group_bytes(proc, groups)]))


def _machine_bytes(proc: Path) -> int:
    available = _entry(proc / "meminfo", "MemAvailable:")
    if available is None:  # not Linux: half of the installed memory
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return available * 1024


def _group_bytes(proc: Path, groups: Path) -> list[int]:
    """Return what each control group of this process leaves, all along its path: of version 2, and of version
    1, whose groups are mounted under `memory`."""
    headroom = [
        _group_headroom(group, "memory.limit_in_bytes", "memory.usage_in_bytes")
        for group in _along(groups / "memory", _version_1_path(proc))
    ]
    path = _entry_text(proc / "self/cgroup", "0::")
    if path is not None:
        headroom += [_group_headroom(group, "memory.max", "memory.current") for group in _along(groups, path)]
    return [value for value in headroom if value is not None]


def _version_1_path(proc: Path) -> str:
    """Return the path of this process's memory group of version 1, "/" where there is none."""
    try:
        lines = os.fsdecode((proc / "self/cgroup").read_bytes()).splitlines()
    except OSError:
        return "/"
    parts = (line.split(":", 2) for line in lines)
    return next((rest[2] for rest in parts if len(rest) == 3 and "memory" in rest[1].split(",")), "/")


def _along(mount: Path, path: str) -> list[Path]:
    """Return the group of this path, and those above it up to where they are mounted."""
    group = mount / path.lstrip("/")
    ancestors = [group, *group.parents]
    return ancestors[: ancestors.index(mount) + 1]


def _group_headroom(group: Path, limit: str, usage: str) -> int | None:
    """Return limit minus usage, where inactive file pages do not count as used."""
    try:
        headroom = int((group / limit).read_text()) - int((group / usage).read_text())
    except (OSError, ValueError):
        return None  # no such group, or no limit ("max")
    stat = group / "memory.stat"  # those of version 1 are of the group alone, and in total
    return headroom + (_entry(stat, "total_inactive_file ") or _entry(stat, "inactive_file ") or 0)


def _entry(path: Path, name: str) -> int | None:
    text = _entry_text(path, name)
    return None if text is None else int(text.split()[0])


def _entry_text(path: Path, name: str) -> str | None:
    """Return the rest of the first line that starts with `name`."""
    try:
        lines = os.fsdecode(path.read_bytes()).splitlines()
    except OSError:
        return None
    return next((line.removeprefix(name).strip() for line in lines if line.startswith(name)), None)


def after_weights(weight_bytes: int, available: int) -> int:
    """Return what the weights leave of the `available` bytes. Raises CheckpointError if they do not fit."""
    if weight_bytes > available:
        raise CheckpointError(
            f"the weights need {_mib(weight_bytes)}, but {_mib(available)} of memory are free"
        )
    return available - weight_bytes


def after_adapters(adapter_bytes: int, available: int) -> int:
    """Return what LoRA adapters leave of the `available` bytes. Raises CheckpointError if they do not fit."""
    if adapter_bytes > available:
        raise CheckpointError(
            f"--max-loras and --max-lora-rank reserve {_mib(adapter_bytes)} for adapters, but "
            f"{_mib(available)} of memory are free: lower them, or set --max-lora-bytes"
        )
    return available - adapter_bytes


def size_pool(
    config: ModelConfig, block_bytes: int, model_limit: int, available: int, fraction: float = KV_FRACTION
) -> tuple[int, int]:
    """Return the number of KV blocks and `max_model_len`, for a model with `model_limit` positions and
    `available` bytes of memory, of which the pool takes `fraction` by default. Raises CheckpointError naming
    the flag to change if the settings conflict."""
    max_len = config.max_model_len or model_limit
    if max_len > model_limit:
        raise CheckpointError(f"--max-model-len {max_len} is above the checkpoint's {model_limit} positions")
    context = -(-max_len // config.block_size)
    blocks, source = _requested_blocks(config, block_bytes, context, available, fraction)
    if not 0 < blocks * block_bytes <= available:
        raise CheckpointError(
            f"{source} makes a KV pool of {blocks} blocks of {_mib(block_bytes)}: "
            f"it must hold at least one, and {_mib(available)} of memory are free"
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
    """Warn that a KV pool holds fewer tokens than the model's context, which takes `context` blocks."""
    whole = f"--kv-cache-bytes {context * block_bytes}"
    if config.num_blocks is not None:
        whole = f"--num-blocks {context}"
    log.warning(
        "texts may have %d tokens instead of the model's %d: %s makes a KV pool of no more; for all of them "
        "give %s, or set --max-model-len",
        max_len, positions, source, whole,
    )  # fmt: skip


def size_swap(config: ModelConfig, block_bytes: int, available: int) -> int:
    """Return the number of host blocks to swap KV into that the settings ask for, with `available` bytes of
    memory. Raises CheckpointError if they do not fit, or if there is none although swapping is asked for."""
    blocks = int((config.swap_space or 0.0) * 2**30) // block_bytes
    if blocks * block_bytes > available:
        raise CheckpointError(f"--swap-space {config.swap_space:g}, but {_mib(available)} of memory are free")
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
    """Return the pool's size in blocks, and the setting that determines it."""
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
