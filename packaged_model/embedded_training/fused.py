"""Element-wise pieces of the model, compiled into single passes over memory when training asks for it.

On a CPU a small model spends as long on these as on its matrix products. Compiling takes some seconds and
a C++ compiler, so it is off until :func:`enable`; both ways compute the same.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

_enabled = False


def enable() -> None:
    """Compile from now on, where a C++ compiler exists."""
    global _enabled
    _enabled = shutil.which("g++") is not None


def fusable(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function, or its compiled twin once enabled; compiled for any sizes, so only once."""

    @functools.cache
    def compiled() -> Callable[..., Tensor]:
        return torch.compile(function, dynamic=True)

    @functools.wraps(function)
    def call(*args: object) -> Tensor:
        return (compiled() if _enabled else function)(*args)

    return call


@fusable
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm, computed in float32; in mixed precision the next product wants bfloat16."""
    x = x.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
    return x.bfloat16() if torch.is_autocast_enabled("cpu") else x


@fusable
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions in the half-split layout that Llama checkpoints use."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


@fusable
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The gated unit of the feed-forward block."""
    return F.silu(gate) * up


@fusable
def _weights(scores: Tensor, bias: Tensor, scale: float) -> Tensor:
    return torch.softmax(scores.float() * scale + bias, -1).to(scores.dtype)


def short_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal grouped attention as plain products: for short rows faster than the library's kernel."""
    rows, heads, length, size = q.shape
    groups = heads // k.shape[1]
    bias = torch.full((length, length), float("-inf")).triu(1)
    scores = q.reshape(rows, k.shape[1], groups * length, size) @ k.transpose(-1, -2)
    weights = _weights(scores.view(rows, heads, length, length), bias, size**-0.5)
    return (weights.view(rows, k.shape[1], groups * length, length) @ v).view(rows, heads, length, size)


@fusable
def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in float32."""
    return F.cross_entropy(logits.float(), targets)
