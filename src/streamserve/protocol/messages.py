"""Messages between the control process and a worker: tagged msgspec structs, encoded as msgpack.

control → worker    Submit, Edit, Cancel, Stop; in stream pairs Push, Join, Release, Hold (transfers.py); for
                    LoRA adapters LoadAdapter, UnloadAdapter
worker  → control   Ready, Failed, Events, Transfers, Traced, Report, AdapterLoaded, KeptOutputs
agent   → worker    Leave, Adopt: between two heads; answered by Left
"""

from collections.abc import Callable
from enum import Enum
from hashlib import blake2b
from typing import Annotated, Any, Literal

import msgspec

from streamserve import __version__
from streamserve.protocol.adapters import Fingerprint
from streamserve.protocol.config import WorkerConfig
from streamserve.protocol.cost_curve import CostCurve
from streamserve.protocol.kept import LOGPROB_BYTES, MAX_KEPT_OUTPUTS, TOKEN_BYTES, Digest
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
Phase = Literal["both", "prefill", "decode", "return"]
"""The part of a request that a worker computes:

- both: all of it.
- prefill: the prompt and the next token; another worker continues.
- decode: the output, after another worker has sent the KV.
- return: nothing; it sends the cached KV of all these tokens as a cache copy.
"""


class RequestKind(Enum):
    """What a request is for: a client, or a cache copy between two workers, for which no client waits."""

    CLIENT = "client"
    WRITEBACK = "writeback"
    """Copies the KV of a finished request to its prefill worker."""
    STREAM_PUSH = "stream_push"
    """Copies the KV of a prompt stream to its decode worker while the prompt arrives."""


class GenerateRequest(msgspec.Struct, frozen=True):
    """A request to generate, as it travels from the API to the engine: Open and Submit extend it.
    `params.seed` and `params.max_tokens` are set.

    An `open` prompt, which may be empty, is a prompt stream: its KV is computed as far as the prompt is
    known, and nothing is sampled until an Edit finishes it. Its last `tail` tokens are expected to stay last
    (a query after a growing context): they are computed when nothing else can run. With `answer_early`, the
    present prompt is answered, and its tokens become void when it changes. `version` is the prompt's version.

    - `adapter`: the fingerprint of the LoRA adapter to compute with; empty: none.
    - `keep`: the digest under which workers keep the outputs for a next head (protocol/kept.py); empty: they
      keep none.
    """

    request: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    open: bool = False
    answer_early: bool = False
    tail: int = 0
    version: int = 0
    adapter: Fingerprint = ""
    keep: bytes = b""

    def fields(self) -> dict[str, Any]:
        """Return the fields of GenerateRequest by name, without further fields of a struct that extends
        it."""
        return {name: getattr(self, name) for name in GenerateRequest.__struct_fields__}


class Submit(GenerateRequest, tag=True, frozen=True, kw_only=True):
    """Generate. `outputs` maps each requested choice to its tokens so far: none for a new request, some if it
    continues after the loss of a worker. `began` is the time of the first token of each choice that has one.
    The `adapter` was loaded by an earlier LoadAdapter.

    `phase`: a prefill worker computes the prompt and the next token, and sends its KV. A decode worker
    reserves blocks for this KV and continues once it has arrived. With `hold`, a prefill worker computes the
    last token of the prompt, and so the first output token, only when it has the reservation.

    - `rescheduled`: whether a worker has scheduled the request before, in an earlier attempt.
    - `kind`: what the request is for.
    """

    outputs: dict[int, list[int]]
    attempt: AttemptNumber = 0
    arrival: float = 0.0
    began: dict[int, float] = {}
    phase: Phase = "both"
    hold: bool = False
    rescheduled: bool = False
    kind: RequestKind = RequestKind.CLIENT


class Edit(msgspec.Struct, tag=True, frozen=True):
    """Edit a prompt stream: its first `retained` tokens stay, and `tokens` follow them. `tail` is as in
    GenerateRequest. `finish` completes the prompt: sampling begins, with `params` if given. The edit came at
    `arrival`. Edits of unknown or finished prompts, and of other attempts, are ignored."""

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
    """Stop a request, or one of its choices, and free its resources. Unknown ids are ignored."""

    request: str
    choice: int | None = None


class LoadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Load the LoRA adapter in the folder `path`, whose files must have the hash `fingerprint`. AdapterLoaded
    answers. A loaded adapter is not loaded again."""

    fingerprint: Fingerprint
    path: str


class UnloadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Free a LoRA adapter's memory: no open request uses it."""

    fingerprint: Fingerprint


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Shut down: the worker closes everything and exits with status 0."""


class Leave(msgspec.Struct, tag=True, frozen=True):
    """The head's lease is about to end: remove all requests, stop writing to other workers' memory, keep
    weights and prefix cache, and answer Left."""


class Adopt(msgspec.Struct, tag=True, frozen=True):
    """Serve another head with this configuration, after Left. Ready answers. Workers of the earlier head
    could still write some blocks: these stay closed until the time `closed` of this machine."""

    config: WorkerConfig
    closed: float


class LikelyToken(msgspec.Struct, frozen=True, array_like=True):
    """A token of a list of most likely tokens, and its log-probability."""

    token: int
    logprob: float


class Token(msgspec.Struct, tag=True, frozen=True, array_like=True, gc=False):
    """Output token number `index` of choice `choice`. `finish` is set on the last token; with "stop", this
    token (end of text, or a stop id) is not part of the text."""

    request: str
    attempt: AttemptNumber
    choice: int
    index: int
    token: int
    logprob: float | None = None
    top: list[LikelyToken] | None = None
    finish: FinishReason | None = None


class PromptLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability and rank (1 = most likely) of one prompt token, given the tokens before it."""

    token: int
    logprob: float
    rank: int
    top: list[LikelyToken]


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
    """A choice was scheduled `queued` seconds after its request came: its first chunk is in this step.
    `cached` of its tokens were found in the prefix index. Sent again after a preemption."""

    request: str
    attempt: AttemptNumber
    choice: int
    cached: int
    queued: float = 0.0


class DraftVerified(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """A step verified `drafted` draft tokens of a choice. `accepted` of them are outputs: the next tokens of
    the choice."""

    request: str
    attempt: AttemptNumber
    choice: int
    drafted: int
    accepted: int


class Finished(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """A choice ended without a further token: nothing to generate, cancelled, or refused with an `error`. A
    refusal has an HTTP `status`, and `retry_after` (seconds) if a later attempt may succeed."""

    request: str
    attempt: AttemptNumber
    choice: int
    reason: FinishReason
    error: str = ""
    status: int = 400
    retry_after: float | None = None


class Progress(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """The KV of the first `computed` tokens of a prompt stream's version, which has `tokens` tokens, is
    computed. Sent when an edit has been applied, when everything computable is computed, and periodically in
    between."""

    request: str
    attempt: AttemptNumber
    version: int
    computed: int
    tokens: int


class OutputWithdrawn(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """The prompt became `version`, which differs from the version that was answered. The tokens of all
    choices so far are void; the following tokens begin at index 0 again."""

    request: str
    attempt: AttemptNumber
    version: int


Event = Token | PromptLogprobs | Pooled | Admitted | DraftVerified | Finished | Progress | OutputWithdrawn


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
    """How the output head's weights were rounded."""
    hidden_size: int = 0
    """Size of a pooled hidden state."""
    kv_cache_dtype: str = "auto"
    """Data type of the KV cache; auto: `dtype`."""
    backend: str = ""
    """The implementation that computes the model, and the processor instructions that it uses."""
    notice: str = ""
    """A notice about the model for users; empty if there is none."""
    numerics_class: str = ""
    """Name shared by backends that compute equal bits; by default the backend's name."""

    @property
    def numerics(self) -> str:
        """The properties on which the bits of a step depend, besides weights and configuration (and the
        host, if plain torch computes). Workers share KV and continue each other's requests only if these
        are equal."""
        return f"{self.numerics_class or self.backend}, {self.precision}, streamserve {__version__}"

    @property
    def kv_name(self) -> str:
        """The model's name in the names of its KV: KV under another name is never used."""
        return f"{self.fingerprint}/{self.numerics}"

    @property
    def system_fingerprint(self) -> str:
        """OpenAI's field: as long as it is equal, a request with a seed has the same text."""
        return self.fingerprint_with("")

    def fingerprint_with(self, adapter: str) -> str:
        """Return the system fingerprint of requests with the LoRA adapter that has this fingerprint."""
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


class Ready(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The worker has loaded its model and accepts requests.

    - `draft`: the fingerprint of the draft model whose KV is stored with the target's.
    - `cost`: step costs, if the model has been profiled. `kv_token_bytes`: the size of one token's KV in it.
    - `weights_shared`: whether the weights are in memory that other workers of the host share.
    - `swap_bytes`: host memory for swapped KV.
    - `adopted`: whether it served another head before, and has loaded nothing now.
    """

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
    kv_token_bytes: int = 1
    weights_shared: bool = False
    swap_bytes: int = 0
    adopted: bool = False


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The worker could not start, and why; it then exits with `code`. A `misfit` would serve another model
    than the other workers."""

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
    """A worker no longer writes to a transfer reservation. Without an `error`, the KV of the first `groups`
    KV cache groups has arrived completely: `sent` bytes, the last of them `exposed` seconds after the prompt
    was computed. After a failure of the transport it may be `doubtful` whether bytes are still in flight."""

    request: str
    attempt: AttemptNumber
    reservation_id: str
    error: str = ""
    sent: int = 0
    exposed: float = 0.0
    groups: int = 1
    doubtful: bool = False


class Deferred(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """A decode worker defers the reservation for a request: granted now, it would cause latency targets to be
    missed."""

    request: str
    attempt: AttemptNumber


TransferUpdate = Reserved | Pushed | Deferred


class Cached(msgspec.Struct, tag=True, frozen=True):
    """Full blocks, by hash, that the prefix index has added or removed."""

    stored: list[bytes]
    dropped: list[bytes]


class Transfers(msgspec.Struct, tag=True, frozen=True):
    """Updates of transfer reservations; sent after the events that came before the updates."""

    updates: list[TransferUpdate]


class Work(msgspec.Struct, frozen=True, array_like=True):
    """An action of a worker. Either a lifecycle event of a request (engine/observer.py) at the time `at`, or
    a "step" over `query_tokens` tokens that began at this time. Times are of the clock that all processes of
    a machine share."""

    name: str
    request: str
    at: float
    seconds: float = 0.0
    query_tokens: int = 0


class AdapterLoaded(msgspec.Struct, tag=True, frozen=True):
    """A LoRA adapter is loaded; with an `error` it is not."""

    fingerprint: Fingerprint
    error: str = ""


class Left(msgspec.Struct, tag=True, frozen=True):
    """The worker has done what Leave requires. It sends nothing more until it is adopted."""


class KeptToken(msgspec.Struct, frozen=True, array_like=True):
    """An output token, as in Token. It has no log-probability if only its id was known."""

    token: int
    logprob: float | None = None
    top: list[LikelyToken] | None = None
    finish: FinishReason | None = None

    @property
    def size(self) -> int:
        """The approximate memory that the token takes in a process, in bytes."""
        return TOKEN_BYTES + LOGPROB_BYTES * (len(self.top or ()) + (self.logprob is not None))


class KeptOutput(msgspec.Struct, frozen=True, array_like=True):
    """The first tokens of each choice of a request, which is identified by its digest."""

    digest: Digest
    choices: dict[int, list[KeptToken]]


class KeptOutputs(msgspec.Struct, tag=True, frozen=True):
    """Outputs that an adopted worker has kept from another head's requests. They are exact for the model with
    this name (ModelInfo.kv_name)."""

    model: str
    outputs: Annotated[list[KeptOutput], msgspec.Meta(max_length=MAX_KEPT_OUTPUTS)]


class Traced(msgspec.Struct, tag=True, frozen=True):
    """A worker's actions, if tracing is on; sent before the events that they caused."""

    work: list[Work]


ToEngine = Submit | Edit | Cancel | Push | Join | Release | Hold | LoadAdapter | UnloadAdapter
ToWorker = ToEngine | Stop | Leave | Adopt
FromWorker = (
    Ready | Failed | Events | Transfers | Cached | Traced | Report | AdapterLoaded | KeptOutputs | Left
)

encode: Callable[[ToWorker | FromWorker], bytes] = msgspec.msgpack.Encoder().encode
decode_to_worker: Callable[[bytes], ToWorker] = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker: Callable[[bytes], FromWorker] = msgspec.msgpack.Decoder(FromWorker).decode
"""The decoders raise msgspec.DecodeError for anything else."""
