"""Load a checkpoint's tensors into a Model: their names and shapes, and packing them layer by layer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamserve.execution.checkpoint import Checkpoint, Header
from streamserve.execution.linear import Linear, LinearMap
from streamserve.execution.model import LayerWeights, Model
from streamserve.execution.quantization import MAX_INPUTS, QuantizedWeight, WeightFormat, join, quantize
from streamserve.execution.spec import ModelSpec
from streamserve.protocol.errors import CheckpointError

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
LinearMaker = Callable[[Any, Tensor | None], LinearMap]
"""Makes a linear map of a weight [out, in], a Tensor or an QuantizedWeight, and optionally a bias [out]."""

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
    """Return names and shapes of exactly the tensors that a checkpoint of this model contains, unless it is
    quantized."""
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


def matrix_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return the shapes [out, in] of all layers' matrices, by module."""
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in weight_shapes(spec).items()
        if name.startswith("model.layers.") and len(shape) == 2
    }


def layer_matrices(spec: ModelSpec) -> int:
    """Return the number of weights of all layers' matrices."""
    return sum(math.prod(shape) for shape in matrix_shapes(spec).values())


def matrix_bytes(spec: ModelSpec, itemsize: int, format: WeightFormat | None = None) -> int:
    """Return the bytes of all layers' matrices as they are loaded: of `itemsize` each, unless they are stored
    quantized or are rounded to `format`."""
    total = 0
    for module, shape in matrix_shapes(spec).items():
        loaded = _loaded_format(spec, module, format)
        total += loaded.nbytes(*shape) if loaded else math.prod(shape) * itemsize
    return total


def _loaded_format(spec: ModelSpec, module: str, format: WeightFormat | None) -> WeightFormat | None:
    """Return the format that a matrix is loaded in, if any, where matrices are rounded to `format`."""
    if spec.stored is None:
        return format
    stored = spec.stored.of(module)
    return stored.weights if stored else None


def weight_bytes(
    spec: ModelSpec, dtype: torch.dtype, tied_head_copied: bool, format: WeightFormat | None = None
) -> int:
    """Return the bytes of the loaded weights, the layers' matrices rounded to `format` unless they are stored
    quantized. `tied_head_copied`: a tied head is packed in addition to the embedding."""
    copied = spec.vocab_size * spec.hidden_size if spec.tied_embeddings and tied_head_copied else 0
    others = count_parameters(spec) + copied - layer_matrices(spec)
    return others * dtype.itemsize + matrix_bytes(spec, dtype.itemsize, format)


def check_weights(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    """Raise CheckpointError, naming file and tensor, unless the checkpoint is exactly this model's."""
    tied_head = spec.tied_embeddings and HEAD in checkpoint
    checkpoint.check(_headers(checkpoint, spec), (*IGNORED, HEAD) if tied_head else IGNORED)
    if tied_head and not checkpoint.equal(HEAD, EMBEDDING):
        raise CheckpointError(
            f"{checkpoint.folder}: tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}"
        )


def _headers(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, Header]:
    """Return what the tensors of a checkpoint must be. Raises CheckpointError for a matrix with more inputs
    than can share a scale."""
    plain = {name: Header(shape) for name, shape in weight_shapes(spec).items()}
    stored = dict[str, Header]()
    for module, shape in matrix_shapes(spec).items():
        format = spec.stored.of(module) if spec.stored else None
        if format is None:
            continue
        if not format.weights.floating and (format.weights.group or shape[1]) > MAX_INPUTS:
            raise CheckpointError(
                f"{checkpoint.folder}: {module} has more than {MAX_INPUTS} inputs with one scale"
            )
        del plain[f"{module}.weight"]
        stored |= format.headers(module, shape)
    return stored | plain


def load_model(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    dtype: torch.dtype,
    makers: LinearMakers = LinearMakers(),
    device: torch.device = CPU,
    format: WeightFormat | None = None,
) -> Model:
    """Load the model of a checked checkpoint onto `device`, with weights in `dtype` (float32 or bfloat16)
    and linear maps made by `makers`. The layers' matrices are QuantizedWeight if they are stored so or are
    rounded to `format`, matrix by matrix."""
    shapes = matrix_shapes(spec)

    def load(names: Sequence[str]) -> Tensor:
        return checkpoint.tensor(names, dtype).to(device)

    def load_matrix(modules: Sequence[str]) -> Tensor | QuantizedWeight:
        stored = spec.stored.of(modules[0]) if spec.stored else None
        if stored:
            weights = [stored.read(checkpoint, module, shapes[module]) for module in modules]
            _check_orders(checkpoint, modules, weights)
            return join(weights)
        names = [f"{module}.weight" for module in modules]
        if format and spec.stored is None:
            return join([quantize(checkpoint.tensor([name], torch.float32), format) for name in names])
        return load(names)

    layers = [_load_layer(load, load_matrix, spec, number, makers) for number in range(spec.num_layers)]
    embedding = load([EMBEDDING])
    head = makers.head(embedding if spec.tied_embeddings else load([HEAD]), None)
    return Model(spec, embedding, layers, load([FINAL_NORM]), head)


def _check_orders(checkpoint: Checkpoint, modules: Sequence[str], weights: Sequence[QuantizedWeight]) -> None:
    """Raise CheckpointError if weights that are joined have their inputs in different orders."""
    first, *others = (torch.empty(0) if weight.order is None else weight.order for weight in weights)
    for module, order in zip(modules[1:], others, strict=True):
        if not torch.equal(first, order):
            raise CheckpointError(
                f"{checkpoint.folder}: {module} groups its inputs otherwise than {modules[0]}, with which "
                "it is computed"
            )


def _load_layer(
    load: Callable[[Sequence[str]], Tensor],
    load_matrix: Callable[[Sequence[str]], Tensor | QuantizedWeight],
    spec: ModelSpec,
    number: int,
    makers: LinearMakers,
) -> LayerWeights:
    prefix = f"model.layers.{number}."

    def norm(name: str) -> Tensor:
        return load([f"{prefix}{name}.weight"])

    def maps(make: LinearMaker, has_bias: bool, *names: str) -> LinearMap:
        weight = load_matrix([f"{prefix}{name}" for name in names])
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
