"""Mixtures of experts: their specification, read from configs, and the names of their tensors."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from streamserve.execution.model.architectures import ExpertTensors, Mixture
from streamserve.execution.model.fields import Fields, shown

MAX_EXPERTS = 1024
"""Maximum number of experts of a layer: more than any model has."""

MAX_ALL_EXPERTS = 100_000
"""Maximum number of experts of all layers together: more than any model has. Their tensors are looked up one
by one."""

ONLY_MLP = "mlp_only_layers"
TENSORS = ExpertTensors()


@dataclass(frozen=True)
class Experts:
    """A mixture of experts, which is the MLP of `layers`.

    * A router chooses `chosen` of `count` experts, each of `intermediate_size`, for each token.
    * The experts' weights are the softmax of the router's scores: over the chosen experts if `normalized`,
      otherwise over all.
    * A shared expert of `shared_size` (0: none) is computed for all tokens, and weighted by a sigmoid.
    * `biased`: router and experts have biases.
    """

    layers: tuple[int, ...]
    count: int
    chosen: int
    intermediate_size: int
    normalized: bool
    shared_size: int = 0
    biased: bool = False
    tensors: ExpertTensors = TENSORS

    @property
    def router(self) -> str:
        """The router's module name within a layer."""
        return f"{self.tensors.prefix}.{self.tensors.router}"

    @property
    def shared_gate(self) -> str | None:
        """The module name of the shared expert's gate within a layer; None without a shared expert."""
        return f"{self.tensors.prefix}.shared_expert_gate" if self.shared_size else None

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
        names += [f"{prefix}.shared_expert"] if self.shared_size else []
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
    sparse = _sparse_layers(config, layers) if mixture.optional else tuple(range(layers))
    if not sparse:
        return None
    name = "num_local_experts" if config.get("num_experts") is None else "num_experts"
    count = config.integer(name, maximum=MAX_EXPERTS)
    if count * len(sparse) > MAX_ALL_EXPERTS:
        config.refuse(
            name, f"{count} in {len(sparse)} layers: at most {MAX_ALL_EXPERTS} in all are supported"
        )
    chosen = config.integer("num_experts_per_tok")
    if chosen > count:
        config.refuse("num_experts_per_tok", f"{chosen} is more than the {count} experts")
    normalized = mixture.normalized
    return Experts(
        layers=sparse,
        count=count,
        chosen=chosen,
        intermediate_size=config.integer(mixture.size_field),
        normalized=config.flag("norm_topk_prob", False) if normalized is None else normalized,
        shared_size=config.integer("shared_expert_intermediate_size") if mixture.shared else 0,
        biased=mixture.biased,
        tensors=mixture.tensors,
    )


def _sparse_layers(config: Fields, layers: int) -> tuple[int, ...]:
    """Return the layers that have experts: every `decoder_sparse_step`-th one, except the layers listed as
    dense."""
    dense = config.get(ONLY_MLP) or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        config.refuse(ONLY_MLP, f"must be a list of layers, not {shown(dense)}")
    step = config.integer("decoder_sparse_step", 1)
    return tuple(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)
