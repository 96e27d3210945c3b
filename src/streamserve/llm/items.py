"""Convert a request's events from the fleet into text deltas, and a Usage at the end."""

import time
from collections.abc import AsyncIterable, AsyncIterator

from streamserve.fleet.runtime import FleetRuntime
from streamserve.protocol.errors import RequestError
from streamserve.protocol.messages import (
    Admitted,
    DraftVerified,
    Event,
    Finished,
    Progress,
    PromptLogprobs,
    Token,
    Withdrawn,
)
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.latency import Stopwatch
from streamserve.text.output import ChoiceText, Delta, Usage
from streamserve.text.tokenizer import Tokenizer

Item = Delta | PromptLogprobs | Usage


async def read_items(
    steps: AsyncIterable[list[Event]],
    runtime: FleetRuntime,
    tokenizer: Tokenizer,
    request: str,
    prompt_tokens: int,
    params: SamplingParams,
    stopwatch: Stopwatch,
) -> AsyncIterator[Item]:
    """Yield the items of `steps`, a request's events, timed by `stopwatch`.

    A choice that ends by a stop string is cancelled in the fleet. Raises RequestError if a choice ends with
    an error.
    """
    choices = {choice: ChoiceText(tokenizer, params, choice) for choice in range(params.n)}
    admitted: Admitted | None = None
    drafted, accepted = 0, 0
    async for events in steps:
        for event in events:
            if isinstance(event, PromptLogprobs):
                yield event
                continue
            if isinstance(event, Admitted):
                admitted = admitted or event  # later ones follow a preemption
                continue
            if isinstance(event, Progress | Withdrawn):
                continue  # of prompt streams, before they are answered
            if isinstance(event, DraftVerified):
                drafted, accepted = drafted + event.drafted, accepted + event.accepted
                continue
            delta = _delta(choices[event.choice], event)
            if delta is None:
                continue
            for _ in delta.tokens:
                stopwatch.token(event.choice, time.monotonic())
            yield delta
            if isinstance(delta.stop, str):
                await runtime.cancel(request, event.choice)
        if all(choice.finished for choice in choices.values()):
            break
    completion = sum(choice.emitted for choice in choices.values())
    outcome = stopwatch.outcome(params.slo)
    cached, queued = (admitted.cached, admitted.queued) if admitted else (0, 0.0)
    yield Usage(prompt_tokens, completion, cached, queued, drafted, accepted, outcome)


def _delta(choice: ChoiceText, event: Token | Finished) -> Delta | None:
    if isinstance(event, Token):
        return choice.feed(event)
    if event.reason == "error":
        raise RequestError(event.error, status=event.status, retry_after=event.retry_after)
    return choice.finish(event.reason)
