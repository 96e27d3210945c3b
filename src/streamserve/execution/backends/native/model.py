"""The forward pass with the kernels: all layers of a step in one call."""

import ctypes

import torch
from torch import Tensor

from streamserve.execution.backends.native.attention import NativeAttention
from streamserve.execution.backends.native.library import TYPES, Activation, ThreadPool
from streamserve.execution.backends.native.linear import NativeLinear
from streamserve.execution.backends.native.lora import step_struct
from streamserve.execution.backends.native.structures import (
    CacheStruct,
    ExpertsStruct,
    GatingStruct,
    LayerStruct,
    LinearStruct,
    ModelStruct,
    ScoringStruct,
)
from streamserve.execution.model.attention import AttentionBackend
from streamserve.execution.model.experts import Experts
from streamserve.execution.model.forward import LayerWeights, Model, scaled
from streamserve.execution.model.linear import LinearMap
from streamserve.execution.model.lora.types import StepAdapters
from streamserve.execution.model.mixture import ExpertWeights
from streamserve.execution.model.spec import ModelSpec


class NativeModel(Model):
    """A model that runs on the kernels: model.forward.Model with NativeLinear maps, `gate_up` packed in
    pairs.

    It rounds at the same operations as Model; logits are float32. A row's bits never depend on other rows. A
    tied embedding is stored once, packed: its rows are read from the head, unless the head is quantized.
    """

    @classmethod
    def of(cls, model: Model, pool: ThreadPool) -> "NativeModel":
        """Return `model`, whose linear maps are NativeLinear, as a model that runs on the kernels."""
        assert isinstance(model.head, NativeLinear)
        shared = model.spec.tied_embeddings and not model.head.quantized
        embedding = torch.empty_like(model.embedding[:0]) if shared else model.embedding
        native = cls(model.spec, embedding, model.layers, model.final_norm, model.head)
        native._prepare(pool)
        return native

    def _prepare(self, pool: ThreadPool) -> None:
        spec = self.spec
        self._pool = pool
        self._path = pool.path(self.dtype)
        self._table = self._rotations.table(0, self.dtype)
        self._norms: list[Tensor] = []
        self._final = self._norm_weight(self.final_norm)
        structs = [
            self._layer(layer, number, rope)
            for number, (layer, rope) in enumerate(zip(self.layers, self._rope_of, strict=True))
        ]
        self._structs = (LayerStruct * len(structs))(*structs)
        self._model = ModelStruct(
            layers=self._structs,
            hidden=spec.hidden_size,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            dim=spec.head_dim,
            rotary=spec.rotary_dim,
            path=self._path,
            type=TYPES[self.dtype],
            wide_norms=spec.wide_norms,
            joint_head_norm=spec.qk_norm == "joint",
            epsilon=spec.rms_norm_eps,
            residual_scale=spec.multipliers.residual,
            scoring=ScoringStruct(spec.multipliers.attention, spec.attention_cap),
            gating=_gating(spec),
        )

    @property
    def pool(self) -> ThreadPool:
        """The kernels' thread pool."""
        return self._pool

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        lora: StepAdapters | None = None,
    ) -> Tensor:
        """Implement Model.forward. `attention` must be a NativeAttention that has planned this step."""
        assert isinstance(attention, NativeAttention)
        assert attention.spans is not None
        cos, sin = self._rotation(positions)
        hidden = self._embed(tokens)
        data = attention.cache.data
        struct = step_struct(lora) if lora else None
        scales = self._query_scales(positions)
        step = attention.spans.step(cos, sin, struct, scales)
        cache = CacheStruct(
            data=data.data_ptr(),
            layer_stride=data.stride(0) * data.itemsize,
            written=attention.cache.written.ctypes.data,
            block_size=attention.cache.block_size,
            quantized=attention.cache.quantized,
        )
        self._pool.library.ss_layers(
            self._pool.handle,
            ctypes.byref(self._model),
            ctypes.byref(step),
            ctypes.byref(cache),
            hidden.data_ptr(),
            0,
            len(self.layers),
        )
        return self._normed(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [rows, vocabulary] of the next token, in float32."""
        assert isinstance(self.head, NativeLinear)
        return self.head(hidden, wide=True, scale=self.spec.multipliers.logits, cap=self.spec.logits_cap)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of rope.Rotations, from a table: computing them would take a notable
        share of a draft model's short pass. The table grows by powers of two."""
        last = int(positions.numpy().max())
        if last >= self._table[0].shape[1]:
            self._table = self._rotations.table(1 << last.bit_length(), self.dtype)
        cos, sin = self._table
        return cos.index_select(1, positions), sin.index_select(1, positions)

    def _embed(self, tokens: Tensor) -> Tensor:
        assert isinstance(self.head, NativeLinear)
        if self.spec.tied_embeddings and not self.head.quantized:
            return scaled(self.head.rows(tokens), self.embedding_multiplier)
        return scaled(self.embedding[tokens], self.embedding_multiplier)

    def _normed(self, hidden: Tensor) -> Tensor:
        out = torch.empty_like(hidden)
        self._pool.library.ss_norm(
            self._pool.handle,
            hidden.data_ptr(),
            self._final,
            *hidden.shape,
            self.spec.rms_norm_eps,
            self.spec.wide_norms,
            self._path,
            TYPES[self.dtype],
            out.data_ptr(),
        )
        return out

    def _norm_weight(self, weight: Tensor | None) -> int | None:
        """Return the address of a norm's weight, converted to float32 and kept by this model; None without a
        weight."""
        if weight is None:
            return None
        self._norms.append(weight.float().contiguous())
        return self._norms[-1].data_ptr()

    def _layer(self, layer: LayerWeights, number: int, rope: int) -> LayerStruct:
        struct = LayerStruct(window=self.spec.windows[number] or 0, rope=rope)
        for name in ("attention_norm", "attention_post_norm", "head_norm", "mlp_norm", "mlp_post_norm"):
            setattr(struct, name, self._norm_weight(getattr(layer, name)))
        if layer.sinks is not None:
            struct.sinks = layer.sinks.data_ptr()
        for name in ("qkv", "out", "gate_up", "down"):
            linear = getattr(layer, name)
            if linear is not None:
                setattr(struct, name, _struct_of(linear))
        experts = self.spec.experts_of(number)
        if layer.experts and experts:
            struct.experts = ctypes.pointer(_experts_struct(layer.experts, experts))
        return struct


def _gating(spec: ModelSpec) -> GatingStruct:
    if spec.clamp:
        return GatingStruct(Activation.CLAMPED_SILU, spec.clamp.alpha, spec.clamp.limit)
    return GatingStruct(Activation.GELU if spec.activation == "gelu_pytorch_tanh" else Activation.SILU)


def _struct_of(linear: LinearMap) -> LinearStruct:
    assert isinstance(linear, NativeLinear)
    return linear.struct


def _experts_struct(weights: ExpertWeights, experts: Experts) -> ExpertsStruct:
    gate_up, down = map(_struct_of, weights.gate_up), map(_struct_of, weights.down)
    array = LinearStruct * len(weights.down)
    return ExpertsStruct(
        router=_struct_of(weights.router),
        gate_up=array(*gate_up),
        down=array(*down),
        correction=None if weights.correction is None else weights.correction.data_ptr(),
        count=experts.count,
        chosen=experts.chosen,
        groups=experts.groups,
        chosen_groups=experts.chosen_groups,
        shared=experts.shared_size > 0,
        gated=experts.shared_gated,
        normalized=experts.normalized,
        sigmoid=experts.sigmoid,
        scale=experts.scale,
    )
