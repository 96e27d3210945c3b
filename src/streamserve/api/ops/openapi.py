"""The OpenAPI description (/openapi.json), generated from the structs that validate requests."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import msgspec
from fastapi import FastAPI

from streamserve.api.http.errors import ErrorBody

_REFERENCE = "#/components/schemas/{name}"
_JSON = "application/json"
_ERRORS = {
    400: "A field is unknown, not supported, or has an invalid value: the error names it",
    401: "A valid key is required",
    403: "Forbidden: a page of another origin, or an admin route without an admin key",
    404: "There is no such model, or stream",
    405: "The route does not support this method",
    409: "The stream has another version, which the error names, or is finished",
    413: "The request is larger than the limit",
    429: "Too many requests are open: retry after Retry-After seconds",
    500: "The server failed",
    503: "The model is loading, or the server is stopping",
    504: "The request took longer than request_timeout",
}
_OF_READING = (401, 403, 405, 500)
_OF_ANSWERING = tuple(_ERRORS)
_COMPONENTS = "x-components"
"""Key of a route's struct schemas, until the description is assembled."""


def described(
    summary: str,
    request: type[msgspec.Struct] | None = None,
    reply: type[msgspec.Struct] | None = None,
    *,
    event: type[msgspec.Struct] | None = None,
    unsupported: Mapping[str, tuple[Any, ...]] | None = None,
    example: Mapping[str, Any] | None = None,
    media: str = _JSON,
    open_to_all: bool = False,
    errors: tuple[int, ...] = (),
    other_replies: Mapping[int, type[msgspec.Struct]] | None = None,
    parameters: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Describe a route for OpenAPI: its summary, request and responses.

    `event` is the type of its stream events. `unsupported` are fields that are known and refused, with the
    values that have no effect; `parameters` describes headers. Without `reply`, the reply is text of the type
    `media`. `other_replies` are further responses, by status.
    """
    other_replies = other_replies or {}
    kinds = [kind for kind in (request, reply, event, *other_replies.values(), ErrorBody) if kind is not None]
    _, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    statuses = {*errors, *(_OF_READING if request is None else _OF_ANSWERING)}
    responses: dict[str, Any] = {
        str(status): {"description": _ERRORS[status], "content": _content(_JSON, _reference(ErrorBody))}
        for status in sorted(statuses)
    }
    responses["200"] = {"description": "The reply", "content": _content(media, _reference(reply))}
    if not media:
        del responses["200"]["content"]
    if event is not None:
        text = f"server-sent events, where `stream` is true: the data of each is a {event.__name__} as JSON"
        responses["200"]["content"]["text/event-stream"] = {
            "schema": {"type": "string", "description": text, "x-event": _reference(event)}
        }
    for status, kind in other_replies.items():
        responses[str(status)] = {
            "description": "Not available now",
            "content": _content(_JSON, _reference(kind)),
        }
    operation: dict[str, Any] = {"summary": summary, "responses": responses, _COMPONENTS: components}
    if parameters:
        operation["parameters"] = parameters
    if open_to_all:
        operation["security"] = []
        del responses["401"]
    if request is not None:
        components[request.__name__] = _of_request(components[request.__name__], unsupported or {})
        content = _content(_JSON, _reference(request))
        content[_JSON]["examples"] = {"request": {"value": example}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def install_description(app: FastAPI) -> None:
    """Make `app` generate its OpenAPI description from `described`."""
    generated = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _assembled(generated())
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _assembled(description: dict[str, Any]) -> dict[str, Any]:
    """Return FastAPI's description of the routes with our component schemas.

    Removes its validation errors (422) and the empty schemas of routes that do not return JSON.
    """
    description = deepcopy(description)
    schemas: dict[str, Any] = {}
    for operations in description["paths"].values():
        for operation in operations.values():
            schemas |= operation.pop(_COMPONENTS, {})
            operation["responses"].pop("422", None)
            for response in operation["responses"].values():
                content = response.pop("content", {})
                if contents := {media: body for media, body in content.items() if body["schema"]}:
                    response["content"] = contents
    key = {"type": "http", "scheme": "bearer", "description": "one of the server's keys, if it has any"}
    description["components"] = {"schemas": schemas, "securitySchemes": {"key": key}}
    description["security"] = [{"key": []}, {}]
    return description


def _content(media: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {media: {"schema": schema}}


def _reference(kind: type[msgspec.Struct] | None) -> dict[str, Any]:
    return {"type": "string"} if kind is None else {"$ref": _REFERENCE.format(name=kind.__name__)}


def _of_request(schema: dict[str, Any], unsupported: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return `schema` as requests are parsed.

    A null means that the field is left out; unsupported fields accept only some values.
    """
    required = schema.get("required", ())
    properties = {
        name: field if name in required else _nullable(field) for name, field in schema["properties"].items()
    }
    for name, values in sorted(unsupported.items()):
        properties[name] = {"description": "not supported", "enum": [*values, None]}
    return {**schema, "properties": properties}


def _nullable(field: dict[str, Any]) -> dict[str, Any]:
    field = {name: value for name, value in field.items() if (name, value) != ("default", None)}
    if "anyOf" in field:
        kinds = [kind for kind in field["anyOf"] if kind != {"type": "null"}]
        return {**field, "anyOf": [*kinds, {"type": "null"}]}
    if "type" in field:
        return {**field, "type": [field["type"], "null"]}
    if "enum" in field:
        return {**field, "enum": [*field["enum"], None]}
    fields = {name: value for name, value in field.items() if name != "$ref"}
    return {**fields, "anyOf": [{"$ref": field["$ref"]}, {"type": "null"}]} if "$ref" in field else field
