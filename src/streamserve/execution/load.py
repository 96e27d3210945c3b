"""Build an executor from a worker's configuration: load the model, size the KV pool, derive the settings."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from llguidance import LLTokenizer
from torch import Tensor

from streamserve.engine.plan import DRAFT, TARGET, Drafter
from streamserve.execution.attention import AttentionBackend, ReferenceAttention
from streamserve.execution.checkpoint import Checkpoint
from streamserve.execution.drafters.choice import DraftChoice, choose_draft
from streamserve.execution.drafters.guesses import best_guesses
from streamserve.execution.drafters.model import ModelDrafter
from streamserve.execution.drafters.ngram import NGramDrafter
from streamserve.execution.executor import TorchExecutor
from streamserve.execution.grammar import Grammars
from streamserve.execution.kv_cache import KVCache, bytes_per_block
from streamserve.execution.linear import packs
from streamserve.execution.memory import after_weights, available_bytes, size_pool, size_swap
from streamserve.execution.model import Model
from streamserve.execution.native.attention import MOST_QUERIES, NativeAttention
from streamserve.execution.native.library import ThreadPool, kernels
from streamserve.execution.native.linear import NativeLinear
from streamserve.execution.native.model import NativeModel
from streamserve.execution.native.sampling import NativeChooser, NativeGuesser
from streamserve.execution.spec import ModelSpec, read_spec
from streamserve.execution.swap import HostPool
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

Vocabulary = Callable[[int, tuple[int, ...]], LLTokenizer]
"""Makes the vocabulary of grammars from the size of a model's token table and its end-of-text tokens."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Loaded:
    """A model ready to serve: the executor, the limits that its engine must respect, and the model's info.
    `team`: the kernels' thread pool; None where plain torch computes. `caches`: the KV caches of all KV cache
    groups, the target's last. `draft_fingerprint`: of the draft model that has a KV cache group."""

    executor: TorchExecutor
    engine_config: EngineConfig
    model_info: ModelInfo
    kv_cache_bytes: int
    model: Model
    team: ThreadPool | None
    cache: KVCache
    drafter: Drafter | None = None
    caches: tuple[KVCache, ...] = ()
    draft_fingerprint: str = ""


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
    team = _choose_backend(config, spec, cores)
    dtype = _compute_dtype(config, spec, checkpoint)
    draft = choose_draft(config.draft, folder, spec)
    free = after_weights(
        weight_bytes(spec, dtype, _head_is_second(team, dtype)), int(available_bytes() * memory_share)
    )
    block_bytes = bytes_per_block(spec, config.block_size, dtype)
    draft_bytes = bytes_per_block(draft.spec, config.block_size, dtype) if draft.spec else 0
    if draft.spec:
        free = after_weights(weight_bytes(draft.spec, dtype, _head_is_second(team, dtype)), free)
        block_bytes += draft_bytes
    swap_blocks = size_swap(config, block_bytes, free)
    free -= swap_blocks * block_bytes
    blocks, max_len = size_pool(config, block_bytes, spec.max_position_embeddings, free)
    model = _load_model(checkpoint, spec, dtype, team)
    memory = allocate(blocks * block_bytes) if allocate else None
    own, other = (None, None) if memory is None else memory.tensor_split([blocks * draft_bytes])[::-1]
    cache = KVCache(spec, blocks, config.block_size, dtype, own)
    attention = attention_on(cache, spec, team)
    eos = spec.eos_token_ids
    grammars = Grammars(lambda: vocabulary(spec.vocab_size, eos), eos) if vocabulary else None
    drawing = config.speculation_mode == "rejection"
    drafter = _load_drafter(draft, model, cache, team, drawing, grammars, other)
    apart = isinstance(drafter, ModelDrafter) and drafter.plane == DRAFT
    caches = (drafter.cache, cache) if isinstance(drafter, ModelDrafter) and apart else (cache,)
    host = HostPool(caches, swap_blocks) if swap_blocks else None
    return Loaded(
        TorchExecutor(model, cache, attention, eos, grammars, NativeChooser(team) if team else None, host),
        _engine_config(config, blocks, max_len, swap_blocks),
        _model_info(checkpoint, model, max_len, attention.row_invariant, _head_is_second(team, dtype)),
        blocks * block_bytes,
        model,
        team,
        cache,
        drafter,
        caches,
        _fingerprint(Checkpoint(draft.folder), draft.spec, dtype) if draft.spec else "",
    )


def _load_drafter(
    draft: DraftChoice,
    model: Model,
    cache: KVCache,
    team: ThreadPool | None,
    drawing: bool,
    grammars: Grammars | None,
    memory: Tensor | None,
) -> ModelDrafter | NGramDrafter | None:
    """Return the drafter for `model`, if any. It has its own KV cache group next to the target's `cache` (in
    `memory`, if given), uses the target's cache, or has no KV."""
    eos = model.spec.eos_token_ids
    if draft.kind == "ngram":
        return NGramDrafter(eos, grammars)
    guesser = NativeGuesser(team) if team else best_guesses
    if draft.kind == "self":
        first = replace(model.spec, num_layers=draft.layers, windows=model.spec.windows[: draft.layers])
        early = Model(first, model.embedding, model.layers[: draft.layers], model.final_norm, model.head)
        early = NativeModel.of(early, team) if team else early
        attention = attention_on(cache, first, team)
        return ModelDrafter(early, cache, attention, TARGET, drawing, eos, grammars, guesser)
    if draft.spec:
        small = _load_model(Checkpoint(draft.folder), draft.spec, model.dtype, team)
        own = KVCache(draft.spec, cache.num_blocks, cache.block_size, model.dtype, memory)
        attention = attention_on(own, draft.spec, team)
        return ModelDrafter(small, own, attention, DRAFT, drawing, eos, grammars, guesser)
    return None


def drafter_on(loaded: Loaded, plane: int = TARGET) -> ModelDrafter:
    """Return a separate drafter, as a draft service has: on the loaded model, whose pool is the blocks'
    `plane` (KV cache group)."""
    team, spec = loaded.team, loaded.model.spec
    attention = attention_on(loaded.cache, spec, team)
    guesser = NativeGuesser(team) if team else best_guesses
    eos = spec.eos_token_ids
    return ModelDrafter(loaded.model, loaded.cache, attention, plane, eos_token_ids=eos, guesser=guesser)


def _choose_backend(config: ModelConfig, spec: ModelSpec, cores: Sequence[int]) -> ThreadPool | None:
    """Return the kernels' thread pool; None where plain torch computes."""
    threads = config.threads or len(os.sched_getaffinity(0))
    fits = spec.num_heads // spec.num_kv_heads <= MOST_QUERIES
    library = kernels() if config.backend != "reference" and fits else None
    if library is None and config.backend == "native":
        raise CheckpointError("--backend native: there are no kernels for this model here (see the log)")
    # With the kernels, torch runs only small operations: its threads would spin on the kernels' cores.
    torch.set_num_threads(1 if library else threads)
    return ThreadPool(library, threads, cpus=cores[1:threads]) if library else None


def _head_is_second(team: ThreadPool | None, dtype: torch.dtype) -> bool:
    """Return whether a tied head is stored in addition to the embedding. The kernels need no second copy:
    they read embedding rows from the packed weight."""
    return team is None and packs(dtype)


def _load_model(
    checkpoint: Checkpoint, spec: ModelSpec, dtype: torch.dtype, team: ThreadPool | None
) -> Model:
    if team is None:
        return load_model(checkpoint, spec, dtype)
    linear, gate_up = partial(NativeLinear, team), partial(NativeLinear, team, paired=True)
    return NativeModel.of(load_model(checkpoint, spec, dtype, linear, gate_up), team)


def attention_on(cache: KVCache, spec: ModelSpec, team: ThreadPool | None) -> AttentionBackend:
    """Return attention over `cache`: by the kernels on `team`, or in plain torch without one."""
    group = spec.num_heads // spec.num_kv_heads
    if team is None:
        return ReferenceAttention(cache, spec.windows, group)
    return NativeAttention(team, cache, spec.windows, group)


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
    checkpoint: Checkpoint, model: Model, max_model_len: int, row_invariant: bool, second: bool
) -> ModelInfo:
    spec, dtype = model.spec, str(model.dtype).removeprefix("torch.")
    return ModelInfo(
        architecture=spec.architecture,
        parameters=count_parameters(spec),
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=spec.eos_token_ids,
        weight_bytes=weight_bytes(spec, model.dtype, second),
        dtype=dtype,
        row_invariant=row_invariant,
        fingerprint=_fingerprint(checkpoint, spec, model.dtype),
    )


def _fingerprint(checkpoint: Checkpoint, spec: ModelSpec, dtype: torch.dtype) -> str:
    return checkpoint.fingerprint(repr(asdict(spec)), str(dtype).removeprefix("torch."))
