"""Inputs and results of loading a model, common to CPU and GPU: the checkpoint and its formats, the sizes of
the KV pools, and the model ready to serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from llguidance import LLTokenizer

from streamserve.contracts.engine_config import EngineConfig
from streamserve.contracts.plan import DRAFT, Drafter
from streamserve.execution.backends.native.library import ThreadPool
from streamserve.execution.compute.executor import TorchExecutor
from streamserve.execution.compute.grammar import Grammars
from streamserve.execution.compute.kv_cache import KVCache, bytes_per_block
from streamserve.execution.compute.memory import (
    KV_FRACTION,
    after_adapters,
    after_weights,
    size_pool,
    size_swap,
)
from streamserve.execution.drafters.choice import DraftChoice, choose_draft
from streamserve.execution.drafters.model import ModelDrafter
from streamserve.execution.formats.check import AnyCheckpoint
from streamserve.execution.formats.open import open_checkpoint
from streamserve.execution.formats.quantization import HEAD_FORMAT, WeightFormat, parse_format
from streamserve.execution.loading.weights import CPU
from streamserve.execution.model.forward import Model
from streamserve.execution.model.lora.table import AdapterLimits, AdapterTable, adapter_limits
from streamserve.execution.model.shapes import EMBEDDING, count_parameters, weight_bytes
from streamserve.execution.model.spec import ModelSpec
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.messages import ModelInfo

if TYPE_CHECKING:
    from streamserve.execution.backends.cuda.executor import DeviceExecutor
    from streamserve.execution.backends.cuda.landing import KVLanding

Vocabulary = Callable[[int, tuple[int, ...]], LLTokenizer]
"""Makes the vocabulary of grammars from the size of a model's vocabulary and its end-of-text tokens."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Source:
    """A checked checkpoint, the data type to compute it in, and its drafter."""

    config: ModelConfig
    checkpoint: AnyCheckpoint
    spec: ModelSpec
    dtype: torch.dtype
    draft: DraftChoice
    format: WeightFormat | None = None
    """The format that the weights of the target's layers are rounded to, or that most are stored in."""

    @property
    def quantization(self) -> str:
        """The formats of the target's layers, in words."""
        return str(self.spec.stored or self.format or "none")

    @property
    def head(self) -> WeightFormat | None:
        """The format that the output head is stored in or rounded to; None: the head is in the model's data
        type."""
        choice = self.config.head_quantization
        if choice != "none" and self.spec.stored and self.spec.stored.head:
            return self.spec.stored.head.weights
        rounded = self.spec.stored is None and self.format is not None
        return HEAD_FORMAT if choice == "int8" or (choice == "auto" and rounded) else None

    @property
    def quantized(self) -> str | None:
        """The flag or the folder that makes weights quantized, for messages; None if no weights are
        quantized."""
        if self.spec.stored is None and self.format:
            return f"--quantization {self.format}"
        if self.spec.stored is None and self.head:
            return "--head-quantization int8"
        for folder, spec in ((self.checkpoint.path, self.spec), (self.draft.folder, self.draft.spec)):
            if spec and spec.stored:
                return f"{folder} in {spec.stored}"
        return None

    @cached_property
    def fingerprint(self) -> str:
        """The fingerprint of the target: of its weights, their precision, the KV's precision and the
        config."""
        return self._fingerprint(self.checkpoint, self.spec, self.format, self.head)

    @property
    def dtype_name(self) -> str:
        """The name of the data type."""
        return _name(self.dtype)

    @property
    def draft_fingerprint(self) -> str:
        """The fingerprint of the draft model that has a KV cache group; empty without one."""
        if self.draft.spec is None:
            return ""
        return self._fingerprint(open_checkpoint(self.draft.folder)[1], self.draft.spec)

    @property
    def kv_quantized(self) -> bool:
        """Whether keys and values are stored in 8 bits, in all KV cache groups."""
        return self.config.kv_cache_dtype == "int8"

    @property
    def adapter_limits(self) -> AdapterLimits:
        """The maximum number, rank and bytes of LoRA adapters."""
        return adapter_limits(self.config, self.spec, self.dtype.itemsize)

    def at_length(self, max_model_len: int) -> Source:
        """Return the source for texts of up to `max_model_len` tokens, with the rotary embeddings for that
        limit (RopeSpec.at_length)."""
        draft = self.draft
        if draft.spec:
            draft = replace(draft, spec=draft.spec.at_length(max_model_len))
        return replace(self, spec=self.spec.at_length(max_model_len), draft=draft)

    def _fingerprint(
        self,
        checkpoint: AnyCheckpoint,
        spec: ModelSpec,
        format: WeightFormat | None = None,
        head: WeightFormat | None = None,
    ) -> str:
        numerics = [_name(self.dtype)]
        numerics += [str(format)] if format else []
        numerics += [f"head in {head}"] if head else []
        numerics += ["KV in int8"] if self.kv_quantized else []
        return checkpoint.fingerprint(repr(asdict(spec)), *numerics)


@dataclass(frozen=True)
class PoolSizes:
    """The sizes of the KV pools. A block takes `block_bytes` over all KV cache groups, of which
    `draft_block_bytes` are the draft model's. The KV cache has `blocks`, the host pool `swap_blocks`.
    `spare_bytes` of the KV cache's memory are left."""

    blocks: int
    block_bytes: int
    draft_block_bytes: int
    swap_blocks: int
    max_model_len: int
    spare_bytes: int = 0


@dataclass(frozen=True)
class Loaded:
    """A model ready to serve: the executor, the limits that its engine must respect, and the model's info.

    * `pool`: the kernels' thread pool; None if plain torch computes.
    * `caches`: the KV caches of all KV cache groups, the target's last.
    * `draft_fingerprint`: the fingerprint of the draft model that has a KV cache group.
    * `weights_shared`: whether the weights are in memory that the host's other workers use too.
    * `adapters`: the LoRA adapters, if they are served.
    * `landing`: the memory that other workers write KV to, for a device.
    * `spare_bytes`: host memory of this worker's share that weights and KV leave.
    """

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
    format: WeightFormat | None = None
    head: WeightFormat | None = None
    weights_shared: bool = False
    adapters: AdapterTable | None = None
    landing: KVLanding | None = None
    spare_bytes: int = 0

    @property
    def can_be_profiled(self) -> bool:
        """Whether a profile of the model's steps can be measured; not supported on GPUs yet."""
        return isinstance(self.executor, TorchExecutor)


def open_source(config: ModelConfig, checkpoint: AnyCheckpoint, spec: ModelSpec) -> Source:
    """Return a checked checkpoint together with the data type, the formats and the drafter that the settings
    choose for it. Raises CheckpointError, which names the flag to change."""
    dtype = _compute_dtype(config, spec, checkpoint)
    try:
        format = parse_format(config.quantization)
    except ValueError as error:
        raise CheckpointError(f"--quantization {error}") from None
    if spec.stored:
        if format:
            raise CheckpointError(
                f"--quantization {format}: the weights of {checkpoint.path} are quantized already, in "
                f"{spec.stored}"
            )
        format = spec.stored.main
    draft = choose_draft(config.draft, checkpoint.path, spec)
    return Source(config, checkpoint, spec, dtype, draft, format)


def plan_memory(
    source: Source,
    free: int,
    tied_head_copied: bool,
    swap_memory: int | None = None,
    fraction: float = KV_FRACTION,
    reserve: int = 0,
    share: float = 1.0,
    weights_shared: bool = False,
    two_levels: bool = True,
) -> PoolSizes:
    """Return the sizes of the KV pools that fit into a worker's `share` of `free` bytes with the weights and
    `reserve` bytes. By default the KV cache takes `fraction` of the rest. With `weights_shared` all
    workers have one copy of the weights, otherwise each has its own. The host pool is in the same memory,
    unless `swap_memory` gives the bytes of another one. `two_levels`: see WeightFormat.nbytes. Raises
    CheckpointError, which names the flag to change."""
    config, dtype, draft = source.config, source.dtype, source.draft.spec
    weights = weight_bytes(source.spec, dtype, tied_head_copied, source.format, source.head, two_levels)
    draft_weights = weight_bytes(draft, dtype, tied_head_copied) if draft else 0
    # Shared weights are subtracted before the division among workers, private ones after it.
    if not weights_shared:
        free = int(free * share)
    free = after_weights(draft_weights, after_weights(weights, free))
    if weights_shared:
        free = int(free * share)
    free = max(0, free - reserve)
    free = after_adapters(source.adapter_limits.nbytes, free)
    draft_bytes = bytes_per_block(draft, config.block_size, dtype, source.kv_quantized) if draft else 0
    block_bytes = bytes_per_block(source.spec, config.block_size, dtype, source.kv_quantized) + draft_bytes
    swap_blocks = size_swap(config, block_bytes, free if swap_memory is None else swap_memory)
    if swap_memory is None:
        free -= swap_blocks * block_bytes
    limit = source.spec.max_position_embeddings
    blocks, max_len = size_pool(config, block_bytes, limit, free, fraction)
    return PoolSizes(blocks, block_bytes, draft_bytes, swap_blocks, max_len, free - blocks * block_bytes)


def make_grammars(vocabulary: Vocabulary | None, spec: ModelSpec) -> Grammars | None:
    """Return the compiler of the model's grammars; None without a vocabulary."""
    if vocabulary is None:
        return None
    return Grammars(lambda: vocabulary(spec.vocab_size, spec.eos_token_ids), spec.eos_token_ids)


def all_caches(cache: KVCache, drafter: Drafter | None) -> tuple[KVCache, ...]:
    """Return the KV caches of all KV cache groups, the target's last."""
    separate = isinstance(drafter, ModelDrafter) and drafter.group == DRAFT
    return (drafter.cache, cache) if isinstance(drafter, ModelDrafter) and separate else (cache,)


def _compute_dtype(config: ModelConfig, spec: ModelSpec, checkpoint: AnyCheckpoint) -> torch.dtype:
    """Return the dtype to compute in. Float16 weights are computed in float32, which holds them exactly.
    Bfloat16 would round them, and float16 arithmetic can overflow in models trained in bfloat16."""
    if config.dtype == "float16":
        raise CheckpointError(
            "--dtype float16 is not computed: float32 holds float16 weights exactly, bfloat16 is faster"
        )
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    stored = DTYPES[spec.dtype] if spec.dtype else checkpoint.dtype(EMBEDDING)
    return torch.float32 if stored == torch.float16 else stored


def engine_config(config: ModelConfig, sizes: PoolSizes) -> EngineConfig:
    """Return the engine's configuration for these settings and sizes."""
    return EngineConfig(
        num_blocks=sizes.blocks,
        block_size=config.block_size,
        max_model_len=sizes.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_chunk=config.max_chunk,
        enable_prefix_caching=config.enable_prefix_caching,
        preempt_every=config.preempt_every,
        eviction=config.eviction,
        swap_blocks=sizes.swap_blocks,
        order=config.order,
        prefill_share=config.prefill_share,
        slo_admission=config.slo_admission,
        check=config.check,
    )


def model_info(
    source: Source,
    sizes: PoolSizes,
    row_invariant: bool,
    tied_head_copied: bool,
    backend: str,
    numerics_class: str = "",
    notice: str = "",
    two_levels: bool = True,
) -> ModelInfo:
    """Return the model's info for clients. `backend` names the implementation that computes it. ModelInfo
    describes the other arguments, `two_levels` is as for plan_memory."""
    spec, dtype = source.spec, source.dtype
    return ModelInfo(
        architecture=spec.architecture,
        parameters=count_parameters(spec),
        vocab_size=spec.vocab_size,
        max_model_len=sizes.max_model_len,
        eos_token_ids=spec.eos_token_ids,
        weight_bytes=weight_bytes(spec, dtype, tied_head_copied, source.format, source.head, two_levels),
        dtype=source.dtype_name,
        backend=backend,
        numerics_class=numerics_class,
        notice=notice,
        row_invariant=row_invariant,
        fingerprint=source.fingerprint,
        quantization=source.quantization,
        head_quantization=str(source.head or "none"),
        hidden_size=spec.hidden_size,
        kv_cache_dtype=source.config.kv_cache_dtype,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
