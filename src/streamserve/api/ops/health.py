"""GET /health, /ping, /version, /load and /metrics."""

import math
from typing import Literal

import msgspec
from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from streamserve import __version__
from streamserve.api.generation import AppContext
from streamserve.api.ops.openapi import described


class HealthReply(msgspec.Struct, frozen=True):
    """Whether requests are served; if not, `detail` is the reason."""

    status: Literal["ready", "not ready"]
    detail: str


class VersionReply(msgspec.Struct, frozen=True):
    """The version of streamserve."""

    version: str


class LoadReply(msgspec.Struct, frozen=True):
    """`server_load` is the number of open requests, running and waiting."""

    server_load: int


def health_routes(context: AppContext) -> APIRouter:
    """Build the routes."""
    router = APIRouter()

    @router.get(
        "/health",
        openapi_extra=described(
            "Whether requests are served: 200, or 503 with the reason",
            reply=HealthReply,
            other_replies={503: HealthReply},
            open_to_all=True,
        ),
    )
    async def health() -> Response:
        """Whether requests are served: 200, or 503 with the reason, and with Retry-After if known."""
        now = context.llm.health()
        ready = now.ready and not context.drain.draining
        detail = "draining" if context.drain.draining else now.detail
        body = msgspec.json.encode(HealthReply("ready" if ready else "not ready", detail))
        seconds = None if ready else context.drain.seconds_left if context.drain.draining else now.retry_after
        headers = {} if seconds is None else {"Retry-After": str(math.ceil(seconds))}
        return Response(body, 200 if ready else 503, headers, "application/json")

    @router.get(
        "/ping", openapi_extra=described("An empty reply: the process is alive", media="", open_to_all=True)
    )
    async def ping() -> Response:
        return Response()

    @router.get("/version", openapi_extra=described("Version of the server", reply=VersionReply))
    async def version() -> Response:
        return Response(msgspec.json.encode(VersionReply(__version__)), media_type="application/json")

    @router.get("/load", openapi_extra=described("Number of open requests", reply=LoadReply))
    async def load() -> Response:
        return Response(msgspec.json.encode(LoadReply(context.drain.open)), media_type="application/json")

    @router.get("/metrics", openapi_extra=described("Metrics in Prometheus' format", media="text/plain"))
    async def metrics() -> Response:
        return Response(context.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    return router
