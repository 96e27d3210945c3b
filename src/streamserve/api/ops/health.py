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


def health_routes(door: AppContext) -> APIRouter:
    """Build the routes."""
    router = APIRouter()

    @router.get(
        "/health",
        openapi_extra=described(
            "Whether requests are served: 200, or 503 and why not",
            reply=HealthReply,
            others={503: HealthReply},
            open_to_all=True,
        ),
    )
    async def health() -> Response:
        """Whether requests are served: 200, or 503 with the reason, and with Retry-After if known."""
        now = door.llm.health()
        ready = now.ready and not door.drain.draining
        detail = "draining" if door.drain.draining else now.detail
        body = msgspec.json.encode(HealthReply("ready" if ready else "not ready", detail))
        seconds = None if ready else door.drain.seconds_left if door.drain.draining else now.retry_after
        headers = {} if seconds is None else {"Retry-After": str(math.ceil(seconds))}
        return Response(body, 200 if ready else 503, headers, "application/json")

    @router.get(
        "/ping", openapi_extra=described("An empty answer: the process is there", media="", open_to_all=True)
    )
    async def ping() -> Response:
        return Response()

    @router.get("/version", openapi_extra=described("Which version this is", reply=VersionReply))
    async def version() -> Response:
        return Response(msgspec.json.encode(VersionReply(__version__)), media_type="application/json")

    @router.get("/load", openapi_extra=described("How many requests are being served", reply=LoadReply))
    async def load() -> Response:
        return Response(msgspec.json.encode(LoadReply(door.drain.open)), media_type="application/json")

    @router.get("/metrics", openapi_extra=described("Metrics in Prometheus' format", media="text/plain"))
    async def metrics() -> Response:
        return Response(door.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    return router
