"""Let a draft model draft for a target whose embedding has more or fewer rows of padding.

Both models have the same tokens in their first rows; rows after these have no text. The draft model never
reads a token that it has no row for, and its logits have as many columns as the target's.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from streamserve.execution.layout import Layout
from streamserve.execution.passes import Passes

UNLIKELY = -1e30
"""The logit of a token that the draft model has no row for: finite, and too low to be drafted."""

OTHER = 0
"""What the draft model reads in place of such a token. It matters for the acceptance alone."""


@dataclass(frozen=True)
class CommonVocabulary:
    """Implements Passes with the `passes` of a draft model of `draft_rows` tokens for a target of
    `target_rows`."""

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
    """Return the passes of a draft model of `draft_rows` tokens for a target of `target_rows`."""
    return passes if draft_rows == target_rows else CommonVocabulary(passes, draft_rows, target_rows)
