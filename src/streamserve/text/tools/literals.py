"""Incremental conversion of JSON, Python literals, and similar literals in other languages, to JSON text."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from streamserve.text.tools.values import LOOKAHEAD, ValueBounds, ValueReader, begins, escaped

BLANKS = " \t\r\n"
_KEY = re.compile(r"[\w.$-]+")
_CALL = re.compile(r"[\w.-]+\(")
_SCALAR = re.compile(r"[\w.+-]+")
_MAX_SCALAR = 1024
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "None": "null", "True": "true", "False": "false"}
_CLOSERS = ")]}"
_AFTER_VALUE = (",", *_CLOSERS)


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


@lru_cache(maxsize=256)
def _string_bounds(
    quote: str, marks: tuple[str, ...], first: bool, marked: bool, keys: tuple[str, ...] = ()
) -> ValueBounds:
    """Return what ends a string in quotes, or between marks without escape sequences (`marked`).

    With `first`, the first closing mark ends it, whatever follows. One of the `keys` after a comma ends it if
    its closing mark is missing.
    """
    if first:
        return ValueBounds((quote,), stops=marks, escapes=not marked)
    closers, next_key = r"[)\]}][)\]}\s]{0,64}", r",\s{0,8}[\w.$-]{1,64}:"
    return ValueBounds(
        (quote,),
        follows=(*_AFTER_VALUE, "\n", *marks),
        stops=(*marks, *(f",{key}:" for key in keys)),
        next=next_key + re.escape(quote) if marked else "",
        tail=rf"{closers}|,\s{{0,8}}[\w.$-]{{0,64}}:?" if marked else closers,
        again=(quote,) if len(quote) == 1 or marked else (),
        escapes=not marked,
    )


@dataclass
class _Container:
    """A list or an object that is being read: its end, its end in JSON, and the sign that follows a key
    (empty in a list)."""

    end: str
    json_end: str
    after_key: str = ""
    filled: bool = False
    keys: set[str] = field(default_factory=set)


def _opened(sign: str) -> _Container:
    if sign == "{":
        return _Container("}", "}", ":")
    return _Container("]" if sign == "[" else ")", "]")


class LiteralReader:
    """Converts one literal to JSON: `output` is the JSON text so far.

    With a `mark`, strings begin and end with it, and keys have no quotes. With `keywords`, the literal is the
    arguments of a Python call, after their opening bracket. `marks` are the marks of the format around it,
    `keys` the keys that it may have.

    A `lenient` reader reads any text, `after_key` from the first key on: it ends at one of the marks, at
    another call's beginning, or at a bracket of the text around it; missing brackets, commas and values are
    added; other text is a string; of repeated keys, the first one counts. A reader that is not lenient is
    `broken` by text that is not a literal.
    """

    def __init__(
        self,
        mark: str = "",
        keywords: bool = False,
        lenient: Literal["never", "after_key", "always"] = "never",
        marks: Sequence[str] = (),
        keys: Sequence[str] = (),
    ) -> None:
        self.output = "{" if keywords else ""
        self.done = self.broken = False
        self._lenient = lenient == "always"
        self._lenient_later = lenient == "after_key"
        self._mark = mark
        self._marks, self._keys = tuple(marks), tuple(keys)
        self._keywords = keywords
        self._containers = [_Container(")", "}", "=")] if keywords else []
        self._expects = "key" if keywords else "value"  # key, the sign after a key, value, comma
        self._key: str | None = None
        self._string: ValueReader | None = None
        self._muted: int | None = None  # the number of containers around a value with a repeated key
        self._bounds = re.compile("|".join(["[][(){},:=]", *map(re.escape, self._marks)]))

    @property
    def begun(self) -> bool:
        """Whether a key, or all, has been read."""
        return self.done or any(container.filled for container in self._containers)

    def feed(self, text: str, final: bool = False) -> int:
        """Read up to the end of the literal, or text whose meaning is not known yet.

        Returns the number of read characters. If it is the `final` text, the literal is completed.
        """
        at = 0
        while at < len(text) and not self.done and not self.broken:
            after = self._step(text, at, final)
            if after is None:
                break
            at = after
        if final and self._lenient and not self.done:
            self.close()
        return at

    def close(self) -> None:
        """Complete the literal: missing values become null."""
        if self._string is not None:
            self._end_string()
        if self._expects in ("after key", "value") and not self.done and self._object is not None:
            self._add_value("null")
        while self._containers:
            self._pop()
        if not self.done:
            self.output, self.done = self.output or "null", True

    @property
    def _object(self) -> _Container | None:
        """The innermost container if it is an object."""
        inner = self._containers[-1] if self._containers else None
        return inner if inner is not None and inner.after_key else None

    def _step(self, text: str, at: int, final: bool) -> int | None:
        """Read on from the index `at`, and return the index after the read part; None to wait for more
        text."""
        if self._string is not None:
            return self._read_string(self._string, text, at, final)
        sign = text[at]
        if sign in BLANKS:
            return at + 1
        interrupted = begins(text, at, self._marks, final)
        if interrupted is None:
            return None
        if interrupted and not self._opens_string(text, at):
            self._interrupt()
            return at
        if sign == "," or sign in _CLOSERS:
            return self._read_sign(at, sign)
        return self._read_part(text, at, final)

    def _read_part(self, text: str, at: int, final: bool) -> int | None:
        """Read a key, the sign after it, or a value."""
        sign, inner = text[at], self._object
        if self._expects == "after key":
            known = sign in ":=" if self._lenient else inner is not None and sign == inner.after_key
            if known or self._lenient:
                self._begin_value()
            self.broken = not (known or self._lenient)
            return at + known
        if self._expects == "comma":
            self.broken = not self._lenient
            self._expects = "key" if inner is not None else "value"
            return at
        read = self._read_key if self._expects == "key" else self._read_value
        return read(text, at, final)

    def _interrupt(self) -> None:
        if self._lenient:
            self.close()
        else:
            self.broken = True

    def _read_sign(self, at: int, sign: str) -> int:
        """Read a comma or a closing bracket, unless it belongs to the text around the literal."""
        inner = self._object
        if not any(sign in (",", container.end) for container in self._containers):
            self._interrupt()
            return at
        valueless = self._expects in ("after key", "value") and inner is not None
        if valueless and self._lenient:
            self._add_value("null")
        if sign == ",":
            self.broken = self._expects != "comma" and not self._lenient
            self._expects = "key" if inner is not None else "value"
        elif not self._lenient:
            self.broken = valueless or self._containers[-1].end != sign
            if not self.broken:
                self._pop()
        else:
            while self._containers[-1].end != sign:
                self._pop()
            self._pop()
        return at + 1

    def _read_key(self, text: str, at: int, final: bool) -> int | None:
        inner = self._object
        quoted = inner is not None and inner.after_key == ":" and not self._mark
        if text[at] in "'\"" and quoted:
            self._string, self._key = ValueReader(_string_bounds(text[at], self._marks, True, False)), ""
            return at + 1
        if self._lenient:
            end = self._text_end(text, at, ":=", final)
            if end is not None and (text[at] == "{" or (self._keywords and _CALL.match(text[at:end]))):
                self._interrupt()
                return at
        else:
            found = _KEY.match(text, at) if not quoted else None
            self.broken = found is None
            end = found.end() if found and (final or found.end() < len(text)) else None
        if end is not None:
            self._key, self._expects = escaped(text[at:end].strip()), "after key"
        return end

    def _begin_value(self) -> None:
        """Write the key of the next value. If the object has the key already, the value is not written."""
        inner, key = self._containers[-1], self._key or ""
        decoded = json.loads(f'"{key}"')
        if decoded in inner.keys and self._muted is None:
            self._muted = len(self._containers)
        inner.keys.add(decoded)
        self._write(f'{", " if inner.filled else ""}"{key}": ')
        inner.filled, self._key, self._expects = True, None, "value"
        self._lenient |= self._lenient_later

    def _read_value(self, text: str, at: int, final: bool) -> int | None:
        sign = text[at]
        if sign in "{[(":
            self._separate()
            self._write("{" if sign == "{" else "[")
            self._containers.append(_opened(sign))
            self._expects = "key" if sign == "{" else "value"
            return at + 1
        if self._opens_string(text, at):
            return self._open_string(text, at, final)
        found = _SCALAR.match(text, at)
        end = at if found is None else found.end()
        if end == len(text) and not final and end - at <= _MAX_SCALAR:
            return None
        scalar = json_scalar(text[at:end]) if end - at <= _MAX_SCALAR else None
        ended = end == len(text) or text[end] in BLANKS or bool(self._bounds.match(text, end))
        if scalar is None or not ended:
            if not self._lenient:
                self.broken = scalar is None
            else:
                return self._read_text(text, at, final)
        if scalar is not None:
            self._add_value(scalar)
        return end

    def _read_text(self, text: str, at: int, final: bool) -> int | None:
        """Read text that is no literal as a string."""
        end = self._text_end(text, at, "", final)
        if end is not None:
            written = text[at:end].strip().removesuffix(self._mark or '"')
            self._add_value(f'"{escaped(written)}"')
        return end

    def _text_end(self, text: str, at: int, ends: str, final: bool) -> int | None:
        """Return the end of a text that is no literal; None if more text decides."""
        depth, limit = 0, at + LOOKAHEAD
        for found in self._bounds.finditer(text, at, limit):
            sign = found[0]
            outside = sign in _AFTER_VALUE and not depth
            if outside or sign in self._marks or (sign in ends and not depth):
                return found.start() if found.start() > at else found.end()
            depth += (sign in "([{") - (sign in ")]}")
        return min(limit, len(text)) if final or len(text) >= limit else None

    def _opens_string(self, text: str, at: int) -> bool:
        if self._expects != "value":
            return False
        return text.startswith(self._mark, at) if self._mark else text[at] in "'\""

    def _open_string(self, text: str, at: int, final: bool) -> int | None:
        quote = self._mark or text[at]
        if not self._mark:
            quotes = text[at : at + 3]
            if quotes in (quote, quote * 2) and len(text) < at + 3 and not final:
                return None
            quote = quotes if quotes == quote * 3 else quote
        marks = tuple(mark for mark in self._marks if mark != self._mark)
        bounds = _string_bounds(quote, marks, not self._lenient, bool(self._mark), self._keys)
        self._string = ValueReader(bounds)
        self._separate()
        self._write('"')
        return at + len(quote)

    def _read_string(self, string: ValueReader, text: str, at: int, final: bool) -> int | None:
        end = string.read(text, at, final)
        if self._key is None:
            self._write(string.output)
        else:
            self._key += string.output
        if string.done:
            self.broken = not (string.closed or self._lenient)
            self._end_string()
            return end
        return end if end > at else None

    def _end_string(self) -> None:
        self._string = None
        if self._key is not None:
            self._expects = "after key"
            return
        self._write('"')
        self._end_value()

    def _separate(self) -> None:
        """Write the comma before an element of a list."""
        inner = self._containers[-1] if self._containers else None
        if inner is not None and not inner.after_key:
            self._write(", " if inner.filled else "")
            inner.filled = True

    def _add_value(self, value: str) -> None:
        if self._expects == "after key":
            self._begin_value()
        self._separate()
        self._write(value)
        self._end_value()

    def _pop(self) -> None:
        self._write(self._containers.pop().json_end)
        self._end_value()

    def _end_value(self) -> None:
        if self._muted == len(self._containers):
            self._muted = None
        self.done = not self._containers
        self._expects = "comma"

    def _write(self, text: str) -> None:
        if self._muted is None:
            self.output += text


def literal(text: str) -> str | None:
    """Return the JSON text of a literal; None if `text` is not a literal."""
    reader = LiteralReader()
    end = reader.feed(text, final=True)
    return None if reader.broken or not reader.output or text[end:].strip(BLANKS) else reader.output
