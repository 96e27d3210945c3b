"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from streamserve.api.context import AppContext
from streamserve.api.generation import GenerationTask, generate, new_id
from streamserve.api.generator import Item
from streamserve.api.http.body import read_request
from streamserve.api.http.disconnect import while_connected
from streamserve.api.http.errors import as_request_error
from streamserve.api.http.ignored_fields import IgnoredFields, ignored_of
from streamserve.api.http.limits import charge_of
from streamserve.api.http.sse import EventStream
from streamserve.api.leases import routed
from streamserve.api.model_table import served_name
from streamserve.api.openai.conversation import (
    LARGE_REQUEST,
    Conversation,
    chat_prompt,
    chat_tools,
    prepared,
)
from streamserve.api.openai.field_names import renamed
from streamserve.api.openai.options import options_of
from streamserve.api.openai.output_parser import OutputParser
from streamserve.api.openai.repeats import KEY_PARAMETER, with_key_seed
from streamserve.api.openai.schemas import ChatRequest
from streamserve.api.openai.slo import header_parameters, with_header_targets
from streamserve.api.openai.thinking import with_thinking
from streamserve.api.routes import Operation, Route, json_response
from streamserve.extras.anthropic.errors import STATUSES, AnthropicErrorBody, anthropic_error
from streamserve.extras.anthropic.message_input import NAMES, as_chat, thinking_type
from streamserve.extras.anthropic.message_output import Content, Emit
from streamserve.extras.anthropic.other_fields import OTHER_IN_COUNTS, OTHER_IN_MESSAGES
from streamserve.extras.anthropic.schemas import (
    CountTokensReply,
    CountTokensRequest,
    MessageEvent,
    MessageReply,
    MessagesRequest,
    MessageUsage,
    StopReason,
    ThinkingTokens,
)
from streamserve.protocol.errors import RequestError
from streamserve.protocol.request_options import NO_OPTIONS
from streamserve.text.output import ChoiceDelta, Usage

VERSIONS = ("2023-06-01", "2026-10-21")
"""Supported versions of the API. The later version removes fields; this server accepts them in both
versions."""
VERSION_HEADER, BETA_HEADER = "anthropic-version", "anthropic-beta"

_HEADERS: tuple[dict[str, Any], ...] = (
    {
        "name": VERSION_HEADER,
        "in": "header",
        "description": "the version of the API",
        "schema": {"type": "string", "examples": [*VERSIONS]},
    },
    {
        "name": BETA_HEADER,
        "in": "header",
        "description": "without effect: named in the Warning header",
        "schema": {"type": "string"},
    },
    {
        "name": "beta",
        "in": "query",
        "description": "without effect; Anthropic's clients send it together with the header anthropic-beta",
        "schema": {"type": "boolean"},
    },
)


async def messages(context: AppContext, request: Request) -> Response:
    """Answer a conversation. Raises RequestError if the request cannot be served."""
    ignored = _ignored_headers(request)
    body = await read_request(request, context, MessagesRequest, OTHER_IN_MESSAGES)
    body = with_header_targets(body, request.headers)
    body = with_key_seed(body, request.headers)
    context = await routed(context, request, body.model)
    try:
        chat = await _chat(context, request, body, ignored)
        conversation = await prepared(context, chat, charge_of(request), ignored)
        conversation = conversation.within_context(context.llm, "max_tokens", ignored)
    except RequestError as error:
        raise renamed(error, NAMES) from error
    return await _Message(context, body, conversation).respond(request)


async def count_tokens(context: AppContext, request: Request) -> Response:
    """Return the number of tokens of a conversation's prompt. Raises RequestError as `messages` does."""
    ignored = _ignored_headers(request)
    body = await read_request(request, context, CountTokensRequest, OTHER_IN_COUNTS)
    context = await routed(context, request, body.model)
    charge = charge_of(request)
    try:
        chat = await _chat(context, request, body, ignored)
        large = charge.held > LARGE_REQUEST
        tools = await context.grammar_thread.run_if(large, lambda: chat_tools(context, chat))
        prompt = await chat_prompt(context, chat, None, charge, tools, ignored)
    except RequestError as error:
        raise renamed(error, NAMES) from error
    return json_response(CountTokensReply(len(prompt.ids)))


MESSAGE_ROUTES: tuple[Route[AppContext], ...] = (
    Route(
        "POST",
        "/v1/messages",
        messages,
        Operation(
            "The next message of a conversation, in Anthropic's API",
            MessagesRequest,
            MessageReply,
            event=MessageEvent,
            others=OTHER_IN_MESSAGES,
            error=AnthropicErrorBody,
            statuses=STATUSES,
            parameters=[*_HEADERS, *header_parameters(), KEY_PARAMETER],
            example={"max_tokens": 16, "messages": [{"role": "user", "content": "Say hello."}]},
        ),
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        count_tokens,
        Operation(
            "The number of tokens of a message's prompt",
            CountTokensRequest,
            CountTokensReply,
            others=OTHER_IN_COUNTS,
            error=AnthropicErrorBody,
            statuses=STATUSES,
            parameters=_HEADERS,
            example={"messages": [{"role": "user", "content": "Say hello."}]},
        ),
    ),
)


def _ignored_headers(request: Request) -> IgnoredFields:
    """Return the request's ignored fields, to which the headers without effect are added."""
    ignored = ignored_of(request)
    if request.headers.get(VERSION_HEADER, VERSIONS[0]) not in VERSIONS:
        ignored.add(VERSION_HEADER, f" with values other than {' and '.join(VERSIONS)}")
    if request.headers.get(BETA_HEADER):
        ignored.add(BETA_HEADER)
    return ignored


async def _chat(
    context: AppContext, request: Request, body: MessagesRequest | CountTokensRequest, ignored: IgnoredFields
) -> ChatRequest:
    """Convert a request to a chat request. Its thinking becomes variables of the chat template."""
    large = charge_of(request).held > LARGE_REQUEST
    chat = await context.side_thread.run_if(large, lambda: as_chat(body, ignored))
    thinking = thinking_type(body, ignored)
    if thinking is not None:
        chat = msgspec.structs.replace(chat, enable_thinking=thinking != "disabled")
    return with_thinking(chat, context.llm.chat_template, ignored, "output_config.effort", "thinking")


class _Message:
    """One request."""

    def __init__(self, context: AppContext, body: MessagesRequest, conversation: Conversation) -> None:
        self._context = context
        self._body = body
        self._conversation = conversation
        self._id = new_id("msg").replace("-", "_")
        self._model = served_name(context.llm, body.model)
        self._ends_with_context = conversation.params.max_tokens != body.max_tokens
        self._options = NO_OPTIONS

    async def respond(self, request: Request) -> Response:
        self._options = options_of(self._context, request, self._body, self._model)
        if self._body.stream:
            return EventStream(self._stream, named=True)
        reply = await while_connected(request.receive, self._run(self._content(_discard)))
        return json_response(reply)

    def _content(self, emit: Emit) -> Content:
        return Content(emit, omit_thinking=(self._body.thinking or {}).get("display") == "omitted")

    async def _stream(self, emit: Any) -> None:
        """Stream the message. After the first event, an error is sent as an event."""
        content = self._content(emit)
        try:
            await self._run(content)
        except ClientDisconnect:
            raise
        except Exception as error:
            if not content.begun:
                raise
            await emit(anthropic_error(as_request_error(error)))

    async def _run(self, content: Content) -> MessageReply:
        """Generate, sending events to `content`; return the whole message."""
        conversation = self._conversation
        parser = OutputParser(content)
        length = len(conversation.prompt.ids)

        async def handle(task: GenerationTask, item: Item) -> None:
            if not content.begun:
                cached = item.cached_tokens if isinstance(item, ChoiceDelta) else 0
                await content.begin(self._reply(Usage(length, 0, cached)))
            if isinstance(item, Usage):
                parser.usage = item
            elif isinstance(item, ChoiceDelta):
                await parser.delta(item)

        task = GenerationTask(
            0, self._id, conversation.prompt, conversation.params, self._options, reader=conversation.reader
        )
        try:
            await generate(self._context, [task], handle)
        except RequestError as error:
            raise renamed(error, NAMES) from error
        await content.close()
        stop = parser.stop if isinstance(parser.stop, str) else None
        reply = msgspec.structs.replace(
            self._reply(parser.usage, parser.thought_tokens),
            content=content.blocks,
            stop_reason=self._stop_reason(parser),
            stop_sequence=None if parser.called else stop,
        )
        await content.end(reply)
        return reply

    def _stop_reason(self, parser: OutputParser) -> StopReason:
        if parser.finish == "length":
            return "model_context_window_exceeded" if self._ends_with_context else "max_tokens"
        if parser.called:
            return "tool_use"
        return "stop_sequence" if isinstance(parser.stop, str) else "end_turn"

    def _reply(self, usage: Usage, thought_tokens: int = 0) -> MessageReply:
        counts = MessageUsage(
            input_tokens=usage.prompt_tokens - usage.cached_tokens,
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
        )
        if self._conversation.thinking is not None:
            details = ThinkingTokens(thought_tokens)
            counts = msgspec.structs.replace(counts, output_tokens_details=details)
        return MessageReply(id=self._id, model=self._model, usage=counts)


async def _discard(event: MessageEvent) -> None:
    """Discard an event of a message that is not streamed."""
