"""Mixtures of experts: their specification, read from configs, and the names of their tensors."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from streamserve.execution.model.architectures import ExpertTensors, Mixture, Shared, SparseLayers
from streamserve.execution.model.fields import Fields, shown

MAX_EXPERTS = 1024
"""Maximum number of experts of a layer: more than any model has."""

MAX_ALL_EXPERTS = 100_000
"""Maximum number of experts of all layers together: more than any model has. Their tensors are looked up one
by one."""

ONLY_MLP, DENSE = "mlp_only_layers", "first_k_dense_replace"
CORRECTION = "e_score_correction_bias"
"""The last part of the name of a router's correction."""

TENSORS = ExpertTensors()


@dataclass(frozen=True)
class Experts:
    """A mixture of experts, which is the MLP of `layers`.

    * A router chooses `chosen` of `count` experts, each of `intermediate_size`, for each token.
    * The experts' weights are the softmax of the router's scores: over the chosen experts if `normalized`,
      otherwise over all.
    * `sigmoid`: the weights are the sigmoids of the scores instead, divided by their sum if `normalized`. The
      sigmoids plus a correction choose the experts, within `chosen_groups` of `groups` equal groups of
      experts: those with the largest sums of their two best experts.
    * `scale` multiplies the weights.
    * A shared expert of `shared_size` (0: none) is computed for all tokens. If `shared_gated`, it is weighted
      by a sigmoid.
    * `biased`: router and experts have biases.
    """

    layers: tuple[int, ...]
    count: int
    chosen: int
    intermediate_size: int
    normalized: bool
    sigmoid: bool = False
    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0
    shared_size: int = 0
    shared_gated: bool = True
    biased: bool = False
    tensors: ExpertTensors = TENSORS

    @property
    def router(self) -> str:
        """The router's module name within a layer."""
        return f"{self.tensors.prefix}.{self.tensors.router}"

    @property
    def shared_gate(self) -> str | None:
        """The module name of the shared expert's gate within a layer; None without a gate."""
        gated = self.shared_size and self.shared_gated
        return f"{self.tensors.prefix}.shared_expert_gate" if gated else None

    @property
    def correction(self) -> str | None:
        """The name within a layer of the correction of scores for the choice; None without a correction."""
        return f"{self.router}.{CORRECTION}" if self.sigmoid else None

    @cached_property
    def _sparse(self) -> frozenset[int]:
        return frozenset(self.layers)

    def has(self, layer: int) -> bool:
        """Return whether the MLP of `layer` is a mixture of experts; otherwise it is dense."""
        return layer in self._sparse

    def share_read(self, tokens: int) -> float:
        """Return the expected share of the experts that at least one of `tokens` tokens chooses, if tokens
        choose independently and uniformly."""
        return 1 - (1 - self.chosen / self.count) ** tokens

    def modules(self) -> list[tuple[tuple[str, ...], str]]:
        """Return, for each expert, the names of its matrices within a layer: the input matrices, which are
        computed together, and the output matrix. A shared expert is the last one."""
        parts, prefix = self.tensors, self.tensors.prefix
        names = [f"{prefix}.experts.{number}" for number in range(self.count)]
        names += [f"{prefix}.{parts.shared}"] if self.shared_size else []
        return [(tuple(f"{name}.{part}" for part in parts.gate_up), f"{name}.{parts.down}") for name in names]

    def matrices(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Return the shapes [out, in] of all experts' matrices, by their names within a layer."""
        shapes = dict[str, tuple[int, int]]()
        for number, (gate_up, down) in enumerate(self.modules()):
            inner = self.intermediate_size if number < self.count else self.shared_size
            shapes |= dict.fromkeys(gate_up, (2 * inner // len(gate_up), hidden))
            shapes[down] = (hidden, inner)
        return shapes

    def other_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a layer's other tensors by name: the router's, and stacks of matrices."""
        shapes: dict[str, tuple[int, ...]] = {f"{self.router}.weight": (self.count, hidden)}
        if self.biased:
            shapes[f"{self.router}.bias"] = (self.count,)
        if self.correction:
            shapes[self.correction] = (self.count,)
        if self.shared_gate:
            shapes[f"{self.shared_gate}.weight"] = (1, hidden)
        return shapes | self.stacks(hidden)

    def stacks(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a layer's stacks of matrices and biases by name."""
        shapes = dict[str, tuple[int, ...]]()
        for module, (rows, columns) in self.matrices(hidden).items() if self.tensors.stacked else ():
            stack, _ = stack_of(module)
            matrix = (columns, rows) if self.tensors.transposed else (rows, columns)
            shapes[stack] = (self.count, *matrix)
            if self.biased:
                shapes[f"{stack}_bias"] = (self.count, rows)
        return shapes


def is_routed(module: str) -> bool:
    """Return whether a matrix belongs to an expert that the router chooses, not to a shared one."""
    return ".experts." in module


def stack_of(module: str) -> tuple[str, int]:
    """Return the tensor that stacks the matrices of all experts, and the expert's number in it, for an
    expert's matrix `module`."""
    prefix, number, name = module.rsplit(".", 2)
    return f"{prefix}.{name}", int(number)


def in_halves(module: str, rows: Tensor) -> Tensor:
    """Return the rows of a matrix of a stack in which gates and values alternate, in the order of the model:
    all gates precede all values."""
    return torch.cat([rows[::2], rows[1::2]]) if module.endswith("gate_up_proj") else rows.contiguous()


def read_experts(config: Fields, mixture: Mixture | None, layers: int) -> Experts | None:
    """Return the mixture of experts of a model with `layers` layers; None if no layer has one. Raises
    CheckpointError, which names the unsupported field."""
    if mixture is None:
        return None
    sparse = _sparse_layers(config, mixture.layers, layers)
    if not sparse:
        return None
    names = mixture.count_fields
    name = next((name for name in names if config.get(name) is not None), names[-1])
    count = config.integer(name, maximum=MAX_EXPERTS)
    if count * len(sparse) > MAX_ALL_EXPERTS:
        config.refuse(
            name, f"{count} in {len(sparse)} layers: at most {MAX_ALL_EXPERTS} in all are supported"
        )
    chosen = config.integer("num_experts_per_tok")
    if chosen > count:
        config.refuse("num_experts_per_tok", f"{chosen} is more than the {count} experts")
    normalized, size = mixture.normalized, config.integer(mixture.size_field)
    groups, chosen_groups = _groups(config, count, chosen) if mixture.sigmoid else (1, 1)
    return Experts(
        layers=sparse,
        count=count,
        chosen=chosen,
        intermediate_size=size,
        normalized=config.flag("norm_topk_prob", mixture.sigmoid) if normalized is None else normalized,
        sigmoid=mixture.sigmoid,
        groups=groups,
        chosen_groups=chosen_groups,
        scale=config.number("routed_scaling_factor", 1.0, 1e-6, 1e6) if mixture.sigmoid else 1.0,
        shared_size=_shared_size(config, mixture.shared, size),
        shared_gated=mixture.shared == "gated",
        biased=mixture.biased,
        tensors=mixture.tensors,
    )


def _shared_size(config: Fields, kind: Shared, size: int) -> int:
    """Return the size of the shared expert, where other experts have `size`; 0: there is none."""
    if kind == "none":
        return 0
    if kind == "gated":
        return config.integer("shared_expert_intermediate_size")
    return size * config.integer("n_shared_experts", 1, MAX_EXPERTS)


def _groups(config: Fields, count: int, chosen: int) -> tuple[int, int]:
    """Return the number of groups of experts, and of the groups whose experts may be chosen."""
    groups, chosen_groups = config.integer("n_group", 1), config.integer("topk_group", 1)
    if count % groups or (groups > 1 and count // groups < 2):
        config.refuse("n_group", f"{groups} does not divide {count} experts into groups of 2 or more")
    if not chosen / (count // groups) <= chosen_groups <= groups:
        config.refuse(
            "topk_group", f"{chosen_groups} of {groups} groups do not suffice for {chosen} chosen experts"
        )
    return groups, chosen_groups


def _sparse_layers(config: Fields, rule: SparseLayers, layers: int) -> tuple[int, ...]:
    """Return the layers that have experts: all, all after the first ones, or every `decoder_sparse_step`-th
    one, except the layers listed as dense."""
    if rule == "all":
        return tuple(range(layers))
    if rule == "after dense":
        first = config.get(DENSE, 1)
        if type(first) is not int or first < 0:
            config.refuse(DENSE, f"must be a number of layers, not {shown(first)}")
        return tuple(range(first, layers))
    dense = config.get(ONLY_MLP) or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        config.refuse(ONLY_MLP, f"must be a list of layers, not {shown(dense)}")
    step = config.integer("decoder_sparse_step", 1)
    return tuple(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)
