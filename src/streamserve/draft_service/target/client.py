"""A target's client for draft services, without sockets: the engine's draft requests go in, messages and
trees come out.

There is one link per service. All sequences of the target are drafted by one service, the *current* one. It
is changed when it fails, or when another is expected to answer clearly sooner. A request that is in flight is
not repeated. A late tree is used as far as the target's committed tokens agree with it.
"""

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from streamserve.draft_service.target.answers import LOST_IN_A_ROW, Fault, timing_error, validated_tree
from streamserve.draft_service.target.links import Link, Out
from streamserve.draft_service.target.rebase import rebase
from streamserve.engine.plan import DraftRequest
from streamserve.protocol.drafting import (
    Busy,
    Delta,
    Draft,
    DraftRequests,
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

SWITCH_RATIO = 0.5
"""The current service is changed if another is expected to take at most this share of its answer time ..."""
SWITCH_CHECKS = 3
"""... in this many checks in a row."""
SWITCH_CHECK_SECONDS = 0.5
MAX_TOKENS, MAX_NODES, MAX_DELTAS = 1 << 17, 1 << 13, 1 << 10
"""Limits of one message; longer ones are split between sequences."""
MIN_TOKENS = 256
TOKEN_BYTES = 5
"""The largest encoded size of a token, in bytes."""
OVERDUE_FACTOR = 4.0
"""A request counts as lost after this many times the usual answer time ..."""
MIN_OVERDUE_SECONDS = 0.25


@dataclass
class _SyncedSequence:
    """A sequence: the first `length` of the engine's `tokens`, of which `sent` are synced to the service, and
    the tree received for its first `at` tokens."""

    params: SamplingParams
    epoch: int
    tokens: list[int]
    length: int
    number: int = 0
    base: int = 0
    sent: int = 0
    requested_at: float | None = None
    """When the request in flight was sent, for the first `requested_length` tokens."""
    requested_length: int = 0
    last_delta: Delta | None = None
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
        self._sequences: dict[int, _SyncedSequence] = {}
        self._requests: dict[int, DraftRequest] = {}
        self._released: list[int] = []
        self._checked_at = 0.0
        self._better_checks = 0

    def tick(self, now: float) -> list[Out]:
        """Return the handshakes and pings that are due, after a check whether to change the service."""
        outs = [out for link in self.links for out in link.tick(now)]
        self._choose(now)
        return outs

    def begin(
        self, requests: Sequence[DraftRequest], now: float, need: float, verify: float, plain: float
    ) -> list[Out]:
        """Send draft requests to the current service; the trees are useful for `need` seconds."""
        self._requests = {request.id: request for request in requests}
        synced = [(request, self._sync(request)) for request in requests]
        link = self.current
        if link is None or not link.usable(now):
            return []
        deltas = [
            self._delta(request, sequence, now)
            for request, sequence in synced
            if request.depth
            and self._may_request(sequence, link, now)
            and link.fits_context(sequence.length + request.nodes)
        ]
        released, self._released = self._released if deltas else [], [] if deltas else self._released
        messages = [
            DraftRequests(
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
        return [link.send(message, now) for message in messages]

    def unreachable(self, number: int, now: float) -> None:
        """Record that a message for link `number` could not be sent: nothing listens there."""
        self.links[number].fail(now)
        self._choose(now)

    def heard(self, number: int, message: ToTarget, now: float) -> list[Out]:
        """Process a message of link `number`; return the messages to send at once."""
        link = self.links[number]
        if link.on_probation(now):
            return []
        if text := timing_error(message):
            self.reject(number, "timing", text, now)
            return []
        match message:
            case Drafts():
                if link.heard(message, now) and link is self.current:
                    for draft in message.drafts:
                        self._drafted(link, draft, message, now)
            case Lost(_, names):
                if link.heard(message, now) and link is self.current:
                    self._handle_lost(link, names, now)
            case Pong() if not link.answers_ping(message):
                self.reject(number, "foreign", "it answers a ping that was never sent", now)
            case Welcome() | Refused() | Busy() | Pong() | Unknown():
                was_usable = link.usable(now)
                link.heard(message, now)
                if was_usable and not link.usable(now) and link is self.current:
                    self._leave()
        self._choose(now)
        return []

    def size(self, number: int, size: int, now: float) -> bool:
        """Return whether a message of `size` bytes from link `number` should be decoded."""
        link = self.links[number]
        if link.on_probation(now):
            return False
        if link.flood.over(size, now):
            self.reject(number, "flood", "it exceeds the rate limits", now, certain=True)
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

    def outstanding(self, now: float, max_wait: float) -> list[int]:
        """Return the sequences of the latest `begin` that have no usable tree yet and were requested less
        than `max_wait` seconds ago: requests that were waited for in vain are not waited for again."""
        return [id for id in self._requests if self._is_outstanding(id, now, max_wait)]

    def _is_outstanding(self, id: int, now: float, max_wait: float) -> bool:
        sequence = self._sequences[id]
        return (
            self._requests[id].depth > 0
            and sequence.requested_at is not None
            and now - sequence.requested_at < max_wait
            and self._ready(sequence) is None
        )

    def usual(self) -> float:
        """Return the seconds that the current service usually takes to answer."""
        return self.current.usual if self.current else 0.0

    def take(self) -> dict[int, TokenTree]:
        """Return the trees received for the latest `begin`."""
        trees = {}
        for id, request in self._requests.items():
            sequence = self._sequences[id]
            tree = self._ready(sequence)
            if tree is None or not request.depth:
                continue
            self.used += 1
            self.late += sequence.at < sequence.length
            trees[id] = tree
            sequence.tree = None
        self._requests = {}
        return trees

    def release(self, ids: Sequence[int]) -> None:
        """Forget these sequences."""
        for id in ids:
            if self._sequences.pop(id, None):
                self._released.append(id)

    def close(self, now: float) -> list[Out]:
        """End all sessions."""
        return [out for link in self.links for out in link.close(now)]

    def _sync(self, request: DraftRequest) -> _SyncedSequence:
        """Update the known tokens of a sequence from the engine's request."""
        sequence = self._sequences.get(request.id)
        if sequence is None:
            sequence = self._sequences[request.id] = _SyncedSequence(
                _needed(request.params), request.epoch, request.tokens, request.length
            )
        if request.epoch != sequence.epoch or request.length < sequence.length:
            # Sync it as a whole: the service finds the unchanged prefix itself and retains its KV.
            sequence.epoch, sequence.params = request.epoch, _needed(request.params)
            sequence.base = sequence.sent = 0
            sequence.tree, sequence.requested_at = None, None
        sequence.tokens, sequence.length = request.tokens, request.length
        return sequence

    def _may_request(self, sequence: _SyncedSequence, link: Link, now: float) -> bool:
        """Return whether to request a tree for a sequence: it has no usable tree and no request in flight."""
        if self._ready(sequence) is not None:
            return False
        if sequence.requested_at is not None and now - sequence.requested_at > max(
            OVERDUE_FACTOR * link.usual, MIN_OVERDUE_SECONDS
        ):
            sequence.requested_at = None
        return sequence.requested_at is None

    def _delta(self, request: DraftRequest, sequence: _SyncedSequence, now: float) -> Delta:
        sequence.number += 1
        tokens, length = sequence.tokens, sequence.length
        # In a repeated request the last token is sent twice.
        retained = min(sequence.sent, length - 1)
        delta = Delta(
            sequence=request.id,
            epoch=sequence.epoch,
            number=sequence.number,
            base=sequence.base,
            retained=retained,
            tokens=tokens[retained:length],
            output=request.output,
            choice=request.choice,
            depth=request.depth,
            width=request.width,
            nodes=request.nodes,
            expansion=request.expansion,
            params=None if sequence.base else sequence.params,
        )
        sequence.base, sequence.sent = sequence.number, length
        sequence.requested_at, sequence.requested_length, sequence.last_delta = now, length, delta
        return delta

    def _drafted(self, link: Link, draft: Draft, message: Drafts, now: float) -> None:
        sequence = self._sequences.get(draft.sequence)
        if sequence is None or sequence.last_delta is None:
            return
        if draft.number > sequence.number or draft.number < 0:
            self.reject(link.number, "foreign", "it answers a request that was never sent", now)
            return
        if (
            draft.number < sequence.number
            or sequence.requested_at is None
            or sequence.epoch != sequence.last_delta.epoch
        ):
            return  # late
        if draft.epoch != sequence.epoch:
            self.reject(link.number, "foreign", "it answers a request for another epoch of the sequence", now)
            return
        seconds, sequence.requested_at = now - sequence.requested_at, None
        if draft.tree is not None:
            root = sequence.tokens[sequence.requested_length - 1]
            try:
                sequence.tree = validated_tree(draft.tree, root, sequence.last_delta, self._vocab_size)
            except ValueError as error:
                self.reject(link.number, "tree", str(error), now)
                return
            sequence.at, sequence.lost = sequence.requested_length, 0
        link.answered(seconds, message)

    def _ready(self, sequence: _SyncedSequence) -> TokenTree | None:
        """Return the part of a sequence's tree after its present tokens, or None."""
        if sequence.tree is None or not 0 < sequence.at <= sequence.length:
            return None
        if sequence.tree.tokens[0] != sequence.tokens[sequence.at - 1]:
            return None
        return rebase(sequence.tree, sequence.tokens[sequence.at : sequence.length])

    def _handle_lost(self, link: Link, names: Sequence[int], now: float) -> None:
        """Handle a report that the service has lost the state of these sequences; sync those in flight
        anew."""
        known = self._sequences
        in_flight = [name for name in names if name in known and known[name].requested_at is not None]
        self._reset(in_flight)
        for name in in_flight:
            sequence = known[name]
            sequence.lost += 1
            if sequence.lost > LOST_IN_A_ROW:
                sequence.lost = 0
                self.reject(link.number, "lost", "it repeatedly loses a sequence", now)

    def _reset(self, names: Sequence[int]) -> None:
        for name in names:
            sequence = self._sequences.get(name)
            if sequence is not None:
                sequence.base = sequence.sent = 0
                sequence.requested_at = None

    def _leave(self) -> None:
        """Leave the current service; nothing is synced any more."""
        self.current = None
        self._released = []
        self._reset(list(self._sequences))

    def _choose(self, now: float) -> None:
        """Change the current service if it fails or another is clearly better."""
        if self.current is not None and not self.current.usable(now):
            logger.info("the draft service at %s no longer answers", self.current.address)
            self._leave()
        usable = [link for link in self.links if link.usable(now)]
        if not usable:
            return
        best = min(usable, key=lambda link: (link.expected_seconds, link.active, self._random.random()))
        if self.current is None:
            self.current, self._better_checks = best, 0
            return
        if now - self._checked_at < SWITCH_CHECK_SECONDS:
            return
        self._checked_at = now + self._random.random() * SWITCH_CHECK_SECONDS
        better = (
            best is not self.current and best.expected_seconds < SWITCH_RATIO * self.current.expected_seconds
        )
        self._better_checks = self._better_checks + 1 if better else 0
        if self._better_checks >= SWITCH_CHECKS:
            logger.info("switching from draft service %s to %s", self.current.address, best.address)
            self.moves += 1
            self.current.abandon(list(self._sequences))
            self._leave()
            self.current, self._better_checks = best, 0


def _needed(params: SamplingParams) -> SamplingParams:
    """Return the parameters that a drafter needs. It does not need grammars, and stop strings are private to
    the target."""
    return msgspec.structs.replace(params, grammar=None, stop=(), logprobs=None, prompt_logprobs=None, n=1)


def _parts(deltas: Sequence[Delta], max_bytes: int) -> list[list[Delta]]:
    """Split the deltas into messages that fit a service with a limit of `max_bytes` per message."""
    limit = min(MAX_TOKENS, max(max_bytes // (2 * TOKEN_BYTES), MIN_TOKENS))
    parts: list[list[Delta]] = []
    tokens = nodes = 0
    for delta in deltas:
        if not parts or len(delta.tokens) > tokens or delta.nodes > nodes or len(parts[-1]) >= MAX_DELTAS:
            parts.append([])
            tokens, nodes = limit, MAX_NODES
        parts[-1].append(delta)
        tokens -= len(delta.tokens)
        nodes -= delta.nodes
    return parts
