"""The forward pass on a device: the same computation as model.forward.Model, with fixed addresses."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from streamserve.execution.backends.cuda.attention import AttentionWork
from streamserve.execution.backends.cuda.collectives import Ranks
from streamserve.execution.backends.cuda.experts import mix
from streamserve.execution.backends.cuda.linear import WideLinear
from streamserve.execution.backends.cuda.operations import Operations
from streamserve.execution.compute.kv_cache import KVCache
from streamserve.execution.model.forward import LayerWeights, Model, scaled
from streamserve.execution.model.rope import Rotations, distinct_ropes, query_scales


@dataclass(frozen=True)
class ForwardInputs:
    """The padded inputs of a step's rows (all int32).

    * `tokens`, `positions` and `slots` [rows]. If `sources[row]` is not negative, the token is
      `results[sources[row]]` instead: the step before sampled it.
    * For attention (cuda/attention.py): `tables` [sequences, blocks], `limits` [rows], `works` by window, the
      `tiles` that may occur, and whether partial results are `combined`.
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
    """A `model` whose weights are on a device, for positions below `max_positions`."""

    def __init__(
        self, model: Model, operations: Operations, max_positions: int, ranks: Ranks | None = None
    ) -> None:
        """`ranks`: the model is a shard (cuda/sharding.py), and all ranks run their shards together."""
        self._ranks = ranks
        self.spec = model.spec
        self.embedding = model.embedding
        self.layers = model.layers
        self.final_norm = model.final_norm
        self.head = model.head
        self.max_positions = max_positions
        self._operations = operations
        self._embedding_multiplier = model.embedding_multiplier
        device = model.embedding.device
        ropes, self._rope_of = distinct_ropes(self.spec.ropes)
        rotations = Rotations.of(ropes, self.spec.rotary_dim).to(device)
        positions = torch.arange(max_positions, device=device)
        cos, sin = rotations.at(positions, model.dtype)
        self._turns = list(zip(cos, sin, strict=True))
        scaling = self.spec.query_scaling
        self._query_scales = query_scales(scaling, positions, model.dtype) if scaling else None

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def forward(self, inputs: ForwardInputs, cache: KVCache, workspace: Tensor, out: Tensor) -> None:
        """Write the hidden states [rows, hidden] after the last norm to `out`, and the rows' keys and values
        to `cache`. `workspace` is for attention's partial results."""
        layers, spec = self._operations.layers, self.spec
        epsilon, residual = spec.rms_norm_eps, spec.multipliers.residual
        tokens = layers.gather_tokens(inputs.tokens, inputs.results, inputs.sources)
        hidden = layers.embed(self.embedding, tokens, self._embedding_multiplier)
        delta = post = None
        for number, layer in enumerate(self.layers):
            x = layers.add_rms_norm(hidden, delta, layer.attention_norm, epsilon, None, post, residual)
            delta = self._sum(layer.out(self._attend(number, layer, x, inputs, cache, workspace)))
            post = layer.attention_post_norm
            x = layers.add_rms_norm(hidden, delta, layer.mlp_norm, epsilon, None, post, residual)
            delta, post = self._sum(self._mlp(number, layer, x)), layer.mlp_post_norm
        layers.add_rms_norm(hidden, delta, self.final_norm, epsilon, out, post, residual)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the float32 logits [rows, vocabulary] of the next token; they are in `out`, if that is
        given."""
        logits = self.head(hidden, out) if isinstance(self.head, WideLinear) else self.head(hidden)
        if self._ranks:
            logits = self._ranks.join(logits)
        logits, cap = scaled(logits, self.spec.multipliers.logits), self.spec.logits_cap
        logits = cap * torch.tanh(logits / cap) if cap else logits
        return logits if out is None or logits is out else out.copy_(logits)

    def _attend(
        self,
        number: int,
        layer: LayerWeights,
        x: Tensor,
        inputs: ForwardInputs,
        cache: KVCache,
        workspace: Tensor,
    ) -> Tensor:
        spec, operations = self.spec, self._operations
        heads, dim, qkv = spec.num_heads, spec.head_dim, layer.qkv(x)
        head_norm, rope = layer.head_norm, self._rope_of[number]
        if spec.qk_norm == "joint":
            assert head_norm is not None
            operations.layers.norm_jointly(qkv, head_norm, spec.rms_norm_eps, heads)
            head_norm = None
        cos, sin = (None, None) if rope < 0 else self._turns[rope]
        operations.layers.rotate_and_store(
            qkv, head_norm, spec.rms_norm_eps, cos, sin, inputs.positions, cache.data[number], inputs.slots,
            heads, spec.num_kv_heads,
        )  # fmt: skip
        queries = qkv.view(len(qkv), -1, dim)[:, :heads]
        if self._query_scales is not None:
            queries.mul_(self._query_scales[inputs.positions].view(-1, 1, 1))
        attended = torch.empty(len(qkv), heads, dim, dtype=qkv.dtype, device=qkv.device)
        operations.attention.attend(
            queries, cache.data[number], inputs.works[spec.windows[number]], inputs.tables, inputs.limits,
            attended, spec.multipliers.attention, spec.attention_cap, sinks=layer.sinks, workspace=workspace,
            tiles=inputs.tiles, combined=inputs.combined,
        )  # fmt: skip
        return attended.view(len(qkv), -1)

    def _mlp(self, number: int, layer: LayerWeights, x: Tensor) -> Tensor:
        experts = self.spec.experts_of(number)
        if experts:
            return mix(layer.experts, experts, x, self._operations.matrix, self._gate)
        assert layer.gate_up
        assert layer.down
        return layer.down(self._gate(layer.gate_up(x)))

    def _sum(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over all ranks."""
        return self._ranks.add(x) if self._ranks else x

    def _gate(self, gate_up: Tensor) -> Tensor:
        gated: Tensor = self._operations.layers.gate(gate_up, self.spec.activation, self.spec.clamp)
        return gated
