"""POST /v1/responses: OpenAI's Responses API."""

import time
from typing import Any

from msgspec.structs import replace
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from streamserve.api.context import AppContext
from streamserve.api.generation import GenerationTask, generate, new_id
from streamserve.api.generator import Item
from streamserve.api.http.auth import caller_of
from streamserve.api.http.body import read_request
from streamserve.api.http.disconnect import while_connected
from streamserve.api.http.errors import as_request_error
from streamserve.api.http.ignored_fields import IgnoredFields, ignored_of
from streamserve.api.http.limits import charge_of
from streamserve.api.http.sse import EventStream
from streamserve.api.leases import routed
from streamserve.api.model_table import served_name
from streamserve.api.openai.conversation import LARGE_REQUEST, Conversation, prepared
from streamserve.api.openai.field_names import renamed
from streamserve.api.openai.options import options_of
from streamserve.api.openai.output_parser import OutputParser
from streamserve.api.openai.outputs import charged_reply
from streamserve.api.openai.repeats import KEY_PARAMETER, with_key_seed
from streamserve.api.openai.replies import slo_fields
from streamserve.api.openai.schemas import ChatRequest
from streamserve.api.openai.scores import charge_delta
from streamserve.api.openai.slo import header_parameters, with_header_targets
from streamserve.api.openai.thinking import with_thinking
from streamserve.api.routes import Operation, Route, json_response
from streamserve.extras.responses.context import ResponseContext
from streamserve.extras.responses.idle_fields import response_without_idle_fields
from streamserve.extras.responses.other_fields import OTHER_IN_RESPONSES
from streamserve.extras.responses.response_input import NAMES, as_chat
from streamserve.extras.responses.response_output import Emit, Output
from streamserve.extras.responses.response_schemas import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseError,
    ResponseEvent,
    ResponseReply,
    ResponseRequest,
    ResponseUsage,
    Status,
)
from streamserve.extras.responses.response_store import StoredResponse
from streamserve.extras.responses.response_tools import ResponseTools, response_tools
from streamserve.extras.responses.stored_responses import history, stored_response
from streamserve.protocol.errors import CONTEXT_LENGTH_EXCEEDED, RequestError
from streamserve.protocol.request_options import NO_OPTIONS
from streamserve.text.output import ChoiceDelta, Usage


async def responses(own: ResponseContext, request: Request) -> Response:
    """Answer a text or a conversation. Raises RequestError if the request cannot be served."""
    body = await read_request(request, own.app, ResponseRequest, OTHER_IN_RESPONSES)
    body = response_without_idle_fields(body, ignored_of(request))
    body = with_header_targets(body, request.headers)
    body = with_key_seed(body, request.headers)
    context = await routed(own.app, request, body.model)
    if body.store and not own.stored.enabled:
        ignored_of(request).add("store")
    owner, previous = caller_of(request), None
    if body.previous_response_id is not None:
        previous = own.stored.get(body.previous_response_id, owner, "previous_response_id")
    tools = response_tools(body.tools, ignored_of(request))
    try:
        chat = await _chat(context, request, body, tools, previous)
        conversation = await prepared(context, chat, charge_of(request), ignored_of(request))
    except RequestError as error:
        raise renamed(error, {**NAMES, **tools.names}) from error
    response = _Response(ResponseContext(context, own.stored), body, conversation, tools, owner, previous)
    return await response.respond(request)


async def _chat(
    context: AppContext,
    request: Request,
    body: ResponseRequest,
    tools: ResponseTools,
    previous: StoredResponse | None,
) -> ChatRequest:
    """Convert a request to a chat request. The conversation of the `previous` response comes first."""
    charge = charge_of(request)
    large = charge.held + (previous.size if previous else 0) > LARGE_REQUEST

    def converted() -> ChatRequest:
        return as_chat(body, tools, ignored_of(request), history(previous, charge) if previous else ())

    chat = await context.side_thread.run_if(large, converted)
    return with_thinking(chat, context.llm.chat_template, ignored_of(request), "reasoning.effort")


RESPONSE_ROUTES: tuple[Route[ResponseContext], ...] = (
    Route(
        "POST",
        "/v1/responses",
        responses,
        Operation(
            "The model's response to text or a conversation, in items",
            ResponseRequest,
            ResponseReply,
            event=ResponseEvent,
            others=OTHER_IN_RESPONSES,
            parameters=[*header_parameters(), KEY_PARAMETER],
            example={"input": "Say hello.", "max_output_tokens": 16},
        ),
    ),
)


class _Response:
    """One request."""

    def __init__(
        self,
        context: ResponseContext,
        body: ResponseRequest,
        conversation: Conversation,
        tools: ResponseTools,
        owner: str,
        previous: StoredResponse | None,
    ) -> None:
        self._context = context.app
        self._store = context.stored
        self._body = body
        self._conversation = conversation
        self._tools = tools
        self._owner = owner
        self._previous = previous
        self._stored = context.stored.enabled and body.store is not False
        self._id = new_id("resp").replace("-", "_")
        self._created = int(time.time())
        self._options = NO_OPTIONS
        self._ignored = IgnoredFields(strict=False)
        self._model = served_name(context.app.llm, body.model)

    async def respond(self, request: Request) -> Response:
        self._ignored = ignored_of(request)
        self._options = options_of(self._context, request, self._body, self._model)
        if self._body.stream:
            return EventStream(self._stream, named=True)
        reply = await while_connected(request.receive, self._run(Output(_discard, self._tools)))
        return json_response(reply)

    async def _stream(self, emit: Emit) -> None:
        """Stream the response. After the first event, an error is sent as an event.

        So is the error about a prompt that is too long: Codex shortens a conversation only if it gets this
        error as an event.
        """
        output = Output(emit, self._tools)
        try:
            await self._run(output)
        except ClientDisconnect:
            raise
        except Exception as error:
            refused = as_request_error(error)
            if not output.begun:
                if refused.code != CONTEXT_LENGTH_EXCEEDED:
                    raise
                await output.begin(self._reply("in_progress"))
            failed = ResponseError(refused.code or "server_error", refused.message)
            await output.close("incomplete")
            await output.end(self._reply("failed", output=output.items, error=failed))

    async def _run(self, output: Output) -> ResponseReply:
        """Generate, sending events to `output`; return the whole reply."""
        parser = OutputParser(output)

        async def collect_item(task: GenerationTask, item: Item) -> None:
            if not output.begun:
                await output.begin(self._reply("in_progress"))
            if isinstance(item, Usage):
                parser.usage = item
            elif isinstance(item, ChoiceDelta):
                charge_delta(charge, item)
                await parser.delta(item)

        try:
            conversation = self._conversation.within_context(
                self._context.llm, "max_output_tokens", self._ignored
            )
            task = GenerationTask(
                0,
                self._id,
                conversation.prompt,
                conversation.params,
                self._options,
                reader=conversation.reader,
            )
            # The last event has all log-probabilities.
            with charged_reply(self._context, [task], whole=True) as charge:
                await generate(self._context, [task], collect_item)
        except RequestError as error:
            raise renamed(error, NAMES) from error
        early = parser.finish == "length"
        status: Status = "incomplete" if early else "completed"
        await output.finish(status)
        reply = self._reply(
            status,
            output=output.items,
            incomplete_details=IncompleteDetails() if early else None,
            completed_at=int(time.time()),
            usage=_usage(parser.usage, parser.thought_tokens),
        )
        reply = await self._keep(reply)
        await output.end(reply)
        return reply

    async def _keep(self, reply: ResponseReply) -> ResponseReply:
        """Store a response if requested. Return it with `store` saying whether it was stored."""
        if not self._stored:
            return reply
        conversation = len(self._conversation.prompt.text or "")
        large = conversation + (self._previous.size if self._previous else 0) > LARGE_REQUEST
        stored = await self._context.side_thread.run_if(
            large, lambda: stored_response(self._owner, self._body, self._previous, reply)
        )
        kept = self._store.put(self._id, stored)
        return reply if kept else replace(reply, store=False)

    def _reply(self, status: Status, **fields: Any) -> ResponseReply:
        body = self._body
        return ResponseReply(
            id=self._id,
            created_at=self._created,
            status=status,
            model=self._model,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            temperature=self._conversation.params.temperature,
            top_p=self._conversation.params.top_p,
            top_logprobs=body.top_logprobs,
            text=body.text or {"format": {"type": "text"}},
            tools=body.tools,
            tool_choice=body.tool_choice or "auto",
            parallel_tool_calls=body.parallel_tool_calls,
            metadata=body.metadata or {},
            user=body.user,
            safety_identifier=body.safety_identifier,
            prompt_cache_key=body.prompt_cache_key,
            reasoning=body.reasoning or {},
            store=self._stored,
            previous_response_id=body.previous_response_id,
            **fields,
        )


def _usage(usage: Usage, reasoning: int) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        **slo_fields([usage.slo] if usage.slo else []),
    )


async def _discard(event: ResponseEvent) -> None:
    """Discard an event of a reply that is not streamed."""
