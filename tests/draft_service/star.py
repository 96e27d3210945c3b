"""A StarSD system in virtual time: services and targets share one event heap and a faulty network."""

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from streamserve.contracts.plan import DraftRequest
from streamserve.contracts.tree import TokenTree
from streamserve.draft_service.server.service import Service
from streamserve.draft_service.server.types import DraftBatch, ServiceConfig, ServiceIdentity
from streamserve.draft_service.target.client import DraftClient, TargetIdentity
from streamserve.protocol.drafting import decode_to_service, decode_to_target, encode
from streamserve.protocol.sampling import SamplingParams

VOCAB = 50
IDENTITY = ServiceIdentity(
    model="draft", tokenizer="t", vocabulary="v", vocab_size=VOCAB, max_model_len=10_000
)


def next_token(tokens: list[int]) -> int:
    """Return the fake target's token after `tokens`."""
    return int.from_bytes(blake2b(bytes(tokens), digest_size=4).digest(), "little") % VOCAB


def draft_token(tokens: list[int], accepted: float = 0.8) -> int:
    """Return the fake draft model's token after `tokens`, which is mostly the target's token."""
    token = next_token(tokens)
    chance = blake2b(bytes([*tokens, 255]), digest_size=2).digest()
    return token if int.from_bytes(chance, "little") < accepted * 65536 else (token + 1) % VOCAB


def chain(tokens: list[int], depth: int, accepted: float = 0.8) -> TokenTree:
    grown = list(tokens)
    for _ in range(depth):
        grown.append(draft_token(grown, accepted))
    size = depth + 1
    accept = tuple(0.8**level for level in range(size))
    return TokenTree(tuple(grown[-size:]), tuple(range(-1, depth)), (1.0,) + (0.8,) * depth, accept)


class FakeDrafter:
    """contracts.plan.Drafter whose KV is the tokens that were written, block by block, so its draft tokens
    are wrong as soon as a block is stale or belongs to another sequence."""

    def __init__(self, num_blocks: int, block_size: int, accepted: float = 0.8) -> None:
        self.accepted = accepted
        self._size = block_size
        self._kv = [-1] * (num_blocks * block_size)
        self.known: dict[int, tuple[int, list[int]]] = {}

    def draft(self, batch: DraftBatch) -> dict[int, TokenTree]:
        for id in batch.released:
            self.known.pop(id, None)
        return {request.id: self._tree(request) for request in batch.requests}

    def _tree(self, request: DraftRequest) -> TokenTree:
        tokens = request.tokens[: request.length]
        epoch, known = self.known.get(request.id, (request.epoch, []))
        assert epoch != request.epoch or tokens[: len(known)] == known[: len(tokens)], "it is of other tokens"
        self.known[request.id] = request.epoch, tokens
        assert request.computed <= len(tokens)
        for place in range(min(request.computed, len(tokens) - 1), len(tokens)):
            self._kv[self._slot(request, place)] = tokens[place]
        read = [self._kv[self._slot(request, place)] for place in range(len(tokens))]
        assert read == tokens, "the KV is of other tokens"
        return chain(read, request.depth, self.accepted)

    def _slot(self, request: DraftRequest, place: int) -> int:
        return request.blocks[place // self._size] * self._size + place % self._size


@dataclass(frozen=True)
class Network:
    """Probabilities that a message is lost or sent twice, and its delay and jitter in seconds."""

    lost: float = 0.0
    twice: float = 0.0
    delay: float = 0.001
    jitter: float = 0.0


@dataclass(frozen=True)
class Place:
    """The properties in which services differ: `slower` multiplies the seconds of a batch, `far` is added to
    the delay of messages, and `accepted` is the probability that a draft token is the target's."""

    slower: float = 1.0
    far: float = 0.0
    accepted: float = 0.8


@dataclass(eq=False)
class Text:
    """The text of a sequence on a target."""

    id: int
    tokens: list[int]
    epoch: int = 0
    outputs: int = 0


@dataclass(eq=False)
class Target:
    """A target with `width` concurrent sequences. It requests trees, waits for at most `max_wait` seconds,
    and verifies for `verify` seconds."""

    name: str
    client: DraftClient
    number: int
    verify: float = 0.03
    max_wait: float = 0.2
    depth: int = 4
    length: int = 60
    width: int = 1
    texts: list[Text] = field(default_factory=list)
    opened: int = 0
    accepted: int = 0
    rounds: int = 0
    finished: list[list[int]] = field(default_factory=list)
    accepted_at: list[tuple[float, int]] = field(default_factory=list)
    waiting_since: float | None = None

    @property
    def max_waits(self) -> dict[int, float]:
        return {link.number: self.max_wait for link in self.client.links}

    def placed(self) -> list[int | None]:
        """Return the name of each sequence's service."""
        known = self.client.sequences.by_id
        return [known[text.id].service if text.id in known else None for text in self.texts]


class Star:
    """A system of `services` services and `targets` targets. `rng` is the only source of randomness."""

    def __init__(
        self,
        rng: random.Random,
        config: ServiceConfig,
        targets: int,
        services: int = 1,
        network: Network = Network(),
        cost: Callable[[DraftBatch], float] | None = None,
        places: Sequence[Place] = (),
        **fields: float,
    ) -> None:
        self.rng = rng
        self.now = 0.0
        self.network = network
        self.config = config
        self.places = list(places) or [Place()] * services
        self.edits = 0.0
        self.needs = True
        self._cost = cost or (lambda batch: 0.002 * max((r.depth for r in batch.requests), default=1) + 1e-5)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.services: list[Service | None] = []
        self.drafters: list[FakeDrafter] = []
        self._busy: list[bool] = []
        self._lives = [0] * services
        for number in range(services):
            self.services.append(None)
            self.drafters.append(FakeDrafter(0, 0))
            self._busy.append(False)
            self.start(number)
        self.targets = [self._target(number, services, fields) for number in range(targets)]
        for target in self.targets:
            self.after(rng.random() * 0.01, lambda target=target: self._begin(target))

    def start(self, number: int) -> None:
        """Start a service, without the state of an earlier one of that name."""
        self._lives[number] += 1
        secret = lambda: self.rng.randbytes(16)  # noqa: E731
        self.services[number] = Service(IDENTITY, self.config, secret)
        config = self.config
        accepted = self.places[number].accepted
        self.drafters[number] = FakeDrafter(config.num_blocks, config.block_size, accepted)
        self._busy[number] = False

    def kill(self, number: int) -> None:
        self._lives[number] += 1
        self.services[number] = None

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + seconds, next(self._order), action))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._heap and self._heap[0][0] <= until:
            self.now, _, action = heapq.heappop(self._heap)
            action()
        self.now = until

    def every(self, seconds: float, action: Callable[[], None]) -> None:
        def again() -> None:
            action()
            self.after(seconds, again)

        self.after(seconds, again)

    def _target(self, number: int, services: int, fields: dict[str, float]) -> Target:
        name = f"target-{number}"
        addresses = [f"tcp://host{n}:1" for n in range(services)]
        client = DraftClient(TargetIdentity("t", "v", name, VOCAB), addresses, self.rng.getrandbits(32))
        target = Target(name, client, number, **fields)  # type: ignore[arg-type]
        target.texts = [self._open(target) for _ in range(target.width)]
        return target

    def _open(self, target: Target) -> Text:
        target.opened += 1
        return Text(target.opened, [self.rng.randrange(VOCAB) for _ in range(self.rng.randint(1, 90))])

    def _carry(self, number: int, action: Callable[[], None]) -> None:
        network = self.network
        if self.rng.random() < network.lost:
            return
        for _ in range(2 if self.rng.random() < network.twice else 1):
            delay = network.delay + self.places[number].far + self.rng.random() * network.jitter
            self.after(delay, action)

    def _to_services(self, target: Target, outs: list) -> None:
        for out in outs:
            data, life = encode(out.message), self._lives[out.link]
            self._carry(
                out.link, lambda out=out, data=data, life=life: self._arrive(out.link, target, data, life)
            )

    def _arrive(self, number: int, target: Target, data: bytes, life: int) -> None:
        service = self.services[number]
        if service is not None:
            answers = service.heard(str(target.number).encode(), decode_to_service(data), self.now)
            self._to_targets(number, answers)
            self._draft(number)

    def _to_targets(self, number: int, outs: list) -> None:
        for out in outs:
            target, data = self.targets[int(out.peer)], encode(out.message)
            self._carry(number, lambda target=target, data=data: self._hear(target, number, data))

    def _hear(self, target: Target, number: int, data: bytes) -> None:
        self._to_services(target, target.client.heard(number, decode_to_target(data), self.now))
        if target.waiting_since is not None and not target.client.sequences.outstanding(
            self.now, target.max_waits
        ):
            self._collect(target)

    def _draft(self, number: int) -> None:
        """Run the service's work-conserving loop."""
        service, life = self.services[number], self._lives[number]
        if service is None or self._busy[number]:
            return
        batch = service.loop.batch(self.now)
        if batch is None:
            return
        trees = self.drafters[number].draft(batch)
        self._busy[number] = True

        def done() -> None:
            if self._lives[number] != life:
                return
            self._busy[number] = False
            self._to_targets(number, service.loop.drafted(batch, trees, self.now))
            self._draft(number)

        self.after(self.places[number].slower * self._cost(batch), done)

    def _begin(self, target: Target) -> None:
        for text in target.texts:
            if self.rng.random() < self.edits and text.outputs:
                self._edit(text)
        params = SamplingParams(temperature=0.0, max_tokens=target.length)
        requests = [
            DraftRequest(
                text.id, text.epoch, text.tokens, len(text.tokens), 0, text.outputs, params,
                target.depth, 1, target.depth, 0, [],
            )
            for text in target.texts
        ]  # fmt: skip
        client = target.client
        outs = client.tick(self.now)
        outs += client.begin(requests, self.now, target.max_wait, target.verify, target.verify)
        self._to_services(target, outs)
        target.waiting_since = since = self.now
        if not client.sequences.outstanding(self.now, target.max_waits):
            self._collect(target)
            return
        self.after(target.max_wait, lambda: self._collect(target) if target.waiting_since == since else None)

    def _edit(self, text: Text) -> None:
        """Change the last tokens, as an edit or a preemption does."""
        retained = self.rng.randint(0, len(text.tokens) - 1)
        text.tokens = text.tokens[:retained] + [self.rng.randrange(VOCAB) for _ in range(3)]
        text.epoch, text.outputs = text.epoch + 1, 0

    def _collect(self, target: Target) -> None:
        """Verify the received trees, and continue."""
        target.waiting_since = None
        trees = target.client.sequences.pop_trees()
        new = [(text, self._verify(text, trees.get(text.id))) for text in target.texts]
        drafted = set(trees)
        self.after(target.verify, lambda: self._commit(target, new, drafted))

    def _verify(self, text: Text, tree: TokenTree | None) -> list[int]:
        """Return the new tokens of a sequence: the accepted draft tokens, and one more token."""
        new = [next_token(text.tokens)]
        if tree is not None:
            assert tree.tokens[0] == text.tokens[-1], "a tree for other tokens"
            self._check(tree, text.tokens)
            node = tree.child(0, new[-1])
            while node is not None:
                new.append(next_token(text.tokens + new))
                node = tree.child(node, new[-1])
        return new

    def _check(self, tree: TokenTree, tokens: list[int]) -> None:
        """Assert that every draft token is what the draft model returns after exactly these tokens."""
        for node in range(1, len(tree)):
            path = [tree.tokens[n] for n in tree.path(node)]
            drafted = {draft_token(tokens + path[1:-1], place.accepted) for place in self.places}
            assert path[-1] in drafted, "a draft token after other tokens"

    def _commit(self, target: Target, new: list[tuple[Text, list[int]]], drafted: set[int]) -> None:
        target.rounds += 1
        for text, tokens in new:
            text.tokens += tokens
            text.outputs += len(tokens)
            target.accepted += len(tokens) - 1
            if text.id in drafted:
                target.client.gained(text.id, len(tokens) - 1, self.now)
            if len(tokens) > 1:
                target.accepted_at.append((self.now, len(tokens) - 1))
            if text.outputs >= target.length:
                target.finished.append(text.tokens)
                target.client.sequences.release([text.id])
                target.texts[target.texts.index(text)] = self._open(target)
        self._begin(target)
