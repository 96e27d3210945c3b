"""What each model learns from: the target from text, with early exits; the draft from the target's logits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .fused import cross_entropy
from .model import Llama
from .precision import mixed_precision
from .trainer import chosen

EXITS = (2, 4)
EXIT_WEIGHT = 0.2
KL_SHARE = 0.9


def _gather(stream: Tensor, where: Tensor) -> Tensor:
    return stream.reshape(-1, stream.shape[-1])[where]


class TargetLoss:
    """Cross-entropy at the last layer, and at one inner layer a step on a quarter of the positions.

    The inner layers learn to speak through the final norm and head, so that the first few layers alone can
    draft for the whole model.
    """

    def __init__(self, model: Llama) -> None:
        self.model, self.turn = model, 0

    def __call__(self, ids: Tensor, mask: Tensor, share: float) -> tuple[Tensor, float]:
        """The loss of one batch, and its last-layer part as a number."""
        where, targets = chosen(mask), ids[:, 1:].reshape(-1)
        exit_layer = EXITS[self.turn % len(EXITS)]
        self.turn += 1
        some = where[torch.randperm(len(where))[: max(1, len(where) // 4)]]
        with mixed_precision():
            inner, last = self.model(ids[:, :-1], (exit_layer,))
            logits, inner_logits = (
                self.model.head(_gather(last, where)),
                self.model.head(_gather(inner, some)),
            )
        main = cross_entropy(logits, targets[where])
        early = cross_entropy(inner_logits, targets[some])
        return main + EXIT_WEIGHT * early, main.item()


class DraftLoss:
    """Forward KL from the target at temperature one, with a small share of cross-entropy on the text."""

    def __init__(self, draft: Llama, target: Llama) -> None:
        self.draft, self.target = draft, target.eval()

    def __call__(self, ids: Tensor, mask: Tensor, share: float) -> tuple[Tensor, float]:
        """The loss of one batch, and the share of greedy tokens that differ from the target's."""
        where, targets = chosen(mask), ids[:, 1:].reshape(-1)
        with mixed_precision():
            with torch.no_grad():
                wanted = self.target.head(_gather(self.target(ids[:, :-1])[-1], where)).float()
            logits = self.draft.head(_gather(self.draft(ids[:, :-1])[-1], where)).float()
        log_probs = F.log_softmax(logits, -1)
        truth = F.log_softmax(wanted, -1)
        divergence = F.kl_div(log_probs, truth, log_target=True, reduction="batchmean")
        text = F.nll_loss(log_probs, targets[where])
        missed = (logits.argmax(-1) != wanted.argmax(-1)).float().mean().item()
        return KL_SHARE * divergence + (1 - KL_SHARE) * text, missed
