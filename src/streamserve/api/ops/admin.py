"""Admin routes: taking a server, or one of its workers, out of service and back, without ending it."""

import msgspec
from fastapi import APIRouter, Response

from streamserve.api.generator import Generator
from streamserve.api.http.drain import Drain
from streamserve.api.ops.openapi import described


class DrainReply(msgspec.Struct, frozen=True):
    """Whether new requests are taken, and how many are open."""

    draining: bool
    open_requests: int


class WorkerDrainReply(msgspec.Struct, frozen=True):
    """Whether a worker gets no new requests, and how many are open at it, or at the other half of its
    pair."""

    worker: str
    draining: bool
    open_requests: int


def admin_routes(drain: Drain, llm: Generator) -> APIRouter:
    """The routes. Authentication is `auth.Authentication`'s matter."""
    router = APIRouter()

    def state() -> Response:
        body = msgspec.json.encode(DrainReply(drain.draining, drain.open))
        return Response(body, media_type="application/json")

    async def rest(worker: str, draining: bool) -> Response:
        open_requests = await llm.rest(worker, draining)
        body = msgspec.json.encode(WorkerDrainReply(worker, draining, open_requests))
        return Response(body, media_type="application/json")

    @router.post(
        "/admin/drain", openapi_extra=described("Take no new requests; open ones go on", reply=DrainReply)
    )
    async def begin() -> Response:
        """Take no new requests; open ones go on. /health turns 503, so that balancers look elsewhere."""
        drain.begin()
        return state()

    @router.post("/admin/resume", openapi_extra=described("Take requests again", reply=DrainReply))
    async def end() -> Response:
        """Take requests again."""
        drain.end()
        return state()

    @router.post(
        "/admin/workers/{worker}/drain",
        openapi_extra=described("Give a worker no new requests", reply=WorkerDrainReply, errors=(404,)),
    )
    async def begin_worker(worker: str) -> Response:
        """Give a worker, and with it its pair, no new requests; open ones go on. May be asked again, to see
        how many are left."""
        return await rest(worker, draining=True)

    @router.post(
        "/admin/workers/{worker}/resume",
        openapi_extra=described("Give a worker requests again", reply=WorkerDrainReply, errors=(404,)),
    )
    async def end_worker(worker: str) -> Response:
        """Give a worker requests again."""
        return await rest(worker, draining=False)

    return router
