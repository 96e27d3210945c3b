"""Incremental parser of one tool call in XML-like tags. The arguments become JSON according to their
schemas."""

import json
import re
from collections.abc import Mapping
from typing import Any

from streamserve.text.tools.literals import LiteralReader, escaped, literal

OPENING, BETWEEN, CLOSING, END = "<parameter=", ">", "</parameter>", "</function>"
MAX_REFERENCES = 8
_KEY = re.compile(r"[^<>\r\n]{1,256}")
_TYPES = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}


class XmlCall:
    """Parses the text after `<function=NAME>`: parameters, then `</function>`.

    A line break after the tag of a parameter and another before its end are not part of its value. A value
    that may only be a string is available while it is written. Any other value is available at its end: as a
    literal if the parameter may have the literal's type, else as a string.
    """

    def __init__(self, name: str, schema: Mapping[str, Any]) -> None:
        self.text = ""
        self.name: str | None = name
        self.arguments = ""
        self.rest = ""
        self.done = self.broken = False
        self._schema = schema
        self._held = ""
        self._key: str | None = None
        self._types: frozenset[str] = frozenset()
        self._begun = False

    def feed(self, text: str) -> int:
        for count, sign in enumerate(text):
            if self.done or self.broken:
                return count
            self._held += sign
            before = self.arguments
            if self._key is None:
                self._read_tag()
            else:
                self._read_value()
            if self.broken:
                return count
            self.text += sign
            self.rest = "" if self.arguments != before else self.rest + sign
        return len(text)

    def finish(self) -> None:
        """Add the beginning of a value that is cut short: as a literal if it begins like one, else as a
        string."""
        if self._key is None or self.done:
            return
        if self._types == {"string"}:
            self.arguments += escaped(self._held)
        else:
            reader = LiteralReader()
            whole = all(map(reader.feed, self._held.strip()))
            reader.finish()
            self.arguments += reader.output if whole and not reader.broken else f'"{escaped(self._held)}'
        self._held = self.rest = ""

    def _read_tag(self) -> None:
        held = self._held.lstrip()
        if held == END:
            self.arguments += "}" if self.arguments else "{}"
            self.done = True
        elif held.startswith(OPENING) and held.endswith(BETWEEN):
            self._begin_value(held[len(OPENING) : -1])
        elif held.startswith(OPENING):
            key = held[len(OPENING) :]
            self.broken = bool(key) and not _KEY.fullmatch(key)
        else:
            self.broken = not OPENING.startswith(held) and not END.startswith(held)

    def _begin_value(self, key: str) -> None:
        self.broken = not _KEY.fullmatch(key)
        self._key, self._held, self._begun = key, "", False
        self._types = value_types(self._schema, key)
        self.arguments += f'{", " if self.arguments else "{"}"{escaped(key)}": '
        if self._types == {"string"}:
            self.arguments += '"'

    def _read_value(self) -> None:
        ended = self._held.endswith(CLOSING)
        value = self._held.removesuffix(CLOSING) if ended else self._held
        if not self._begun and value:
            value, self._begun = value.removeprefix("\n"), True
        if ended:
            value = value.removesuffix("\n")
            self.arguments += f'{escaped(value)}"' if self._types == {"string"} else typed(value, self._types)
            self._key, self._held = None, ""
        elif self._types == {"string"}:
            certain = len(value) - _possible_end(value)
            self.arguments += escaped(value[:certain])
            self._held = value[certain:]
        else:
            self._held = value


def value_types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """Return the JSON types that the property `key` may have: a string if the schema does not define it.

    The result is empty if the schema does not limit the types.
    """
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or key not in properties:
        return frozenset({"string"})
    return _types(properties[key], schema, MAX_REFERENCES)


def resolved(node: Any, root: Mapping[str, Any]) -> Any:
    """Return the definition in `root` that a schema refers to; without a reference the schema itself.

    None for a reference that cannot be resolved.
    """
    for _ in range(MAX_REFERENCES):
        reference = node.get("$ref") if isinstance(node, Mapping) else None
        parts = reference.split("/", 2) if isinstance(reference, str) else []
        if len(parts) != 3 or parts[0] != "#" or parts[1] not in ("$defs", "definitions"):
            return node
        defined = root.get(parts[1])
        node = defined.get(parts[2]) if isinstance(defined, Mapping) else None
    return None


def _types(node: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    node = resolved(node, root)
    if not isinstance(node, Mapping) or not depth:
        return frozenset()
    kind = node.get("type")
    if isinstance(kind, str):
        return frozenset({kind})
    if isinstance(kind, list):
        return frozenset(one for one in kind if isinstance(one, str))
    values = [node["const"]] if "const" in node else node.get("enum")
    if isinstance(values, list) and values:
        return frozenset(_type(json.dumps(value)) for value in values)
    options = node.get("anyOf") or node.get("oneOf")
    if not isinstance(options, list):
        return frozenset()
    found = [_types(option, root, depth - 1) for option in options]
    return frozenset().union(*found) if all(found) else frozenset()


def typed(value: str, types: frozenset[str]) -> str:
    """Return `value` as JSON: a literal if `types` allow it, else a string. Empty `types` allow all
    literals."""
    converted = literal(value.strip())
    kind = "" if converted is None else _type(converted)
    whole = (
        kind == "number" and "integer" in types and converted is not None and converted.lstrip("-").isdigit()
    )
    if converted is not None and (not types or kind in types or whole):
        return converted
    return f'"{escaped(value)}"'


def _type(text: str) -> str:
    """Return the type of a JSON text."""
    return _TYPES.get(text[0], "number")


def _possible_end(value: str) -> int:
    """Return the number of characters at the end of `value` that may be the beginning of its end tag."""
    sizes = range(min(len(CLOSING), len(value)), 0, -1)
    return next(
        (
            size
            for size in sizes
            if f"\n{CLOSING}".startswith(value[-size:]) or CLOSING.startswith(value[-size:])
        ),
        0,
    )
