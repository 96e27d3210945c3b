"""Incremental parser of one tool call as a JSON object: its name, and its arguments as they are generated."""

import json

_BLANKS = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")


class JsonCall:
    """Parses `{"name": …, "arguments": …}`, with keys in any order; further keys are ignored.

    If the `name` is given, the object holds the arguments themselves. `text` is the text parsed so far.
    `arguments` is the known part of the arguments: their JSON text as written, or, if that is a string, as
    with some models, the content of the string. If the text is `broken`, `rest` is the end of it that is
    neither the name nor in the arguments.
    """

    def __init__(self, name: str | None = None) -> None:
        self.text = ""
        self.rest = ""
        self.name = name
        self._bare = name is not None
        self.arguments = ""
        self.done = False
        self.broken = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key: str | None = None
        self._token = ""

    def feed(self, text: str) -> int:
        """Parse up to the end of the object, or to a character that cannot be part of it.

        Returns the number of parsed characters.
        """
        for count, sign in enumerate(text):
            if self.done or self.broken:
                return count
            self.text += sign
            self.rest += sign
            self._read(sign)
        return len(text)

    def finish(self) -> None:
        """Do nothing: the arguments are already complete, as they are the text as written."""

    def _read(self, sign: str) -> None:
        if self._in_string:
            self._token += sign
            self._read_in_string(sign)
            self._stream(sign)
        elif self._depth == 0:
            self._depth = 1
            self.broken = sign != "{"
            self._stream(sign)
        elif self._bare:
            self._in_string = sign == '"'
            self._depth += (sign in "{[") - (sign in "}]")
            self.done = self._depth == 0
            self._stream(sign)
        elif self._depth == 1 and sign in ",}":
            self._end_value()
            self.done = sign == "}"
        elif self._depth == 1 and sign == ":" and self._key is None:
            self._end_key()
        elif sign not in _BLANKS or self._depth > 1:
            self._token += sign
            self._in_string = sign == '"'
            self._depth += (sign in "{[") - (sign in "}]")
            self._stream(sign)

    def _read_in_string(self, sign: str) -> None:
        if self._escaped:
            self._escaped = False
        elif sign == "\\":
            self._escaped = True
        elif sign == '"':
            self._in_string = False

    def _stream(self, sign: str) -> None:
        """Append a character to the arguments, if it belongs to them. Arguments in a string follow at its
        end."""
        if self._bare or (self._key in _ARGUMENTS and not self._token.startswith('"')):
            self.arguments += sign
            self.rest = ""

    def _end_key(self) -> None:
        key = _loaded(self._token)
        self._token = ""
        self._key = key if isinstance(key, str) else None
        self.broken = self._key is None

    def _end_value(self) -> None:
        value, key = _loaded(self._token), self._key
        if key == "name":
            self.name = value if isinstance(value, str) else None
            self.broken, self.rest = self.name is None, ""
        elif key in _ARGUMENTS and isinstance(value, str):
            self.arguments += value
            self.rest = ""
        elif key is None and self._token:
            self.broken = True
        self._key, self._token = None, ""


def _loaded(token: str) -> object:
    try:
        return json.loads(token)
    except (ValueError, RecursionError):
        return None
