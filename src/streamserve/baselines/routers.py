"""The routers by name: FlowGuard, predictive routing, and baselines for comparison."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType

import numpy as np

from streamserve.scheduling.flowguard import (
    FlowGuard,
    Weights,
    check_weights,
    highest_score,
    weighted_score,
)
from streamserve.scheduling.predictive import Predictive
from streamserve.scheduling.routing import (
    Arrival,
    Decision,
    RouteCandidate,
    Router,
    best,
    cached_share,
    or_inf,
)

PUBLISHED_WEIGHTS = (0.4, 0.1, 0.3, 0.2)
"""FlowGuard's weights as published. With them, a cached prompt outweighs 43 queued requests on a worker that
may run 32: prompts with a common prefix crowd on a few of many pairs."""


@dataclass(frozen=True)
class PublishedFlowGuard:
    """FlowGuard as published. C is the prefill worker's rolling hit rate, independent of the prompt, and Q
    its queue depth. If all candidates are overloaded or stale, the shortest queue takes the request; a dead
    worker's empty queue wins. Raises ValueError as FlowGuard does."""

    weights: Weights = PUBLISHED_WEIGHTS
    overload: float = 0.85
    stale: float = 1.5

    def __post_init__(self) -> None:
        check_weights(self.weights, self.overload, self.stale)

    def __call__(self, arrival: Arrival, candidates: Sequence[RouteCandidate], turn: int) -> Decision:
        scores = [self.score(candidate) if self._eligible(candidate) else None for candidate in candidates]
        if any(score is not None for score in scores):
            return highest_score(candidates, scores, turn)
        queues = [(-candidate.prefill.queued,) for candidate in candidates]
        return Decision(best(queues, turn), tuple(scores), "all overloaded or stale: shortest queue")

    def score(self, candidate: RouteCandidate) -> float:
        """Return S of one candidate."""
        prefill = candidate.prefill
        return weighted_score(self.weights, prefill.hit_rate, prefill.queue, candidate)

    def _eligible(self, candidate: RouteCandidate) -> bool:
        overload = candidate.memory + 2 * candidate.prefill.queue
        return overload <= self.overload and candidate.silence <= self.stale


def round_robin(arrival: Arrival, candidates: Sequence[RouteCandidate], turn: int) -> Decision:
    """Choose the candidates in turn."""
    return Decision(turn % len(candidates), (None,) * len(candidates), "its turn")


@dataclass(frozen=True)
class RandomChoice:
    """Chooses uniformly at random. Equal seeds and turns give equal choices."""

    seed: int = 0

    def __call__(self, arrival: Arrival, candidates: Sequence[RouteCandidate], turn: int) -> Decision:
        chosen = int(np.random.default_rng((self.seed, turn)).integers(len(candidates)))
        return Decision(chosen, (None,) * len(candidates), "drawn at random")


def least_loaded(arrival: Arrival, candidates: Sequence[RouteCandidate], turn: int) -> Decision:
    """Choose the candidate with the fewest requests, queued and decoding."""
    counts = tuple(-float(candidate.prefill.queued + candidate.decode.decoding) for candidate in candidates)
    return Decision(best([(count,) for count in counts], turn), counts, "fewest requests")


def cache_aware(arrival: Arrival, candidates: Sequence[RouteCandidate], turn: int) -> Decision:
    """Choose the candidate with the longest cached prefix, as SGLang's router does. If the longest and the
    shortest queue are out of balance, choose the candidate with the fewest requests."""
    loads = [candidate.prefill.queued + candidate.decode.decoding for candidate in candidates]
    if max(loads) - min(loads) > 32 and max(loads) > 1.5 * min(loads):
        return least_loaded(arrival, candidates, turn)
    shares = tuple(cached_share(arrival, candidate) for candidate in candidates)
    keys = [(share, -load) for share, load in zip(shares, loads, strict=True)]
    return Decision(best(keys, turn), shares, "longest cached prefix")


@dataclass(frozen=True)
class ByClass:
    """Separate pipelines for classes of latency targets, a baseline of AdaServe. `ends` are ascending targets
    for the time per output token, in seconds. A request's class is the first end that its target does not
    exceed, or the last class. Among the candidates of a class, the one with the fewest requests is chosen.

    With `sizes`, one for each class, the decode workers are divided in the order of their numbers; prefill
    workers of uneven pools serve all classes. While a class has no decode worker, it shares the others.
    Without sizes, class i of n has every n-th candidate from the i-th on; if there are fewer candidates than
    classes, classes share them.

    Raises ValueError unless the ends are positive, finite and ascending, and each class has a size.
    """

    ends: tuple[float, ...]
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.ends or list(self.ends) != sorted({end for end in self.ends if 0 < end < inf}):
            raise ValueError(f"the ends of classes {self.ends} must be positive and ascend")
        if self.sizes and (len(self.sizes) != len(self.ends) + 1 or min(self.sizes) < 1):
            raise ValueError(f"{len(self.ends) + 1} classes need a size of at least 1 each, not {self.sizes}")

    def __call__(self, arrival: Arrival, candidates: Sequence[RouteCandidate], turn: int) -> Decision:
        slo_class = bisect_left(self.ends, or_inf(arrival.tpot))
        if self.sizes:
            members = [self._is_member(candidate, slo_class) for candidate in candidates]
        else:
            pipelines = min(len(self.ends) + 1, len(candidates))
            members = [index % pipelines == slo_class % pipelines for index in range(len(candidates))]
        if not any(members):
            members = [True] * len(candidates)
        scores = tuple(
            -float(candidate.prefill.queued + candidate.decode.decoding) if member else None
            for candidate, member in zip(candidates, members, strict=True)
        )
        keys = [(-inf if score is None else score,) for score in scores]
        return Decision(best(keys, turn), scores, f"class {slo_class}, fewest requests")

    def _is_member(self, candidate: RouteCandidate, slo_class: int) -> bool:
        """Return whether the candidate's decode worker belongs to a class. True for a candidate without a
        decode worker."""
        number = candidate.decode.worker.rpartition("-")[2]
        first = sum(self.sizes[:slo_class])
        return not number or first <= int(number) < first + self.sizes[slo_class]


ROUTERS: Mapping[str, Router] = MappingProxyType(
    {
        "flowguard": FlowGuard(),
        "flowguard-as-published": PublishedFlowGuard(),
        "round-robin": round_robin,
        "random": RandomChoice(),
        "least-loaded": least_loaded,
        "cache-aware": cache_aware,
        "predictive": Predictive(),
    }
)
"""The routers by name."""


def parse_router(text: str) -> Router:
    """Return the router with this name. FlowGuard's weights and threshold may follow, as in
    "flowguard:0.4,0.1,0.3,0.2:0.85"; ends of classes in milliseconds, as in "classes:20,50"; and numbers of
    their decode workers, as in "classes:20=2,50=1,other=3". Raises ValueError for anything else."""
    name, *arguments = text.split(":")
    if name == "classes":
        return _parse_classes(text, arguments)
    if name not in ROUTERS:
        raise ValueError(f"unknown router {name!r}: choose one of {', '.join(ROUTERS)}, classes:MS,…")
    router = ROUTERS[name]
    if not arguments:
        return router
    if not isinstance(router, FlowGuard | PublishedFlowGuard) or len(arguments) > 2:
        raise ValueError(f"{text!r}: only flowguard takes weights and a threshold, as 0.4,0.1,0.3,0.2:0.85")
    try:
        weights = tuple(map(float, arguments[0].split(",")))
        overload = float(arguments[1]) if len(arguments) > 1 else router.overload
    except ValueError:
        raise ValueError(f"{text!r}: weights and threshold must be numbers") from None
    if len(weights) != 4:
        raise ValueError(f"{text!r}: FlowGuard has four weights, not {len(weights)}")
    return replace(router, weights=weights, overload=overload)


def _parse_classes(text: str, arguments: Sequence[str]) -> ByClass:
    try:
        (classes,) = arguments
        if "=" not in classes:
            return ByClass(tuple(float(end) / 1000 for end in classes.split(",")))
        *bounded, (other, size) = [part.split("=") for part in classes.split(",")]
        if other != "other":
            raise ValueError("the last class must be other")
        ends = tuple(float(end) / 1000 for end, _ in bounded)
        return ByClass(ends, (*(int(count) for _, count in bounded), int(size)))
    except ValueError:
        raise ValueError(
            f"{text!r}: classes take ends in milliseconds that ascend, as 20,50, or with the number of "
            "decode workers of each class, as 20=2,50=1,other=3"
        ) from None
