"""The forward pass of the Llama family: one for all its architectures, whose differences are in ModelSpec."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from streamserve.execution.attention import AttentionBackend
from streamserve.execution.linear import LinearMap
from streamserve.execution.rope import inverse_frequencies, rotate, rotation
from streamserve.execution.spec import ModelSpec


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one decoder layer. `qkv` computes queries, keys and values at once, `gate_up` both halves of
    the MLP's input. `head_norm` [query heads + key heads, dim] is Qwen3's norm of queries and keys."""

    attention_norm: Tensor
    qkv: LinearMap
    head_norm: Tensor | None
    out: LinearMap
    mlp_norm: Tensor
    gate_up: LinearMap
    down: LinearMap


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
        self._frequencies = inverse_frequencies(spec.rope, spec.head_dim)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def forward(self, tokens: Tensor, positions: Tensor, attention: AttentionBackend) -> Tensor:
        """Return the hidden states [rows, hidden] after the last norm, for int64 `tokens` and `positions`
        [rows]. `attention` must have planned this step."""
        cos_sin = rotation(positions, self._frequencies, self.dtype)
        hidden = self.embedding[tokens]
        for number, layer in enumerate(self.layers):
            x = self._norm(hidden, layer.attention_norm)
            hidden = hidden + self._attend(number, layer, x, cos_sin, attention)
            hidden = hidden + self._mlp(layer, self._norm(hidden, layer.mlp_norm))
        return self._norm(hidden, self.final_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [rows, vocabulary] of the next token, in the model's dtype."""
        return self.head(hidden)

    def _attend(
        self,
        number: int,
        layer: LayerWeights,
        x: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        attention: AttentionBackend,
    ) -> Tensor:
        heads, kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        qkv = layer.qkv(x).view(len(x), heads + 2 * kv_heads, self.spec.head_dim)
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.head_norm is not None:
            qk = self._norm(qk, layer.head_norm)
        qk = rotate(qk, *cos_sin)
        attended = attention.run(number, qk[:, :heads], qk[:, heads:], v)
        return layer.out(attended.view(len(x), -1))

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        gate, up = layer.gate_up(x).chunk(2, dim=-1)
        return layer.down(silu(gate) * up)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Apply RMSNorm, in float32 up to the scaling by `weight`."""
        full = x.float()
        scale = torch.rsqrt(full.pow(2).mean(-1, keepdim=True) + self.spec.rms_norm_eps)
        return weight * (full * scale).to(x.dtype)
