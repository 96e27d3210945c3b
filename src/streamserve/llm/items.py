"""Converts a request's events from the fleet to text deltas, and a Usage at the end."""

import time
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from streamserve.fleet.runtime import FleetRuntime
from streamserve.protocol.errors import RequestError
from streamserve.protocol.messages import (
    Admitted,
    DraftVerified,
    Event,
    Finished,
    Pooled,
    PromptLogprobs,
    Token,
)
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.latency import Stopwatch
from streamserve.text.message import NewReader
from streamserve.text.output import ChoiceDelta, ChoiceText, Usage
from streamserve.text.tokenizer import Tokenizer

Item = ChoiceDelta | PromptLogprobs | Pooled | Usage


async def read_items(
    steps: AsyncIterable[list[Event]],
    runtime: FleetRuntime,
    tokenizer: Tokenizer,
    request: str,
    prompt: Sequence[int],
    params: SamplingParams,
    stopwatch: Stopwatch,
    reader: NewReader | None = None,
) -> AsyncIterator[Item]:
    """Yield the items of `steps`, a request's events, timed by `stopwatch`. `prompt` are its token ids. With
    `reader`, each choice is parsed as a chat reply.

    A choice that ends at a stop string is cancelled in the fleet. Raises RequestError if a choice ends with
    an error.
    """
    choices = {
        choice: ChoiceText(tokenizer, params, choice, prompt, reader() if reader else None)
        for choice in range(params.n)
    }
    counts = _Counts()
    async for events in steps:
        for event in events:
            if isinstance(event, PromptLogprobs | Pooled):
                yield event
                continue
            if not isinstance(event, Token | Finished):
                if not (isinstance(event, DraftVerified) and choices[event.choice].finished):
                    counts.apply(event)
                continue
            delta = _delta(choices[event.choice], event)
            if delta is None:
                continue
            if counts.cached and not counts.begun:
                delta = replace(delta, cached_tokens=counts.cached)
            counts.delivered(delta)
            for _ in delta.tokens:
                stopwatch.token(event.choice, time.monotonic())
            yield delta
            if isinstance(delta.stop, str):
                await runtime.cancel(request, event.choice)
        if all(choice.finished for choice in choices.values()):
            break
    completion = sum(choice.emitted for choice in choices.values())
    outcome = stopwatch.outcome(params.slo)
    yield Usage(
        len(prompt), completion, counts.cached, counts.queued, counts.drafted, counts.accepted, outcome
    )


@dataclass
class _Counts:
    """Counts from events without text. `accepted`: the delivered draft tokens. `coming`: for each choice, how
    many of its next tokens are draft tokens."""

    admitted: bool = False
    begun: bool = False
    cached: int = 0
    queued: float = 0.0
    drafted: int = 0
    accepted: int = 0
    coming: dict[int, int] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        if isinstance(event, Admitted) and not self.admitted:  # later ones follow a preemption
            self.admitted, self.cached, self.queued = True, event.cached, event.queued
        elif isinstance(event, DraftVerified):
            self.drafted += event.drafted
            self.coming[event.choice] = event.accepted

    def delivered(self, delta: ChoiceDelta) -> None:
        """Count the draft tokens of a delta. Tokens after a stop string have no delta and are not counted."""
        self.begun = True
        accepted = min(len(delta.tokens), self.coming.get(delta.choice, 0))
        self.accepted += accepted
        self.coming[delta.choice] = self.coming.get(delta.choice, 0) - accepted


def _delta(choice: ChoiceText, event: Token | Finished) -> ChoiceDelta | None:
    if isinstance(event, Token):
        return choice.feed(event)
    if event.reason == "error":
        raise RequestError(event.error, status=event.status, retry_after=event.retry_after)
    return choice.finish(event.reason)
