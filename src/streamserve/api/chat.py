"""POST /v1/chat/completions: the next message of a conversation."""

from functools import partial

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from streamserve.api.body import described, read_request
from streamserve.api.disconnect import while_connected
from streamserve.api.generation import Door, Job, JobOutput, Piece, collect, head_of, new_id
from streamserve.api.logprobs import chat_logprobs, prompt_logprobs
from streamserve.api.messages import checked_messages
from streamserve.api.models import served_name
from streamserve.api.prompts import Prompt, encode
from streamserve.api.replies import ChatChoice, ChatDelta, ChatMessage, ChatReply, UsageReply, usage_reply
from streamserve.api.sampling import chat_sampling
from streamserve.api.schemas import UNSUPPORTED_IN_CHATS, ChatRequest
from streamserve.api.sse import Emit, EventStream
from streamserve.api.stream import StreamWriter
from streamserve.protocol.messages import PromptLogprob
from streamserve.text.chat import require


def chat_routes(door: Door) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=described(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        limit = door.settings.max_body_bytes
        wanted = await read_request(request, limit, ChatRequest, UNSUPPORTED_IN_CHATS)
        return await _Chat(door, wanted).respond(request)

    return router


class _Chat:
    """One request."""

    def __init__(self, door: Door, wanted: ChatRequest) -> None:
        self._door = door
        self._wanted = wanted
        self._head = head_of(new_id("chatcmpl"), door.llm, served_name(door.llm, wanted.model))
        defaults = door.settings.default_sampling
        self._params = chat_sampling(wanted, defaults, door.llm.model.vocab_size)

    async def respond(self, request: Request) -> Response:
        wanted = self._wanted
        prompt = await self._prompt()
        job = Job(0, self._head.id, prompt, self._params, wanted.priority, wanted.cache_salt)
        headers = {"X-Request-Id": self._head.id}
        if wanted.stream:
            return EventStream(partial(self._stream, job), headers)
        outputs = await while_connected(request.receive, collect(self._door, [job]))
        return Response(msgspec.json.encode(self._whole(outputs[0])), 200, headers, "application/json")

    async def _prompt(self) -> Prompt:
        wanted = self._wanted
        text = require(self._door.llm.chat_template).render(
            checked_messages(wanted.messages),
            add_generation_prompt=wanted.add_generation_prompt,
            continue_final_message=wanted.continue_final_message,
            variables=wanted.chat_template_kwargs,
        )
        return (await encode(self._door.llm, [text], wanted.add_special_tokens, "messages"))[0]

    async def _stream(self, job: Job, emit: Emit) -> None:
        writer = StreamWriter(self._wanted, self._event, self._piece, emit)
        await writer.run(self._door, [job])

    def _whole(self, output: JobOutput) -> ChatReply:
        choices = [
            msgspec.structs.replace(
                self._choice(output.job, number, piece, True), message=ChatMessage(content=piece.text)
            )
            for number, piece in enumerate(output.choices)
        ]
        reply = self._reply("chat.completion", choices, usage_reply([output.usage]))
        count = self._wanted.prompt_logprobs
        if count is None:
            return reply
        table = prompt_logprobs(self._door.llm.tokenizer, output.prompt_logprobs, count)
        return msgspec.structs.replace(reply, prompt_logprobs=table)

    def _piece(
        self, job: Job, number: int, piece: Piece, first: bool, entries: list[PromptLogprob]
    ) -> ChatChoice:
        delta = ChatDelta(role="assistant" if first else UNSET, content=piece.text)
        return msgspec.structs.replace(self._choice(job, number, piece, first), delta=delta)

    def _choice(self, job: Job, number: int, piece: Piece, first: bool) -> ChatChoice:
        """What a whole choice and a piece of one have in common."""
        ids = self._wanted.return_token_ids
        return ChatChoice(
            index=number,
            logprobs=chat_logprobs(piece.logprobs) if self._wanted.logprobs else None,
            finish_reason=piece.finish,
            stop_reason=piece.stop,
            token_ids=piece.tokens if ids else UNSET,
            prompt_token_ids=job.prompt.ids if ids and first else UNSET,
        )

    def _event(self, choices: list[ChatChoice], usage: UsageReply | UnsetType | None) -> ChatReply:
        return self._reply("chat.completion.chunk", choices, usage)

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
