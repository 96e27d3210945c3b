"""Parses one choice's deltas into reasoning, text and tool calls, in the order in which they were
generated."""

from collections.abc import Iterable
from typing import Protocol

from streamserve.text.message import OutputReader, was_cut
from streamserve.text.output import ChoiceDelta, TokenLogprob, Usage


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


class OutputParser:
    """Parses the generated text into reasoning, content and tool calls, and adds them to the output."""

    def __init__(self, reader: OutputReader, output: OutputSink) -> None:
        self.finish: str | None = None
        self.stop: str | int | None = None
        self.usage = Usage(0, 0)
        self.thought_tokens = 0
        self._reader = reader
        self._output = output
        self._tokens = 0
        self._logprobs: list[TokenLogprob] = []

    @property
    def called(self) -> bool:
        """Whether a tool was called."""
        return self._reader.called

    async def delta(self, delta: ChoiceDelta) -> None:
        """Process a delta.

        Tokens are counted with the text they produce, which may be held back until a later delta.
        """
        self.finish, self.stop = delta.finish, delta.stop
        self._tokens += len(delta.tokens)
        self._logprobs += delta.logprobs
        cut = was_cut(delta.finish, delta.stop)
        part = self._reader.read(delta.text, delta.finish is not None, cut)
        if part.reasoning:
            self.thought_tokens += self._tokens
            await self._output.reasoning(part.reasoning)
        if part.content or (delta.finish and not (part or self._reader.called)):
            await self._output.text(part.content, self._logprobs)
        for call in part.calls:
            if call.id is not None:
                await self._output.call(call.id, call.name or "")
            await self._output.arguments(call.arguments)
        if part:
            self._tokens, self._logprobs = 0, []
