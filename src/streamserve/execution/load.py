"""From a worker's configuration to a running executor: model, KV pool and the settings derived from them."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from streamserve.execution.attention import ReferenceAttention
from streamserve.execution.checkpoint import Checkpoint
from streamserve.execution.executor import TorchExecutor
from streamserve.execution.kv_cache import KVCache, bytes_per_block
from streamserve.execution.memory import after_weights, available_bytes, size_pool
from streamserve.execution.model import Model
from streamserve.execution.spec import ModelSpec, read_spec
from streamserve.execution.weights import (
    EMBEDDING,
    check_weights,
    count_parameters,
    load_model,
    weight_bytes,
)
from streamserve.protocol.config import EngineConfig, ModelConfig
from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.messages import ModelInfo

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Loaded:
    """A model ready to serve: the executor, the limits its engine must keep, and what to tell about it."""

    executor: TorchExecutor
    engine_config: EngineConfig
    model_info: ModelInfo
    kv_cache_bytes: int


def load(config: ModelConfig) -> Loaded:
    """Load the checkpoint at `config.path`. Sets the process's number of torch threads.

    Raises CheckpointError for what cannot be served, naming the file and field, or the flag, to change.
    """
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    folder = Path(config.path)
    spec = read_spec(folder)
    checkpoint = Checkpoint(folder)
    check_weights(checkpoint, spec)
    dtype = _compute_dtype(config, spec, checkpoint)
    free = after_weights(weight_bytes(spec, dtype), available_bytes())
    block_bytes = bytes_per_block(spec, config.block_size, dtype)
    blocks, max_len = size_pool(config, block_bytes, spec.max_position_embeddings, free)
    model = load_model(checkpoint, spec, dtype)
    cache = KVCache(spec, blocks, config.block_size, dtype)
    attention = ReferenceAttention(cache, spec.windows, spec.num_heads // spec.num_kv_heads)
    return Loaded(
        TorchExecutor(model, cache, attention, spec.eos_token_ids),
        _engine_config(config, blocks, max_len),
        _model_info(checkpoint, model, max_len, attention.row_invariant),
        blocks * block_bytes,
    )


def _compute_dtype(config: ModelConfig, spec: ModelSpec, checkpoint: Checkpoint) -> torch.dtype:
    """float16 weights are computed in float32, which holds them exactly: bfloat16 would round them, and
    float16 arithmetic overflows where models were trained in bfloat16."""
    if config.dtype == "float16":
        raise CheckpointError(
            "--dtype float16 is not computed on the CPU: "
            "float32 holds float16 weights exactly, bfloat16 is faster"
        )
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    stored = DTYPES[spec.dtype] if spec.dtype else checkpoint.dtype(EMBEDDING)
    return torch.float32 if stored == torch.float16 else stored


def _engine_config(config: ModelConfig, num_blocks: int, max_model_len: int) -> EngineConfig:
    return EngineConfig(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_chunk=config.max_chunk,
        enable_prefix_caching=config.enable_prefix_caching,
        preempt_every=config.preempt_every,
    )


def _model_info(checkpoint: Checkpoint, model: Model, max_model_len: int, row_invariant: bool) -> ModelInfo:
    spec, dtype = model.spec, str(model.dtype).removeprefix("torch.")
    return ModelInfo(
        architecture=spec.architecture,
        parameters=count_parameters(spec),
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=spec.eos_token_ids,
        weight_bytes=weight_bytes(spec, model.dtype),
        dtype=dtype,
        row_invariant=row_invariant,
        fingerprint=checkpoint.fingerprint(repr(asdict(spec)), dtype),
    )
