"""Chains of draft tokens that are drafted in one go, without the host between their levels."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from streamserve.engine.plan import Span


class Chains(NamedTuple):
    """The likeliest tokens after each of n spans: `tokens` and their `probabilities` [levels, n]. A negative
    token ends its chain. `finite` [rows]: whether the hidden state of each row of the spans is finite."""

    tokens: NDArray[np.int32]
    probabilities: NDArray[np.float32]
    finite: NDArray[np.bool_]


class ChainDrafting(Protocol):
    """Drafts chains of the likeliest tokens with a model."""

    def fits(self, chains: int, length: int) -> bool:
        """Return whether it drafts so many chains of up to `length` tokens at once."""
        ...

    def draft(self, spans: Sequence[Span], lengths: Sequence[int]) -> Chains:
        """Compute the KV of the tokens of `spans`, and draft lengths[i] tokens after the i-th. The KV of all
        draft tokens but each chain's last is written to the slots after the span."""
        ...
