"""Messages between a target's worker and a draft service: tagged msgspec structs, encoded as msgpack.

target  → service   Hello, then with the tag it received: DraftRequests, Ping, Bye
service → target    Welcome, Refused or Busy; then Drafts, Lost, Busy, Pong, Unknown

A sequence's tokens are synced as deltas. Delta number n builds on number `base`: the service accepts it if it
has applied `base` or a later delta, but not yet n. A delta that it has already applied is answered again or
dropped. A delta that it cannot build on is answered with Lost, and the sequence is synced again from base 0.
So neither network faults nor a restart can make target and service disagree about the prefix that a tree was
drafted for.
"""

from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from streamserve.protocol.messages import Failed, ModelInfo
from streamserve.protocol.sampling import SamplingParams

T = TypeVar("T")

DRAFT_VERSION = 1
MAX_MESSAGE_BYTES = 4 << 20
"""The default limit of a message to a service, in bytes. The connection is closed only far above it."""
MAX_REPLY_BYTES = 2 << 20
"""The limit of a message to a target, in bytes. The connection is closed above it."""
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
"""Why a service refuses. The reasons on the second line may pass with time: they come with seconds to
wait."""

Text = Annotated[str, Meta(max_length=256)]
Id = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Secret = Annotated[bytes, Meta(max_length=64)]
Expansion = Annotated[tuple[int, ...], Meta(max_length=MAX_DEPTH)]
Nodes = Meta(max_length=MAX_NODES + 1)
"""Lengths are checked when a message is decoded, before its elements are decoded."""


def printable(text: str, limit: int = MAX_NAME) -> str:
    """Return untrusted text in a form that may be logged or may label a metric: truncated to `limit`
    characters, with a question mark for each unprintable character."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:limit])


class Hello(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A target asks for a session. `tokenizer` and `vocabulary` are fingerprints. `nonce` identifies this
    Hello in the answer."""

    version: int
    tokenizer: Text
    vocabulary: Text
    name: Text
    nonce: Id


class Welcome(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A session is open. Every further message must have its `tag` and the secret `channel`. The session ends
    `lease` seconds after the target's last message. `model` is the fingerprint of the draft model, with a
    context of `max_model_len` tokens. `max_bytes` is the limit of a message to the service. `active` is the
    number of targets."""

    nonce: Id
    tag: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
    channel: Secret
    model: Text
    max_model_len: Annotated[int, Meta(ge=1, le=1 << 40)]
    lease: float
    max_bytes: int
    active: int


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The service refuses, now and later. `nonce` is the nonce of the refused Hello, 0 for other messages."""

    nonce: Id
    reason: Text
    text: Annotated[str, Meta(max_length=4096)]


class Busy(msgspec.Struct, tag=True, frozen=True):
    """The service refuses for now: retry in `retry` seconds. Another target would slow the others down too
    much, or this target requests more than its share. `reason` is a Reason.

    `nonce` is the nonce of the refused Hello, or 0 if the session of `tag` stays open. Both are 0 if the
    message was not decoded because of its size or the message rate.
    """

    nonce: Id
    tag: Id
    retry: float
    reason: Text = ""


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """A request for a tree after a sequence's committed tokens: the first `retained` tokens of delta `base`,
    followed by `tokens`. `params` come with every delta of base 0. Fields not described here have the same
    meaning as in contracts.plan.DraftRequest.

    - `epoch`: larger after the sequence was edited or preempted; within an epoch the sequence only grows.
    - `depth`: with 0, the service only reads the tokens ahead of a request for a tree, and does not answer.
    - `need`: seconds until the next token is due, if the request has a target for the time per output token.
    """

    sequence: int
    epoch: int
    number: int
    base: int
    retained: int
    tokens: Annotated[list[int], Meta(max_length=MAX_TOKENS)]
    output: int
    choice: int
    depth: int
    width: int
    nodes: int
    expansion: Expansion = ()
    params: SamplingParams | None = None
    need: float | None = None


class DraftRequests(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The draft requests of one step of a target, and the sequences it has `released`. The target waits
    `need` seconds for the trees. It worked for `verify` seconds since the last trees came; a step without
    trees takes `plain` seconds. Both are 0 while they are unknown."""

    tag: Id
    channel: Secret
    deltas: Annotated[list[Delta], Meta(max_length=MAX_DELTAS)]
    released: Annotated[list[int], Meta(max_length=MAX_RELEASED)] = []
    need: float | None = None
    verify: float = 0.0
    plain: float = 0.0


class Ping(msgspec.Struct, tag=True, frozen=True):
    """Keeps the session alive, and asks for the service's load."""

    tag: Id
    channel: Secret
    sent: float


class Bye(msgspec.Struct, tag=True, frozen=True):
    """The target ends the session."""

    tag: Id
    channel: Secret


class Tree(msgspec.Struct, frozen=True, array_like=True):
    """A token tree as it is sent, with the fields of contracts.tree.TokenTree. The root is the sequence's
    last token."""

    tokens: Annotated[tuple[int, ...], Nodes]
    parents: Annotated[tuple[int, ...], Nodes]
    scores: Annotated[tuple[float, ...], Nodes]
    accept: Annotated[tuple[float, ...], Nodes]


class Draft(msgspec.Struct, frozen=True, array_like=True):
    """The result of delta `number` of a sequence. No tree if the sequence exceeds the draft model's
    context."""

    sequence: int
    epoch: int
    number: int
    tree: Tree | None


class Drafts(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Trees. The request waited `waited` seconds in the queue, and the batch took `seconds`. A request made
    now would wait about `queue` seconds."""

    tag: Id
    drafts: Annotated[list[Draft], Meta(max_length=MAX_DELTAS)]
    waited: float
    seconds: float
    queue: float


class Lost(msgspec.Struct, tag=True, frozen=True):
    """Deltas of these sequences build on state that the service does not have: sync them from the
    beginning."""

    tag: Id
    sequences: Annotated[list[int], Meta(max_length=MAX_DELTAS)]


class Pong(msgspec.Struct, tag=True, frozen=True):
    """The answer to the Ping that was `sent` at that time of the target's clock. A request made now would
    wait about `queue` seconds for trees that take `seconds`. The service drafts for `active` targets."""

    tag: Id
    sent: float
    queue: float
    seconds: float
    active: int


class Unknown(msgspec.Struct, tag=True, frozen=True):
    """The session does not exist, or no longer: send a Hello."""

    tag: Id


ToService = Hello | DraftRequests | Ping | Bye
ToTarget = Welcome | Refused | Busy | Drafts | Lost | Pong | Unknown


class DraftReady(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Tells the parent process that the service listens at `address`."""

    address: str
    model: ModelInfo
    kv_cache_bytes: int
    num_blocks: int
    load_seconds: float


class DraftSums(msgspec.Struct):
    """Sums since a service's start.

    - Work: `batches`, `requests` of targets in them, `trees` sent, draft `passes`.
    - Seconds: `busy` drafting, `idle`, `waited` by requests; of draft passes (`pass_seconds`, and the sum of
      their squares `pass_squares`).
    - Draft tokens that targets tested (`draft_tokens`), and `accepted` ones.
    - `rebuilt`: sequences whose KV was computed again after an eviction.
    - `rounds`: answers that followed another answer to the same target, with the seconds between
      (`round_seconds`).
    - `returns`: requests that followed an answer, with the seconds between (`away_seconds`).
    - `warm_passes`: dummy passes that keep the model warm. `refused`: refusals by reason.
    """

    batches: int = 0
    requests: int = 0
    trees: int = 0
    passes: int = 0
    busy: float = 0.0
    waited: float = 0.0
    idle: float = 0.0
    pass_seconds: float = 0.0
    pass_squares: float = 0.0
    draft_tokens: int = 0
    accepted: int = 0
    rebuilt: int = 0
    rounds: int = 0
    round_seconds: float = 0.0
    returns: int = 0
    away_seconds: float = 0.0
    warm_passes: int = 0
    refused: dict[str, int] = {}


class DraftReport(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A service's state at time `at` of its clock. Times are in seconds.

    - Moving means: `pass_seconds` (t_s), `batch_seconds` (S) and their variance, `depth` of trees, `batch`
      (targets in a batch), `return_seconds` from an answer to the next request (Z), `verify_seconds` (t_v)
      and `communication_seconds` (t_c) in it, `plain_seconds` of a target's step without draft tokens, `beta`
      (acceptance), `progress` (tokens of a round).
    - Predictions of the model for `active` targets: N_full, N_max, round, idle time, load.
    - `cold_seconds`, `warm_seconds`: seconds of an answer per tree level after an idle gap, without and with
      dummy passes; 0 if unknown. `keeping_warm`: whether dummy passes are made.
    """

    at: float
    targets: int
    active: int
    waiting: int
    blocks_total: int
    blocks_used: int
    evictions: int
    pass_seconds: float
    batch_seconds: float
    batch_variance: float
    depth: float
    batch: float
    return_seconds: float
    verify_seconds: float
    communication_seconds: float
    plain_seconds: float
    beta: float
    progress: float
    n_full: int
    n_max: int
    predicted_round_seconds: float
    predicted_idle_seconds: float
    predicted_load: float
    cold_seconds: float
    warm_seconds: float
    keeping_warm: bool
    sums: DraftSums


FromDrafting = DraftReady | Failed | DraftReport

encode: Callable[[ToService | ToTarget | FromDrafting], bytes] = msgspec.msgpack.Encoder().encode
decode_report: Callable[[bytes], FromDrafting] = msgspec.msgpack.Decoder(FromDrafting).decode
_to_service: msgspec.msgpack.Decoder[ToService] = msgspec.msgpack.Decoder(ToService)
_to_target: msgspec.msgpack.Decoder[ToTarget] = msgspec.msgpack.Decoder(ToTarget)


def decode_to_service(data: bytes | memoryview) -> ToService:
    """Decode a message at the service. Raises msgspec.DecodeError for anything else."""
    return _decode(_to_service, data)


def decode_to_target(data: bytes | memoryview) -> ToTarget:
    """Decode a message at the target. Raises msgspec.DecodeError for anything else."""
    return _decode(_to_target, data)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes | memoryview) -> T:
    try:
        return decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(type(error).__name__) from error
