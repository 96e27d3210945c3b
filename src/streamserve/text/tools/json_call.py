"""Incremental parser of one tool call as a JSON object: its name, and its arguments as they are generated."""

import json
from collections.abc import Sequence

from streamserve.text.tools.literals import BLANKS, LiteralReader
from streamserve.text.tools.values import begins

_ARGUMENTS = ("arguments", "parameters")
_WRAPPER = "function"


class JsonCall:
    """Parses `{"name": …, "arguments": …}`, with keys in any order; further keys are ignored.

    The object may be the value of the key `function` in another object. If the `name` is given, the object
    holds the arguments themselves. `text` is the text parsed so far. `arguments` is the known part of the
    arguments: if they are written as a string, as with some models, the content of the string. `marks` are
    the marks of the format. Once the name is known, the call ends where the text can no longer be a call.
    """

    def __init__(self, name: str | None = None, marks: Sequence[str] = ()) -> None:
        self.text = ""
        self.name = name
        self.arguments = ""
        self.done = False
        self.broken = False
        self._marks = marks
        self._depth = 0
        self._expects = "object" if name is None else "value"  # object, key, colon, value, comma
        self._key = _ARGUMENTS[0] if name is not None else ""
        self._bare = name is not None
        self._given = False  # whether the arguments are complete
        self._reader: LiteralReader | None = None
        self._quoted = False

    def feed(self, text: str, final: bool = False) -> int:
        """Parse up to the end of the object, to text that cannot be part of it, or to text whose meaning is
        not known yet.

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
            self._finish()
        return at

    def _finish(self) -> None:
        """Complete the call at the end of the text."""
        if self._reader is not None and self.name is not None:
            self._reader.close()
            self._apply(self._reader)
        self._end_call()

    def _end_call(self) -> None:
        """End the call where its closing brackets are missing."""
        self.done = self.name is not None
        self.broken = not self.done

    def _step(self, text: str, at: int, final: bool) -> int | None:
        """Read on from the index `at`, and return the index after the read part; None to wait for more
        text."""
        if self._reader is not None:
            return self._read_value(self._reader, text, at, final)
        sign = text[at]
        if sign in BLANKS:
            return at + 1
        if self._expects == "value":
            return self._begin_value(text, at)
        interrupted = begins(text, at, self._marks, final)
        if interrupted is None:
            return None
        if interrupted or not self._read_sign(sign):
            self._end_call()
            return at
        return at if self._reader is not None else at + 1

    def _read_sign(self, sign: str) -> bool:
        """Read a character between values. Returns False if it cannot be there."""
        if self._expects == "object" and sign == "{":
            self._depth, self._expects = self._depth + 1, "key"
        elif self._expects in ("key", "comma") and sign == '"' and (self._expects == "key" or self.name):
            self._expects, self._reader = "key", LiteralReader()
        elif self._expects in ("key", "comma") and sign == "}":
            self._depth, self._expects = self._depth - 1, "comma"
            self.done = not self._depth
            self.broken = self.done and self.name is None
        elif (self._expects, sign) == ("colon", ":"):
            self._expects = "value"
        elif (self._expects, sign) == ("comma", ","):
            self._expects = "key"
        else:
            return False
        return True

    def _begin_value(self, text: str, at: int) -> int:
        if self._key == _WRAPPER and text[at] == "{" and self._depth == 1 and self.name is None:
            self._expects = "object"
            return at
        known = self._key in _ARGUMENTS or self.name is not None
        self._quoted = text[at] in "'\""
        self._reader = LiteralReader(lenient="always" if known else "never", marks=self._marks)
        if self._bare and text[at] != "{":
            self.broken = True
        return at

    def _read_value(self, reader: LiteralReader, text: str, at: int, final: bool) -> int | None:
        end = at + reader.feed(text[at:], final)
        self._apply(reader)
        return end if end > at or reader.done or reader.broken else None

    def _apply(self, reader: LiteralReader) -> None:
        """Apply what a reader has read so far. Arguments in a string are applied at the string's end."""
        value = self._expects == "value"
        if value and self._key in _ARGUMENTS and not self._given:
            if not self._quoted and not reader.output.startswith("n"):
                self.arguments = reader.output
            elif reader.done:
                self.arguments = _content(reader.output)
        self.broken = reader.broken
        if reader.broken or not reader.done:
            return
        self._reader = None
        if not value:
            self._key, self._expects = _text(reader.output) or "", "colon"
            return
        if self._key == "name" and self.name is None:
            self.name = _text(reader.output)
            self.broken = self.name is None
        self._given |= self._key in _ARGUMENTS
        self._expects, self.done = "comma", self._bare


def _text(value: str) -> str | None:
    """Return the text of a JSON string; None for other values."""
    text: str | None = json.loads(value) if value.startswith('"') else None
    return text


def _content(value: str) -> str:
    """Return the arguments that a JSON string contains; the string itself if it does not contain an object;
    an empty object for null."""
    content = _text(value)
    if content is None:
        return "{}"
    if not content.lstrip(BLANKS).startswith("{"):
        return value
    reader = LiteralReader(lenient="always")
    reader.feed(content, final=True)
    return reader.output
