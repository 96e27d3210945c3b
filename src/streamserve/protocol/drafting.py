"""Messages between a target's worker and a draft service. Each is a tagged msgspec struct, encoded as
msgpack.

target  → service   Hello, then under the tag it got: Ask, Ping, Bye
service → target    Welcome, Refused or Busy; then Drafts, Lost, Busy, Pong, Unknown

A sequence's tokens are told as deltas. Delta number n builds on number `base`: the service takes it if it has
come at least as far as `base` and not yet as far as n. What it has seen already it answers again or drops;
what it cannot build on it calls lost, and is told anew from base 0. So nothing that the network does to
messages, nor a restart, can make the two disagree about what a tree is a guess for.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from streamserve.protocol.messages import Failed, ModelInfo
from streamserve.protocol.sampling import SamplingParams

DRAFT_VERSION = 1
MAX_MESSAGE_BYTES = 4 << 20
"""What a service reads, unless it is told to take less. Well beyond it the connection is closed."""
MAX_ANSWER_BYTES = 2 << 20
"""What a target reads. Beyond it the connection is closed."""
MAX_NAME = 64
MAX_DELTAS = 4096
MAX_RELEASED = 1 << 16
MAX_TOKENS = 1 << 18
MAX_DEPTH = 64
MAX_NODES = 1024

Reason = Literal[
    "version", "tokenizer", "vocabulary", "key", "channel", "size", "unreadable", "internal",
    "rate", "bytes", "memory", "nodes", "in-flight", "sessions", "targets", "drafting",
]  # fmt: skip
"""Why a service says no. The second line may change with time: these come with seconds to wait."""

Text = Annotated[str, Meta(max_length=256)]
Id = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Secret = Annotated[bytes, Meta(max_length=64)]
Expansion = Annotated[tuple[int, ...], Meta(max_length=MAX_DEPTH)]
Nodes = Meta(max_length=MAX_NODES + 1)
"""Lengths are checked where a message is decoded, before what they count is."""


def printable(text: str, limit: int = MAX_NAME) -> str:
    """Text chosen elsewhere as it may be logged or label a metric: cut to `limit` characters, with a question
    mark for each that cannot be printed."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:limit])


class Hello(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A target wants to be drafted for. `tokenizer` and `vocabulary` are fingerprints; `nonce` names this
    Hello in the answer."""

    version: int
    tokenizer: Text
    vocabulary: Text
    name: Text
    nonce: Id


class Welcome(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A session is open. Every further message names its `tag` and shows the secret `channel`. It ends
    `lease` seconds after the last one. `model` is the fingerprint of the draft model, which reads up to
    `max_model_len` tokens. Messages may have `max_bytes`."""

    nonce: Id
    tag: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    channel: Secret
    model: Text
    max_model_len: Annotated[int, Meta(ge=1, le=1 << 40)]
    lease: float
    max_bytes: int
    active: int


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The service will not do that, now or later. `nonce` is that of a Hello, 0 for anything else."""

    nonce: Id
    reason: Text
    text: Annotated[str, Meta(max_length=4096)]


class Busy(msgspec.Struct, tag=True, frozen=True):
    """Another target would slow the others down too much, or this one asks for more than its share: try again
    in `retry` seconds. `nonce` is that of a Hello, 0 if the session of `tag` stays open. Both are 0 where the
    message was not read, for its size or number. `reason` is a Reason."""

    nonce: Id
    tag: Id
    retry: float
    reason: Text = ""


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """A tree is wanted behind a sequence's committed tokens: of those known as number `base` the first `keep`
    still hold, then come `tokens`. `params` come with every delta of base 0. The other fields are those of
    engine.plan.DraftRequest. `hidden` is reserved for hidden states of the target, and empty in version 1.

    A larger `epoch` says that the sequence was edited or preempted; within one it only grows."""

    sequence: int
    epoch: int
    number: int
    base: int
    keep: int
    tokens: Annotated[list[int], Meta(max_length=MAX_TOKENS)]
    output: int
    choice: int
    depth: int
    width: int
    nodes: int
    expansion: Expansion = ()
    params: SamplingParams | None = None
    hidden: Secret = b""


class Ask(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """What one step of a target wants drafted, and the sequences it has `released`. It waits `need` seconds
    for the trees. Since the last trees came it worked for `verify` seconds; a step without any takes `plain`
    seconds; both are 0 as long as they are not known."""

    tag: Id
    channel: Secret
    deltas: Annotated[list[Delta], Meta(max_length=MAX_DELTAS)]
    released: Annotated[list[int], Meta(max_length=MAX_RELEASED)] = []
    need: float | None = None
    verify: float = 0.0
    plain: float = 0.0


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Keeps the session, and asks how busy the service is."""

    tag: Id
    channel: Secret
    sent: float


class Bye(msgspec.Struct, tag=True, frozen=True):
    """The session is over."""

    tag: Id
    channel: Secret


class Tree(msgspec.Struct, frozen=True, array_like=True):
    """A policy.tree.TokenTree; its root is the sequence's last token."""

    tokens: Annotated[tuple[int, ...], Nodes]
    parents: Annotated[tuple[int, ...], Nodes]
    scores: Annotated[tuple[float, ...], Nodes]
    accept: Annotated[tuple[float, ...], Nodes]


class Draft(msgspec.Struct, frozen=True, array_like=True):
    """What delta `number` of a sequence came to; no tree if the draft model cannot read that far."""

    sequence: int
    epoch: int
    number: int
    tree: Tree | None


class Drafts(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Trees. They had `waited` seconds to be begun, and took `seconds`; who asks now waits some `queue`
    seconds."""

    tag: Id
    drafts: Annotated[list[Draft], Meta(max_length=MAX_DELTAS)]
    waited: float
    seconds: float
    queue: float


class Lost(msgspec.Struct, tag=True, frozen=True):
    """Deltas of these sequences build on what the service does not have: tell them from the beginning."""

    tag: Id
    sequences: Annotated[list[int], Meta(max_length=MAX_DELTAS)]


class Pong(msgspec.Struct, tag=True, frozen=True):
    """The answer to a Ping `sent` at that time of the target's clock: who asks now waits some `queue`
    seconds for trees that take `seconds`; `active` targets are being drafted for."""

    tag: Id
    sent: float
    queue: float
    seconds: float
    active: int


class Unknown(msgspec.Struct, tag=True, frozen=True):
    """There is no such session (any more): say Hello."""

    tag: Id


ToService = Hello | Ask | Ping | Bye
ToTarget = Welcome | Refused | Busy | Drafts | Lost | Pong | Unknown

_encoder = msgspec.msgpack.Encoder()
_to_service: msgspec.msgpack.Decoder[ToService] = msgspec.msgpack.Decoder(ToService)
_to_target: msgspec.msgpack.Decoder[ToTarget] = msgspec.msgpack.Decoder(ToTarget)


def encode(message: ToService | ToTarget) -> bytes:
    """One message as msgpack bytes."""
    return _encoder.encode(message)


def decode_to_service(data: bytes) -> ToService:
    """The inverse of `encode` at the service. Raises msgspec.DecodeError on anything else."""
    try:
        return _to_service.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(type(error).__name__) from error


def decode_to_target(data: bytes) -> ToTarget:
    """The inverse of `encode` at the target. Raises msgspec.DecodeError on anything else."""
    try:
        return _to_target.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(type(error).__name__) from error


class DraftReady(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """To who started the service: it listens at `address`."""

    address: str
    model: ModelInfo
    kv_cache_bytes: int
    num_blocks: int
    load_seconds: float


class DraftSums(msgspec.Struct):
    """Sums since a service's start. Seconds: `busy` drafting, `idle`, `waited` by requests, of rounds between
    two answers to one target. Draft passes, the seconds they took, and the squares of each one's. Guesses
    that targets tested, and `accepted` ones. KV that was `rebuilt` after an eviction. Requests that followed
    an answer (`returns`), and the seconds until each; passes for nobody, which kept the model warm; refusals
    by reason."""

    batches: int = 0
    requests: int = 0
    trees: int = 0
    passes: int = 0
    busy: float = 0.0
    waited: float = 0.0
    idle: float = 0.0
    pass_seconds: float = 0.0
    pass_squares: float = 0.0
    guesses: int = 0
    accepted: int = 0
    rebuilt: int = 0
    rounds: int = 0
    round_seconds: float = 0.0
    returns: int = 0
    away_seconds: float = 0.0
    warm_passes: int = 0
    refused: dict[str, int] = {}


class DraftReport(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A service's state at time `at` of its clock, in seconds and counts. First moving means: of a draft pass
    (t_s) and of drafting for a batch (S, with its variance), its depth, targets in a batch, the way back (Z),
    the verification (t_v) and communication (t_c) in it, a target's plain step, acceptance, tokens of a
    round. Then N_full and N_max, and what the model makes of `active` targets. Last, what an answer takes by
    level of a tree after a gap without and with keeping warm, 0 if unknown, and whether gaps are bridged."""

    at: float
    targets: int
    active: int
    waiting: int
    blocks_total: int
    blocks_used: int
    evictions: int
    pass_seconds: float
    turn_seconds: float
    turn_variance: float
    depth: float
    batch: float
    back_seconds: float
    verify_seconds: float
    communication_seconds: float
    plain_seconds: float
    beta: float
    progress: float
    full: int
    most: int
    predicted_round_seconds: float
    predicted_idle_seconds: float
    predicted_load: float
    cold_seconds: float
    warm_seconds: float
    keeping_warm: bool
    sums: DraftSums


FromDrafting = DraftReady | Failed | DraftReport
_from_drafting: msgspec.msgpack.Decoder[FromDrafting] = msgspec.msgpack.Decoder(FromDrafting)


def encode_report(message: FromDrafting) -> bytes:
    """What a draft service tells who started it, as msgpack bytes."""
    return _encoder.encode(message)


def decode_report(data: bytes) -> FromDrafting:
    """The inverse of `encode_report`. Raises msgspec.DecodeError on anything else."""
    return _from_drafting.decode(data)
