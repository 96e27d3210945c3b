"""The router at work: the places there are now, what each has cached, and why requests went where they did.

OpenRequest ──▶ Placement.choose ──▶ (worker, decode worker or None)
                 │ PrefixView: blocks each worker has, as far as the fleet knows
                 └ recent decisions, for GET /v1/router
"""

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamserve.control.crew import Crew
from streamserve.control.requests import OpenRequest
from streamserve.control.workers import WorkerState
from streamserve.policy.prefix import extend_hashes, namespace
from streamserve.policy.routing import Arrival, Decision, Place, Router, WorkerLoad

REMEMBERED_DECISIONS = 100


@dataclass(frozen=True)
class Explained:
    """A decision and what it was made on."""

    time: float
    request: str
    prompt_tokens: int
    places: tuple[str, ...]
    cached: tuple[int, ...]
    decision: Decision


class PrefixView:
    """Which full blocks each worker has computed, by their names. What a worker forgot is still listed
    until as many others came: a wrong guess costs a recomputation, never a wrong text."""

    def __init__(self) -> None:
        self._blocks: dict[str, OrderedDict[bytes, None]] = {}

    def cached(self, worker: str, hashes: Sequence[bytes]) -> int:
        """How many of the first blocks a worker has."""
        known: Mapping[bytes, None] = self._blocks.get(worker, {})
        count = 0
        while count < len(hashes) and hashes[count] in known:
            count += 1
        return count

    def learn(self, worker: str, hashes: Sequence[bytes], most: int) -> None:
        """A worker computes these blocks, and holds `most` at the most."""
        known = self._blocks.setdefault(worker, OrderedDict())
        for digest in hashes:
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > most:
            known.popitem(last=False)

    def forget(self, worker: str) -> None:
        """A worker's cache is gone."""
        self._blocks.pop(worker, None)


class Placement:
    """Chooses where requests go, among the workers that are ready and open for them."""

    def __init__(self, crew: Crew, router: Router) -> None:
        self._crew = crew
        self.recent: deque[Explained] = deque(maxlen=REMEMBERED_DECISIONS)
        self.view = PrefixView()
        self._router = router
        self._turn = 0

    def choose(self, request: OpenRequest, now: float) -> tuple[str, str | None] | None:
        """The worker that computes the prompt, and the one that decodes if it is another; None if nobody can
        take the request now."""
        candidates = self._candidates()
        if not all(candidates):
            return None
        workers = self._crew.workers
        chosen = [self._route(request, places, now) for places in candidates]
        self._turn += 1
        front = chosen[0][0]
        back = next((back for _, back in chosen if back and back != front), None)
        self.view.learn(front, self._hashes(request, workers[front]), workers[front].blocks)
        return front, back

    def _candidates(self) -> list[list[tuple[str, str]]]:
        """One list of places (prefill worker, decode worker) to choose from; of uneven pools two lists, of
        one half each."""
        topology = self._crew.topology
        ready = {name for name in self._crew.open() if self._crew.workers[name].ready}
        if topology.unified:
            return [[(name, name) for name in topology.unified if name in ready]]
        if topology.paired:
            matched = zip(topology.prefill, topology.decode, strict=True)
            return [[pair for pair in matched if ready.issuperset(pair)]]
        return [
            [(name, "") for name in topology.prefill if name in ready],
            [("", name) for name in topology.decode if name in ready],
        ]

    def _route(
        self, request: OpenRequest, candidates: Sequence[tuple[str, str]], now: float
    ) -> tuple[str, str]:
        workers = self._crew.workers
        names = {name for pair in candidates for name in pair}
        loads = {name: workers[name].load(name, now) if name else WorkerLoad("") for name in names}
        cached = [0] * len(candidates)
        if candidates[0][0]:
            worker = workers[candidates[0][0]]
            hashes = self._hashes(request, worker)
            cached = [self.view.cached(front, hashes) * worker.block_size for front, _ in candidates]
        places = [
            Place(loads[front], loads[back], count)
            for (front, back), count in zip(candidates, cached, strict=True)
        ]
        tokens, slo = len(request.opened.prompt), request.opened.params.slo
        arrival = Arrival(tokens, _seconds(slo.ttft_ms), _seconds(slo.tpot_ms))
        decision = self._router(arrival, places, self._turn)
        named = tuple(" → ".join(filter(None, dict.fromkeys(pair))) for pair in candidates)
        self.recent.append(Explained(now, request.opened.request, tokens, named, tuple(cached), decision))
        return candidates[decision.chosen]

    def _hashes(self, request: OpenRequest, worker: WorkerState) -> list[bytes]:
        """The names of the prompt's full blocks, as the workers' own prefix index has them."""
        if worker.ready is None:
            return []
        hashes: list[bytes] = []
        prompt = request.opened.prompt
        root = namespace(worker.ready.model.fingerprint, request.opened.cache_salt)
        extend_hashes(hashes, root, prompt, worker.block_size, len(prompt))
        return hashes


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000
