"""Parses a chat reply incrementally into events: reasoning, text and tool calls."""

from collections.abc import Callable
from typing import Protocol

from streamserve.text.reasoning import ReasoningParser
from streamserve.text.reply_events import ReasoningDelta, ReplyEvent, TextDelta
from streamserve.text.tools.parser import ToolCallParser


class OutputReader(Protocol):
    """Parses one message."""

    def read(self, text: str, final: bool, cut: bool = False) -> list[ReplyEvent]:
        """Parse the next piece. If it is the `final` one, also return text that was held back, and complete
        the arguments of a last call, unless the reply was `cut` short."""


NewReader = Callable[[], OutputReader]
"""Returns a parser for one message."""


class MessageParser:
    """Parses one message: first the reasoning, then tool calls in the rest.

    Without parsers, all text is content.
    """

    def __init__(self, thoughts: ReasoningParser | None = None, calls: ToolCallParser | None = None) -> None:
        self._thoughts = thoughts
        self._calls = calls

    def read(self, text: str, final: bool, cut: bool = False) -> list[ReplyEvent]:
        """Parse the next piece. If it is the `final` one, also return text that was held back, and complete
        the arguments of a last call, unless the reply was `cut` short."""
        reasoning, content = "", text
        if self._thoughts is not None:
            thought = self._thoughts.feed(text)
            reasoning, content = thought.reasoning, thought.content
            if final:
                remaining = self._thoughts.finish()
                reasoning, content = reasoning + remaining.reasoning, content + remaining.content
        events: list[ReplyEvent] = [ReasoningDelta(reasoning)] if reasoning else []
        if self._calls is None:
            return [*events, TextDelta(content)] if content else events
        events += self._calls.feed(content)
        return [*events, *self._calls.finish(cut)] if final else events
