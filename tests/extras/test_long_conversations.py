"""Conversations with as many entries as a request may have are converted in time that grows with their length
only: one thread converts the large conversations of all clients."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from streamserve.api.http.ignored_fields import IgnoredFields
from streamserve.api.http.json_scan import MAX_CONTAINERS
from streamserve.api.http.memory import MemoryAccount
from streamserve.api.openai.messages import checked_messages
from streamserve.extras.anthropic import message_input
from streamserve.extras.anthropic.schemas import MessagesRequest
from streamserve.extras.ollama import chat_input
from streamserve.extras.ollama.schemas import OllamaChatRequest
from streamserve.extras.responses import response_input
from streamserve.extras.responses.response_schemas import ResponseRequest
from streamserve.extras.responses.response_tools import ResponseTools

MAX_SECONDS = 2.0
"""Processor time. A conversion takes about 0.3 s, and 8 s or more if each entry is compared with all others,
or a message is copied for each of its parts."""

Conversation = list[dict[str, Any]]


def chats(messages: Conversation) -> Conversation:
    return checked_messages(messages, MemoryAccount(1 << 30).charge())


def anthropic(messages: Conversation) -> Conversation:
    body = MessagesRequest(messages=messages, max_tokens=1)
    return message_input.as_chat(body, IgnoredFields(strict=False)).messages


def responses(items: Conversation) -> Conversation:
    body = ResponseRequest(input=items)
    return response_input.as_chat(body, ResponseTools(), IgnoredFields(strict=False)).messages


def ollama(messages: Conversation) -> Conversation:
    body = OllamaChatRequest(messages=messages)
    return chat_input.as_chat(body, "small", IgnoredFields(strict=False)).messages


def calls(count: int) -> Conversation:
    """A message with calls, and results of another call, so that the calls stay without a result."""
    call = [{"id": f"{n}", "function": {"name": "f", "arguments": {}}} for n in range(count)]
    result = {"role": "tool", "content": "a", "tool_call_id": "other"}
    return [{"role": "assistant", "content": "", "tool_calls": call}, *[result] * count]


CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
THOUGHT = {"type": "thinking", "thinking": "a" * 60}
REASONING = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "a" * 300}]}
LONG: dict[str, tuple[Callable[[Conversation], Conversation], Conversation, int]] = {
    "calls of a chat": (chats, calls(12_000), 12_001),
    "calls in Ollama's API": (ollama, calls(12_000), 12_001),
    "consecutive messages in Anthropic's API": (anthropic, [{"role": "user", "content": "a"}] * 60_000, 1),
    "thoughts in Anthropic's API": (anthropic, [{"role": "assistant", "content": [THOUGHT] * 60_000}], 1),
    "texts after a call in the Responses API": (
        responses, [CALL, *[{"role": "assistant", "content": "a"}] * 60_000], 1,
    ),
    "reasoning in the Responses API": (responses, [REASONING] * 20_000, 1),
}  # fmt: skip
"""By what the conversation has: how it is converted, its entries, and the number of messages that they
become."""


@pytest.mark.parametrize("name", LONG)
def test_a_long_conversation_is_converted_soon(name: str) -> None:
    convert, entries, expected = LONG[name]
    assert len(entries) < MAX_CONTAINERS
    began = time.thread_time()
    messages = convert(entries)
    seconds = time.thread_time() - began
    assert len(messages) == expected
    assert seconds < MAX_SECONDS
