"""Compare a model's reply on three routes: what clients of chats, messages and responses collect from a
stream."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec

from streamserve.api.openai.chat_parts import delta_fields
from streamserve.api.openai.output_parser import OutputParser, OutputSink
from streamserve.api.openai.replies import ChatDelta
from streamserve.extras.anthropic.message_output import Content
from streamserve.extras.responses.response_output import Output
from streamserve.protocol.messages import FinishReason
from streamserve.text.message import MessageParser
from streamserve.text.output import ChoiceDelta
from streamserve.text.reasoning import REASONING_FORMATS, ReasoningParser
from streamserve.text.reply_reader import ReplyReader
from streamserve.text.stops import StopFinder
from streamserve.text.tools.formats import FORMATS
from streamserve.text.tools.parser import ToolCallParser
from tests.api.serving import parsed_delta

TOOLS: dict[str, Any] = {"add": {"type": "object"}, "now": {"type": "object"}}
ADD = '<tool_call>{"name": "add", "arguments": {"i": 42}}</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'

CALL_FORMATS = ("hermes", "llama3_json", "qwen3_coder", "pythonic", "gemma", "mistral", "granite")
WORDS = (
    *("<think>", "</think>", "Hi", " ", "\n", ADD, NOW, ADD[:-12], ADD[11:], NOW[:30], "x", "42", "null"),
    *("<tool_call>", "</tool_call>", "}", "{", '"', "[", "]", ADD.replace('{"i": 42}', "null")),
    "<tool_call>\n<function=add>\n<parameter=i>\n42\n</parameter>\n</function>\n</tool_call>",
    *(
        "[add(i=42), now()]",
        "[add(i=",
        "```",
        "```tool_code\n",
        "[TOOL_CALLS]",
        "add[ARGS]{}",
        "<|python_tag|>",
    ),
    *('{"name": "add", "parameters": {"i": 42}}', '[{"name": "now", "arguments": {}}]', "<function=now>"),
)
"""Parts of the texts that models write."""
STOPS = ("H", "Hi", "i<", "}", "4", "null", "\n", " ", "think", "tool", "x}")

Block = tuple[str, str]
"""The kind of a block, and its text; of a call its name and its arguments, in one text."""


def deltas_of(
    pieces: Sequence[str],
    finish: FinishReason = "stop",
    stop: tuple[str, ...] = (),
    format: str = "hermes",
    prompt: str = "user",
) -> list[ChoiceDelta]:
    """Return the deltas of a reply that a model generates in these pieces, up to its end."""
    thoughts = ReasoningParser(REASONING_FORMATS["qwen3"], prompt)
    reader = ReplyReader(MessageParser(thoughts, ToolCallParser(FORMATS[format], TOOLS)), StopFinder(stop))
    deltas: list[ChoiceDelta] = []
    for delta in [*(ChoiceDelta(0, piece, (5,)) for piece in pieces), ChoiceDelta(0, finish=finish)]:
        deltas.append(parsed_delta(reader, delta))
        if deltas[-1].finish:
            break
    return deltas


def encoded(value: Any) -> Any:
    """Return what a client decodes from the encoded form."""
    return msgspec.json.decode(msgspec.json.encode(value))


def chat_events(deltas: Sequence[ChoiceDelta]) -> list[dict[str, Any]]:
    """Return the deltas of a chat's stream."""
    fields = [fields for delta in deltas for fields in delta_fields(delta.events, True)]
    return [encoded(ChatDelta(**each)) for each in fields]


def message_events(deltas: Sequence[ChoiceDelta]) -> list[dict[str, Any]]:
    """Return the events of a message's stream, from its first block to its last."""
    events: list[dict[str, Any]] = []

    async def emit(event: Any) -> None:
        events.append(encoded(event))

    content = Content(emit)
    asyncio.run(_add(content, deltas))
    asyncio.run(content.close())
    return events


def response_events(deltas: Sequence[ChoiceDelta]) -> list[dict[str, Any]]:
    """Return the events of a response's stream, from its first item to its last."""
    events: list[dict[str, Any]] = []

    async def emit(event: Any) -> None:
        events.append(encoded(event))

    output = Output(emit)
    asyncio.run(_add(output, deltas))
    asyncio.run(output.close("completed"))
    return events


async def _add(output: OutputSink, deltas: Sequence[ChoiceDelta]) -> None:
    parser = OutputParser(output)
    for delta in deltas:
        await parser.delta(delta)


@dataclass
class CollectedReply:
    """The blocks of a reply in the order in which a client gets them."""

    blocks: list[list[str]] = field(default_factory=list)
    calls: dict[int, int] = field(default_factory=dict)

    def add(self, kind: str, text: str) -> None:
        if not self.blocks or self.blocks[-1][0] != kind:
            self.blocks.append([kind, ""])
        self.blocks[-1][1] += text

    def call(self, index: int, name: str) -> None:
        self.calls[index] = len(self.blocks)
        self.blocks.append(["call", f"{name} "])

    def arguments(self, index: int, text: str) -> None:
        self.blocks[self.calls[index]][1] += text

    @property
    def ordered(self) -> list[Block]:
        return [(kind, text) for kind, text in self.blocks if text]


def collected_chat(events: Sequence[dict[str, Any]]) -> list[Block]:
    """Return the blocks that a client builds from a chat's deltas: in each delta reasoning comes first, then
    text, then calls."""
    reply = CollectedReply()
    for event in events:
        assert event.get("reasoning") == event.get("reasoning_content")
        for kind in ("reasoning", "content"):
            if event.get(kind):
                reply.add(kind, event[kind])
        for call in event.get("tool_calls", []):
            if "id" in call:
                reply.call(call["index"], call["function"]["name"])
            reply.arguments(call["index"], call["function"]["arguments"])
    return reply.ordered


def collected_message(events: Sequence[dict[str, Any]]) -> list[Block]:
    """Return the blocks that a client builds from a message's events. Each block starts, grows and stops
    before the next."""
    blocks: list[list[str]] = []
    is_open = False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            block = event["content_block"]
            kind = {"text": "content", "thinking": "reasoning", "tool_use": "call"}[block["type"]]
            blocks.append([kind, f"{block['name']} " if kind == "call" else ""])
            is_open = True
        elif event["type"] == "content_block_stop":
            assert (is_open, event["index"]) == (True, len(blocks) - 1)
            is_open = False
        else:
            assert (is_open, event["index"]) == (True, len(blocks) - 1)
            delta, kind = event["delta"], blocks[-1][0]
            name = {"content": "text", "reasoning": "thinking", "call": "partial_json"}[kind]
            assert delta["type"] == "signature_delta" or name in delta
            blocks[-1][1] += delta.get(name, "")
    return [(kind, text) for kind, text in blocks]


def collected_response(events: Sequence[dict[str, Any]]) -> list[Block]:
    """Return the blocks that a client builds from a response's events, which must equal those of the complete
    items."""
    blocks: list[list[str]] = []
    done: list[Block] = []
    for event in events:
        item = event.get("item")
        if event["type"] == "response.output_item.added":
            kind = {"message": "content", "reasoning": "reasoning", "function_call": "call"}[item["type"]]
            blocks.append([kind, f"{item['name']} " if kind == "call" else ""])
        elif event["type"] == "response.output_item.done":
            kind = blocks[-1][0]
            text = f"{item['name']} {item['arguments']}" if kind == "call" else item["content"][0]["text"]
            done.append((kind, text))
        elif "delta" in event:
            assert event["output_index"] == len(blocks) - 1
            blocks[-1][1] += event["delta"]
    assert done == [(kind, text) for kind, text in blocks]
    return done


def pieces_of(text: str, positions: Sequence[int]) -> list[str]:
    """Return the text split at the given positions that are within it."""
    cuts = sorted({min(position, len(text)) for position in positions} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(cuts)]


def assert_blocks(deltas: Sequence[ChoiceDelta], blocks: list[Block]) -> None:
    """Assert that clients of all routes get these blocks."""
    assert collected_chat(chat_events(deltas)) == blocks
    assert collected_message(message_events(deltas)) == blocks
    assert collected_response(response_events(deltas)) == blocks


def assert_same_blocks(text: str, positions: Sequence[int], stop: str | None, format: str) -> None:
    """Assert that clients of all routes get the same blocks, and the reply the same end, however the text is
    split; and that no text contains a stop string."""
    stops = () if stop is None else (stop,)
    whole = deltas_of([text], stop=stops, format=format)
    blocks, end = collected_message(message_events(whole)), whole[-1]
    for split in (pieces_of(text, positions), list(text)):
        deltas = deltas_of(split, stop=stops, format=format)
        assert_blocks(deltas, blocks)
        last = deltas[-1]
        assert (last.finish, last.stop, last.called) == (end.finish, end.stop, end.called)
    assert stop is None or not any(kind == "content" and stop in part for kind, part in blocks)
    if end.stop is None:
        assert blocks == collected_message(message_events(deltas_of([text], format=format)))
