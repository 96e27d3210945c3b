"""The output of a response while it is generated: items open, grow and close, with an event for each
change."""

import secrets
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from msgspec.structs import replace

from streamserve.api.openai.custom_tools import custom_input
from streamserve.api.openai.logprobs import chat_logprobs
from streamserve.extras.responses.response_schemas import (
    CallItem,
    CustomCallItem,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
    ResponseReply,
    Status,
    TextLogprob,
    TopLogprob,
)
from streamserve.extras.responses.response_tools import ResponseTools
from streamserve.text.output import TokenLogprob

Emit = Callable[[ResponseEvent], Awaitable[None]]


class Output:
    """The output of one response. One item is open at a time: an item of another type closes it.

    created, in_progress
        item added ── part added ── delta, delta … ── text done ── part done ── item done
        …
    completed, incomplete or failed
    """

    def __init__(self, emit: Emit, tools: ResponseTools | None = None) -> None:
        self.items: list[Item] = []
        self.begun = False
        self._emit = emit
        self._tools = tools or ResponseTools()
        self._number = 0
        self._open: type[Item] | None = None
        self._texts: list[str] = []
        self._scores: list[TextLogprob] = []

    async def begin(self, response: ResponseReply) -> None:
        """Send the first two events."""
        self.begun = True
        await self._send("response.created", response=response)
        await self._send("response.in_progress", response=response)

    async def end(self, response: ResponseReply) -> None:
        """Send the last event, named after the response's status."""
        await self._send(f"response.{response.status}", response=response)

    async def text(self, text: str, logprobs: Iterable[TokenLogprob] = ()) -> None:
        """Append text to the message."""
        scores = _scores(logprobs)
        if not text and not scores:
            return
        if self._open is not MessageItem:
            await self._add(MessageItem(id=_id("msg"), status="in_progress"), OutputText())
        self._texts.append(text)
        self._scores += scores
        await self._send_item_event(
            "response.output_text.delta", content_index=0, delta=text, logprobs=scores
        )

    async def reasoning(self, text: str) -> None:
        """Append text to the reasoning."""
        if not text:
            return
        if self._open is not ReasoningItem:
            await self._add(ReasoningItem(id=_id("rs"), status="in_progress"), ReasoningText())
        self._texts.append(text)
        await self._send_item_event("response.reasoning_text.delta", content_index=0, delta=text)

    async def call(self, call_id: str, name: str) -> None:
        """Open a call of the tool whose function is called `name`; its arguments follow."""
        origin = self._tools.origin(name)
        made: type[CallItem | CustomCallItem] = CustomCallItem if origin.custom else CallItem
        item_id = _id("ctc" if origin.custom else "fc")
        item = made(id=item_id, status="in_progress", call_id=call_id, name=origin.name)
        await self._add(item if origin.namespace is None else replace(item, namespace=origin.namespace))

    async def arguments(self, text: str) -> None:
        """Append text to the arguments of the latest call. The input of a custom tool is part of JSON: it is
        sent when it is complete."""
        if text:
            self._texts.append(text)
            if self._open is CallItem:
                await self._send_item_event("response.function_call_arguments.delta", delta=text)

    async def call_end(self) -> None:
        """Close the latest call: its arguments are complete."""
        await self.close("completed")

    async def finish(self, status: Status) -> None:
        """End the output. If it has no items, add an empty message."""
        if not self.items:
            await self._add(MessageItem(id=_id("msg"), status="in_progress"), OutputText())
        await self.close(status)

    async def _add(self, item: Item, part: OutputText | ReasoningText | None = None) -> None:
        await self.close("completed")
        self._open = type(item)
        self.items.append(item)
        await self._send("response.output_item.added", output_index=len(self.items) - 1, item=item)
        if part is not None:
            await self._send_item_event("response.content_part.added", content_index=0, part=part)

    async def close(self, status: Status) -> None:
        """Close the open item. `status`: whether it is complete."""
        if self._open is None:
            return
        text, scores = "".join(self._texts), self._scores
        self._open, self._texts, self._scores = None, [], []
        item = self.items[-1]
        if isinstance(item, CallItem):
            item = replace(item, status=status, arguments=text)
            await self._send_item_event(
                "response.function_call_arguments.done", arguments=text, name=item.name
            )
        elif isinstance(item, CustomCallItem):
            text = custom_input(text)
            item = replace(item, status=status, input=text)
            await self._send_item_event("response.custom_tool_call_input.delta", delta=text)
            await self._send_item_event("response.custom_tool_call_input.done", input=text)
        elif isinstance(item, ReasoningItem):
            thought = ReasoningText(text=text)
            item = replace(item, status=status, content=[thought])
            await self._send_item_event("response.reasoning_text.done", content_index=0, text=text)
            await self._send_item_event("response.content_part.done", content_index=0, part=thought)
        else:
            part = OutputText(text=text, logprobs=scores)
            item = replace(item, status=status, content=[part])
            await self._send_item_event(
                "response.output_text.done", content_index=0, text=text, logprobs=scores
            )
            await self._send_item_event("response.content_part.done", content_index=0, part=part)
        self.items[-1] = item
        await self._send("response.output_item.done", output_index=len(self.items) - 1, item=item)

    async def _send_item_event(self, kind: str, **fields: Any) -> None:
        """Send an event about the latest item."""
        index = len(self.items) - 1
        await self._send(kind, item_id=self.items[-1].id, output_index=index, **fields)

    async def _send(self, kind: str, **fields: Any) -> None:
        event = ResponseEvent(type=kind, sequence_number=self._number, **fields)
        self._number += 1
        await self._emit(event)


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(16)}"


def _scores(entries: Iterable[TokenLogprob]) -> list[TextLogprob]:
    return [
        TextLogprob(
            entry.token,
            entry.logprob,
            entry.bytes,
            [TopLogprob(top.token, top.logprob, top.bytes) for top in entry.top_logprobs],
        )
        for entry in chat_logprobs(entries).content
    ]
