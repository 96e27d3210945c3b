"""Admin routes: drain a server, or one of its workers, and resume it, without stopping it."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from streamserve.api.generation import AppContext
from streamserve.api.on_demand import MODEL_PARAMETER, named_context
from streamserve.api.routes import Operation, Route, json_response


class DrainReply(msgspec.Struct, frozen=True):
    """Whether the server is draining, and how many requests are open."""

    draining: bool
    open_requests: int


class WorkerDrainReply(msgspec.Struct, frozen=True):
    """Whether a worker is draining, and how many requests are open on it or on its prefill/decode peer."""

    worker: str
    draining: bool
    open_requests: int


async def begin(context: AppContext, request: Request) -> Response:
    """Drain the server: refuse new requests."""
    context.drain.begin()
    return _state(context)


async def end(context: AppContext, request: Request) -> Response:
    """Accept requests again."""
    context.drain.end()
    return _state(context)


async def begin_worker(context: AppContext, request: Request) -> Response:
    """Drain a worker. Raises RequestError (404) if there is no such worker."""
    return await _drain_worker(context, request, draining=True)


async def end_worker(context: AppContext, request: Request) -> Response:
    """Resume a worker. Raises RequestError (404) if there is no such worker."""
    return await _drain_worker(context, request, draining=False)


def _state(context: AppContext) -> Response:
    return json_response(DrainReply(context.drain.draining, context.drain.open))


async def _drain_worker(context: AppContext, request: Request, draining: bool) -> Response:
    worker = request.path_params["worker"]
    open_requests = await named_context(context, request, loaded=True).llm.drain(worker, draining)
    return json_response(WorkerDrainReply(worker, draining, open_requests))


ADMIN_ROUTES: tuple[Route[AppContext], ...] = (
    Route(
        "POST",
        "/admin/drain",
        begin,
        Operation(
            "Refuse new requests; open requests run to completion",
            reply=DrainReply,
            description="Refuse new requests; open ones run to completion. /health turns 503, so that load "
            "balancers stop\nsending.",
        ),
    ),
    Route(
        "POST",
        "/admin/resume",
        end,
        Operation("Accept requests again", reply=DrainReply, description="Accept requests again."),
    ),
    Route(
        "POST",
        "/admin/workers/{worker}/drain",
        begin_worker,
        Operation(
            "Send no new requests to a worker",
            reply=WorkerDrainReply,
            errors=(404, 409),
            parameters=[MODEL_PARAMETER],
            description="Send no new requests to a worker, or to its prefill/decode pair; open ones run to "
            "completion. May\nbe repeated, to see how many are left.",
        ),
    ),
    Route(
        "POST",
        "/admin/workers/{worker}/resume",
        end_worker,
        Operation(
            "Send requests to a worker again",
            reply=WorkerDrainReply,
            errors=(404, 409),
            parameters=[MODEL_PARAMETER],
            description="Send requests to a worker again.",
        ),
    ),
)
"""`auth.Authentication` checks the admin keys."""
