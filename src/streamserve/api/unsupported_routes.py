"""Routes of other servers' APIs that this server does not support. The error says which route to use
instead."""

from starlette.requests import Request
from starlette.responses import Response

from streamserve.api.http.near_paths import near_path
from streamserve.api.routes import BoundRoute, Route, bound
from streamserve.protocol.errors import RequestError

_GENERATES = "this server only generates and embeds text"
_STATELESS = "this server stores no such objects: send the whole conversation, or previous_response_id"
_UNSUPPORTED = {
    "/v1/audio": _GENERATES,
    "/v1/classify": _GENERATES,
    "/v1/images": _GENERATES,
    "/v1/moderations": _GENERATES,
    "/v1/pooling": _GENERATES,
    "/v1/realtime": _GENERATES,
    "/v1/videos": _GENERATES,
    "/v1/assistants": _STATELESS,
    "/v1/batches": "the routes of a batch are /v1/batches/{id} and /v1/batches/{id}/cancel",
    "/v1/containers": _STATELESS,
    "/v1/conversations": _STATELESS,
    "/v1/evals": _STATELESS,
    "/v1/files": "the routes of a file are /v1/files/{id} and /v1/files/{id}/content",
    "/v1/fine_tuning": "this server does not train models",
    "/v1/messages": "use /v1/messages or /v1/messages/count_tokens",
    "/v1/responses/compact": "this server does not compact conversations: ask the model for a summary",
    "/v1/responses": "a stored response has /v1/responses/{id} and /v1/responses/{id}/input_items",
    "/v1/threads": _STATELESS,
    "/v1/uploads": _STATELESS,
    "/v1/vector_stores": _STATELESS,
    "/embeddings": "use /v1/embeddings",
    "/invocations": "use /v1/completions or /v1/chat/completions",
}
_SUPPORTED = {"/v1/batches", "/v1/files", "/v1/messages", "/v1/responses"}
"""Supported paths with unsupported paths below them."""

_OTHER_METHODS = ("POST", "DELETE", "PUT", "PATCH")
"""The methods that are refused in addition to GET."""


async def refuse(reason: str, request: Request) -> Response:
    """Raise RequestError (404) with the reason why the route is not supported, or the path to use instead."""
    near = near_path(request)
    reason = f"use {near}" if near else reason
    raise RequestError(f"{request.url.path} is not supported: {reason}", status=404)


def unsupported_endpoints() -> list[BoundRoute]:
    """Return the endpoints of unsupported routes.

    They must come after the supported routes: a path below a supported one may be listed here.
    """
    return [
        endpoint for path, reason in _UNSUPPORTED.items() for endpoint in bound(_routes_below(path), reason)
    ]


def _routes_below(path: str) -> list[Route[str]]:
    """Return the routes of all paths below `path`, and of `path` itself unless it is supported."""
    paths = [path + "/{rest:path}"] if path in _SUPPORTED else [path, path + "/{rest:path}"]
    return [Route("GET", each, refuse, also=_OTHER_METHODS) for each in paths]
