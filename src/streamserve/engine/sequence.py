"""One output choice on its way: its tokens, and how far each KV plane has caught up with them."""

from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf

from streamserve.engine.plan import TARGET
from streamserve.protocol.messages import Finished, FinishReason, Token
from streamserve.protocol.sampling import SamplingParams
from streamserve.speculation.slo import NO_NEED, PAST, Need

EDITS = 64
"""How many edits of an arriving prompt are remembered."""


@dataclass(eq=False)
class Sequence:
    """A sequence is *running* while it holds blocks, else it waits, *swapped* while host blocks hold its KV.

    tokens     prompt ─────────────┬ outputs ──┐      len(tokens)
    computed   ──────────────┐ KV in the plane │      pending = len(tokens) - computed
    blocks     [b0][b1][b2][b3]                       cover at least `computed` positions
    hashes     of the full blocks, as far as needed

    `choices`: the output choices that come from it. A fresh request is one sequence for all its choices;
    they fork when its prompt is computed, and then each has one. `told` is how many tokens the drafter knows.

    While its prompt is `open` it may be edited (`version` counts), and is only sampled if answered `early`;
    the prompt's last `tail` tokens are computed last.

    The decode clock runs from the first token on, whatever happens to the sequence: who waits for it does not
    care whether it was preempted. `decode_seconds` is what it showed when the step began.
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
    found: int = 0
    """Tokens whose KV was in the prefix index when it was last asked: nobody has to compute them."""
    hashes: list[bytes] = field(default_factory=list)
    prompt_logprobs_done: bool = True
    prompt_logprobs_sent: int = 0
    epoch: int = 0
    told: int = 0
    preempted_at: int = -1
    """Number of outputs when it was last preempted."""
    first_token_at: float | None = None
    decode_seconds: float = 0.0
    clocked: int = 1
    """Number of outputs there were when the decode clock started."""
    known: bool = False
    """Whether the executor holds this sequence's sampling state."""
    stale: bool = False
    """Whether that state is of an earlier prompt."""
    swapped: list[int] = field(default_factory=list)
    """Host blocks that hold what is `computed`, while it is evicted into the host pool."""
    open: bool = False
    early: bool = False
    tail: int = 0
    version: int = 0
    chunk_at: float = 0.0
    """When the latest part of the prompt came."""
    finished_at: float | None = None
    """When a prompt that was open came to its end."""
    kept: deque[int] = field(default_factory=lambda: deque(maxlen=EDITS))
    """How many tokens its latest edits kept."""
    survival: float = 1.0
    """The share of an open prompt that is expected to survive its next edit."""
    told_at: float = -1.0
    """When a Progress was last sent."""
    ending: Token | Finished | None = None
    """What ended an early answer: that it is the last event is known when the prompt is finished."""
    handoff: bool = False
    """Whether its KV goes to another worker, which decodes."""
    granted: bool = False
    """Whether that worker holds blocks for it."""
    returned: bool = False
    """Whether that is for the next turn of a chat: nobody decodes behind it now."""
    reserved: bool = False
    """Whether another worker computes its KV: it only needs blocks until that has come."""
    forced: bool = False
    """Whether it was taken in although that may cost others their targets."""
    held: bool = False
    """Whether it holds blocks that others read or write, and takes no part in steps."""
    waits: bool = False
    """Whether it could not start when it last had its turn: for lack of memory or places, or because another
    is computing what it needs next."""

    @property
    def running(self) -> bool:
        return bool(self.blocks)

    @property
    def pending(self) -> int:
        """Tokens whose target KV is not computed yet; 1 while decoding."""
        return len(self.tokens) - self.computed[TARGET]

    def todo(self, idle: bool) -> int:
        """How many tokens a step should compute. Of an open prompt all but the last, whose output is not
        wanted yet, and its tail only where a step would be `idle` otherwise. One whose KV waits on the host
        is brought back when as much again has arrived: for less, copies would take longer than they save."""
        if self.ending is not None:
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
        """Whether its prompt is, or was, sent while it arrives."""
        return self.open or self.finished_at is not None

    @property
    def steady(self) -> int:
        """How many of the latest edits in a row kept the token to compute next: what has lasted will last."""
        computed = self.computed[TARGET]
        return sum(1 for _ in takewhile(lambda kept: kept > computed, reversed(self.kept)))

    @property
    def steady_rows(self) -> int:
        """How many tokens from there on are as steady, or a little less: up to where an edit cut lately."""
        computed = self.computed[TARGET]
        return min((kept for kept in self.kept if kept > computed), default=len(self.tokens)) - computed

    @property
    def decoding(self) -> bool:
        """Whether all it lacks is its next output."""
        wanted = self.ending is None and (not self.open or self.early)
        return wanted and bool(self.blocks) and len(self.tokens) == self.computed[TARGET] + 1

    @property
    def outputs(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def asked_at(self) -> float:
        """When all that was asked was there."""
        return self.arrival if self.finished_at is None else self.finished_at

    @property
    def deadline(self) -> float | None:
        """When its first token is wanted, if a target says so and the token is not there yet. Nobody waits
        for one before the prompt has come to its end."""
        ttft = self.params.slo.ttft_ms
        return None if ttft is None or self.outputs or self.open else self.asked_at + ttft / 1000

    @property
    def need(self) -> Need:
        """What its target for the time per output token asks of this step: nothing before there is one, and
        nothing any more where its first token came too late: such a request has missed its targets."""
        tpot = self.params.slo.tpot_ms
        if tpot is None or not self.outputs:
            return NO_NEED
        if self.first_token_at is not None and self.late(self.first_token_at):
            return PAST
        return Need(tpot / 1000, self.decode_seconds, max(0, self.outputs - self.clocked))

    def late(self, now: float) -> bool:
        """Whether its first token, if it came `now`, were later than was asked for."""
        ttft = self.params.slo.ttft_ms
        return ttft is not None and not self.open and now > self.asked_at + ttft / 1000

    def tpot(self, now: float) -> float | None:
        """Its target for the time per output token, in seconds: inf if it has missed that for the first."""
        tpot = self.params.slo.tpot_ms
        if tpot is None:
            return None
        first = now if self.first_token_at is None and not self.outputs else self.first_token_at
        return inf if first is not None and self.late(first) else tpot / 1000

    def tick(self, now: float) -> None:
        """Read the decode clock as a step begins; it starts where the first token is there for the first
        time."""
        if self.first_token_at is None:
            if len(self.tokens) == self.prompt_length:
                return
            self.first_token_at, self.clocked = now, self.outputs
        self.decode_seconds = max(0.0, now - self.first_token_at)

    def outputs_left(self, max_model_len: int) -> int:
        """How many tokens it may still get."""
        room = max_model_len - len(self.tokens)
        limit = self.params.max_tokens
        return room if limit is None else min(room, limit - self.outputs)

    def finish_reason(self, eos_token_ids: frozenset[int], max_model_len: int) -> FinishReason | None:
        """Why the sequence ends with its last token, if it does."""
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
        """Another choice of the same request, with the same tokens and no blocks yet."""
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
            chunk_at=self.chunk_at,
            survival=self.survival,
        )
