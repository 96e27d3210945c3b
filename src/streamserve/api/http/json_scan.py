"""Scans JSON text before decoding: counts values, measures depth, and bounds the decoded size.

Runs over the bytes as they arrive, piece by piece, with the C code of bytes and numpy: about 1 GB/s. Text
inside of strings is skipped. For invalid JSON the counts are meaningless; the decoder then refuses it.
"""

import sys

import numpy as np

from streamserve.api.http.memory import CONTAINER_BYTES, VALUE_BYTES
from streamserve.protocol.errors import RequestError

MAX_DEPTH = 64
"""Maximum nesting depth of a request's JSON."""

MAX_VALUES = 1 << 19
"""Maximum number of values and names in one request's JSON: token ids, strings, numbers. Raised for a model
with a large context."""

MAX_NAMES = 1 << 17
"""Maximum number of names in all objects of one request's JSON. While the decoder runs, it holds the
interpreter's lock, and each name that it has not seen before costs half a microsecond."""

MAX_CONTAINERS = 1 << 16
"""Maximum number of lists and objects in one request's JSON: messages, parts, tools and their schemas."""

MAX_ESCAPES = 4 << 20
"""Maximum number of backslashes in one request's JSON. Each costs the decoder some nanoseconds."""

MIN_CHARACTERS = 1 << 18
"""Lower bound of `max_characters`. Strings up to this length always pass the scan: the check of their field
refuses them, with an error that names the field."""

PIECE = 64 << 10
"""Bytes scanned at a time: less than a millisecond."""

CHARACTER_BYTES, ESCAPED_BYTES = 4, 12
"""Maximum number of bytes per character of a string: without escapes (UTF-8), and with escapes."""

_OTHERS = bytes(set(range(256)) - set(b"[]{},:"))


def _width(data: bytes, escaped: bool) -> int:
    """Return the bytes per character of a decoded string: the widest character of `data` determines it.

    A piece may end inside an escape: an incomplete \\u counts as the widest.
    """
    if escaped and (b"\\ud" in data or b"\\uD" in data or data.endswith((b"\\", b"\\u"))):
        return 4
    if data.isascii():
        return 2 if escaped and b"\\u" in data else 1
    return 4 if data.translate(None, _BELOW_F0) else 2


_BELOW_F0 = bytes(range(0xF0))
"""All bytes except those that begin a character above U+FFFF in UTF-8."""


def _steps() -> bytes:
    """Return the depth change of each byte value, as a table."""
    table = np.zeros(256, np.int8)
    table[list(b"[{")], table[list(b"]}")] = 1, -1
    return table.tobytes()


_STEPS = _steps()


class JsonScan:
    """Scans one JSON text. Call `feed` in order; it raises RequestError (400) if a limit is exceeded.

    `values` is an upper bound of the number of values and names, `containers` the number of lists and
    objects. A string with more than `max_characters` is refused; strings shorter than a piece are left to the
    checks of their fields.
    """

    def __init__(self, max_values: int = MAX_VALUES, max_characters: int = sys.maxsize) -> None:
        self.values = 1
        self.containers = 0
        self.names = 0
        self.depth = 0
        self._max_values = max_values
        self._max_characters = max(max_characters, PIECE)
        self._string = 0  # bytes of the open string so far
        self._bytes = 0
        self._escapes = 0
        self._width = 1
        self._level = 0
        self._in_string = False
        self._pending = b""

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        for start in range(0, len(data), PIECE):
            self._piece(bytes(data[start : start + PIECE]))

    @property
    def decoded_bytes(self) -> int:
        """An upper bound of the memory that the decoded text takes, in bytes.

        One character that is not ASCII makes every character of its string take two bytes; a character above
        U+FFFF makes it four.
        """
        return self._bytes * self._width + self.values * VALUE_BYTES + self.containers * CONTAINER_BYTES

    def _piece(self, data: bytes) -> None:
        self._bytes += len(data)
        escapes = data.count(b"\\")
        if escapes:
            self._escapes += escapes
        self._width = max(self._width, _width(data, escapes > 0))
        self._structure(self._outside(self._without_escapes(data)))
        self._check()

    def _without_escapes(self, data: bytes) -> bytes:
        """Return `data` without escaped quotes.

        A backslash at the end of a piece is held back until the character that it escapes arrives.
        """
        if self._pending or b"\\" in data:
            data = self._pending + data
            run = len(data) - len(data.rstrip(b"\\"))
            self._pending = b"\\" * (run % 2)
            data = data[: len(data) - run % 2].replace(b"\\\\", b"").replace(b'\\"', b"")
        return data

    def _outside(self, data: bytes) -> bytes:
        parts = data.split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        self._string = self._string + len(parts[0]) if self._in_string else 0
        self._check_string()
        if len(parts) > 1:
            self._string = len(parts[-1])  # meaningless outside of strings
        self._in_string ^= len(parts) % 2 == 0
        return outside

    def _check_string(self) -> None:
        characters = self._string // (ESCAPED_BYTES if self._escapes else CHARACTER_BYTES)
        if characters > self._max_characters:
            raise RequestError(
                f"a text of the request has over {self._max_characters} characters, "
                "far more than the model's context holds"
            )

    def _structure(self, outside: bytes) -> None:
        signs = outside.translate(None, _OTHERS)
        if not signs:
            return
        opened = signs.count(b"[") + signs.count(b"{")
        self.containers += opened
        names = signs.count(b":")
        self.names += names
        self.values += signs.count(b",") + names + opened
        levels = np.frombuffer(signs.translate(_STEPS), np.int8).cumsum(dtype=np.int32)
        self.depth = max(self.depth, self._level + int(levels.max()))
        self._level += int(levels[-1])

    def _check(self) -> None:
        for count, limit, name in (
            (self.values, self._max_values, "values"),
            (self.names, MAX_NAMES, "names"),
            (self.containers, MAX_CONTAINERS, "lists and objects"),
            (self._escapes, MAX_ESCAPES, "backslashes"),
        ):
            if count > limit:
                raise RequestError(f"the request holds more than {limit} {name}, which is the limit")
        if self.depth > MAX_DEPTH:
            raise RequestError(f"the request is nested too deeply: at most {MAX_DEPTH} levels are allowed")
