"""Structured outputs: converts OpenAI's and vLLM's fields for the output format to a grammar."""

from typing import Any

import msgspec

from streamserve.api.http.ignored_fields import IgnoredFields
from streamserve.api.openai.schemas import GenerationRequest
from streamserve.protocol.errors import RequestError
from streamserve.protocol.field_errors import field_of
from streamserve.protocol.grammar import Grammar
from streamserve.text.json_schemas import enforceable
from streamserve.text.structured import (
    KINDS,
    check_format_size,
    json_grammar,
    structured_grammar,
    without_words,
)

_ANY_OBJECT = {"type": "object"}


class RequestedGrammar(msgspec.Struct, frozen=True):
    """A grammar, and the request field that asks for it."""

    grammar: Grammar
    field: str


def wants_grammar(request: GenerationRequest) -> bool:
    """Return whether a request asks for an output format.

    Converting it may be slow, so it is not done in the event loop.
    """
    names = ["response_format", "structured_outputs", *(f"guided_{name}" for name in KINDS)]
    return bool(request.bad_words) or any(getattr(request, name) is not None for name in names)


def requested_grammar(request: GenerationRequest, ignored: IgnoredFields) -> RequestedGrammar | None:
    """Return the requested grammar, if any. Keywords of its schema that are not enforced are added to
    `ignored`. Raises RequestError naming the field at fault."""
    requested = [
        _requested(f"guided_{name}", {name: value})
        for name in KINDS
        if (value := getattr(request, f"guided_{name}")) is not None
    ]
    format = request.response_format
    schema = None if format is None else response_schema(format, ignored)
    if schema is not None:
        requested.append(RequestedGrammar(json_grammar(schema, "response_format"), "response_format"))
    if request.structured_outputs is not None:
        requested.append(_requested("structured_outputs", request.structured_outputs))
    if request.bad_words:
        requested.append(RequestedGrammar(without_words(request.bad_words), "bad_words"))
    if len(requested) > 1:
        fields = " and ".join(each.field for each in requested)
        raise RequestError(
            f"{fields} cannot be combined: set only one output format", field=requested[1].field
        )
    return requested[0] if requested else None


_FORMAT_FIELDS = {"text": (), "json_object": ("schema",), "json_schema": ("json_schema",)}
"""Fields of response_format besides its type. `schema` is a field of llama.cpp."""


def response_schema(format: dict[str, Any], ignored: IgnoredFields) -> dict[str, Any] | None:
    """Return the JSON schema that a response_format requests; None for text.

    Unless it is strict, keywords that no grammar enforces are left out, and added to `ignored`. Raises
    RequestError naming the field at fault.
    """
    name, kind = "response_format", format.get("type")
    if not isinstance(kind, str) or kind not in _FORMAT_FIELDS:
        raise RequestError(f"{name}.type must be text, json_object or json_schema, not {kind!r}", field=name)
    _check_fields(format, ("type", *_FORMAT_FIELDS[kind]), name)
    if kind == "text":
        return None
    if kind == "json_object":
        schema = format.get("schema")
        if not isinstance(schema, dict | None):
            raise RequestError(f"{name}.schema must be a JSON schema", field=name)
        return _ANY_OBJECT if schema is None else _followed(schema, f"{name}.schema", False, ignored)
    settings = format.get("json_schema")
    if not isinstance(settings, dict) or not isinstance(settings.get("schema"), dict):
        raise RequestError(f"{name}.json_schema must be an object with a schema", field=name)
    _check_fields(settings, ("name", "schema", "strict", "description"), name, "json_schema.")
    strict = settings.get("strict") is True
    return _followed(settings["schema"], f"{name}.json_schema.schema", strict, ignored)


def _followed(schema: dict[str, Any], path: str, strict: bool, ignored: IgnoredFields) -> dict[str, Any]:
    check_format_size(schema, field_of(path))
    followed: dict[str, Any] = enforceable(schema, path, strict, ignored)
    return followed


def _check_fields(settings: dict[str, Any], known: tuple[str, ...], field: str, inside: str = "") -> None:
    for key, value in settings.items():
        if key not in known and value is not None:
            raise RequestError(f"{field}.{inside}{key} is not a known field", field=field)


def _requested(field: str, settings: dict[str, Any]) -> RequestedGrammar:
    return RequestedGrammar(structured_grammar(field, settings), field)
