"""Load a checkpoint's tensors into a Model: their names and shapes, and packing them layer by layer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamserve.execution.architectures import Norms
from streamserve.execution.checkpoint import Checkpoint, Header
from streamserve.execution.gguf.checkpoint import GgufCheckpoint
from streamserve.execution.linear import Linear, LinearMap
from streamserve.execution.model import LayerWeights, Model
from streamserve.execution.quantization import MAX_INPUTS, QuantizedWeight, WeightFormat, join, quantize
from streamserve.execution.spec import ModelSpec
from streamserve.execution.stored.formats import JOINED, AnyFormat, GgufBlocks
from streamserve.protocol.errors import CheckpointError

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
AnyCheckpoint = Checkpoint | GgufCheckpoint
LinearMaker = Callable[[Any, Tensor | None], LinearMap]
"""Makes a linear map of a weight [out, in], a Tensor or a QuantizedWeight, and optionally a bias [out]."""

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

NORMS: dict[Norms, dict[str, str]] = {
    "before": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "after": {
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    "around": {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
}
"""A layer's norms by their field of LayerWeights, and what checkpoints call them."""

FUSED_INPUTS = (("self_attn.qkv_proj",), ("mlp.gate_up_proj",))
"""The matrices into attention and into the MLP where checkpoints join them; elsewhere they are JOINED."""


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
    if spec.fused:
        inputs = {
            "self_attn.qkv_proj": (queries + 2 * keys, hidden, spec.qkv_bias),
            "mlp.gate_up_proj": (2 * inner, hidden, spec.mlp_bias),
        }
    else:
        inputs = {
            "self_attn.q_proj": (queries, hidden, spec.qkv_bias),
            "self_attn.k_proj": (keys, hidden, spec.qkv_bias),
            "self_attn.v_proj": (keys, hidden, spec.qkv_bias),
            "mlp.gate_proj": (inner, hidden, spec.mlp_bias),
            "mlp.up_proj": (inner, hidden, spec.mlp_bias),
        }
    linears = inputs | {
        "self_attn.o_proj": (hidden, queries, spec.out_bias),
        "mlp.down_proj": (hidden, inner, spec.mlp_bias),
    }
    norms = NORMS[spec.norms].values()
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in norms}
    for name, (rows, columns, bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if spec.qk_norm != "none":
        joint = spec.qk_norm == "joint"
        shapes["self_attn.q_norm.weight"] = (queries if joint else spec.head_dim,)
        shapes["self_attn.k_norm.weight"] = (keys if joint else spec.head_dim,)
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


def head_bytes(spec: ModelSpec, itemsize: int, head: WeightFormat | None = None) -> int:
    """Return the bytes of the head's matrix: of `itemsize` each, or in the format `head`."""
    if head:
        return head.nbytes(spec.vocab_size, spec.hidden_size)
    return spec.vocab_size * spec.hidden_size * itemsize


def weight_bytes(
    spec: ModelSpec,
    dtype: torch.dtype,
    tied_head_copied: bool,
    format: WeightFormat | None = None,
    head: WeightFormat | None = None,
) -> int:
    """Return the bytes of the loaded weights, the layers' matrices rounded to `format` unless they are stored
    quantized, the head's in the format `head`. `tied_head_copied`: a tied head is packed in addition to the
    embedding, as one in another format always is."""
    size = dtype.itemsize
    others = count_parameters(spec) - layer_matrices(spec)
    if not spec.tied_embeddings:
        others -= spec.vocab_size * spec.hidden_size
    shared = spec.tied_embeddings and not tied_head_copied and head is None
    own_head = 0 if shared else head_bytes(spec, size, head)
    return others * size + own_head + matrix_bytes(spec, size, format)


def check_weights(checkpoint: AnyCheckpoint, spec: ModelSpec) -> None:
    """Raise CheckpointError, naming file and tensor, unless the checkpoint is exactly this model's."""
    if isinstance(checkpoint, GgufCheckpoint):
        checkpoint.check(weight_shapes(spec))
        return
    tied_head = spec.tied_embeddings and HEAD in checkpoint
    checkpoint.check(_headers(checkpoint, spec), (*IGNORED, HEAD) if tied_head else IGNORED)
    if tied_head and not checkpoint.equal(HEAD, EMBEDDING):
        raise CheckpointError(
            f"{checkpoint.path}: tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}"
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
        assert not isinstance(format, GgufBlocks)
        if not format.weights.floating and (format.weights.group or shape[1]) > MAX_INPUTS:
            raise CheckpointError(
                f"{checkpoint.path}: {module} has more than {MAX_INPUTS} inputs with one scale"
            )
        del plain[f"{module}.weight"]
        stored |= format.headers(module, shape)
    return stored | plain


def _read_quantized(
    checkpoint: AnyCheckpoint, module: str, shape: tuple[int, int], stored: AnyFormat
) -> QuantizedWeight:
    """Return the weight of a module that is stored quantized."""
    if isinstance(checkpoint, GgufCheckpoint):
        return checkpoint.integers(module, stored.weights)
    assert not isinstance(stored, GgufBlocks)
    return stored.read(checkpoint, module, shape)


def load_model(
    checkpoint: AnyCheckpoint,
    spec: ModelSpec,
    dtype: torch.dtype,
    makers: LinearMakers = LinearMakers(),
    device: torch.device = CPU,
    format: WeightFormat | None = None,
    head: WeightFormat | None = None,
) -> Model:
    """Load the model of a checked checkpoint onto `device`, with weights in `dtype` (float32 or bfloat16)
    and linear maps made by `makers`. The layers' matrices are QuantizedWeight if they are stored so or are
    rounded to `format`, matrix by matrix, and the head's if it is stored in the format `head` or rounded to
    it."""
    shapes = matrix_shapes(spec)

    def load(names: Sequence[str]) -> Tensor:
        return checkpoint.tensor(names, dtype).to(device)

    def load_matrix(modules: Sequence[str]) -> Tensor | QuantizedWeight:
        stored = spec.stored.of(modules[0]) if spec.stored else None
        if stored:
            weights = [_read_quantized(checkpoint, module, shapes[module], stored) for module in modules]
            _check_orders(checkpoint, modules, weights)
            return join(weights)
        names = [f"{module}.weight" for module in modules]
        if format and spec.stored is None:
            return join([quantize(checkpoint.tensor([name], torch.float32), format) for name in names])
        return load(names)

    def load_norm(name: str) -> Tensor:
        weight = checkpoint.tensor([name], torch.float32 if spec.wide_norms else dtype).to(device)
        return weight + spec.norm_offset if spec.norm_offset else weight

    layers = [
        _load_layer(load, load_norm, load_matrix, spec, number, makers) for number in range(spec.num_layers)
    ]

    def load_head() -> Tensor | QuantizedWeight:
        name = EMBEDDING if spec.tied_embeddings else HEAD
        if head is None:
            return embedding if spec.tied_embeddings else load([name])
        if isinstance(checkpoint, GgufCheckpoint) and spec.stored and spec.stored.head:
            return checkpoint.integers(name.removesuffix(".weight"), head)
        return quantize(checkpoint.tensor([name], torch.float32), head)

    embedding = load([EMBEDDING])
    return Model(spec, embedding, layers, load_norm(FINAL_NORM), makers.head(load_head(), None))


def _check_orders(
    checkpoint: AnyCheckpoint, modules: Sequence[str], weights: Sequence[QuantizedWeight]
) -> None:
    """Raise CheckpointError if weights that are joined have their inputs in different orders."""
    first, *others = (torch.empty(0) if weight.order is None else weight.order for weight in weights)
    for module, order in zip(modules[1:], others, strict=True):
        if not torch.equal(first, order):
            raise CheckpointError(
                f"{checkpoint.path}: {module} groups its inputs otherwise than {modules[0]}, with which "
                "it is computed"
            )


def _load_layer(
    load: Callable[[Sequence[str]], Tensor],
    load_norm: Callable[[str], Tensor],
    load_matrix: Callable[[Sequence[str]], Tensor | QuantizedWeight],
    spec: ModelSpec,
    number: int,
    makers: LinearMakers,
) -> LayerWeights:
    prefix = f"model.layers.{number}."

    def maps(make: LinearMaker, has_bias: bool, *names: str) -> LinearMap:
        weight = load_matrix([f"{prefix}{name}" for name in names])
        bias = load([f"{prefix}{name}.bias" for name in names]) if has_bias else None
        return make(weight, bias)

    norms = {field: load_norm(f"{prefix}{name}.weight") for field, name in NORMS[spec.norms].items()}
    head_norm = None
    if spec.qk_norm != "none":
        q_norm, k_norm = (load_norm(f"{prefix}self_attn.{name}.weight") for name in ("q_norm", "k_norm"))
        copies = (1, 1) if spec.qk_norm == "joint" else (spec.num_heads, spec.num_kv_heads)
        head_norm = torch.cat([q_norm.repeat(copies[0]), k_norm.repeat(copies[1])]).view(-1, spec.head_dim)
    qkv, gate_up = FUSED_INPUTS if spec.fused else JOINED
    return LayerWeights(
        attention_norm=norms.get("attention_norm"),
        qkv=maps(makers.linear, spec.qkv_bias, *qkv),
        head_norm=head_norm,
        out=maps(makers.linear, spec.out_bias, "self_attn.o_proj"),
        attention_post_norm=norms.get("attention_post_norm"),
        mlp_norm=norms.get("mlp_norm"),
        gate_up=maps(makers.gate_up, spec.mlp_bias, *gate_up),
        down=maps(makers.linear, spec.mlp_bias, "mlp.down_proj"),
        mlp_post_norm=norms.get("mlp_post_norm"),
    )
