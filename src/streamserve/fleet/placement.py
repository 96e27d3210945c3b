"""Request placement: the present route candidates, each worker's cached prefixes, and a log of routing
decisions.

OpenRequest ──▶ Placement.choose ──▶ Route: worker, decode worker or None, tokens to compute
                 │ PrefixView: blocks each worker has, as far as the fleet knows
                 └ recent decisions, for GET /v1/router
"""

from collections import OrderedDict, deque
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from streamserve.fleet.availability import Availability, Where
from streamserve.fleet.requests import OpenRequest
from streamserve.fleet.worker_state import Topology
from streamserve.protocol.messages import Cached
from streamserve.scheduling.predictive import Predictive
from streamserve.scheduling.prefix import extend_hashes, root_hash
from streamserve.scheduling.routing import IDLE_WORKER, Arrival, Decision, RouteCandidate, Router

REMEMBERED_DECISIONS = 100
CONSIDERED = 32
"""Maximum number of candidates compared for a request, so that a decision among a thousand takes no
longer."""
MOVE_GAIN = 1.1
"""A prompt stream moves only where the prediction is better by this factor: predictions err."""


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of an answer: the prompt `tokens` to compute before its first token, and the
    `seconds` to its end by the workers' step costs (None: unknown)."""

    tokens: int
    seconds: float | None


@dataclass(frozen=True)
class WorkerRoute:
    """Where a request goes: `worker` computes the prompt, and `decode` the output if it is another worker,
    else None. `tokens` is the number of prompt tokens to compute."""

    worker: str
    decode: str | None
    tokens: int


@dataclass(frozen=True)
class RoutingRecord:
    """A routing decision and its inputs. If the request did not go where the router decided, `taken` is where
    it went, and `reason` is why."""

    time: float
    request: str
    prompt_tokens: int
    candidates: tuple[str, ...]
    cached: tuple[int, ...]
    decision: Decision
    taken: str = ""
    reason: str = ""


class PrefixView:
    """The full KV blocks that each worker has cached, by hash, and whether the worker has reported them.
    Unreported blocks are estimated from the prompts that were sent to the worker. A wrong estimate costs a
    recomputation, never correctness; it is evicted (LRU) after enough other blocks."""

    def __init__(self) -> None:
        self._blocks: dict[str, OrderedDict[bytes, bool]] = {}

    def cached(self, worker: str, hashes: Sequence[bytes]) -> int:
        """Return how many leading blocks of `hashes` a worker has cached."""
        known: Mapping[bytes, bool] = self._blocks.get(worker, {})
        count = 0
        while count < len(hashes) and hashes[count] in known:
            count += 1
        return count

    def pending(self, worker: str, hashes: Sequence[bytes]) -> int:
        """Return how many blocks of `hashes`, all known to be at a worker, the worker has not reported yet:
        it is still computing them."""
        known: Mapping[bytes, bool] = self._blocks.get(worker, {})
        return sum(not known[digest] for digest in hashes)

    def holders(self, digest: bytes) -> set[str]:
        """Return the workers that have a block cached."""
        return {worker for worker, known in self._blocks.items() if digest in known}

    def learn(self, worker: str, hashes: Sequence[bytes], limit: int, reported: bool = False) -> None:
        """Record that a worker computes these blocks, or has `reported` them. At most `limit` blocks are kept
        for a worker."""
        known = self._blocks.setdefault(worker, OrderedDict())
        for digest in hashes:
            known[digest] = reported or known.get(digest, False)
            known.move_to_end(digest)
        while len(known) > limit:
            known.popitem(last=False)

    def update(self, worker: str, changes: Cached, limit: int) -> None:
        """Apply a worker's report of stored and dropped blocks."""
        self.learn(worker, changes.stored, limit, reported=True)
        known = self._blocks[worker]
        for digest in changes.dropped:
            known.pop(digest, None)

    def forget(self, worker: str) -> None:
        """Forget a worker's blocks: its cache is gone."""
        self._blocks.pop(worker, None)


class Placement:
    """Chooses workers for requests among the workers that are ready and may get new ones. A decode worker
    computes a prompt itself if at most `continue_tokens` tokens are missing in its cache."""

    def __init__(self, availability: Availability, router: Router, continue_tokens: int) -> None:
        self._availability = availability
        self._continue_tokens = continue_tokens
        self.recent: deque[RoutingRecord] = deque(maxlen=REMEMBERED_DECISIONS)
        self.view = PrefixView()
        self._router = router
        self._turn = self._pool_turn = 0
        self._recorded = 0

    def choose(
        self,
        request: OpenRequest,
        now: float,
        only: frozenset[str] | None = None,
        without: frozenset[str] = frozenset(),
        stay: tuple[str, str | None] | None = None,
    ) -> WorkerRoute | None:
        """Return the route of a request; None if no worker can take it now. If `only` is given, just these
        workers are candidates; otherwise all except `without`. A prompt stream that is computed at `stay`
        (worker, decode worker) stays there unless the move to the router's choice is worth its cost."""
        workers, availability = self._availability.workers, self._availability

        def takes(name: str) -> bool:
            if only is not None:
                return name in only and workers[name].ready is not None
            return (
                workers[name].ready is not None and name not in without and self._availability.takes_new(name)
            )

        ready = Where(takes)
        # Leaving workers get the request only if the others cannot serve.
        usable = (one for one in (availability.placing, availability.topology) if one.complete(ready))
        topology = next(usable, None)
        if topology is None:
            return None
        first = next(name for name in topology.names if name in ready)
        hashes = self._hashes(first, request, request.opened.prompt)
        recorded = self._recorded
        front, decode = self._choose_candidate(request, topology, ready, hashes, now)
        steps = self._recorded - recorded
        back = None if decode == front else decode
        self._turn += 1
        if back and self._continues(request, front, back, hashes):
            front, back = back, None
            self._overrule(steps, (front, back), "it has the prefix cached")
        if stay and stay != (front, back) and self._stays(request, stay, (front, back), hashes, ready, now):
            front, back = stay
            self._overrule(steps, stay, "stays: moving costs more than it gains")
        known = self.view.cached(front, hashes) * self._availability.workers[front].block_size
        # Not computed yet, but requests with this prefix should already find it there.
        self._learn(front, hashes)
        return WorkerRoute(front, back, max(len(request.opened.prompt) - known, 1))

    def _overrule(self, steps: int, taken: tuple[str, str | None], reason: str) -> None:
        """Record in the router's latest `steps` decisions that the request goes to `taken` instead."""
        label = " → ".join(filter(None, taken))
        for step in range(1, steps + 1):
            self.recent[-step] = replace(self.recent[-step], taken=label, reason=reason)

    def _stays(
        self,
        request: OpenRequest,
        stay: tuple[str, str | None],
        other: tuple[str, str | None],
        hashes: list[bytes],
        ready: Container[str],
        now: float,
    ) -> bool:
        """Return whether a prompt stream stays at its workers: the predicted time to the end of its answer is
        at most `MOVE_GAIN` times the time elsewhere, where more tokens have to be computed."""
        if any(name not in ready for name in stay if name):
            return False
        here = self._prediction(request, stay, hashes, now, request.arriving.computed)
        there = self._prediction(request, other, hashes, now)
        if here.seconds is None or there.seconds is None:  # without step costs, compare tokens
            return here.tokens <= there.tokens * MOVE_GAIN
        return here.seconds <= there.seconds * MOVE_GAIN

    def _prediction(
        self,
        request: OpenRequest,
        candidate: tuple[str, str | None],
        hashes: list[bytes],
        now: float,
        computed: int = 0,
    ) -> Prediction:
        """Return the predicted cost of answering a prompt at workers that have computed its first `computed`
        tokens."""
        name, decode_name = candidate[0], candidate[1] or candidate[0]
        front, back = self._availability.workers[name], self._availability.workers[decode_name]
        prefill, decode = front.load(name, now), back.load(decode_name, now)
        cached = max(computed, self.view.cached(name, hashes) * front.block_size)
        length = len(request.opened.prompt)
        tokens = prefill.timely_tokens + max(length - cached, 1)
        if prefill.costs is None or decode.costs is None:
            return Prediction(tokens, None)
        predictor = Predictive()
        routed = RouteCandidate(prefill, decode, cached)
        ttft, tpot = predictor.predict(Arrival(length), routed, prefill.costs, decode.costs)
        return Prediction(tokens, ttft + tpot * predictor.output)

    def ended(self, request: OpenRequest) -> None:
        """Record the blocks of a finished request. The worker that decoded it also has the KV of its output
        tokens, which are part of the prompt in a chat's next turn."""
        worker = request.decode or request.worker
        if not worker or self._availability.workers[worker].ready is None:
            return
        prompt = request.opened.prompt
        hashes = self._hashes(worker, request, prompt)
        for outputs in request.outputs.values():
            tokens = prompt[len(hashes) * self._availability.workers[worker].block_size :] + outputs[:-1]
            self._learn(worker, self._hashes(worker, request, tokens, hashes[-1:]))
        self._learn(worker, hashes)  # last, so that the prompt is evicted after all outputs

    def _continues(self, request: OpenRequest, front: str, back: str, hashes: list[bytes]) -> bool:
        """Return whether a decode worker should compute the rest of a prompt: it has a longer cached prefix
        than the prefill worker, and lacks at most `continue_tokens` tokens. This costs less than computing
        what the prefill worker lacks and transferring the KV."""
        known = self.view.cached(back, hashes)
        missing = len(request.opened.prompt) - known * self._availability.workers[back].block_size
        if missing > self._continue_tokens or request.opened.open:
            return False
        # Log-probabilities need the whole prompt computed.
        whole = request.opened.params.prompt_logprobs is not None
        return not whole and known > self.view.cached(front, hashes)

    def _learn(self, worker: str, hashes: list[bytes]) -> None:
        self.view.learn(worker, hashes, self._availability.workers[worker].blocks)

    def _choose_candidate(
        self, request: OpenRequest, topology: Topology, ready: Container[str], hashes: list[bytes], now: float
    ) -> tuple[str, str]:
        """Return the prefill and the decode worker, which are the same for a unified worker.

        The halves of uneven pools are chosen one after the other. In a mixed fleet the decode worker is
        chosen first: the router then compares the unified workers with each prefill worker combined with it.
        Of many candidates, only `CONSIDERED` are compared.
        """
        whole = self._some(topology.routes, ready, hashes)
        if topology.paired:
            return self._route(request, whole, hashes, now)
        fronts, backs = topology.pools
        prefill = [name for name, _ in self._some(fronts, ready, hashes)]
        decode = [("", name) for name, _ in self._some(backs, ready, [])]
        if not prefill or not decode:
            return self._route(request, whole, hashes, now)
        if not whole:
            front, _ = self._route(request, [(name, "") for name in prefill], hashes, now)
            return front, self._route(request, decode, hashes, now)[1]
        _, back = self._route(request, decode, hashes, now, self._pool_turn)
        chosen = self._route(request, whole + [(name, back) for name in prefill], hashes, now)
        # Equal decode workers take turns: a turn counts only if its worker was taken.
        self._pool_turn += chosen[1] == back
        return chosen

    def _some(
        self, candidates: Sequence[tuple[str, str]], ready: Container[str], hashes: list[bytes]
    ) -> list[tuple[str, str]]:
        """Return the candidates that are ready, at most `CONSIDERED`. Of more, up to half have the beginning
        of the prompt cached; the others take turns."""
        if len(candidates) <= CONSIDERED:
            return [pair for pair in candidates if pair[0] in ready and pair[1] in ready]
        start = self._turn * CONSIDERED % len(candidates)
        holders = self.view.holders(hashes[0]) if hashes else set()
        turned = _turned(candidates, start) if holders else iter(())
        cached = (pair for pair in turned if pair[0] in holders)
        holding = islice((pair for pair in cached if pair[0] in ready and pair[1] in ready), CONSIDERED // 2)
        usable = (pair for pair in _turned(candidates, start) if pair[0] in ready and pair[1] in ready)
        return list(dict.fromkeys(islice(chain(holding, usable), CONSIDERED)))

    def _route(
        self,
        request: OpenRequest,
        candidates: Sequence[tuple[str, str]],
        hashes: list[bytes],
        now: float,
        turn: int | None = None,
    ) -> tuple[str, str]:
        """Return the router's choice. `turn` decides between equal candidates, by default the number of the
        request."""
        workers = self._availability.workers
        names = {name for pair in candidates for name in pair}
        loads = {name: workers[name].load(name, now) if name else IDLE_WORKER for name in names}
        options = [
            RouteCandidate(loads[front], loads[back], *self._cached_tokens(front, hashes))
            for front, back in candidates
        ]
        opened = request.opened
        tokens, slo = len(opened.prompt), opened.params.slo
        if opened.open:
            tokens = max(tokens, opened.expected_tokens)
        arrival = Arrival(tokens, _seconds(slo.ttft_ms), _seconds(slo.tpot_ms))
        decision = self._router(arrival, options, self._turn if turn is None else turn)
        named = tuple(" → ".join(filter(None, dict.fromkeys(pair))) for pair in candidates)
        cached = tuple(option.cached for option in options)
        self._recorded += 1
        self.recent.append(RoutingRecord(now, opened.request, tokens, named, cached, decision))
        return candidates[decision.chosen]

    def _cached_tokens(self, worker: str, hashes: list[bytes]) -> tuple[int, int]:
        """Return how many tokens of a prompt a worker has cached, and how many of these are not computed yet.
        The worker is "" in candidates of which only the decode worker is chosen."""
        if not worker:
            return 0, 0
        blocks, size = self.view.cached(worker, hashes), self._availability.workers[worker].block_size
        if not blocks:
            return 0, 0
        return blocks * size, self.view.pending(worker, hashes[:blocks]) * size

    def _hashes(
        self, worker: str, request: OpenRequest, tokens: list[int], after: Sequence[bytes] = ()
    ) -> list[bytes]:
        """Return the hashes of the full blocks of a request's tokens, as in the workers' prefix index.
        `after` has the hash of the block before these tokens, if there is one."""
        state = self._availability.workers[worker]
        if state.ready is None:
            return []
        hashes: list[bytes] = []
        model = state.ready.model.kv_name
        root = after[0] if after else root_hash(model, request.cache_salt, request.opened.adapter)
        extend_hashes(hashes, root, tokens, state.block_size, len(tokens))
        return hashes


def _turned(candidates: Sequence[tuple[str, str]], start: int) -> Iterator[tuple[str, str]]:
    """Return the candidates rotated, so that `start` comes first."""
    return chain(islice(candidates, start, None), islice(candidates, start))


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
