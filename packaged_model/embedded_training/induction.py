"""Planting a copying circuit, which a small budget of tokens would not be enough to discover.

Two attention groups are set by hand, with readers fitted on real activations. One in the first layer looks at
the previous token and notes its code in the stream. One in the second layer looks for an earlier place whose
noted code is that of the current token, and brings the token found there. Training goes on from there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .model import Llama

CODE = 64  # size of a token's code, one value head
NEAR = 8  # rotary pairs that tell the previous position from its neighbours; the fastest ones
SHARPNESS = 9.0  # of the look at the previous position
MATCH = 30.0  # attention score of a matching code
RIDGE = 1e-3


def _fit(inputs: Tensor, wanted: Tensor) -> Tensor:
    """The linear reader [wanted, inputs] with the least squared error."""
    size = inputs.shape[1]
    gram = inputs.T @ inputs / len(inputs) + RIDGE * torch.eye(size)
    return torch.linalg.solve(gram, inputs.T @ wanted / len(inputs)).T


def _slow_dims(model: Llama) -> Tensor:
    """Head dimensions whose rotation hardly moves over some hundred positions, for matching by content."""
    half = model.shape.head_dim // 2
    slow = torch.arange(half // 2, half)
    return torch.cat((slow, slow + half))


def _codes(model: Llama, ids: Tensor) -> tuple[Tensor, Tensor]:
    """A reader of the constant one from normed embeddings, and of each token's whitened code."""
    normed = model.layers[0].input_layernorm(model.embed_tokens.weight[ids.unique()])
    one = _fit(normed, torch.ones(len(normed), 1))
    centred = normed - normed.mean(0)
    _, sizes, directions = torch.linalg.svd(centred, full_matrices=False)
    whiten = directions[:CODE] / sizes[:CODE, None] * len(normed) ** 0.5
    return one, whiten - (whiten @ normed.mean(0, keepdim=True).T) @ one


def _set_group(model: Llama, layer: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
    """Give a layer's last key/value head these weights; of the heads that share it, the first one writes."""
    attention, size = model.layers[layer].self_attn, model.shape.head_dim
    sharing = model.shape.heads // model.shape.kv_heads
    attention.q_proj.weight[-sharing * size :] = query.repeat(sharing, 1)
    attention.k_proj.weight[-size:], attention.v_proj.weight[-size:] = key, value
    attention.o_proj.weight[:, -sharing * size :] = 0.0
    attention.o_proj.weight[:, -sharing * size :][:, :size] = out


def _look_back(model: Llama, one: Tensor, code: Tensor, stream: Tensor) -> None:
    """The first layer's last group: attend to the previous token, write its code where it is quiet."""
    size = model.shape.head_dim
    pairs = torch.arange(NEAR)
    angles = model.shape.rope_theta ** (-2 * pairs / size)
    query, key = torch.zeros(size, model.shape.hidden), torch.zeros(size, model.shape.hidden)
    query[pairs] = SHARPNESS * one
    # The key is turned one step ahead, so that it meets the query of the next position.
    key[pairs] = SHARPNESS * angles.cos()[:, None] * one
    key[pairs + size // 2] = SHARPNESS * angles.sin()[:, None] * one
    quiet = torch.linalg.svd(stream, full_matrices=False)[2][-CODE:]
    _set_group(model, 0, query, key, code, quiet.T * stream.pow(2).mean().sqrt())


def _bring(model: Llama, normed: Tensor, now: Tensor, before: Tensor, found: Tensor) -> None:
    """The second layer's last group: where the code before is the code now, take the token found there."""
    size, dims = model.shape.head_dim, _slow_dims(model)
    scale = (MATCH * size**0.5 / len(dims)) ** 0.5
    query, key = torch.zeros(size, model.shape.hidden), torch.zeros(size, model.shape.hidden)
    query[dims] = scale * _fit(normed, now[:, : len(dims)])
    key[dims] = scale * _fit(normed, before[:, : len(dims)])
    _set_group(model, 1, query, key, _fit(normed, now), _fit(now, found))


@torch.no_grad()
def plant(model: Llama, ids: Tensor, strength: float = 2.0) -> None:
    """Set both groups, fitted on the rows ``ids``; ``strength`` is how loud the copy is in the stream."""
    one, code = _codes(model, ids)
    _look_back(model, one, code, model(ids, (1,))[0].flatten(0, 1))
    stream = model(ids, (1,))[0][:, 1:].flatten(0, 1)
    normed = model.layers[1].input_layernorm(stream)
    coded = model.layers[0].input_layernorm(model.embed_tokens(ids)) @ code.T
    now, before = coded[:, 1:].flatten(0, 1), coded[:, :-1].flatten(0, 1)
    embedded = model.embed_tokens(ids[:, 1:]).flatten(0, 1)
    loud = strength * (stream.pow(2).mean() / embedded.pow(2).mean()).sqrt()
    _bring(model, normed, now, before, loud * (embedded - embedded.mean(0)))
