"""POST /v1/chat/completions: the next message of a conversation."""

from collections import defaultdict
from collections.abc import Iterable
from functools import partial

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from streamserve.api.context import AppContext
from streamserve.api.generation import GenerationTask, new_id
from streamserve.api.http.body import read_request
from streamserve.api.http.disconnect import while_connected
from streamserve.api.http.ignored_fields import ignored_of
from streamserve.api.http.limits import charge_of
from streamserve.api.http.sse import Emit, EventStream
from streamserve.api.leases import routed
from streamserve.api.model_table import served_name
from streamserve.api.openai.chat_parts import CustomCalls, delta_fields, message_fields
from streamserve.api.openai.conversation import Conversation, prepared
from streamserve.api.openai.idle_fields import without_idle_fields
from streamserve.api.openai.logprobs import chat_logprobs, prompt_logprobs
from streamserve.api.openai.options import options_of
from streamserve.api.openai.other_fields import OTHER_IN_CHATS
from streamserve.api.openai.outputs import GenerationOutput, Piece, collect, head_of
from streamserve.api.openai.repeats import KEY_PARAMETER, with_key_seed
from streamserve.api.openai.replies import (
    ChatChoice,
    ChatDelta,
    ChatMessage,
    ChatReply,
    UsageReply,
    usage_reply,
)
from streamserve.api.openai.reply_size import TOKEN_CHARACTERS
from streamserve.api.openai.schemas import ChatRequest
from streamserve.api.openai.slo import header_parameters, with_header_targets
from streamserve.api.openai.stream_events import StreamWriter
from streamserve.api.openai.thinking import with_thinking
from streamserve.api.routes import JSON, Operation, Route
from streamserve.protocol.messages import PromptLogprob
from streamserve.protocol.request_options import NO_OPTIONS


async def chat_completions(context: AppContext, request: Request) -> Response:
    """Answer a conversation. Raises RequestError if the request cannot be served."""
    body = await read_request(request, context, ChatRequest, OTHER_IN_CHATS)
    body = without_idle_fields(body, ignored_of(request))
    body = with_header_targets(body, request.headers)
    body = with_key_seed(body, request.headers)
    context = await routed(context, request, body.model)
    body = with_thinking(body, context.llm.chat_template, ignored_of(request))
    conversation = await prepared(context, body, charge_of(request), ignored_of(request))
    limit_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    conversation = conversation.within_context(context.llm, limit_name, ignored_of(request))
    return await Chat(context, body, conversation).respond(request)


CHAT_ROUTES: tuple[Route[AppContext], ...] = (
    Route(
        "POST",
        "/v1/chat/completions",
        chat_completions,
        Operation(
            "The next message of a conversation",
            ChatRequest,
            ChatReply,
            event=ChatReply,
            others=OTHER_IN_CHATS,
            parameters=[*header_parameters(), KEY_PARAMETER],
            example={"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 16},
        ),
    ),
)


class Chat:
    """One chat request."""

    def __init__(self, context: AppContext, body: ChatRequest, conversation: Conversation) -> None:
        self._context = context
        self._body = body
        self._head = head_of(new_id("chatcmpl"), context.llm, served_name(context.llm, body.model))
        self._conversation = conversation
        self._options = NO_OPTIONS
        custom = conversation.tools.custom if conversation.tools else frozenset()
        self._calls = defaultdict[int, CustomCalls](lambda: CustomCalls(custom))

    async def respond(self, request: Request) -> Response:
        """Return the response, whole or as a stream of events. Raises RequestError if generation fails."""
        body = self._body
        self._options = options_of(self._context, request, self._body, self._head.model)
        task = self.task()
        if body.stream:
            return EventStream(partial(self.stream, [task]))
        reply = await while_connected(request.receive, self.whole([task]))
        return Response(reply, media_type=JSON)

    def task(self) -> GenerationTask:
        """Build the task for the conversation's prompt."""
        conversation = self._conversation
        return GenerationTask(
            0,
            self._head.id,
            conversation.prompt,
            conversation.params,
            self._options,
            reader=conversation.reader,
        )

    async def whole(self, tasks: list[GenerationTask]) -> bytes:
        """Run the task to its end; return the reply as JSON."""
        ids = sum(len(task.prompt.ids) for task in tasks) if self._body.return_token_ids else 0
        repeated = TOKEN_CHARACTERS * ids
        return await collect(self._context, tasks, lambda outputs: self._whole(outputs[0]), repeated)

    async def stream(self, tasks: list[GenerationTask], emit: Emit) -> None:
        """Run the task, sending an event for each delta."""
        writer = StreamWriter(self._body, self._event, self._pieces, emit)
        await writer.run(self._context, tasks)

    def _whole(self, output: GenerationOutput) -> ChatReply:
        choices = [self._whole_choice(*numbered) for numbered in enumerate(output.choices)]
        reply = self._reply("chat.completion", choices, usage_reply([output.usage]))
        count, tokenizer = self._body.prompt_logprobs, self._context.llm.tokenizer
        return msgspec.structs.replace(
            reply,
            service_tier=None,
            prompt_logprobs=None
            if count is None
            else prompt_logprobs(tokenizer, output.prompt_logprobs, count),
            prompt_token_ids=output.task.prompt.ids if self._body.return_token_ids else None,
        )

    def _whole_choice(self, number: int, piece: Piece) -> ChatChoice:
        events = self._calls[number].read(piece.events, final=True)
        message = ChatMessage(**message_fields(events, self._with_reasoning))
        token_ids = piece.tokens if self._body.return_token_ids else None
        return msgspec.structs.replace(self._choice(number, piece), message=message, token_ids=token_ids)

    def _pieces(
        self, task: GenerationTask, number: int, piece: Piece, first: bool, entries: Iterable[PromptLogprob]
    ) -> list[ChatChoice]:
        """Build the choices of the stream for a delta; none if all new text is held back. The last has what
        is not in the message."""
        events = self._calls[number].read(piece.events, final=piece.finish is not None)
        deltas = [ChatDelta(**fields) for fields in delta_fields(events, self._with_reasoning)]
        if not deltas:
            if not (first or piece.logprobs or piece.finish or self._body.return_token_ids):
                return []
            deltas = [ChatDelta(content="")]
        if first:
            deltas[0] = msgspec.structs.replace(deltas[0], role="assistant")
        *before, last = deltas
        choices = [ChatChoice(index=number, delta=delta) for delta in before]
        return [*choices, msgspec.structs.replace(self._choice(number, piece), delta=last)]

    @property
    def _with_reasoning(self) -> bool:
        """Whether replies have the fields of reasoning."""
        return self._conversation.thinking is not None and self._body.include_reasoning

    def _choice(self, number: int, piece: Piece) -> ChatChoice:
        """Return the fields common to a complete choice and a delta."""
        return ChatChoice(
            index=number,
            logprobs=chat_logprobs(piece.logprobs, self._body.return_tokens_as_token_ids, packed=True)
            if self._body.logprobs
            else None,
            finish_reason="tool_calls" if piece.finish == "stop" and piece.called else piece.finish,
            stop_reason=piece.stop,
            token_ids=piece.tokens if self._body.return_token_ids else UNSET,
        )

    def _event(
        self, choices: list[ChatChoice], usage: UsageReply | UnsetType | None, begun: GenerationTask | None
    ) -> ChatReply:
        event = self._reply("chat.completion.chunk", choices, usage)
        if begun is None or not self._body.return_token_ids:
            return event
        return msgspec.structs.replace(event, prompt_token_ids=begun.prompt.ids)

    def _reply(self, kind: str, choices: list[ChatChoice], usage: UsageReply | UnsetType | None) -> ChatReply:
        head = self._head
        return ChatReply(
            id=head.id,
            object=kind,
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=choices,
            usage=usage,
        )
