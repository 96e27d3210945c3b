"""Parses the server-sent events of a streamed reply."""

from typing import Any

import msgspec

DONE = b"[DONE]"


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: _Delta | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Event(msgspec.Struct, frozen=True):
    """The fields of a completion's or a chat's event that are measured."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None

    @property
    def has_text(self) -> bool:
        """Whether the event has generated output. The first event of a chat often has only the role."""
        return any(_generated(choice) for choice in self.choices)


def _generated(choice: _Choice) -> bool:
    delta = choice.delta
    if delta is None:
        return bool(choice.text)
    return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


parse_event = msgspec.json.Decoder(Event).decode
"""Decodes an Event from an event's data. Raises msgspec.ValidationError or msgspec.DecodeError."""


class EventSplitter:
    """Splits bytes as they arrive from a socket into the data of events."""

    def __init__(self) -> None:
        self._incomplete = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events completed by `data`. Comments and other fields are ignored."""
        *lines, self._incomplete = (self._incomplete + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
