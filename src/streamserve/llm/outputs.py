"""Outputs in vLLM's format: the result of a request, and how it is collected from the request's items."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from streamserve.llm.items import Item
from streamserve.llm.prompts import LoRARequest
from streamserve.protocol.messages import Pooled, PromptLogprobs
from streamserve.text.latency import SloOutcome
from streamserve.text.output import ChoiceDelta, Usage
from streamserve.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token at a position, and its text. `rank` is 1 for the most likely token; None for
    an output token that is not among the requested most likely ones."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass
class CompletionOutput:
    """One output choice. `logprobs[i]` maps token ids to log-probabilities at output position i.
    `cumulative_logprob` is the sum of the log-probabilities of its tokens. Both are None without
    `logprobs`."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    lora_request: LoRARequest | None = None

    def finished(self) -> bool:
        """Return whether the choice has ended."""
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Times of a request: `arrival_time` by the clock of the day, the others on a monotonic clock, in
    seconds; 0 until they are known. `first_token_latency` is the time from the arrival to the first token."""

    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    num_generation_tokens: int = 0


@dataclass
class RequestOutput:
    """The result for one prompt. `prompt_logprobs[0]` is None, as the first token has no predecessor.
    `pooled` is the vector of a request with `pooling`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    lora_request: LoRARequest | None = None
    slo: SloOutcome | None = None
    pooled: bytes = b""
    finished: bool = False


@dataclass(frozen=True)
class EmbeddingOutput:
    """The embedding of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """The result of `LLM.embed` for one prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(frozen=True)
class ScoringOutput:
    """The score of a pair of texts."""

    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """The result of `LLM.score` for one pair. `prompt_token_ids` are the tokens of the prompt that was
    judged, or of the second text if the score is the similarity of two embeddings."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True


class Collector:
    """Adds the items of a request to its `output`. Without `detokenize`, texts stay empty."""

    def __init__(self, output: RequestOutput, tokenizer: Tokenizer, detokenize: bool = True) -> None:
        self.output = output
        self._tokenizer = tokenizer
        self._detokenize = detokenize
        self._changed: set[int] = set()
        self._begun = False
        output.metrics.arrival_time, output.metrics.queued_ts = time.time(), time.monotonic()

    def add(self, item: Item) -> None:
        output = self.output
        if isinstance(item, Usage):
            output.num_cached_tokens, output.slo = item.cached_tokens, item.slo
            output.metrics.scheduled_ts = output.metrics.queued_ts + item.queued_seconds
        elif isinstance(item, PromptLogprobs):
            assert output.prompt_logprobs is not None
            for entry in item.entries:
                top = [(each.token, each.logprob) for each in entry.top]
                output.prompt_logprobs.append(self._logprobs(entry.token, entry.logprob, entry.rank, top))
        elif isinstance(item, Pooled):
            output.pooled = item.vector
        else:
            self._add_delta(item)

    def _add_delta(self, delta: ChoiceDelta) -> None:
        choice, metrics = self.output.outputs[delta.choice], self.output.metrics
        self._changed.add(delta.choice)
        if delta.tokens:
            metrics.last_token_ts = time.monotonic()
            metrics.num_generation_tokens += len(delta.tokens)
            if not metrics.first_token_ts:
                metrics.first_token_ts = metrics.last_token_ts
                metrics.first_token_latency = metrics.first_token_ts - metrics.queued_ts
        choice.text += delta.text if self._detokenize else ""
        choice.token_ids += delta.tokens
        choice.finish_reason, choice.stop_reason = delta.finish, delta.stop
        for sampled in delta.logprobs:
            choice.logprobs = choice.logprobs or []
            top = [(each.token, each.logprob) for each in sampled.top]
            choice.logprobs.append(self._logprobs(sampled.token, sampled.logprob, None, top))
            choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + sampled.logprob

    def _logprobs(
        self, token: int, logprob: float, rank: int | None, top: Sequence[tuple[int, float]]
    ) -> dict[int, Logprob]:
        """Return the log-probabilities at a position: of its token, and of the `top` most likely tokens."""
        ranked = {each: Logprob(value, place, self._tokenizer.token_text(each))
                  for place, (each, value) in enumerate(top, start=1)}  # fmt: skip
        return {token: Logprob(logprob, rank, self._tokenizer.token_text(token))} | ranked

    def snapshot(self) -> RequestOutput:
        """Return the output so far, which later items do not change."""
        choices = [
            replace(choice, token_ids=[*choice.token_ids], logprobs=choice.logprobs and [*choice.logprobs])
            for choice in self.output.outputs
        ]
        return replace(self.output, outputs=choices, metrics=replace(self.output.metrics))

    @property
    def complete(self) -> bool:
        """Whether all choices have ended."""
        return all(choice.finished() for choice in self.output.outputs)

    def take(self) -> RequestOutput:
        """Return the output since the last call: the choices that have changed, and the log-probabilities of
        the prompt once."""
        taken = self.snapshot()
        taken.outputs = [choice for choice in taken.outputs if choice.index in self._changed]
        self._changed.clear()
        taken.prompt_logprobs = None if self._begun else taken.prompt_logprobs
        self._begun = True
        for choice in self.output.outputs:
            choice.text, choice.token_ids, choice.logprobs = "", [], None
        return taken

    def finish(self) -> None:
        """Mark the output as complete."""
        self.output.finished = True
