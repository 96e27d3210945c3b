"""Parses a chat reply incrementally into reasoning, content and tool calls."""

from dataclasses import dataclass, field
from typing import Protocol

from streamserve.protocol.messages import FinishReason
from streamserve.text.reasoning import ReasoningParser
from streamserve.text.tools.parser import CallDelta, ToolCallParser


@dataclass
class MessagePart:
    """The output of one parsed piece of text."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


class OutputReader(Protocol):
    """Parses one message."""

    @property
    def called(self) -> bool:
        """Whether a tool was called."""

    def read(self, text: str, final: bool, cut: bool = False) -> MessagePart:
        """Parse the next piece. If it is the `final` one, also return text that was held back, and complete
        the arguments of a last call, unless the reply was `cut`."""


def was_cut(finish: FinishReason | None, stop: str | int | None) -> bool:
    """Return whether a reply was ended by a limit or a stop string, rather than by the model."""
    return finish is not None and (finish != "stop" or isinstance(stop, str))


class MessageParser:
    """Parses one message: first the reasoning, then tool calls in the rest.

    Without parsers, all text is content.
    """

    def __init__(self, thoughts: ReasoningParser | None = None, calls: ToolCallParser | None = None) -> None:
        self._thoughts = thoughts
        self._calls = calls

    @property
    def called(self) -> bool:
        """Whether a tool was called."""
        return self._calls is not None and self._calls.calls > 0

    def read(self, text: str, final: bool, cut: bool = False) -> MessagePart:
        """Parse the next piece. If it is the `final` one, also return text that was held back, and complete
        the arguments of a last call, unless the reply was `cut`."""
        reasoning, content = "", text
        if self._thoughts is not None:
            thought = self._thoughts.feed(text)
            reasoning, content = thought.reasoning, thought.content
            if final:
                remaining = self._thoughts.finish()
                reasoning, content = reasoning + remaining.reasoning, content + remaining.content
        if self._calls is None:
            return MessagePart(reasoning, content)
        parsed = self._calls.feed(content)
        if final:
            last = self._calls.finish(cut)
            return MessagePart(reasoning, parsed.content + last.content, parsed.calls + last.calls)
        return MessagePart(reasoning, parsed.content, parsed.calls)
