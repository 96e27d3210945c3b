"""Converts a request's items to stream events, with the usage in each event or at the end."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from streamserve.api.context import AppContext
from streamserve.api.generation import GenerationTask, generate
from streamserve.api.generator import Item
from streamserve.api.http.sse import Emit
from streamserve.api.openai.outputs import Piece, charged_reply
from streamserve.api.openai.replies import UsageReply, usage_reply
from streamserve.api.openai.schemas import GenerationRequest, StreamOptions
from streamserve.api.openai.scores import PromptScores
from streamserve.protocol.messages import PromptLogprob, PromptLogprobs
from streamserve.text.output import ChoiceDelta, Usage

Reply = Callable[[list[Any], UsageReply | UnsetType | None, GenerationTask | None], msgspec.Struct]
"""Builds an event from its choices, the usage, and the task. The task is None unless the event is the first
of one of its choices."""

MakeChoices = Callable[[GenerationTask, int, Piece, bool, Iterable[PromptLogprob]], Sequence[msgspec.Struct]]
"""Builds the choices for a delta, one for each event to send, from a task, the number of its choice, the
delta, whether it is the choice's first delta, and the prompt's log-probabilities."""


class StreamWriter:
    """Sends the events of one request."""

    def __init__(self, body: GenerationRequest, reply: Reply, choices: MakeChoices, emit: Emit) -> None:
        self._options = body.stream_options or StreamOptions()
        self._reply = reply
        self._choices = choices
        self._emit = emit
        self._every_token = body.return_token_ids
        self._begun: set[tuple[int, int]] = set()
        self._prompt_logprobs: dict[int, PromptScores] = {}
        self._usages: list[Usage] = []
        self._prompt_tokens = 0
        self._completion_tokens = 0

    async def run(self, context: AppContext, tasks: list[GenerationTask]) -> None:
        """Generate, and send all events."""
        self._prompt_tokens = sum(len(task.prompt.ids) for task in tasks)
        with charged_reply(context, tasks, whole=False):
            await generate(context, tasks, self._accept)
        if self._options.include_usage:
            await self._emit(self._reply([], usage_reply(self._usages), None))

    async def _accept(self, task: GenerationTask, item: Item) -> None:
        if isinstance(item, Usage):
            self._usages.append(item)
        elif isinstance(item, PromptLogprobs):
            self._prompt_logprobs.setdefault(task.number, PromptScores()).append(item.entries)
        elif isinstance(item, ChoiceDelta):
            await self._delta(task, item)

    async def _delta(self, task: GenerationTask, delta: ChoiceDelta) -> None:
        self._completion_tokens += len(delta.tokens)
        key = (task.number, delta.choice)
        first = key not in self._begun
        self._begun.add(key)
        if first or delta.text or delta.logprobs or delta.finish or self._every_token:
            piece = Piece()
            piece.add(delta)
            entries = self._prompt_logprobs.get(task.number, PromptScores())
            for choice in self._choices(task, delta.choice, piece, first, entries):
                await self._emit(self._reply([choice], self._usage(), task if first else None))
                first = False

    def _usage(self) -> UsageReply | UnsetType | None:
        """Return the usage so far if every event has it; null if only the last event does; UNSET if none
        does."""
        if not self._options.include_usage:
            return UNSET
        if not self._options.continuous_usage_stats:
            return None
        return usage_reply([Usage(self._prompt_tokens, self._completion_tokens)])
