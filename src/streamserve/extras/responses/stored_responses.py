"""Stored responses: GET and DELETE /v1/responses/{id}, the list of a response's input items, and the form in
which a response is stored."""

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from streamserve.api.http.auth import caller_of
from streamserve.api.http.json_scan import JsonScan
from streamserve.api.http.memory import Charge
from streamserve.api.http.pages import PARAMETERS, ListReply, list_reply, page_of
from streamserve.api.routes import JSON, Operation, Route, json_response
from streamserve.extras.responses.context import ResponseContext
from streamserve.extras.responses.response_input import input_items
from streamserve.extras.responses.response_schemas import (
    DeletedResponse,
    ResponseReply,
    ResponseRequest,
)
from streamserve.extras.responses.response_store import StoredResponse
from streamserve.protocol.errors import RequestError

_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
_OTHER_PREFIX = "item"
"""Prefix of the ids of items that are left out of the prompt."""

_MAX_ITEMS = 100
_STREAM: dict[str, Any] = {
    "name": "stream",
    "in": "query",
    "description": "must be false: a stored response is complete",
    "schema": {"type": "boolean"},
}


async def retrieve(context: ResponseContext, request: Request) -> Response:
    """Return a stored response. Raises RequestError (404) if there is none."""
    if request.query_params.get("stream") == "true":
        raise RequestError("stream: a stored response is complete: leave stream out", field="stream")
    return Response(_stored(context, request).reply, media_type=JSON)


async def delete(context: ResponseContext, request: Request) -> Response:
    """Delete a stored response. Raises RequestError (404) if there is none."""
    response_id = request.path_params["id"]
    context.stored.delete(response_id, caller_of(request))
    return json_response(DeletedResponse(id=response_id))


async def list_items(context: ResponseContext, request: Request) -> Response:
    """Return a page of a stored response's input items. Raises RequestError as `retrieve` does."""
    stored = _stored(context, request)
    page = page_of(request, 20, _MAX_ITEMS)
    named = [
        (str(msgspec.json.decode(item, type=_NamedResponse).id), msgspec.Raw(item)) for item in stored.input
    ]
    return json_response(list_reply(*page.of(named)))


STORED_RESPONSE_ROUTES: tuple[Route[ResponseContext], ...] = (
    Route(
        "GET",
        "/v1/responses/{id}",
        retrieve,
        Operation("A stored response", reply=ResponseReply, errors=(400, 404), parameters=[_STREAM]),
    ),
    Route(
        "DELETE",
        "/v1/responses/{id}",
        delete,
        Operation("Delete a stored response", reply=DeletedResponse, errors=(404,)),
    ),
    Route(
        "GET",
        "/v1/responses/{id}/input_items",
        list_items,
        Operation(
            "The items that a stored response came from",
            reply=ListReply,
            errors=(400, 404),
            parameters=PARAMETERS,
        ),
    ),
)


class _NamedResponse(msgspec.Struct):
    id: str


def _stored(context: ResponseContext, request: Request) -> StoredResponse:
    return context.stored.get(request.path_params["id"], caller_of(request))


def history(previous: StoredResponse, charge: Charge) -> list[dict[str, Any]]:
    """Return the items of a stored conversation. Their memory is charged as if the request contained them."""
    scan = JsonScan()
    for item in previous.items:
        scan.feed(item)
    charge.add(scan.decoded_bytes)
    return [msgspec.json.decode(item) for item in previous.items]


def stored_response(
    owner: str, body: ResponseRequest, previous: StoredResponse | None, reply: ResponseReply
) -> StoredResponse:
    """Return the stored form of a response to `body`, which continues `previous`."""
    encode = msgspec.json.encode
    items = [encode(_with_id(item)) for item in input_items(body)]
    before: Sequence[bytes] = previous.items if previous else ()
    output = tuple(encode(item) for item in reply.output)
    return StoredResponse(owner, encode(reply), (*before, *items), output)


def _with_id(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item in the form of lists of items: with its type and id, and for a message with its parts
    and status."""
    kind = item.get("type") or "message"
    named = {
        **item,
        "id": item.get("id") or f"{_PREFIXES.get(kind, _OTHER_PREFIX)}_{secrets.token_hex(16)}",
        "type": kind,
    }
    if kind != "message":
        return named
    content = item["content"]
    if isinstance(content, str):
        part = "output_text" if item["role"] == "assistant" else "input_text"
        content = [{"type": part, "text": content, **({"annotations": []} if part == "output_text" else {})}]
    return {"status": "completed", **named, "content": content}
