"""Load a model onto a device: weights, KV pool in the device's free memory, executor and drafter."""

from dataclasses import dataclass

import torch

from streamserve.engine.plan import DRAFT, TARGET
from streamserve.execution.cuda.executor import DeviceExecutor
from streamserve.execution.cuda.graphs import ROWS, CudaGraphs, Graphs, NoGraphs
from streamserve.execution.cuda.head import WideLinear
from streamserve.execution.cuda.linear import TorchLinear
from streamserve.execution.cuda.model import DeviceModel
from streamserve.execution.cuda.operations import Implementation, Operations, operations
from streamserve.execution.cuda.runner import Runner
from streamserve.execution.cuda.swap import DeviceHostPool
from streamserve.execution.drafters.choice import DraftChoice
from streamserve.execution.drafters.model import ModelDrafter
from streamserve.execution.drafters.ngram import NGramDrafter
from streamserve.execution.grammar import Grammars
from streamserve.execution.kv_cache import KVCache
from streamserve.execution.loaded import (
    Loaded,
    Source,
    Vocabulary,
    all_caches,
    engine_config,
    make_grammars,
    model_info,
    plan_memory,
)
from streamserve.execution.memory import available_bytes
from streamserve.execution.model import Model
from streamserve.execution.open import open_checkpoint
from streamserve.execution.spec import ModelSpec, Multipliers
from streamserve.execution.weights import AnyCheckpoint, LinearMakers, load_model
from streamserve.protocol.errors import CheckpointError

KV_FRACTION = 0.9
"""Default share of the device's memory, free after the weights and the reserve, that the KV pool takes."""

GRAPH_BYTES = 512 << 20
"""Memory that captured graphs may take."""

MAX_DRAFT_POSITIONS = 256
"""Positions of tree nodes beyond the longest text, for which rotations are known."""


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device in bytes."""
    return available_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


@dataclass(frozen=True)
class DeviceBackend:
    """How models run on `device`: by Triton kernels and captured graphs on a GPU, in plain torch on a CPU."""

    device: torch.device
    operations: Operations
    max_sequences: int
    max_model_len: int

    @classmethod
    def on(
        cls,
        device: torch.device,
        max_sequences: int,
        max_model_len: int,
        implementation: Implementation | None = None,
    ) -> "DeviceBackend":
        """Return the backend for a device; by default kernels on a GPU, plain torch on a CPU."""
        chosen: Implementation = implementation or ("kernels" if device.type == "cuda" else "plain")
        return cls(device, operations(chosen), max_sequences, max_model_len)

    def model(self, checkpoint: AnyCheckpoint, spec: ModelSpec, dtype: torch.dtype) -> Model:
        """Load the model's weights onto the device."""
        makers = LinearMakers(TorchLinear, TorchLinear, WideLinear)
        return load_model(checkpoint, spec, dtype, makers, self.device)

    def cache(self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype) -> KVCache:
        """Return a KV pool with one block more than the engine knows: it takes the KV of padding rows."""
        return KVCache(spec, num_blocks + 1, block_size, dtype, device=self.device)

    def runner(self, model: Model, cache: KVCache) -> Runner:
        """Return what runs `model` over `cache`."""
        device_model = DeviceModel(model, self.operations, self.max_model_len + MAX_DRAFT_POSITIONS)
        return Runner(device_model, cache, self.operations, self._graphs(), self.max_sequences)

    def _graphs(self) -> Graphs:
        return CudaGraphs(self.device, GRAPH_BYTES) if self.device.type == "cuda" else NoGraphs()

    def drafter(
        self,
        draft: DraftChoice,
        target: Model,
        cache: KVCache,
        rejection_sampling: bool,
        grammars: Grammars | None,
    ) -> ModelDrafter | NGramDrafter | None:
        """Return the drafter for `target`, if any: with a separate KV pool or on the target's `cache`."""
        eos = target.spec.eos_token_ids
        if draft.kind == "ngram":
            return NGramDrafter(eos, grammars)
        if draft.kind == "self":
            spec = target.spec.first_layers(draft.layers)
            layers = target.layers[: draft.layers]
            model = Model(spec, target.embedding, layers, target.final_norm, target.head)
            group, draft_cache = TARGET, cache
        elif draft.spec:
            model = self.model(open_checkpoint(draft.folder)[1], draft.spec, target.dtype)
            group = DRAFT
            draft_cache = self.cache(draft.spec, cache.num_blocks - 1, cache.block_size, target.dtype)
        elif draft.kind in ("none", "remote"):
            return None
        else:
            raise CheckpointError(f"--draft: {draft.kind} drafters are not supported on a device")
        passes = self.runner(model, draft_cache)
        return ModelDrafter(passes, draft_cache, group, rejection_sampling, eos, grammars)


def refuse_unsupported(spec: ModelSpec) -> None:
    """Raise CheckpointError for a model that needs an operation which the device's kernels do not have."""
    multipliers = spec.multipliers
    needs = {
        "norms after attention and MLP": spec.norms != "before",
        "norms in float32": spec.wide_norms,
        "norms of all queries as one vector": spec.qk_norm == "joint",
        "heads that are rotated in part": spec.rotary_dim != spec.head_dim,
        "layers with different rotary embeddings": len(set(spec.ropes)) > 1 or None in spec.ropes,
        "soft caps": bool(spec.attention_cap or spec.logits_cap),
        "another activation than SiLU": spec.activation != "silu",
        "mixtures of experts": spec.experts is not None,
        "attention sinks": spec.sinks,
        "multipliers": multipliers != Multipliers(spec.head_dim**-0.5),
    }
    missing = [name for name, needed in needs.items() if needed]
    if missing:
        raise CheckpointError(
            f"{spec.architecture} has {', '.join(missing)}, which GPUs do not support yet: use --device cpu, "
            "and not --backend device"
        )


def reserve_bytes(spec: ModelSpec, dtype: torch.dtype, max_nodes: int) -> int:
    """Return the memory to leave for a step's activations, logits and graphs, in bytes."""
    widest = 3 * spec.intermediate_size + 4 * spec.hidden_size + 2 * spec.num_heads * spec.head_dim
    return GRAPH_BYTES + ROWS[-1] * widest * dtype.itemsize + 2 * max_nodes * spec.vocab_size * 4


def _backend_name(device: torch.device) -> str:
    """Return what computes the model, as far as its bits depend on it."""
    if device.type != "cuda":
        return f"device torch {torch.__version__}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda sm_{major}{minor} torch {torch.__version__}"


def load_on_device(
    source: Source, device: torch.device, vocabulary: Vocabulary | None, memory_share: float
) -> Loaded:
    """Load a model onto a GPU or, to test that, onto a CPU in plain torch. `memory_share`: fraction of the
    free memory that may be used. Raises CheckpointError for what cannot be served there."""
    config, spec = source.config, source.spec
    if source.quantized:
        raise CheckpointError(f"{source.quantized} is for the CPU: use --device cpu")
    if config.kernel_path != "auto":
        raise CheckpointError(f"--kernel-path {config.kernel_path} is for the CPU: use --device cpu")
    if config.numerics != "auto":
        raise CheckpointError(f"--numerics {config.numerics} is for the CPU: use --device cpu")
    if source.kv_quantized:
        raise CheckpointError(
            f"--kv-cache-dtype {config.kv_cache_dtype} is for the CPU's backends: use --device cpu, and not "
            "--backend device"
        )
    if config.backend in ("native", "reference"):
        raise CheckpointError(f"--backend {config.backend} runs on the CPU: use --device cpu")
    for model_spec in (source.spec, source.draft.spec):
        if model_spec:
            refuse_unsupported(model_spec)
    sizes = plan_memory(
        source, int(free_bytes(device) * memory_share), False, available_bytes(), KV_FRACTION,
        reserve_bytes(spec, source.dtype, config.max_num_batched_tokens),
    )  # fmt: skip
    source = source.at_length(sizes.max_model_len)
    spec = source.spec
    backend = DeviceBackend.on(device, config.max_num_seqs, sizes.max_model_len)
    model = backend.model(source.checkpoint, spec, source.dtype)
    cache = backend.cache(spec, sizes.blocks, config.block_size, source.dtype)
    grammars = make_grammars(vocabulary, spec)
    drafter = backend.drafter(source.draft, model, cache, config.speculation_mode == "rejection", grammars)
    caches = all_caches(cache, drafter)
    host = DeviceHostPool(caches, sizes.swap_blocks) if sizes.swap_blocks else None
    return Loaded(
        DeviceExecutor(backend.runner(model, cache), spec.eos_token_ids, grammars, host),
        engine_config(config, sizes),
        model_info(source, sizes, False, False, _backend_name(device)),
        sizes.blocks * sizes.block_bytes,
        model,
        None,
        cache,
        drafter,
        caches,
        source.draft_fingerprint,
        device,
    )
