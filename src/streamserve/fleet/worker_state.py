"""The state of a worker as the fleet knows it, and the topology of workers: unified workers, stream pairs,
uneven pools, and mixed fleets."""

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from streamserve.contracts.cost import WorkerCosts, worker_costs
from streamserve.fleet.process_state import ProcessState
from streamserve.fleet.prompt_queue import PromptQueue, Queued
from streamserve.protocol.config import Role
from streamserve.protocol.messages import Ready
from streamserve.protocol.reports import Report
from streamserve.scheduling.routing import WorkerLoad

RECENT = 0.2
"""Weight of the latest report in the moving average of the speculation speedup."""


@dataclass
class WorkerState(ProcessState[Ready]):
    """The last known state of a worker: its process, and its requests.

    - `prompts`: requests that wait for prefill or are in prefill. `computing_since`: when the prefill of the
      first complete prompt began.
    - `incoming`: requests that will decode at this worker; `decoding`: requests that decode here.
    - `deferring`: requests whose reservations the worker defers.
    - `draining`: it gets no new requests; `leaving`: it will be removed.
    """

    report: Report | None = None
    draining: bool = False
    leaving: bool = False
    prompts: PromptQueue = field(default_factory=PromptQueue)
    computing_since: float = 0.0
    incoming: set[str] = field(default_factory=set)
    deferring: set[str] = field(default_factory=set)
    decoding: set[str] = field(default_factory=set)
    costs: WorkerCosts | None = None
    speedup: float = 1.0

    def join(self, ready: Ready, now: float) -> None:
        """Record that the worker has loaded its model."""
        super().join(ready, now)
        self.costs = worker_costs(ready.cost, ready.kv_token_bytes, ready.block_size) if ready.cost else None
        self.speedup = 1.0

    def reported(self, report: Report) -> None:
        """Store a report, and update the speculation speedup from its difference to the previous report."""
        recent = _speedup(self.report, report) if self.report else None
        if recent is not None:
            self.speedup += RECENT * (recent - self.speedup)
        self.report = report

    @property
    def blocks(self) -> int:
        """Number of the worker's KV blocks; 0 before the worker is ready."""
        return self.ready.num_blocks if self.ready else 0

    @property
    def block_size(self) -> int:
        return self.ready.block_size if self.ready else 1

    @property
    def idle(self) -> bool:
        """Whether no request is known to be at this worker."""
        return not (self.prompts or self.incoming or self.decoding)

    def queue(self, request: str, queued: Queued, now: float) -> None:
        """Record that a request with a complete prompt has been sent to this worker."""
        if not self.prompts.computing:
            self.computing_since = now
        self.prompts.put(request, queued)

    def arrives(self, request: str, tokens: int) -> None:
        """Record that a prompt stream has `tokens` tokens to compute now. A stream with none counts as
        idle."""
        self.prompts.arrives(request, tokens)

    def started(self, request: str, now: float) -> None:
        """Record a request's first token: the prefill of the next request begins."""
        if self.prompts.remove(request):
            self.computing_since = now

    def decodes(self, request: str) -> None:
        """Record that a request's prompt is computed and its KV is at this worker."""
        self.incoming.discard(request)
        self.decoding.add(request)

    def expects(self, request: str) -> None:
        """Record that a request will decode at this worker once its prompt is computed."""
        self.decoding.discard(request)
        self.incoming.add(request)

    def leave(self, request: str) -> None:
        """Record that a request has left this worker."""
        self.prompts.remove(request)
        self.incoming.discard(request)
        self.deferring.discard(request)
        self.decoding.discard(request)

    def decode_seconds(self, sequences: int) -> float | None:
        """Return the predicted seconds per output token if `sequences` sequences decode here; None if step
        costs are unknown."""
        if self.costs is None:
            return None
        live = self.report.blocks_live if self.report else 0
        return self.costs.decode(sequences, live * self.block_size) / self.speedup

    def load(self, name: str, now: float) -> WorkerLoad:
        """Return the worker's load for a router. Prompt streams with tokens to compute count as queued, but
        delay no complete prompt."""
        report, ready, prompts = self.report, self.ready, self.prompts
        timely, until = prompts.timely(now)
        return WorkerLoad(
            worker=name,
            queued=len(prompts),
            queued_tokens=prompts.tokens,
            long_prompts=prompts.long_prompts,
            timely_tokens=timely,
            busy=now - self.computing_since if timely else 0.0,
            timely_for=until - now,
            incoming=len(self.incoming),
            decoding=len(self.decoding),
            max_num_seqs=ready.max_num_seqs if ready else 1,
            blocks_live=report.blocks_live if report else 0,
            blocks_total=max(self.blocks, 1),
            hit_rate=report.prefix_hits / report.prefix_queries if report and report.prefix_queries else 0.0,
            silence=now - self.heard_at,
            costs=self.costs,
            speedup=self.speedup,
        )


def _speedup(before: Report, now: Report) -> float | None:
    """Return the token throughput between two reports relative to plain steps: speculation yields more tokens
    per step but takes time to draft. None if nothing was drafted, or not by a drafter."""
    if not (before.speculation and now.speculation and before.step_parts and now.step_parts):
        return None
    tokens = now.generation_tokens - before.generation_tokens
    plain = tokens - (now.speculation.accepted - before.speculation.accepted)
    target = now.step_parts.target - before.step_parts.target
    draft = now.step_parts.draft - before.step_parts.draft
    if plain <= 0 or target <= 0:
        return None
    return tokens / plain * target / (target + draft)


@dataclass(frozen=True)
class Topology:
    """The workers by role: `unified`, `prefill` and `decode`. Equal numbers of prefill and decode workers
    form pairs in order; unequal numbers (uneven pools) are combined freely. Raises ValueError if no request
    could be served."""

    unified: tuple[str, ...] = ("unified-0",)
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.names or bool(self.prefill) != bool(self.decode):
            raise ValueError("workers are unified, or prefill and decode workers, at least one of each")

    @property
    def names(self) -> tuple[str, ...]:
        return self.unified + self.prefill + self.decode

    @cached_property
    def routes(self) -> tuple[tuple[str, str], ...]:
        """The prefill and the decode worker of each route. A unified worker is both. Uneven pools have no
        fixed routes."""
        pairs = zip(self.prefill, self.decode, strict=True) if self.paired else ()
        return (*_both(self.unified), *pairs)

    @cached_property
    def pools(self) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
        """The prefill workers and the decode workers, each as a pair of equal names."""
        return _both(self.prefill), _both(self.decode)

    def joined_by(self, names: Iterable[str]) -> "Topology":
        """Return the topology with further workers, in the order of their numbers. Raises ValueError if it
        cannot serve."""
        return by_role({*self.names, *names})

    def without(self, names: Container[str]) -> "Topology":
        """Return the topology without some workers. Raises ValueError if it cannot serve."""
        return by_role(name for name in self.names if name not in names)

    def complete(self, names: Container[str]) -> bool:
        """Return whether these workers include a route candidate: a unified worker, a pair, or one worker of
        each pool."""
        if any(name in names for name in self.unified):
            return True
        if self.paired:
            return any(a in names and b in names for a, b in zip(self.prefill, self.decode, strict=True))
        return any(name in names for name in self.prefill) and any(name in names for name in self.decode)

    def partners(self, worker: str) -> set[str]:
        """Return the worker and, in stream pairs, its partner."""
        pairs = zip(self.prefill, self.decode, strict=True) if self.paired else ()
        return next((set(pair) for pair in pairs if worker in pair), {worker})

    def prefill_of(self, decode: str) -> str | None:
        """Return the prefill worker of a decode worker's pair; None if it is in no pair."""
        pairs = zip(self.prefill, self.decode, strict=True) if self.paired else ()
        return next((front for front, back in pairs if back == decode), None)

    def candidates(self) -> list[frozenset[str]]:
        """Return the sets of workers that can serve a request: a unified worker, a pair, or one worker of
        each pool."""
        unified = [frozenset((name,)) for name in self.unified]
        if self.paired:
            return unified + [frozenset(pair) for pair in zip(self.prefill, self.decode, strict=True)]
        return unified + [frozenset((front, back)) for front in self.prefill for back in self.decode]

    def candidate_of(self, worker: str) -> frozenset[str]:
        """Return the first route candidate that contains a worker."""
        return next(candidate for candidate in self.candidates() if worker in candidate)

    @property
    def paired(self) -> bool:
        """Whether each prefill worker is paired with one decode worker."""
        return len(self.prefill) == len(self.decode)


def _both(workers: Iterable[str]) -> tuple[tuple[str, str], ...]:
    return tuple((name, name) for name in workers)


def role(worker: str) -> Role:
    """Return a worker's role, which is the prefix of its name."""
    prefix: Role = msgspec.convert(worker.rpartition("-")[0], Role)
    return prefix


def worker_number(worker: str) -> int:
    """Return a worker's number, which ends its name."""
    return int(worker.rpartition("-")[2])


def by_role(names: Iterable[str]) -> Topology:
    """Return the topology of workers by role, the prefix of their names, in the order of their numbers."""
    ordered = sorted(names, key=worker_number)
    unified, prefill, decode = (
        tuple(name for name in ordered if role(name) == own) for own in ("unified", "prefill", "decode")
    )
    return Topology(unified, prefill, decode)


def pairs(count: int) -> Topology:
    """Return a topology of `count` stream pairs."""
    return pools(count, count)


def pools(prefill: int, decode: int) -> Topology:
    """Return a topology of `prefill` prefill workers and `decode` decode workers."""
    return mixed(0, prefill, decode)


def unified(count: int) -> Topology:
    """Return a topology of `count` workers that do both prefill and decode."""
    return mixed(count, 0, 0)


def mixed(unified: int, prefill: int, decode: int) -> Topology:
    """Return a topology of `unified`, `prefill` and `decode` workers of each role."""
    return Topology(
        tuple(f"unified-{number}" for number in range(unified)),
        tuple(f"prefill-{number}" for number in range(prefill)),
        tuple(f"decode-{number}" for number in range(decode)),
    )
