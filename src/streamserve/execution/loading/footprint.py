"""Compute the memory that a loaded model takes, without loading it."""

from pathlib import Path

from streamserve.execution.backends.cuda.device import choose_device
from streamserve.execution.formats.open import open_checkpoint
from streamserve.execution.loading.load import has_kernels, tied_head_is_copied
from streamserve.execution.loading.loaded import Source, open_source, plan_memory
from streamserve.execution.model.shapes import weight_bytes
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.model_memory import ModelMemory


def footprint(config: ModelConfig, free: int, kv_fraction: float, workers: int = 1) -> ModelMemory:
    """Return the memory that `workers` workers take together in `free` bytes, as `load` plans it on a CPU. By
    default the KV caches take at most `kv_fraction` of the memory that the weights leave. With kernels the
    workers share one copy of the weights. Raises CheckpointError for a model that cannot be served."""
    spec, checkpoint = open_checkpoint(Path(config.path), config.task == "embed")
    if config.backend == "device" or choose_device(config.device).type == "cuda":
        raise CheckpointError("models that are loaded on demand are computed on a CPU: use --device cpu")
    source = open_source(config, checkpoint, spec)
    shared = has_kernels(config, spec)
    copied = tied_head_is_copied(shared, source.dtype)
    sizes = plan_memory(source, free, copied, fraction=kv_fraction, share=1 / workers, weights_shared=shared)
    return ModelMemory(
        _weights(source, copied) * (1 if shared else workers),
        sizes.blocks * sizes.block_bytes * workers,
        sizes.swap_blocks * sizes.block_bytes * workers,
        source.adapter_limits.nbytes * workers,
        sizes.blocks,
        sizes.max_model_len,
    )


def _weights(source: Source, tied_head_copied: bool) -> int:
    """Return the bytes of the weights of the target and the draft model, if there is one."""
    own = weight_bytes(source.spec, source.dtype, tied_head_copied, source.format, source.head)
    draft = source.draft.spec
    return own + (weight_bytes(draft, source.dtype, tied_head_copied) if draft else 0)
