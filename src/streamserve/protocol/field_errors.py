"""Errors about one field of a request or a setting: of our own checks, and of msgspec's."""

import re
from dataclasses import dataclass

import msgspec

_LOCATED = re.compile(r"(?P<reason>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`)?", re.DOTALL)
_MISSING = re.compile(r"missing required field `(\w+)`")
_NAME = re.compile(r"[A-Za-z_]\w*")


class InvalidField(ValueError):
    """A field with an invalid value. The message consists of the field's name, the position of its invalid
    entry if it is a list (`entry`, such as "[5]"), and the reason."""

    def __init__(self, field: str, reason: str, entry: str = "") -> None:
        super().__init__(f"{field}{entry} {reason}")
        self.field = field
        self._rest = f"{entry} {reason}"

    def message(self, name: str) -> str:
        """Return the message with another name of the field."""
        return f"{name}{self._rest}"


class InvalidFieldType(InvalidField, TypeError):
    """A field whose value has a wrong type."""


@dataclass(frozen=True)
class Mismatch:
    """A value that msgspec could not convert. `path` is the place of the value, such as messages[0].role;
    empty if msgspec does not name it. `field` is the first name in the path, or the name of the field that is
    `missing`."""

    text: str
    reason: str
    path: str
    field: str | None
    missing: bool


def mismatch_of(error: msgspec.ValidationError) -> Mismatch:
    """Return the place and the reason of a msgspec error, parsed from its text: the error has no other form
    of them."""
    text = str(error)
    match = _LOCATED.fullmatch(text)
    assert match is not None, "every text matches"
    reason, path = match["reason"], match["path"] or ""
    missing = _MISSING.search(reason) if not path else None
    if missing:
        return Mismatch(text, reason, path, missing[1], True)
    if isinstance(error.__cause__, InvalidField) and not path:
        return Mismatch(text, reason, path, error.__cause__.field, False)
    name = _NAME.match(path)
    return Mismatch(text, reason, path, name[0] if name else None, False)


def field_of(path: str) -> str:
    """Return the field of a request that a path such as messages[0].content begins with."""
    return path.partition("[")[0].partition(".")[0]
