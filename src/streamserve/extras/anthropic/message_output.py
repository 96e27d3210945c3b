"""Content blocks of a message while it is generated: they open, grow and close, with an event for each
step."""

from collections.abc import Awaitable, Callable, Iterable

from msgspec.structs import replace

from streamserve.api.openai.call_arguments import arguments_object
from streamserve.extras.anthropic.schemas import (
    Block,
    EventDelta,
    MessageEvent,
    MessageReply,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from streamserve.text.output import TokenLogprob

Emit = Callable[[MessageEvent], Awaitable[None]]


class Content:
    """The content of one message. One block is open at a time: a block of another type closes it.

    message_start, ping
        content_block_start
        content_block_delta …
        content_block_stop
        …
    message_delta, message_stop

    With `omit_thinking`, the text of the reasoning is left out.
    """

    def __init__(self, emit: Emit, omit_thinking: bool = False) -> None:
        self.blocks: list[Block] = []
        self.begun = False
        self._emit = emit
        self._omit_thinking = omit_thinking
        self._open: type[Block] | None = None
        self._texts: list[str] = []

    async def begin(self, message: MessageReply) -> None:
        """Send the first events."""
        self.begun = True
        await self._emit(MessageEvent(type="message_start", message=message))
        await self._emit(MessageEvent(type="ping"))

    async def end(self, message: MessageReply) -> None:
        """Close the open block and send the last events."""
        assert message.stop_reason is not None
        delta = EventDelta(stop_reason=message.stop_reason, stop_sequence=message.stop_sequence)
        await self._emit(MessageEvent(type="message_delta", delta=delta, usage=message.usage))
        await self._emit(MessageEvent(type="message_stop"))

    async def text(self, text: str, logprobs: Iterable[TokenLogprob] = ()) -> None:
        """Append text to the message. Log-probabilities are not part of this API."""
        if text:
            await self._open_block(TextBlock())
            await self._grow(text, EventDelta(type="text_delta", text=text))

    async def reasoning(self, text: str) -> None:
        if text:
            await self._open_block(ThinkingBlock())
            if not self._omit_thinking:
                await self._grow(text, EventDelta(type="thinking_delta", thinking=text))

    async def call(self, call_id: str, name: str) -> None:
        """Open a tool call; its arguments follow."""
        await self.close()
        await self._open_block(ToolUseBlock(id=call_id, name=name))

    async def arguments(self, text: str) -> None:
        """Append text to the arguments of the latest call."""
        if text:
            await self._grow(text, EventDelta(type="input_json_delta", partial_json=text))

    async def call_end(self) -> None:
        """Close the latest call: its arguments are complete."""
        await self.close()

    async def close(self) -> None:
        """Close the open block."""
        if self._open is None:
            return
        text = "".join(self._texts)
        self._open, self._texts = None, []
        block = self.blocks[-1]
        if isinstance(block, ToolUseBlock):
            block = replace(block, input=arguments_object(text))
        elif isinstance(block, ThinkingBlock):
            block = replace(block, thinking=text)
            await self._delta(EventDelta(type="signature_delta", signature=block.signature))
        else:
            block = replace(block, text=text)
        self.blocks[-1] = block
        await self._emit(MessageEvent(type="content_block_stop", index=len(self.blocks) - 1))

    async def _open_block(self, block: Block) -> None:
        if self._open is type(block):
            return
        await self.close()
        self._open = type(block)
        self.blocks.append(block)
        index = len(self.blocks) - 1
        await self._emit(MessageEvent(type="content_block_start", index=index, content_block=block))

    async def _grow(self, text: str, delta: EventDelta) -> None:
        self._texts.append(text)
        await self._delta(delta)

    async def _delta(self, delta: EventDelta) -> None:
        await self._emit(MessageEvent(type="content_block_delta", index=len(self.blocks) - 1, delta=delta))
