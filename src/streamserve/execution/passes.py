"""Passes of a model over rows that are laid out: what drafters need of a model."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from streamserve.execution.attention import AttentionBackend
from streamserve.execution.layout import Layout
from streamserve.execution.lora.table import AdapterTable
from streamserve.execution.model import Model


class Passes(Protocol):
    """Runs a model's passes. It writes the keys and values of their rows to its KV cache."""

    @property
    def firsts(self) -> int:
        """How many passes took longer than later ones will, to compile or to capture."""
        ...

    def forward(self, layout: Layout) -> Tensor:
        """Return the hidden states [rows, hidden] of the rows of `layout`. The next pass may overwrite
        them."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [rows, vocabulary] of the next token."""
        ...


@dataclass(frozen=True)
class ModelPasses:
    """Implements Passes with `model` and `attention` over its KV cache, and the LoRA `adapters` of rows."""

    model: Model
    attention: AttentionBackend
    adapters: AdapterTable | None = None

    @property
    def firsts(self) -> int:
        return 0

    def forward(self, layout: Layout) -> Tensor:
        self.attention.plan(layout)
        tokens, positions = torch.from_numpy(layout.tokens), torch.from_numpy(layout.positions)
        lora = self.adapters.of(layout) if self.adapters else None
        return self.model.forward(tokens, positions, self.attention, lora)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)
