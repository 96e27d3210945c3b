"""Routing: which stream pair a request goes to, or which prefill and which decode worker of uneven pools.

    arrival, candidates ──▶ Router ──▶ Decision(candidate, score of each candidate, why)

A `RouteCandidate` is a prefill worker and a decode worker; a unified worker is both halves of its candidate.
In uneven pools each half is chosen separately, with the same idle worker as the other half of every
candidate: so FlowGuard chooses the prefill worker by C and Q, the decode worker by M and L. Routers are pure:
what varies from call to call (`turn`, the number of requests routed before) is an argument.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

import msgspec


class WorkerLoad(msgspec.Struct, frozen=True):
    """A worker's load, from its last report and the fleet's own bookkeeping.

    * `queued`: requests that wait or are being prefilled, with `queued_tokens` prompt tokens to compute;
      `long_prompts`: those of each prompt that has more than STEP_TOKENS.
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
    """A route candidate. `cached` of the prompt's tokens are in the prefill worker's prefix cache; `pending`
    ones of them only will be: they are being computed for another request."""

    prefill: WorkerLoad
    decode: WorkerLoad
    cached: int = 0
    pending: int = 0

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


def or_inf(target: float | None) -> float:
    """Return the target; inf if there is none."""
    return inf if target is None else target


def cached_share(arrival: Arrival, candidate: RouteCandidate) -> float:
    """Return the share of the prompt that is in the candidate's prefix cache."""
    return candidate.cached / max(arrival.prompt_tokens, 1)


STEP_TOKENS = 512
"""Query tokens of a prefill step: prompts that have no more to compute are served together."""


def delay(arrival: Arrival, candidate: RouteCandidate) -> int:
    """Return the prompt tokens by which first tokens are delayed at a candidate: this one by its own and by
    what is served before it, and others by its own. Prefill workers serve short prompts before long ones, so
    of two prompts the shorter one delays the other, by its tokens. A prompt whose prefix is pending waits for
    the whole queue, where it is computed."""
    own = max(arrival.prompt_tokens - candidate.cached, 1)
    prefill = candidate.prefill
    after_all = own + prefill.queued_tokens
    if candidate.pending or not prefill.long_prompts:
        return after_all
    longest = max(own, STEP_TOKENS)
    return after_all - sum(tokens - longest for tokens in prefill.long_prompts if tokens > longest)


def best(keys: Sequence[tuple[float, ...]], turn: int) -> int:
    """Return the index of the greatest key; equal ones take turns."""
    best = max(keys)
    equal = [index for index, key in enumerate(keys) if key == best]
    return equal[turn % len(equal)]
