"""GET /health, /ping, /version, /load and /metrics."""

import math
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from streamserve import __version__
from streamserve.api.context import AppContext
from streamserve.api.routes import JSON, Operation, Route, json_response


class HealthReply(msgspec.Struct, frozen=True):
    """Whether requests are served. `detail` is the reason if they are not, or if only some of the workers
    serve ("degraded"). `models`: the states of models that are loaded on demand."""

    status: Literal["ready", "degraded", "not ready"]
    detail: str
    models: dict[str, str] | UnsetType = UNSET


class VersionReply(msgspec.Struct, frozen=True):
    """The version of streamserve."""

    version: str


class LoadReply(msgspec.Struct, frozen=True):
    """`server_load` is the number of open requests, running and waiting."""

    server_load: int


async def health(context: AppContext, request: Request) -> Response:
    """Return whether requests are served. Status 200 if they are; workers that are missing are named.
    Otherwise status 503 with the reason, and with Retry-After if it is known."""
    now = context.models.health()
    ready = now.ready and not context.drain.draining
    detail = "draining" if context.drain.draining else now.missing or now.detail
    states = context.models.states() or UNSET
    serving: Literal["ready", "degraded"] = "degraded" if now.missing else "ready"
    body = msgspec.json.encode(HealthReply(serving if ready else "not ready", detail, states))
    seconds = None if ready else context.drain.seconds_left if context.drain.draining else now.retry_after
    headers = {} if seconds is None else {"Retry-After": str(math.ceil(seconds))}
    return Response(body, 200 if ready else 503, headers, JSON)


async def ping(context: AppContext, request: Request) -> Response:
    """Return an empty response."""
    return Response()


async def version(context: AppContext, request: Request) -> Response:
    """Return the server's version."""
    return json_response(VersionReply(__version__))


async def load(context: AppContext, request: Request) -> Response:
    """Return the number of open requests."""
    return json_response(LoadReply(context.drain.open))


async def metrics(context: AppContext, request: Request) -> Response:
    """Return all metrics in Prometheus' text format."""
    return Response(context.models.exposition(), media_type=CONTENT_TYPE_LATEST)


HEALTH_ROUTES: tuple[Route[AppContext], ...] = (
    Route(
        "GET",
        "/health",
        health,
        Operation(
            "Whether requests are served: 200, or 503 with the reason",
            reply=HealthReply,
            description="Whether requests are served: 200, with the status `degraded` and the reason if some "
            "workers do not serve; or 503 with the reason, and with Retry-After if the time is "
            "known.",
            other_replies={503: HealthReply},
        ),
    ),
    Route(
        "GET",
        "/ping",
        ping,
        Operation("An empty reply: the process is alive", media=""),
    ),
    Route("GET", "/version", version, Operation("Version of the server", reply=VersionReply)),
    Route("GET", "/load", load, Operation("Number of open requests", reply=LoadReply)),
    Route("GET", "/metrics", metrics, Operation("Metrics in Prometheus' format", media="text/plain")),
)
