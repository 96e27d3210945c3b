"""A drafter for simulated engines that is a client of draft services, without sockets. Client, services and
draft models run in the virtual time of the engine's executor."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streamserve.contracts.plan import DraftRequest
from streamserve.contracts.tree import TokenTree
from streamserve.draft_service.server.admission import Limits
from streamserve.draft_service.server.service import Service
from streamserve.draft_service.server.types import ServiceConfig, ServiceIdentity, TargetReply
from streamserve.draft_service.target.client import DraftClient, TargetIdentity
from streamserve.draft_service.target.links import ServiceMessage as ToService
from streamserve.protocol.drafting import decode_to_service, decode_to_target, encode
from streamserve.simulate.drafter import SimulatedDrafter
from streamserve.simulate.executor import CostExecutor

STEP_SECONDS, BATCH_SECONDS = 0.05, 0.003
CONFIG = ServiceConfig(num_blocks=40, block_size=8, max_read=16, limits=Limits(by_model=False))
"""A configuration with fewer blocks than a few long prompts need, so that KV is evicted and recomputed."""


@dataclass
class SimulatedService:
    """A service and its draft model, which detects KV that belongs to other tokens."""

    service: Service
    drafter: SimulatedDrafter
    read: int = 0
    """Number of tokens that were read before a tree was requested."""

    def run(self, now: float) -> list[TargetReply]:
        """Draft one batch; return the answers."""
        batch = self.service.loop.batch(now)
        if batch is None:
            return []
        self.drafter.release(batch.released)
        self.drafter.begin(batch.requests)
        ahead = [sequence.wants_tree for _, sequences in batch.members for sequence in sequences]
        self.read += sum(
            request.length - request.computed
            for request, wants_tree in zip(batch.requests, ahead, strict=True)
            if not wants_tree
        )
        return self.service.loop.drafted(batch, self.drafter.collect(now), now + BATCH_SECONDS)


class ServiceDrafter:
    """Implements contracts.plan.Drafter with `services` services. With probability `late` their trees arrive
    too late for the step; they are then used in the next step, as far as the text followed them."""

    group = None

    def __init__(
        self, executor: CostExecutor, accuracy: float, late: float, seed: int, services: int = 1
    ) -> None:
        self._executor = executor
        self._late = late
        self._random = random.Random(seed)
        self.now = 0.0
        vocabulary = executor.vocab_size
        identity = ServiceIdentity("draft", "t", "v", vocabulary, max_model_len=10_000)
        self.services = [
            SimulatedService(
                Service(identity, CONFIG, lambda: self._random.randbytes(16)),
                SimulatedDrafter(
                    CostExecutor(CONFIG.num_blocks, CONFIG.block_size, vocabulary, lambda *_: 0.0, groups=2),
                    accuracy,
                    seed=seed,
                ),
            )
            for _ in range(services)
        ]
        addresses = [f"tcp://host{number}:1" for number in range(services)]
        self.client = DraftClient(TargetIdentity("t", "v", "target", vocabulary), addresses, seed)
        self.trees = 0
        """Number of trees from services that the engine received."""
        self._by_service: Counter[int | None] = Counter()
        self._taken: dict[int, tuple[int, TokenTree]] = {}

    def maintain(self) -> None:
        """Run the work that a worker does between steps."""
        self.now += STEP_SECONDS
        self._exchange(self.client.tick(self.now))

    def foresee(self, requests: Sequence[DraftRequest]) -> None:
        self.client.sequences.foresee(requests)
        self.maintain()
        if self._random.random() >= self._late:  # while the target computes
            for number, simulated in enumerate(self.services):
                self._hear(number, simulated.run(self.now))

    @property
    def read_ahead(self) -> int:
        """Return the number of tokens that services read before trees were requested."""
        return sum(simulated.read for simulated in self.services)

    @property
    def shared_trees(self) -> int:
        """Return the number of trees from the service that sent the fewest; 0 if there is only one
        service."""
        count = len(self.services)
        return min(self._by_service[number] for number in range(count)) if count > 1 else 0

    def begin(self, requests: Sequence[DraftRequest]) -> None:
        self._learn(requests)
        self.maintain()
        self._exchange(self.client.begin(requests, self.now, 1.0, 0.01, 0.01))

    def collect(self, deadline: float) -> dict[int, TokenTree]:
        if self._random.random() >= self._late:
            self.run_services()
        trees = self.client.sequences.pop_trees()
        self.trees += len(trees)
        self._by_service.update(self.client.sequences.by_id[id].drafted_by for id in trees)
        self._taken = {id: (self.client.sequences.by_id[id].length, tree) for id, tree in trees.items()}
        return trees

    def release(self, ids: Sequence[int]) -> None:
        self.client.sequences.release(ids)

    def run_services(self, until: Callable[[], bool] = lambda: False) -> None:
        """Let all services work in parallel until no message waits."""
        working = True
        while working and not until():
            working = False
            answers = [simulated.run(self.now) for simulated in self.services]
            self.now += BATCH_SECONDS
            self._executor.seconds += BATCH_SECONDS
            for number, simulated in enumerate(self.services):
                working |= simulated.service.loop.backlog() > 0 or bool(answers[number])
                self._hear(number, answers[number])

    def _learn(self, requests: Sequence[DraftRequest]) -> None:
        for request in requests:
            if request.id in self._taken:
                length, tree = self._taken[request.id]
                accepted = len(tree.follow(request.tokens[length : request.length])) - 1
                self.client.gained(request.id, accepted, self.now)

    def _exchange(self, outs: Sequence[ToService]) -> None:
        for out in outs:
            message = decode_to_service(encode(out.message))
            self._hear(out.link, self.services[out.link].service.heard(b"target", message, self.now))

    def _hear(self, number: int, answers: Sequence[TargetReply]) -> None:
        for answer in answers:
            message = decode_to_target(encode(answer.message))
            self._exchange(self.client.heard(number, message, self.now))
