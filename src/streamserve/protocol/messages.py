"""Messages between the control process and a worker. Each is a tagged msgspec struct, encoded as msgpack.

control → worker    Submit, Edit, Cancel, Stop; in stream pairs Push, Join, Release, Hold (transfers.py); of
                    LoRA adapters LoadAdapter, UnloadAdapter
worker  → control   Ready, Failed, Events, Transfers, Traced, Report, AdapterLoaded, KeptOutputs
agent   → worker    Leave, Adopt: between two heads; answered by Left
"""

from hashlib import blake2b
from typing import Annotated, Literal

import msgspec

from streamserve import __version__
from streamserve.protocol.adapters import Fingerprint
from streamserve.protocol.config import WorkerConfig
from streamserve.protocol.kept import MAX_KEPT_OUTPUTS, Digest
from streamserve.protocol.reports import Report
from streamserve.protocol.sampling import SamplingParams
from streamserve.protocol.transfers import (
    AttemptNumber,
    CacheAddress,
    Hold,
    Join,
    Push,
    Release,
    TransferReservation,
)

PROTOCOL_VERSION = 1
MAX_MESSAGE_BYTES = 256 << 20

FinishReason = Literal["stop", "length", "abort", "error"]
COPY = "\0"
"""First character of the request names of cache copies; no client's request has such a name."""
RETURN = f"{COPY}return/"
"""Prefix of the names of KV write-backs."""
STREAM = f"{COPY}stream/"
"""Prefix of the names of copies of a prompt stream's KV that are made while the prompt arrives."""
Phase = Literal["both", "prefill", "decode", "return"]
"""The part of a request that a worker does: all of it; the prompt and the next token, for another worker;
decoding, after another worker has sent the KV; or sending the KV of all these tokens, which it has cached, as
a cache copy."""


class Submit(msgspec.Struct, tag=True, frozen=True):
    """Generate. `outputs` maps each requested choice to the tokens it has already emitted: none for a fresh
    request, some when it resumes after the loss of a worker; `began` is the time of the first token of each
    such choice. `params.seed` and `params.max_tokens` are set.

    An `open` prompt, which may be empty, is a prompt stream: its KV is computed as far as the prompt is
    known, and nothing is sampled until an Edit finishes it. Its last `tail` tokens are expected to stay last
    (a query after a growing context): they are computed when nothing else can run. With `answer_early` the
    present prompt is answered, and the tokens are withdrawn when it changes. `version` is the prompt's
    version.

    `phase`: a prefill worker computes the prompt and the next token, and sends its KV. A decode worker
    reserves blocks for that KV and continues once it has arrived. With `hold` a prefill worker computes the
    last token of the prompt, which gives the first one, only when it has the reservation.

    `keep`: the digest under which the worker keeps the outputs for a next head (protocol/kept.py); empty: it
    does not.

    `adapter`: the LoRA adapter that computes it, which was loaded by a LoadAdapter before; empty: none.
    `rescheduled`: whether a worker has scheduled the request before, in an earlier attempt.
    """

    request: str
    attempt: AttemptNumber
    prompt: list[int]
    params: SamplingParams
    outputs: dict[int, list[int]]
    arrival: float
    priority: int = 0
    cache_salt: str = ""
    began: dict[int, float] = {}
    open: bool = False
    answer_early: bool = False
    tail: int = 0
    version: int = 0
    phase: Phase = "both"
    adapter: Fingerprint = ""
    hold: bool = False
    keep: bytes = b""
    rescheduled: bool = False


class Edit(msgspec.Struct, tag=True, frozen=True):
    """Edit a prompt stream: it becomes its first `retained` tokens, followed by `tokens`; the last `tail` of
    all are as in Submit. `finish` completes the prompt, and sampling begins, with `params` if given. The edit
    came at `arrival`. Edits of unknown or finished prompts, or of other attempts, are ignored."""

    request: str
    attempt: AttemptNumber
    version: int
    retained: int
    tokens: list[int]
    finish: bool = False
    params: SamplingParams | None = None
    tail: int = 0
    arrival: float = 0.0


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """Stop a request, or one choice of it, and free its resources. Unknown ids are ignored."""

    request: str
    choice: int | None = None


class LoadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Load the LoRA adapter in the folder `path`, whose files must have the hash `fingerprint`; AdapterLoaded
    answers. An adapter that is loaded already is not loaded again."""

    fingerprint: Fingerprint
    path: str


class UnloadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Free a LoRA adapter's memory: no open request needs it any more."""

    fingerprint: Fingerprint


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Shut down: the worker closes everything and exits with status 0."""


class Leave(msgspec.Struct, tag=True, frozen=True):
    """The lease of the head is about to end: remove all requests, write to no other worker's memory any more,
    keep weights and prefix cache, and answer Left."""


class Adopt(msgspec.Struct, tag=True, frozen=True):
    """Serve another head with this configuration, after Left; Ready answers. `closed` is the time of this
    machine until which blocks stay closed that workers of the head before could still write."""

    config: WorkerConfig
    closed: float


class TopLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One entry of a list of most likely tokens."""

    token: int
    logprob: float


class Token(msgspec.Struct, tag=True, frozen=True, array_like=True, gc=False):
    """Output token number `index` of choice `choice`. `finish` is set on the last one; with "stop" the token
    itself (end of text, or a stop id) is not part of the text."""

    request: str
    attempt: AttemptNumber
    choice: int
    index: int
    token: int
    logprob: float | None = None
    top: list[TopLogprob] | None = None
    finish: FinishReason | None = None


class PromptLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability and rank (1 = most likely) of one prompt token given those before it."""

    token: int
    logprob: float
    rank: int
    top: list[TopLogprob]


class PromptLogprobs(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """Log-probabilities of the prompt tokens at positions `start`, `start` + 1, … (position 0 has none)."""

    request: str
    attempt: AttemptNumber
    start: int
    entries: list[PromptLogprob]


class Pooled(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """The vector of a request with `pooling`: float32 numbers, little-endian."""

    request: str
    attempt: AttemptNumber
    vector: bytes


class Admitted(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """A choice was scheduled, `queued` seconds after its request came: its first chunk is in this step, and
    `cached` of its tokens were found in the prefix index. Sent again after a preemption."""

    request: str
    attempt: AttemptNumber
    choice: int
    cached: int
    queued: float = 0.0


class DraftVerified(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """A step verified `drafted` draft tokens of a choice, and `accepted` of them became outputs: the next
    tokens of that choice."""

    request: str
    attempt: AttemptNumber
    choice: int
    drafted: int
    accepted: int


class Finished(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """A choice ended without a further token (nothing to generate, cancelled, or refused with `error`). A
    refusal has an HTTP `status`, and `retry_after` seconds if a later retry may succeed."""

    request: str
    attempt: AttemptNumber
    choice: int
    reason: FinishReason
    error: str = ""
    status: int = 400
    retry_after: float | None = None


class Progress(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """The KV of `computed` of the `tokens` tokens of a prompt stream's version is computed. Sent when an edit
    has been applied, when everything computable is computed, and periodically in between."""

    request: str
    attempt: AttemptNumber
    version: int
    computed: int
    tokens: int


class Withdrawn(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """The prompt became `version`, different from the one that was answered: the tokens of all choices so far
    are void, and the following ones begin at index 0 again."""

    request: str
    attempt: AttemptNumber
    version: int


Event = Token | PromptLogprobs | Pooled | Admitted | DraftVerified | Finished | Progress | Withdrawn


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's description of the model it serves."""

    architecture: str
    parameters: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    weight_bytes: int
    dtype: str
    row_invariant: bool
    fingerprint: str
    quantization: str = "none"
    """How the weights of the layers were rounded."""
    head_quantization: str = "none"
    """How those of the head were."""
    hidden_size: int = 0
    """How many numbers a pooled hidden state has."""
    kv_cache_dtype: str = "auto"
    """Data type of the KV cache; auto: `dtype`."""
    backend: str = ""
    """What computes it: implementation and instructions."""
    notice: str = ""
    """What users should know of the model; empty if there is nothing."""
    numerics_class: str = ""
    """The name that backends share which compute the same bits; by default the backend's."""

    @property
    def numerics(self) -> str:
        """What the bits of a step depend on besides weights, configuration and, where plain torch computes,
        the host. Workers share KV, and take over each other's requests, only if it is equal."""
        return f"{self.numerics_class or self.backend}, {self.precision}, streamserve {__version__}"

    @property
    def kv_name(self) -> str:
        """The name of the model in those of its KV: KV of another one is never used."""
        return f"{self.fingerprint}/{self.numerics}"

    @property
    def system_fingerprint(self) -> str:
        """OpenAI's field: a request with a seed has the same text while it is equal."""
        return self.fingerprint_with("")

    def fingerprint_with(self, adapter: str) -> str:
        """Return the system fingerprint of requests with a LoRA adapter, given by its fingerprint."""
        name = f"{self.kv_name}/{adapter}" if adapter else self.kv_name
        return f"fp_{blake2b(name.encode(), digest_size=6).hexdigest()}"

    @property
    def precision(self) -> str:
        """Data types and quantization in words."""
        parts = [self.dtype]
        if self.quantization != "none":
            parts.append(f"layers in {self.quantization}")
        if self.head_quantization != "none":
            parts.append(f"head in {self.head_quantization}")
        if self.kv_cache_dtype != "auto":
            parts.append(f"KV cache in {self.kv_cache_dtype}")
        return ", ".join(parts)


class CostCurve(msgspec.Struct, frozen=True, kw_only=True):
    """The measured cost of a worker's steps: the fields of contracts.cost.StepCost. The KV of one token
    takes `kv_token_bytes` bytes."""

    kv_token_bytes: int
    tokens: tuple[int, ...]
    kv_bytes: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    pair_seconds: float
    token_seconds: float
    byte_seconds: float


class Ready(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The worker has loaded its model and accepts requests. `draft`: the fingerprint of the draft model whose
    KV is stored with the target's. `cost`: present where the model has been profiled. `weights_shared`: the
    weights are in memory that the host's other workers use too. `swap_bytes`: of host memory for swapped
    KV. `adopted`: it served another head before, and had all of this already."""

    version: int
    model: ModelInfo
    num_blocks: int
    block_size: int
    max_num_seqs: int
    kv_cache_bytes: int
    load_seconds: float
    draft: str = ""
    cache: CacheAddress | None = None
    cost: CostCurve | None = None
    weights_shared: bool = False
    swap_bytes: int = 0
    adopted: bool = False


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The worker could not start, and why; it exits with `code` right after. A `misfit` would serve another
    model than the others."""

    error: str
    code: int
    misfit: bool = False


class Events(msgspec.Struct, tag=True, frozen=True):
    """All events of one step, in order."""

    events: list[Event]


class Reserved(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """A decode worker has reserved blocks for the KV of a request's sequence."""

    request: str
    attempt: AttemptNumber
    reservation: TransferReservation


class Pushed(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """A worker will no longer write to a transfer reservation. Without an `error` all of its KV has arrived,
    of the first `groups` KV cache groups: `sent` bytes, the last of them `exposed` seconds after the prompt
    was computed. With an error of the transport it is `doubtful` whether bytes are still on the way."""

    request: str
    attempt: AttemptNumber
    reservation_id: str
    error: str = ""
    sent: int = 0
    exposed: float = 0.0
    groups: int = 1
    doubtful: bool = False


class Deferred(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """A decode worker defers the reservation for a request: with it, latency targets would be missed."""

    request: str
    attempt: AttemptNumber


TransferUpdate = Reserved | Pushed | Deferred


class Cached(msgspec.Struct, tag=True, frozen=True):
    """Full blocks, by hash, that the prefix index has added or removed."""

    stored: list[bytes]
    dropped: list[bytes]


class Transfers(msgspec.Struct, tag=True, frozen=True):
    """Updates of transfer reservations; sent after the events that came before them."""

    updates: list[TransferUpdate]


class Work(msgspec.Struct, frozen=True, array_like=True):
    """Something that a worker did: a lifecycle event of a request (engine/observer.py) `at` a time of the
    clock that all processes of a machine share, or a "step" over `query_tokens` tokens that began then."""

    name: str
    request: str
    at: float
    seconds: float = 0.0
    query_tokens: int = 0


class AdapterLoaded(msgspec.Struct, tag=True, frozen=True):
    """A LoRA adapter is loaded, or with an `error` it cannot be."""

    fingerprint: Fingerprint
    error: str = ""


class Left(msgspec.Struct, tag=True, frozen=True):
    """The worker has done what Leave says; it sends nothing more until it is adopted."""


class KeptToken(msgspec.Struct, frozen=True, array_like=True):
    """An output token, as in Token; without its log-probability where only its id was known."""

    token: int
    logprob: float | None = None
    top: list[TopLogprob] | None = None
    finish: FinishReason | None = None


class KeptOutput(msgspec.Struct, frozen=True, array_like=True):
    """The first tokens of each choice of a request, known by its digest."""

    digest: Digest
    choices: dict[int, list[KeptToken]]


class KeptOutputs(msgspec.Struct, tag=True, frozen=True):
    """Outputs of requests of another head that an adopted worker has kept. They are exact for the `model`
    with this name (ModelInfo.kv_name)."""

    model: str
    outputs: Annotated[list[KeptOutput], msgspec.Meta(max_length=MAX_KEPT_OUTPUTS)]


class Traced(msgspec.Struct, tag=True, frozen=True):
    """A worker's actions, if tracing is on; sent before the events that they led to."""

    work: list[Work]


ToEngine = Submit | Edit | Cancel | Push | Join | Release | Hold | LoadAdapter | UnloadAdapter
ToWorker = ToEngine | Stop | Leave | Adopt
FromWorker = (
    Ready | Failed | Events | Transfers | Cached | Traced | Report | AdapterLoaded | KeptOutputs | Left
)

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def encode(message: ToWorker | FromWorker) -> bytes:
    """Return one message as msgpack bytes."""
    return _encoder.encode(message)


def decode_to_worker(data: bytes) -> ToWorker:
    """Decode a message on the worker's side. Raises msgspec.DecodeError on anything else."""
    return _to_worker.decode(data)


def decode_from_worker(data: bytes) -> FromWorker:
    """Decode a message on the control side. Raises msgspec.DecodeError on anything else."""
    return _from_worker.decode(data)
