"""What a request's latency target asks of its next step."""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class Need:
    """A decoding request's target for the time per output token, and where it stands.

    `tpot` is the target in seconds (None: it has none). `decode_seconds` have passed since its first token,
    in which `decoded` further ones came.
    """

    tpot: float | None = None
    decode_seconds: float = 0.0
    decoded: int = 0

    def tokens(self, step: float) -> float:
        """How many tokens a step of `step` seconds must bring, so that the request is on target behind it:
        A = (l + t) / tpot - o (AdaServe, equation 2). -inf without a target."""
        return -inf if self.tpot is None else (self.decode_seconds + step) / self.tpot - self.decoded

    def slack(self, tokens: float) -> float:
        """How long a step may take that brings `tokens`, so that the request is on target behind it; below
        zero where it is too late for that. inf without a target."""
        return inf if self.tpot is None else (self.decoded + tokens) * self.tpot - self.decode_seconds


NO_NEED = Need()
"""Of a request without a target."""

PAST = Need(tpot=inf)
"""Of a request that cannot meet its targets any more: whatever a step takes, it asks for nothing."""
