"""Converts the events of a reply to the fields of a chat message, whole or as the deltas of a stream."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from streamserve.api.openai.custom_tools import custom_input
from streamserve.api.openai.replies import Custom, Function, ToolCall
from streamserve.text.reply_events import (
    CallArguments,
    CallBegin,
    CallEnd,
    ReasoningDelta,
    ReplyEvent,
    TextDelta,
)


@dataclass(frozen=True, slots=True)
class CustomCall:
    """A whole call of a custom tool."""

    index: int
    id: str
    name: str
    input: str


ChatEvent = ReplyEvent | CustomCall

_ORDER: dict[type[ChatEvent], int] = {
    ReasoningDelta: 0,
    TextDelta: 1,
    CallBegin: 2,
    CallArguments: 2,
    CustomCall: 2,
}
"""The order in which clients read the fields of one delta."""


class CustomCalls:
    """Replaces the events of calls of custom tools in one reply. Their input is a part of the arguments that
    the model writes, so each call is one event, at its end. `names` are the custom tools."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._open: CallBegin | None = None
        self._arguments: list[str] = []

    def read(self, events: Iterable[ReplyEvent], final: bool) -> list[ChatEvent]:
        """Return the events in place of `events`. If they are the `final` ones, a call that is cut short also
        ends."""
        read: list[ChatEvent] = []
        for event in events:
            if self._open is not None and isinstance(event, CallArguments):
                self._arguments.append(event.text)
                continue
            read += self._ended()
            if isinstance(event, CallBegin) and event.name in self._names:
                self._open = event
            else:
                read.append(event)
        return [*read, *self._ended()] if final else read

    def _ended(self) -> list[ChatEvent]:
        """Return the open call, which ends."""
        call, self._open = self._open, None
        text, self._arguments = "".join(self._arguments), []
        return [] if call is None else [CustomCall(call.index, call.id, call.name, custom_input(text))]


def message_fields(events: Iterable[ChatEvent], with_reasoning: bool) -> dict[str, Any]:
    """Return the fields of the chat message that consists of all `events` of a reply. `with_reasoning`:
    include the fields of reasoning."""
    shown = _shown(events, with_reasoning)
    content, reasoning = _joined(shown, TextDelta), _joined(shown, ReasoningDelta)
    calls = [replace(call, index=UNSET) for call in _calls(shown)]
    fields = {"content": content or (None if calls or reasoning else ""), "tool_calls": calls or UNSET}
    return fields | _reasoning(reasoning or None) if with_reasoning else fields


def delta_fields(events: Iterable[ChatEvent], with_reasoning: bool) -> list[dict[str, Any]]:
    """Return the fields of the deltas for `events`: one delta, or more where events are in another order than
    clients read the fields of a delta; none if nothing is shown."""
    groups: list[list[ChatEvent]] = []
    for event in _shown(events, with_reasoning):
        if not groups or _ORDER[type(event)] < _ORDER[type(groups[-1][-1])]:
            groups.append([])
        groups[-1].append(event)
    return [_delta(group) for group in groups]


def _delta(events: list[ChatEvent]) -> dict[str, Any]:
    content, reasoning = _joined(events, TextDelta), _joined(events, ReasoningDelta)
    fields = {"content": content or UNSET, "tool_calls": _calls(events) or UNSET}
    return fields | _reasoning(reasoning) if reasoning else fields


def _reasoning(text: str | None) -> dict[str, Any]:
    """Return the reasoning under both field names in use."""
    return {"reasoning": text, "reasoning_content": text}


def _shown(events: Iterable[ChatEvent], with_reasoning: bool) -> list[ChatEvent]:
    hidden = CallEnd if with_reasoning else (CallEnd, ReasoningDelta)
    return [event for event in events if not isinstance(event, hidden)]


def _joined(events: list[ChatEvent], kind: type[TextDelta] | type[ReasoningDelta]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def _calls(events: list[ChatEvent]) -> list[ToolCall]:
    """Return one entry for each call. Clients merge the events of a stream by a call's index, and may read
    only the first entry of an index in an event."""
    calls: dict[int, ToolCall] = {}
    functions: dict[int, Function] = {}
    for event in events:
        if isinstance(event, CallBegin):
            functions[event.index] = Function(name=event.name)
            calls[event.index] = ToolCall(index=event.index, id=event.id, type="function")
        elif isinstance(event, CallArguments):
            written = functions.get(event.index, Function())
            functions[event.index] = replace(written, arguments=written.arguments + event.text)
            calls.setdefault(event.index, ToolCall(index=event.index))
        elif isinstance(event, CustomCall):
            custom = Custom(name=event.name, input=event.input)
            calls[event.index] = ToolCall(index=event.index, id=event.id, type="custom", custom=custom)
    return [replace(call, function=functions.get(index, UNSET)) for index, call in calls.items()]
