"""The sum of a sequence's hidden states, kept between steps for requests with mean pooling."""

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
        """Return an empty sum of hidden states with `width` numbers."""
        return cls(torch.zeros(width, dtype=torch.float64))

    def add(self, start: int, rows: Tensor) -> None:
        """Add the hidden states [rows, hidden] of positions from `start` on. Positions that were added before
        are left out: computed again after a preemption, their hidden states have the same bits. Raises
        ValueError if positions before `start` are missing."""
        if start > self.count:
            raise ValueError(f"hidden states of positions {self.count} to {start - 1} are missing")
        for row in rows[self.count - start :].to(torch.float64):
            self.total += row
            self.count += 1

    def mean(self) -> Tensor:
        """Return the mean [hidden] in float32."""
        return (self.total / self.count).float()
