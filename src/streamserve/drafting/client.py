"""A target's side of draft services, without sockets: what the engine wants goes in, messages and trees come
out.

One link a service. The target's sequences are all drafted for by one of them, the *current* one; it is
changed when it fails, or when another would clearly answer sooner. A request that is on its way is not
repeated. A tree that comes late is used as far as the target went the way it guessed.
"""

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from streamserve.drafting.links import Link, Out
from streamserve.drafting.rebase import rebase
from streamserve.engine.plan import DraftRequest
from streamserve.policy.tree import TokenTree
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
    Tree,
    Unknown,
    Welcome,
)
from streamserve.protocol.sampling import SamplingParams

logger = logging.getLogger(__name__)

BETTER = 0.5
"""Another service must promise its trees in this share of the time."""
SURE = 3
"""So many looks in a row."""
LOOK_SECONDS = 0.5
MOST_TOKENS = 1 << 17
"""Of one message: longer ones are split between sequences."""
OVERDUE = 4.0
"""After so many times the usual a request counts as lost."""
LEAST_OVERDUE = 0.25


@dataclass
class _Told:
    """A sequence, what of it the service was told, and the tree that came for its first `at` tokens."""

    params: SamplingParams
    epoch: int
    tokens: list[int] = field(default_factory=list)
    number: int = 0
    base: int = 0
    sent: int = 0
    asked: float | None = None
    """When the request left that is on its way, for the first `asked_at` tokens."""
    asked_at: int = 0
    tree: TokenTree | None = None
    at: int = 0


@dataclass(frozen=True)
class Identity:
    """What a target says of itself."""

    tokenizer: str
    vocabulary: str
    name: str


class Client:
    """`addresses` are those of the services; `seed` spreads targets over equal ones. With `models`,
    fingerprints, other draft models are not used."""

    def __init__(
        self,
        identity: Identity,
        addresses: Sequence[str],
        seed: int,
        models: Sequence[str] = (),
        ping: float = 1.0,
    ) -> None:
        self._random = random.Random(seed)
        self.links = [
            Link(number, address, identity.name, identity.tokenizer, identity.vocabulary, ping, tuple(models))
            for number, address in enumerate(addresses)
        ]
        for link in self.links:
            link.nonce = self._random.getrandbits(48)
        self.current: Link | None = None
        self.moves = 0
        self.late = 0
        self.used = 0
        self._sequences: dict[int, _Told] = {}
        self._wanted: dict[int, DraftRequest] = {}
        self._released: list[int] = []
        self._looked = 0.0
        self._sure = 0

    def tick(self, now: float) -> list[Out]:
        """Handshakes and pings that are due, and whether to change over to another service."""
        outs = [out for link in self.links for out in link.tick(now)]
        self._choose(now)
        return outs

    def begin(
        self, requests: Sequence[DraftRequest], now: float, need: float, verify: float, plain: float
    ) -> list[Out]:
        """Ask for these; the trees are of use for `need` seconds."""
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
            for number, part in enumerate(_parts(deltas))
        ]
        return [link.send(ask, now) for ask in asks]

    def unreachable(self, number: int, now: float) -> None:
        """A message for link `number` could not be sent: nobody is there."""
        self.links[number].fail(now)
        self._choose(now)

    def heard(self, number: int, message: ToTarget, now: float) -> list[Out]:
        """Take a message of link `number`; returns what it causes at once."""
        link = self.links[number]
        match message:
            case Drafts():
                if link.heard(message, now) and link is self.current:
                    for draft in message.drafts:
                        self._drafted(link, draft, message, now)
            case Lost(_, names):
                if link.heard(message, now) and link is self.current:
                    self._lost(names)
            case Welcome() | Refused() | Busy() | Pong() | Unknown():
                was = link.usable(now)
                link.heard(message, now)
                if was and not link.usable(now) and link is self.current:
                    self._leave()
        self._choose(now)
        return []

    def awaited(self, now: float, patience: float) -> list[int]:
        """Sequences of the latest `begin` for which nothing of use is there yet, and which were asked for
        less than `patience` seconds ago: who did not answer by then is not waited for again."""
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
        """Seconds that the current service usually takes to answer."""
        return self.current.usual if self.current else 0.0

    def take(self) -> dict[int, TokenTree]:
        """The trees for the latest `begin`, as far as they are there."""
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
        """Keep a sequence's tokens as the engine tells them."""
        told = self._sequences.get(request.id)
        if told is None:
            told = self._sequences[request.id] = _Told(_needed(request.params), request.epoch)
        if request.epoch != told.epoch or request.keep < len(told.tokens):
            # Told as a whole: the service sees itself what is as it was, and keeps its KV.
            told.epoch, told.params = request.epoch, _needed(request.params)
            told.base = told.sent = 0
            told.tree, told.asked = None, None
        del told.tokens[request.keep :]
        told.tokens += request.new_tokens
        return told

    def _free(self, told: _Told, link: Link, now: float) -> bool:
        """Whether a sequence is to be asked about: nothing is there, and nothing is on its way."""
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
        if told.sent == len(told.tokens):  # asked again about the same tokens: the last is told twice
            delta = msgspec.structs.replace(delta, keep=told.sent - 1)
        told.base, told.sent = told.number, len(told.tokens)
        told.asked, told.asked_at = now, len(told.tokens)
        return delta

    def _drafted(self, link: Link, draft: Draft, message: Drafts, now: float) -> None:
        told = self._sequences.get(draft.sequence)
        if told is None or draft.epoch != told.epoch or draft.number != told.number or told.asked is None:
            return
        link.answered(now - told.asked, message)
        told.asked = None
        if draft.tree is not None:
            told.tree, told.at = _tree(draft.tree), told.asked_at

    def _ready(self, told: _Told) -> TokenTree | None:
        """What is left of a sequence's tree behind the tokens it has by now."""
        if told.tree is None or not 0 < told.at <= len(told.tokens):
            return None
        if told.tree.tokens[0] != told.tokens[told.at - 1]:
            return None
        return rebase(told.tree, told.tokens[told.at :])

    def _lost(self, names: Sequence[int]) -> None:
        for name in names:
            told = self._sequences.get(name)
            if told is not None:
                told.base = told.sent = 0
                told.asked = None

    def _leave(self) -> None:
        """The current service has no state of ours any more."""
        self.current = None
        self._released = []
        self._lost(list(self._sequences))

    def _choose(self, now: float) -> None:
        """Stay with the current service unless it fails or another is clearly better."""
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
    """What a drafter must know of a request; grammars are not for it, and stop strings nobody's business."""
    return msgspec.structs.replace(params, grammar=None, stop=(), logprobs=None, prompt_logprobs=None, n=1)


def _parts(deltas: Sequence[Delta]) -> list[list[Delta]]:
    """The deltas in messages that are not too long."""
    parts: list[list[Delta]] = []
    room = 0
    for delta in deltas:
        if not parts or len(delta.tokens) > room:
            parts.append([])
            room = MOST_TOKENS
        parts[-1].append(delta)
        room -= len(delta.tokens)
    return parts


def _tree(tree: Tree) -> TokenTree | None:
    """A service's tree, if it is one: what comes from elsewhere is not taken on trust."""
    try:
        return TokenTree(tree.tokens, tree.parents, tree.scores, tree.accept).check()
    except ValueError:
        return None
