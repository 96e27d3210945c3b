"""The forward pass of a mixture of experts in plain torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from streamserve.execution.model.experts import Experts
from streamserve.execution.model.linear import LinearMap


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of a layer's experts; a shared expert is the last one. `gate_up` computes an expert's gates and
    values together. `router` maps float32 rows to the scores of all experts and, with a shared expert, its
    gate."""

    router: LinearMap
    gate_up: Sequence[LinearMap]
    down: Sequence[LinearMap]


def choose(scores: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Return the experts of each row and their weights: int64 and float32 [rows, chosen]. Experts are in
    order of falling scores; experts with equal scores are in order of their numbers. A shared expert is the
    last of each row."""
    routed = scores[:, : experts.count]
    best, chosen = routed.sort(dim=-1, descending=True, stable=True)
    best, chosen = best[:, : experts.chosen], chosen[:, : experts.chosen]
    weights = best.softmax(-1) if experts.normalized else routed.softmax(-1).gather(1, chosen)
    if experts.shared_size:
        shared = torch.full_like(chosen[:, :1], experts.count)
        chosen = torch.cat([chosen, shared], 1)
        weights = torch.cat([weights, scores[:, experts.count :].sigmoid()], 1)
    return chosen, weights


def mix(weights: ExpertWeights, experts: Experts, x: Tensor, gate: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the experts' weighted sum for `x` [rows, hidden]. `gate` multiplies activated gates and values.
    Each row's expert outputs are summed in float32, in order of their scores, so that the row's bits do not
    depend on other rows."""
    chosen, shares = choose(weights.router(x.float()), experts)
    sums = x.new_zeros(chosen.shape + x.shape[1:], dtype=torch.float32)
    for number in sorted(set(chosen.flatten().tolist())):
        rows, ranks = (chosen == number).nonzero(as_tuple=True)
        out = weights.down[number](gate(weights.gate_up[number](x[rows])))
        sums[rows, ranks] = out.float() * shares[rows, ranks, None]
    total = sums[:, 0]
    for rank in range(1, sums.shape[1]):
        total = total + sums[:, rank]
    return total.to(x.dtype)
