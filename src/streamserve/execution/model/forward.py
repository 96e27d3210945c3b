"""The forward pass, one for all architectures; ModelSpec has their differences."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from streamserve.execution.model.attention import AttentionBackend
from streamserve.execution.model.linear import LinearMap
from streamserve.execution.model.lora.step import adapted
from streamserve.execution.model.lora.types import StepAdapters
from streamserve.execution.model.lora.weights import LinearKind
from streamserve.execution.model.mixture import mix
from streamserve.execution.model.rope import Rotations, distinct_ropes, query_scales, rotate
from streamserve.execution.model.spec import ModelSpec


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one decoder layer. Fields are None if the architecture does not have them.

    * `attention_norm`, `mlp_norm`: norms of the inputs of attention and MLP. `attention_post_norm`,
      `mlp_post_norm`: norms of their outputs.
    * `qkv` computes queries, keys and values together. `head_norm` [query heads + key heads, dim] is the norm
      of queries and keys.
    * `gate_up` computes gates and values of the MLP together. `experts` replaces `gate_up` and `down`.
    * `sinks` [query heads] (float32): scores that take part in the softmax of attention without a value.
    """

    attention_norm: Tensor | None
    qkv: LinearMap
    head_norm: Tensor | None
    out: LinearMap
    attention_post_norm: Tensor | None
    mlp_norm: Tensor | None
    mlp_post_norm: Tensor | None
    gate_up: LinearMap | None = None
    down: LinearMap | None = None
    experts: Any = None
    sinks: Tensor | None = None


class Model:
    """A decoder-only transformer: `embedding` [vocabulary, hidden], layers, `final_norm` and `head`."""

    def __init__(
        self,
        spec: ModelSpec,
        embedding: Tensor,
        layers: Sequence[LayerWeights],
        final_norm: Tensor,
        head: LinearMap,
    ) -> None:
        self.spec = spec
        self.embedding = embedding
        self.layers = layers
        self.final_norm = final_norm
        self.head = head
        ropes, self._rope_of = distinct_ropes(spec.ropes)
        self.embedding_multiplier = spec.multipliers.embedding
        if spec.rounds_embedding_multiplier:
            self.embedding_multiplier = float(torch.tensor(spec.multipliers.embedding).to(self.dtype))
        self._rotations = Rotations.of(ropes, spec.rotary_dim)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        lora: StepAdapters | None = None,
    ) -> Tensor:
        """Return the hidden states [rows, hidden] after the last norm, for int64 `tokens` and `positions`
        [rows]. `attention` must have planned this step. `lora`: the rows' adapters; None if no row has
        one."""
        cos, sin = self._rotations.at(positions, self.dtype)
        scales = self._query_scales(positions)
        hidden = scaled(self.embedding[tokens], self.embedding_multiplier)
        for number, layer in enumerate(self.layers):
            rope = self._rope_of[number]
            cos_sin = None if rope < 0 else (cos[rope], sin[rope])
            x = self._norm(hidden, layer.attention_norm)
            x = self._attend(number, layer, x, cos_sin, scales, attention, lora)
            hidden = hidden + self._added(x, layer.attention_post_norm)
            x = self._mlp(number, layer, self._norm(hidden, layer.mlp_norm), lora)
            hidden = hidden + self._added(x, layer.mlp_post_norm)
        return self._norm(hidden, self.final_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [rows, vocabulary] of the next token, in the model's dtype."""
        logits, cap = scaled(self.head(hidden), self.spec.multipliers.logits), self.spec.logits_cap
        return cap * torch.tanh(logits / cap) if cap else logits

    def _attend(
        self,
        number: int,
        layer: LayerWeights,
        x: Tensor,
        cos_sin: tuple[Tensor, Tensor] | None,
        scales: Tensor | None,
        attention: AttentionBackend,
        lora: StepAdapters | None,
    ) -> Tensor:
        heads, kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        qkv = adapted(layer.qkv, x, lora, (number, LinearKind.QKV))
        qkv = qkv.view(len(x), heads + 2 * kv_heads, self.spec.head_dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if self.spec.qk_norm == "joint":
            qk = self._norm_jointly(qk, layer.head_norm)
        elif self.spec.qk_norm == "heads":
            qk = self._norm(qk, layer.head_norm)
        if cos_sin:
            qk = rotate(qk, *cos_sin)
        queries = qk[:, :heads] if scales is None else qk[:, :heads] * scales.view(-1, 1, 1)
        attended = attention.run(number, queries, qk[:, heads:], v, layer.sinks)
        return adapted(layer.out, attended.view(len(x), -1), lora, (number, LinearKind.OUT))

    def _query_scales(self, positions: Tensor) -> Tensor | None:
        """Return the factors of the rows' queries; None if all are 1."""
        scaling = self.spec.query_scaling
        return query_scales(scaling, positions, self.dtype) if scaling else None

    def _mlp(self, number: int, layer: LayerWeights, x: Tensor, lora: StepAdapters | None) -> Tensor:
        experts = self.spec.experts_of(number)
        if layer.experts and experts:
            return mix(layer.experts, experts, x, self._gate)
        assert layer.gate_up
        assert layer.down
        inner = self._gate(adapted(layer.gate_up, x, lora, (number, LinearKind.GATE_UP)))
        return adapted(layer.down, inner, lora, (number, LinearKind.DOWN))

    def _gate(self, gate_up: Tensor) -> Tensor:
        """Return the product of activated gates and values; `gate_up` is [rows, gates and values]."""
        gate, up = gate_up.chunk(2, dim=-1)
        clamp = self.spec.clamp
        if clamp:
            gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
            return (up + 1) * (gate * torch.sigmoid(gate * clamp.alpha))
        return (silu(gate) if self.spec.activation == "silu" else gelu(gate, approximate="tanh")) * up

    def _added(self, x: Tensor, post_norm: Tensor | None) -> Tensor:
        """Return the addition to the hidden states, given the output `x` of attention or MLP."""
        if post_norm is not None:
            return self._norm(x, post_norm)
        return scaled(x, self.spec.multipliers.residual)

    def _norm_jointly(self, qk: Tensor, weight: Tensor | None) -> Tensor:
        """Return `qk` [rows, heads, dim] with all queries of a row normalized as one vector, and all its keys
        as another."""
        assert weight is not None
        heads = self.spec.num_heads
        parts = ((qk[:, :heads], weight[:heads]), (qk[:, heads:], weight[heads:]))
        return torch.cat([self._norm(x.flatten(1), own.flatten()).view_as(x) for x, own in parts], dim=1)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Return the RMSNorm of `x`, or `x` itself without a `weight`. The product with the weight is in
        float32 too if the spec has `wide_norms`."""
        if weight is None:
            return x
        full = x.float()
        scaled = full * torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + self.spec.rms_norm_eps)
        return (weight * (scaled if self.spec.wide_norms else scaled.to(x.dtype))).to(x.dtype)


def scaled(x: Tensor, multiplier: float) -> Tensor:
    """Return `x` times `multiplier`; `x` itself, not a copy, if that is 1."""
    return x if multiplier == 1 else x * multiplier
