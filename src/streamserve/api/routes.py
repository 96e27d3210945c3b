"""Routes as data: the router and the OpenAPI document (ops/openapi.py) are derived from the same tables."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from starlette import routing
from starlette.requests import Request
from starlette.responses import Response

from streamserve.api.http.errors import ErrorBody
from streamserve.api.http.ignored_fields import STRICT, OtherFields, check_parameters

JSON = "application/json"
EVENTS = "text/event-stream"

OWN = ("/admin/", "/v1/streams", "/v1/router")
"""Prefixes of paths that no other API has. Routes below them refuse unknown query parameters."""

C = TypeVar("C")
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Operation:
    """The description of a route for the OpenAPI document: its summary, request and responses.

    - `event`: the type of its stream events, sent as `event_media`; `error`: the type of its errors;
      `statuses`: the statuses that errors get instead of this server's.
    - `others`: how fields are treated that `request` does not have.
    - `parameters`: headers and query parameters.
    - `reply`: the type of the reply; None: the reply is text of the type `media`, or empty if `media` is "".
    - `errors`: further error statuses; `other_replies`: further responses by status.
    """

    summary: str
    request: type[msgspec.Struct] | None = None
    reply: type[msgspec.Struct] | None = None
    _: KW_ONLY
    description: str = ""
    event: type[msgspec.Struct] | None = None
    event_media: str = EVENTS
    error: type[msgspec.Struct] = ErrorBody
    statuses: Mapping[int, int] = field(default_factory=dict)
    others: OtherFields = STRICT
    example: Mapping[str, Any] | None = None
    media: str = JSON
    errors: tuple[int, ...] = ()
    other_replies: Mapping[int, type[msgspec.Struct]] = field(default_factory=dict)
    parameters: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Route(Generic[C]):
    """One method of a path. Its handler takes a context of type `C`, and the request.

    `path` may have parameters in Starlette's syntax. Without an `operation`, the route is not in the OpenAPI
    document. `also` are further methods with the same handler, which are not in the document.
    """

    method: str
    path: str
    handler: Callable[[C, Request], Awaitable[Response]]
    operation: Operation | None = None
    also: tuple[str, ...] = ()


class BoundRoute(NamedTuple):
    """A route, and its handler with the context bound."""

    route: Route[Any]
    handler: Handler

    def router_entry(self) -> routing.Route:
        """Return Starlette's route. To HEAD it answers what it answers to GET: the HTTP server leaves out the
        body."""
        described = self.route.operation is not None
        methods = [self.route.method, *self.route.also]
        return routing.Route(self.route.path, self.handler, methods=methods, include_in_schema=described)


def bound(routes: Iterable[Route[C]], context: C) -> list[BoundRoute]:
    """Return the endpoints of `routes` for `context`. Routes with an operation check their query
    parameters."""
    return [BoundRoute(route, _checked(route, partial(route.handler, context))) for route in routes]


def _checked(route: Route[Any], handler: Handler) -> Handler:
    if route.operation is None:
        return handler
    known = [each["name"] for each in route.operation.parameters if each["in"] == "query"]
    strict = route.path.startswith(OWN)

    async def check(request: Request) -> Response:
        check_parameters(request, known, strict)
        return await handler(request)

    return check


def json_response(reply: msgspec.Struct) -> Response:
    """Return a response whose body is `reply` as JSON."""
    return Response(msgspec.json.encode(reply), media_type=JSON)
