"""GET /openapi.json: the OpenAPI document, derived from the route tables and from the structs that validate
requests."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from streamserve import __version__
from streamserve.api.http.auth import PUBLIC_PATHS
from streamserve.api.http.ignored_fields import OtherFields
from streamserve.api.routes import JSON, OWN, Operation, Route

Schema = dict[str, Any]
Document = Callable[[], Schema]
"""Returns the OpenAPI document. It is the context of the routes that show it."""

_REFERENCE = "#/components/schemas/{name}"
_ERRORS = {
    400: "A field is not supported, or has an invalid value: the error names it",
    401: "A valid key is required",
    403: "Forbidden: a page of another origin, or an admin route without an admin key",
    404: "There is no such model or stream",
    405: "The route does not support this method",
    409: "The stream has another version, which the error names, or it is finished",
    413: "The request is larger than the limit",
    429: "Too many requests are open: retry after Retry-After seconds",
    500: "The server failed",
    503: "The model is loading, or the server is stopping",
    504: "The request took longer than request_timeout",
    507: "The batch folder cannot be written, for example because the disk is full",
}
_OF_READING = (401, 403, 405, 500)
_OF_ANSWERING = (400, 401, 403, 404, 405, 409, 413, 429, 500, 503, 504)
_PATH_PARAMETER = re.compile(r"{(\w+)(:\w+)?}")
_KEY = {"type": "http", "scheme": "bearer", "description": "one of the server's keys, if it requires keys"}


async def openapi(document: Document, request: Request) -> Response:
    """Return the document."""
    return Response(msgspec.json.encode(document()), media_type=JSON)


OPENAPI_ROUTES: tuple[Route[Document], ...] = (Route("GET", "/openapi.json", openapi),)


def openapi_document(routes: Iterable[Route[Any]], strict: bool = False) -> Schema:
    """Return the OpenAPI document of the `routes` that have an operation. `strict`: ignored fields are
    refused."""
    paths: dict[str, Schema] = {}
    schemas: dict[str, Schema] = {}
    for route in routes:
        if route.operation is not None:
            operations = paths.setdefault(_PATH_PARAMETER.sub(r"{\1}", route.path), {})
            operations[route.method.lower()] = _operation(route, route.operation, strict)
            schemas |= component_schemas(route.operation, strict)
    return {
        "openapi": "3.1.0",
        "info": {"title": "streamserve", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": _KEY}},
        "security": [{"key": []}, {}],
    }


def component_schemas(operation: Operation, strict: bool = False) -> dict[str, Schema]:
    """Return the schemas, by name, of the structs to which `operation` refers. `strict`: ignored fields are
    refused."""
    request = operation.request
    kinds = [request, operation.reply, operation.event, *operation.other_replies.values(), operation.error]
    _, schemas = msgspec.json.schema_components(
        [kind for kind in kinds if kind is not None], ref_template=_REFERENCE
    )
    schemas = {name: _without_null_defaults(schema) for name, schema in schemas.items()}
    if request is not None:
        schemas[request.__name__] = _of_request(schemas[request.__name__], operation.others, strict)
    return schemas


def _operation(route: Route[Any], operation: Operation, strict: bool) -> Schema:
    """Return the document's object for one method of a path."""
    path = _PATH_PARAMETER.sub(r"{\1}", route.path)
    name = re.sub(r"\W", "_", f"{route.handler.__name__}{path}")
    described: Schema = {"summary": operation.summary}
    if operation.description:
        described["description"] = operation.description
    described["operationId"] = f"{name}_{route.method.lower()}"
    parameters = [*map(_path_parameter, _PATH_PARAMETER.finditer(route.path)), *operation.parameters]
    if parameters:
        described["parameters"] = parameters
    if operation.request is not None:
        content = _content(JSON, _reference(operation.request))
        content[JSON]["examples"] = {"request": {"value": operation.example}}
        described["requestBody"] = {"required": True, "content": content}
    described["responses"] = _responses(operation, route.path, strict)
    if route.path in PUBLIC_PATHS:
        described["security"] = []
    return described


def _path_parameter(match: re.Match[str]) -> Schema:
    schema = {"type": "string", "title": match[1].title()}
    return {"name": match[1], "in": "path", "required": True, "schema": schema}


def _responses(operation: Operation, path: str, strict: bool) -> Schema:
    """Return the responses of an operation by status. `strict`: all routes refuse unknown query
    parameters."""
    reply: Schema = {"description": "The reply"}
    if operation.media:
        reply["content"] = _content(operation.media, _reference(operation.reply))
    event = operation.event
    if event is not None:
        text = f"events, where `stream` is true: the data of each is a {event.__name__} as JSON"
        reply["content"][operation.event_media] = {
            "schema": {"type": "string", "description": text, "x-event": _reference(event)}
        }
    statuses = {*operation.errors, *(_OF_READING if operation.request is None else _OF_ANSWERING)}
    if strict or path.startswith(OWN):
        statuses.add(400)
    if path in PUBLIC_PATHS:
        statuses.discard(401)
    descriptions = {operation.statuses.get(status, status): _ERRORS[status] for status in statuses}
    errors = {
        str(status): {"description": text, "content": _content(JSON, _reference(operation.error))}
        for status, text in sorted(descriptions.items())
    }
    others = {
        str(status): {"description": "Not available now", "content": _content(JSON, _reference(kind))}
        for status, kind in operation.other_replies.items()
    }
    return {"200": reply, **errors, **others}


def _content(media: str, schema: Schema) -> Schema:
    return {media: {"schema": schema}}


def _reference(kind: type[msgspec.Struct] | None) -> Schema:
    return {"type": "string"} if kind is None else {"$ref": _REFERENCE.format(name=kind.__name__)}


def _without_null_defaults(schema: Schema) -> Schema:
    """Return `schema` without defaults that are null: they mean that the field is left out."""
    if "properties" not in schema:
        return schema
    properties = {
        name: {key: value for key, value in field.items() if (key, value) != ("default", None)}
        for name, field in schema["properties"].items()
    }
    return {**schema, "properties": properties}


def _of_request(schema: Schema, others: OtherFields, strict: bool) -> Schema:
    """Return `schema`, changed to what the parser of requests accepts.

    A null value means that the field is left out. Refused fields accept only some values.
    """
    strict = strict or others.strict
    required = schema.get("required", ())
    properties = {
        name: field if name in required else _nullable(field) for name, field in schema["properties"].items()
    }
    refused = {**others.refused, **(others.without_effect if strict else {})}
    for name, values in sorted(refused.items()):
        properties[name] = {"description": "not supported", "enum": [*values, None]}
    for name in sorted(others.without_effect.keys() - refused.keys()):
        properties[name] = {"description": "without effect: named in the Warning header"}
    return {**schema, "properties": properties, "additionalProperties": not strict}


def _nullable(field: Schema) -> Schema:
    if "anyOf" in field:
        kinds = [kind for kind in field["anyOf"] if kind != {"type": "null"}]
        return {**field, "anyOf": [*kinds, {"type": "null"}]}
    if "type" in field:
        return {**field, "type": [field["type"], "null"]}
    if "enum" in field:
        return {**field, "enum": [*field["enum"], None]}
    fields = {name: value for name, value in field.items() if name != "$ref"}
    return {**fields, "anyOf": [{"$ref": field["$ref"]}, {"type": "null"}]} if "$ref" in field else field
