"""SLO classes: the requests with latency targets that metrics count together."""

from streamserve.protocol.sampling import Slo

CLASSES = (5, 10, 20, 30, 50, 100, 200, 500, 1000)
"""Upper bounds of the metrics' SLO classes, in milliseconds per token."""


def strictness(slo: Slo) -> str:
    """Return the SLO class under which a request with these targets is counted."""
    if slo.tpot_ms is None:
        return "ttft"
    end = next((end for end in CLASSES if slo.tpot_ms <= end), None)
    return f"tpot>{CLASSES[-1]}ms" if end is None else f"tpot<={end}ms"
