"""GET /v1/router: the reasons for routing decisions."""

import msgspec
from fastapi import APIRouter, Response

from streamserve.api.generator import Generator
from streamserve.api.ops.openapi import described
from streamserve.fleet.view import RouterView


def router_routes(llm: Generator) -> APIRouter:
    """Build the route."""
    router = APIRouter()

    @router.get(
        "/v1/router", openapi_extra=described("Workers, and recent routing decisions", reply=RouterView)
    )
    async def routing() -> Response:
        """The workers' current state, and the candidates, scores and reasons of recent routing decisions."""
        return Response(msgspec.json.encode(llm.routing()), media_type="application/json")

    return router
