"""Prompt streams: edits of live sequences, and the events about them (Stream2LLM).

before  [c1 c1 c1|c2 c2 c2|q]      retained = 3    KV of the first three tokens stays, in the pool or on the
after   [c1 c1 c1|c4 c4|q]         tokens = c4 q   host; the rest is dropped at slot precision, and computed
                                                   again by the steps that follow

An edit is applied between steps. An early answer to the prompt before the edit is withdrawn, and begins
again.
"""

from streamserve.contracts.engine_config import EngineConfig
from streamserve.contracts.plan import TARGET
from streamserve.engine.scheduler import Scheduler
from streamserve.engine.sequence import DecodeClock, EngineSequence, MemoryClaim
from streamserve.engine.status import TransferRole
from streamserve.protocol.messages import Edit, Event, Finished, ModelInfo, OutputWithdrawn, Progress, Token
from streamserve.protocol.reports import StreamReport
from streamserve.scheduling.eviction import learn_survival

PROGRESS_SECONDS = 0.25
"""Minimum seconds between two Progress events of a prompt stream that still has tokens to compute."""


class StreamEdits:
    """Applies the edits of one engine's prompt streams."""

    def __init__(self, scheduler: Scheduler, config: EngineConfig, model: ModelInfo) -> None:
        self.counters = StreamReport()
        self.survival = 1.0
        """The share of a prompt that survives an edit, learned from all streams so far: the expectation for
        new streams."""
        self._scheduler = scheduler
        self._config = config
        self._model = model

    def edit(self, message: Edit) -> list[Event]:
        """Edit a prompt stream, and return the events. If the edited prompt cannot be served, the request
        ends with an error."""
        branches = self._branches(message)
        if not branches:
            return []
        error = self._refusal(message, branches[0])
        if error:
            return [event for branch in branches for event in self._refuse(branch, error)]
        events: list[Event] = []
        if _changes(message, branches[0]):
            sequence, *others = branches
            self._merge(sequence, others)
            self._change(sequence, message)
            branches = [sequence]
            if sequence.submitted.answer_early:
                events.append(OutputWithdrawn(sequence.request, sequence.attempt, message.version))
        for branch in branches:
            stream = branch.stream
            stream.version, stream.tail, stream.open = message.version, message.tail, not message.finish
            stream.finished_at = message.arrival if message.finish else None
            stream.claim = MemoryClaim.ANY if message.finish else stream.claim
        if branches[0].transfer.role is TransferRole.RECEIVER:
            return events  # the worker that computes the prompt counts it
        events.append(_progress(branches[0]))
        if message.finish:
            self._finish(branches[0])
            for branch in branches:
                events += self._release(branch)
        return events

    def progress(self, id: int, now: float) -> list[Event]:
        """Return the Progress event of a prompt stream after a step, if one is due."""
        sequence = self._scheduler.sequences.get(id)
        if sequence is None or not sequence.stream.open or sequence.outputs:
            return []
        if sequence.todo(idle=False) and now - sequence.stream.progress_at < PROGRESS_SECONDS:
            return []
        sequence.stream.progress_at = now
        return [_progress(sequence)]

    def _branches(self, message: Edit) -> list[EngineSequence]:
        """Return the open sequences of a request. Until a first token is sampled, one sequence has all
        choices."""
        return [
            sequence
            for sequence in self._scheduler.sequences.values()
            if (sequence.request, sequence.attempt) == (message.request, message.attempt)
            and sequence.stream.open
        ]

    def _refusal(self, message: Edit, sequence: EngineSequence) -> str:
        length = message.retained + len(message.tokens)
        if not 0 <= message.retained <= sequence.prompt_length:
            return f"an edit keeps {message.retained} of {sequence.prompt_length} tokens"
        if message.finish and not length:
            return "the prompt is empty"
        if length > self._config.max_model_len:
            return f"the prompt has {length} tokens, but the model's limit is {self._config.max_model_len}"
        if any(not 0 <= token < self._model.vocab_size for token in message.tokens):
            return f"the prompt holds a token outside the vocabulary of {self._model.vocab_size}"
        return ""

    def _refuse(self, sequence: EngineSequence, error: str) -> list[Event]:
        self._scheduler.remove(sequence)
        return [
            Finished(sequence.request, sequence.attempt, choice, "error", error)
            for choice in sequence.choices
        ]

    def _merge(self, sequence: EngineSequence, others: list[EngineSequence]) -> None:
        """Merge the choices of a withdrawn early answer into one sequence again: without their outputs, all
        have the same tokens."""
        self.counters.withdrawn += sum(branch.outputs for branch in (sequence, *others))
        sequence.choices = tuple(sorted(c for branch in (sequence, *others) for c in branch.choices))
        for branch in others:
            self._scheduler.remove(branch)

    def _change(self, sequence: EngineSequence, message: Edit) -> None:
        """Apply an edit to the sequence's tokens and KV. A new epoch and `state_stale` tell drafter and
        executor that their state after the retained prefix is void."""
        before = sequence.prompt_length - sequence.stream.tail
        sequence.stream.survival = learn_survival(sequence.stream.survival, message.retained, before)
        self.survival = learn_survival(self.survival, message.retained, before)
        sequence.stream.retained_lengths.append(message.retained)
        self.counters.chunks += 1
        # The last token is always computed again, since its logits are needed.
        last = message.retained + len(message.tokens) - 1
        self.counters.invalidated += self._scheduler.truncate(sequence, max(0, min(message.retained, last)))
        sequence.tokens = sequence.tokens[: message.retained] + message.tokens
        sequence.prompt_length = len(sequence.tokens)
        sequence.params = message.params or sequence.params
        sequence.stream.final_event = None
        sequence.clock = DecodeClock()
        sequence.preempted_at = -1
        sequence.epoch += 1
        sequence.state_stale = True
        sequence.stream.last_chunk_at = message.arrival
        sequence.stream.claim = MemoryClaim.ANY

    def _finish(self, sequence: EngineSequence) -> None:
        self.counters.finished += 1
        self.counters.tokens += sequence.prompt_length
        self.counters.computed_before += min(sequence.kv.computed[TARGET], sequence.prompt_length)

    def _release(self, sequence: EngineSequence) -> list[Event]:
        """Return the final event of an early answer that was held back until the prompt was finished, and
        remove the sequence. Returns no event if the answer goes on."""
        event: Token | Finished | None = sequence.stream.final_event
        if event is None:
            return []
        self._scheduler.remove(sequence)
        return [event]


def _changes(message: Edit, sequence: EngineSequence) -> bool:
    """Whether the edit changes the prompt or its sampling parameters."""
    prompt = sequence.tokens[: sequence.prompt_length]
    params = message.params or sequence.params
    return prompt[: message.retained] + message.tokens != prompt or params != sequence.params


def _progress(sequence: EngineSequence) -> Progress:
    computed = min(sequence.kv.computed[TARGET], sequence.prompt_length)
    return Progress(
        sequence.request, sequence.attempt, sequence.stream.version, computed, sequence.prompt_length
    )
