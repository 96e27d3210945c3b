"""What operators ask: whether the server is well, which version it is, and its metrics."""

import msgspec
from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from streamserve import __version__
from streamserve.api.generation import Door


def health_routes(door: Door) -> APIRouter:
    """The routes."""
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        now = door.llm.health()
        body = msgspec.json.encode({"status": "ready" if now.ready else "not ready", "detail": now.detail})
        return Response(body, 200 if now.ready else 503, media_type="application/json")

    @router.get("/ping")
    async def ping() -> Response:
        return Response()

    @router.get("/version")
    async def version() -> Response:
        return Response(msgspec.json.encode({"version": __version__}), media_type="application/json")

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(door.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    return router
