"""Routes are data: the router and the OpenAPI document are made from the same tables."""

import re
import subprocess
import sys

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, WebSocketRoute

from streamserve.api import routes
from streamserve.api.app import create_app
from streamserve.api.ops.openapi import openapi_document
from streamserve.api.routes import Operation, bound
from tests.api.refusing import refused
from tests.api.serving import ScriptedGenerator, Served

UNDOCUMENTED = {
    ("GET", "/"),
    ("GET", "/assets/{version}/{name}"),
    ("GET", "/openapi.json"),
    ("HEAD", "/openapi.json"),
}


async def greeting(context: str, request: Request) -> Response:
    return Response(f"hello {context} {request.path_params['name']}")


TABLE = (
    routes.Route("GET", "/greetings/{name:path}", greeting, Operation("A greeting", media="text/plain")),
    routes.Route("GET", "/hidden/{name}", greeting, also=("PUT",)),
)


def test_the_document_has_every_supported_route(hello: Served, generator: ScriptedGenerator) -> None:
    paths = hello.http.get("/openapi.json").json()["paths"]
    documented = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    served = set()
    for entry in create_app(generator).routes:
        if isinstance(entry, Route) and getattr(entry.endpoint, "func", entry.endpoint).__name__ != "refuse":
            path = re.sub(r"{(\w+):\w+}", r"{\1}", entry.path)
            served |= {(method, path) for method in entry.methods or ()}
    assert served == documented | UNDOCUMENTED


def test_all_routes_but_the_prompt_stream_socket_are_http(generator: ScriptedGenerator) -> None:
    sockets = [entry.path for entry in create_app(generator).routes if isinstance(entry, WebSocketRoute)]
    assert sockets == ["/v1/streams/ws"]


def test_only_routes_with_an_operation_are_in_the_document() -> None:
    document = openapi_document(TABLE)
    assert list(document["paths"]) == ["/greetings/{name}"]
    operation = document["paths"]["/greetings/{name}"]["get"]
    assert operation["operationId"] == "greeting_greetings__name__get"
    assert operation["parameters"] == [
        {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "title": "Name"}}
    ]


async def test_an_endpoint_serves_the_methods_of_its_route_with_its_context() -> None:
    greetings, hidden = bound(TABLE, "a context")
    request = Request({"type": "http", "path_params": {"name": "x"}, "query_string": b""})
    assert (await greetings.handler(request)).body == b"hello a context x"
    assert greetings.router_entry().methods == {"GET"}
    assert hidden.router_entry().methods == {"GET", "PUT"}
    scope = {"type": "http", "path": "/hidden/x", "method": "POST"}
    assert hidden.router_entry().matches(scope)[0] is Match.PARTIAL


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/v1/streams/x"])
def test_methods_that_a_route_lacks_are_refused(hello: Served, path: str) -> None:
    """Methods that a route lacks are refused, including HEAD, which Starlette would add."""
    assert hello.http.head(path).status_code == 405
    assert refused(hello.http.put(path), 405)["message"] == f"{path} does not take PUT"


def test_the_server_loads_no_second_validation_library() -> None:
    code = "import sys, streamserve.cli.serve; print({'fastapi', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
