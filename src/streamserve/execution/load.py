"""Build an executor from a worker's configuration: load the model, size the KV pool, derive the settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from llguidance import LLTokenizer
from torch import Tensor

from streamserve.engine.plan import DRAFT, TARGET, Drafter
from streamserve.execution.attention import AttentionBackend, ReferenceAttention
from streamserve.execution.checkpoint import Checkpoint
from streamserve.execution.cuda.device import choose_device
from streamserve.execution.drafters.choice import DraftChoice, choose_draft
from streamserve.execution.drafters.model import ModelDrafter
from streamserve.execution.drafters.ngram import NGramDrafter
from streamserve.execution.drafters.selection import select_draft_tokens
from streamserve.execution.executor import TorchExecutor
from streamserve.execution.grammar import Grammars
from streamserve.execution.kv_cache import KVCache, bytes_per_block
from streamserve.execution.linear import packs
from streamserve.execution.memory import after_weights, available_bytes, size_pool, size_swap
from streamserve.execution.model import Model
from streamserve.execution.native.attention import MAX_QUERY_GROUP, NativeAttention
from streamserve.execution.native.library import ThreadPool, kernels
from streamserve.execution.native.linear import NativeLinear
from streamserve.execution.native.model import NativeModel
from streamserve.execution.native.sampling import NativeChooser, NativeDraftSelector
from streamserve.execution.passes import ModelPasses
from streamserve.execution.spec import ModelSpec, read_spec
from streamserve.execution.swap import HostPool
from streamserve.execution.weights import (
    CPU,
    EMBEDDING,
    LinearMakers,
    check_weights,
    count_parameters,
    load_model,
    weight_bytes,
)
from streamserve.protocol.config import EngineConfig, ModelConfig
from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.messages import ModelInfo

if TYPE_CHECKING:
    from streamserve.execution.cuda.executor import DeviceExecutor

Vocabulary = Callable[[int, tuple[int, ...]], LLTokenizer]
"""Makes the vocabulary of grammars from the size of a model's token table and its end-of-text tokens."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Loaded:
    """A model ready to serve: the executor, the limits that its engine must respect, and the model's info.
    `pool`: the kernels' thread pool; None where plain torch computes. `caches`: the KV caches of all KV cache
    groups, the target's last. `draft_fingerprint`: of the draft model that has a KV cache group."""

    executor: TorchExecutor | DeviceExecutor
    engine_config: EngineConfig
    model_info: ModelInfo
    kv_cache_bytes: int
    model: Model
    pool: ThreadPool | None
    cache: KVCache
    drafter: Drafter | None = None
    caches: tuple[KVCache, ...] = ()
    draft_fingerprint: str = ""
    device: torch.device = CPU


def load(
    config: ModelConfig,
    vocabulary: Vocabulary | None = None,
    cores: Sequence[int] = (),
    memory_share: float = 1.0,
    allocate: Callable[[int], Tensor] | None = None,
) -> Loaded:
    """Load the checkpoint at `config.path`. Sets the process's number of torch threads.

    Requests with a grammar fail without `vocabulary`. `cores`: processors for the kernels' threads, the
    calling thread's first; pinning the calling thread is left to the caller. `memory_share`: fraction of the
    free memory that may be used. `allocate` returns the bytes of the KV pools, a draft model's before the
    target's, where these must lie in special memory.

    Raises CheckpointError for what cannot be served, naming the file and field, or the flag, to change.
    """
    folder = Path(config.path)
    spec = read_spec(folder)
    checkpoint = Checkpoint(folder)
    check_weights(checkpoint, spec)
    device = choose_device(config.device)
    if device.type == "cuda" or config.backend == "device":
        return _load_on_device(config, checkpoint, spec, device, vocabulary, memory_share, allocate)
    pool = _choose_backend(config, spec, cores)
    dtype = _compute_dtype(config, spec, checkpoint)
    draft = choose_draft(config.draft, folder, spec)
    free = after_weights(
        weight_bytes(spec, dtype, _tied_head_is_copied(pool, dtype)), int(available_bytes() * memory_share)
    )
    block_bytes = bytes_per_block(spec, config.block_size, dtype)
    draft_bytes = bytes_per_block(draft.spec, config.block_size, dtype) if draft.spec else 0
    if draft.spec:
        free = after_weights(weight_bytes(draft.spec, dtype, _tied_head_is_copied(pool, dtype)), free)
        block_bytes += draft_bytes
    swap_blocks = size_swap(config, block_bytes, free)
    free -= swap_blocks * block_bytes
    blocks, max_len = size_pool(config, block_bytes, spec.max_position_embeddings, free)
    model = _load_model(checkpoint, spec, dtype, pool)
    memory = allocate(blocks * block_bytes) if allocate else None
    target_memory, draft_memory = (
        (None, None) if memory is None else memory.tensor_split([blocks * draft_bytes])[::-1]
    )
    cache = KVCache(spec, blocks, config.block_size, dtype, target_memory)
    attention = make_attention(cache, spec, pool)
    eos = spec.eos_token_ids
    grammars = Grammars(lambda: vocabulary(spec.vocab_size, eos), eos) if vocabulary else None
    rejection_sampling = config.speculation_mode == "rejection"
    drafter = _load_drafter(draft, model, cache, pool, rejection_sampling, grammars, draft_memory)
    separate = isinstance(drafter, ModelDrafter) and drafter.group == DRAFT
    caches = (drafter.cache, cache) if isinstance(drafter, ModelDrafter) and separate else (cache,)
    host = HostPool(caches, swap_blocks) if swap_blocks else None
    return Loaded(
        TorchExecutor(model, cache, attention, eos, grammars, NativeChooser(pool) if pool else None, host),
        _engine_config(config, blocks, max_len, swap_blocks),
        _model_info(checkpoint, model, max_len, attention.row_invariant, _tied_head_is_copied(pool, dtype)),
        blocks * block_bytes,
        model,
        pool,
        cache,
        drafter,
        caches,
        _fingerprint(Checkpoint(draft.folder), draft.spec, dtype) if draft.spec else "",
    )


def _load_on_device(
    config: ModelConfig,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    device: torch.device,
    vocabulary: Vocabulary | None,
    memory_share: float,
    allocate: Callable[[int], Tensor] | None,
) -> Loaded:
    """As `load`, for a GPU (or, to test that, for a CPU in plain torch)."""
    from streamserve.execution.cuda import load as cuda
    from streamserve.execution.cuda.executor import DeviceExecutor
    from streamserve.execution.cuda.swap import DeviceHostPool

    if allocate:
        raise CheckpointError("stream pairs are not supported with --device cuda yet: use --device cpu")
    if config.backend in ("native", "reference"):
        raise CheckpointError(f"--backend {config.backend} runs on the CPU: use --device cpu")
    dtype = _compute_dtype(config, spec, checkpoint)
    draft = choose_draft(config.draft, checkpoint.folder, spec)
    specs = [spec, draft.spec] if draft.spec else [spec]
    free = int(cuda.free_bytes(device) * memory_share)
    for part in specs:
        free = after_weights(weight_bytes(part, dtype, False), free)
    free = max(0, free - cuda.reserve_bytes(spec, dtype, config.max_num_batched_tokens))
    block_bytes = sum(bytes_per_block(part, config.block_size, dtype) for part in specs)
    swap_blocks = size_swap(config, block_bytes, available_bytes())
    limit = spec.max_position_embeddings
    blocks, max_len = size_pool(config, block_bytes, limit, free, cuda.KV_FRACTION)
    backend = cuda.DeviceBackend.on(device, config.max_num_seqs, max_len)
    model = backend.model(checkpoint, spec, dtype)
    cache = backend.cache(spec, blocks, config.block_size, dtype)
    eos = spec.eos_token_ids
    grammars = Grammars(lambda: vocabulary(spec.vocab_size, eos), eos) if vocabulary else None
    drafter = backend.drafter(draft, model, cache, config.speculation_mode == "rejection", grammars)
    separate = isinstance(drafter, ModelDrafter) and drafter.group == DRAFT
    caches = (drafter.cache, cache) if isinstance(drafter, ModelDrafter) and separate else (cache,)
    host = DeviceHostPool(caches, swap_blocks) if swap_blocks else None
    return Loaded(
        DeviceExecutor(backend.runner(model, cache), eos, grammars, host),
        _engine_config(config, blocks, max_len, swap_blocks),
        _model_info(checkpoint, model, max_len, False, False),
        blocks * block_bytes,
        model,
        None,
        cache,
        drafter,
        caches,
        _fingerprint(Checkpoint(draft.folder), draft.spec, dtype) if draft.spec else "",
        device,
    )


def _load_drafter(
    draft: DraftChoice,
    model: Model,
    cache: KVCache,
    pool: ThreadPool | None,
    rejection_sampling: bool,
    grammars: Grammars | None,
    memory: Tensor | None,
) -> ModelDrafter | NGramDrafter | None:
    """Return the drafter for `model`, if any. It has its own KV cache group next to the target's `cache` (in
    `memory`, if given), uses the target's cache, or has no KV."""
    eos = model.spec.eos_token_ids
    if draft.kind == "ngram":
        return NGramDrafter(eos, grammars)
    selector = NativeDraftSelector(pool) if pool else select_draft_tokens
    if draft.kind == "self":
        first = replace(model.spec, num_layers=draft.layers, windows=model.spec.windows[: draft.layers])
        early_model = Model(
            first, model.embedding, model.layers[: draft.layers], model.final_norm, model.head
        )
        early_model = NativeModel.of(early_model, pool) if pool else early_model
        attention = make_attention(cache, first, pool)
        passes = ModelPasses(early_model, attention)
        return ModelDrafter(passes, cache, TARGET, rejection_sampling, eos, grammars, selector)
    if draft.spec:
        draft_model = _load_model(Checkpoint(draft.folder), draft.spec, model.dtype, pool)
        draft_cache = KVCache(draft.spec, cache.num_blocks, cache.block_size, model.dtype, memory)
        attention = make_attention(draft_cache, draft.spec, pool)
        passes = ModelPasses(draft_model, attention)
        return ModelDrafter(passes, draft_cache, DRAFT, rejection_sampling, eos, grammars, selector)
    return None


def make_drafter(loaded: Loaded, group: int = TARGET) -> ModelDrafter:
    """Return a separate drafter, as a draft service has: on the loaded model, whose pool is the blocks'
    `group` (KV cache group)."""
    pool, spec = loaded.pool, loaded.model.spec
    attention = make_attention(loaded.cache, spec, pool)
    selector = NativeDraftSelector(pool) if pool else select_draft_tokens
    eos = spec.eos_token_ids
    passes = ModelPasses(loaded.model, attention)
    return ModelDrafter(passes, loaded.cache, group, eos_token_ids=eos, selector=selector)


def _choose_backend(config: ModelConfig, spec: ModelSpec, cores: Sequence[int]) -> ThreadPool | None:
    """Return the kernels' thread pool; None where plain torch computes."""
    threads = config.threads or len(os.sched_getaffinity(0))
    fits = spec.num_heads // spec.num_kv_heads <= MAX_QUERY_GROUP
    library = kernels() if config.backend != "reference" and fits else None
    if library is None and config.backend == "native":
        raise CheckpointError(
            "--backend native: no kernels are available for this model on this machine (the log says why); "
            "use --backend auto or reference"
        )
    # With the kernels, torch runs only small operations: its threads would spin on the kernels' cores.
    torch.set_num_threads(1 if library else threads)
    return ThreadPool(library, threads, cpus=cores[1:threads]) if library else None


def _tied_head_is_copied(pool: ThreadPool | None, dtype: torch.dtype) -> bool:
    """Return whether a tied head is stored in addition to the embedding. The kernels need no second copy:
    they read embedding rows from the packed weight."""
    return pool is None and packs(dtype)


def _load_model(
    checkpoint: Checkpoint, spec: ModelSpec, dtype: torch.dtype, pool: ThreadPool | None
) -> Model:
    if pool is None:
        return load_model(checkpoint, spec, dtype)
    linear = partial(NativeLinear, pool)
    makers = LinearMakers(linear, partial(NativeLinear, pool, paired=True), linear)
    return NativeModel.of(load_model(checkpoint, spec, dtype, makers), pool)


def make_attention(cache: KVCache, spec: ModelSpec, pool: ThreadPool | None) -> AttentionBackend:
    """Return attention over `cache`: by the kernels on `pool`, or in plain torch without one."""
    group = spec.num_heads // spec.num_kv_heads
    if pool is None:
        return ReferenceAttention(cache, spec.windows, group)
    return NativeAttention(pool, cache, spec.windows, group)


def _compute_dtype(config: ModelConfig, spec: ModelSpec, checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype to compute in. Float16 weights are computed in float32, which holds them exactly:
    bfloat16 would round them, and float16 arithmetic overflows where models were trained in bfloat16."""
    if config.dtype == "float16":
        raise CheckpointError(
            "--dtype float16 is not computed on the CPU: "
            "float32 holds float16 weights exactly, bfloat16 is faster"
        )
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    stored = DTYPES[spec.dtype] if spec.dtype else checkpoint.dtype(EMBEDDING)
    return torch.float32 if stored == torch.float16 else stored


def _engine_config(
    config: ModelConfig, num_blocks: int, max_model_len: int, swap_blocks: int
) -> EngineConfig:
    return EngineConfig(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_chunk=config.max_chunk,
        enable_prefix_caching=config.enable_prefix_caching,
        preempt_every=config.preempt_every,
        eviction=config.eviction,
        swap_blocks=swap_blocks,
        order=config.order,
        prefill_share=config.prefill_share,
        slo_admission=config.slo_admission,
        check=config.check,
    )


def _model_info(
    checkpoint: Checkpoint, model: Model, max_model_len: int, row_invariant: bool, tied_head_copied: bool
) -> ModelInfo:
    spec, dtype = model.spec, str(model.dtype).removeprefix("torch.")
    return ModelInfo(
        architecture=spec.architecture,
        parameters=count_parameters(spec),
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=spec.eos_token_ids,
        weight_bytes=weight_bytes(spec, model.dtype, tied_head_copied),
        dtype=dtype,
        row_invariant=row_invariant,
        fingerprint=_fingerprint(checkpoint, spec, model.dtype),
    )


def _fingerprint(checkpoint: Checkpoint, spec: ModelSpec, dtype: torch.dtype) -> str:
    return checkpoint.fingerprint(repr(asdict(spec)), str(dtype).removeprefix("torch."))
