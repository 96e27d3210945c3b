"""A target's client for draft services, without sockets: the engine's draft requests go in, messages and
trees come out.

There is one link per service. All sequences of the target are drafted by one service, the *current* one. It
is changed when it fails, or when another is expected to answer clearly sooner. A request that is in flight is
not repeated. A late tree is used as far as the target's committed tokens agree with it.
"""

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from streamserve.draft_service.target.answers import LOST_IN_A_ROW, Fault, checked, unlikely
from streamserve.draft_service.target.links import Link, Out
from streamserve.draft_service.target.rebase import rebase
from streamserve.engine.plan import DraftRequest
from streamserve.protocol.drafting import (
    Ask,
    Busy,
    Delta,
    Draft,
    Drafts,
    Lost,
    Pong,
    Refused,
    ToTarget,
    Unknown,
    Welcome,
)
from streamserve.protocol.sampling import SamplingParams
from streamserve.speculation.tree import TokenTree

logger = logging.getLogger(__name__)

BETTER = 0.5
"""The current service is changed if another is expected to take at most this share of its answer time ..."""
SURE = 3
"""... in this many checks in a row."""
LOOK_SECONDS = 0.5
MOST_TOKENS, MOST_NODES, MOST_DELTAS = 1 << 17, 1 << 13, 1 << 10
"""Limits of one message; longer ones are split between sequences."""
LEAST_TOKENS = 256
TOKEN_BYTES = 5
"""The largest encoded size of a token, in bytes."""
OVERDUE = 4.0
"""A request counts as lost after this many times the usual answer time ..."""
LEAST_OVERDUE = 0.25


@dataclass
class _Told:
    """A sequence, the part of it that is synced to the service, and the tree received for its first `at`
    tokens."""

    params: SamplingParams
    epoch: int
    tokens: list[int] = field(default_factory=list)
    number: int = 0
    base: int = 0
    sent: int = 0
    asked: float | None = None
    """When the request in flight was sent, for the first `asked_at` tokens."""
    asked_at: int = 0
    asked_for: Delta | None = None
    """The latest request."""
    lost: int = 0
    """How often the service reported it as lost since its last tree."""
    tree: TokenTree | None = None
    at: int = 0


@dataclass(frozen=True)
class Identity:
    """How a target identifies itself to a service."""

    tokenizer: str
    vocabulary: str
    name: str
    vocab_size: int


class Client:
    """The client of one target for the services at `addresses`. `seed` makes targets choose differently among
    equal services. If `models` (fingerprints) are given, services with other draft models are not used."""

    def __init__(
        self,
        identity: Identity,
        addresses: Sequence[str],
        seed: int,
        models: Sequence[str] = (),
        ping: float = 1.0,
    ) -> None:
        self._random = random.Random(seed)
        self._vocab_size = identity.vocab_size
        self.links = [
            Link(number, address, identity.name, identity.tokenizer, identity.vocabulary, ping, tuple(models))
            for number, address in enumerate(addresses)
        ]
        for link in self.links:
            link.nonce = self._random.getrandbits(48)
        self.current: Link | None = None
        self.rejected: dict[str, int] = {}
        """The number of rejected answers, by fault."""
        self.moves = 0
        self.late = 0
        self.used = 0
        self._sequences: dict[int, _Told] = {}
        self._wanted: dict[int, DraftRequest] = {}
        self._released: list[int] = []
        self._looked = 0.0
        self._sure = 0

    def tick(self, now: float) -> list[Out]:
        """Return the handshakes and pings that are due, after a check whether to change the service."""
        outs = [out for link in self.links for out in link.tick(now)]
        self._choose(now)
        return outs

    def begin(
        self, requests: Sequence[DraftRequest], now: float, need: float, verify: float, plain: float
    ) -> list[Out]:
        """Send draft requests to the current service; the trees are useful for `need` seconds."""
        self._wanted = {request.id: request for request in requests}
        told = [(request, self._tell(request)) for request in requests]
        link = self.current
        if link is None or not link.usable(now):
            return []
        deltas = [
            self._delta(request, one, now)
            for request, one in told
            if request.depth and self._free(one, link, now) and link.reads(len(one.tokens) + request.nodes)
        ]
        released, self._released = self._released if deltas else [], [] if deltas else self._released
        asks = [
            Ask(
                tag=link.tag,
                channel=link.channel,
                deltas=part,
                released=released if not number else [],
                need=need,
                verify=verify if not number else 0.0,
                plain=plain,
            )
            for number, part in enumerate(_parts(deltas, link.max_bytes))
        ]
        return [link.send(ask, now) for ask in asks]

    def unreachable(self, number: int, now: float) -> None:
        """Record that a message for link `number` could not be sent: nothing listens there."""
        self.links[number].fail(now)
        self._choose(now)

    def heard(self, number: int, message: ToTarget, now: float) -> list[Out]:
        """Process a message of link `number`; return the messages to send at once."""
        link = self.links[number]
        if link.on_probation(now):
            return []
        if text := unlikely(message):
            self.reject(number, "timing", text, now)
            return []
        match message:
            case Drafts():
                if link.heard(message, now) and link is self.current:
                    for draft in message.drafts:
                        self._drafted(link, draft, message, now)
            case Lost(_, names):
                if link.heard(message, now) and link is self.current:
                    self._called_lost(link, names, now)
            case Pong() if not link.answers_ping(message):
                self.reject(number, "foreign", "a ping that was never sent is answered", now)
            case Welcome() | Refused() | Busy() | Pong() | Unknown():
                was = link.usable(now)
                link.heard(message, now)
                if was and not link.usable(now) and link is self.current:
                    self._leave()
        self._choose(now)
        return []

    def size(self, number: int, size: int, now: float) -> bool:
        """Return whether a message of `size` bytes from link `number` should be decoded."""
        link = self.links[number]
        if link.on_probation(now):
            return False
        if link.flood.over(size, now):
            self.reject(number, "flood", "it sends too much", now, certain=True)
            return False
        return True

    def reject(self, number: int, fault: Fault, text: str, now: float, certain: bool = False) -> None:
        """Drop and count a wrong answer of link `number`. Several in a short time, or one that makes the
        fault `certain`, put the service on probation."""
        link = self.links[number]
        self.rejected[fault] = self.rejected.get(fault, 0) + 1
        if link.punish(now, f"{fault}: {text}", certain):
            if link is self.current:
                self._leave()
            self._choose(now)

    def awaited(self, now: float, patience: float) -> list[int]:
        """Return the sequences of the latest `begin` that have no usable tree yet and were requested less
        than `patience` seconds ago: requests that were waited for in vain are not waited for again."""
        return [id for id in self._wanted if self._awaits(id, now, patience)]

    def _awaits(self, id: int, now: float, patience: float) -> bool:
        told = self._sequences[id]
        return (
            self._wanted[id].depth > 0
            and told.asked is not None
            and now - told.asked < patience
            and self._ready(told) is None
        )

    def usual(self) -> float:
        """Return the seconds that the current service usually takes to answer."""
        return self.current.usual if self.current else 0.0

    def take(self) -> dict[int, TokenTree]:
        """Return the trees received for the latest `begin`."""
        trees = {}
        for id, request in self._wanted.items():
            told = self._sequences[id]
            tree = self._ready(told)
            if tree is None or not request.depth:
                continue
            self.used += 1
            self.late += told.at < len(told.tokens)
            trees[id] = tree
            told.tree = None
        self._wanted = {}
        return trees

    def release(self, ids: Sequence[int]) -> None:
        """Forget these sequences."""
        for id in ids:
            if self._sequences.pop(id, None):
                self._released.append(id)

    def close(self, now: float) -> list[Out]:
        """End all sessions."""
        return [out for link in self.links for out in link.close(now)]

    def _tell(self, request: DraftRequest) -> _Told:
        """Update the stored tokens of a sequence from the engine's request."""
        told = self._sequences.get(request.id)
        if told is None:
            told = self._sequences[request.id] = _Told(_needed(request.params), request.epoch)
        if request.epoch != told.epoch or request.keep < len(told.tokens):
            # Sync it as a whole: the service finds the unchanged prefix itself and retains its KV.
            told.epoch, told.params = request.epoch, _needed(request.params)
            told.base = told.sent = 0
            told.tree, told.asked = None, None
        del told.tokens[request.keep :]
        told.tokens += request.new_tokens
        return told

    def _free(self, told: _Told, link: Link, now: float) -> bool:
        """Return whether to request a tree for a sequence: it has no usable tree and no request in flight."""
        if self._ready(told) is not None:
            return False
        if told.asked is not None and now - told.asked > max(OVERDUE * link.usual, LEAST_OVERDUE):
            told.asked = None
        return told.asked is None

    def _delta(self, request: DraftRequest, told: _Told, now: float) -> Delta:
        told.number += 1
        delta = Delta(
            sequence=request.id,
            epoch=told.epoch,
            number=told.number,
            base=told.base,
            keep=told.sent,
            tokens=told.tokens[told.sent :] or told.tokens[-1:],
            output=request.output,
            choice=request.choice,
            depth=request.depth,
            width=request.width,
            nodes=request.nodes,
            expansion=request.expansion,
            params=None if told.base else told.params,
        )
        if told.sent == len(told.tokens):  # repeated request: the last token is sent twice
            delta = msgspec.structs.replace(delta, keep=told.sent - 1)
        told.base, told.sent = told.number, len(told.tokens)
        told.asked, told.asked_at, told.asked_for = now, len(told.tokens), delta
        return delta

    def _drafted(self, link: Link, draft: Draft, message: Drafts, now: float) -> None:
        told = self._sequences.get(draft.sequence)
        if told is None or told.asked_for is None:
            return
        if draft.number > told.number or draft.number < 0:
            self.reject(link.number, "foreign", "what was never asked is answered", now)
            return
        if draft.number < told.number or told.asked is None or told.epoch != told.asked_for.epoch:
            return  # late
        if draft.epoch != told.epoch:
            self.reject(link.number, "foreign", "what was asked of another text is answered", now)
            return
        seconds, told.asked = now - told.asked, None
        if draft.tree is not None:
            root = told.tokens[told.asked_at - 1]
            try:
                told.tree = checked(draft.tree, root, told.asked_for, self._vocab_size)
            except ValueError as error:
                self.reject(link.number, "tree", str(error), now)
                return
            told.at, told.lost = told.asked_at, 0
        link.answered(seconds, message)

    def _ready(self, told: _Told) -> TokenTree | None:
        """Return the part of a sequence's tree after its present tokens, or None."""
        if told.tree is None or not 0 < told.at <= len(told.tokens):
            return None
        if told.tree.tokens[0] != told.tokens[told.at - 1]:
            return None
        return rebase(told.tree, told.tokens[told.at :])

    def _called_lost(self, link: Link, names: Sequence[int], now: float) -> None:
        """Handle a report that the service has lost the state of these sequences; sync those in flight
        anew."""
        known = self._sequences
        asked = [name for name in names if name in known and known[name].asked is not None]
        self._lost(asked)
        for name in asked:
            told = known[name]
            told.lost += 1
            if told.lost > LOST_IN_A_ROW:
                told.lost = 0
                self.reject(link.number, "lost", "it loses a text over and over", now)

    def _lost(self, names: Sequence[int]) -> None:
        for name in names:
            told = self._sequences.get(name)
            if told is not None:
                told.base = told.sent = 0
                told.asked = None

    def _leave(self) -> None:
        """Leave the current service; nothing is synced any more."""
        self.current = None
        self._released = []
        self._lost(list(self._sequences))

    def _choose(self, now: float) -> None:
        """Change the current service if it fails or another is clearly better."""
        if self.current is not None and not self.current.usable(now):
            logger.info("the draft service at %s answers no more", self.current.address)
            self._leave()
        usable = [link for link in self.links if link.usable(now)]
        if not usable:
            return
        best = min(usable, key=lambda link: (link.promise, link.active, self._random.random()))
        if self.current is None:
            self.current, self._sure = best, 0
            return
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now + self._random.random() * LOOK_SECONDS
        better = best is not self.current and best.promise < BETTER * self.current.promise
        self._sure = self._sure + 1 if better else 0
        if self._sure >= SURE:
            logger.info("changing over from draft service %s to %s", self.current.address, best.address)
            self.moves += 1
            self.current.abandon(list(self._sequences))
            self._leave()
            self.current, self._sure = best, 0


def _needed(params: SamplingParams) -> SamplingParams:
    """Return the parameters that a drafter needs. It does not need grammars, and stop strings are private to
    the target."""
    return msgspec.structs.replace(params, grammar=None, stop=(), logprobs=None, prompt_logprobs=None, n=1)


def _parts(deltas: Sequence[Delta], max_bytes: int) -> list[list[Delta]]:
    """Split the deltas into messages that fit a service with a limit of `max_bytes` per message."""
    most = min(MOST_TOKENS, max(max_bytes // (2 * TOKEN_BYTES), LEAST_TOKENS))
    parts: list[list[Delta]] = []
    tokens = nodes = 0
    for delta in deltas:
        if not parts or len(delta.tokens) > tokens or delta.nodes > nodes or len(parts[-1]) >= MOST_DELTAS:
            parts.append([])
            tokens, nodes = most, MOST_NODES
        parts[-1].append(delta)
        tokens -= len(delta.tokens)
        nodes -= delta.nodes
    return parts
