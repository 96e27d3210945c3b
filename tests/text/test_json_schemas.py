"""Keywords of JSON schemas that no grammar enforces are reported."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from streamserve.api.http.ignored_fields import IgnoredFields
from streamserve.protocol.errors import RequestError
from streamserve.protocol.grammar import Grammar, to_llguidance
from streamserve.text.json_schemas import enforceable

TEXT = {"type": "string"}
ANNOTATIONS: list[tuple[str, Any]] = [
    ("uniqueItems", {"type": "array", "items": TEXT, "uniqueItems": True}),
    ("contains", {"type": "array", "contains": TEXT}),
    ("propertyNames", {"type": "object", "propertyNames": {"pattern": "^a"}}),
    ("format", {"type": "string", "format": "iso-4217"}),
    ("format", {"type": ["string", "null"], "format": "uri-reference"}),
    ("if", {"type": "object", "if": {"required": ["a"]}}),
    ("not", {"not": TEXT}),
    ("dependentRequired", {"type": "object", "dependentRequired": {"a": ["b"]}}),
    ("unevaluatedProperties", {"type": "object", "unevaluatedProperties": False}),
    ("pattern", {"type": "string", "pattern": "^(?!x).*$"}),
    ("pattern", {"type": "string", "pattern": r"\bfox\b"}),
    ("minProperties", {"type": "object", "minProperties": 2}),
    ("minProperties", {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1}),
    ("maxProperties", {"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1}),
]
ENFORCED: list[Any] = [
    {"type": "string", "format": "date-time"},
    {"type": "integer", "format": "int32"},
    {"type": "object", "minProperties": 1},
    {"type": "object", "maxProperties": 3},
    {"type": "string", "pattern": r"^(?<year>\d+)$"},
    {"oneOf": [{"const": 1}, {"const": "a"}]},
    {"type": "object", "properties": {"not": TEXT, "if": TEXT, "format": {"const": "x"}}},
    {"enum": [{"uniqueItems": True}]},
    {"const": {"not": 1}},
]
IMPLIED: list[Any] = [
    {"type": "array", "uniqueItems": False},
    {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a", "b"], "minProperties": 2},
    {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 0},
    {"type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": False, "maxProperties": 2},
]
NESTINGS = ("properties", "items", "anyOf", "$defs", "additionalProperties", "prefixItems")

_TOKENIZER = LLTokenizer("byte")


def nested(schema: Any, names: list[str]) -> tuple[Any, str]:
    """Return a schema that contains `schema`, and the path to it."""
    path = ""
    for name in reversed(names):
        if name in ("properties", "$defs"):
            schema, path = {"type": "object", name: {"p": schema}}, f".{name}.p{path}"
        elif name in ("anyOf", "prefixItems"):
            schema, path = {name: [TEXT, schema]}, f".{name}[1]{path}"
        else:
            schema, path = {name: schema}, f".{name}{path}"
    return schema, path


def compiles(schema: Any) -> bool:
    text = to_llguidance(Grammar(kind="json", text=json.dumps(schema)))
    return not LLMatcher(_TOKENIZER, text, log_level=0).is_error()


@settings(max_examples=60)
@given(st.sampled_from(ANNOTATIONS), st.lists(st.sampled_from(NESTINGS), max_size=4))
def test_what_is_not_enforced_is_refused_with_its_place_or_left_out(
    annotation: tuple[str, Any], names: list[str]
) -> None:
    keyword, inner = annotation
    schema, path = nested(inner, names)
    with pytest.raises(RequestError) as refused:
        enforceable(schema, "guided_json", True, IgnoredFields(strict=False))
    assert refused.value.message.startswith(f"guided_json{path}: {keyword} is not supported")
    assert refused.value.field == "guided_json"
    ignored = IgnoredFields(strict=False)
    relaxed = enforceable(schema, "tools[0].function.parameters", False, ignored)
    assert relaxed == nested({name: inner[name] for name in inner if name != keyword}, names)[0]
    assert ignored.text() == f"without effect: {keyword} in a schema, as no grammar enforces it"
    assert compiles(relaxed)
    with pytest.raises(RequestError):
        enforceable(schema, "tools[0]", False, IgnoredFields(strict=True))


@pytest.mark.parametrize("schema", ENFORCED)
def test_what_is_enforced_stays(schema: Any) -> None:
    assert enforceable(schema, "guided_json", True, IgnoredFields(strict=True)) == schema
    assert compiles(schema)


@pytest.mark.parametrize("schema", IMPLIED)
def test_what_is_implied_is_no_annotation(schema: Any) -> None:
    assert compiles(enforceable(schema, "guided_json", True, IgnoredFields(strict=True)))


def test_alternatives_may_overlap_unless_strict() -> None:
    schema = {"oneOf": [TEXT, {"type": "string", "minLength": 3}]}
    ignored = IgnoredFields(strict=True)
    assert enforceable(schema, "tools[0]", False, ignored) == {"anyOf": schema["oneOf"]}
    assert enforceable(schema, "tools[0]", True, ignored) == schema


def test_a_schema_without_annotations_is_as_before() -> None:
    schema = {
        "$defs": {"a": {"type": "integer"}},
        "properties": {"x": {"$ref": "#/$defs/a"}},
        "required": ["x"],
    }
    assert enforceable(schema, "guided_json", True, IgnoredFields(strict=True)) == schema


def test_a_deep_schema_is_refused() -> None:
    schema: Any = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="nested too deeply"):
        enforceable(schema, "guided_json", True, IgnoredFields(strict=True))
