"""Ollama's routes that change which models there are: refused, with what to do instead."""

from starlette.requests import Request
from starlette.responses import Response

from streamserve.api.context import AppContext
from streamserve.api.routes import Route
from streamserve.protocol.errors import RequestError

_START = "and start the server with it (streamserve serve NAME)"
_UNSUPPORTED = {
    ("POST", "/api/pull"): f"download the model with `streamserve models pull NAME`, {_START}",
    ("POST", "/api/push"): "this server publishes no models: upload the model's folder to a hub",
    ("POST", "/api/create"): f"write a checkpoint, for example with `streamserve models quantize`, {_START}",
    ("POST", "/api/copy"): "give the model further names with --served-model-name",
    ("DELETE", "/api/delete"): "remove the model's files with `streamserve models rm NAME`",
    ("POST", "/api/blobs/{digest}"): f"copy the model's files to the server's machine, {_START}",
}


async def refuse(context: AppContext, request: Request) -> Response:
    """Raise RequestError (404) with what to do instead."""
    path = request.url.path
    reason = next(
        text for (_, route), text in _UNSUPPORTED.items() if path.startswith(route.partition("{")[0])
    )
    raise RequestError(f"{path} is not supported: {reason}", status=404)


OLLAMA_UNSUPPORTED_ROUTES: tuple[Route[AppContext], ...] = tuple(
    Route(method, path, refuse) for method, path in _UNSUPPORTED
)
