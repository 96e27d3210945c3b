"""Grammar of messages that may call tools: free text, then calls with arguments that match their schemas."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from streamserve.protocol.grammar import BLANKS, Grammar
from streamserve.text.tools.custom_text import BLANK, WrittenText
from streamserve.text.tools.formats import Format, NotExpressible
from streamserve.text.tools.native import native_rules

Schema = dict[str, Any]

_TEXT = r"/(.|\n)*/"


def free_calls(
    format: Format,
    schemas: Mapping[str, Schema],
    special: Callable[[str], int | None],
    thought: str = "",
    answer: Schema | None = None,
    texts: Mapping[str, WrittenText] | None = None,
) -> Grammar:
    """Return a grammar of text, then optionally calls in `format`, which end the message.

    With `answer`, a message has either calls and no text, or a JSON text that matches this schema. `schemas`
    maps each function's name to the schema of its arguments, and `texts` the names of custom tools to the
    grammars of their inputs. `special` returns the id of a marker, or None if the marker is not a special
    token. `thought` is the opening tag of the model's reasoning, with which text may not begin: reasoning may
    mention calls without making one. Raises NotExpressible for a schema that calls in this format cannot
    follow.
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
        f"calls: {(format.calls.replace('@call', 'call') if texts else format.calls).format(**signs)}",
        r"BLANKS: /[ \r\n\t]{0,8}/",
    ]
    written, named = _call_rules(format, schemas, signs["separator"], texts or {})
    named |= {} if answer is None else {"answer": answer}
    return _grammar([*rules, *written], named, texts or {})


def required_calls(
    schemas: Mapping[str, Schema], texts: Mapping[str, WrittenText], key: str, max_calls: int
) -> Grammar:
    """Return the grammar of a JSON list of up to `max_calls` calls, with their arguments under `key`."""
    more = f'({BLANK} "," {BLANK} call){{0,{max_calls - 1}}}' if max_calls > 1 else ""
    rules, named = _json_calls(schemas, texts, key)
    start = f'start: "[" {BLANK} call {more} {BLANK} "]"'
    return _grammar([start, *rules, *_text_rules(texts)], named, texts)


def one_text(text: WrittenText) -> Grammar:
    """Return the grammar of the arguments of a custom tool as a JSON object."""
    return _grammar([f"start: {text.json_object}", *_text_rules({"": text})], {}, {"": text})


def _grammar(rules: list[str], schemas: dict[str, Any], texts: Mapping[str, WrittenText]) -> Grammar:
    grammars = {name: lark for text in texts.values() for name, lark in text.grammars.items()}
    parts = {"lark": "\n".join(rules), "schemas": schemas, **({"grammars": grammars} if grammars else {})}
    return Grammar(kind="lark_json", text=json.dumps(parts))


def _text_rules(texts: Mapping[str, WrittenText]) -> list[str]:
    """Return the rules that the texts refer to."""
    own = [rule for text in texts.values() for rule in text.rules]
    return [*own, f"{BLANK}: /{BLANKS}/"] if texts else []


def _call_rules(
    format: Format, schemas: Mapping[str, Schema], separator: str, texts: Mapping[str, WrittenText]
) -> tuple[list[str], dict[str, Any]]:
    """Return the rules that the format's `calls` refer to, and the JSON schemas."""
    rules = _text_rules(texts)
    named: dict[str, Any] = {}
    if "@call" in format.calls and texts:
        written, named = _json_calls(schemas, texts, format.key)
        rules += written
    elif "@call" in format.calls:
        named["call"] = calls_schema(schemas, format.key)
    if "native" in format.calls:
        written, named = native_rules("xml" if "xml" in format.syntaxes else "python", schemas, texts)
        rules += written
    if "name_first" in format.calls:
        arguments, used = _arguments(schemas, texts)
        alternatives = [f"{json.dumps(name)} between {value}" for name, value in arguments.items()]
        rules += ["name_first: " + " | ".join(alternatives), f"between: {separator}? BLANKS"]
        named |= used
    return rules, named


def _json_calls(
    schemas: Mapping[str, Schema], texts: Mapping[str, WrittenText], key: str
) -> tuple[list[str], dict[str, Any]]:
    """Return the rules of `call`, a call as a JSON object, and the JSON schemas. The parts that all calls
    share are rules: the parser cannot choose between JSON schemas and grammars that begin alike."""
    arguments, named = _arguments(schemas, texts)
    alternatives = [f"{json.dumps(json.dumps(name))} middle {value}" for name, value in arguments.items()]
    return [
        f'call: "{{" {BLANK} "\\"name\\"" {BLANK} ":" {BLANK} named {BLANK} "}}"',
        f'middle: {BLANK} "," {BLANK} {json.dumps(json.dumps(key))} {BLANK} ":" {BLANK}',
        "named: " + " | ".join(alternatives),
    ], named


def _arguments(
    schemas: Mapping[str, Schema], texts: Mapping[str, WrittenText]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the part of a rule for the arguments of each function as a JSON object, and the JSON schemas."""
    numbers = {name: index for index, name in enumerate(schemas) if name not in texts}
    values = {name: f"@arguments{index}" for name, index in numbers.items()}
    values |= {name: text.json_object for name, text in texts.items()}
    return values, {f"arguments{index}": schemas[name] for name, index in numbers.items()}


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
