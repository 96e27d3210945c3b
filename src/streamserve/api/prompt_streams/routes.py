"""/v1/streams: prompt streams over HTTP."""

from functools import partial
from typing import Annotated

import msgspec
from fastapi import APIRouter, Header, Request, Response

from streamserve.api.generation import AppContext
from streamserve.api.http.body import read_request
from streamserve.api.http.disconnect import while_connected
from streamserve.api.http.limits import charge_of
from streamserve.api.http.sse import EventStream
from streamserve.api.openai.replies import ChatReply
from streamserve.api.ops.openapi import described
from streamserve.api.prompt_streams.idempotency import IdempotencyCache, caller
from streamserve.api.prompt_streams.schemas import (
    UNSUPPORTED_IN_STREAMS,
    AnswerRequest,
    DeletedReply,
    EditReply,
    EditRequest,
    FinishRequest,
    StreamReply,
    StreamRequest,
    StreamState,
)
from streamserve.api.prompt_streams.socket import socket_routes
from streamserve.api.prompt_streams.streams import Streams

Key = Annotated[
    str | None,
    Header(alias="Idempotency-Key", description="repeats the reply of the first request with this key"),
]


def stream_routes(context: AppContext) -> APIRouter:
    """Build the routes."""
    router, streams, idempotency_cache = APIRouter(), Streams(context), IdempotencyCache()
    router.include_router(socket_routes(context, streams, idempotency_cache))

    @router.post(
        "/v1/streams",
        openapi_extra=described(
            "Create a prompt stream, whose text arrives in chunks",
            StreamRequest,
            StreamReply,
            unsupported=UNSUPPORTED_IN_STREAMS,
            example={"query": "What is it about?", "template": "{context}\n\n{query}", "max_tokens": 16},
        ),
    )
    async def create(request: Request, key: Key = None) -> Response:
        body = await read_request(request, context, StreamRequest, UNSUPPORTED_IN_STREAMS)
        operation, size = f"create {caller(request.headers)}", charge_of(request).held
        return _json(
            await idempotency_cache.run_once(operation, key, body, lambda: streams.create(body, size))
        )

    @router.patch(
        "/v1/streams/{name}",
        openapi_extra=described(
            "Edit the chunks of a prompt stream",
            EditRequest,
            EditReply,
            example={"version": 0, "operations": [{"op": "append", "text": "A document."}]},
        ),
    )
    async def edit(request: Request, name: str, key: Key = None) -> Response:
        body = await read_request(request, context, EditRequest, {})
        work = partial(_edit, streams, name, body)
        return _json(await idempotency_cache.run_once(f"edit {name}", key, body, work))

    @router.post(
        "/v1/streams/{name}/finish",
        openapi_extra=described(
            "Finish the prompt and answer it, as a completion or a chat completion",
            FinishRequest,
            ChatReply,
            event=ChatReply,
            example={"stream": True},
        ),
    )
    async def finish(request: Request, name: str, key: Key = None) -> Response:
        body = await read_request(request, context, FinishRequest, {})
        if streams.wants_events(name, body):
            return EventStream(await streams.finish_streaming(name, body))
        work = idempotency_cache.run_once(f"finish {name}", key, body, lambda: streams.finish(name, body))
        answer = await while_connected(request.receive, work)
        return Response(answer, media_type="application/json")

    @router.post(
        "/v1/streams/{name}/answer",
        openapi_extra=described(
            "Answer the current prompt (answer_early), as a completion or a chat completion; an event "
            "whose object is prompt_stream.withdrawn voids those before it",
            AnswerRequest,
            event=ChatReply,
            media="text/event-stream",
            example={},
        ),
    )
    async def answer(request: Request, name: str) -> Response:
        body = await read_request(request, context, AnswerRequest, {})
        return EventStream(await streams.answer_early(name, body))

    @router.get(
        "/v1/streams/{name}",
        openapi_extra=described("State of a prompt stream", reply=StreamState, errors=(404, 503)),
    )
    async def state(name: str) -> Response:
        return _json(streams.get(name).state())

    @router.delete(
        "/v1/streams/{name}",
        openapi_extra=described("Delete a prompt stream", reply=DeletedReply, errors=(404, 503)),
    )
    async def delete(name: str) -> Response:
        await streams.delete(name)
        return _json(DeletedReply(id=name))

    return router


async def _edit(streams: Streams, name: str, body: EditRequest) -> EditReply:
    return await streams.get(name).edit(body)


def _json(reply: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(reply), media_type="application/json")
