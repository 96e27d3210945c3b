"""Admin routes, none of which stops the server: drain and resume it or one of its workers; add and remove
workers; unload a model."""

from math import inf
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from streamserve.api.context import AppContext
from streamserve.api.http.body import read_request
from streamserve.api.leases import MODEL_PARAMETER, named_context
from streamserve.api.routes import Operation, Route, json_response
from streamserve.fleet.scaling import AddedRole
from streamserve.protocol.errors import RequestError
from streamserve.protocol.setting_types import about


class DrainReply(msgspec.Struct, frozen=True):
    """Whether the server is draining, and the number of open requests."""

    draining: bool
    open_requests: int


class WorkerDrainReply(msgspec.Struct, frozen=True):
    """Whether a worker is draining, and the number of open requests at it or its partner in a stream pair."""

    worker: str
    draining: bool
    open_requests: int


class AddWorkersRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Add workers."""

    role: Annotated[AddedRole, about("role of the workers; pair: a prefill worker and a decode worker")]
    count: Annotated[int, about("number of workers, or of pairs", ge=1, le=64)] = 1


class AddWorkersReply(msgspec.Struct, frozen=True):
    """The names of the workers that are starting."""

    workers: list[str]


class RemoveWorkersReply(msgspec.Struct, frozen=True):
    """The workers that are leaving, and the number of their open requests. They are gone when /v1/router no
    longer lists them."""

    workers: list[str]
    open_requests: int


class UnloadReply(msgspec.Struct, frozen=True):
    """The name of a model in /health, and its state: unloading, or not loaded if it was not."""

    model: str
    state: str


async def add_workers(context: AppContext, request: Request) -> Response:
    """Start workers. Raises RequestError if they cannot be added."""
    body = await read_request(request, context, AddWorkersRequest)
    llm = named_context(context, request, loaded=True).llm
    return json_response(AddWorkersReply(list(await llm.add_workers(body.role, body.count))))


async def remove_workers(context: AppContext, request: Request) -> Response:
    """Remove a worker or pair. Raises RequestError if it cannot be removed."""
    llm = named_context(context, request, loaded=True).llm
    removal = await llm.remove_workers(request.path_params["worker"], _seconds(request))
    return json_response(RemoveWorkersReply(list(removal.workers), removal.open_requests))


def _seconds(request: Request) -> float:
    """Return the query parameter `within`. Raises RequestError if it is not a number of seconds."""
    given = request.query_params.get("within")
    if given is None:
        return inf
    try:
        seconds = float(given)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < inf:
        raise RequestError("within must be a number of seconds, 0 or more", field="within")
    return seconds


async def unload(context: AppContext, request: Request) -> Response:
    """Unload a model. Raises RequestError: 404 for unknown names, 409 if the model is always loaded, being
    loaded, or in use."""
    models = context.models
    name = models.find(request.query_params.get("model"))
    models.pool.unload(name)
    return json_response(UnloadReply(name, models.states()[name]))


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


WITHIN_PARAMETER: dict[str, Any] = {
    "name": "within",
    "in": "query",
    "description": (
        "seconds after which the remaining requests continue on other workers, with the same text; by "
        "default they run to completion on this worker"
    ),
    "schema": {"type": "number", "minimum": 0},
}

ADMIN_ROUTES: tuple[Route[AppContext], ...] = (
    Route(
        "POST",
        "/admin/drain",
        begin,
        Operation(
            "Refuse new requests; open requests run to completion",
            reply=DrainReply,
            description="Refuse new requests; open requests run to completion. /health returns 503, so that "
            "load balancers stop sending requests.",
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
        "/admin/unload",
        unload,
        Operation(
            "Unload a model",
            reply=UnloadReply,
            errors=(403, 404, 409),
            parameters=[MODEL_PARAMETER],
            description="Unload a model that is loaded on demand, which frees its memory: the next request "
            "for it loads it again. It is refused while requests or prompt streams use the model. Needs an "
            "admin key.",
        ),
    ),
    Route(
        "POST",
        "/admin/workers",
        add_workers,
        Operation(
            "Add workers",
            AddWorkersRequest,
            AddWorkersReply,
            example={"role": "unified"},
            errors=(403, 404, 409),
            parameters=[MODEL_PARAMETER],
            description="Start further workers of a role that the server was started with, up to "
            "--max-workers. They get requests once they are ready: see /v1/router. Needs an admin "
            "key.",
        ),
    ),
    Route(
        "DELETE",
        "/admin/workers/{worker}",
        remove_workers,
        Operation(
            "Remove a worker",
            reply=RemoveWorkersReply,
            errors=(403, 404, 409),
            parameters=[MODEL_PARAMETER, WITHIN_PARAMETER],
            description="Remove a worker, or with the name pair-N the workers prefill-N and decode-N. A "
            "worker that is removed gets no new requests, and ends when its last request has "
            "ended. The call may be repeated, to see how many requests are left. It is refused if "
            "the remaining workers could not serve. Needs an admin key.",
        ),
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
            description="Send no new requests to a worker, or to its prefill/decode pair. Open requests run "
            "to completion. The call may be repeated, to see how many requests are left.",
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
