"""A sequence: the tokens of one output choice, and how many of them each KV cache group has computed."""

from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf

from streamserve.engine.plan import TARGET
from streamserve.protocol.messages import Finished, FinishReason, Token
from streamserve.protocol.sampling import SamplingParams
from streamserve.speculation.slo import MISSED_REQUIREMENT, NO_REQUIREMENT, LatencyRequirement

MAX_EDITS = 64
"""Number of edits of a prompt stream that are remembered."""


@dataclass(eq=False)
class Sequence:
    """A sequence is *running* while it holds blocks, *swapped* while host blocks hold its KV, and otherwise
    waits.

    tokens     prompt ─────────────┬ outputs ──┐      len(tokens)
    computed   ──────────────┐ KV in the group │      pending = len(tokens) - computed
    blocks     [b0][b1][b2][b3]                       cover at least `computed` positions
    hashes     of the full blocks, as far as needed

    `choices`: the output choices that are sampled from it. A fresh request is one sequence for all its
    choices; they fork when its prompt is computed, and then each has one.

    While its prompt is `open` (a prompt stream) it may be edited, which `version` counts, and it is only
    sampled if answered `early`; the prompt's last `tail` tokens are computed last.

    The decode clock runs from the first token on, even while the sequence is preempted, because the client
    waits meanwhile. `decode_seconds` is its value when the step began.
    """

    id: int
    request: str
    attempt: int
    choices: tuple[int, ...]
    params: SamplingParams
    prompt_length: int
    tokens: list[int]
    root: bytes
    priority: int
    arrival: float
    computed: list[int]
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    """Cached prefix length in tokens, as of the last lookup in the prefix index."""
    hashes: list[bytes] = field(default_factory=list)
    prompt_logprobs_done: bool = True
    prompt_logprobs_sent: int = 0
    epoch: int = 0
    preempted_at: int = -1
    """Number of outputs when it was last preempted."""
    first_token_at: float | None = None
    decode_seconds: float = 0.0
    clock_start: int = 1
    """Number of outputs when the decode clock started."""
    state_sent: bool = False
    """Whether the executor holds this sequence's sampling state."""
    state_stale: bool = False
    """Whether the executor's sampling state is of an earlier prompt."""
    swapped: list[int] = field(default_factory=list)
    """Host blocks that hold the `computed` tokens' KV while the sequence is swapped out."""
    open: bool = False
    early: bool = False
    tail: int = 0
    version: int = 0
    last_chunk_at: float = 0.0
    """When the latest part of the prompt arrived."""
    finished_at: float | None = None
    """When a prompt stream was finished; None for one that is open, and for other prompts."""
    retained_lengths: deque[int] = field(default_factory=lambda: deque(maxlen=MAX_EDITS))
    """Retained prefix lengths of the latest edits, in tokens."""
    survival: float = 1.0
    """The share of a prompt stream that is expected to survive its next edit."""
    progress_at: float = -1.0
    """When the latest Progress event was sent."""
    final_event: Token | Finished | None = None
    """The final event of an early answer, held back: it stands once the prompt is finished."""
    handoff: bool = False
    """Whether its KV goes to another worker."""
    granted: bool = False
    """Whether it holds a transfer reservation: blocks on that other worker."""
    returned: bool = False
    """Whether the transfer is a KV write-back for the next turn of a chat: no request waits for it."""
    reserved: bool = False
    """Whether another worker computes its KV: until that has arrived, it only needs blocks."""
    aged_in: bool = False
    """Whether it was aged in: admitted although that may make other requests miss their targets."""
    held: bool = False
    """Whether it takes no part in steps, because other workers read or write its blocks."""
    waiting: bool = False
    """Whether it could not start when it was last considered: for lack of memory or sequence slots, or
    because another sequence computes its next block."""

    @property
    def running(self) -> bool:
        return bool(self.blocks)

    @property
    def pending(self) -> int:
        """Number of tokens whose target KV is not computed yet; 1 while decoding."""
        return len(self.tokens) - self.computed[TARGET]

    def todo(self, idle: bool) -> int:
        """Return how many tokens a step should compute. Of a prompt stream without an early answer that is
        all but the last token, whose output is not needed yet, and its tail only where a step would be `idle`
        otherwise. A swapped prompt stream has nothing to compute until as many new tokens have arrived as it
        has computed: for fewer, the copies would take longer than they save."""
        if self.final_event is not None:
            return 0
        pending = len(self.tokens) - self.computed[TARGET]
        if not self.open or self.early:
            return pending
        last = 1 if idle else self.tail or 1
        if self.swapped and not idle and pending - last < self.computed[TARGET]:
            return 0
        return pending - last if pending > last else 0

    @property
    def streamed(self) -> bool:
        """Whether its prompt is, or was, a prompt stream."""
        return self.open or self.finished_at is not None

    @property
    def edit_stability(self) -> int:
        """Edit stability: how many of the latest edits in a row retained the token to compute next."""
        computed = self.computed[TARGET]
        return sum(1 for _ in takewhile(lambda kept: kept > computed, reversed(self.retained_lengths)))

    @property
    def edit_stable_tokens(self) -> int:
        """How many tokens from there on are about as edit-stable: up to the end of the next retained prefix
        of a recent edit."""
        computed = self.computed[TARGET]
        return (
            min((kept for kept in self.retained_lengths if kept > computed), default=len(self.tokens))
            - computed
        )

    @property
    def decoding(self) -> bool:
        """Whether it lacks only the KV of its last token, and is to be sampled."""
        sampled = self.final_event is None and (not self.open or self.early)
        return sampled and bool(self.blocks) and len(self.tokens) == self.computed[TARGET] + 1

    @property
    def outputs(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def completed_at(self) -> float:
        """When the prompt was complete."""
        return self.arrival if self.finished_at is None else self.finished_at

    @property
    def deadline(self) -> float | None:
        """When its first token is due; None without a target, after the first token, and while the prompt is
        a stream: the time to first token counts from the end of the prompt."""
        ttft = self.params.slo.ttft_ms
        return None if ttft is None or self.outputs or self.open else self.completed_at + ttft / 1000

    @property
    def requirement(self) -> LatencyRequirement:
        """What its target for the time per output token asks of this step: nothing before the first token,
        and nothing if the first token came too late, since such a request has already missed its targets."""
        tpot = self.params.slo.tpot_ms
        if tpot is None or not self.outputs:
            return NO_REQUIREMENT
        if self.first_token_at is not None and self.late(self.first_token_at):
            return MISSED_REQUIREMENT
        return LatencyRequirement(tpot / 1000, self.decode_seconds, max(0, self.outputs - self.clock_start))

    def late(self, now: float) -> bool:
        """Whether a first token at `now` would miss its target."""
        ttft = self.params.slo.ttft_ms
        return ttft is not None and not self.open and now > self.completed_at + ttft / 1000

    def tpot(self, now: float) -> float | None:
        """Return its target for the time per output token, in seconds; inf if it has missed its target for
        the first token, None if it has no target."""
        tpot = self.params.slo.tpot_ms
        if tpot is None:
            return None
        first = now if self.first_token_at is None and not self.outputs else self.first_token_at
        return inf if first is not None and self.late(first) else tpot / 1000

    def tick(self, now: float) -> None:
        """Read the decode clock as a step begins. The clock starts at the first step that finds an output
        token."""
        if self.first_token_at is None:
            if len(self.tokens) == self.prompt_length:
                return
            self.first_token_at, self.clock_start = now, self.outputs
        self.decode_seconds = max(0.0, now - self.first_token_at)

    def outputs_left(self, max_model_len: int) -> int:
        """Return how many tokens it may still output."""
        left = max_model_len - len(self.tokens)
        limit = self.params.max_tokens
        return left if limit is None else min(left, limit - self.outputs)

    def finish_reason(self, eos_token_ids: frozenset[int], max_model_len: int) -> FinishReason | None:
        """Return why the sequence ends with its last token; None if it goes on."""
        params, last = self.params, self.tokens[-1]
        if self.outputs > params.min_tokens:
            ends_text = last in eos_token_ids and not params.ignore_eos
            if ends_text or last in params.stop_token_ids:
                return "stop"
        limit = params.max_tokens if params.max_tokens is not None else max_model_len
        if self.outputs >= limit or len(self.tokens) >= max_model_len:
            return "length"
        return None

    def branch(self, id: int, choice: int) -> "Sequence":
        """Return a sequence for another choice of the same request, with the same tokens and no blocks
        yet."""
        return Sequence(
            id=id,
            request=self.request,
            attempt=self.attempt,
            choices=(choice,),
            params=self.params,
            prompt_length=self.prompt_length,
            tokens=list(self.tokens),
            root=self.root,
            priority=self.priority,
            arrival=self.arrival,
            computed=[],
            open=self.open,
            early=self.early,
            tail=self.tail,
            version=self.version,
            last_chunk_at=self.last_chunk_at,
            survival=self.survival,
        )
