"""Grammar rules of calls in syntaxes other than JSON, with arguments that follow the functions' schemas."""

import json
from collections.abc import Mapping
from typing import Any

from streamserve.text.tools.custom_text import INPUT, WrittenText
from streamserve.text.tools.formats import NotExpressible
from streamserve.text.tools.xml_call import resolved, value_types

Schema = Mapping[str, Any]

_ANY_KEY = r"KEY: /[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
_TEXT_KEYS = frozenset({"type", "enum", "const", "title", "description", "default", "examples"})
_OBJECT_KEYS = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "title", "description",
     "$schema", "strict"}
)  # fmt: skip


def native_rules(
    syntax: str, schemas: Mapping[str, Schema], texts: Mapping[str, WrittenText]
) -> tuple[list[str], dict[str, Any]]:
    """Return the Lark rules of `native`, a call of one of the functions, and the JSON schemas in the rules.
    Functions in `texts` have one parameter, whose value these texts describe.

    Raises NotExpressible for a schema that the syntax (python or xml) cannot follow.
    """
    rules = ["native: " + " | ".join(f"call{index}" for index in range(len(schemas))), _ANY_KEY]
    named: dict[str, Any] = {}
    parameter = _xml_parameter if syntax == "xml" else _python_parameter
    begin, between, end = ("<function=%s>\n", "", "</function>") if syntax == "xml" else ("%s(", ", ", ")")
    if syntax == "xml":
        rules += [r'value[lazy]: /(.|\n)*/ "\n</parameter>\n"']
    for index, (name, schema) in enumerate(schemas.items()):
        if name in texts:
            key = f"<parameter={INPUT}>\n" if syntax == "xml" else f"{INPUT}="
            rules.append(
                f"call{index}: {json.dumps(begin % name + key)} {texts[name].value} {json.dumps(end)}"
            )
            continue
        properties, required = _properties(name, schema)
        if properties is None:
            named["any"] = {}
            one = 'KEY "=" @any' if syntax == "python" else '"<parameter=" KEY ">\\n" value'
            inside = f"({one} ({json.dumps(between)} {one})*)?" if between else f"({one})*"
            rules.append(f"call{index}: {json.dumps(begin % name)} {inside} {json.dumps(end)}")
            continue
        parts = []
        for number, key in enumerate(properties):
            reference = f"p{index}x{number}"
            rule, used = parameter(key, schema, reference)
            named |= used
            rules.append(f"a{reference}: {rule}")
            parts.append((f"a{reference}", key in required))
        rules.append(f"call{index}: {json.dumps(begin % name)} c{index}x0 {json.dumps(end)}")
        rules += _sequence(f"c{index}", parts, between)
    return rules, named


def _properties(name: str, schema: Schema) -> tuple[dict[str, Any] | None, set[str]]:
    """Return the properties of a function's arguments, None if any are allowed, and the required
    properties."""
    properties, other = schema.get("properties"), set(schema) - _OBJECT_KEYS
    if other or not isinstance(properties, dict | None) or schema.get("additionalProperties") not in (
        None, True, False
    ):  # fmt: skip
        what = f"its {min(other)}" if other else "its properties"
        raise NotExpressible(f"{what} of the function {name} cannot be followed in this model's call format")
    required = set(schema.get("required") or ())
    if properties is None and "additionalProperties" not in schema and not required:
        return None, set()
    missing = required - set(properties or {})
    if missing:
        raise NotExpressible(f"the function {name} requires {min(missing)!r}, which its properties lack")
    return properties or {}, required


def _sequence(name: str, parts: list[tuple[str, bool]], between: str) -> list[str]:
    """Return the rules of a sequence in which the parts that are not required may be left out.

    {name}x{i} is the rest of the sequence from part i on if no part came before it, {name}y{i} if one did.
    """
    separator = f"{json.dumps(between)} " if between else ""
    rules = []
    for index, (part, required) in enumerate(parts):
        for state, before in (("x", ""), ("y", separator)):
            rest = f"{before}{part} {name}y{index + 1}"
            rules.append(
                f"{name}{state}{index}: {rest}" + ("" if required else f" | {name}{state}{index + 1}")
            )
    return [*rules, f'{name}x{len(parts)}: ""', f'{name}y{len(parts)}: ""']


def _python_parameter(key: str, schema: Schema, reference: str) -> tuple[str, dict[str, Any]]:
    return f"{json.dumps(f'{key}=')} @{reference}", {reference: _within(schema, key)}


def _xml_parameter(key: str, schema: Schema, reference: str) -> tuple[str, dict[str, Any]]:
    head = json.dumps(f"<parameter={key}>\n")
    if value_types(schema, key) != {"string"}:
        tail = json.dumps("\n</parameter>\n")
        return f"{head} @{reference} {tail}", {reference: _within(schema, key)}
    node = resolved(schema["properties"][key], schema)
    values = [node["const"]] if "const" in node else node.get("enum")
    if set(node) - _TEXT_KEYS:
        raise NotExpressible(f"{min(set(node) - _TEXT_KEYS)} of the string {key!r} cannot be followed")
    if values is None:
        return f"{head} value", {}
    texts = " | ".join(json.dumps(f"{value}\n</parameter>\n") for value in values)
    return f"{head} ({texts})", {}


def _within(schema: Schema, key: str) -> Any:
    """Return the schema of one property, with the definitions that it may refer to."""
    node = schema["properties"][key]
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return {**definitions, **node} if isinstance(node, dict) else node
