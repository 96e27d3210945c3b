"""Incremental parsers of one tool call, by the syntax of its format.

json    {"name": "f", "arguments": {"city": "Rome"}}                          (json_call.py)
named   f{"city": "Rome"}, with markers before the arguments                  (json_call.py)
python  f(city="Rome")
gemma   call:f{city:<escape>Rome<escape>}
xml     <function=f><parameter=city>Rome</parameter></function>               (xml_call.py)
"""

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from streamserve.text.tools.json_call import JsonCall
from streamserve.text.tools.literals import LiteralReader
from streamserve.text.tools.values import begins
from streamserve.text.tools.xml_call import OPENING, PARAMETER, PARTIAL_PARAMETER, XmlCall

Syntax = Literal["json", "named", "python", "gemma", "xml"]
Schema = Mapping[str, Any]

ESCAPE = "<escape>"
"""The marker before and after strings in FunctionGemma's calls."""
CALL_ID, ARGUMENTS = "[CALL_ID]", "[ARGS]"
"""The markers that may follow the name in Mistral's calls: the first before an id, the second before
arguments."""

PREFIX = "functions."
"""The namespace of tools in harmony's prompts, which models also write in other formats."""

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_ID = re.compile(r"[A-Za-z0-9]{0,64}")
_BLANKS = re.compile(r"\s{0,64}")


class CallParser(Protocol):
    """Parses one call.

    `text` is the text parsed so far, `arguments` the known part of the arguments as JSON text. `name` is None
    until the text is known to be a call. If the text cannot be a call, `broken` is set; a text that is known
    to be a call is never broken: whatever follows, its arguments are JSON when it is `done`.
    """

    text: str
    name: str | None
    arguments: str
    done: bool
    broken: bool

    def feed(self, text: str, final: bool = False) -> int:
        """Parse up to the end of the call, to text that cannot be part of it, or to text whose meaning is not
        known yet.

        Returns the number of parsed characters. The `final` text completes the call.
        """


class LiteralCall:
    """Parses a call after its name and opening bracket, with literals that are converted to JSON."""

    def __init__(self, name: str, reader: LiteralReader) -> None:
        self.text = ""
        self.name: str | None = None
        self.arguments = ""
        self.done = self.broken = False
        self._called = name
        self._reader = reader

    def feed(self, text: str, final: bool = False) -> int:
        end = self._reader.feed(text, final)
        self.text += text[:end]
        self.arguments, self.done = self._reader.output, self._reader.done
        self.broken = self._reader.broken or (final and not self.done)
        self.name = self._called if self._reader.begun else None
        return end


@dataclass(frozen=True)
class CallHead:
    """The beginning of a call: its length in characters, syntax and name. Without a name, the JSON object has
    it."""

    length: int
    syntax: Syntax
    name: str | None = None


def tool_called(name: str | None, tools: Container[str]) -> str | None:
    """Return the tool that a model calls as `name`, which may have the prefix `functions.`; None if there is
    none."""
    return next((tool for tool in (name, (name or "").removeprefix(PREFIX)) if tool and tool in tools), None)


def unopened_heads(syntaxes: Sequence[Syntax], tools: Iterable[str], closed: bool) -> tuple[str, ...]:
    """Return the texts with which a call begins whose opening mark is missing.

    Such a call can be told from other text only if calls are `closed` by a mark, or have a separator.
    """
    forms: dict[str, tuple[str, ...]] = {"named": (f"%s{CALL_ID}", f"%s{ARGUMENTS}")}
    if closed:
        objects = tuple(f'{list}{{"name":{blank}"%s"' for list in ("", "[") for blank in (" ", ""))
        forms |= {"json": objects, "python": ("%s(",), "gemma": ("call:%s{",)}
    names = [name for tool in tools for name in (tool, PREFIX + tool)]
    return tuple(form % name for syntax in syntaxes for form in forms.get(syntax, ()) for name in names)


def find_head(
    text: str, syntaxes: tuple[Syntax, ...], schemas: Mapping[str, Schema], final: bool
) -> CallHead | Literal["undecided"] | None:
    """Return the head of the call that `text` begins with; None if it begins with no call.

    Returns "undecided" if that depends on more text, unless `text` is the `final` text.
    """
    undecided = False
    for syntax in syntaxes:
        end, name = _head(text, syntax)
        if end == -1 and syntax == "xml":
            end, name = _unnamed_head(text, schemas)
        if end is None:
            undecided = True
        elif end >= 0:
            return CallHead(end, syntax, name)
    return "undecided" if undecided and not final else None


def begin_call(
    head: CallHead, schemas: Mapping[str, Schema], named: str | None, marks: Sequence[str]
) -> CallParser:
    """Return a parser of the call with this head. With `named`, the text is only the arguments of that tool.
    `marks` are the marks around calls."""
    if head.name is None or head.syntax in ("json", "named"):
        return JsonCall(head.name or named, marks)
    schema = schemas.get(tool_called(head.name, schemas) or "", {})
    if head.syntax == "xml":
        return XmlCall(head.name, schema, marks)
    if head.syntax == "python":
        return LiteralCall(head.name, LiteralReader(keywords=True, lenient="after_key", marks=marks))
    reader = LiteralReader(ESCAPE, lenient="after_key", marks=marks, keys=_keys(schema))
    reader.feed("{")
    return LiteralCall(head.name, reader)


def _head(text: str, syntax: Syntax) -> tuple[int | None, str | None]:
    """Return the length of the head and the name. The length is -1 without a head, None if more text
    decides."""
    if syntax == "json":
        return (0 if text.startswith("{") else -1), None
    before, after = {"xml": ("<function=", ">"), "gemma": ("call:", "{"), "python": ("", "(")}.get(
        syntax, ("", "{")
    )
    if not text.startswith(before):
        return (None if before.startswith(text) else -1), None
    match = _NAME.match(text, len(before))
    if match is None:
        return (None if len(text) == len(before) else -1), None
    end = _after_separators(text, match.end()) if syntax == "named" else match.end()
    if end is None or end == len(text):
        return None, None
    if not text.startswith(after, end):
        return -1, None
    return (end if syntax == "named" else end + len(after)), match[0]


def _unnamed_head(text: str, schemas: Mapping[str, Schema]) -> tuple[int | None, str | None]:
    """Return the head of a call in tags without its name, like `_head`: it calls the one tool that has the
    first parameter."""
    parameter = PARAMETER.match(text)
    if parameter is None:
        return (None if PARTIAL_PARAMETER.fullmatch(text) or OPENING.startswith(text) else -1), None
    names = [name for name, schema in schemas.items() if parameter[1] in _keys(schema)]
    return (0, names[0]) if len(names) == 1 else (-1, None)


def _keys(schema: Schema) -> tuple[str, ...]:
    properties = schema.get("properties")
    return tuple(properties) if isinstance(properties, Mapping) else ()


def _after_separators(text: str, end: int) -> int | None:
    """Return the end of an id, separators and blanks, in any number; None if more text decides."""
    while True:
        end = _match_end(_BLANKS, text, end)
        mark = next((mark for mark in (CALL_ID, ARGUMENTS) if text.startswith(mark, end)), None)
        if mark is None:
            return None if begins(text, end, (CALL_ID, ARGUMENTS), False) is None else end
        end = _match_end(_ID if mark == CALL_ID else _BLANKS, text, end + len(mark))


def _match_end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at
