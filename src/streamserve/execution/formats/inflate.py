"""Inflate a Llama checkpoint: write a larger model that computes exactly the same function, at the cost of
its larger size.

hidden   [ x | 0 0 0 … ]          embeddings, norms and every output are padded with zeros; RMSNorm's mean
                                  shrinks by the ratio r, so epsilon shrinks alike and its weight by √r:
                                  a power of two, hence exact, when r is a power of four
heads    [ own | further ]        further heads are computed, and multiplied by zero
MLP      [ own | 0 ]              silu(0) · 0 · 0
layers   own, copy, copy, own …   copies are computed, and their output projections are zero
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from streamserve.execution.formats.check import check_weights
from streamserve.execution.formats.checkpoint import Checkpoint
from streamserve.execution.formats.shards import copy_other_files, write_shards
from streamserve.execution.model.shapes import EMBEDDING, FINAL_NORM, HEAD, weight_shapes
from streamserve.execution.model.spec import ModelSpec, read_spec
from streamserve.protocol.errors import CheckpointError

MARK = "streamserve_inflated"
"""The field of config.json that names the model that a checkpoint was inflated from."""

OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
"""The output projections of a layer, which are zero in copies."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of the inflated model. Heads and MLP that are None grow by the same ratio as `hidden`."""

    hidden: int
    layers: int
    heads: int | None = None
    kv_heads: int | None = None
    intermediate: int | None = None


def inflate(
    source: Path, target: Path, shape: ModelShape, show: Callable[[int, int], None] | None = None
) -> dict[str, object]:
    """Write the checkpoint of `source`, inflated to `shape`, to the folder `target`; return its config.
    `show` is called with the number of files written so far, and the number of all files.

    Raises CheckpointError, before anything is written, if `source` cannot be read, or if a model of `shape`
    cannot compute exactly the same function.
    """
    spec = read_spec(source)
    checkpoint = Checkpoint(source)
    check_weights(checkpoint, spec)
    config = _config(source, spec, shape)
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} is not empty")
    target.mkdir(parents=True, exist_ok=True)
    copy_other_files(source, target)
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    inflated = read_spec(target)
    files = inflated.num_layers + 1
    write_shards(target, _shown(_parts(checkpoint, spec, inflated), files, show), files)
    return config


def _shown(
    parts: Iterator[dict[str, Tensor]], files: int, show: Callable[[int, int], None] | None
) -> Iterator[dict[str, Tensor]]:
    """Yield `parts`, and report each one as written when the next one is requested."""
    for done, part in enumerate(parts, start=1):
        yield part
        if show is not None:
            show(done, files)


def _config(source: Path, spec: ModelSpec, shape: ModelShape) -> dict[str, object]:
    """Return the inflated config. Raises CheckpointError unless its sizes are possible for the source."""
    if spec.stored:
        raise CheckpointError(f"{source}: its weights are quantized: inflate the 16-bit checkpoint")
    if spec.architecture != "LlamaForCausalLM":
        raise CheckpointError(f"{source}: only LlamaForCausalLM is inflated, not {spec.architecture}")
    if spec.qkv_bias or spec.out_bias or spec.mlp_bias:
        raise CheckpointError(f"{source}: biases are not inflated")
    ratio, remainder = divmod(shape.hidden, spec.hidden_size)
    if remainder or ratio < 1 or ratio & (ratio - 1) or ratio.bit_length() % 2 == 0:
        allowed = ", ".join(str(spec.hidden_size * 4**power) for power in range(4))
        raise CheckpointError(f"hidden size {shape.hidden} is not exact for this model; possible: {allowed}")
    heads = shape.heads or spec.num_heads * ratio
    kv_heads = shape.kv_heads or spec.num_kv_heads * ratio
    intermediate = shape.intermediate or spec.intermediate_size * ratio
    group = spec.num_heads // spec.num_kv_heads
    if kv_heads < spec.num_kv_heads or heads != kv_heads * group:
        raise CheckpointError(
            f"{heads} heads over {kv_heads} key-value heads: must be {group} each, and no fewer"
        )
    if intermediate < spec.intermediate_size or shape.layers < spec.num_layers:
        raise CheckpointError(
            f"{source} has {spec.num_layers} layers and an MLP of {spec.intermediate_size}: it cannot shrink"
        )
    config = json.loads((source / "config.json").read_bytes())
    config |= {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": intermediate,
        "rms_norm_eps": spec.rms_norm_eps / ratio,
        MARK: {"hidden_size": spec.hidden_size, "num_hidden_layers": spec.num_layers, "source": source.name},
    }
    config.pop("layer_types", None)
    return dict(config)


def origin(layer: int, layers: int, source_layers: int) -> tuple[int, bool]:
    """Return the source layer at position `layer` of `layers`, and whether this is its effective copy, the
    first one. Copies are distributed evenly: the source's first k layers become the first
    k · layers / source_layers ones."""
    number = layer * source_layers // layers
    first = -(-number * layers // source_layers)
    return number, layer == first


def _parts(checkpoint: Checkpoint, spec: ModelSpec, inflated: ModelSpec) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each file: one file for embedding, norm and head, and one for each layer, so that
    one layer is in memory at a time."""
    shapes = weight_shapes(inflated)
    root = (inflated.hidden_size // spec.hidden_size) ** 0.5

    def padded(name: str, source: str) -> Tensor:
        tensor = checkpoint.tensor([source], checkpoint.dtype(source))
        full = torch.zeros(shapes[name], dtype=tensor.dtype)
        corner = tuple(slice(size) for size in tensor.shape)
        full[corner] = tensor / root if tensor.ndim == 1 else tensor
        return full

    ends = [name for name in (EMBEDDING, FINAL_NORM, HEAD) if name in shapes]
    yield {name: padded(name, name) for name in ends}
    for layer in range(inflated.num_layers):
        number, effective = origin(layer, inflated.num_layers, spec.num_layers)
        target_prefix, source_prefix = f"model.layers.{layer}.", f"model.layers.{number}."
        tensors = {}
        for name in (name for name in shapes if name.startswith(target_prefix)):
            part = name.removeprefix(target_prefix)
            zeroed = part in OUTPUTS and not effective
            tensors[name] = (
                torch.zeros(shapes[name], dtype=checkpoint.dtype(source_prefix + part))
                if zeroed
                else (padded(name, source_prefix + part))
            )
        yield tensors
