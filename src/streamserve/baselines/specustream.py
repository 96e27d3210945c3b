"""SpecuStream: the depth of a chain of draft tokens from the recent acceptance, the load and the throughput.

* *as published* is Algorithm 4: run once for each request, with a flow vector f of h numbers that starts at
  zero. It stores gradients and uses them as rates. So a constant acceptance a settles at mean(f) = a/2, and
  the magnitude hardly reflects volatility; the depth never goes below its base.
* *equations* uses equations 10, 15 and 16 for the throughput, which then feeds back into itself.
* *corrected* stores rates and adapts at every step. A rate is accepted / tested draft tokens: relative to all
  draft tokens, it would fall with the depth that it determines. It covers at least SAMPLE tested tokens: a
  rate over fewer tokens varies by chance, which is not volatility.

No variant takes the cost of verification into account.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from streamserve.speculation.outlook import Outlook
from streamserve.speculation.policies import SpeculationPolicy
from streamserve.speculation.shapes import PLAIN, TreeShape

HISTORY = 10
BASE_DEPTH, GAIN = 5, 5.0
MIN_DEPTH, MAX_DEPTH = 2, 20
TARGET = 400.0
"""Tokens per second with which the throughput is compared."""
LARGEST_LOAD = 0.9
SAMPLE = 32
"""Minimum number of tested draft tokens for one rate of *corrected*."""


@dataclass(frozen=True)
class Flow:
    """State between steps: the flow vector `values`, and the index `turn` of its next number.

    - `recent`: the recent throughput (*equations*).
    - `depths`, `micro_batch`: each decoding request's depth, and the latest cap (*as published*,
      *equations*).
    - `tested`, `accepted`: draft tokens tested and accepted since the last rate (*corrected*).
    """

    values: tuple[float, ...] = ()
    turn: int = 0
    recent: float = 0.0
    depths: Mapping[int, int] = field(default_factory=dict)
    micro_batch: int = 16
    tested: int = 0
    accepted: int = 0


def as_published(outlook: Outlook, flow: Flow, equations: bool = False) -> tuple[list[TreeShape], Flow]:
    """Run Algorithm 4. A request keeps the depth of its first step. A pass verifies draft tokens of at most
    `micro_batch` sequences, the highest-ranked ones; the others decode in the same batch without draft
    tokens."""
    known = {
        candidate.id: flow.depths[candidate.id]
        for candidate in outlook.candidates
        if candidate.id in flow.depths
    }
    for candidate in outlook.candidates:
        if candidate.id not in known:
            flow, known[candidate.id] = adapt(
                flow, outlook.acceptance or 0.0, outlook.load, outlook.throughput, equations
            )
    shapes = [
        TreeShape(known[candidate.id], 1) if position < flow.micro_batch else PLAIN
        for position, candidate in enumerate(outlook.candidates)
    ]
    return shapes, replace(flow, depths=known)


def adapt(
    flow: Flow, acceptance: float, load: float, throughput: float, equations: bool = False
) -> tuple[Flow, int]:
    """Run Algorithm 4 once: return the new flow, and the depth."""
    values = list(flow.values or (0.0,) * HISTORY)
    values[flow.turn] = acceptance - sum(values) / HISTORY
    magnitude = sum(map(abs, values)) / HISTORY
    recent = flow.recent or throughput
    measured = recent if equations else throughput
    scale = max(1.0, TARGET / max(measured, 1.0))
    depth = _clip(int(BASE_DEPTH + acceptance * magnitude * GAIN * _idle_share(load) * scale))
    projected = measured * (1 + acceptance * 0.5)
    after = Flow(
        values=tuple(values),
        turn=(flow.turn + 1) % HISTORY,
        recent=0.9 * recent + 0.1 * projected,
        depths=flow.depths,
        micro_batch=max(1, 16 * 5 // depth),
    )
    return after, depth


def corrected(outlook: Outlook, flow: Flow) -> tuple[list[TreeShape], Flow]:
    """Run the variant *corrected*: return the same depth for all candidates, and the new state. The depth is

        d = clip(round((base + gain · (2 max(0, m - 2v) - 1) · min(2, scale)) · (1 - min(load, 0.9))))

    * m, v: the mean of the flow vector's acceptance rates, and their mean absolute deviation from it.
    * base, gain, clip: the constants BASE_DEPTH and GAIN; the limits MIN_DEPTH and MAX_DEPTH.
    * scale: TARGET / throughput, at least 1. load: the share of sequence slots that are taken.
    """
    flow = replace(flow, tested=flow.tested + outlook.tested, accepted=flow.accepted + outlook.accepted)
    if flow.tested >= SAMPLE:
        rate = flow.accepted / flow.tested
        values = list(flow.values or (rate,) * HISTORY)
        values[flow.turn] = rate
        flow = replace(flow, values=tuple(values), turn=(flow.turn + 1) % HISTORY, tested=0, accepted=0)
    return [TreeShape(corrected_depth(flow, outlook.load, outlook.throughput), 1)] * len(
        outlook.candidates
    ), flow


def corrected_depth(flow: Flow, load: float, throughput: float) -> int:
    """Return the depth for the flow's rates, the load, and the throughput in tokens per second. Without rates
    it is the base depth, reduced by the load."""
    swing = 0.0
    if flow.values:
        mean = sum(flow.values) / HISTORY
        deviation = sum(abs(value - mean) for value in flow.values) / HISTORY
        swing = 2 * max(0.0, mean - 2 * deviation) - 1
    scale = min(2.0, max(1.0, TARGET / max(throughput, 1.0)))
    return _clip(round((BASE_DEPTH + GAIN * swing * scale) * _idle_share(load)))


def _idle_share(load: float) -> float:
    return 1 - min(load, LARGEST_LOAD)


def _clip(depth: int) -> int:
    return min(max(depth, MIN_DEPTH), MAX_DEPTH)


POLICIES = (
    SpeculationPolicy("specustream", corrected, state=Flow()),
    SpeculationPolicy("specustream-as-published", as_published, state=Flow()),
    SpeculationPolicy("specustream-equations", partial(as_published, equations=True), state=Flow()),
)
