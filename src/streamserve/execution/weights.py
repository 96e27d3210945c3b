"""Load a checkpoint's tensors into a Model: their names and shapes, and packing them layer by layer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from streamserve.execution.checkpoint import Checkpoint
from streamserve.execution.linear import Linear, LinearMap
from streamserve.execution.model import LayerWeights, Model
from streamserve.execution.quantization import WeightFormat
from streamserve.execution.spec import ModelSpec
from streamserve.protocol.errors import CheckpointError

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
LinearMaker = Callable[[Tensor, Tensor | None], LinearMap]
"""Makes a linear map of a weight [out, in] and optionally a bias [out]."""

CPU = torch.device("cpu")


@dataclass(frozen=True)
class LinearMakers:
    """What makes a model's linear maps: those into the MLP, which may interleave gates and values, the head,
    and all others."""

    linear: LinearMaker = Linear
    gate_up: LinearMaker = Linear
    head: LinearMaker = Linear


IGNORED = (".rotary_emb.inv_freq",)
"""Endings of names that some checkpoints contain and no model needs: recomputed from the config."""


def weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of exactly the tensors that a checkpoint of this model contains."""
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not spec.tied_embeddings:
        shapes[HEAD] = (spec.vocab_size, hidden)
    for number in range(spec.num_layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in _layer_shapes(spec).items()}
    return shapes


def _layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    linears = {
        "self_attn.q_proj": (queries, hidden, spec.qkv_bias),
        "self_attn.k_proj": (keys, hidden, spec.qkv_bias),
        "self_attn.v_proj": (keys, hidden, spec.qkv_bias),
        "self_attn.o_proj": (hidden, queries, spec.out_bias),
        "mlp.gate_proj": (inner, hidden, spec.mlp_bias),
        "mlp.up_proj": (inner, hidden, spec.mlp_bias),
        "mlp.down_proj": (hidden, inner, spec.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (rows, columns, bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if spec.qk_norm:
        shapes |= {f"self_attn.{name}.weight": (spec.head_dim,) for name in ("q_norm", "k_norm")}
    return shapes


def count_parameters(spec: ModelSpec) -> int:
    """Return the number of weights of the model; tied ones count once."""
    return sum(math.prod(shape) for shape in weight_shapes(spec).values())


def layer_matrices(spec: ModelSpec) -> int:
    """Return the number of weights of all layers' matrices."""
    return sum(
        math.prod(shape)
        for name, shape in weight_shapes(spec).items()
        if name.startswith("model.layers.") and len(shape) == 2
    )


def weight_bytes(
    spec: ModelSpec, dtype: torch.dtype, tied_head_copied: bool, format: WeightFormat | None = None
) -> int:
    """Return the bytes of the loaded weights, those of the layers' matrices in `format`. `tied_head_copied`:
    a tied head is packed in addition to the embedding."""
    copied = spec.vocab_size * spec.hidden_size if spec.tied_embeddings and tied_head_copied else 0
    plain, rounded = count_parameters(spec) + copied, 0.0
    if format:
        plain -= layer_matrices(spec)
        rounded = layer_matrices(spec) * format.bytes_per_weight
    return plain * dtype.itemsize + int(rounded)


def check_weights(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    """Raise CheckpointError, naming file and tensor, unless the checkpoint is exactly this model's."""
    tied_head = spec.tied_embeddings and HEAD in checkpoint
    checkpoint.check(weight_shapes(spec), (*IGNORED, HEAD) if tied_head else IGNORED)
    if tied_head and not checkpoint.equal(HEAD, EMBEDDING):
        raise CheckpointError(
            f"{checkpoint.folder}: tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}"
        )


def load_model(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    dtype: torch.dtype,
    makers: LinearMakers = LinearMakers(),
    device: torch.device = CPU,
) -> Model:
    """Load the model of a checked checkpoint onto `device`, with weights in `dtype` (float32 or bfloat16)
    and linear maps made by `makers`."""

    def load(names: Sequence[str]) -> Tensor:
        return checkpoint.tensor(names, dtype).to(device)

    layers = [_load_layer(load, spec, number, makers) for number in range(spec.num_layers)]
    embedding = load([EMBEDDING])
    head = makers.head(embedding if spec.tied_embeddings else load([HEAD]), None)
    return Model(spec, embedding, layers, load([FINAL_NORM]), head)


def _load_layer(
    load: Callable[[Sequence[str]], Tensor], spec: ModelSpec, number: int, makers: LinearMakers
) -> LayerWeights:
    prefix = f"model.layers.{number}."

    def norm(name: str) -> Tensor:
        return load([f"{prefix}{name}.weight"])

    def maps(make: LinearMaker, has_bias: bool, *names: str) -> LinearMap:
        weight = load([f"{prefix}{name}.weight" for name in names])
        bias = load([f"{prefix}{name}.bias" for name in names]) if has_bias else None
        return make(weight, bias)

    head_norm = None
    if spec.qk_norm:
        q_norm, k_norm = norm("self_attn.q_norm"), norm("self_attn.k_norm")
        head_norm = torch.stack([q_norm] * spec.num_heads + [k_norm] * spec.num_kv_heads)
    return LayerWeights(
        attention_norm=norm("input_layernorm"),
        qkv=maps(makers.linear, spec.qkv_bias, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        head_norm=head_norm,
        out=maps(makers.linear, spec.out_bias, "self_attn.o_proj"),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=maps(makers.gate_up, spec.mlp_bias, "mlp.gate_proj", "mlp.up_proj"),
        down=maps(makers.linear, spec.mlp_bias, "mlp.down_proj"),
    )
