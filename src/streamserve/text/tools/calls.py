"""Incremental parsers of one tool call, by the syntax of its format.

json    {"name": "f", "arguments": {"city": "Rome"}}                          (json_call.py)
named   f{"city": "Rome"}, with markers before the arguments                  (json_call.py)
python  f(city="Rome")
gemma   call:f{city:<escape>Rome<escape>}
xml     <function=f><parameter=city>Rome</parameter></function>               (xml_call.py)
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from streamserve.text.tools.json_call import JsonCall
from streamserve.text.tools.literals import LiteralReader
from streamserve.text.tools.xml_call import XmlCall

Syntax = Literal["json", "named", "python", "gemma", "xml"]
Schema = Mapping[str, Any]

ESCAPE = "<escape>"
"""The marker before and after strings in FunctionGemma's calls."""
CALL_ID, ARGUMENTS = "[CALL_ID]", "[ARGS]"
"""The markers that may follow the name in Mistral's calls: the first before an id, the second before
arguments."""

_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_ID = re.compile(r"[A-Za-z0-9]{0,64}")
_BLANKS = re.compile(r"\s{0,64}")


class CallParser(Protocol):
    """Parses one call.

    `text` is the text parsed so far, `arguments` the known part of the arguments as JSON text. `name` is None
    until the text is known to be a call. If the text cannot be a call, `broken` is set, and `rest` is the end
    of the text that is not in the arguments.
    """

    text: str
    name: str | None
    arguments: str
    rest: str
    done: bool
    broken: bool

    def feed(self, text: str) -> int:
        """Parse up to the end of the call, or to a character that cannot be part of it.

        Returns the number of parsed characters.
        """

    def finish(self) -> None:
        """Complete the arguments as far as possible at the end of the text."""


class LiteralCall:
    """Parses a call after its name and opening bracket, with literals that are converted to JSON."""

    def __init__(self, name: str, reader: LiteralReader) -> None:
        self.text = ""
        self.name: str | None = None
        self.arguments = ""
        self.rest = ""
        self.done = self.broken = False
        self._called = name
        self._reader = reader

    def feed(self, text: str) -> int:
        for count, sign in enumerate(text):
            if self.done or self.broken:
                return count
            consumed = self._reader.feed(sign)
            self.text += sign if consumed else ""
            self.rest += sign if consumed else ""
            self._update()
            if not consumed:
                self.broken = True
                return count
        return len(text)

    def finish(self) -> None:
        self._reader.finish()
        self._update()

    def _update(self) -> None:
        """Take over the reader's state. The first key, or the end, shows that the text is a call."""
        reader = self._reader
        if reader.done or ": " in reader.output:
            self.name = self._called
        if len(reader.output) > len(self.arguments):
            self.arguments, self.rest = reader.output, ""
        self.done = reader.done
        self.broken = reader.broken


@dataclass(frozen=True)
class CallHead:
    """The beginning of a call: its length in characters, syntax and name. Without a name, the JSON object has
    it."""

    length: int
    syntax: Syntax
    name: str | None = None


def find_head(text: str, syntaxes: tuple[Syntax, ...], final: bool) -> CallHead | Literal["undecided"] | None:
    """Return the head of the call that `text` begins with; None if it begins with no call.

    Returns "undecided" if that depends on more text, unless `text` is the `final` text.
    """
    undecided = False
    for syntax in syntaxes:
        end, name = _head(text, syntax)
        if end is None:
            undecided = True
        elif end >= 0:
            return CallHead(end, syntax, name)
    return "undecided" if undecided and not final else None


def begin_call(head: CallHead, schemas: Mapping[str, Schema], named: str | None) -> CallParser:
    """Return a parser of the call with this head. With `named`, the text is only the arguments of that
    tool."""
    if head.name is None or head.syntax in ("json", "named"):
        return JsonCall(head.name or named)
    if head.syntax == "xml":
        return XmlCall(head.name, schemas.get(head.name, {}))
    if head.syntax == "python":
        return LiteralCall(head.name, LiteralReader(keywords=True))
    reader = LiteralReader(ESCAPE)
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


def _after_separators(text: str, end: int) -> int | None:
    """Return the end of an optional id, an optional separator and whitespace; None if more text decides."""
    for mark, content in ((CALL_ID, _ID), (ARGUMENTS, _BLANKS)):
        if text.startswith(mark, end):
            match = content.match(text, end + len(mark))
            end = match.end() if match else end
        elif mark.startswith(text[end:]):
            return None
    match = _BLANKS.match(text, end)
    return match.end() if match else end
