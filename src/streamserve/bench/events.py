"""What a stream of server-sent events says about tokens."""

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
    """The part of a completion's or a chat's event that is measured."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None

    @property
    def has_text(self) -> bool:
        """Whether it brings something that was generated. A chat's first event often brings only the role."""
        return any(_generated(choice) for choice in self.choices)


def _generated(choice: _Choice) -> bool:
    delta = choice.delta
    if delta is None:
        return bool(choice.text)
    return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


parse_event = msgspec.json.Decoder(Event).decode
"""An Event from the data of one. Raises msgspec.ValidationError or msgspec.DecodeError."""


class EventSplitter:
    """Cuts bytes as they come from a socket into the data of events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that are complete with `data`. Comments and other fields are left out."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]
