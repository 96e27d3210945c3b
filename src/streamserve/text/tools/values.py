"""Incremental reading of one value between marks, also if the marks are missing, doubled, or in the value.

A value ends
- at its closing mark, if what follows can follow a value: otherwise the mark is part of the value,
- where the next value begins, if its closing mark is missing,
- at another mark of the format, if no closing mark follows.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

LOOKAHEAD = 4096
"""Maximum number of characters after a mark in a value that are searched for the value's closing mark."""

_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_PARTIAL_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})?")
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\\": "\\", "'": "'",
    '"': '"', "/": "/", "\n": "",
}  # fmt: skip


def escaped(text: str) -> str:
    """Return `text` as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def overlap(text: str, mark: str) -> int:
    """Return the number of characters at the end of `text` that may be the beginning of `mark`."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)


def begins(text: str, at: int, marks: Iterable[str], final: bool) -> bool | None:
    """Return whether one of the marks is at the index `at`; None if more text decides."""
    beginning = text[at : at + LOOKAHEAD]
    undecided = False
    for mark in marks:
        if beginning.startswith(mark):
            return True
        undecided |= mark.startswith(beginning)
    return None if undecided and not final else False


@dataclass(frozen=True)
class ValueBounds:
    """What ends a value.

    - `closings`: forms of the closing mark. `follows`: what may follow it after blanks, or a line break among
      them; empty: any text.
    - `stops`: marks that end the value if its closing mark does not follow them.
    - `limits`: marks that begin other values: a closing mark after them is not this value's.
    - `next`: pattern of the next value's beginning, which ends this value if its closing mark is missing.
    - `tail`: pattern of a text's end that may be the beginning of the next value, or that is not part of this
      value if a stop follows.
    - `again`: forms of the value's opening mark, dropped at the beginning of the value.
    - `escapes`: whether a backslash begins an escape sequence.
    """

    closings: tuple[str, ...]
    follows: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    next: str = ""
    tail: str = ""
    again: tuple[str, ...] = ()
    escapes: bool = False

    @cached_property
    def marks(self) -> tuple[str, ...]:
        return (*self.closings, *self.stops, *self.again)

    @cached_property
    def special(self) -> re.Pattern[str]:
        """The pattern of anything that is not simply text of the value."""
        kinds = {
            "escape": r"\\" if self.escapes else "",
            "next": self.next,
            "closing": _any(self.closings),
            "again": _any(self.again),
            "stop": _any(self.stops),
        }
        return re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in kinds.items() if pattern))

    @cached_property
    def later(self) -> re.Pattern[str]:
        """The pattern of a closing mark after a stop, or of a limit."""
        kinds = {"skip": r"\\(?s:.)" if self.escapes else "", "closing": _any(self.closings)}
        kinds["limit"] = _any(self.limits)
        return re.compile("|".join(f"(?P<{kind}>{pattern})" for kind, pattern in kinds.items() if pattern))

    @cached_property
    def repeated(self) -> re.Pattern[str]:
        """The pattern of further closing marks after the first."""
        return re.compile(rf"(?:\s*{re.escape(self.closings[-1])})*")

    @cached_property
    def ending(self) -> re.Pattern[str]:
        """The pattern of a tail at the end of a text."""
        return re.compile(f"(?:{self.tail})\\Z" if self.tail else r"\Z")

    def closed(self, text: str, at: int, final: bool) -> int | None:
        """Return the end of the closing mark at `at`, repetitions included; -1 if it is part of the value.

        None if more text decides.
        """
        mark = self.closings[-1]  # the shortest form
        end = at + len(_at(self.closings, text, at))
        if not self.follows:
            return end
        run = self.repeated.match(text, end, at + LOOKAHEAD)
        end = run.end() if run else end
        after = len(text) - len(text[end:].lstrip())
        again = begins(text, after, (mark,), final)
        if again is not False:
            return -1 if again else None  # a run of marks that is longer than the limit is text
        whole = (final and after == len(text)) or ("\n" in self.follows and "\n" in text[end:after])
        found = True if whole else begins(text, after, self.follows, final)
        return None if found is None else end if found else -1

    def continues(self, text: str, at: int, final: bool) -> bool | None:
        """Return whether the value's closing mark follows a stop that ends at `at`; None if more text
        decides."""
        position, end = at, min(at + LOOKAHEAD, len(text))
        while (found := self.later.search(text, position, end)) is not None:
            if found.lastgroup == "limit":
                return False
            if found.lastgroup == "closing":
                closed = self.closed(text, found.start(), final)
                return None if closed is None else closed >= 0
            position = found.end()
        return True if end == at + LOOKAHEAD else False if final else None


def _any(marks: Sequence[str]) -> str:
    return "|".join(map(re.escape, sorted(marks, key=len, reverse=True)))


def _at(marks: Sequence[str], text: str, at: int) -> str:
    """Return the longest of the marks at the index `at`. There must be one."""
    return max((mark for mark in marks if text.startswith(mark, at)), key=len)


class ValueReader:
    """Reads a value after its opening mark. `output` is its new part, as the inside of a JSON string.

    When it is `done`, it may be `closed` by its mark.
    """

    def __init__(self, bounds: ValueBounds) -> None:
        self.output = ""
        self.done = self.closed = False
        self._bounds = bounds
        self._begun = False

    def read(self, text: str, at: int, final: bool) -> int:
        """Read from the index `at` on, up to the value's end or text whose meaning is not known yet.

        Returns the index after the read part.
        """
        self.output = ""
        while not self.done:
            found = self._bounds.special.search(text, at)
            if found is None:
                return self._read_rest(text, at, final)
            start, kind = found.start(), str(found.lastgroup)
            end = self._end(kind, text, start, final)
            if end is None:
                certain = start if kind == "escape" else self._certain(text, at, start)
                self._add(text[at:certain])
                return certain
            if kind == "stop" and self.done:
                self._add(text[at : self._certain(text, at, start)])
            else:
                self._add(text[at:start])
            if not self.done and kind == "escape":
                self.output += _unescaped(text[start:end])
                self._begun = True
            elif not self.done and not self._opens_again(kind):
                self._add(text[start:end])
            at = end
        return at

    def _end(self, kind: str, text: str, start: int, final: bool) -> int | None:
        """Return the end of the special text at `start`; None if more text decides. Sets `done` if it ends
        the value."""
        bounds = self._bounds
        if kind == "escape":
            partial = _PARTIAL_ESCAPE.match(text, start)
            if partial is not None and partial.end() == len(text) and not final:
                return None
            escape = _ESCAPE.match(text, start)
            return escape.end() if escape else start + 1
        if kind == "next":
            self.done = True
            return start
        if kind == "closing":
            end = bounds.closed(text, start, final)
            self.done = self.closed = end is not None and end >= 0
            if end is not None and end < 0:
                return start + len(_at(bounds.closings, text, start))
            return end
        if kind == "again":
            return start + len(_at(bounds.again, text, start))
        mark = _at(bounds.stops, text, start)
        continues = bounds.continues(text, start + len(mark), final)
        self.done = continues is False
        return None if continues is None else start + len(mark) if continues else start

    def _opens_again(self, kind: str) -> bool:
        """Return whether a mark is the value's opening mark once more."""
        if kind == "closing" and self._bounds.closings != self._bounds.again:
            return False
        return not self._begun and kind in ("again", "closing")

    def _read_rest(self, text: str, at: int, final: bool) -> int:
        """Read text without special parts, except what may be the beginning of one."""
        held = 0 if final else max(overlap(text[at:], mark) for mark in self._bounds.marks)
        certain = self._certain(text, at, len(text) - held)
        self._add(text[at:certain])
        self.done = final
        return len(text) if final else certain

    def _certain(self, text: str, at: int, end: int) -> int:
        """Return the end of the part of `text[at:end]` that is certainly in the value."""
        found = self._bounds.ending.search(text[at:end])
        return at + found.start() if found else end

    def _add(self, text: str) -> None:
        self.output += escaped(text)
        self._begun |= bool(text)


def _unescaped(escape: str) -> str:
    """Return the meaning of an escape sequence as the inside of a JSON string."""
    kind, digits = escape[1:2], escape[2:]
    if not digits:
        return escaped(_ESCAPES.get(kind, "\\" + kind))
    number = int(digits, 16)
    if number > 0x10FFFF:
        return escaped(escape)
    return f"\\u{number:04x}" if number < 0x10000 and kind != "U" else escaped(chr(number))
