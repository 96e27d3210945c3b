"""A sequence: the tokens of one output choice, and the state of their computation."""

from collections import deque
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import takewhile
from math import inf

from streamserve.contracts.plan import TARGET
from streamserve.engine.status import TRANSITIONS, SequenceStatus, TransferRole
from streamserve.protocol.messages import Finished, FinishReason, Submit, Token
from streamserve.protocol.sampling import SamplingParams
from streamserve.speculation.slo import MISSED_REQUIREMENT, NO_REQUIREMENT, LatencyRequirement

MAX_EDITS = 64
"""Number of latest edits of a prompt stream whose retained lengths are remembered."""


class StatusError(AssertionError):
    """An illegal change of a sequence's status."""


@dataclass(slots=True)
class KVState:
    """The KV of a sequence: the number of computed tokens in each KV cache group, and the blocks.

    tokens     prompt ─────────────┬ outputs ──┐
    computed   ──────────────┐ KV in the group │      number of tokens, for each group
    blocks     [b0][b1][b2][b3]                       cover at least `computed` positions
    hashes     of the full blocks, as far as needed; `root` is the hash before the first block

    `cached`: cached prefix length in tokens, as of the last lookup in the prefix index. `host_blocks`: blocks
    of the host pool with the KV, while the sequence is swapped out.
    """

    root: bytes
    computed: list[int]
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    cached: int = 0
    host_blocks: list[int] = field(default_factory=list)


@dataclass(slots=True)
class DecodeClock:
    """The decode clock. It runs from the first token on, even while the sequence is preempted, because the
    client waits meanwhile. `seconds` is its value when the step began, `start` the number of outputs when the
    clock started."""

    first_token_at: float | None = None
    seconds: float = 0.0
    start: int = 1


class MemoryClaim(Enum):
    """The memory that an open prompt stream may take.

    ANY ──── evicted while it has nothing to compute ───▶ NONE ◀── free blocks for all of it ──▶ FREE
     ▲                                                     │       (KVAllocator.review_claims)    │
     └────────────────── its prompt changes ───────────────┴──────────────────────────────────────┘

    KV that was evicted while its stream had nothing to compute is computed again in free blocks only.
    Otherwise two prompt streams that do not both fit into memory would evict each other for ever.

    * ANY: free blocks, and the blocks of lower-ranked sequences, which are evicted.
    * FREE: free blocks. The stream evicts no other sequence, and ranks below streams with the claim ANY.
    * NONE: no blocks. The stream has nothing to compute.
    """

    ANY = 0
    FREE = 1
    NONE = 2


@dataclass(slots=True)
class PromptStreamState:
    """The state of a prompt stream. For a prompt that was complete on arrival it never changes.

    * `open`: the prompt may still be edited. It is sampled only if the request has `answer_early`; edits
      withdraw the answer.
    * `tail`: number of last prompt tokens that are only computed in otherwise idle steps while it is open.
    * `version`: number of the latest edit.
    * `last_chunk_at`: when the latest part of the prompt arrived.
    * `finished_at`: when the stream was finished; None while it is open, and for other prompts.
    * `retained_lengths`: retained prefix lengths of the latest edits, in tokens.
    * `survival`: the share of the prompt that is expected to survive its next edit.
    * `progress_at`: when the latest Progress event was sent.
    * `final_event`: the final event of an early answer, held back until the prompt is finished.
    * `claim`: the memory that the stream may take.

    dataclasses.replace copies the fields up to `finished_at`; the others get their defaults.
    """

    open: bool = False
    tail: int = 0
    version: int = 0
    last_chunk_at: float = 0.0
    survival: float = 1.0
    finished_at: float | None = None
    retained_lengths: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_EDITS), init=False)
    progress_at: float = field(default=-1.0, init=False)
    final_event: Token | Finished | None = field(default=None, init=False)
    claim: MemoryClaim = field(default=MemoryClaim.ANY, init=False)


@dataclass(slots=True)
class Transfer:
    """A sequence's part in a KV transfer.

    * `has_reservation`: whether it holds a transfer reservation: blocks on the worker that its KV is sent to.
    * `hold`: whether its last prompt token is computed only with the reservation. So its first output is not
      sampled before.
    * `deferred`: whether the reservation of blocks here was deferred, for the sake of latency targets.
    """

    role: TransferRole = TransferRole.LOCAL
    has_reservation: bool = False
    hold: bool = False
    deferred: bool = False


@dataclass(eq=False)
class EngineSequence:
    """A sequence: the tokens of one output choice, prompt and outputs, and the state of their computation.
    engine/status.py describes its `status`.

    `submitted`: the request as it arrived. What edits of a prompt stream change has fields of its own:
    `params`, `prompt_length`, `tokens`, `stream`. `choices`: the output choices that are sampled from it. A
    fresh request is one sequence for all its choices. They fork when the prompt is computed, and then each
    sequence has one. `check`: whether an illegal change of status raises StatusError.
    """

    id: int
    submitted: Submit
    choices: tuple[int, ...]
    params: SamplingParams
    prompt_length: int
    tokens: list[int]
    kv: KVState
    clock: DecodeClock = field(default_factory=DecodeClock)
    stream: PromptStreamState = field(default_factory=PromptStreamState)
    transfer: Transfer = field(default_factory=Transfer)
    status: SequenceStatus = SequenceStatus.WAITING
    passed_over: bool = False
    """Whether it was left out when a step last considered it: for lack of memory or sequence slots, or
    because another sequence computes its next block."""
    cached_at_start: int | None = None
    """Number of the sequence's tokens that were cached when it was admitted; None after its first step."""
    aged_in: bool = False
    """Whether the sequence was aged in: admitted although other requests may miss their targets because of
    it."""
    preempted_at: int = -1
    """Number of outputs when the sequence was last preempted; -1: never."""
    lookup_counted: bool = False
    """Whether the prefix cache statistics contain the sequence's request. They count the cached tokens when a
    request is scheduled for the first time, not the tokens that it finds again after a preemption."""
    prompt_logprobs_done: bool = True
    prompt_logprobs_sent: int = 0
    epoch: int = 0
    state_sent: bool = False
    """Whether the executor has this sequence's sampling state."""
    state_stale: bool = False
    """Whether the executor's sampling state is outdated, because the prompt was edited or the sequence
    begins again."""
    check: bool = False

    @property
    def request(self) -> str:
        """The request's id."""
        return self.submitted.request

    @property
    def attempt(self) -> int:
        """The request's attempt that this worker serves."""
        return self.submitted.attempt

    def become(self, status: SequenceStatus) -> None:
        """Change the status. With `check`, raises StatusError if the change is illegal (TRANSITIONS)."""
        if self.check and status not in TRANSITIONS[self.status]:
            raise StatusError(
                f"sequence {self.id} of {self.request} cannot become {status.label}: "
                f"it is {self.status.label}"
            )
        self.status = status

    @property
    def pending(self) -> int:
        """Number of tokens whose target KV is not computed yet; 1 while decoding."""
        return len(self.tokens) - self.kv.computed[TARGET]

    def todo(self, idle: bool) -> int:
        """Return the number of tokens that a step should compute.

        For an open prompt stream without an early answer:

        * The last token is left out, because its output is not needed yet.
        * The tail is computed only if the step would be `idle` otherwise.
        * Without a claim to memory it is 0.
        * While swapped out it is 0 until more new tokens have arrived than were computed: for fewer, the
          copies would take longer than they save.
        """
        stream = self.stream
        if stream.final_event is not None:
            return 0
        computed = self.kv.computed[TARGET]
        pending = len(self.tokens) - computed
        if not stream.open or self.submitted.answer_early:
            return self._unheld(pending) if self.transfer.hold else pending
        if stream.claim is MemoryClaim.NONE:
            return 0
        last = 1 if idle else stream.tail or 1
        if self.status is SequenceStatus.SWAPPED and not idle and pending - last < computed:
            return 0
        return pending - last if pending > last else 0

    def _unheld(self, pending: int) -> int:
        """Return the number of pending tokens that `hold` does not hold back. The cached prefix of a waiting
        sequence is subtracted, or the sequence would start with nothing to compute."""
        if self.transfer.has_reservation:
            return pending
        cached = self.kv.cached if self.status is SequenceStatus.WAITING else 0
        return max(0, pending - 1 - cached)

    @property
    def streamed(self) -> bool:
        """Whether the sequence's prompt is, or was, a prompt stream."""
        return self.stream.open or self.stream.finished_at is not None

    @property
    def edit_stability(self) -> int:
        """Edit stability: how many of the latest edits in a row retained the token to compute next."""
        computed = self.kv.computed[TARGET]
        return sum(1 for _ in takewhile(lambda kept: kept > computed, reversed(self.stream.retained_lengths)))

    @property
    def edit_stable_tokens(self) -> int:
        """Number of tokens, from the next token to compute on, that are about as edit-stable as this token:
        up to the end of the next retained prefix of a recent edit."""
        computed = self.kv.computed[TARGET]
        return (
            min((kept for kept in self.stream.retained_lengths if kept > computed), default=len(self.tokens))
            - computed
        )

    @property
    def decoding(self) -> bool:
        """Whether the sequence lacks only the KV of its last token, and is to be sampled."""
        stream = self.stream
        sampled = stream.final_event is None and (not stream.open or self.submitted.answer_early)
        return (
            sampled
            and self.status is SequenceStatus.RUNNING
            and len(self.tokens) == self.kv.computed[TARGET] + 1
        )

    @property
    def outputs(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def decodes(self) -> bool:
        """Whether this worker generates the sequence's output tokens: the KV is not sent away, and the
        request does not only fill the cache (`max_tokens` 0)."""
        return not self.transfer.role.sends and self.params.max_tokens != 0

    @property
    def completed_at(self) -> float:
        finished_at = self.stream.finished_at
        return self.submitted.arrival if finished_at is None else finished_at

    @property
    def deadline(self) -> float | None:
        """When the sequence's first token is due, on the engine's clock. None without a target, after the
        first token, and while the prompt is open: the time to first token counts from the end of the
        prompt."""
        ttft = self.params.slo.ttft_ms
        return None if ttft is None or self.outputs or self.stream.open else self.completed_at + ttft / 1000

    @property
    def requirement(self) -> LatencyRequirement:
        """The time per output token that this step must not exceed for the request to meet its target. There
        is no requirement before the first token, nor if the first token was late: then the request has
        already missed its targets."""
        tpot = self.params.slo.tpot_ms
        if tpot is None or not self.outputs:
            return NO_REQUIREMENT
        clock = self.clock
        if clock.first_token_at is not None and self.late(clock.first_token_at):
            return MISSED_REQUIREMENT
        return LatencyRequirement(tpot / 1000, clock.seconds, max(0, self.outputs - clock.start))

    def late(self, now: float) -> bool:
        """Whether a first token at `now` would miss its target."""
        ttft = self.params.slo.ttft_ms
        return ttft is not None and not self.stream.open and now > self.completed_at + ttft / 1000

    def tpot(self, now: float) -> float | None:
        """Return the request's target for the time per output token, in seconds; inf if the target for the
        first token was missed, None without a target."""
        tpot = self.params.slo.tpot_ms
        if tpot is None:
            return None
        first = self.clock.first_token_at
        first = now if first is None and not self.outputs else first
        return inf if first is not None and self.late(first) else tpot / 1000

    def tick(self, now: float) -> None:
        """Set the decode clock at the beginning of a step. The clock starts with the first step after an
        output token."""
        clock = self.clock
        if clock.first_token_at is None:
            if len(self.tokens) == self.prompt_length:
                return
            clock.first_token_at, clock.start = now, self.outputs
        clock.seconds = max(0.0, now - clock.first_token_at)

    def outputs_left(self, max_model_len: int) -> int:
        """Return the number of tokens that the sequence may still output."""
        left = max_model_len - len(self.tokens)
        limit = self.params.max_tokens
        return left if limit is None else min(left, limit - self.outputs)

    def finish_reason(self, eos_token_ids: frozenset[int], max_model_len: int) -> FinishReason | None:
        """Return why the sequence ends with its last token; None if it goes on."""
        params, length = self.params, len(self.tokens)
        outputs = length - self.prompt_length
        if outputs > params.min_tokens:
            last = self.tokens[-1]
            ends_text = last in eos_token_ids and not params.ignore_eos
            if ends_text or last in params.stop_token_ids:
                return "stop"
        limit = params.max_tokens
        if length >= max_model_len or (limit is not None and outputs >= limit):
            return "length"
        return None

    def branch(self, id: int, choice: int) -> "EngineSequence":
        """Return a copy of the sequence for another choice of the same request, without blocks."""
        return EngineSequence(
            id=id,
            submitted=self.submitted,
            choices=(choice,),
            params=self.params,
            prompt_length=self.prompt_length,
            tokens=list(self.tokens),
            kv=KVState(self.kv.root, []),
            stream=replace(self.stream),
            lookup_counted=True,
            check=self.check,
        )
