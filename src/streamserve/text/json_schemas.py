"""Keywords of JSON schemas that a grammar cannot enforce. Where the schema must be followed, they are
refused; elsewhere they count as annotations, and are left out of the grammar with a warning."""

import re
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from streamserve.protocol.errors import RequestError
from streamserve.protocol.field_errors import field_of

_NOT_ENFORCED = frozenset(
    {
        "contains",
        "dependencies",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid"}
)
"""The formats of strings that llguidance knows."""

_LOOK_AROUND = re.compile(r"\(\?<?[=!]|\\[bB1-9]")
"""Parts of regular expressions that llguidance lacks: look-around, word boundaries, back references."""

_SCHEMAS = ("additionalProperties", "items")
_LISTS_OF_SCHEMAS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAPS_OF_SCHEMAS = ("$defs", "definitions", "patternProperties", "properties")


class Ignored(Protocol):
    """Collects the parts of a request that have no effect, by name with a hint."""

    def add(self, name: str, hint: str = "") -> None: ...


_Found = list[tuple[str, str]]
"""The path of a schema, and its keyword that cannot be enforced."""


def enforceable(schema: Any, path: str, strict: bool, ignored: Ignored) -> Any:
    """Return `schema`, which is at `path` in the request, without the keywords that no grammar enforces.

    They are added to `ignored`. If `strict`, raises RequestError naming the first one.
    """
    found: _Found = []
    try:
        relaxed = _relaxed(schema, path, found, strict)
    except RecursionError as error:
        raise RequestError(f"{path} is nested too deeply", field=field_of(path)) from error
    if strict and found:
        where, keyword = found[0]
        raise RequestError(
            f"{where}: {keyword} is not supported here, as no grammar can enforce it: leave it out",
            field=field_of(path),
        )
    for _, keyword in found:
        ignored.add(keyword, " in a schema, as no grammar enforces it")
    return relaxed


def _relaxed(schema: Any, path: str, found: _Found, strict: bool) -> Any:
    """Return `schema` without the keywords that are added to `found`. Unless `strict`, `oneOf` becomes
    `anyOf`: the alternatives may overlap."""
    if not isinstance(schema, dict):
        return schema
    dropped = list(_unenforced(schema))
    found += [(path, keyword) for keyword in dropped if not _is_implied(schema, keyword)]
    relaxed = {name: value for name, value in schema.items() if name not in dropped}

    def inner(value: Any, where: str) -> Any:
        return _relaxed(value, where, found, strict)

    _replace(relaxed, path, inner)
    if not strict and "oneOf" in relaxed and "anyOf" not in relaxed:
        relaxed["anyOf"] = relaxed.pop("oneOf")
    return relaxed


def _replace(schema: dict[str, Any], path: str, inner: Callable[[Any, str], Any]) -> None:
    """Replace each schema directly inside `schema` by what `inner` returns for it and its path."""
    for name in _SCHEMAS:
        if isinstance(schema.get(name), dict):
            schema[name] = inner(schema[name], f"{path}.{name}")
    for name in _LISTS_OF_SCHEMAS:
        if isinstance(schema.get(name), list):
            schema[name] = [inner(each, f"{path}.{name}[{i}]") for i, each in enumerate(schema[name])]
    for name in _MAPS_OF_SCHEMAS:
        if isinstance(schema.get(name), dict):
            schema[name] = {key: inner(each, f"{path}.{name}.{key}") for key, each in schema[name].items()}


def _unenforced(schema: dict[str, Any]) -> Iterable[str]:
    """Return the keywords of `schema` itself that no grammar enforces."""
    yield from sorted(_NOT_ENFORCED.intersection(schema))
    kind = schema.get("type", "string")
    text = kind == "string" or (isinstance(kind, list) and "string" in kind)
    format = schema.get("format")
    if text and isinstance(format, str) and format not in _FORMATS:
        yield "format"
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and _LOOK_AROUND.search(pattern):
        yield "pattern"
    yield from _unenforced_counts(schema)


def _unenforced_counts(schema: dict[str, Any]) -> Iterable[str]:
    """Return which limits on the number of properties no grammar enforces. A grammar can require properties.
    It can count further properties only if all named properties are required. It does not know which names
    were used, so two further properties may have the same name: it can require only one of them."""
    required, properties = _required(schema), _properties(schema)
    counted = properties <= required
    least = schema.get("minProperties")
    if isinstance(least, int) and not (
        counted and least == len(required) + 1 and schema.get("additionalProperties") is not False
    ):
        yield "minProperties"
    if "maxProperties" in schema and not counted:
        yield "maxProperties"


def _is_implied(schema: dict[str, Any], keyword: str) -> bool:
    """Return whether the schema's other keywords imply `keyword`, or its value demands nothing."""
    if keyword == "minProperties":
        return bool(schema[keyword] <= len(_required(schema)))
    if keyword == "maxProperties":
        closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
        limit = schema[keyword]
        return closed and isinstance(limit, int) and limit >= len(_properties(schema))
    return keyword == "uniqueItems" and schema[keyword] is False


def _required(schema: dict[str, Any]) -> set[str]:
    names = schema.get("required")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _properties(schema: dict[str, Any]) -> set[str]:
    properties = schema.get("properties")
    return set(properties) if isinstance(properties, dict) else set()
