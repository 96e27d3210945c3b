"""Muon for the matrices, AdamW for the rest: on so few tokens it learns far more from each of them."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

from .precision import compute_dtype

ADAM_BETAS = (0.9, 0.95)


def orthogonalise(stack: Tensor, rounds: int = 5) -> Tensor:
    """Newton-Schulz iteration: pushes all singular values of each matrix in the stack towards one."""
    x = stack.to(compute_dtype())
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).to(stack.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised, same-shaped matrices together."""

    def __init__(
        self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.2
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    shapes[weight.shape].append(weight)
            for shape, weights in shapes.items():
                update = orthogonalise(torch.stack([self._momentum(w, group["momentum"]) for w in weights]))
                rate = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for weight, change in zip(weights, update, strict=True):
                    weight.mul_(1 - group["lr"] * group["decay"]).add_(change, alpha=-rate)

    def _momentum(self, weight: Tensor, momentum: float) -> Tensor:
        state = self.state[weight]
        if "kept" not in state:
            state["kept"] = torch.zeros_like(weight)
        state["kept"].lerp_(weight.grad, 1 - momentum)
        return torch.lerp(weight.grad, state["kept"], momentum)  # Nesterov's look ahead


class Optimisers:
    """The two optimisers as one, with a shared schedule."""

    def __init__(self, model: nn.Module, matrix_lr: float = 0.012, other_lr: float = 0.003) -> None:
        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
        others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
        self.parts = [
            Muon(matrices, lr=matrix_lr),
            torch.optim.AdamW(others, lr=other_lr, betas=ADAM_BETAS, weight_decay=0.0, fused=True),
        ]
        self.bases = [[group["lr"] for group in part.param_groups] for part in self.parts]

    def step(self, scale: float) -> None:
        """One update at ``scale`` times the base rates, then clear the gradients."""
        for part, bases in zip(self.parts, self.bases, strict=True):
            for group, base in zip(part.param_groups, bases, strict=True):
                group["lr"] = base * scale
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, object]]:
        """The state of both."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict[str, object]]) -> None:
        """Restore the state of both."""
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


def schedule(share: float, warmup: float = 0.02, hold: float = 0.35) -> float:
    """The rate's scale after ``share`` of the budget: warm up, hold, then fall to almost nothing."""
    if share < warmup:
        return max(share / warmup, 0.01)
    return 1.0 if share < hold else max((1.0 - share) / (1.0 - hold), 0.005)
