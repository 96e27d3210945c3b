"""What cannot be computed on a device: settings, models and sizes are refused before any weight is loaded."""

import torch

from streamserve.execution.backends.cuda.attention import TILES
from streamserve.execution.backends.cuda.packing import packs
from streamserve.execution.backends.cuda.sharding import check_shards
from streamserve.execution.loading.loaded import PoolSizes, Source
from streamserve.execution.model.spec import ModelSpec
from streamserve.protocol.draft_kind import DraftKind
from streamserve.protocol.errors import CheckpointError


def check_source(source: Source, device: torch.device) -> None:
    """Raise CheckpointError for a setting or model that a device does not support."""
    config = source.config
    if config.kernel_path != "auto":
        raise CheckpointError(f"--kernel-path {config.kernel_path} is for the CPU: use --device cpu")
    if config.numerics != "auto":
        raise CheckpointError(f"--numerics {config.numerics} is for the CPU: use --device cpu")
    if config.backend in ("native", "reference"):
        raise CheckpointError(f"--backend {config.backend} runs on the CPU: use --device cpu")
    for spec in (source.spec, source.draft.spec):
        if spec:
            _check_operations(spec, source.kv_quantized)
    if config.tensor_parallel_size > 1:
        _check_parallel(source, device)


def _check_operations(spec: ModelSpec, kv_quantized: bool) -> None:
    """Raise CheckpointError for a model that needs an operation which the device's kernels do not have."""
    stored = spec.stored.by_module.values() if spec.stored else ()
    groups = {str(format.weights.group) for format in stored if format and not packs(format.weights)}
    needs = {
        f"{spec.num_heads // spec.num_kv_heads} query heads that share a key-value head": (
            spec.num_heads // spec.num_kv_heads > TILES[-1]
        ),
        f"heads of {spec.head_dim} dimensions, with --kv-cache-dtype int8": (
            kv_quantized and spec.head_dim % 4 > 0
        ),
        f"weights in groups of {', '.join(sorted(groups))} inputs": bool(groups),
    }
    missing = [name for name, needed in needs.items() if needed]
    if missing:
        raise CheckpointError(
            f"{spec.architecture} has {', '.join(missing)}, which GPUs do not support yet: use --device cpu, "
            "and not --backend device"
        )


def _check_parallel(source: Source, device: torch.device) -> None:
    """Raise CheckpointError for a model or option that tensor parallelism does not support."""
    config, degree = source.config, source.config.tensor_parallel_size
    check_shards(source.spec, source.checkpoint, degree)
    refused = {
        source.quantized or "": source.quantized is not None,
        f"--draft {config.draft}": source.draft.kind not in (DraftKind.NONE, DraftKind.NGRAM),
    }
    for flag, present in refused.items():
        if present:
            raise CheckpointError(f"{flag} is not supported with --tensor-parallel-size yet: use 1")
    if device.type == "cuda" and (device.index or 0) + degree > torch.cuda.device_count():
        raise CheckpointError(
            f"--tensor-parallel-size {degree}: the machine has {torch.cuda.device_count()} GPUs, and "
            "--device selects the first one to use: use a smaller number, or an earlier --device"
        )


def check_landing(sizes: PoolSizes, free: int) -> None:
    """Raise CheckpointError unless the `free` bytes of host memory hold a copy of the KV pool."""
    needed = sizes.blocks * sizes.block_bytes
    if needed > free:
        raise CheckpointError(
            f"stream pairs need host memory of the size of the KV pool on the device, {needed >> 20} MiB, "
            f"but {free >> 20} MiB are free for this worker: set --kv-cache-bytes"
        )
