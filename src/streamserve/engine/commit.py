"""Commit of a step: append its tokens; fork, finish or hand over choices; return the events."""

from bisect import bisect_left
from collections.abc import Iterable

from streamserve.contracts.plan import TARGET, Sampled, Span, SpanResult
from streamserve.engine.batch import RunningAverages
from streamserve.engine.kv_transfer import KVTransferManager
from streamserve.engine.observer import Observer
from streamserve.engine.scheduler import Proposal, Scheduler
from streamserve.engine.sequence import EngineSequence
from streamserve.engine.status import SequenceStatus
from streamserve.protocol.messages import (
    Admitted,
    DraftVerified,
    Event,
    Finished,
    FinishReason,
    Pooled,
    PromptLogprobs,
    Token,
)
from streamserve.protocol.reports import STEP_TOKENS, StepTokens
from streamserve.speculation.controller import SpeculationCounters

_NO_STEPS = StepTokens(counts=[0] * (len(STEP_TOKENS) + 1), total=0)
NOT_FINITE = "the model gave numbers that are not finite (NaN or infinite) for this request"


class StepCommitter:
    """Commits the results of steps to the sequences of `scheduler`.

    * `eos`: token ids that end a text.
    * `averages`: gets the length of each output that has ended.
    * `observer`: gets the first output token and the end of each output as lifecycle events.
    * `speculation`: counts draft tokens that became outputs.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        transfers: KVTransferManager,
        averages: RunningAverages,
        observer: Observer,
        speculation: SpeculationCounters,
        eos: frozenset[int],
        max_model_len: int,
    ) -> None:
        self._scheduler = scheduler
        self._transfers = transfers
        self._averages = averages
        self._observer = observer
        self._speculation = speculation
        self._eos = eos
        self._max_model_len = max_model_len
        self.generation_tokens = 0
        self.corrupted_requests = 0
        self.step_tokens = _NO_STEPS
        self._generated_before = 0

    def count_step(self, spans: Iterable[tuple[Span, EngineSequence]]) -> None:
        """Count the tokens of a committed step: the prompt tokens that its `spans` computed, and the
        generated tokens."""
        prompts = sum(
            max(0, min(span.start + len(span.tokens), sequence.prompt_length) - span.start)
            for span, sequence in spans
            if span.group == TARGET
        )
        tokens = prompts + self.generation_tokens - self._generated_before
        self._generated_before = self.generation_tokens
        if tokens:
            counts = list(self.step_tokens.counts)
            counts[bisect_left(STEP_TOKENS, tokens)] += 1
            self.step_tokens = StepTokens(counts=counts, total=self.step_tokens.total + tokens)

    def commit(self, span: Span, outcome: SpanResult) -> list[Event]:
        sequence = self._scheduler.sequences[span.sequence]
        events: list[Event] = []
        if outcome.prompt_logprobs:
            events += _prompt_logprobs(sequence, span, outcome)
        sequence.kv.computed[span.group] += len(span.tokens)
        if outcome.not_finite:
            return self._corrupted(sequence)
        if outcome.error:
            self._transfers.remove(sequence)
            return events + [_refused(sequence, choice, outcome.error) for choice in sequence.choices]
        if span.tree is None:
            self._scheduler.tables.register(sequence)
            self._transfers.advance(sequence)
            return events
        if outcome.pooled:
            return events + self._end_pooled(sequence, outcome.pooled)
        if sequence.transfer.role.sends:
            return events + self._hand_over(sequence, outcome)
        drafted = len(span.tree.tokens) - 1
        if drafted:
            return events + self._extend_by_draft(sequence, drafted, outcome.outputs[0])
        if len(sequence.choices) == 1:
            return events + self._extend(sequence, outcome.outputs[0])
        branches = self._scheduler.fork(sequence)
        for branch, sampled in zip(branches, outcome.outputs, strict=True):
            events += self._extend(branch, sampled)
        return events

    def commit_next(self, span: Span, sequence: EngineSequence, outcome: SpanResult) -> list[Event]:
        """Commit the result of a span in a step planned ahead (engine/ahead.py): exactly one next token. The
        short form of `commit`, for speed."""
        if outcome.not_finite or outcome.error:
            return self.commit(span, outcome)
        computed, token = sequence.kv.computed, outcome.outputs[0][0]
        computed[TARGET] += 1
        sequence.tokens.append(token.token)
        self.generation_tokens += 1
        finish = sequence.finish_reason(self._eos, self._max_model_len)
        finish = "stop" if token.ends else finish
        if len(computed) > 1 or computed[TARGET] % self._scheduler.tables.block_size == 0:
            self._scheduler.tables.register(sequence)
        if finish:
            self._observer.on_event("finishing", sequence.request)
            self._averages.ended(sequence.outputs)
            self._transfers.remove(sequence)
        return [_token(sequence, sequence.choices[0], token, finish)]

    def _extend_by_draft(self, sequence: EngineSequence, drafted: int, sampled: list[Sampled]) -> list[Event]:
        """Append the accepted draft tokens out of `drafted`, and the target's further token. Tokens after a
        token that ends the sequence are dropped, and do not count as accepted."""
        choice, outputs = sequence.choices[0], sequence.outputs
        tokens = self._extend(sequence, sampled)
        accepted = min(len(sampled) - 1, sequence.outputs - outputs)
        self._speculation.accept(accepted)
        return [DraftVerified(sequence.request, sequence.attempt, choice, drafted, accepted), *tokens]

    def _corrupted(self, sequence: EngineSequence) -> list[Event]:
        """End a sequence whose logits are not finite, and remove its KV from the prefix index."""
        self.corrupted_requests += 1
        self._scheduler.tables.unregister(sequence)
        self._transfers.remove(sequence)
        return [
            Finished(sequence.request, sequence.attempt, choice, "error", NOT_FINITE, status=500)
            for choice in sequence.choices
        ]

    def _end_pooled(self, sequence: EngineSequence, vector: bytes) -> list[Event]:
        """End a sequence whose result is the pooled `vector`."""
        request, attempt = sequence.request, sequence.attempt
        self._scheduler.tables.register(sequence)
        self._observer.on_event("finishing", request)
        self._averages.ended(0)
        self._transfers.remove(sequence)
        return [Pooled(request, attempt, vector), Finished(request, attempt, sequence.choices[0], "stop")]

    def _hand_over(self, sequence: EngineSequence, outcome: SpanResult) -> list[Event]:
        """Emit the first token of each choice. The sequence keeps its blocks until its KV has landed on the
        decode worker."""
        events: list[Event] = []
        continuing = []
        self._scheduler.tables.register(sequence)
        for choice, (token,) in zip(sequence.choices, outcome.outputs, strict=True):
            sequence.tokens.append(token.token)  # until the pop below: finish_reason and _token read it
            finish = sequence.finish_reason(self._eos, self._max_model_len)
            finish = "stop" if token.ends else finish
            held_back = finish and sequence.stream.open
            if not held_back:
                events.append(_token(sequence, choice, token, finish))
            sequence.tokens.pop()
            if held_back:  # the decode worker samples it again, and sends it when the prompt is finished
                continuing.append(choice)
                continue
            self.generation_tokens += 1
            self._observer.on_event("output 0", sequence.request)
            if not finish:
                continuing.append(choice)
        if continuing:
            sequence.choices = tuple(continuing)
            sequence.become(SequenceStatus.SENDING)
            self._transfers.advance(sequence)
        else:
            self._transfers.remove(sequence)
        return events

    def _extend(self, sequence: EngineSequence, sampled: list[Sampled]) -> list[Event]:
        """Append the `sampled` tokens up to the first one that ends the sequence. The step has computed KV
        for all of them but the last."""
        events: list[Event] = []
        finish: FinishReason | None = sequence.finish_reason(self._eos, self._max_model_len)
        if finish:  # nothing to generate: only prompt log-probabilities were requested
            events.append(Finished(sequence.request, sequence.attempt, sequence.choices[0], finish))
        elif not sequence.outputs:
            self._observer.on_event("output 0", sequence.request)
        for number, token in enumerate(sampled):
            if finish:
                break
            sequence.tokens.append(token.token)
            sequence.kv.computed[TARGET] += number > 0
            finish = sequence.finish_reason(self._eos, self._max_model_len)
            finish = "stop" if token.ends else finish
            self.generation_tokens += 1
            events.append(_token(sequence, sequence.choices[0], token, finish))
        self._scheduler.tables.register(sequence)
        if finish:
            self._observer.on_event("finishing", sequence.request)
        if finish and sequence.stream.open:
            sequence.stream.final_event = _last(events)
        elif finish:
            self._averages.ended(sequence.outputs)
            self._transfers.remove(sequence)
        return events


def _prompt_logprobs(sequence: EngineSequence, span: Span, outcome: SpanResult) -> list[Event]:
    """Return the event with this chunk's prompt log-probabilities. After a preemption the chunk may repeat
    positions; these were sent before and are left out."""
    start = span.start + 1
    new = outcome.prompt_logprobs[max(0, sequence.prompt_logprobs_sent + 1 - start) :]
    first = max(start, sequence.prompt_logprobs_sent + 1)
    sequence.prompt_logprobs_sent = max(sequence.prompt_logprobs_sent, first + len(new) - 1)
    sequence.prompt_logprobs_done = sequence.prompt_logprobs_sent >= sequence.prompt_length - 1
    return [PromptLogprobs(sequence.request, sequence.attempt, first, new)] if new else []


def _last(events: list[Event]) -> Token | Finished:
    """Remove and return the last of `events`, which ends a choice."""
    last = events.pop()
    assert isinstance(last, Token | Finished)
    return last


def _refused(sequence: EngineSequence, choice: int, error: str) -> Finished:
    return Finished(sequence.request, sequence.attempt, choice, "error", error)


def _token(sequence: EngineSequence, choice: int, sampled: Sampled, finish: FinishReason | None) -> Token:
    return Token(
        sequence.request,
        sequence.attempt,
        choice,
        sequence.outputs - 1,
        sampled.token,
        sampled.logprob,
        sampled.top,
        finish,
    )


def admissions(proposals: Iterable[Proposal], now: float) -> list[Event]:
    """Return the events of the sequences that were admitted to a step that began at `now`."""
    return [
        Admitted(s.request, s.attempt, s.choices[0], p.cached, max(0.0, now - s.submitted.arrival))
        for p in proposals
        for s in (p.sequence,)
        if p.cached is not None
    ]
