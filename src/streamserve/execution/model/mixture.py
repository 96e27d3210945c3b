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
    values together. `router` maps float32 rows to the scores of all experts and, with a gated shared expert,
    its gate. `correction` (float32 [experts]) is added to the sigmoids of scores for the choice."""

    router: LinearMap
    gate_up: Sequence[LinearMap]
    down: Sequence[LinearMap]
    correction: Tensor | None = None


def choose(scores: Tensor, experts: Experts, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the experts of each row and their weights: int64 and float32 [rows, chosen]. Experts are in
    order of falling scores (for the choice); experts with equal scores are in order of their numbers. A
    shared expert is the last of each row."""
    routed = scores[:, : experts.count]
    if experts.sigmoid:
        shares = routed.sigmoid()
        ranked = shares if correction is None else shares + correction
        chosen = _largest(_in_chosen_groups(ranked, experts), experts.chosen)
        weights = shares.gather(1, chosen)
        weights = weights / (_sum(weights) + 1e-20) if experts.normalized else weights
    else:
        chosen = _largest(routed, experts.chosen)
        best = routed.gather(1, chosen)
        weights = best.softmax(-1) if experts.normalized else routed.softmax(-1).gather(1, chosen)
    weights = weights if experts.scale == 1 else weights * experts.scale
    if experts.shared_size:
        gated = experts.shared_gated
        gate = scores[:, experts.count :].sigmoid() if gated else torch.ones_like(scores[:, :1])
        chosen = torch.cat([chosen, torch.full_like(chosen[:, :1], experts.count)], 1)
        weights = torch.cat([weights, gate], 1)
    return chosen, weights


def _largest(numbers: Tensor, count: int) -> Tensor:
    """Return the columns of each row's `count` largest numbers; of equal numbers, the lower columns first."""
    return numbers.sort(dim=-1, descending=True, stable=True)[1][:, :count]


def _sum(weights: Tensor) -> Tensor:
    """Return the rows' sums [rows, 1], added from left to right: torch's order may depend on the number of
    rows."""
    total = weights[:, :1]
    for rank in range(1, weights.shape[1]):
        total = total + weights[:, rank : rank + 1]
    return total


def _in_chosen_groups(ranked: Tensor, experts: Experts) -> Tensor:
    """Return `ranked` with -∞ for experts of groups that are not chosen."""
    if experts.chosen_groups == experts.groups:
        return ranked
    grouped = ranked.view(len(ranked), experts.groups, -1)
    best = grouped.topk(2).values
    chosen = _largest(best[..., 0] + best[..., 1], experts.chosen_groups)
    kept = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(1, chosen, True)
    return grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)


def mix(weights: ExpertWeights, experts: Experts, x: Tensor, gate: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the experts' weighted sum for `x` [rows, hidden]. `gate` multiplies activated gates and values.
    Each row's expert outputs are summed in float32, in order of their scores, so that the row's bits do not
    depend on other rows."""
    chosen, shares = choose(weights.router(x.float()), experts, weights.correction)
    sums = x.new_zeros(chosen.shape + x.shape[1:], dtype=torch.float32)
    for number in sorted(set(chosen.flatten().tolist())):
        rows, ranks = (chosen == number).nonzero(as_tuple=True)
        out = weights.down[number](gate(weights.gate_up[number](x[rows])))
        sums[rows, ranks] = out.float() * shares[rows, ranks, None]
    total = sums[:, 0]
    for rank in range(1, sums.shape[1]):
        total = total + sums[:, rank]
    return total.to(x.dtype)
