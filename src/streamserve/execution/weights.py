"""Load a checkpoint's tensors into a Model, packing them layer by layer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamserve.execution.checkpoint import Checkpoint, Header
from streamserve.execution.experts import Experts, in_halves, stack_of
from streamserve.execution.gguf.checkpoint import GgufCheckpoint
from streamserve.execution.linear import Linear, LinearMap
from streamserve.execution.mixture import ExpertWeights
from streamserve.execution.model import LayerWeights, Model
from streamserve.execution.quantization import (
    MAX_INPUTS,
    NotFinite,
    QuantizedWeight,
    StoredWeight,
    WeightFormat,
    join,
    quantize,
)
from streamserve.execution.shapes import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    NORMS,
    is_stacked,
    matrix_shapes,
    tensor_of,
    weight_shapes,
)
from streamserve.execution.spec import ModelSpec
from streamserve.execution.stored.formats import LINEARS, AnyFormat, GgufBlocks, joined
from streamserve.protocol.errors import CheckpointError

AnyCheckpoint = Checkpoint | GgufCheckpoint
LinearMaker = Callable[[Any, Tensor | None], LinearMap]
"""Makes a linear map of a weight [out, in], a Tensor or a QuantizedWeight (or a StoredWeight: LinearMakers),
and optionally a bias [out]."""

CPU = torch.device("cpu")


@dataclass(frozen=True)
class LinearMakers:
    """What makes a model's linear maps: those into the MLP or an expert, which may interleave gates and
    values, the head, routers in float32, and all others; and what makes a layer's experts of the router and
    the experts' maps. `direct`: makers take matrices as StoredWeight, those of plain checkpoints without a
    copy."""

    linear: LinearMaker = Linear
    gate_up: LinearMaker = Linear
    head: LinearMaker = Linear
    router: LinearMaker = Linear
    experts: Callable[[LinearMap, Sequence[Any], Sequence[Any]], Any] = ExpertWeights
    direct: bool = False


IGNORED = (".rotary_emb.inv_freq",)
"""Endings of names that some checkpoints contain and no model needs: recomputed from the config."""

INPUTS, FUSED_INPUTS = joined(LINEARS)[::2], [("self_attn.qkv_proj",), ("mlp.gate_up_proj",)]
"""The matrices into attention and into the MLP, where checkpoints have them one by one, and where they join
them."""


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
        plain.pop(tensor_of(spec, module), None)  # a stack is that of many
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
    loader = _Loader(checkpoint, spec, dtype, makers, device, format)
    layers = [loader.layer(number) for number in range(spec.num_layers)]
    embedding = loader.tensors([EMBEDDING])
    return Model(spec, embedding, layers, loader.norm(FINAL_NORM), loader.head(embedding, head))


class _Loader:
    """Loads parts of one model, as `load_model` says."""

    def __init__(
        self,
        checkpoint: AnyCheckpoint,
        spec: ModelSpec,
        dtype: torch.dtype,
        makers: LinearMakers,
        device: torch.device,
        format: WeightFormat | None,
    ) -> None:
        self._checkpoint, self._spec, self._dtype = checkpoint, spec, dtype
        self._makers, self._device, self._format = makers, device, format
        self._shapes = matrix_shapes(spec)

    def layer(self, number: int) -> LayerWeights:
        """Return the weights of a layer."""
        spec, makers, prefix = self._spec, self._makers, f"model.layers.{number}."
        qkv, gate_up = FUSED_INPUTS if spec.fused else INPUTS
        norms = {field: self.norm(f"{prefix}{name}.weight") for field, name in NORMS[spec.norms].items()}
        experts = spec.experts_of(number)
        mlp: dict[str, Any]
        if experts:
            mlp = {"experts": self._experts(prefix, experts)}
        else:
            mlp = {
                "gate_up": self._map(makers.gate_up, spec.mlp_bias, prefix, *gate_up),
                "down": self._map(makers.linear, spec.mlp_bias, prefix, "mlp.down_proj"),
            }
        return LayerWeights(
            attention_norm=norms.get("attention_norm"),
            qkv=self._map(makers.linear, spec.qkv_bias, prefix, *qkv),
            head_norm=self._head_norm(prefix),
            out=self._map(makers.linear, spec.out_bias, prefix, "self_attn.o_proj"),
            attention_post_norm=norms.get("attention_post_norm"),
            mlp_norm=norms.get("mlp_norm"),
            mlp_post_norm=norms.get("mlp_post_norm"),
            sinks=self._sinks(prefix) if spec.sinks else None,
            **mlp,
        )

    def _sinks(self, prefix: str) -> Tensor:
        return self._checkpoint.tensor([f"{prefix}self_attn.sinks"], torch.float32).to(self._device)

    def head(self, embedding: Tensor, format: WeightFormat | None) -> LinearMap:
        """Return the head, in `format` if given."""
        spec, checkpoint = self._spec, self._checkpoint
        name = EMBEDDING if spec.tied_embeddings else HEAD
        weight: Tensor | QuantizedWeight
        if format is None:
            weight = embedding if spec.tied_embeddings else self.tensors([name])
        elif isinstance(checkpoint, GgufCheckpoint) and spec.stored and spec.stored.head:
            weight = checkpoint.integers(name.removesuffix(".weight"), format)
        elif self._makers.direct:
            return self._direct(self._makers.head, [name], None, format)
        else:
            weight = quantize(checkpoint.tensor([name], torch.float32), format)
        return self._makers.head(weight, None)

    def tensors(self, names: Sequence[str]) -> Tensor:
        """Return tensors of these names, joined."""
        return self._checkpoint.tensor(names, self._dtype).to(self._device)

    def norm(self, name: str) -> Tensor:
        """Return the weight of a norm."""
        dtype = torch.float32 if self._spec.wide_norms else self._dtype
        weight = self._checkpoint.tensor([name], dtype).to(self._device)
        return weight + self._spec.norm_offset if self._spec.norm_offset else weight

    def _head_norm(self, prefix: str) -> Tensor | None:
        spec = self._spec
        if spec.qk_norm == "none":
            return None
        q_norm, k_norm = (self.norm(f"{prefix}self_attn.{name}.weight") for name in ("q_norm", "k_norm"))
        copies = (1, 1) if spec.qk_norm == "joint" else (spec.num_heads, spec.num_kv_heads)
        return torch.cat([q_norm.repeat(copies[0]), k_norm.repeat(copies[1])]).view(-1, spec.head_dim)

    def _experts(self, prefix: str, experts: Experts) -> Any:
        hidden = self._spec.hidden_size
        names = [experts.router, *([experts.shared_gate] if experts.shared_gate else [])]
        weight = torch.cat([
            self._checkpoint.tensor([f"{prefix}{name}.weight"], torch.float32).view(-1, hidden)
            for name in names
        ])  # fmt: skip
        bias = None
        if experts.biased:
            bias = self._checkpoint.tensor([f"{prefix}{experts.router}.bias"], torch.float32).to(self._device)
        makers, biased, modules = self._makers, experts.biased, experts.modules()
        return makers.experts(
            makers.router(weight.to(self._device), bias),
            [self._map(makers.gate_up, biased, prefix, *gate_up) for gate_up, _ in modules],
            [self._map(makers.linear, biased, prefix, down) for _, down in modules],
        )

    def _map(self, make: LinearMaker, has_bias: bool, prefix: str, *names: str) -> LinearMap:
        """Return the linear map of joined matrices."""
        modules = [f"{prefix}{name}" for name in names]
        bias = torch.cat([self._bias(module) for module in modules]) if has_bias else None
        if self._makers.direct and not (self._spec.stored and self._spec.stored.of(modules[0])):
            format = self._format if self._spec.stored is None else None
            return self._direct(make, [f"{module}.weight" for module in modules], bias, format)
        return make(self._matrix(modules), bias)

    def _direct(
        self, make: LinearMaker, names: Sequence[str], bias: Tensor | None, format: WeightFormat | None
    ) -> LinearMap:
        """Return the linear map of joined matrices, packed where they lie in the file."""
        dtype = torch.float32 if format else self._dtype
        parts = [self._stored_floats(name, dtype) for name in names]
        if len({part.dtype for part in parts}) > 1:
            parts = [part.float() for part in parts]
        try:
            return make(StoredWeight(tuple(parts), self._dtype, format), bias)
        except NotFinite:
            for name in names:
                self._floats(name.removesuffix(".weight"), dtype)
            raise

    def _stored_floats(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a tensor as it lies in the file, or in `dtype` where it must be taken apart."""
        if isinstance(self._checkpoint, Checkpoint) and name in self._checkpoint:
            return self._checkpoint.view(name)
        return self._floats(name.removesuffix(".weight"), dtype).contiguous()

    def _matrix(self, modules: Sequence[str]) -> Tensor | QuantizedWeight:
        stored = self._spec.stored.of(modules[0]) if self._spec.stored else None
        if stored:
            weights = [
                _read_quantized(self._checkpoint, module, self._shapes[module], stored) for module in modules
            ]
            _check_orders(self._checkpoint, modules, weights)
            return join(weights)
        if self._format and self._spec.stored is None:
            return join([quantize(self._floats(module, torch.float32), self._format) for module in modules])
        return torch.cat([self._floats(module, self._dtype) for module in modules]).to(self._device)

    def _floats(self, module: str, dtype: torch.dtype) -> Tensor:
        if not is_stacked(self._spec, module):
            return self._checkpoint.tensor([f"{module}.weight"], dtype)
        assert isinstance(self._checkpoint, Checkpoint)
        return in_halves(module, self._checkpoint.floats(*stack_of(module), dtype).T)

    def _bias(self, module: str) -> Tensor:
        if not is_stacked(self._spec, module):
            return self.tensors([f"{module}.bias"])
        assert isinstance(self._checkpoint, Checkpoint)
        stack, number = stack_of(module)
        return in_halves(module, self._checkpoint.floats(f"{stack}_bias", number, self._dtype)).to(
            self._device
        )


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
