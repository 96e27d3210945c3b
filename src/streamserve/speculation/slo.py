"""Requirements of a request's latency target on its next step."""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True)
class LatencyRequirement:
    """A decoding request's target for the time per output token, and its progress.

    `tpot` is the target in seconds (None: no target). `decoded` tokens were generated after the first one, in
    `decode_seconds`.
    """

    tpot: float | None = None
    decode_seconds: float = 0.0
    decoded: int = 0

    def tokens(self, step: float) -> float:
        """Return the tokens that a step of `step` seconds must yield so that the request is on target after
        it: A = (l + t) / tpot - o, with l = `decode_seconds`, t = `step` and o = `decoded` (AdaServe,
        equation 2). -inf without a target."""
        return -inf if self.tpot is None else (self.decode_seconds + step) / self.tpot - self.decoded

    def slack(self, tokens: float) -> float:
        """Return the maximum seconds of a step that yields `tokens`, so that the request is on target after
        it. Negative if it cannot be; inf without a target."""
        return inf if self.tpot is None else (self.decoded + tokens) * self.tpot - self.decode_seconds


NO_REQUIREMENT = LatencyRequirement()
"""The requirement of a request without a target."""

MISSED_REQUIREMENT = LatencyRequirement(tpot=inf)
"""The requirement of a request that can no longer meet its targets: it requires no tokens."""
