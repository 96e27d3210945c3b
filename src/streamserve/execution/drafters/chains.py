"""Chains of draft tokens that are drafted in one go, without the host between their levels."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from streamserve.contracts.plan import Span


class Chains(NamedTuple):
    """The likeliest tokens after each of n spans: `tokens` and their `probabilities` [levels, n]. A negative
    token ends its chain. `finite` [rows]: whether the hidden state of each row of the spans is finite."""

    tokens: NDArray[np.int32]
    probabilities: NDArray[np.float32]
    finite: NDArray[np.bool_]


class ChainsInFlight(Protocol):
    """Chains that are being drafted."""

    @property
    def placed(self) -> bool:
        """Whether the target's passes find the tokens on the device, before the host knows them."""
        ...

    def place(self, chain: int, level: int) -> int:
        """Return where they find the token of a chain at a level, from 0 on."""
        ...

    def wait(self) -> Chains:
        """Return the chains, waiting for them."""
        ...

    @property
    def seconds(self) -> float:
        """How long drafting took, once it has been waited for."""
        ...


class ChainDrafting(Protocol):
    """Drafts chains of the likeliest tokens with a model."""

    def fits(self, chains: int, length: int) -> bool:
        """Return whether it drafts so many chains of up to `length` tokens at once."""
        ...

    def draft(self, spans: Sequence[Span], lengths: Sequence[int]) -> ChainsInFlight:
        """Begin to compute the KV of the tokens of `spans`, and to draft lengths[i] tokens after the i-th.
        The KV of all draft tokens but each chain's last is written to the slots after the span."""
        ...

    def follows(self, spans: Sequence[Span]) -> bool:
        """Return whether `follow` may be called for such spans."""
        ...

    def follow(self, spans: Sequence[Span], lengths: Sequence[int]) -> ChainsInFlight:
        """As `draft`, after the results of the verification that the device does at present: the i-th span is
        of the slots of all tokens that tree i may yield; its tokens, of which only the accepted ones count,
        are on the device."""
        ...
