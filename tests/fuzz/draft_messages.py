"""Messages of the draft protocol that no honest peer sends: valid ones changed field by field, out of order,
replayed, of other sessions, and not even messages."""

import math
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from streamserve.protocol.drafting import (
    DRAFT_VERSION,
    Busy,
    Bye,
    Delta,
    Draft,
    DraftRequests,
    Drafts,
    Hello,
    Lost,
    Ping,
    Pong,
    Refused,
    ToService,
    ToTarget,
    Tree,
    Unknown,
    Welcome,
    encode,
)
from streamserve.protocol.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
NUMBERS = (-1, 0, 1, 2, 319, 320, 1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63))
FLOATS = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-300, 1.5, 1e308)


def corrupted_value(rng: random.Random, value: Any) -> Any:
    """Return an invalid value for a field, of the same type or another type."""
    match rng.randrange(8):
        case 0 | 1 if isinstance(value, (list, tuple)) and value:
            index = rng.randrange(len(value))
            return [*value[:index], corrupted_value(rng, value[index]), *value[index + 1 :]]
        case 2 if isinstance(value, (list, tuple)):
            return [*value, *value, *value][: rng.choice((0, 1, 5000))]
        case 3:
            return rng.choice(
                (None, "x" * rng.choice((0, 1, 100_000)), b"\xff" * rng.choice((1, 70_000)), {})
            )
        case 4:
            return [[]] * rng.randrange(5)
        case 5 | 6:
            return rng.choice(FLOATS)
        case _:
            return rng.choice(NUMBERS)


def mutated(rng: random.Random, message: ToService | ToTarget) -> bytes:
    """Return a message with some fields changed, left out or added; or with its bytes truncated or
    corrupted."""
    data = encode(message)
    chance = rng.random()
    if chance < 0.1:
        return data[: rng.randrange(len(data) + 1)]
    if chance < 0.25:
        bytes_ = bytearray(data)
        for _ in range(rng.randint(1, 4)):
            bytes_[rng.randrange(len(bytes_))] = rng.randrange(256)
        return bytes(bytes_)
    fields: dict[str, Any] = msgspec.msgpack.decode(data)
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(list(fields))
        if rng.random() < 0.1:
            del fields[name]
            break
        fields[name] = _corrupt_nested(rng, fields[name])
    if rng.random() < 0.05:
        fields["more"] = [1, 2, 3]
    return msgspec.msgpack.encode(fields)


def _corrupt_nested(rng: random.Random, value: Any) -> Any:
    """Corrupt a value, or an element of the value."""
    if isinstance(value, list) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        return [*value[:index], _corrupt_nested(rng, value[index]), *value[index + 1 :]]
    return corrupted_value(rng, value)


@dataclass
class HostileClient:
    """A client that ignores the protocol. `sessions` has Welcomes that this client or another one received;
    `fingerprints` has the fingerprints of tokenizer and vocabulary."""

    rng: random.Random
    fingerprints: tuple[str, str]
    sessions: list[Welcome] = field(default_factory=list)
    _sent: deque[bytes] = field(default_factory=lambda: deque(maxlen=200))
    _number: int = 0

    def next(self) -> bytes:
        """Return the next message."""
        rng = self.rng
        chance = rng.random()
        if chance < 0.1 and self._sent:
            return rng.choice(list(self._sent))  # replayed
        if chance < 0.13:
            return rng.randbytes(rng.randrange(300))
        if chance < 0.135:
            return msgspec.msgpack.encode([[]] * 100_000)
        message = self._message()
        data = encode(message) if chance < 0.6 else mutated(rng, message)
        self._sent.append(data)
        return data

    def _message(self) -> ToService:
        rng = self.rng
        if not self.sessions or rng.random() < 0.06:
            tokenizer, vocabulary = self.fingerprints
            return Hello(
                version=rng.choice((DRAFT_VERSION, DRAFT_VERSION, 2)), tokenizer=tokenizer,
                vocabulary=vocabulary,
                name=rng.choice(("x", "\n\x1b[2J" * 20, "é" * 200)), nonce=rng.getrandbits(20),
            )  # fmt: skip
        session, other = rng.choice(self.sessions), rng.choice(self.sessions)
        tag, channel = session.tag, session.channel if rng.random() < 0.9 else other.channel
        chance = rng.random()
        if chance < 0.1:
            return Ping(tag, channel, rng.choice((0.0, math.nan, -1e300)))
        if chance < 0.11:
            return Bye(tag, channel)
        deltas = [self._delta() for _ in range(rng.choice((0, 1, 1, 2, 5, 40)))]
        released = [rng.randrange(20) for _ in range(rng.choice((0, 0, 1, 5)))]
        need = rng.choice((None, 0.0, 0.1, math.nan, -1.0))
        return DraftRequests(
            tag=tag, channel=channel, deltas=deltas, released=released, need=need, verify=rng.choice(FLOATS)
        )

    def _delta(self) -> Delta:
        rng = self.rng
        self._number += 1
        retained = rng.choice((0, 0, 0, 1, 5, 60))
        params = GREEDY if rng.random() < 0.5 else _params(rng)
        depth = rng.choice((0, 1, 4, 4, 16, 64))
        return Delta(
            sequence=rng.randrange(20), epoch=rng.choice((0, 0, 0, 1, self._number)), number=self._number,
            base=rng.choice((0, 0, self._number - 1, 1)), retained=retained,
            tokens=[rng.randrange(320) for _ in range(rng.choice((1, 2, 30, 300)))],
            output=rng.choice((0, 0, 1)), choice=rng.choice((0, 1)), depth=depth,
            width=rng.choice((1, 2, 8)), nodes=rng.choice((1, 4, 8, 64)),
            expansion=rng.choice(((), (2,) * depth)),
            params=params if retained == 0 or rng.random() < 0.5 else None,
        )  # fmt: skip


def _params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice((0.0, 0.7, 100.0)), seed=rng.choice((1, (1 << 64) - 1)),
        top_p=rng.choice((1.0, 0.1)), top_k=rng.choice((0, 1, 5)),
        presence_penalty=rng.choice((0.0, 2.0, -2.0)), repetition_penalty=rng.choice((1.0, 2.0)),
        min_tokens=rng.choice((0, 5)), logit_bias=rng.choice(({}, {5: 100.0, 6: -100.0})),
        allowed_token_ids=rng.choice(((), (1, 2), (319,))),
    )  # fmt: skip


class HostileService:
    """A service that follows the protocol only sometimes. `wrong` is the share of
    wrong replies."""

    def __init__(self, rng: random.Random, wrong: float) -> None:
        self.rng = rng
        self.wrong = wrong
        self.tag = 0
        self._sent: deque[bytes] = deque(maxlen=100)

    def replies(self, message: ToService) -> list[bytes]:
        """Return the replies to one message of a target."""
        honest = self._honest(message)
        if honest is None:
            return []
        rng = self.rng
        data = encode(honest)
        if rng.random() >= self.wrong:
            self._sent.append(data)
            return [data]
        match rng.randrange(6):
            case 0:
                return [encode(self._another())]
            case 1:
                return [rng.randbytes(rng.randrange(200)), data]
            case 2 if self._sent:
                return [rng.choice(list(self._sent)), data, data]
            case 3 if isinstance(honest, Drafts) and honest.drafts:
                drafts = [self._invalid_draft(draft) for draft in honest.drafts]
                return [encode(msgspec.structs.replace(honest, drafts=drafts))]
            case _:
                return [mutated(rng, honest) for _ in range(rng.randint(1, 3))]

    def _honest(self, message: ToService) -> ToTarget | None:
        match message:
            case Hello(nonce=nonce):
                self.tag = self.rng.getrandbits(40) | 1
                return Welcome(
                    nonce=nonce, tag=self.tag, channel=b"c" * 16, model="m", max_model_len=4096, lease=30.0,
                    max_bytes=1 << 22, active=1,
                )  # fmt: skip
            case Ping(tag, _, sent):
                return Pong(tag, sent, 0.0, 0.001, 1)
            case DraftRequests(tag=tag, deltas=deltas) if deltas:
                drafts = [self._draft(delta) for delta in deltas]
                return Drafts(tag=tag, drafts=drafts, waited=0.0, seconds=0.001, queue=0.0)
            case _:
                return None

    def _draft(self, delta: Delta) -> Draft:
        """Return a chain of random tokens of the vocabulary."""
        size = 1 + min(delta.depth, delta.nodes)
        tokens = (delta.tokens[-1], *(self.rng.randrange(320) for _ in range(size - 1)))
        accept = tuple(0.9**level for level in range(size))
        tree = Tree(tokens, tuple(range(-1, size - 1)), (1.0, *(0.9,) * (size - 1)), accept)
        return Draft(delta.sequence, delta.epoch, delta.number, tree)

    def _invalid_draft(self, draft: Draft) -> Draft:
        """Return a draft that can be decoded, but has one invalid field."""
        rng, tree = self.rng, draft.tree
        assert tree is not None
        last = len(tree.tokens) - 1
        token = rng.choice((320, 1 << 31, (1 << 63) - 1, -1))
        bad = rng.choice((math.nan, math.inf, -1.0, 2.0))
        changes: list[dict[str, Any]] = [
            {"tokens": (*tree.tokens[:-1], token)},
            {"tokens": ((tree.tokens[0] + 1) % 320, *tree.tokens[1:])},
            {"parents": (*tree.parents[:-1], last)},
            {"parents": (*tree.parents[:-1], rng.choice((-1, -5, 1 << 40)))},
            {"parents": (-1,) * len(tree.parents)},
            {"scores": (bad,) * len(tree.scores)},
            {"accept": (*tree.accept[:-1], bad)},
            {"scores": ()},
            {"tokens": tree.tokens * 50, "parents": tree.parents * 50, "scores": tree.scores * 50,
             "accept": tree.accept * 50},
        ]  # fmt: skip
        bent = msgspec.structs.replace(tree, **rng.choice(changes))
        if rng.random() < 0.1:
            return Draft(draft.sequence, draft.epoch, draft.number + rng.choice((1, 1 << 40)), draft.tree)
        return Draft(draft.sequence, draft.epoch, draft.number, bent)

    def _another(self) -> ToTarget:
        rng = self.rng
        return rng.choice(
            (
                Unknown(self.tag),
                Busy(0, self.tag, rng.choice((0.01, math.nan, -1.0, 1e300))),
                Refused(0, "size", "x\n" * 1000),
                Lost(self.tag, list(range(50))),
                Pong(self.tag, rng.choice(FLOATS), rng.choice(FLOATS), 0.0, -1),
                Drafts(tag=self.tag, drafts=[], waited=rng.choice(FLOATS), seconds=0.0, queue=0.0),
                Drafts(tag=self.tag + 2, drafts=[], waited=0.0, seconds=0.0, queue=0.0),
            )
        )
