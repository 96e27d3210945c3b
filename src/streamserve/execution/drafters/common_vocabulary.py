"""Adapt a draft model to a target whose embedding has a different number of padding rows.

Both models have the same tokens in their first rows; later rows have no text. The draft model never reads a
token that it has no row for, and its logits are padded or cut to the target's columns. Here a
model's passes are adapted, which works where the host knows every token; backends/cuda/draft_vocabulary.py
adapts the model itself.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from streamserve.execution.compute.passes import Passes
from streamserve.execution.model.layout import Layout

UNLIKELY = -1e30
"""The logit of tokens that the draft model has no row for: finite, and too low to be drafted."""

OTHER = 0
"""The token that the draft model reads in place of a token that it has no row for. It only affects
acceptance."""


@dataclass(frozen=True)
class CommonVocabulary:
    """The `passes` of a draft model with `draft_rows` tokens, adapted to a target with `target_rows`."""

    passes: Passes
    draft_rows: int
    target_rows: int

    @property
    def firsts(self) -> int:
        return self.passes.firsts

    def forward(self, layout: Layout) -> Tensor:
        known = layout.tokens < self.draft_rows
        if not known.all():
            layout = replace(layout, tokens=np.where(known, layout.tokens, OTHER))
        return self.passes.forward(layout)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.passes.logits(hidden)
        added = self.target_rows - self.draft_rows
        if added > 0:
            return torch.nn.functional.pad(logits, (0, added), value=UNLIKELY)
        return logits[:, : self.target_rows].contiguous()


def with_rows(passes: Passes, draft_rows: int, target_rows: int) -> Passes:
    """Return `passes`, of a draft model with `draft_rows` tokens, adapted to a target with `target_rows`."""
    return passes if draft_rows == target_rows else CommonVocabulary(passes, draft_rows, target_rows)
