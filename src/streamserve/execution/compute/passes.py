"""Forward passes over a layout of rows: the interface of a model for drafters."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from streamserve.execution.model.attention import AttentionBackend
from streamserve.execution.model.forward import Model
from streamserve.execution.model.layout import Layout
from streamserve.execution.model.lora.table import AdapterTable


class Passes(Protocol):
    """Runs forward passes of a model. A pass writes the keys and values of its rows to the KV cache."""

    @property
    def firsts(self) -> int:
        """Number of passes so far that compiled or captured something, and so took longer than later ones."""

    def forward(self, layout: Layout) -> Tensor:
        """Return the hidden states [rows, hidden] of the rows of `layout`. The next pass may overwrite the
        returned tensor."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [rows, vocabulary] of the next token after each row of `hidden`."""


@dataclass(frozen=True)
class ModelPasses:
    """Passes of a `model` on a CPU, with `attention` over its KV cache and the LoRA `adapters` of rows."""

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
