"""Passes text, reasoning and tool calls of a reply to the items of a response, in the reply's order."""

from collections.abc import Iterable
from typing import Protocol

from streamserve.text.output import ChoiceDelta, TokenLogprob, Usage
from streamserve.text.reply_events import CallArguments, CallBegin, ReasoningDelta, ReplyEvent, TextDelta


class OutputSink(Protocol):
    """Receives the parts of an output. Implemented by the items of a response, and by the content blocks of a
    message."""

    async def text(self, text: str, logprobs: Iterable[TokenLogprob] = ()) -> None:
        """Append text to the message."""

    async def reasoning(self, text: str) -> None:
        """Append text to the reasoning."""

    async def call(self, call_id: str, name: str) -> None:
        """Open a function call; its arguments follow."""

    async def arguments(self, text: str) -> None:
        """Append text to the arguments of the latest call."""

    async def call_end(self) -> None:
        """Close the latest call: its arguments are complete."""


class OutputParser:
    """Adds reasoning, text and tool calls to the output. `called`: whether the reply ended with a call."""

    def __init__(self, output: OutputSink) -> None:
        self.finish: str | None = None
        self.stop: str | int | None = None
        self.usage = Usage(0, 0)
        self.thought_tokens = 0
        self.called = False
        self._begun = False  # a call
        self._output = output
        self._tokens = 0
        self._logprobs: list[TokenLogprob] = []

    async def delta(self, delta: ChoiceDelta) -> None:
        """Process a delta.

        Tokens are counted with the text they produce, which may be held back until a later delta.
        """
        self.finish, self.stop, self.called = delta.finish, delta.stop, delta.called
        self._tokens += len(delta.tokens)
        self._logprobs += delta.logprobs
        if any(isinstance(event, ReasoningDelta) for event in delta.events):
            self.thought_tokens += self._tokens
        for event in delta.events:
            await self._add(event)
        if delta.finish and not (delta.events or self._begun):
            await self._output.text("", self._logprobs)
        if delta.events:
            self._tokens, self._logprobs = 0, []

    async def _add(self, event: ReplyEvent) -> None:
        if isinstance(event, TextDelta):
            await self._output.text(event.text, self._logprobs)
            self._logprobs = []
        elif isinstance(event, ReasoningDelta):
            await self._output.reasoning(event.text)
        elif isinstance(event, CallBegin):
            self._begun = True
            await self._output.call(event.id, event.name)
        elif isinstance(event, CallArguments):
            await self._output.arguments(event.text)
        else:
            await self._output.call_end()
