"""What a request's reader waited for: the time to its first token, and the mean time for those after it."""

from dataclasses import dataclass

from streamserve.protocol.sampling import Slo


@dataclass(frozen=True, slots=True)
class SloOutcome:
    """Whether a request met its latency targets, and what was measured, in milliseconds: of several choices
    the slowest. None where there was nothing to measure: no token, or no second one."""

    met: bool
    ttft_ms: float | None
    tpot_ms: float | None


class Stopwatch:
    """Times one request's tokens. All times are seconds on one clock."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._tokens: dict[int, tuple[float, float, int]] = {}

    def token(self, choice: int, now: float) -> None:
        """A choice got its next token."""
        first, _, count = self._tokens.get(choice, (now, now, 0))
        self._tokens[choice] = (first, now, count + 1)

    def outcome(self, slo: Slo) -> SloOutcome | None:
        """How the request fared, if it had a target. TPOT is (t_last - t_first) / (tokens - 1)."""
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
    """The outcome of a request of several prompts: all of them count, the slowest is told."""
    if not outcomes:
        return None
    ttfts = [one.ttft_ms for one in outcomes if one.ttft_ms is not None]
    tpots = [one.tpot_ms for one in outcomes if one.tpot_ms is not None]
    return SloOutcome(all(one.met for one in outcomes), max(ttfts, default=None), max(tpots, default=None))
