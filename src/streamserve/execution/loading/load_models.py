"""Load the target and its draft model on a CPU, into memory of this process or of all workers of the host."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from streamserve.execution.backends.native.library import ThreadPool
from streamserve.execution.backends.native.linear import NativeLinear
from streamserve.execution.backends.native.model import NativeModel
from streamserve.execution.backends.native.packing import unpack_floats
from streamserve.execution.backends.native.weight_arena import WeightArena
from streamserve.execution.backends.native.weight_store import PRIVATE, WeightStore, with_shared_weights
from streamserve.execution.formats.check import AnyCheckpoint
from streamserve.execution.formats.open import open_checkpoint
from streamserve.execution.formats.quantization import WeightFormat
from streamserve.execution.loading.loaded import Source
from streamserve.execution.loading.weights import LinearMakers, load_model
from streamserve.execution.model.forward import Model
from streamserve.execution.model.shapes import weight_bytes
from streamserve.execution.model.spec import ModelSpec

PADDED = 2
"""Upper bound of packed bytes / weight bytes, for models of usual size."""
SPARE_BYTES = 1 << 30
"""Additional addresses of an arena, for the padding of tiny models. Unused addresses take no memory."""


@dataclass(frozen=True)
class LoadedModels:
    """The target, and its draft model if it has one. `shared`: whether the target's weights are in memory
    that the host's other workers use too."""

    target: Model
    draft: Model | None
    shared: bool


@dataclass(frozen=True)
class _ModelPart:
    """A model to load. The matrices of its layers are rounded to `format` unless they are stored quantized;
    its head is stored in or rounded to the format `head`."""

    checkpoint: AnyCheckpoint
    spec: ModelSpec
    dtype: torch.dtype
    fingerprint: str
    format: WeightFormat | None = None
    head: WeightFormat | None = None


def load_models(source: Source, pool: ThreadPool | None, arenas: Sequence[WeightArena]) -> LoadedModels:
    """Load the target, and its draft model if it has one: for the kernels on `pool`, or without a pool for
    plain torch. With kernels the weights are put into `arenas` (the target's, the draft model's) if any are
    given."""
    target = _ModelPart(
        source.checkpoint, source.spec, source.dtype, source.fingerprint, source.format, source.head
    )
    own, drafts = arenas or (None, None)
    model, shared = _load(target, pool, own)
    if source.draft.spec is None:
        return LoadedModels(model, None, shared)
    checkpoint = open_checkpoint(source.draft.folder)[1]
    draft = _ModelPart(checkpoint, source.draft.spec, source.dtype, source.draft_fingerprint)
    return LoadedModels(model, _load(draft, pool, drafts)[0], shared)


def _load(part: _ModelPart, pool: ThreadPool | None, arena: WeightArena | None) -> tuple[Model, bool]:
    """Return the loaded model, and whether its weights are in the arena."""
    checkpoint, spec, dtype = part.checkpoint, part.spec, part.dtype
    if pool is None:
        return load_model(checkpoint, spec, dtype), False
    linear = partial(NativeLinear, pool, dtype=dtype)
    makers = LinearMakers(
        linear,
        partial(linear, paired=True),
        linear,
        partial(NativeLinear, pool),
        direct=True,
        floats=partial(unpack_floats, pool),
    )

    def load(store: WeightStore) -> Model:
        model = load_model(checkpoint, spec, dtype, makers, format=part.format, head=part.head, store=store)
        return NativeModel.of(model, pool)

    if arena is None:
        return load(PRIVATE), False
    limit = PADDED * weight_bytes(spec, dtype, False, part.format, part.head) + SPARE_BYTES
    return with_shared_weights(arena, _key(part, pool), limit, pool, load)


def _key(part: _ModelPart, pool: ThreadPool) -> str:
    """Return a key of the packed weights in an arena. It differs between models, kernel paths and libraries,
    whose packed weights differ."""
    library = pool.library._name
    return f"{part.fingerprint} {pool.path(part.dtype)} {library} {os.stat(library).st_ino}"
