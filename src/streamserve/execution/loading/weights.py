"""Load the tensors of a checkpoint into a Model, and pack them layer by layer."""

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamserve.execution.backends.native.weight_store import PRIVATE, WeightStore
from streamserve.execution.formats.check import AnyCheckpoint
from streamserve.execution.formats.quantization import (
    BlockWeight,
    NotFinite,
    StoredWeight,
    WeightFormat,
    join,
    quantize,
)
from streamserve.execution.formats.sources import weight_source
from streamserve.execution.formats.stored.formats import LINEARS, AnyFormat, GgufBlocks, joined
from streamserve.execution.model.experts import Experts
from streamserve.execution.model.forward import LayerWeights, Model
from streamserve.execution.model.linear import Linear, LinearMap
from streamserve.execution.model.mixture import ExpertWeights
from streamserve.execution.model.shapes import EMBEDDING, FINAL_NORM, HEAD, NORMS
from streamserve.execution.model.spec import ModelSpec

LinearMaker = Callable[[Any, Tensor | None], LinearMap]
"""Makes a linear map of a weight [out, in] and an optional bias [out]. The weight is a Tensor or a
QuantizedWeight; LinearMakers.direct makers take others too."""

CPU = torch.device("cpu")


@dataclass(frozen=True)
class LinearMakers:
    """The makers of a model's linear maps.

    * `gate_up`: maps into an MLP or expert, which may interleave gates and values. `head`: the output head.
      `router`: routers in float32. `linear`: all other maps.
    * `experts`: makes a layer's experts of the router, the `gate_up` maps, the output maps and the router's
      correction.
    * `direct`: whether the makers also take StoredWeight, BlockWeight and StripedWeight: matrices in the form
      of the file, without a copy.
    * `floats`: returns a BlockWeight as floats of a dtype; None: torch unpacks blocks.
    """

    linear: LinearMaker = Linear
    gate_up: LinearMaker = Linear
    head: LinearMaker = Linear
    router: LinearMaker = Linear
    experts: Callable[[LinearMap, Sequence[Any], Sequence[Any], Tensor | None], Any] = ExpertWeights
    direct: bool = False
    floats: Callable[[BlockWeight, torch.dtype], Tensor] | None = None


INPUTS, FUSED_INPUTS = joined(LINEARS)[::2], [("self_attn.qkv_proj",), ("mlp.gate_up_proj",)]
"""The input matrices of attention and of the MLP, in checkpoints with separate and with fused matrices."""


def load_model(
    checkpoint: AnyCheckpoint,
    spec: ModelSpec,
    dtype: torch.dtype,
    makers: LinearMakers = LinearMakers(),
    device: torch.device = CPU,
    format: WeightFormat | None = None,
    head: WeightFormat | None = None,
    store: WeightStore = PRIVATE,
) -> Model:
    """Load the model of a checked checkpoint onto `device`, with weights in `dtype` (float32 or bfloat16) and
    linear maps made by `makers`.

    * `format`: the layers' matrices are rounded to it, matrix by matrix, unless they are stored quantized.
    * `head`: the head is stored in this format, or rounded to it; None: it is in `dtype`.
    * `store`: the weights are kept there. With a store other than PRIVATE, linear maps must be made for the
      kernels, and a tied embedding is in the head alone.
    """
    loader = _Loader(checkpoint, spec, dtype, makers, device, format, store)
    layers = loader.layers()
    embedding = loader.embedding(within_head=spec.tied_embeddings and head is None)
    return Model(spec, embedding, layers, loader.norm(FINAL_NORM), loader.head(embedding, head))


class _Loader:
    """Loads the parts of one model, with the arguments of `load_model`."""

    def __init__(
        self,
        checkpoint: AnyCheckpoint,
        spec: ModelSpec,
        dtype: torch.dtype,
        makers: LinearMakers,
        device: torch.device,
        format: WeightFormat | None,
        store: WeightStore,
    ) -> None:
        self._checkpoint, self._spec, self._dtype, self._store = checkpoint, spec, dtype, store
        self._makers, self._device, self._format = makers, device, format
        self._source = weight_source(checkpoint, spec)

    def layers(self) -> list[LayerWeights]:
        """Return the weights of all layers. While a layer is packed, the next layer is read from the disk."""
        if self._store.complete:
            return [self._layer(number) for number in range(self._spec.num_layers)]
        layers = []
        with ThreadPoolExecutor(1, "read ahead") as reader:
            reader.submit(self._checkpoint.read_ahead, 0)
            for number in range(self._spec.num_layers):
                reader.submit(self._checkpoint.read_ahead, number + 1)
                layers.append(self._layer(number))
                self._checkpoint.release()
        return layers

    def _layer(self, number: int) -> LayerWeights:
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
            sinks=self._wide(f"{prefix}self_attn.sinks") if spec.sinks else None,
            **mlp,
        )

    def embedding(self, within_head: bool) -> Tensor:
        """Return the embedding matrix. `within_head`: the output head uses the same matrix. If so, and all
        weights are already stored, return a matrix without rows: the stored head has the numbers."""
        if not within_head:
            return self._store.tensor(EMBEDDING, lambda: self._tensor(EMBEDDING.removesuffix(".weight")))
        if self._store.complete:
            return torch.empty(0, self._spec.hidden_size, dtype=self._dtype)
        return self._tensor(EMBEDDING.removesuffix(".weight"))

    def head(self, embedding: Tensor, format: WeightFormat | None) -> LinearMap:
        return self._store.linear(HEAD, lambda: self._make_head(embedding, format))

    def _make_head(self, embedding: Tensor, format: WeightFormat | None) -> LinearMap:
        spec, make = self._spec, self._makers.head
        module = (EMBEDDING if spec.tied_embeddings else HEAD).removesuffix(".weight")
        if format is None:
            return make(embedding if spec.tied_embeddings else self._tensor(module), None)
        if spec.stored and spec.stored.head:
            return self._make_stored(make, [module], None, GgufBlocks(format))
        return self._make_rounded(make, [module], None, format)

    def _tensor(self, module: str) -> Tensor:
        """Return the weight of a module on the device, in the model's dtype."""
        return self._floats(module, self._dtype).to(self._device)

    def _floats(self, module: str, dtype: torch.dtype) -> Tensor:
        """Return the weight of a module in `dtype`, in this process's memory."""
        blocks = self._source.blocks(module) if self._makers.floats else None
        if blocks and self._makers.floats:
            with contextlib.suppress(NotFinite):  # `floats` below raises the error that names the tensor
                return self._makers.floats(blocks, dtype)
        return self._source.floats(module, dtype)

    def norm(self, name: str) -> Tensor:
        return self._store.tensor(name, lambda: self._make_norm(name))

    def _make_norm(self, name: str) -> Tensor:
        dtype = torch.float32 if self._spec.wide_norms else self._dtype
        weight = self._checkpoint.tensor([name], dtype).to(self._device)
        return weight + self._spec.norm_offset if self._spec.norm_offset else weight

    def _wide(self, name: str) -> Tensor:
        """Return a tensor in float32."""
        return self._store.tensor(
            name, lambda: self._checkpoint.tensor([name], torch.float32).to(self._device)
        )

    def _head_norm(self, prefix: str) -> Tensor | None:
        spec = self._spec
        if spec.qk_norm == "none":
            return None
        q_norm, k_norm = (self.norm(f"{prefix}self_attn.{name}.weight") for name in ("q_norm", "k_norm"))
        copies = (1, 1) if spec.qk_norm == "joint" else (spec.num_heads, spec.num_kv_heads)
        return torch.cat([q_norm.repeat(copies[0]), k_norm.repeat(copies[1])]).view(-1, spec.head_dim)

    def _experts(self, prefix: str, experts: Experts) -> Any:
        makers, biased, modules = self._makers, experts.biased, experts.modules()
        router = self._store.linear(f"{prefix}{experts.router}", lambda: self._make_router(prefix, experts))
        return makers.experts(
            router,
            [self._map(makers.gate_up, biased, prefix, *gate_up) for gate_up, _ in modules],
            [self._map(makers.linear, biased, prefix, down) for _, down in modules],
            self._wide(f"{prefix}{experts.correction}") if experts.correction else None,
        )

    def _make_router(self, prefix: str, experts: Experts) -> LinearMap:
        """Return the map to the scores of all experts and to a shared expert's gate."""
        hidden = self._spec.hidden_size
        names = [experts.router, *([experts.shared_gate] if experts.shared_gate else [])]
        weight = torch.cat([
            self._checkpoint.tensor([f"{prefix}{name}.weight"], torch.float32).view(-1, hidden)
            for name in names
        ])  # fmt: skip
        bias = None
        if experts.biased:
            bias = self._checkpoint.tensor([f"{prefix}{experts.router}.bias"], torch.float32).to(self._device)
        return self._makers.router(weight.to(self._device), bias)

    def _map(self, make: LinearMaker, has_bias: bool, prefix: str, *names: str) -> LinearMap:
        """Return the linear map of the joined matrices `names`."""
        modules = [f"{prefix}{name}" for name in names]

        def joined_map() -> LinearMap:
            bias = None
            if has_bias:
                biases = [self._source.bias(module, self._dtype) for module in modules]
                bias = torch.cat(biases).to(self._device)
            if stored := self._spec.stored.of(modules[0]) if self._spec.stored else None:
                return self._make_stored(make, modules, bias, stored)
            return self._make_rounded(make, modules, bias, None if self._spec.stored else self._format)

        return self._store.linear(modules[0], joined_map)

    def _make_stored(
        self, make: LinearMaker, modules: Sequence[str], bias: Tensor | None, format: AnyFormat
    ) -> LinearMap:
        """Return the linear map of joined matrices that are stored quantized."""
        if self._makers.direct:
            with contextlib.suppress(NotFinite):  # unpacking below raises the error that names the tensor
                return make(self._source.stored(modules, format, direct=True), bias)
        return make(self._source.stored(modules, format, direct=False), bias)

    def _make_rounded(
        self, make: LinearMaker, modules: Sequence[str], bias: Tensor | None, format: WeightFormat | None
    ) -> LinearMap:
        """Return the linear map of joined matrices of floats, rounded to `format` if given."""
        if self._makers.direct:
            return self._direct(make, modules, bias, format)
        if format:
            weights = [quantize(self._floats(module, torch.float32), format) for module in modules]
            return make(join(weights), bias)
        return make(torch.cat([self._tensor(module) for module in modules]), bias)

    def _direct(
        self, make: LinearMaker, modules: Sequence[str], bias: Tensor | None, format: WeightFormat | None
    ) -> LinearMap:
        """Return the linear map of joined matrices, packed directly from the file where it has floats."""
        dtype = torch.float32 if format else self._dtype
        parts = [self._view(module, dtype) for module in modules]
        if len({part.dtype for part in parts}) > 1:
            parts = [part.float() for part in parts]
        try:
            return make(StoredWeight(tuple(parts), self._dtype, format), bias)
        except NotFinite:
            for module in modules:
                self._floats(module, dtype)  # raises the error that names the tensor
            raise

    def _view(self, module: str, dtype: torch.dtype) -> Tensor:
        """Return a weight as a view of the file, or as a copy in `dtype` if the file has no such tensor."""
        view = self._source.view(module)
        return self._floats(module, dtype).contiguous() if view is None else view
