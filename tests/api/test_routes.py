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
from tests.api.raw_connection import connected
from tests.api.refusing import refused
from tests.api.serving import ScriptedGenerator, Served

UNDOCUMENTED = {
    ("GET", "/"),
    ("GET", "/assets/{version}/{name}"),
    ("GET", "/openapi.json"),
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
    gets = {("HEAD", path) for method, path in served if method == "GET"}
    assert served == documented | UNDOCUMENTED | gets


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
    assert greetings.router_entry().methods == {"GET", "HEAD"}
    assert hidden.router_entry().methods == {"GET", "HEAD", "PUT"}
    scope = {"type": "http", "path": "/hidden/x", "method": "POST"}
    assert hidden.router_entry().matches(scope)[0] is Match.PARTIAL


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/v1/streams/x"])
def test_methods_that_a_route_lacks_are_refused(hello: Served, path: str) -> None:
    assert refused(hello.http.put(path), 405)["message"] == f"{path} does not take PUT"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/tokenize"])
def test_routes_without_get_refuse_head(hello: Served, path: str) -> None:
    response = hello.http.head(path)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")


PATHS = ["/", "/health", "/ping", "/metrics", "/docs", "/openapi.json", "/v1/models", "/v1/models/scripted"]
PATHS += ["/api/tags", "/api/version", "/v1/models/unknown", "/v1/streams/unknown", "/unknown"]


@pytest.mark.parametrize("path", PATHS)
def test_head_has_the_headers_of_get_and_no_body(hello: Served, path: str) -> None:
    """Read from the connection, since a client would skip a body. Of two requests, the second is answered
    only if nothing is left of the first reply."""
    whole = hello.http.get(path)
    lines = b"HEAD %s HTTP/1.1\r\nHost: localhost\r\n" % path.encode()
    with connected(hello) as client:
        client.sendall(lines + b"\r\n")
        first = b""
        while not first.endswith(b"\r\n\r\n"):
            first += client.recv(1000)
        client.sendall(lines + b"Connection: close\r\n\r\n")
        second = b""
        while piece := client.recv(1000):
            second += piece
    for reply in (first, second):
        head, _, body = reply.partition(b"\r\n\r\n")
        status, *fields = head.decode().split("\r\n")
        headers = dict(field.split(": ", 1) for field in fields)
        assert status.split()[1] == str(whole.status_code)
        assert body == b""
        assert headers.keys() - {"connection"} == whole.headers.keys()
        assert headers.get("content-type") == whole.headers.get("content-type")
        if path not in ("/metrics", "/unknown"):  # their texts depend on the request
            assert headers["content-length"] == whole.headers["content-length"]


def test_options_is_as_before(hello: Served) -> None:
    response = hello.http.options("/v1/models")
    assert (response.status_code, set(response.headers["allow"].split(", "))) == (405, {"GET", "HEAD"})


def test_the_server_loads_no_second_validation_library() -> None:
    code = "import sys, streamserve.cli.serve; print({'fastapi', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
