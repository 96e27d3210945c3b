"""Converts the events of a reply to the fields of a chat message, whole or as the deltas of a stream."""

from collections.abc import Iterable
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from streamserve.api.openai.replies import Function, ToolCall
from streamserve.text.reply_events import (
    CallArguments,
    CallBegin,
    CallEnd,
    ReasoningDelta,
    ReplyEvent,
    TextDelta,
)

_ORDER: dict[type[ReplyEvent], int] = {ReasoningDelta: 0, TextDelta: 1, CallBegin: 2, CallArguments: 2}
"""The order in which clients read the fields of one delta."""


def message_fields(events: Iterable[ReplyEvent], with_reasoning: bool) -> dict[str, Any]:
    """Return the fields of the chat message that consists of all `events` of a reply. `with_reasoning`:
    include the fields of reasoning."""
    shown = _shown(events, with_reasoning)
    content, reasoning = _joined(shown, TextDelta), _joined(shown, ReasoningDelta)
    calls = [replace(call, index=UNSET) for call in _calls(shown)]
    fields = {"content": content or (None if calls or reasoning else ""), "tool_calls": calls or UNSET}
    return fields | _reasoning(reasoning or None) if with_reasoning else fields


def delta_fields(events: Iterable[ReplyEvent], with_reasoning: bool) -> list[dict[str, Any]]:
    """Return the fields of the deltas for `events`: one delta, or more where events are in another order than
    clients read the fields of a delta; none if nothing is shown."""
    groups: list[list[ReplyEvent]] = []
    for event in _shown(events, with_reasoning):
        if not groups or _ORDER[type(event)] < _ORDER[type(groups[-1][-1])]:
            groups.append([])
        groups[-1].append(event)
    return [_delta(group) for group in groups]


def _delta(events: list[ReplyEvent]) -> dict[str, Any]:
    content, reasoning = _joined(events, TextDelta), _joined(events, ReasoningDelta)
    fields = {"content": content or UNSET, "tool_calls": _calls(events) or UNSET}
    return fields | _reasoning(reasoning) if reasoning else fields


def _reasoning(text: str | None) -> dict[str, Any]:
    """Return the reasoning under both field names in use."""
    return {"reasoning": text, "reasoning_content": text}


def _shown(events: Iterable[ReplyEvent], with_reasoning: bool) -> list[ReplyEvent]:
    hidden = CallEnd if with_reasoning else (CallEnd, ReasoningDelta)
    return [event for event in events if not isinstance(event, hidden)]


def _joined(events: list[ReplyEvent], kind: type[TextDelta] | type[ReasoningDelta]) -> str:
    return "".join(event.text for event in events if isinstance(event, kind))


def _calls(events: list[ReplyEvent]) -> list[ToolCall]:
    """Return one entry for each call. Clients merge the events of a stream by a call's index, and may read
    only the first entry of an index in an event."""
    calls: dict[int, ToolCall] = {}
    for event in events:
        if isinstance(event, CallBegin):
            function = Function(name=event.name)
            calls[event.index] = ToolCall(index=event.index, id=event.id, type="function", function=function)
        elif isinstance(event, CallArguments):
            call = calls.get(event.index, ToolCall(index=event.index, function=Function()))
            function = replace(call.function, arguments=call.function.arguments + event.text)
            calls[event.index] = replace(call, function=function)
    return list(calls.values())
