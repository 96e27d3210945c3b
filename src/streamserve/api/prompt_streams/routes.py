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
from streamserve.api.prompt_streams.idempotency import Replays, caller
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

Key = Annotated[str | None, Header(alias="Idempotency-Key", description="makes a retry harmless")]


def arriving_routes(door: AppContext) -> APIRouter:
    """Build the routes."""
    router, streams, replays = APIRouter(), Streams(door), Replays()
    router.include_router(socket_routes(door, streams, replays))

    @router.post(
        "/v1/streams",
        openapi_extra=described(
            "A prompt that will arrive in chunks",
            StreamRequest,
            StreamReply,
            unsupported=UNSUPPORTED_IN_STREAMS,
            example={"query": "What is it about?", "template": "{context}\n\n{query}", "max_tokens": 16},
        ),
    )
    async def create(request: Request, key: Key = None) -> Response:
        wanted = await read_request(request, door, StreamRequest, UNSUPPORTED_IN_STREAMS)
        what, size = f"create {caller(request.headers)}", charge_of(request).held
        return _json(await replays.once(what, key, wanted, lambda: streams.create(wanted, size)))

    @router.patch(
        "/v1/streams/{name}",
        openapi_extra=described(
            "Edit its chunks",
            EditRequest,
            EditReply,
            example={"version": 0, "operations": [{"op": "append", "text": "A document."}]},
        ),
    )
    async def edit(request: Request, name: str, key: Key = None) -> Response:
        wanted = await read_request(request, door, EditRequest, {})
        work = partial(_edit, streams, name, wanted)
        return _json(await replays.once(f"edit {name}", key, wanted, work))

    @router.post(
        "/v1/streams/{name}/finish",
        openapi_extra=described(
            "Finish the prompt and answer it, in the shape of completions or chats",
            FinishRequest,
            ChatReply,
            event=ChatReply,
            example={"stream": True},
        ),
    )
    async def finish(request: Request, name: str, key: Key = None) -> Response:
        wanted = await read_request(request, door, FinishRequest, {})
        if streams.wants_events(name, wanted):
            return EventStream(await streams.finish_streaming(name, wanted))
        work = replays.once(f"finish {name}", key, wanted, lambda: streams.finish(name, wanted))
        body = await while_connected(request.receive, work)
        return Response(body, media_type="application/json")

    @router.post(
        "/v1/streams/{name}/answer",
        openapi_extra=described(
            "Answer the prompt as it stands (answer_early), in the shape of completions or chats; an event "
            "whose object is prompt_stream.withdrawn voids those before it",
            AnswerRequest,
            event=ChatReply,
            media="text/event-stream",
            example={},
        ),
    )
    async def answer(request: Request, name: str) -> Response:
        wanted = await read_request(request, door, AnswerRequest, {})
        return EventStream(await streams.answer_early(name, wanted))

    @router.get(
        "/v1/streams/{name}",
        openapi_extra=described("Where a stream stands", reply=StreamState, errors=(404, 503)),
    )
    async def state(name: str) -> Response:
        return _json(streams.get(name).state())

    @router.delete(
        "/v1/streams/{name}",
        openapi_extra=described("Drop a stream", reply=DeletedReply, errors=(404, 503)),
    )
    async def delete(name: str) -> Response:
        await streams.delete(name)
        return _json(DeletedReply(id=name))

    return router


async def _edit(streams: Streams, name: str, wanted: EditRequest) -> EditReply:
    return await streams.get(name).edit(wanted)


def _json(reply: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(reply), media_type="application/json")
