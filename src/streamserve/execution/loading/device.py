"""Load a model onto a device: weights, KV pool in the device's free memory, executor and drafter."""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from streamserve.contracts.plan import DRAFT, TARGET
from streamserve.execution.backends.cuda.chains import DeviceChains
from streamserve.execution.backends.cuda.collectives import Ranks
from streamserve.execution.backends.cuda.device import budget_bytes, free_bytes, notice
from streamserve.execution.backends.cuda.draft_vocabulary import with_vocabulary
from streamserve.execution.backends.cuda.executor import DeviceExecutor
from streamserve.execution.backends.cuda.experts import stack_experts
from streamserve.execution.backends.cuda.graphs import ROWS, CudaGraphs, Graphs, NoGraphs
from streamserve.execution.backends.cuda.landing import KVLanding
from streamserve.execution.backends.cuda.linear import QuantizedLinear, TorchLinear, WideLinear
from streamserve.execution.backends.cuda.model import DeviceModel
from streamserve.execution.backends.cuda.operations import Implementation, Operations, operations
from streamserve.execution.backends.cuda.ranks import (
    Children,
    LeadingHostPool,
    LeadingRunner,
    RankStart,
    new_store,
)
from streamserve.execution.backends.cuda.runner import Runner
from streamserve.execution.backends.cuda.sharding import Shard, ShardedCheckpoint, shard_spec
from streamserve.execution.backends.cuda.swap import DeviceHostPool
from streamserve.execution.backends.cuda.warm_up import capture, compiling, layers_of_all_kinds
from streamserve.execution.compute.grammar import Grammars
from streamserve.execution.compute.kv_cache import KVCache
from streamserve.execution.drafters.choice import DraftChoice
from streamserve.execution.drafters.model import ModelDrafter
from streamserve.execution.drafters.ngram import NGramDrafter
from streamserve.execution.formats.check import AnyCheckpoint
from streamserve.execution.formats.checkpoint import Checkpoint
from streamserve.execution.formats.gguf.checkpoint import GgufCheckpoint
from streamserve.execution.formats.open import open_checkpoint
from streamserve.execution.formats.quantization import QuantizedWeight, WeightFormat
from streamserve.execution.loading.device_limits import check_landing, check_source
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
from streamserve.execution.loading.weights import LinearMakers, load_model
from streamserve.execution.model.forward import Model
from streamserve.execution.model.spec import ModelSpec
from streamserve.protocol.draft_kind import DraftKind
from streamserve.protocol.errors import CheckpointError
from streamserve.system.available_memory import available_bytes
from streamserve.system.processors import usable_processors

KV_FRACTION = 0.9
"""Default fraction of the device memory, free after weights and reserve, that the KV pool takes."""

GRAPH_BYTES = 512 << 20
"""Maximum memory of captured graphs, in bytes."""

MAX_DRAFT_POSITIONS = 256
"""Positions after the longest text that rotation tables have for tree nodes."""


@dataclass(frozen=True)
class DeviceBackend:
    """Makes runners of models: Triton kernels and captured graphs on a GPU, plain torch on a CPU."""

    device: torch.device
    operations: Operations
    max_sequences: int
    max_model_len: int
    ranks: Ranks | None = None

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

    def model(
        self,
        checkpoint: AnyCheckpoint,
        spec: ModelSpec,
        dtype: torch.dtype,
        format: WeightFormat | None = None,
        head: WeightFormat | None = None,
    ) -> Model:
        """Load the model's weights onto the device: see `load_model`. Raises CheckpointError for weights that
        the device's kernels do not multiply."""
        experts = partial(stack_experts, count=spec.experts.count if spec.experts else 0)
        makers = LinearMakers(self._linear, self._linear, self._head, TorchLinear, experts)
        try:
            return load_model(checkpoint, spec, dtype, makers, self.device, format, head)
        except ValueError as error:
            raise CheckpointError(
                f"{checkpoint.path}: {error} on a GPU: use --device cpu, and not --backend device"
            ) from None

    def _linear(self, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> TorchLinear | QuantizedLinear:
        if isinstance(weight, QuantizedWeight):
            return QuantizedLinear(self.operations.matrix, self.device, weight, bias)
        return TorchLinear(weight, bias)

    def _head(self, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> WideLinear | QuantizedLinear:
        assert bias is None
        if isinstance(weight, QuantizedWeight):
            return QuantizedLinear(self.operations.matrix, self.device, weight, wide=True)
        return WideLinear(Shard(self.ranks.rank, self.ranks.degree).rows(weight) if self.ranks else weight)

    def cache(
        self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, quantized: bool = False
    ) -> KVCache:
        """Return a KV pool with one block more than the engine uses: the last is for padding rows."""
        return KVCache(spec, num_blocks + 1, block_size, dtype, device=self.device, quantized=quantized)

    def runner(self, model: Model, cache: KVCache, graphs: Graphs | None = None) -> Runner:
        """Return a runner of `model` over `cache`, by default with captured graphs on a GPU."""
        positions = self.max_model_len + MAX_DRAFT_POSITIONS
        device_model = DeviceModel(model, self.operations, positions, self.ranks)
        return Runner(device_model, cache, self.operations, graphs or self._graphs(), self.max_sequences)

    def _graphs(self) -> Graphs:
        return CudaGraphs(self.device, GRAPH_BYTES) if self.device.type == "cuda" else NoGraphs()

    def drafter(
        self,
        draft: DraftChoice,
        target: Model,
        cache: KVCache,
        rejection_sampling: bool,
        grammars: Grammars | None,
        runner: Runner | None = None,
    ) -> ModelDrafter | NGramDrafter | None:
        """Return the drafter for `target`, or None. It has a separate KV pool or uses the target's `cache`,
        and leaves draft tokens on the device for the target's `runner`."""
        eos = target.spec.eos_token_ids
        if draft.kind is DraftKind.NGRAM:
            return NGramDrafter(eos, grammars)
        if draft.kind is DraftKind.FIRST_LAYERS:
            spec = target.spec.first_layers(draft.layers)
            layers = target.layers[: draft.layers]
            model = Model(spec, target.embedding, layers, target.final_norm, target.head)
            group, draft_cache = TARGET, cache
        elif draft.spec:
            weights = open_checkpoint(draft.folder)[1]
            model = with_vocabulary(self.model(weights, draft.spec, target.dtype), target.spec.vocab_size)
            group = DRAFT
            draft_cache = self.cache(
                draft.spec, cache.num_blocks - 1, cache.block_size, target.dtype, cache.quantized
            )
        elif draft.kind in (DraftKind.NONE, DraftKind.SERVICE):
            return None
        else:
            raise CheckpointError(f"--draft: {draft.kind.value} drafters are not supported on a device")
        passes = self.runner(model, draft_cache)
        chains = DeviceChains(passes, runner)
        return ModelDrafter(passes, draft_cache, group, rejection_sampling, eos, grammars, chains=chains)


def reserve_bytes(spec: ModelSpec, dtype: torch.dtype, max_nodes: int) -> int:
    """Return the memory in bytes to reserve for a step's activations, logits and graphs."""
    widest = 3 * spec.intermediate_size + 4 * spec.hidden_size + 2 * spec.num_heads * spec.head_dim
    if spec.experts:
        inner = 3 * spec.experts.intermediate_size + spec.hidden_size
        widest += spec.experts.chosen * inner + 3 * spec.experts.shared_size
    return GRAPH_BYTES + ROWS[-1] * widest * dtype.itemsize + 2 * max_nodes * spec.vocab_size * 4


def _backend_name(device: torch.device, degree: int) -> str:
    """Return the name of the backend, with everything that the bits of its results depend on."""
    parallel = f" tensor parallel {degree}" if degree > 1 else ""
    if device.type != "cuda":
        return f"device torch {torch.__version__}{parallel}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"cuda sm_{major}{minor} torch {torch.__version__}{parallel}"


def load_on_device(
    source: Source,
    device: torch.device,
    vocabulary: Vocabulary | None,
    memory_share: float = 1.0,
    allocate: Callable[[int], Tensor] | None = None,
) -> Loaded:
    """Load a model onto a GPU or, for tests, onto a CPU in plain torch. `memory_share`: fraction of the
    device's memory that may be used. `allocate` returns host memory where other workers write KV; None if
    they write none. Raises CheckpointError for a model or option that the device does not support."""
    config, spec = source.config, source.spec
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(config.threads or usable_processors().threads)
    check_source(source, device)
    part = replace(source, spec=shard_spec(spec, config.tensor_parallel_size))
    sizes = plan_memory(
        part, budget_bytes(device, memory_share), False, available_bytes(), KV_FRACTION,
        reserve_bytes(spec, source.dtype, config.max_num_batched_tokens), two_levels=False,
    )  # fmt: skip
    if allocate:
        check_landing(sizes, int(available_bytes() * memory_share))
    try:
        return _load(source.at_length(sizes.max_model_len), sizes, device, vocabulary, allocate)
    except torch.OutOfMemoryError:
        raise CheckpointError(
            f"the memory of {device} is too small: {free_bytes(device) >> 20} MiB are free with parts of "
            "the model loaded; set --quantization, lower --kv-cache-bytes or --max-num-batched-tokens, or "
            "end other processes that use the device"
        ) from None


def _load(
    source: Source,
    sizes: PoolSizes,
    device: torch.device,
    vocabulary: Vocabulary | None,
    allocate: Callable[[int], Tensor] | None,
) -> Loaded:
    config, spec = source.config, source.spec
    if config.tensor_parallel_size > 1:
        return _lead(source, sizes, device, vocabulary)
    backend = DeviceBackend.on(device, config.max_num_seqs, sizes.max_model_len)
    if isinstance(source.checkpoint, GgufCheckpoint):
        source.checkpoint.log_rounded(spec, source.dtype, source.head is not None)
    with _compiling(backend, source):
        model = backend.model(source.checkpoint, spec, source.dtype, source.format, source.head)
    cache = backend.cache(spec, sizes.blocks, config.block_size, source.dtype, source.kv_quantized)
    grammars = make_grammars(vocabulary, spec)
    runner, rejection = backend.runner(model, cache), config.speculation_mode == "rejection"
    drafter = backend.drafter(source.draft, model, cache, rejection, grammars, runner)
    caches = all_caches(cache, drafter)
    host = DeviceHostPool(caches, sizes.swap_blocks) if sizes.swap_blocks else None
    memory = allocate(sizes.blocks * sizes.block_bytes) if allocate else None
    if device.type == "cuda":
        capture(runner, config.max_num_seqs, drafter)
    return Loaded(
        DeviceExecutor(runner, spec.eos_token_ids, grammars, host),
        engine_config(config, sizes),
        model_info(source, sizes, False, False, _backend_name(device, 1), two_levels=False),
        sizes.blocks * sizes.block_bytes,
        model,
        None,
        cache,
        drafter,
        caches,
        source.draft_fingerprint,
        device,
        source.format,
        source.head,
        landing=None if memory is None else KVLanding(caches, sizes.blocks, memory),
    )


def _compiling(backend: DeviceBackend, source: Source) -> AbstractContextManager[None]:
    """Return a context in which the model's kernels are compiled, on a GPU."""
    if backend.device.type == "cpu":
        return nullcontext()
    config, spec = source.config, source.spec.first_layers(layers_of_all_kinds(source.spec))

    def load() -> Callable[[], Runner]:
        _, checkpoint = open_checkpoint(Path(config.path))
        model = backend.model(checkpoint, spec, source.dtype, source.format, source.head)
        cache = backend.cache(spec, 1, config.block_size, source.dtype, source.kv_quantized)
        return lambda: backend.runner(model, cache, NoGraphs())

    return compiling(load, config.max_num_seqs, backend.device)


def _shard(source: Source, sizes: PoolSizes, ranks: Ranks, device: torch.device) -> tuple[Runner, Model]:
    """Return the runner of a rank's shard of the model, and the shard."""
    assert isinstance(source.checkpoint, Checkpoint)
    config, spec = source.config, shard_spec(source.spec, ranks.degree)
    backend = replace(DeviceBackend.on(device, config.max_num_seqs, sizes.max_model_len), ranks=ranks)
    checkpoint: Any = ShardedCheckpoint(source.checkpoint, Shard(ranks.rank, ranks.degree))
    model = backend.model(checkpoint, spec, source.dtype)
    cache = backend.cache(spec, sizes.blocks, config.block_size, source.dtype, source.kv_quantized)
    return backend.runner(model, cache), model


def _lead(source: Source, sizes: PoolSizes, device: torch.device, vocabulary: Vocabulary | None) -> Loaded:
    """Load the first rank of a tensor-parallel model, and start processes for the other ranks."""
    config, spec, degree = source.config, source.spec, source.config.tensor_parallel_size
    store = new_store()
    start = RankStart(
        config, 0, str(store), str(device), sizes.blocks, sizes.swap_blocks, sizes.max_model_len
    )  # fmt: skip
    children = Children(start, degree)
    try:
        ranks = Ranks.connect(0, degree, store, device)
        runner, model = _shard(source, sizes, ranks, device)
        ranks.meet(device)
    except BaseException:
        children.kill()
        raise
    finally:
        shutil.rmtree(store.parent)
    leading = LeadingRunner(runner, ranks, children)
    grammars = make_grammars(vocabulary, spec)
    drafter = NGramDrafter(spec.eos_token_ids, grammars) if source.draft.kind is DraftKind.NGRAM else None
    host = LeadingHostPool([runner.cache], sizes.swap_blocks, children.send) if sizes.swap_blocks else None
    return Loaded(
        DeviceExecutor(leading, spec.eos_token_ids, grammars, host),
        engine_config(config, sizes),
        model_info(
            source,
            sizes,
            False,
            False,
            _backend_name(device, degree),
            notice=notice(device, degree),
            two_levels=False,
        ),
        sizes.blocks * sizes.block_bytes,
        model,
        None,
        runner.cache,
        drafter,
        (runner.cache,),
        source.draft_fingerprint,
        device,
    )


def load_rank(start: RankStart) -> tuple[Runner, Ranks, DeviceHostPool | None]:
    """Load a rank other than the first; called in the rank's process."""
    config, device = start.config, torch.device(start.device)
    if device.type == "cuda":
        device = torch.device("cuda", (device.index or 0) + start.rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    ranks = Ranks.connect(start.rank, config.tensor_parallel_size, Path(start.store), device)
    spec, checkpoint = open_checkpoint(Path(config.path))
    source = open_source(config, checkpoint, spec).at_length(start.max_model_len)
    sizes = PoolSizes(start.blocks, 0, 0, start.swap_blocks, start.max_model_len)
    runner, _ = _shard(source, sizes, ranks, device)
    ranks.meet(device)
    host = DeviceHostPool([runner.cache], start.swap_blocks) if start.swap_blocks else None
    return runner, ranks, host
