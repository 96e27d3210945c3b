"""Shards of a model for tensor parallelism, cut when the checkpoint is read. A rank's shard is a model with
fewer heads and a narrower MLP; sums over ranks (cuda/model.py) give the results of the whole model.

    q, k, v, gate, up     the rank's rows: its heads, its part of the MLP
    o, down               the rank's columns, so that the ranks' outputs add up; biases on rank 0
    head                  the rank's rows: its part of the vocabulary
    all other tensors     on every rank
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from streamserve.execution.formats.checkpoint import Checkpoint
from streamserve.execution.model.spec import ModelSpec
from streamserve.protocol.errors import CheckpointError

ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3", "self_attn.sinks")
COLUMNS = ("o_proj", "down_proj", "w2")


@dataclass(frozen=True)
class Shard:
    """The shard number `rank` of `degree`."""

    rank: int
    degree: int

    def rows(self, x: Tensor) -> Tensor:
        return x.chunk(self.degree)[self.rank]

    def columns(self, x: Tensor) -> Tensor:
        return x.chunk(self.degree, 1)[self.rank].contiguous()


def check_shards(spec: ModelSpec, checkpoint: object, degree: int) -> None:
    """Raise CheckpointError if the model cannot be divided among `degree` ranks."""
    experts = spec.experts
    sizes = {
        "query heads": spec.num_heads,
        "key-value heads": spec.num_kv_heads,
        "the MLP's size": spec.intermediate_size,
        "the vocabulary": spec.vocab_size,
    }
    if experts:
        sizes |= {
            "an expert's size": experts.intermediate_size,
            "the shared expert's size": experts.shared_size,
        }
    kinds = {
        "quantized weights": spec.stored is not None,
        "GGUF files": not isinstance(checkpoint, Checkpoint),
        "norms of all queries as one vector": spec.qk_norm == "joint",
        "joined matrices of q, k and v": spec.fused,
        "stacked experts": experts is not None and experts.tensors.stacked,
    }
    reasons = [
        f"{name} ({size}) is not a multiple of {degree}" for name, size in sizes.items() if size % degree
    ]
    reasons += [f"{name} cannot be divided yet" for name, present in kinds.items() if present]
    if reasons:
        raise CheckpointError(f"--tensor-parallel-size {degree}: {'; '.join(reasons)}: use 1")


def shard_spec(spec: ModelSpec, degree: int) -> ModelSpec:
    """Return the spec of one of `degree` shards."""
    experts = spec.experts and replace(
        spec.experts,
        intermediate_size=spec.experts.intermediate_size // degree,
        shared_size=spec.experts.shared_size // degree,
    )
    return replace(
        spec, num_heads=spec.num_heads // degree, num_kv_heads=spec.num_kv_heads // degree,
        intermediate_size=spec.intermediate_size // degree, experts=experts,
    )  # fmt: skip


class ShardedCheckpoint:
    """The checkpoint of a shard: the tensors of `checkpoint`, cut to the shard."""

    def __init__(self, checkpoint: Checkpoint, shard: Shard) -> None:
        self.path = checkpoint.path
        self._checkpoint = checkpoint
        self._shard = shard

    def tensor(self, names: Sequence[str], dtype: torch.dtype) -> Tensor:
        """Return the shard's tensors of `names`, joined along their first dimension."""
        return torch.cat([self._cut(name, self._checkpoint.tensor([name], dtype)) for name in names])

    def read_ahead(self, layer: int) -> None:
        """Start reading a layer's whole tensors from the disk, if the layer exists."""
        self._checkpoint.read_ahead(layer)

    def release(self) -> None:
        """Release the pages of all files that this process has read (mapped.py)."""
        self._checkpoint.release()

    def _cut(self, name: str, whole: Tensor) -> Tensor:
        module, _, kind = name.rpartition(".")
        if module.endswith(ROWS) or name.endswith(ROWS):
            return self._shard.rows(whole)
        if not module.endswith(COLUMNS):
            return whole
        if kind == "weight":
            return self._shard.columns(whole)
        return whole if self._shard.rank == 0 else torch.zeros_like(whole)
