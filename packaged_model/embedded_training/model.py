"""A plain Llama in torch: the training twin of the shapes that are exported in Hugging Face layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .fused import rms_norm, rotate, short_attention, swiglu

Cache = list[tuple[Tensor, Tensor]]
EMBED_STD, SHARED_STD, FINAL_GAIN = 0.5, 0.35, 0.03
SHORT = 256  # rows up to here are attended without the library's kernel


@dataclass(frozen=True)
class Shape:
    """The sizes of one model; heads are always 64 wide and the head is tied to the embedding."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int = 4096
    head_dim: int = 64
    max_positions: int = 8192
    rope_theta: float = 10000.0
    eps: float = 1e-5


TARGET = Shape(hidden=256, layers=8, heads=4, kv_heads=2, ffn=768)
DRAFT = Shape(hidden=128, layers=2, heads=2, kv_heads=2, ffn=512)


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Scale every position to unit root mean square, then by the weight."""
        return rms_norm(x, self.weight, self.eps)


def rotations(shape: Shape, start: int, length: int) -> tuple[Tensor, Tensor]:
    """The cosines and sines of positions ``start`` to ``start + length``, each [length, head_dim]."""
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(start, start + length, dtype=torch.float32), shape.rope_theta**-steps)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


class Attention(nn.Module):
    """Grouped-query causal attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None, mask: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Attend; returns the output and the keys and values so far."""
        rows, length, _ = x.shape
        q, k, v = (
            proj(x).view(rows, length, -1, self.shape.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = cos.to(v.dtype), sin.to(v.dtype)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        if mask is None and length <= SHORT:
            out = short_attention(q, k, v)
        else:
            out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(rows, length, -1)), (k, v)


class MLP(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """SwiGLU."""
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps)
        self.mlp = MLP(shape)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None, mask: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Attention, then feed-forward, both added to the stream."""
        attended, kept = self.self_attn(self.input_layernorm(x), cos, sin, past, mask)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), kept


class Llama(nn.Module):
    """Token embedding, layers and final norm; parameter names equal the exported ones after ``model.``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)
        self._initialise()

    def _initialise(self) -> None:
        # Token vectors as large as what layers add, or they would drown and nothing could be copied; the
        # small final norm keeps the logits of the tied head small. The part all share serves `induction`.
        nn.init.normal_(self.embed_tokens.weight, std=EMBED_STD)
        with torch.no_grad():
            self.embed_tokens.weight += SHARED_STD * torch.randn(self.shape.hidden)
        nn.init.constant_(self.norm.weight, FINAL_GAIN)
        for name, weight in self.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(weight)  # every layer starts as the identity

    def forward(self, ids: Tensor, exits: Sequence[int] = ()) -> list[Tensor]:
        """The stream after each layer in ``exits`` and after the last one, before the final norm."""
        x = self.embed_tokens(ids)
        cos, sin = rotations(self.shape, 0, ids.shape[1])
        streams = []
        for number, layer in enumerate(self.layers, 1):
            x, _ = layer(x, cos, sin, None, None)
            if number in exits:
                streams.append(x)
        return [*streams, x]

    def head(self, stream: Tensor) -> Tensor:
        """Logits of the final norm of a stream."""
        return F.linear(self.norm(stream), self.embed_tokens.weight)

    def step(self, ids: Tensor, cache: Cache | None, mask: Tensor, positions: Tensor) -> tuple[Tensor, Cache]:
        """One cached forward for generation: left-padded rows, their own positions, a boolean mask."""
        cos, sin = rotations(self.shape, 0, int(positions.max()) + 1)
        cos, sin = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
        x, grown = self.embed_tokens(ids), []
        for number, layer in enumerate(self.layers):
            x, kept = layer(x, cos, sin, cache[number] if cache else None, mask)
            grown.append(kept)
        return self.head(x), grown
