"""Routing: choose a request's stream pair, or its prefill and its decode worker in uneven pools.

    arrival, candidates ──▶ Router ──▶ Decision(candidate, score of each candidate, reason)

A `RouteCandidate` has a prefill worker and a decode worker; for a unified worker both are the same. In uneven
pools each half is chosen separately, with IDLE_WORKER as the other half of every candidate. So FlowGuard
chooses the prefill worker by C and Q, and the decode worker by M and L. Routers are pure functions: `turn`,
the number of requests routed before, is an argument.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import msgspec

from streamserve.contracts.cost import WorkerCosts


class WorkerLoad(msgspec.Struct, frozen=True):
    """A worker's load, from its last report and the fleet's own bookkeeping.

    * `queued`: requests that wait or are being prefilled. They have `queued_tokens` prompt tokens to compute.
      `long_prompts`: the tokens to compute of each queued prompt with more than STEP_TOKENS.
    * `timely_tokens`: queued prompt tokens of requests whose first token can still be in time. The last of
      these requests can be in time for `timely_for` more seconds.
    * `busy`: seconds for which the first of these requests has been computed.
    * `incoming`: sequences that will decode there. `decoding`: sequences that decode there now.
    * `blocks_live`: KV blocks that live requests hold, of `blocks_total`. `hit_rate`: share of all prompt
      tokens so far that were in the prefix cache.
    * `silence`: seconds since the last report.
    * `costs`: costs of its steps; None if unknown.
    * `speedup`: its present tokens a second divided by the tokens a second of plain decoding.
    """

    worker: str
    queued: int = 0
    queued_tokens: int = 0
    long_prompts: tuple[int, ...] = ()
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
    costs: WorkerCosts | None = None
    speedup: float = 1.0

    @property
    def queue(self) -> float:
        """Queue depth as a share of the maximum number of running sequences."""
        return self.queued / self.max_num_seqs

    @property
    def memory(self) -> float:
        """Share of the KV blocks that live requests hold."""
        return self.blocks_live / self.blocks_total

    @property
    def load(self) -> float:
        """FlowGuard's L: decoding sequences as a share of the maximum number of running sequences."""
        return self.decoding / self.max_num_seqs


class RouteCandidate(msgspec.Struct, frozen=True):
    """A prefill worker and a decode worker for a request. `cached` is the number of the prompt's tokens in
    the prefill worker's prefix cache. It includes `pending` tokens that are still being computed for another
    request."""

    prefill: WorkerLoad
    decode: WorkerLoad
    cached: int = 0
    pending: int = 0

    @property
    def memory(self) -> float:
        """FlowGuard's M: the memory share of the fuller of the two workers."""
        return max(self.prefill.memory, self.decode.memory)

    @property
    def silence(self) -> float:
        """Seconds since the last report of the worker that has been silent for longer."""
        return max(self.prefill.silence, self.decode.silence)


@dataclass(frozen=True)
class Arrival:
    """The request to be routed: its number of prompt tokens, and its latency targets in seconds (None: no
    target)."""

    prompt_tokens: int
    ttft: float | None = None
    tpot: float | None = None


@dataclass(frozen=True)
class Decision:
    """A routing decision: the index of the chosen candidate, the scores of all candidates (higher is better;
    None: not considered), and the reason."""

    chosen: int
    scores: tuple[float | None, ...]
    reason: str


Router = Callable[[Arrival, Sequence[RouteCandidate], int], Decision]
"""Takes the request, the candidates of live workers (at least one) and the turn."""


IDLE_WORKER = WorkerLoad(
    "",
    max_num_seqs=1 << 30,
    blocks_total=1 << 30,
    costs=WorkerCosts(prefill=lambda tokens: 0.0, decode=lambda sequences, kv_tokens: 0.0),
)
"""The other half of each candidate where prefill and decode worker are chosen separately: its steps cost
nothing, and it is never full."""


def or_inf(target: float | None) -> float:
    """Return the target; inf if there is none."""
    return inf if target is None else target


def cached_share(arrival: Arrival, candidate: RouteCandidate) -> float:
    """Return the share of the prompt that is in the candidate's prefix cache."""
    return candidate.cached / max(arrival.prompt_tokens, 1)


STEP_TOKENS = 512
"""Assumed query tokens of a prefill step: prompts with at most this many tokens to compute are served
together."""


def delay(arrival: Arrival, candidate: RouteCandidate) -> int:
    """Return the sum of delays of first tokens that the request causes or has at a candidate, in prompt
    tokens: its own tokens, the tokens served before it, and the delay that it causes to queued prompts.

    Prefill workers serve short prompts before long ones, so of two prompts the shorter one delays the other,
    by its tokens. A prompt whose cached prefix is pending waits for the whole queue, which computes that
    prefix.
    """
    own = max(arrival.prompt_tokens - candidate.cached, 1)
    prefill = candidate.prefill
    after_all = own + prefill.queued_tokens
    if candidate.pending or not prefill.long_prompts:
        return after_all
    longest = max(own, STEP_TOKENS)
    return after_all - sum(tokens - longest for tokens in prefill.long_prompts if tokens > longest)


def best(keys: Sequence[tuple[float, ...]], turn: int) -> int:
    """Return the index of the greatest key; candidates with equal keys take turns."""
    best = max(keys)
    equal = [index for index, key in enumerate(keys) if key == best]
    return equal[turn % len(equal)]
