"""/v1/streams: prompt streams over HTTP."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from streamserve.api.http.auth import caller_of
from streamserve.api.http.body import read_request
from streamserve.api.http.disconnect import while_connected
from streamserve.api.http.limits import charge_of
from streamserve.api.http.sse import EventStream
from streamserve.api.openai.other_fields import OTHER_IN_STREAMS
from streamserve.api.openai.replies import ChatReply
from streamserve.api.prompt_streams.context import StreamContext
from streamserve.api.prompt_streams.schemas import (
    AnswerRequest,
    DeletedReply,
    EditReply,
    EditRequest,
    FinishRequest,
    StreamReply,
    StreamRequest,
    StreamState,
)
from streamserve.api.prompt_streams.streams import PromptStreams
from streamserve.api.routes import JSON, Operation, Route, json_response

_KEY = "Idempotency-Key"
_KEY_PARAMETER: dict[str, Any] = {
    "name": _KEY,
    "in": "header",
    "required": False,
    "schema": {
        "anyOf": [{"type": "string"}, {"type": "null"}],
        "description": "repeats the reply of the first request with this key",
        "title": _KEY,
    },
    "description": "repeats the reply of the first request with this key",
}


async def create(context: StreamContext, request: Request) -> Response:
    """Create a stream. Raises RequestError if too many streams are open or a field is invalid."""
    body = await read_request(request, context.app, StreamRequest, OTHER_IN_STREAMS)
    caller, size = caller_of(request), charge_of(request).held
    return json_response(
        await context.idempotency_cache.run_once(
            caller,
            "create",
            request.headers.get(_KEY),
            body,
            lambda: context.streams.create(body, caller, size),
        )
    )


async def edit(context: StreamContext, request: Request) -> Response:
    """Edit a stream. Raises RequestError: 404 if there is no such stream, 409 if it has another version."""
    name, caller = request.path_params["name"], caller_of(request)
    body = await read_request(request, context.app, EditRequest)
    return json_response(
        await context.idempotency_cache.run_once(
            caller,
            f"edit {name}",
            request.headers.get(_KEY),
            body,
            lambda: _edit(context.streams, name, caller, body),
        )
    )


async def _edit(streams: PromptStreams, name: str, caller: str, body: EditRequest) -> EditReply:
    return await streams.get(name, caller).edit(body)


async def finish(context: StreamContext, request: Request) -> Response:
    """Finish a stream and answer it. Raises RequestError: 404 if there is no such stream, 409 if it has
    another version."""
    name, caller, streams = request.path_params["name"], caller_of(request), context.streams
    body = await read_request(request, context.app, FinishRequest)
    if streams.wants_events(name, caller, body):
        return EventStream(await streams.finish_streaming(name, caller, body))
    work = context.idempotency_cache.run_once(
        caller,
        f"finish {name}",
        request.headers.get(_KEY),
        body,
        lambda: streams.finish(name, caller, body),
    )
    return Response(await while_connected(request.receive, work), media_type=JSON)


async def answer(context: StreamContext, request: Request) -> Response:
    """Stream the early answer. Raises RequestError (409) if the stream has none, or if a client reads it
    already."""
    body = await read_request(request, context.app, AnswerRequest)
    name, caller = request.path_params["name"], caller_of(request)
    return EventStream(await context.streams.answer_early(name, caller, body))


async def state(context: StreamContext, request: Request) -> Response:
    """Return the state of a stream. Raises RequestError (404) if there is none."""
    return json_response(context.streams.get(request.path_params["name"], caller_of(request)).state())


async def delete(context: StreamContext, request: Request) -> Response:
    """Delete a stream. Raises RequestError (404) if there is none."""
    name = request.path_params["name"]
    await context.streams.delete(name, caller_of(request))
    return json_response(DeletedReply(id=name))


STREAM_ROUTES: tuple[Route[StreamContext], ...] = (
    Route(
        "POST",
        "/v1/streams",
        create,
        Operation(
            "Create a prompt stream, whose text arrives in chunks",
            StreamRequest,
            StreamReply,
            others=OTHER_IN_STREAMS,
            parameters=[_KEY_PARAMETER],
            example={"query": "What is it about?", "template": "{context}\n\n{query}", "max_tokens": 16},
        ),
    ),
    Route(
        "PATCH",
        "/v1/streams/{name}",
        edit,
        Operation(
            "Edit the chunks of a prompt stream",
            EditRequest,
            EditReply,
            parameters=[_KEY_PARAMETER],
            example={"version": 0, "operations": [{"op": "append", "text": "A document."}]},
        ),
    ),
    Route(
        "GET",
        "/v1/streams/{name}",
        state,
        Operation("State of a prompt stream", reply=StreamState, errors=(404, 503)),
    ),
    Route(
        "DELETE",
        "/v1/streams/{name}",
        delete,
        Operation("Delete a prompt stream", reply=DeletedReply, errors=(404, 503)),
    ),
    Route(
        "POST",
        "/v1/streams/{name}/finish",
        finish,
        Operation(
            "Finish the prompt and answer it, as a completion or a chat completion",
            FinishRequest,
            ChatReply,
            event=ChatReply,
            parameters=[_KEY_PARAMETER],
            example={"stream": True},
        ),
    ),
    Route(
        "POST",
        "/v1/streams/{name}/answer",
        answer,
        Operation(
            "Answer the current prompt (answer_early), as a completion or a chat completion; an event "
            "whose object is prompt_stream.withdrawn voids all events before it",
            AnswerRequest,
            event=ChatReply,
            media="text/event-stream",
            example={},
        ),
    ),
)
