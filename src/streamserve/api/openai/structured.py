"""Structured outputs: converts OpenAI's and vLLM's fields for the output format to a grammar."""

import json
from typing import Any

import msgspec

from streamserve.api.http.ignored_fields import IgnoredFields
from streamserve.api.openai.json_schemas import enforceable
from streamserve.api.openai.schemas import GenerationRequest
from streamserve.protocol.errors import RequestError
from streamserve.protocol.field_errors import field_of
from streamserve.protocol.grammar import Grammar, GrammarKind, check_size
from streamserve.text.grammar import as_lark

_KINDS: dict[str, GrammarKind] = {"json": "json", "regex": "regex", "choice": "choice", "grammar": "lark"}
_OPTIONS = ("whitespace_pattern", "disable_any_whitespace")
_ANY_OBJECT = {"type": "object"}


class RequestedGrammar(msgspec.Struct, frozen=True):
    """A grammar, and the request field that asks for it."""

    grammar: Grammar
    field: str


def wants_grammar(request: GenerationRequest) -> bool:
    """Return whether a request asks for an output format.

    Converting it may be slow, so it is not done in the event loop.
    """
    names = ["response_format", "structured_outputs", *(f"guided_{name}" for name in _KINDS)]
    return bool(request.bad_words) or any(getattr(request, name) is not None for name in names)


def requested_grammar(request: GenerationRequest, ignored: IgnoredFields) -> RequestedGrammar | None:
    """Return the requested grammar, if any. Keywords of its schema that are not enforced are added to
    `ignored`. Raises RequestError naming the field at fault."""
    requested = [
        _structured(f"guided_{name}", {name: value})
        for name in _KINDS
        if (value := getattr(request, f"guided_{name}")) is not None
    ]
    format = request.response_format
    schema = None if format is None else response_schema(format, ignored)
    if schema is not None:
        requested.append(RequestedGrammar(json_grammar(schema, "response_format"), "response_format"))
    if request.structured_outputs is not None:
        requested.append(_structured("structured_outputs", request.structured_outputs))
    if request.bad_words:
        requested.append(RequestedGrammar(_without_words(request.bad_words), "bad_words"))
    if len(requested) > 1:
        fields = " and ".join(each.field for each in requested)
        raise RequestError(
            f"{fields} cannot be combined: set only one output format", field=requested[1].field
        )
    return requested[0] if requested else None


def _without_words(words: list[str]) -> Grammar:
    """Return the grammar of texts that contain none of `words`. Raises RequestError for an empty word."""
    if not all(words):
        raise RequestError("bad_words must not contain an empty text", field="bad_words")
    _check_size(words, "bad_words")
    alternatives = " | ".join(json.dumps(word, ensure_ascii=False) for word in words)
    rules = (
        "start: TEXT",
        f"TEXT: ANY & ~(ANY ({alternatives}) ANY)",
        r"ANY: /(.|\n)*/",
    )
    return Grammar(kind="lark", text="\n".join(rules))


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
    _check_size(schema, field_of(path))
    followed: dict[str, Any] = enforceable(schema, path, strict, ignored)
    return followed


def _check_fields(settings: dict[str, Any], known: tuple[str, ...], field: str, inside: str = "") -> None:
    for key, value in settings.items():
        if key not in known and value is not None:
            raise RequestError(f"{field}.{inside}{key} is not a known field", field=field)


def _structured(field: str, settings: dict[str, Any]) -> RequestedGrammar:
    """Parse vLLM's object of one format and further settings. Null values are ignored."""
    fields = {
        name: value
        for name, value in settings.items()
        if value is not None and (value is not False or name in _KINDS)
    }
    options = {name: fields.pop(name) for name in _OPTIONS if name in fields}
    if fields.pop("json_object", None):
        fields["json"] = _ANY_OBJECT
    for name in fields:
        if name not in _KINDS:
            raise RequestError(f"{field}.{name} is not supported", field=field)
    if len(fields) != 1:
        raise RequestError(f"{field} must hold exactly one of {', '.join(_KINDS)}", field=field)
    ((name, value),) = fields.items()
    if options and name != "json":
        raise RequestError(f"{field}.{next(iter(options))} needs a JSON schema", field=field)
    return RequestedGrammar(_grammar(field, _KINDS[name], value, options), field)


def _grammar(field: str, kind: GrammarKind, value: Any, options: dict[str, Any]) -> Grammar:
    if kind == "json":
        schema = enforceable(_schema(field, value), field, True, IgnoredFields(strict=True))
        return json_grammar(schema, field, options)
    if kind == "choice":
        _check_size(value, field)
        return Grammar(kind=kind, text=json.dumps(value))
    if not isinstance(value, str):
        raise RequestError(f"{field} must be a string", field=field)
    if kind == "regex":
        _check_size(value, field)
        return Grammar(kind=kind, text=value)
    try:
        return Grammar(kind=kind, text=as_lark(value))
    except ValueError as error:
        raise RequestError(f"{field} {error}", field=field) from error


def _schema(field: str, value: Any) -> Any:
    """Return the schema. It may be given as JSON text."""
    _check_size(value, field)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{field} is not JSON: {error}", field=field) from error


def _check_size(value: Any, field: str) -> None:
    """Raise RequestError about `field` if the format is too large to process."""
    try:
        check_size(value)
    except ValueError as error:
        raise RequestError(f"{field} {error}", field=field) from error


def json_grammar(schema: Any, field: str, options: dict[str, Any] | None = None) -> Grammar:
    """Return the grammar of JSON texts that match `schema`, the value of `field`.

    `options` are settings of whitespace. Raises RequestError if the schema is too large, or its x-guidance is
    not an object.
    """
    _check_size(schema, field)
    blanks: dict[str, Any] = {}
    if options and options.get("disable_any_whitespace"):
        blanks["whitespace_flexible"] = False
    elif options:
        blanks["whitespace_pattern"] = options["whitespace_pattern"]
    if blanks and isinstance(schema, dict):
        own = schema.get("x-guidance", {})
        if not isinstance(own, dict):
            raise RequestError(f"{field}: x-guidance must be an object", field=field)
        schema = {**schema, "x-guidance": {**own, **blanks}}
    return Grammar(kind="json", text=json.dumps(schema))
