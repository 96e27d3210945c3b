"""The configuration of a draft service, and its outputs: batches and messages."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from streamserve.contracts.plan import DraftRequest
from streamserve.draft_service.server.admission import Limits
from streamserve.draft_service.server.keep_warm import KeepWarm
from streamserve.draft_service.server.sessions import DraftedSequence, Session
from streamserve.protocol.drafting import Draft, ToTarget


@dataclass(frozen=True)
class ServiceIdentity:
    """The identity of the service's draft model: fingerprints of model, tokenizer and vocabulary, the size of
    the vocabulary, and the context length of the model."""

    model: str
    tokenizer: str
    vocabulary: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class ServiceConfig:
    """`num_blocks` of `block_size` tokens hold KV. At most `max_batch` targets are drafted for in one pass,
    as long as that takes no more than `max_batch_seconds`; prompts are read in chunks of `max_read` tokens. A
    session ends `lease` seconds after its last message. `shares` are weights by the target's name, 1 for the
    others. `keep_warm`: see draft_service/server/keep_warm.py."""

    num_blocks: int
    block_size: int = 16
    max_batch: int = 16
    max_batch_seconds: float = 0.05
    max_read: int = 256
    lease: float = 30.0
    shares: Mapping[str, float] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    keep_warm: KeepWarm = "auto"


@dataclass(frozen=True)
class TargetReply:
    """A message to a target."""

    peer: bytes
    message: ToTarget


@dataclass(frozen=True)
class DraftBatch:
    """The drafter's next work: forget the sequences `released`, then draft for `requests`. `members` are the
    sequences of the requests by target, `waited` the seconds that each session waited. `started` is when the
    batch began."""

    requests: list[DraftRequest]
    released: list[int]
    members: list[tuple[Session, list[DraftedSequence]]]
    waited: dict[int, float]
    started: float


@dataclass(frozen=True)
class DraftReply:
    """A batch's result for one target. The target `waited` for the batch to begin; the batch took
    `seconds`."""

    session: Session
    drafts: list[Draft]
    waited: float
    seconds: float
