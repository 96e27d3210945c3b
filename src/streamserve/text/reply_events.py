"""The parts of a model's reply as events, in the order in which the model wrote them.

text, reasoning                                   pieces of the answer and of the reasoning
call begins, call arguments …, call ends          a tool call
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from io import StringIO


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """The next piece of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """Call number `index` begins."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments, as JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A call's arguments are over. A call that the end of the reply cuts short has no such event."""

    index: int


ReplyEvent = TextDelta | ReasoningDelta | CallBegin | CallArguments | CallEnd
PIECES = (TextDelta, ReasoningDelta, CallArguments)
"""The events with a text. Adjacent events of the same type can be merged."""


class MergedEvents:
    """The events of a reply so far, with adjacent pieces of the same text merged."""

    def __init__(self) -> None:
        self._runs: list[tuple[ReplyEvent, StringIO]] = []

    def add(self, events: Iterable[ReplyEvent]) -> None:
        """Append events."""
        for event in events:
            last = self._runs[-1][0] if self._runs else None
            if not isinstance(event, PIECES) or type(last) is not type(event):
                self._runs.append((event, StringIO()))
            if isinstance(event, PIECES):
                self._runs[-1][1].write(event.text)

    def __iter__(self) -> Iterator[ReplyEvent]:
        for event, text in self._runs:
            yield replace(event, text=text.getvalue()) if isinstance(event, PIECES) else event
