"""The sum of a sequence's hidden states, which prompts whose mean is asked for keep between steps."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class RunningSum:
    """The sum of a sequence's hidden states at positions 0 to `count` - 1: float64 [hidden]."""

    total: Tensor
    count: int = 0

    @classmethod
    def of(cls, width: int) -> "RunningSum":
        """Return the sum of no rows."""
        return cls(torch.zeros(width, dtype=torch.float64))

    def add(self, start: int, rows: Tensor) -> None:
        """Add the hidden states [rows, hidden] of positions from `start` on. Those that were added before,
        when their KV was computed for the first time, have the same bits and are left out."""
        if start > self.count:
            raise ValueError(f"hidden states of positions {self.count} to {start - 1} are missing")
        for row in rows[self.count - start :].to(torch.float64):
            self.total += row
            self.count += 1

    def mean(self) -> Tensor:
        """Return the mean in float32 [hidden]."""
        return (self.total / self.count).float()
