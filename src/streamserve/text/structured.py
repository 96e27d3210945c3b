"""Grammars of vLLM's structured outputs (a JSON schema, a regular expression, choices or a grammar), and of
texts without given words."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from streamserve.protocol.errors import RequestError
from streamserve.protocol.grammar import Grammar, GrammarKind, check_size
from streamserve.text.grammar import as_lark
from streamserve.text.json_schemas import enforceable

KINDS: dict[str, GrammarKind] = {"json": "json", "regex": "regex", "choice": "choice", "grammar": "lark"}
_OPTIONS = ("whitespace_pattern", "disable_any_whitespace")
_ANY_OBJECT = {"type": "object"}


def without_words(words: Sequence[str]) -> Grammar:
    """Return the grammar of texts that contain none of `words`. Raises RequestError for an empty word."""
    if not all(words):
        raise RequestError("bad_words must not contain an empty text", field="bad_words")
    check_format_size(words, "bad_words")
    alternatives = " | ".join(json.dumps(word, ensure_ascii=False) for word in words)
    rules = (
        "start: TEXT",
        f"TEXT: ANY & ~(ANY ({alternatives}) ANY)",
        r"ANY: /(.|\n)*/",
    )
    return Grammar(kind="lark", text="\n".join(rules))


def structured_grammar(field: str, settings: Mapping[str, Any]) -> Grammar:
    """Return the grammar of vLLM's object of one format and further settings. Null values are ignored. Raises
    RequestError about `field`."""
    fields = {
        name: value
        for name, value in settings.items()
        if value is not None and (value is not False or name in KINDS)
    }
    options = {name: fields.pop(name) for name in _OPTIONS if name in fields}
    if fields.pop("json_object", None):
        fields["json"] = _ANY_OBJECT
    for name in fields:
        if name not in KINDS:
            raise RequestError(f"{field}.{name} is not supported: use {', '.join(KINDS)}", field=field)
    if len(fields) != 1:
        raise RequestError(f"{field} must hold exactly one of {', '.join(KINDS)}", field=field)
    ((name, value),) = fields.items()
    if options and name != "json":
        raise RequestError(f"{field}.{next(iter(options))} needs a JSON schema", field=field)
    return _grammar(field, KINDS[name], value, options)


class _Nothing:
    """Collects no keywords: those of a strict schema are refused."""

    def add(self, name: str, hint: str = "") -> None:
        raise AssertionError(f"{name} was not refused")


def _grammar(field: str, kind: GrammarKind, value: Any, options: dict[str, Any]) -> Grammar:
    if kind == "json":
        schema = enforceable(_schema(field, value), field, True, _Nothing())
        return json_grammar(schema, field, options)
    if kind == "choice":
        check_format_size(value, field)
        return Grammar(kind=kind, text=json.dumps(value))
    if not isinstance(value, str):
        raise RequestError(f"{field} must be a string", field=field)
    if kind == "regex":
        check_format_size(value, field)
        return Grammar(kind=kind, text=value)
    try:
        return Grammar(kind=kind, text=as_lark(value))
    except ValueError as error:
        raise RequestError(f"{field} {error}", field=field) from error


def _schema(field: str, value: Any) -> Any:
    """Return the schema. It may be given as JSON text."""
    check_format_size(value, field)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{field} is not JSON: {error}", field=field) from error


def check_format_size(value: Any, field: str) -> None:
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
    check_format_size(schema, field)
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
