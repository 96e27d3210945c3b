"""GET /v1/router: the reasons for routing decisions."""

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from streamserve.api.context import AppContext
from streamserve.api.leases import MODEL_PARAMETER, named_context
from streamserve.api.routes import Operation, Route, json_response
from streamserve.fleet.view import RouterView


async def routing(context: AppContext, request: Request) -> Response:
    """Return the workers' current state, and recent routing decisions. If several tenants share the server,
    the decisions do not name requests, which may be another tenant's."""
    view = named_context(context, request).llm.routing()
    return json_response(_unnamed(view) if context.settings.several_tenants else view)


def _unnamed(view: RouterView) -> RouterView:
    return replace(view, decisions=[replace(decision, request="") for decision in view.decisions])


ROUTING_ROUTES: tuple[Route[AppContext], ...] = (
    Route(
        "GET",
        "/v1/router",
        routing,
        Operation(
            "Workers, and recent routing decisions",
            reply=RouterView,
            parameters=[MODEL_PARAMETER],
            errors=(404,),
            description="The workers' current state, and the candidates, scores and reasons of recent "
            "routing decisions. With several tenants the decisions do not name requests.",
        ),
    ),
)
