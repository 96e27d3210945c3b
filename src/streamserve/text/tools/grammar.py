"""Grammar of messages that may call tools: free text, then calls with arguments that match their schemas."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from streamserve.protocol.grammar import Grammar
from streamserve.text.tools.formats import Format
from streamserve.text.tools.native import NotExpressible, native_rules

Schema = dict[str, Any]

_TEXT = r"/(.|\n)*/"


def free_calls(
    format: Format,
    schemas: Mapping[str, Schema],
    special: Callable[[str], int | None],
    thought: str = "",
    answer: Schema | None = None,
) -> Grammar:
    """Return a grammar of text, then optionally calls in `format`, which end the message.

    With `answer`, a message has either calls and no text, or a JSON text that matches this schema. `schemas`
    maps each function's name to the schema of its arguments; `special` returns the id of a marker, or None if
    the marker is not a special token. `thought` is the opening tag of the model's reasoning, with which text
    may not begin: reasoning may mention calls without making one. Raises NotExpressible for a schema that
    calls in this format cannot follow.
    """
    if not format.calls:
        raise NotExpressible("calls in this model's format cannot be constrained")

    def mark(sign: str) -> str:
        token = special(sign)
        return json.dumps(sign) if token is None else f"<[{token}]>"

    opening, closing = format.openings[0], next(iter(format.closings), "")
    signs = {"opening": mark(opening), "closing": mark(closing), "separator": mark(format.separator)}
    lazy = "[lazy]" if special(opening) is None else ""  # up to the first opening
    calls = f"opened calls{' | calls' if format.bare else ''}"
    no_thought = rf" & ~/[ \r\n\t]*{re.escape(thought)}(.|\n)*/" if thought else ""
    text = f"TEXT: {_text_without_call(format, special)}{no_thought}"
    free = [f"start: TEXT | {calls}", f"opened{lazy}: TEXT {signs['opening']}", text]
    formatted = [f"start: @answer | {calls}", f"opened: BLANKS {signs['opening']}"]
    rules = [
        *(free if answer is None else formatted),
        f"calls: {format.calls.format(**signs)}",
        r"BLANKS: /[ \r\n\t]{0,8}/",
    ]
    written, named = _call_rules(format, schemas, signs["separator"])
    named |= {} if answer is None else {"answer": answer}
    lark = "\n".join([*rules, *written])
    return Grammar(kind="lark_json", text=json.dumps({"lark": lark, "schemas": named}))


def _call_rules(
    format: Format, schemas: Mapping[str, Schema], separator: str
) -> tuple[list[str], dict[str, Any]]:
    """Return the rules that the format's `calls` refer to, and the JSON schemas."""
    rules: list[str] = []
    named: dict[str, Any] = {}
    if "@call" in format.calls:
        named["call"] = calls_schema(schemas, format.key)
    if "native" in format.calls:
        rules, named = native_rules("xml" if "xml" in format.syntaxes else "python", schemas)
    if "name_first" in format.calls:
        numbered = list(enumerate(schemas))
        alternatives = [f"{json.dumps(name)} between @arguments{index}" for index, name in numbered]
        rules += ["name_first: " + " | ".join(alternatives), f"between: {separator}? BLANKS"]
        named |= {f"arguments{index}": schemas[name] for index, name in numbered}
    return rules, named


def _text_without_call(format: Format, special: Callable[[str], int | None]) -> str:
    """Return the pattern of a text without calls.

    The text may neither begin like a call without an opening, nor contain an opening other than the first
    one, because the grammar follows only the first opening.
    """
    pattern = _TEXT
    if format.bare:
        first = "".join(f"\\{sign}" for sign in format.bare)
        pattern = rf"/[ \r\n\t]*([^{first} \r\n\t](.|\n)*)?/"
    others = [mark for mark in (*format.openings[1:], *format.heads) if special(mark) is None]
    if others:
        pattern += rf" & ~/(.|\n)*({'|'.join(map(re.escape, others))})(.|\n)*/"
    return pattern


def calls_schema(schemas: Mapping[str, Schema], key: str) -> Schema:
    """Return the schema of one call as a JSON object: the name, then the arguments under `key`.

    References within a function's schema are adjusted to its new location.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, key: {"$ref": f"#/$defs/tool{index}"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for index, name in enumerate(schemas)
    ]
    definitions = {
        f"tool{index}": _moved(schema, f"#/$defs/tool{index}")
        for index, schema in enumerate(schemas.values())
    }
    return {"anyOf": calls, "$defs": definitions}


def _moved(node: Any, location: str) -> Any:
    if isinstance(node, list):
        return [_moved(item, location) for item in node]
    if not isinstance(node, dict):
        return node
    moved = {name: _moved(value, location) for name, value in node.items()}
    reference = node.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = location + reference[1:]
    return moved
