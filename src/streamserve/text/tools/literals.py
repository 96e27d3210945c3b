"""Incremental conversion of Python literals, and of similar literals in other languages, to JSON text."""

import json
import re
from dataclasses import dataclass
from typing import Protocol

_BLANKS = " \t\r\n"
_KEY = re.compile(r"[\w.$-]")
_SCALAR = re.compile(r"[\w.+-]")
_MAX_SCALAR = 1024
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "None": "null", "True": "true", "False": "false"}
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\\": "\\", "'": "'",
    '"': '"', "/": "/", "\n": "",
}  # fmt: skip
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


def escaped(text: str) -> str:
    """Return `text` as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def json_scalar(token: str) -> str | None:
    """Return a number, a truth value or null as JSON; None for any other `token`."""
    if token in _WORDS or _NUMBER.fullmatch(token):
        return _WORDS.get(token, token)
    try:
        number: float = int(token, 0)
    except ValueError:
        try:
            number = float(token)
        except ValueError:
            return None
    finite = number - number == 0 if isinstance(number, float) else True
    return json.dumps(number) if finite else None


class _String(Protocol):
    """Reads a string after its first quote. `output` is the new part, as the inside of a JSON string."""

    output: str
    done: bool
    broken: bool

    def feed(self, sign: str) -> bool:
        """Read a character. Returns False if the string ended before the character."""


class _QuotedString:
    """Reads a Python string in quotes of one or three characters. JSON's strings have this form, too."""

    def __init__(self, quote: str) -> None:
        self.output = ""
        self.done = self.broken = False
        self._quote = quote
        self._end = ""  # one quote or three; empty until that is known
        self._quotes = 1
        self._escape: str | None = None

    def feed(self, sign: str) -> bool:
        self.output = ""
        if not self._end and not self._opened(sign):
            return not self.done
        if self._escape is not None:
            self._read_escape(sign)
        elif sign == self._quote:
            self._quotes += 1
            self.done = self._quotes == len(self._end)
        else:
            self.output, self._quotes = escaped(self._quote * self._quotes), 0
            if sign == "\\":
                self._escape = ""
            else:
                self.output += escaped(sign)
        return True

    def _opened(self, sign: str) -> bool:
        """Return whether the opening quotes are complete and `sign` follows them. Two quotes are an empty
        string."""
        if sign == self._quote:
            self._quotes += 1
            if self._quotes == 3:
                self._end, self._quotes = self._quote * 3, 0
            return False
        self.done = self._quotes == 2  # an empty string
        self._end, self._quotes = self._quote, 0
        return not self.done

    def _read_escape(self, sign: str) -> None:
        self._escape = f"{self._escape}{sign}"
        kind, digits = self._escape[0], self._escape[1:]
        if kind in _HEX_DIGITS and len(digits) < _HEX_DIGITS[kind]:
            self.broken = bool(digits.strip("0123456789abcdefABCDEF"))
            return
        self._escape = None
        if kind not in _HEX_DIGITS:
            self.output = escaped(_ESCAPES.get(kind, "\\" + kind))
        elif digits.strip("0123456789abcdefABCDEF") or int(digits, 16) > 0x10FFFF:
            self.broken = True
        else:  # JSON can escape half of a surrogate pair, too
            number = int(digits, 16)
            self.output = f"\\u{number:04x}" if number < 0x10000 and kind != "U" else escaped(chr(number))


class _MarkedString:
    """Reads a string that ends with `mark` and has no escapes, after the first character of its opening
    `mark`."""

    def __init__(self, mark: str) -> None:
        self.output = ""
        self.done = self.broken = False
        self._mark = mark
        self._opening = mark[1:]
        self._held = ""

    def feed(self, sign: str) -> bool:
        self.output = ""
        if self._opening:
            self.broken = not self._opening.startswith(sign)
            self._opening = self._opening[1:]
            return not self.broken
        self._held += sign
        while self._held and not self._mark.startswith(self._held):
            self.output, self._held = self.output + self._held[0], self._held[1:]
        self.output = escaped(self.output)
        self.done = self._held == self._mark
        return True


@dataclass(frozen=True)
class _Container:
    """A list or an object: its end, its end in JSON, and the sign that follows a key (empty in a list)."""

    end: str
    json_end: str
    after_key: str = ""


_LIST = _Container("]", "]")
_TUPLE = _Container(")", "]")
_OBJECT = _Container("}", "}", ":")
_KEYWORDS = _Container(")", "}", "=")
_CONTAINERS = {"[": _LIST, "(": _TUPLE, "{": _OBJECT}


class LiteralReader:
    """Converts one literal to JSON, character by character: `output` is the JSON text so far.

    With a `mark`, strings begin and end with it, and keys have no quotes. With `keywords`, the literal is the
    arguments of a Python call, after their opening bracket.
    """

    def __init__(self, mark: str = "", keywords: bool = False) -> None:
        self.output = "{" if keywords else ""
        self.done = self.broken = False
        self._mark = mark
        self._containers = [_KEYWORDS] if keywords else []
        self._expects = "first" if keywords else "value"  # first, value, element, key, key's end, comma
        self._separator = ""  # of the next value, if there is one
        self._token = ""
        self._string: _String | None = None

    @property
    def _inner(self) -> _Container | None:
        return self._containers[-1] if self._containers else None

    @property
    def _bare_key(self) -> bool:
        """Whether a key without quotes comes next."""
        key = self._inner is not None and self._inner.after_key and self._expects in ("first", "key")
        return bool(key and (self._mark or self._inner == _KEYWORDS))

    def feed(self, sign: str) -> bool:
        """Read a character. Returns False if the literal ended before the character."""
        if self._string is not None:
            if self._read_string(self._string, sign):
                return True
        elif self._token and (_KEY if self._bare_key else _SCALAR).match(sign):
            self._token += sign
            self.broken = len(self._token) > _MAX_SCALAR
            return not self.broken
        self.finish()
        if not self.done and not self.broken and sign not in _BLANKS:
            self.broken = not self._read(sign)
            return not self.broken
        return not self.done and not self.broken

    def finish(self) -> None:
        """End a number or a word, whose end no sign marks."""
        token, self._token = self._token, ""
        if not token:
            return
        converted = f'"{escaped(token)}"' if self._bare_key else json_scalar(token)
        self.broken = converted is None
        if converted is not None:
            self._begin(converted)
            self._end_value()

    def _read_string(self, string: _String, sign: str) -> bool:
        consumed = string.feed(sign)
        self.output += string.output
        self.broken = string.broken
        if string.done:
            self.output += '"'
            self._string = None
            self._end_value()
        return consumed and not self.broken

    def _begin(self, text: str) -> None:
        self.output += self._separator + text
        self._separator = ""

    def _end_value(self) -> None:
        if self._inner is None:
            self.done = True
        elif self._inner.after_key and self._expects in ("first", "key"):
            self._expects = "key's end"
        else:
            self._expects = "comma"

    def _read(self, sign: str) -> bool:
        """Read a character between values. Returns False if it cannot be there."""
        inner = self._inner
        if inner is not None and sign == inner.end and self._expects not in ("value", "key's end"):
            self._separator = ""
            self.output += inner.json_end
            self._containers.pop()
            self._expects = "value"
            self._end_value()
            return True
        if self._expects == "comma" and sign == ",":
            assert inner is not None
            self._separator = ", "
            self._expects = "key" if inner.after_key else "element"
            return True
        if self._expects == "key's end" and inner is not None and sign == inner.after_key:
            self.output += ": "
            self._expects = "value"
            return True
        return self._expects not in ("comma", "key's end") and self._begin_value(sign)

    def _begin_value(self, sign: str) -> bool:
        key = self._inner is not None and self._inner.after_key and self._expects in ("first", "key")
        if self._mark and sign == self._mark[0] and not self._bare_key:
            self._string = _MarkedString(self._mark)
        elif sign in "'\"" and not self._mark and not self._bare_key:
            self._string = _QuotedString(sign)
        elif (_KEY if key else _SCALAR).match(sign) and (not key or self._bare_key):
            self._token = sign
            return True
        elif sign in _CONTAINERS and not key:
            self._begin("{" if sign == "{" else "[")
            self._containers.append(_CONTAINERS[sign])
            self._expects = "first"
            return True
        else:
            return False
        self._begin('"')
        return True


def literal(text: str) -> str | None:
    """Return the JSON text of a literal; None if `text` is not a literal."""
    reader = LiteralReader()
    for sign in text:
        if not reader.feed(sign) and not (reader.done and sign in _BLANKS):
            return None
    reader.finish()
    return None if reader.broken or not reader.done else reader.output
