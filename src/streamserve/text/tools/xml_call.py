"""Incremental parser of one tool call in XML-like tags. The arguments become JSON according to their
schemas."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from streamserve.text.tools.literals import BLANKS, literal
from streamserve.text.tools.values import ValueBounds, ValueReader, begins, escaped

FUNCTION, OPENING, BETWEEN, CLOSING, END = "<function=", "<parameter=", ">", "</parameter>", "</function>"
MAX_REFERENCES = 8
"""Maximum number of references of a schema that are followed, one after the other."""
_KEY = r"[^<>\r\n]{1,256}"
PARTIAL_PARAMETER = re.compile(f"{OPENING}({_KEY})?")
PARAMETER = re.compile(f"{OPENING}({_KEY}){BETWEEN}")
_TYPES = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}


class XmlCall:
    """Parses the text after `<function=NAME>`: parameters, then `</function>`.

    A line break after the tag of a parameter and another before its end are not part of its value. A value
    that may only be a string is available while it is written. Any other value is available at its end: as a
    literal if the parameter may have the literal's type, else as a string. Of a repeated parameter, the first
    value counts. `marks` are the marks of the format: the call ends at one of them, or where it cannot
    continue. It is not known to be a call before its first parameter or its end.
    """

    def __init__(self, name: str, schema: Mapping[str, Any], marks: Sequence[str] = ()) -> None:
        self.text = ""
        self.name: str | None = None
        self.arguments = ""
        self.done = self.broken = False
        self._called = name
        self._schema = schema
        self._marks = tuple(mark for mark in marks if mark not in (CLOSING, END))
        self._keys: set[str] = set()
        self._types: frozenset[str] = frozenset()
        self._value: ValueReader | None = None
        self._begun = False
        self._held = ""
        self._muted = False

    def feed(self, text: str, final: bool = False) -> int:
        """Parse up to the end of the call, to text that cannot be part of it, or to text whose meaning is not
        known yet.

        Returns the number of parsed characters.
        """
        at = 0
        while at < len(text) and not self.done and not self.broken:
            after = self._step(text, at, final)
            if after is None:
                break
            at = after
        self.text += text[:at]
        if final and not self.done and not self.broken:
            if self._value is not None:
                self._end_value()
            self._end_call()
        return at

    def _step(self, text: str, at: int, final: bool) -> int | None:
        """Read on from the index `at`, and return the index after the read part; None to wait for more
        text."""
        if self._value is not None:
            return self._read_value(self._value, text, at, final)
        if text[at] in BLANKS:
            return at + 1
        again = () if self._keys else (f"{FUNCTION}{self._called}{BETWEEN}",)
        tag = next((tag for tag in (CLOSING, END, *again) if text.startswith(tag, at)), None)
        if tag == END:
            self._end_call()
        if tag is not None:
            return at + len(tag)
        parameter = PARAMETER.match(text, at)
        if parameter is not None:
            self._begin_value(parameter[1])
            return parameter.end()
        partial = PARTIAL_PARAMETER.match(text, at)
        whole = partial is not None and partial.end() == len(text)
        again_begins = begins(text, at, again, final)
        interrupted = begins(text, at, (*self._marks, CLOSING, END, OPENING), final)
        if not final and (again_begins is None or interrupted is None or whole):
            return None
        if (interrupted and partial is None) or self.name is not None:
            self._end_call()
        else:
            self.broken = True
        return at

    def _end_call(self) -> None:
        self.name, self.done = self._called, True
        self.arguments += "}" if self.arguments else "{}"

    def _begin_value(self, key: str) -> None:
        self.name, self._muted = self._called, key in self._keys
        self._keys.add(key)
        self._types = value_types(self._schema, key)
        self._value, self._begun, self._held = ValueReader(self._bounds(key)), False, ""
        self._write(f'{", " if self.arguments else "{"}"{escaped(key)}": ')
        self._write('"' if self._types == {"string"} else "")

    def _read_value(self, value: ValueReader, text: str, at: int, final: bool) -> int | None:
        end = value.read(text, at, final)
        written = value.output
        if written and not self._begun:
            written, self._begun = written.removeprefix("\\n"), True
        if self._types == {"string"}:
            self._write(written)
        else:
            self._held += written
        if value.done:
            self._end_value()
        return end if end > at or value.done else None

    def _end_value(self) -> None:
        self._value = None
        if self._types == {"string"}:
            self._write('"')
        else:
            self._write(typed(json.loads(f'"{self._held}"'), self._types))

    def _write(self, text: str) -> None:
        if not self._muted:
            self.arguments += text

    def _bounds(self, key: str) -> ValueBounds:
        properties = self._schema.get("properties")
        following = frozenset(properties) - self._keys if isinstance(properties, Mapping) else None
        return _bounds(key, following, self._marks)


@lru_cache(maxsize=64)
def _bounds(key: str, following: frozenset[str] | None, marks: tuple[str, ...]) -> ValueBounds:
    """Return what ends the value of `key`: `following` are the parameters that may be next, None for any."""
    if following is None:
        begin = f"\n{OPENING}{_KEY}{BETWEEN}"
    else:
        names = "|".join(map(re.escape, sorted(following)))
        begin = f"\n{OPENING}(?:{names}){BETWEEN}" if names else ""
    return ValueBounds(
        _forms(CLOSING),
        follows=(OPENING, END, *marks),
        stops=tuple(form for mark in (END, *marks) for form in _forms(mark)),
        limits=(OPENING,),
        next=begin,
        tail=f"\n(?:{_partial(OPENING, f'(?:{_KEY})?')})?",
        again=_forms(f"{OPENING}{key}{BETWEEN}"),
    )


def _forms(mark: str) -> tuple[str, str]:
    return f"\n{mark}", mark


def _partial(mark: str, after: str) -> str:
    """Return the pattern of a beginning of `mark`, or of it and `after`."""
    pattern = after
    for sign in reversed(mark[1:]):
        pattern = f"(?:{sign}{pattern})?"
    return mark[0] + pattern


def value_types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """Return the JSON types that the property `key` may have: a string if the schema does not define it.

    The result is empty if the schema does not limit the types.
    """
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or key not in properties:
        return frozenset({"string"})
    return _types(properties[key], schema, MAX_REFERENCES)


def resolved(node: Any, root: Mapping[str, Any]) -> Any:
    """Return the definition in `root` that a schema refers to, directly or as the only element of its
    `allOf`. Return the schema itself if it has no reference.

    None for a reference that cannot be resolved.
    """
    for _ in range(MAX_REFERENCES):
        parts = node.get("allOf") if isinstance(node, Mapping) else None
        if isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], Mapping):
            node = {**{key: value for key, value in node.items() if key != "allOf"}, **parts[0]}
        reference = node.get("$ref") if isinstance(node, Mapping) else None
        path = reference.split("/", 2) if isinstance(reference, str) else []
        if len(path) != 3 or path[0] != "#" or path[1] not in ("$defs", "definitions"):
            return node
        defined = root.get(path[1])
        node = defined.get(path[2]) if isinstance(defined, Mapping) else None
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
    parts = node.get("allOf")
    if isinstance(parts, list):
        limited = [types for part in parts if (types := _types(part, root, depth - 1))]
        return frozenset.intersection(*limited) if limited else frozenset()
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
