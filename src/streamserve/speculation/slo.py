"""What a request's latency target requires of its next step."""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class LatencyRequirement:
    """A decoding request's target for the time per output token, and its progress.

    `tpot` is the target in seconds (None: it has none). `decode_seconds` have passed since its first token,
    in which `decoded` further ones were generated.
    """

    tpot: float | None = None
    decode_seconds: float = 0.0
    decoded: int = 0

    def tokens(self, step: float) -> float:
        """Return how many tokens a step of `step` seconds must yield for the request to be on target after
        it: A = (l + t) / tpot - o (AdaServe, equation 2). -inf without a target."""
        return -inf if self.tpot is None else (self.decode_seconds + step) / self.tpot - self.decoded

    def slack(self, tokens: float) -> float:
        """Return how long a step may take that yields `tokens`, for the request to be on target after it;
        negative where it is too late for that. inf without a target."""
        return inf if self.tpot is None else (self.decoded + tokens) * self.tpot - self.decode_seconds


NO_REQUIREMENT = LatencyRequirement()
"""The requirement of a request without a target."""

MISSED_REQUIREMENT = LatencyRequirement(tpot=inf)
"""The requirement of a request that can no longer meet its targets: nothing."""
