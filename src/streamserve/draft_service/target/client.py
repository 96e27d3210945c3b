"""A target's client for draft services, without sockets: the engine's draft requests go in, messages and
trees come out.

There is one link per service. Each sequence is drafted by one service at a time. Another one takes over when
that one fails, or when the sequence would end clearly sooner there (placement.py). A request that is in
flight is not repeated. A late tree is used as far as the target's committed tokens agree with it.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from streamserve.contracts.plan import DraftRequest
from streamserve.draft_service.target.answers import Fault, timing_error
from streamserve.draft_service.target.links import ServiceLink, ServiceMessage
from streamserve.draft_service.target.placement import ServicePlacement
from streamserve.draft_service.target.synced import SyncedSequences, WrongAnswerError
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

MAX_TOKENS, MAX_NODES, MAX_DELTAS = 1 << 17, 1 << 13, 1 << 10
"""Limits of one message; longer ones are split between sequences."""
MIN_TOKENS = 256
TOKEN_BYTES = 5
"""The largest encoded size of a token, in bytes."""


@dataclass(frozen=True)
class TargetIdentity:
    """How a target identifies itself to a service."""

    tokenizer: str
    vocabulary: str
    name: str
    vocab_size: int


class DraftClient:
    """The client of one target for the services at `addresses`. `seed` makes targets choose differently among
    equal services. If `models` (fingerprints) are given, services with other draft models are not used.

    `sequences` takes prompts for which trees will be requested (`foresee`: `tick` lets services read them),
    and returns the trees that were received for the latest `begin`.
    """

    def __init__(
        self,
        identity: TargetIdentity,
        addresses: Sequence[str],
        seed: int,
        models: Sequence[str] = (),
        ping: float = 1.0,
    ) -> None:
        rng = random.Random(seed)
        self._vocab_size = identity.vocab_size
        self.links = [
            ServiceLink(
                number, address, identity.name, identity.tokenizer, identity.vocabulary, ping, tuple(models)
            )
            for number, address in enumerate(addresses)
        ]
        for link in self.links:
            link.nonce = rng.getrandbits(48)
        self.placement = ServicePlacement(self.links, rng)
        self.sequences = SyncedSequences()
        self._verify = 0.0
        """Seconds of the target's verification."""
        self.rejected: dict[str, int] = {}
        """The number of rejected answers, by fault."""

    def tick(self, now: float) -> list[ServiceMessage]:
        """Return the handshakes, pings and prompts to read that are due, after a check whether sequences
        should move to another service."""
        outs = [out for link in self.links for out in link.tick(now)]
        self.placement.leave_closed(self.sequences.by_id, now)
        self.placement.check(self.sequences.by_id, now, self._verify)
        return outs + self._read_ahead(now)

    def begin(
        self, requests: Sequence[DraftRequest], now: float, need: float, verify: float, plain: float
    ) -> list[ServiceMessage]:
        """Send draft requests to the services of their sequences; the trees are useful for `need` seconds."""
        self._verify = verify or plain
        synced = self.sequences.sync(requests)
        self.placement.leave_closed(self.sequences.by_id, now)
        ids = [request.id for request, _ in synced if request.depth]
        self.placement.place(ids, self.sequences.by_id, now, self._verify)
        outs = []
        for link in self._usable(now):
            deltas = [
                sequence.delta(request, now)
                for request, sequence in synced
                if sequence.service == link.number
                and request.depth
                and sequence.may_request(link.times.usual, now)
                and sequence.length + request.nodes <= link.max_model_len
            ]
            released = self.sequences.take_released(link.number)
            if not deltas:  # without a message to carry them, `tick` sends the ids
                link.abandon(released)
            outs += self._requests(link, deltas, released, now, need, verify, plain)
        return outs

    def gained(self, id: int, accepted: int, now: float) -> None:
        """Record how many draft tokens were accepted of the tree that the engine last took for a sequence."""
        sequence = self.sequences.by_id.get(id)
        if sequence is None or sequence.drafted_by is None:
            return
        acceptance = self.links[sequence.drafted_by].acceptance
        acceptance.add(accepted, now)
        sequence.verified(accepted, acceptance.accepted / acceptance.trees)
        sequence.drafted_by = None

    def _usable(self, now: float) -> list[ServiceLink]:
        return [link for link in self.links if link.usable(now)]

    def _read_ahead(self, now: float) -> list[ServiceMessage]:
        """Return the messages with prompts that services are to read before trees are requested."""
        ahead = {id: each for id, each in self.sequences.by_id.items() if each.may_read_ahead()}
        self.placement.place(ahead, self.sequences.by_id, now, self._verify)
        outs = []
        for link in self._usable(now):
            deltas = [
                sequence.delta(sequence.ahead, now)
                for sequence in ahead.values()
                if sequence.service == link.number
                and sequence.ahead
                and sequence.length <= link.max_model_len
            ]
            outs += self._requests(link, deltas, [], now)
        return outs

    def _requests(
        self,
        link: ServiceLink,
        deltas: Sequence[Delta],
        released: list[int],
        now: float,
        need: float | None = None,
        verify: float = 0.0,
        plain: float = 0.0,
    ) -> list[ServiceMessage]:
        """Return the messages with these deltas for a service; only trees are answered."""
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
        return [link.send(message, now, any(delta.depth for delta in message.deltas)) for message in messages]

    def unreachable(self, number: int, now: float) -> None:
        """Record that a message for link `number` could not be sent: nothing listens there."""
        self.links[number].fail(now)
        self.placement.leave_closed(self.sequences.by_id, now)

    def heard(self, number: int, message: ToTarget, now: float) -> list[ServiceMessage]:
        """Process a message of link `number`; return the messages to send at once."""
        link = self.links[number]
        if link.on_probation(now):
            return []
        if text := timing_error(message):
            self.reject(number, "timing", text, now)
            return []
        match message:
            case Drafts():
                if link.heard(message, now):
                    self._trees(link, message, now)
            case Lost(_, names):
                if link.heard(message, now):
                    for _ in self.sequences.lose(number, names):
                        self.reject(number, "lost", "it repeatedly loses a sequence", now)
            case Pong() if not link.answers_ping(message):
                self.reject(number, "foreign", "it answers a ping that was never sent", now)
            case Welcome() | Refused() | Busy() | Pong() | Unknown():
                link.heard(message, now)
        self.placement.leave_closed(self.sequences.by_id, now)
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
        """Drop and count a wrong answer of link `number`. Several in a short time put the service on
        probation; if the fault is `certain`, one is enough."""
        link = self.links[number]
        self.rejected[fault] = self.rejected.get(fault, 0) + 1
        if link.punish(now, f"{fault}: {text}", certain):
            self.placement.leave_closed(self.sequences.by_id, now)

    def usual(self) -> dict[int, float]:
        """Return the seconds that each service usually takes to answer, by the number of its link, for the
        services that got requests in the latest `begin`."""
        return {number: self.links[number].times.usual for number in self.sequences.services()}

    def close(self, now: float) -> list[ServiceMessage]:
        """End all sessions."""
        return [out for link in self.links for out in link.close(now)]

    def _trees(self, link: ServiceLink, message: Drafts, now: float) -> None:
        """Process trees, and use their times to measure the service."""
        sent = [self._drafted(link, draft, message, now) for draft in message.drafts]
        known = [tokens for tokens in sent if tokens is not None]
        if known:
            link.times.drafted(message, max(known), now)

    def _drafted(self, link: ServiceLink, draft: Draft, message: Drafts, now: float) -> int | None:
        """Process one tree; return how many tokens were sent in its request, or None if the tree is not
        used."""
        sequence = self.sequences.by_id.get(draft.sequence)
        if sequence is None or sequence.service != link.number:
            return None
        try:
            seconds = sequence.accept(draft, self._vocab_size, now)
        except WrongAnswerError as wrong:
            self.reject(link.number, wrong.fault, str(wrong), now)
            return None
        if seconds is None:
            return None
        link.answered(seconds, message)
        return len(sequence.last_delta.tokens) if sequence.last_delta else None


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
