"""Mixtures of experts on a device. The weights of all experts of a layer are one tensor, and the experts that
rows choose stay on the device: the host does not wait for them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from streamserve.execution.backends.cuda.linear import QuantizedLinear, TorchLinear
from streamserve.execution.backends.cuda.packing import PackedWeight, stack
from streamserve.execution.backends.cuda.routing import route
from streamserve.execution.model.experts import Experts
from streamserve.execution.model.linear import LinearMap
from streamserve.execution.model.mixture import choose

DeviceLinear = TorchLinear | QuantizedLinear


@dataclass(frozen=True)
class DeviceExperts:
    """The experts of a layer: their weights [experts, out, in] with biases [experts, out], the maps of an
    expert that all rows have (`shared`), and the router's `correction` (mixture.ExpertWeights)."""

    router: LinearMap
    gate_up: PackedWeight
    gate_up_bias: Tensor | None
    down: PackedWeight
    down_bias: Tensor | None
    shared: tuple[DeviceLinear, DeviceLinear] | None
    correction: Tensor | None


def stack_experts(
    router: LinearMap,
    gate_up: Sequence[DeviceLinear],
    down: Sequence[DeviceLinear],
    correction: Tensor | None,
    count: int,
) -> DeviceExperts:
    """Return the experts of a layer, made of their maps. A shared expert's maps follow the `count` others."""
    shared = (gate_up[count], down[count]) if len(gate_up) > count else None
    (inputs, inputs_bias), (outputs, outputs_bias) = (_joined(maps[:count]) for maps in (gate_up, down))
    return DeviceExperts(router, inputs, inputs_bias, outputs, outputs_bias, shared, correction)


def _joined(maps: Sequence[DeviceLinear]) -> tuple[PackedWeight, Tensor | None]:
    biases = [linear.bias for linear in maps if linear.bias is not None]
    return stack([linear.packed for linear in maps]), torch.stack(biases) if biases else None


def mix(
    weights: DeviceExperts,
    experts: Experts,
    x: Tensor,
    matrix: ModuleType,
    gate: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return the experts' weighted sum for `x` [rows, hidden]. See `mixture.mix`."""
    chosen, shares = choose(weights.router(x.float()), experts, weights.correction)
    routing = route(chosen[:, : experts.chosen], experts.count)
    inner = gate(matrix.multiply_routed(x, weights.gate_up, weights.gate_up_bias, routing, experts.chosen))
    outputs = matrix.multiply_routed(inner, weights.down, weights.down_bias, routing, 1)
    shared = None
    if weights.shared:
        gate_up, down = weights.shared
        shared = down(gate(gate_up(x)))
    combined: Tensor = matrix.combine_experts(outputs, shares, shared)
    return combined
