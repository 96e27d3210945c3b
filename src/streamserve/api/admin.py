"""Admin routes: taking a server out of service and back, without ending it."""

import msgspec
from fastapi import APIRouter, Response

from streamserve.api.drain import Drain
from streamserve.api.openapi import described


class DrainReply(msgspec.Struct, frozen=True):
    """Whether new requests are taken, and how many are open."""

    draining: bool
    open_requests: int


def admin_routes(drain: Drain) -> APIRouter:
    """The routes. Authentication is `auth.Authentication`'s matter."""
    router = APIRouter()

    def state() -> Response:
        body = msgspec.json.encode(DrainReply(drain.draining, drain.open))
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

    return router
