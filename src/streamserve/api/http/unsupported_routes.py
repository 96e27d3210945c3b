"""Routes of OpenAI and vLLM that this server does not have; the error says what to use instead."""

from fastapi import APIRouter, Request, Response

from streamserve.protocol.errors import RequestError

_GENERATES = "this server generates text only"
_STATELESS = "this server stores nothing between requests: send the whole conversation each time"
_UNSUPPORTED = {
    "/v1/audio": _GENERATES,
    "/v1/classify": _GENERATES,
    "/v1/embeddings": f"{_GENERATES}: use a server with an embedding model",
    "/v1/images": _GENERATES,
    "/v1/moderations": _GENERATES,
    "/v1/pooling": _GENERATES,
    "/v1/realtime": _GENERATES,
    "/v1/rerank": _GENERATES,
    "/v1/score": f'{_GENERATES}: /v1/completions with "echo" and "max_tokens": 0 scores a text',
    "/v1/videos": _GENERATES,
    "/v1/assistants": _STATELESS,
    "/v1/batches": "send the requests themselves: they are batched as they arrive",
    "/v1/containers": _STATELESS,
    "/v1/conversations": _STATELESS,
    "/v1/evals": _STATELESS,
    "/v1/files": _STATELESS,
    "/v1/fine_tuning": "this server does not train",
    "/v1/responses": _STATELESS,
    "/v1/threads": _STATELESS,
    "/v1/uploads": _STATELESS,
    "/v1/vector_stores": _STATELESS,
    "/embeddings": f"{_GENERATES}: use a server with an embedding model",
    "/invocations": "use /v1/completions or /v1/chat/completions",
}
_METHODS = ["GET", "POST", "DELETE", "PUT", "PATCH"]


def unsupported_routes() -> APIRouter:
    """Build the routes.

    They are added after the supported routes: a path below a supported one may be listed here.
    """
    router = APIRouter(include_in_schema=False)
    for path, reason in _UNSUPPORTED.items():
        _refuse(router, path, reason)
    return router


def _refuse(router: APIRouter, path: str, reason: str) -> None:
    async def refuse(request: Request) -> Response:
        raise RequestError(f"{request.url.path} is not supported: {reason}", status=404)

    if path != "/v1/responses":
        router.add_api_route(path, refuse, methods=_METHODS)
    router.add_api_route(path + "/{rest:path}", refuse, methods=_METHODS)
