"""Routing: which stream pair a request goes to, or which prefill and which decode worker of uneven pools.

    arrival, candidates ──▶ Router ──▶ Decision(candidate, score of each candidate, why)

A `RouteCandidate` is a prefill worker and a decode worker; a unified worker is both halves of its candidate.
In uneven pools each half is chosen separately, with the same idle worker as the other half of every
candidate: so FlowGuard chooses the prefill worker by C and Q, the decode worker by M and L. Routers are pure:
what varies from call to call (`turn`, the number of requests routed before) is an argument.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from types import MappingProxyType

import msgspec
import numpy as np


class WorkerLoad(msgspec.Struct, frozen=True):
    """A worker's load, from its last report and the fleet's own bookkeeping.

    * `queued`: requests that wait or are being prefilled, with `queued_tokens` prompt tokens.
    * `timely_tokens`: those of requests whose first token can still be in time; the last of them for
      `timely_for` more seconds.
    * `busy`: seconds that the first of them has been computed for.
    * `incoming`: sequences that will decode there; `decoding`: those that do.
    * `blocks_live`: of `blocks_total` KV blocks, those that live requests hold.
    * `silence`: seconds since the last report.
    * `costs`: what its steps cost, if that is known.
    * `speedup`: how much faster than plain steps it now generates tokens.
    """

    worker: str
    queued: int = 0
    queued_tokens: int = 0
    timely_tokens: int = 0
    timely_for: float = inf
    busy: float = 0.0
    incoming: int = 0
    decoding: int = 0
    max_num_seqs: int = 1
    blocks_live: int = 0
    blocks_total: int = 1
    hit_rate: float = 0.0
    silence: float = 0.0
    costs: "Costs | None" = None
    speedup: float = 1.0

    @property
    def queue(self) -> float:
        """Q: queue depth as a share of the maximum number of running sequences."""
        return self.queued / self.max_num_seqs

    @property
    def memory(self) -> float:
        """Share of the KV blocks that live requests hold."""
        return self.blocks_live / self.blocks_total

    @property
    def load(self) -> float:
        """L: decoding sequences as a share of the maximum number of running sequences."""
        return self.decoding / self.max_num_seqs


class RouteCandidate(msgspec.Struct, frozen=True):
    """A route candidate. `cached` of the prompt's tokens are in the prefill worker's prefix cache."""

    prefill: WorkerLoad
    decode: WorkerLoad
    cached: int = 0

    @property
    def memory(self) -> float:
        """M: the memory share of the fuller of the two workers."""
        return max(self.prefill.memory, self.decode.memory)

    @property
    def silence(self) -> float:
        return max(self.prefill.silence, self.decode.silence)


@dataclass(frozen=True)
class Arrival:
    """The request to be routed: the number of its prompt tokens, and its targets in seconds, if it has
    any."""

    prompt_tokens: int
    ttft: float | None = None
    tpot: float | None = None


@dataclass(frozen=True)
class Decision:
    """The chosen candidate by its index, all scores (higher is better; None: not considered), and the
    reason."""

    chosen: int
    scores: tuple[float | None, ...]
    reason: str


Router = Callable[[Arrival, Sequence[RouteCandidate], int], Decision]
"""Takes the arrival, the candidates of live workers (at least one) and the turn."""


PUBLISHED_WEIGHTS = (0.4, 0.1, 0.3, 0.2)
"""FlowGuard's weights as published. With them a cached prompt outweighs 43 queued requests where 32 may run:
groups of prompts with a common prefix crowd on a few of many pairs."""


@dataclass(frozen=True)
class FlowGuard:
    """StreamServe's router: S = a1·C + a2·(1−M) + a3·(1−Q) + a4·(1−L), the highest wins.

    C is the share of *this* prompt that is cached; `as_published` takes the worker's rolling hit rate
    instead, as in the paper. The default weights let the queue count most; `PUBLISHED_WEIGHTS` are the
    paper's. Candidates that are overloaded (M + 2·Q > `overload`) or have been silent for longer than `stale`
    seconds are skipped; if all are, the shortest queue among the live ones takes the request (`as_published`
    includes stale ones, where a dead worker's empty queue wins). Equal scores: shortest queue, then in turn.
    Raises ValueError unless the weights are not negative and sum to 1.
    """

    weights: tuple[float, float, float, float] = (0.1, 0.05, 0.8, 0.05)
    overload: float = 0.85
    stale: float = 1.5
    as_published: bool = False

    def __post_init__(self) -> None:
        if min(self.weights) < 0 or abs(sum(self.weights) - 1) > 1e-6:
            raise ValueError(f"FlowGuard's weights {self.weights} must not be negative and sum to 1")
        if not self.overload > 0 or not self.stale > 0:
            raise ValueError("FlowGuard's overload threshold and stale time must be positive")

    def __call__(self, arrival: Arrival, candidates: Sequence[RouteCandidate], turn: int) -> Decision:
        # Evaluated for every candidate on every request: written for speed. `score` says what it computes.
        a1, a2, a3, a4 = self.weights
        overload, stale, prompt = self.overload, self.stale, max(arrival.prompt_tokens, 1)
        scores: list[float | None] = []
        best, chosen, equal = -inf, 0, 0
        for candidate in candidates:
            prefill, decode = candidate.prefill, candidate.decode
            memory = prefill.blocks_live / prefill.blocks_total
            decode_memory = decode.blocks_live / decode.blocks_total
            memory = decode_memory if decode_memory > memory else memory
            queue = prefill.queued / prefill.max_num_seqs
            if memory + 2 * queue > overload or prefill.silence > stale or decode.silence > stale:
                scores.append(None)
                continue
            share = prefill.hit_rate if self.as_published else candidate.cached / prompt
            load = decode.decoding / decode.max_num_seqs
            score = a1 * share + a2 * (1 - memory) + a3 * (1 - queue) + a4 * (1 - load)
            if score > best:
                best, chosen, equal = score, len(scores), 1
            elif score == best:
                equal += 1
            scores.append(score)
        if equal == 1:
            return Decision(chosen, tuple(scores), "highest score")
        if equal:
            keys = [
                (-inf if score is None else score, -candidate.prefill.queued)
                for score, candidate in zip(scores, candidates, strict=True)
            ]
            return Decision(_best(keys, turn), tuple(scores), "highest score")
        fresh = [candidate.silence <= self.stale or self.as_published for candidate in candidates]
        queues = [(f or not any(fresh), -p.prefill.queued) for f, p in zip(fresh, candidates, strict=True)]
        return Decision(_best(queues, turn), tuple(scores), "all overloaded or stale: shortest queue")

    def score(self, arrival: Arrival, candidate: RouteCandidate) -> float:
        """Return S of one candidate."""
        a1, a2, a3, a4 = self.weights
        cached = candidate.prefill.hit_rate if self.as_published else _cached_share(arrival, candidate)
        queue, load = candidate.prefill.queue, candidate.decode.load
        return a1 * cached + a2 * (1 - candidate.memory) + a3 * (1 - queue) + a4 * (1 - load)


def round_robin(arrival: Arrival, candidates: Sequence[RouteCandidate], turn: int) -> Decision:
    """Choose the candidates in turn."""
    return Decision(turn % len(candidates), (None,) * len(candidates), "its turn")


@dataclass(frozen=True)
class RandomChoice:
    """Chooses uniformly at random, the same for the same seed and turn."""

    seed: int = 0

    def __call__(self, arrival: Arrival, candidates: Sequence[RouteCandidate], turn: int) -> Decision:
        chosen = int(np.random.default_rng((self.seed, turn)).integers(len(candidates)))
        return Decision(chosen, (None,) * len(candidates), "drawn at random")


def least_loaded(arrival: Arrival, candidates: Sequence[RouteCandidate], turn: int) -> Decision:
    """Choose the candidate with the fewest requests, queued and decoding."""
    counts = tuple(-float(candidate.prefill.queued + candidate.decode.decoding) for candidate in candidates)
    return Decision(_best([(count,) for count in counts], turn), counts, "fewest requests")


def cache_aware(arrival: Arrival, candidates: Sequence[RouteCandidate], turn: int) -> Decision:
    """Choose the candidate with the longest cached prefix, unless its queue is out of balance with the
    shortest (SGLang's router): then the one with the fewest requests."""
    loads = [candidate.prefill.queued + candidate.decode.decoding for candidate in candidates]
    if max(loads) - min(loads) > 32 and max(loads) > 1.5 * min(loads):
        return least_loaded(arrival, candidates, turn)
    shares = tuple(_cached_share(arrival, candidate) for candidate in candidates)
    keys = [(share, -load) for share, load in zip(shares, loads, strict=True)]
    return Decision(_best(keys, turn), shares, "longest cached prefix")


@dataclass(frozen=True)
class ByClass:
    """Separate pipelines for classes of latency targets, a baseline of AdaServe: of n classes the i-th has
    every n-th candidate from the i-th on; with fewer candidates, classes share. A request's class is the
    first of the ascending `ends`, in seconds, that its target for the time per output token does not exceed,
    or the last class. Among the class's candidates the fewest requests win. Raises ValueError unless the ends
    are positive, finite and ascending."""

    ends: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.ends or list(self.ends) != sorted({end for end in self.ends if 0 < end < inf}):
            raise ValueError(f"the ends of classes {self.ends} must be positive and ascend")

    def __call__(self, arrival: Arrival, candidates: Sequence[RouteCandidate], turn: int) -> Decision:
        slo_class = bisect_left(self.ends, _or_inf(arrival.tpot))
        pipelines = min(len(self.ends) + 1, len(candidates))
        scores = tuple(
            -float(candidate.prefill.queued + candidate.decode.decoding)
            if index % pipelines == slo_class % pipelines
            else None
            for index, candidate in enumerate(candidates)
        )
        keys = [(-inf if score is None else score,) for score in scores]
        return Decision(_best(keys, turn), scores, f"class {slo_class}, fewest requests")


@dataclass(frozen=True)
class Costs:
    """Costs of steps in seconds: a prefill of so many tokens, and a decode step by number of sequences and
    the KV tokens that they hold in all; each additional KV token makes it longer by `token`. `block_size`
    converts blocks into tokens."""

    prefill: Callable[[int], float]
    decode: Callable[[int, int], float]
    token: float = 0.0
    block_size: int = 16


IDLE_WORKER = WorkerLoad(
    "",
    max_num_seqs=1 << 30,
    blocks_total=1 << 30,
    costs=Costs(prefill=lambda tokens: 0.0, decode=lambda sequences, kv_tokens: 0.0),
)
"""The idle other half of each candidate where the halves of uneven pools are chosen separately."""


@dataclass(frozen=True)
class Predictive:
    """Predictive routing: the candidate where the fewest targets are missed, and among those the one where
    the request finishes first.

    TTFT = the prefill of what is not cached, in whole blocks so that few different costs are computed, after
    all queued prompts that can still be in time (workers put off the others), less what has been done of
    them. TPOT = a decode step of the sequences that decode, or will, with this one more, divided by the
    present speedup of speculation there. Each candidate is predicted by the step costs of its own workers;
    where they are not known, `fallback` chooses. A candidate whose KV is too full for the prompt, or whose
    sequence slots are taken, counts as missing a target. `output` is the expected number of output tokens;
    `stale` as FlowGuard's.
    """

    output: int = 128
    stale: float = 1.5
    fallback: Router = FlowGuard()

    def __call__(self, arrival: Arrival, candidates: Sequence[RouteCandidate], turn: int) -> Decision:
        # Evaluated for every candidate on every request: written for speed, as FlowGuard is.
        ttft_target, tpot_target = _or_inf(arrival.ttft), _or_inf(arrival.tpot)
        output, stale = self.output, self.stale
        total_tokens = arrival.prompt_tokens + output
        keys = []
        for candidate in candidates:
            prefill, decode = candidate.prefill, candidate.decode
            if prefill.costs is None or decode.costs is None:
                decision = self.fallback(arrival, candidates, turn)
                return replace(decision, reason=f"a step cost is unknown: {decision.reason}")
            ttft, tpot = self.predict(arrival, candidate, prefill.costs, decode.costs)
            full = total_tokens > (decode.blocks_total - decode.blocks_live) * decode.costs.block_size
            full = full or decode.decoding + decode.incoming >= decode.max_num_seqs
            fresh = prefill.silence <= stale and decode.silence <= stale
            keys.append(
                (fresh, -((ttft > ttft_target) + (tpot > tpot_target) + full), -(ttft + tpot * output))
            )
        chosen = _best(keys, turn)
        scores = tuple([score if fresh or not keys[chosen][0] else None for fresh, _, score in keys])
        return Decision(chosen, scores, "fewest missed targets, then earliest completion")

    def predict(
        self, arrival: Arrival, candidate: RouteCandidate, prefill_costs: Costs, decode_costs: Costs
    ) -> tuple[float, float]:
        """Return the predicted seconds to the first token and for each further one, by the step costs of
        either half."""
        prefill, decode = candidate.prefill, candidate.decode
        uncached_tokens, ahead = max(arrival.prompt_tokens - candidate.cached, 1), prefill.timely_tokens
        blocks = (uncached_tokens - 1) // prefill_costs.block_size + 1
        waiting = (
            min(max(prefill_costs.prefill(ahead) - prefill.busy, 0.0), prefill.timely_for) if ahead else 0.0
        )
        ttft = waiting + prefill_costs.prefill(blocks * prefill_costs.block_size)
        sequences = decode.decoding + decode.incoming + 1
        step = decode_costs.decode(sequences, decode.blocks_live * decode_costs.block_size)
        step += arrival.prompt_tokens * decode_costs.token
        if prefill is decode:  # prefilling delays the decoding sequences of a unified worker
            step += prefill_costs.prefill(prefill.queued_tokens) / self.output
        return ttft, step / decode.speedup


ROUTERS: Mapping[str, Router] = MappingProxyType(
    {
        "flowguard": FlowGuard(),
        "flowguard-as-published": FlowGuard(PUBLISHED_WEIGHTS, as_published=True),
        "round-robin": round_robin,
        "random": RandomChoice(),
        "least-loaded": least_loaded,
        "cache-aware": cache_aware,
        "predictive": Predictive(),
    }
)
"""The routers by name."""


def parse_router(text: str) -> Router:
    """Return the router of that name. FlowGuard's weights and threshold may follow as in
    "flowguard:0.4,0.1,0.3,0.2:0.85", the ends of classes, in milliseconds, as in "classes:20,50". Raises
    ValueError for anything else."""
    name, *arguments = text.split(":")
    if name == "classes":
        return _parse_classes(text, arguments)
    if name not in ROUTERS:
        raise ValueError(f"unknown router {name!r}: choose one of {', '.join(ROUTERS)}, classes:MS,…")
    router = ROUTERS[name]
    if not arguments:
        return router
    if not isinstance(router, FlowGuard) or len(arguments) > 2:
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
        (ends,) = arguments
        return ByClass(tuple(float(end) / 1000 for end in ends.split(",")))
    except ValueError:
        raise ValueError(f"{text!r}: classes take ends in milliseconds that ascend, as 20,50") from None


def _or_inf(target: float | None) -> float:
    return inf if target is None else target


def _cached_share(arrival: Arrival, candidate: RouteCandidate) -> float:
    return candidate.cached / max(arrival.prompt_tokens, 1)


def _best(keys: Sequence[tuple[float, ...]], turn: int) -> int:
    """Return the index of the greatest key; equal ones take turns."""
    best = max(keys)
    equal = [index for index, key in enumerate(keys) if key == best]
    return equal[turn % len(equal)]
