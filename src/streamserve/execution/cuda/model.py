"""The forward pass on a device: execution.model.Model's, on tensors at fixed addresses."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from streamserve.execution.cuda.attention import AttentionWork
from streamserve.execution.cuda.operations import Operations
from streamserve.execution.kv_cache import KVCache
from streamserve.execution.model import Model
from streamserve.execution.rope import Rotations, distinct_ropes


@dataclass(frozen=True)
class ForwardInputs:
    """Inputs of a step's rows, padded (all int32). `tokens`, `positions` and `slots` [rows]. Where
    `sources[row]` is not negative, the token is `results[sources[row]]` instead: the step before sampled it.
    `tables` [sequences, blocks], `limits` [rows], and `works` by window are attention's, as are
    which `tiles` occur and whether partial results are `combined` (cuda/attention.py).
    """

    tokens: Tensor
    sources: Tensor
    results: Tensor
    positions: Tensor
    slots: Tensor
    tables: Tensor
    limits: Tensor
    works: Mapping[int | None, AttentionWork[Tensor]]
    tiles: tuple[bool, ...]
    combined: bool


class DeviceModel:
    """`model`, whose weights are on a device, for positions below `max_positions`."""

    def __init__(self, model: Model, operations: Operations, max_positions: int) -> None:
        self.spec = model.spec
        self.embedding = model.embedding
        self.layers = model.layers
        self.final_norm = model.final_norm
        self.head = model.head
        self.max_positions = max_positions
        self._operations = operations
        device = model.embedding.device
        ropes, _ = distinct_ropes(self.spec.ropes)
        rotations = Rotations.of(ropes, self.spec.rotary_dim).to(device)
        cos, sin = rotations.at(torch.arange(max_positions, device=device), model.dtype)
        self._cos, self._sin = cos[0].contiguous(), sin[0].contiguous()

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def forward(self, inputs: ForwardInputs, cache: KVCache, workspace: Tensor, out: Tensor) -> None:
        """Write the hidden states [rows, hidden] after the last norm to `out`, and the rows' keys and values
        to `cache`. `workspace` is attention's."""
        layers, spec = self._operations.layers, self.spec
        tokens = layers.gather_tokens(inputs.tokens, inputs.results, inputs.sources)
        hidden, delta = layers.embed(self.embedding, tokens), None
        for number, layer in enumerate(self.layers):
            x = layers.add_rms_norm(hidden, delta, layer.attention_norm, spec.rms_norm_eps)
            attended = self._attend(number, layer.qkv(x), inputs, cache, workspace)
            delta = layer.out(attended)
            x = layers.add_rms_norm(hidden, delta, layer.mlp_norm, spec.rms_norm_eps)
            assert layer.gate_up
            assert layer.down
            delta = layer.down(layers.swiglu(layer.gate_up(x)))
        layers.add_rms_norm(hidden, delta, self.final_norm, spec.rms_norm_eps, out=out)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the float32 logits [rows, vocabulary] of the next token."""
        return self.head(hidden)

    def _attend(
        self, number: int, qkv: Tensor, inputs: ForwardInputs, cache: KVCache, workspace: Tensor
    ) -> Tensor:
        spec, layer = self.spec, self.layers[number]
        heads, dim = spec.num_heads, spec.head_dim
        self._operations.layers.rotate_and_store(
            qkv, layer.head_norm, spec.rms_norm_eps, self._cos, self._sin, inputs.positions,
            cache.data[number], inputs.slots, heads, spec.num_kv_heads,
        )  # fmt: skip
        queries = qkv.view(len(qkv), -1, dim)[:, :heads]
        attended = torch.empty(len(qkv), heads, dim, dtype=qkv.dtype, device=qkv.device)
        self._operations.attention.attend(
            queries, cache.data[number], inputs.works[spec.windows[number]], inputs.tables, inputs.limits,
            attended, dim**-0.5, workspace=workspace, tiles=inputs.tiles, combined=inputs.combined,
        )  # fmt: skip
        return attended.view(len(qkv), -1)
