"""Sends replies back to the route that sent them: whole, or a stream cut anywhere."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from streamserve.api.http.ignored_fields import IgnoredFields
from streamserve.api.http.memory import MemoryAccount
from streamserve.api.openai.call_arguments import INVALID
from streamserve.api.openai.messages import checked_messages
from streamserve.api.openai.schemas import ChatRequest
from streamserve.extras.anthropic.message_input import as_chat as chat_of_message
from streamserve.extras.anthropic.schemas import MessagesRequest
from streamserve.extras.responses.response_input import as_chat
from streamserve.extras.responses.response_schemas import ResponseRequest
from streamserve.extras.responses.response_tools import response_tools
from tests.extras.reply_routes import (
    ADD,
    NOW,
    chat_events,
    deltas_of,
    message_events,
    pieces_of,
    response_events,
)

USER = {"role": "user", "content": "so?"}


Messages = list[dict[str, Any]]


def written(arguments: str) -> str:
    return ADD.replace('{"i": 42}', arguments)


ODD = [
    "null",
    '""',
    '"\\n"',
    "[1]",
    "42",
    '"x"',
    '{"a": NaN}',
    '{"a": 1e400}',
    '{"a": 1, "a": 2}',
    '{"a"}',
    "[" * 80,
]


WORDS = ["Hi", " ", "\n", "<think>", "</think>", ADD, NOW, ADD[:40], *map(written, ODD)]


def chat_of_response(body: ResponseRequest) -> ChatRequest:
    ignored = IgnoredFields(strict=False)
    return as_chat(body, response_tools(body.tools, ignored), ignored)


def checked(messages: Messages) -> Messages:
    """Return the messages that the template receives. Raises RequestError if they are refused."""
    return checked_messages(messages, MemoryAccount(1 << 30).charge())


def chat_reply(events: Sequence[dict[str, Any]]) -> Messages:
    """Return the message that a client builds from a chat's deltas."""
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for event in events:
        for name in ("content", "reasoning", "reasoning_content"):
            if name in event:
                message[name] = (message.get(name) or "") + event[name]
        for delta in event.get("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            if "id" in delta:
                calls.append(json.loads(json.dumps(delta)))
            else:
                calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    return checked([USER, message, USER])


def message_reply(events: Sequence[dict[str, Any]]) -> Messages:
    """Return the message that a client builds from a message's events, decoding the inputs of calls as far as
    possible."""
    blocks: Messages = []
    texts: list[str] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
            texts.append("")
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            texts[-1] += delta.get("text", "") + delta.get("thinking", "") + delta.get("partial_json", "")
    for block, text in zip(blocks, texts, strict=True):
        if block["type"] == "tool_use":
            try:
                block["input"] = msgspec.json.decode(text or "{}")
            except (ValueError, RecursionError):
                block["input"] = text
        else:
            block["text" if block["type"] == "text" else "thinking"] = text
    body = MessagesRequest(max_tokens=8, messages=[USER, {"role": "assistant", "content": blocks}, USER])
    return checked(chat_of_message(body, IgnoredFields(strict=True)).messages)


def response_reply(events: Sequence[dict[str, Any]]) -> Messages:
    """Return the items that a client has from a response's events, each as it was added or as it was
    completed."""
    items: Messages = []
    for event in events:
        if event["type"] == "response.output_item.added":
            items.append(event["item"])
        elif event["type"] == "response.output_item.done":
            items[-1] = event["item"]
    return checked(chat_of_response(ResponseRequest(input=[USER, *items, USER])).messages)


def parts(messages: Messages) -> tuple[str, str, list[Any]]:
    """Return the texts, the reasoning and the calls of the assistant's messages."""
    texts, reasoning, calls = "", "", []
    assistants = [message for message in messages if message["role"] == "assistant"]
    for message in assistants:
        content = message.get("content", "")
        texts += content if isinstance(content, str) else "".join(part["text"] for part in content)
        reasoning += message.get("reasoning_content", "")
        calls += [call["function"] for call in message.get("tool_calls", [])]
    for call in calls:
        assert isinstance(call["arguments"], dict)
        if INVALID in call["arguments"]:
            call["arguments"] = INVALID  # A client of messages may have decoded the text.
    return texts, reasoning, calls


ROUTES = [(chat_events, chat_reply), (message_events, message_reply), (response_events, response_reply)]


def assert_round_trip(text: str, positions: list[int]) -> None:
    deltas = deltas_of(pieces_of(text, positions))
    whole = []
    for events_of, reply_of in ROUTES:
        events = events_of(deltas)
        for cut in range(len(events)):
            reply_of(events[:cut])
        whole.append(parts(reply_of(events)))
    assert whole[0] == whole[1] == whole[2]
