"""Admin routes: drain a server, or one of its workers, and resume it, without stopping it."""

import msgspec
from fastapi import APIRouter, Response

from streamserve.api.generator import Generator
from streamserve.api.http.drain import Drain
from streamserve.api.ops.openapi import described


class DrainReply(msgspec.Struct, frozen=True):
    """Whether the server is draining, and how many requests are open."""

    draining: bool
    open_requests: int


class WorkerDrainReply(msgspec.Struct, frozen=True):
    """Whether a worker is draining, and how many requests are open on it or on its prefill/decode peer."""

    worker: str
    draining: bool
    open_requests: int


def admin_routes(drain: Drain, llm: Generator) -> APIRouter:
    """Build the routes. `auth.Authentication` checks the admin keys."""
    router = APIRouter()

    def state() -> Response:
        body = msgspec.json.encode(DrainReply(drain.draining, drain.open))
        return Response(body, media_type="application/json")

    async def drain_worker(worker: str, draining: bool) -> Response:
        open_requests = await llm.drain(worker, draining)
        body = msgspec.json.encode(WorkerDrainReply(worker, draining, open_requests))
        return Response(body, media_type="application/json")

    @router.post(
        "/admin/drain",
        openapi_extra=described("Refuse new requests; open requests run to completion", reply=DrainReply),
    )
    async def begin() -> Response:
        """Refuse new requests; open ones run to completion. /health turns 503, so that load balancers stop
        sending."""
        drain.begin()
        return state()

    @router.post("/admin/resume", openapi_extra=described("Accept requests again", reply=DrainReply))
    async def end() -> Response:
        """Accept requests again."""
        drain.end()
        return state()

    @router.post(
        "/admin/workers/{worker}/drain",
        openapi_extra=described("Send no new requests to a worker", reply=WorkerDrainReply, errors=(404,)),
    )
    async def begin_worker(worker: str) -> Response:
        """Send no new requests to a worker, or to its prefill/decode pair; open ones run to completion. May
        be repeated, to see how many are left."""
        return await drain_worker(worker, draining=True)

    @router.post(
        "/admin/workers/{worker}/resume",
        openapi_extra=described("Send requests to a worker again", reply=WorkerDrainReply, errors=(404,)),
    )
    async def end_worker(worker: str) -> Response:
        """Send requests to a worker again."""
        return await drain_worker(worker, draining=False)

    return router
