"""Interfaces for drafting chains on a device in one launch, without the host between their levels."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from streamserve.contracts.plan import Span


class Chains(NamedTuple):
    """Drafted chains of the likeliest tokens after each of n spans: `tokens` and their `probabilities`
    [levels, n]. A negative token ends its chain. `finite` [rows]: whether the hidden state of each row of the
    spans is finite."""

    tokens: NDArray[np.int32]
    probabilities: NDArray[np.float32]
    finite: NDArray[np.bool_]


class ChainsInFlight(Protocol):
    """Chains that are being drafted."""

    @property
    def placed(self) -> bool:
        """Whether the target's passes can read the tokens on the device, before the host knows them."""

    def place(self, chain: int, level: int) -> int:
        """Return the place on the device of a chain's token at a level; levels are counted from 0."""

    def wait(self) -> Chains:
        """Wait for the chains, and return them."""

    @property
    def seconds(self) -> float:
        """Seconds that drafting took; known after `wait`."""


class ChainDrafting(Protocol):
    """Drafts chains of the likeliest tokens with a model."""

    def fits(self, chains: int, length: int) -> bool:
        """Return whether `chains` chains of up to `length` tokens can be drafted at once."""

    def draft(self, spans: Sequence[Span], lengths: Sequence[int]) -> ChainsInFlight:
        """Begin to compute the KV of the tokens of `spans`, and to draft lengths[i] tokens after the i-th
        span. The KV of all draft tokens except each chain's last is written to the slots after the span."""

    def follows(self, spans: Sequence[Span]) -> bool:
        """Return whether `follow` may be called for these spans."""

    def follow(self, spans: Sequence[Span], lengths: Sequence[int]) -> ChainsInFlight:
        """Begin to draft as `draft` does, after the results of the verification that the device is running.
        The i-th span covers the slots of all tokens that tree i may yield. Its tokens are on the device; only
        accepted ones count."""
