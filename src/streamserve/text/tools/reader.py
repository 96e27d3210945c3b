"""Parse a model's text incrementally into content and tool calls.

The result does not depend on how the text is split into pieces: what may be the beginning of a call is held
back until it is decided. What turns out not to be a call, or calls an unknown tool, is ordinary text.
"""

import re
import secrets
import string
from collections.abc import Collection
from dataclasses import dataclass, field

from streamserve.text.tools.formats import Format
from streamserve.text.tools.json_call import JsonCall

_LETTERS = string.ascii_letters + string.digits
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True)
class CallDelta:
    """The new part of call number `index`. The first has its id and name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass
class Said:
    """The output of one parsed piece of text."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class CallReader:
    """Parses one message.

    `tools` are the names of the available tools; if `parallel` is false only the first call counts. With
    `named` the text holds the arguments of that tool.

    The parser is within text, in the gap before, between and after calls, or in a call. What was skipped in a
    gap becomes text if no call follows.
    """

    def __init__(
        self, form: Format, tools: Collection[str], parallel: bool = True, named: str | None = None
    ) -> None:
        self.calls = 0
        self._form = form
        self._tools = tools
        self._parallel = parallel
        self._named = named
        self._rest = ""
        self._blanks = ""
        self._skipped = ""
        self._in_text = not form.bare
        self._behind_call = False
        self._call: JsonCall | None = None
        self._begun = False
        self._told = 0

    def feed(self, text: str) -> Said:
        """Parse the next piece."""
        return self._read(text, final=False)

    def finish(self) -> Said:
        """Return what was held back, at the end of the text."""
        said = self._read("", final=True)
        if self._call is not None and not self._begun:
            self._give_up(said, self._skipped + self._call.text)
        elif self._call is None and not self._behind_call:
            self._say(said, self._skipped)
        if not self.calls:
            said.content += self._blanks
        self._skipped = self._blanks = ""
        return said

    def _read(self, text: str, final: bool) -> Said:
        self._rest += text
        said = Said()
        going = True
        while going and self._rest:
            if self._call is not None:
                self._read_call(said, self._call)
            elif self._in_text:
                going = self._read_text(said, final)
            else:
                going = self._read_gap(said, final)
        return said

    def _read_text(self, said: Said, final: bool) -> bool:
        """Emit text up to the next opening. Returns False to wait for more text."""
        opening = self._form.opening
        place = self._rest.find(opening) if opening else -1
        if place >= 0:
            self._say(said, self._take(place))
            self._skipped = self._take(len(opening))
            self._in_text = self._behind_call = False
            return True
        self._say(said, self._take(len(self._rest) - (0 if final else overlap(self._rest, opening))))
        return False

    def _read_gap(self, said: Said, final: bool) -> bool:
        """Skip the markers and whitespace around calls. Returns False to wait for more text."""
        form, rest = self._form, self._rest
        for mark in (form.closing, form.opening):
            if mark and rest.startswith(mark):
                self._skipped += self._take(len(mark))
                if mark == form.closing and self._behind_call:
                    self._in_text, self._skipped = True, ""
                return True
            if mark.startswith(rest) and not final:
                return False
        if rest[0].isspace() or rest[0] in form.around:
            self._skipped += self._take(1)
            return True
        place = self._arguments_place(final) if form.named else 0
        if place is None:
            return False
        if rest[place : place + 1] == "{":
            name = rest[:place].strip().removesuffix(form.separator) or self._named
            self._skipped += self._take(place)
            self._call, self._begun, self._told = JsonCall(name), False, 0
            return True
        self._give_up(said, "" if self._behind_call else self._skipped)
        return True

    def _arguments_place(self, final: bool) -> int | None:
        """Return the index of the arguments after a name; 0 if there is no name, None if that is not decided
        yet."""
        found = _NAME.match(self._rest)
        if found is None:
            return 0
        place, separator = found.end(), self._form.separator
        if self._rest.startswith(separator, place):
            place += len(separator)
        elif separator.startswith(self._rest[place:]) and not final:
            return None
        place += len(self._rest[place:]) - len(self._rest[place:].lstrip())
        if place == len(self._rest):
            return 0 if final else None
        return place

    def _read_call(self, said: Said, call: JsonCall) -> None:
        """Parse the rest of a call, and emit what is new of it."""
        self._take(call.feed(self._rest))
        if not self._begun and (call.broken or call.done or call.name is not None):
            if call.name not in self._tools:
                self._give_up(said, self._skipped + call.text)
                return
            self._begun, self._skipped, self._blanks = True, "", ""
            self.calls += 1
            if self._counts:
                said.calls.append(CallDelta(self.calls - 1, "", _new_id(self._form), call.name))
        if self._begun:
            arguments = call.arguments if call.arguments or not call.done else "{}"
            if len(arguments) > self._told and self._counts:
                said.calls.append(CallDelta(self.calls - 1, arguments[self._told :]))
            self._told = len(arguments)
        if call.done or call.broken:
            self._call, self._behind_call = None, True

    @property
    def _counts(self) -> bool:
        return self._parallel or self.calls == 1

    def _give_up(self, said: Said, text: str) -> None:
        """Treat `text` as content: it was not a call, and what follows is text too."""
        self._call, self._in_text, self._skipped = None, True, ""
        self._say(said, text)

    def _take(self, count: int) -> str:
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    def _say(self, said: Said, text: str) -> None:
        """Emit text; trailing whitespace only once something follows it."""
        whole = self._blanks + text
        kept = whole.rstrip()
        self._blanks = whole[len(kept) :]
        said.content += kept


def overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `mark`."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)


def _new_id(form: Format) -> str:
    return form.id_prefix + "".join(secrets.choice(_LETTERS) for _ in range(form.id_length))
