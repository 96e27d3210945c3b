"""Latencies of a request: time to first token (TTFT) and mean time per output token after it (TPOT)."""

from dataclasses import dataclass

from streamserve.protocol.sampling import Slo


@dataclass(frozen=True, slots=True)
class SloOutcome:
    """Whether a request met its latency targets, and the latencies of its slowest choice in milliseconds.

    A value is None if it could not be measured: without a token, or without a second one.
    """

    met: bool
    ttft_ms: float | None
    tpot_ms: float | None


class Stopwatch:
    """Measures the latencies of one request's tokens. All times are seconds on one clock."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._tokens: dict[int, tuple[float, float, int]] = {}

    def token(self, choice: int, now: float) -> None:
        """Record the time of a choice's next token."""
        first, _, count = self._tokens.get(choice, (now, now, 0))
        self._tokens[choice] = (first, now, count + 1)

    def outcome(self, slo: Slo) -> SloOutcome | None:
        """Return the outcome; None if the request had no target. TPOT is (t_last - t_first) / (tokens -
        1)."""
        if slo.ttft_ms is None and slo.tpot_ms is None:
            return None
        times = self._tokens.values()
        ttft = max((1000 * (first - self._started) for first, _, _ in times), default=None)
        gaps = [1000 * (last - first) / (count - 1) for first, last, count in times if count > 1]
        tpot = max(gaps, default=None)
        pairs = ((ttft, slo.ttft_ms), (tpot, slo.tpot_ms))
        met = all(took is None or target is None or took <= target for took, target in pairs)
        return SloOutcome(met, ttft, tpot)


def combined(outcomes: list[SloOutcome]) -> SloOutcome | None:
    """Combine the outcomes of a request's prompts: targets are met if all prompts met them, and latencies are
    the slowest."""
    if not outcomes:
        return None
    ttfts = [outcome.ttft_ms for outcome in outcomes if outcome.ttft_ms is not None]
    tpots = [outcome.tpot_ms for outcome in outcomes if outcome.tpot_ms is not None]
    return SloOutcome(
        all(outcome.met for outcome in outcomes), max(ttfts, default=None), max(tpots, default=None)
    )
