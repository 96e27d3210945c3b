"""The names, shapes and sizes of a model's tensors in Hugging Face layout."""

import math
from collections.abc import Callable

import torch

from streamserve.execution.formats.quantization import WeightFormat
from streamserve.execution.model.architectures import Norms
from streamserve.execution.model.experts import Experts, is_routed, stack_of
from streamserve.execution.model.spec import ModelSpec

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

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
"""The names of a layer's norms in checkpoints, by their field of LayerWeights."""


def weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes, by name, of exactly the tensors that a checkpoint of this model contains, unless it
    is quantized."""
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not spec.tied_embeddings:
        shapes[HEAD] = (spec.vocab_size, hidden)
    for number in range(spec.num_layers):
        shapes |= {
            f"model.layers.{number}.{name}": shape for name, shape in _layer_shapes(spec, number).items()
        }
    return shapes


Matrices = dict[str, tuple[int, int, bool]]
"""Outputs, inputs, and whether there is a bias, of matrices by their names within a layer."""


def _attention_matrices(spec: ModelSpec) -> Matrices:
    hidden = spec.hidden_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    out = {"self_attn.o_proj": (hidden, queries, spec.out_bias)}
    if spec.fused:
        return {"self_attn.qkv_proj": (queries + 2 * keys, hidden, spec.qkv_bias), **out}
    return {
        "self_attn.q_proj": (queries, hidden, spec.qkv_bias),
        "self_attn.k_proj": (keys, hidden, spec.qkv_bias),
        "self_attn.v_proj": (keys, hidden, spec.qkv_bias),
        **out,
    }


def _mlp_matrices(spec: ModelSpec, experts: Experts | None) -> Matrices:
    hidden, inner, bias = spec.hidden_size, spec.intermediate_size, spec.mlp_bias
    if experts:
        return {name: (*shape, experts.biased) for name, shape in experts.matrices(hidden).items()}
    down = {"mlp.down_proj": (hidden, inner, bias)}
    if spec.fused:
        return {"mlp.gate_up_proj": (2 * inner, hidden, bias), **down}
    return {"mlp.gate_proj": (inner, hidden, bias), "mlp.up_proj": (inner, hidden, bias), **down}


def _layer_shapes(spec: ModelSpec, number: int) -> dict[str, tuple[int, ...]]:
    hidden, experts = spec.hidden_size, spec.experts_of(number)
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    matrices = _attention_matrices(spec)
    if experts is None or not experts.tensors.stacked:
        matrices |= _mlp_matrices(spec, experts)
    norms = NORMS[spec.norms].values()
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in norms}
    shapes |= experts.other_shapes(hidden) if experts else {}
    for name, (rows, columns, bias) in matrices.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    if spec.qk_norm != "none":
        joint = spec.qk_norm == "joint"
        shapes["self_attn.q_norm.weight"] = (queries if joint else spec.head_dim,)
        shapes["self_attn.k_norm.weight"] = (keys if joint else spec.head_dim,)
    if spec.sinks:
        shapes["self_attn.sinks"] = (spec.num_heads,)
    return shapes


def router_modules(spec: ModelSpec) -> list[str]:
    """Return the module names of all layers' routers and shared experts' gates."""
    experts = spec.experts
    if experts is None:
        return []
    names = [experts.router, *([experts.shared_gate] if experts.shared_gate else [])]
    return [f"model.layers.{layer}.{name}" for layer in experts.layers for name in names]


def count_parameters(spec: ModelSpec) -> int:
    """Return the number of weights of the model; a tied embedding counts once."""
    return sum(math.prod(shape) for shape in weight_shapes(spec).values())


def matrix_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return the shapes [out, in] of all layers' matrices, by module name."""
    attention = _attention_matrices(spec)
    return {
        f"model.layers.{number}.{name}": (rows, columns)
        for number in range(spec.num_layers)
        for name, (rows, columns, _) in (attention | _mlp_matrices(spec, spec.experts_of(number))).items()
    }


def layer_matrices(spec: ModelSpec, of: Callable[[str], bool] = lambda module: True) -> int:
    """Return the number of weights of the layers' matrices for whose modules `of` is true."""
    return sum(math.prod(shape) for module, shape in matrix_shapes(spec).items() if of(module))


def matrix_bytes(
    spec: ModelSpec,
    itemsize: int,
    format: WeightFormat | None = None,
    of: Callable[[str], bool] = lambda module: True,
    two_levels: bool = True,
) -> int:
    """Return the bytes of the loaded layers' matrices for whose modules `of` is true. A weight takes
    `itemsize` bytes, unless the matrix is stored quantized or rounded to `format`. `two_levels`: see
    WeightFormat.nbytes."""
    total = 0
    for module, shape in matrix_shapes(spec).items():
        loaded = _loaded_format(spec, module, format)
        if of(module):
            total += loaded.nbytes(*shape, two_levels) if loaded else math.prod(shape) * itemsize
    return total


def _loaded_format(spec: ModelSpec, module: str, format: WeightFormat | None) -> WeightFormat | None:
    """Return the quantized format of a loaded matrix: the stored one, or `format` in a model without stored
    formats. None: it is in floats."""
    if spec.stored is None:
        return format
    stored = spec.stored.of(module)
    return stored.weights if stored else None


def head_bytes(
    spec: ModelSpec, itemsize: int, head: WeightFormat | None = None, two_levels: bool = True
) -> int:
    """Return the bytes of the head's matrix: in the format `head`, or with `itemsize` bytes a weight.
    `two_levels`: see WeightFormat.nbytes."""
    if head:
        return head.nbytes(spec.vocab_size, spec.hidden_size, two_levels)
    return spec.vocab_size * spec.hidden_size * itemsize


def weight_bytes(
    spec: ModelSpec,
    dtype: torch.dtype,
    tied_head_copied: bool,
    format: WeightFormat | None = None,
    head: WeightFormat | None = None,
    two_levels: bool = True,
) -> int:
    """Return the bytes of the loaded weights. The layers' matrices are rounded to `format` unless they are
    stored quantized; the head is in the format `head`. `tied_head_copied`: a tied head is stored in addition
    to the embedding. A head in a quantized format is always stored in addition. `two_levels`: see
    WeightFormat.nbytes."""
    size, shapes = dtype.itemsize, weight_shapes(spec)
    others = count_parameters(spec) - layer_matrices(spec)
    if not spec.tied_embeddings:
        others -= spec.vocab_size * spec.hidden_size
    shared = spec.tied_embeddings and not tied_head_copied and head is None
    own_head = 0 if shared else head_bytes(spec, size, head, two_levels)
    routers = sum(math.prod(shapes[f"{module}.weight"]) for module in router_modules(spec))  # in float32
    wider = routers * (torch.float32.itemsize - size)
    layers = matrix_bytes(spec, size, format, two_levels=two_levels)
    return others * size + wider + own_head + layers


def is_stacked(spec: ModelSpec, module: str) -> bool:
    """Return whether a module's matrix is in one tensor with the matrices of other experts."""
    return spec.experts is not None and spec.experts.tensors.stacked and is_routed(module)


def tensor_of(spec: ModelSpec, module: str) -> str:
    """Return the name of the tensor of floats that contains a module's matrix."""
    return stack_of(module)[0] if is_stacked(spec, module) else f"{module}.weight"
