"""Load a model by a worker's configuration: choose the backend, size the KV pools, make executor and
drafter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from ctypes import CDLL
from functools import partial
from pathlib import Path as FilePath

import torch
from torch import Tensor

from streamserve.contracts.plan import DRAFT, TARGET
from streamserve.execution.backends.cuda.device import divide_devices
from streamserve.execution.backends.native.attention import NativeAttention
from streamserve.execution.backends.native.library import Path, ThreadPool, kernels
from streamserve.execution.backends.native.lora import pack_adapter
from streamserve.execution.backends.native.model import NativeModel
from streamserve.execution.backends.native.paths import best_path, name_of, numerics_of
from streamserve.execution.backends.native.sampling import NativeChooser, NativeDraftSelector
from streamserve.execution.backends.native.structures import MAX_QUERY_GROUP
from streamserve.execution.backends.native.weight_arena import WeightArena
from streamserve.execution.backends.reference.attention import ReferenceAttention
from streamserve.execution.compute.draft_selection import select_draft_tokens
from streamserve.execution.compute.executor import TorchExecutor
from streamserve.execution.compute.grammar import Grammars
from streamserve.execution.compute.kv_cache import KVCache
from streamserve.execution.compute.memory import ALONE, HostShare
from streamserve.execution.compute.passes import ModelPasses
from streamserve.execution.compute.swap import HostPool
from streamserve.execution.drafters.choice import DraftChoice
from streamserve.execution.drafters.common_vocabulary import with_rows
from streamserve.execution.drafters.model import ModelDrafter
from streamserve.execution.drafters.ngram import NGramDrafter
from streamserve.execution.formats.gguf.checkpoint import GgufCheckpoint
from streamserve.execution.formats.open import open_checkpoint
from streamserve.execution.loading.load_models import load_models
from streamserve.execution.loading.loaded import (
    Loaded,
    PoolSizes,
    Source,
    Vocabulary,
    all_caches,
    engine_config,
    make_grammars,
    model_info,
    open_source,
    plan_memory,
)
from streamserve.execution.model.attention import AttentionBackend, Scoring
from streamserve.execution.model.forward import Model
from streamserve.execution.model.linear import packs
from streamserve.execution.model.lora.table import AdapterTable
from streamserve.execution.model.spec import ModelSpec
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.draft_kind import DraftKind
from streamserve.protocol.errors import CheckpointError, OtherModelError
from streamserve.protocol.messages import ModelInfo
from streamserve.system.available_memory import address_limit, available_bytes
from streamserve.system.instructions import KERNEL_PATH_VARIABLE, kernel_bound
from streamserve.system.processors import usable_processors

log = logging.getLogger(__name__)


def load(
    config: ModelConfig,
    vocabulary: Vocabulary | None = None,
    cores: Sequence[int] = (),
    share: HostShare = ALONE,
    allocate: Callable[[int], Tensor] | None = None,
    weights: Sequence[int] = (),
    expected: str = "",
) -> Loaded:
    """Load the checkpoint at `config.path`, a folder or a GGUF file. Sets the process's number of torch
    threads.

    * `vocabulary`: without it, requests with a grammar fail.
    * `cores`: processors for the kernels' threads, the calling thread's first. The caller must pin the
      calling thread itself.
    * `share`: the worker's share of the machine's memory and GPUs.
    * `allocate`: returns memory for the KV pools, if these must be in special memory; the draft model's pool
      precedes the target's.
    * `weights`: descriptors of the memory that workers share for the weights of the target and the draft
      model (weight_arena.py).
    * `expected`: the fingerprint that the model must have, if not empty. On a CPU another model is refused
      before its weights take memory.

    Raises CheckpointError for a model that cannot be served; it names the file and field, or the flag, to
    change.
    """
    spec, checkpoint = open_checkpoint(FilePath(config.path), config.task == "embed")
    if spec.multimodal:
        log.warning("only the text part of %s is served: requests with images are refused", config.path)
    device, memory_share = divide_devices(config.device, share)
    if device.type == "cuda" or config.backend == "device":
        _check_device_settings(config, share, allocate is not None)
        from streamserve.execution.loading.device import load_on_device

        source = open_source(config, checkpoint, spec)
        return load_on_device(source, device, vocabulary, memory_share, allocate)
    if config.tensor_parallel_size > 1:
        raise CheckpointError(
            "--tensor-parallel-size is for GPUs: use 1, --device cuda, or, to try it, --backend device"
        )
    source = open_source(config, checkpoint, spec)
    pool = _choose_backend(source, cores)
    if source.quantized and pool is None:
        raise CheckpointError(f"{source.quantized} needs the kernels: use --backend native")
    shares = pool is not None and address_limit() is None  # an arena would take the KV pool's addresses
    if weights and pool and not shares:
        log.warning("ulimit -v limits addresses: each worker has its own copy of the weights")
    arenas = [WeightArena(descriptor) for descriptor in weights] if shares else []
    return _load_on_cpu(source, pool, vocabulary, share.memory, allocate, arenas, expected)


def _check_device_settings(config: ModelConfig, share: HostShare, in_a_pair: bool) -> None:
    """Raise CheckpointError for settings that models on a GPU do not support yet."""
    if config.task in ("embed", "score"):
        raise CheckpointError(f"--task {config.task} is not computed on a GPU yet: use --device cpu")
    if config.max_loras:
        raise CheckpointError("--max-loras: LoRA adapters are not computed on a GPU yet: use --device cpu")
    if config.tensor_parallel_size > 1 and (in_a_pair or share.workers > 1):
        raise CheckpointError(
            f"--tensor-parallel-size {config.tensor_parallel_size} requires a single worker without a "
            "pair: leave out --workers and --pairs, or use 1"
        )


def _load_on_cpu(
    source: Source,
    pool: ThreadPool | None,
    vocabulary: Vocabulary | None,
    memory_share: float,
    allocate: Callable[[int], Tensor] | None,
    arenas: Sequence[WeightArena],
    expected: str,
) -> Loaded:
    tied_head_copied = tied_head_is_copied(pool is not None, source.dtype)
    free = available_bytes() + sum(arena.resident_bytes for arena in arenas)
    sizes = plan_memory(source, free, tied_head_copied, share=memory_share, weights_shared=bool(arenas))
    source = source.at_length(sizes.max_model_len)
    config, spec = source.config, source.spec
    _check_fingerprint(source, expected)
    if isinstance(source.checkpoint, GgufCheckpoint):
        source.checkpoint.log_rounded(spec, source.dtype, source.head is not None)
    models = load_models(source, pool, arenas)
    model = models.target
    pack = partial(pack_adapter, pool=pool) if pool else None
    adapters = AdapterTable(model, source.adapter_limits, pack) if config.max_loras else None
    draft_memory = target_memory = None
    if allocate:
        memory = allocate(sizes.blocks * sizes.block_bytes)
        draft_memory, target_memory = memory.tensor_split([sizes.blocks * sizes.draft_block_bytes])
    cache = KVCache(
        spec, sizes.blocks, config.block_size, source.dtype, target_memory, quantized=source.kv_quantized
    )
    attention = make_attention(cache, spec, pool)
    grammars = make_grammars(vocabulary, spec)
    drafter = _make_drafter(
        source.draft, model, models.draft, cache, pool, config.speculation_mode == "rejection", grammars,
        draft_memory, adapters,
    )  # fmt: skip
    caches = all_caches(cache, drafter)
    host = HostPool(caches, sizes.swap_blocks) if sizes.swap_blocks else None
    chooser = NativeChooser(pool) if pool else None
    return Loaded(
        TorchExecutor(model, cache, attention, spec.eos_token_ids, grammars, chooser, host, adapters),
        engine_config(config, sizes),
        _model_info(source, sizes, attention, tied_head_copied, pool),
        sizes.blocks * sizes.block_bytes,
        model,
        pool,
        cache,
        drafter,
        caches,
        source.draft_fingerprint,
        format=source.format,
        head=source.head,
        weights_shared=models.shared,
        adapters=adapters,
        spare_bytes=sizes.spare_bytes,
    )


def _check_fingerprint(source: Source, expected: str) -> None:
    """Raise OtherModelError unless the target has the `expected` fingerprint, if that is not empty."""
    if expected and source.fingerprint != expected:
        raise OtherModelError(
            f"{source.config.path} is a different model than the other workers have loaded: if its files "
            "were replaced, restore the old ones, or restart the server to serve the new ones"
        )


def _model_info(
    source: Source, sizes: PoolSizes, attention: AttentionBackend, tied_copied: bool, pool: ThreadPool | None
) -> ModelInfo:
    numerics = numerics_of(pool.path(source.dtype)) if pool else ""
    name = _backend_name(pool, source)
    return model_info(source, sizes, attention.row_invariant, tied_copied, name, numerics)


def _make_drafter(
    draft: DraftChoice,
    model: Model,
    draft_model: Model | None,
    cache: KVCache,
    pool: ThreadPool | None,
    rejection_sampling: bool,
    grammars: Grammars | None,
    memory: Tensor | None,
    adapters: AdapterTable | None,
) -> ModelDrafter | NGramDrafter | None:
    """Return the drafter for `model`, if any. A draft model has a separate KV cache (in `memory`, if given);
    the target's first layers use the target's `cache` and `adapters`; n-gram lookup has no KV."""
    eos = model.spec.eos_token_ids
    if draft.kind is DraftKind.NGRAM:
        return NGramDrafter(eos, grammars)
    selector = NativeDraftSelector(pool) if pool else select_draft_tokens
    if draft.kind is DraftKind.FIRST_LAYERS:
        first = model.spec.first_layers(draft.layers)
        early_model = Model(
            first, model.embedding, model.layers[: draft.layers], model.final_norm, model.head
        )
        early_model = NativeModel.of(early_model, pool) if pool else early_model
        attention = make_attention(cache, first, pool)
        early_passes = ModelPasses(early_model, attention, adapters)
        return ModelDrafter(early_passes, cache, TARGET, rejection_sampling, eos, grammars, selector)
    if draft.spec and draft_model:
        draft_cache = KVCache(
            draft.spec, cache.num_blocks, cache.block_size, model.dtype, memory, quantized=cache.quantized
        )
        attention = make_attention(draft_cache, draft.spec, pool)
        passes = with_rows(ModelPasses(draft_model, attention), draft.spec.vocab_size, model.spec.vocab_size)
        return ModelDrafter(passes, draft_cache, DRAFT, rejection_sampling, eos, grammars, selector)
    return None


def make_drafter(loaded: Loaded, group: int = TARGET) -> ModelDrafter:
    """Return a drafter on the loaded model, for a draft service. `group` is the KV cache group under which
    requests give the blocks of the model's cache."""
    pool, spec = loaded.pool, loaded.model.spec
    attention = make_attention(loaded.cache, spec, pool)
    selector = NativeDraftSelector(pool) if pool else select_draft_tokens
    eos = spec.eos_token_ids
    passes = ModelPasses(loaded.model, attention)
    return ModelDrafter(passes, loaded.cache, group, eos_token_ids=eos, selector=selector)


def has_kernels(config: ModelConfig, spec: ModelSpec) -> bool:
    """Return whether kernels compute the model on a CPU."""
    return _library(config, spec) is not None


def _library(config: ModelConfig, spec: ModelSpec) -> CDLL | None:
    """Return the kernels' library for the model; None if plain torch computes it."""
    fits = spec.num_heads // spec.num_kv_heads <= MAX_QUERY_GROUP
    return kernels() if config.backend != "reference" and fits else None


NUMERICS = {"auto": "", "native": "native", "portable": "native portable"}
"""The class of bits of each value of `--numerics`; empty: any."""


def _choose_backend(source: Source, cores: Sequence[int]) -> ThreadPool | None:
    """Return the kernels' thread pool; None if plain torch computes. Sets torch's number of threads."""
    config, spec = source.config, source.spec
    threads = config.threads or usable_processors().threads
    library = _library(config, spec)
    if library is None and config.backend == "native":
        raise CheckpointError(
            "--backend native: no kernels are available for this model on this machine (the log says why); "
            "use --backend auto or reference"
        )
    # With the kernels, torch runs only small operations, and its threads would spin on the kernels' cores.
    torch.set_num_threads(1 if library else threads)
    if library:
        return _thread_pool(library, threads, source, cores)
    if config.kernel_path != "auto":
        raise CheckpointError(f"--kernel-path {config.kernel_path} is for the kernels: use --backend native")
    if config.numerics != "auto":
        raise CheckpointError(f"--numerics {config.numerics} is for the kernels: use --backend native")
    return None


def _thread_pool(library: CDLL, threads: int, source: Source, cores: Sequence[int]) -> ThreadPool:
    """Return a thread pool on the kernel path that the settings name, or on the fastest one."""
    name, numerics = source.config.kernel_path, NUMERICS[source.config.numerics]
    path = best_path(library, numerics) if name == "auto" else Path[name.upper()]
    if path is None:
        raise CheckpointError(
            f"--numerics {source.config.numerics}: this processor{_bound_text()} has no instructions of that "
            "class: use portable on all machines"
        )
    if numerics and numerics_of(path) != numerics:
        raise CheckpointError(
            f"--kernel-path {name} is not in the class --numerics {source.config.numerics}: leave out one "
            "of the two"
        )
    try:
        pool = ThreadPool(library, threads, path, cores[1:threads])
    except OSError as error:
        raise CheckpointError(f"{error.strerror}: lower --threads, or raise the limit") from error
    if name != "auto" and pool.path(source.dtype) != path:
        available = ", ".join(name_of(path) for path in Path if pool.supports(path, source.dtype))
        raise CheckpointError(
            f"--kernel-path {name} is not available on this processor{_bound_text()} for "
            f"{source.dtype_name}: use auto, {available}"
        )
    return pool


def _bound_text() -> str:
    bound = kernel_bound()
    return "" if bound == "auto" else f" (up to {KERNEL_PATH_VARIABLE} = {bound})"


def _backend_name(pool: ThreadPool | None, source: Source) -> str:
    """Return the name of the implementation that computes the model."""
    return f"native {name_of(pool.path(source.dtype))}" if pool else f"reference torch {torch.__version__}"


def tied_head_is_copied(with_kernels: bool, dtype: torch.dtype) -> bool:
    """Return whether a tied head is stored in addition to the embedding. The kernels need no second copy,
    because they read embedding rows from the packed weight."""
    return not with_kernels and packs(dtype)


def make_attention(cache: KVCache, spec: ModelSpec, pool: ThreadPool | None) -> AttentionBackend:
    """Return attention over `cache`: by the kernels on `pool`, or without a pool in plain torch."""
    group = spec.num_heads // spec.num_kv_heads
    scoring = Scoring(spec.multipliers.attention, spec.attention_cap)
    if pool is None:
        return ReferenceAttention(cache, spec.windows, group, scoring)
    return NativeAttention(pool, cache, spec.windows, group, scoring)
