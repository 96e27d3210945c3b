"""Parse a model's text incrementally into content and tool calls.

The result does not depend on how the text is split into pieces: what may be the beginning of a call is held
back until it is decided. What turns out not to be a call, or calls an unknown tool, is ordinary text.
"""

import re
import secrets
import string
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

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
class ParsedCalls:
    """The output of one parsed piece of text."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class ToolCallParser:
    """Parses one message.

    `tools` are the names of the available tools; if `parallel` is false only the first call counts. With
    `named` the text holds the arguments of that tool.

    The parser is within text, in the gap before, between and after calls, or in a call. What was skipped in a
    gap becomes text if no call follows.
    """

    def __init__(
        self, format: Format, tools: Collection[str], parallel: bool = True, named: str | None = None
    ) -> None:
        self.calls = 0
        self._format = format
        self._tools = tools
        self._parallel = parallel
        self._named = named
        self._pending = ""
        self._whitespace = ""
        self._skipped = ""
        self._in_text = not format.bare
        self._after_call = False
        self._call: JsonCall | None = None
        self._begun = False
        self._emitted = 0

    def feed(self, text: str) -> ParsedCalls:
        """Parse the next piece."""
        return self._read(text, final=False)

    def finish(self) -> ParsedCalls:
        """Return what was held back, at the end of the text."""
        output = self._read("", final=True)
        if self._call is not None and not self._begun:
            self._reject_call(output, self._skipped + self._call.text)
        elif self._call is None and not self._after_call:
            self._emit(output, self._skipped)
        if not self.calls:
            output.content += self._whitespace
        self._skipped = self._whitespace = ""
        return output

    def _read(self, text: str, final: bool) -> ParsedCalls:
        self._pending += text
        output = ParsedCalls()
        going = True
        while going and self._pending:
            if self._call is not None:
                self._read_call(output, self._call)
            elif self._in_text:
                going = self._read_text(output, final)
            else:
                going = self._read_gap(output, final)
        return output

    def _read_text(self, output: ParsedCalls, final: bool) -> bool:
        """Emit text up to the next opening. Returns False to wait for more text."""
        opening = self._format.opening
        index = self._pending.find(opening) if opening else -1
        if index >= 0:
            self._emit(output, self._consume(index))
            self._skipped = self._consume(len(opening))
            self._in_text = self._after_call = False
            return True
        self._emit(
            output, self._consume(len(self._pending) - (0 if final else overlap(self._pending, opening)))
        )
        return False

    def _read_gap(self, output: ParsedCalls, final: bool) -> bool:
        """Skip the markers and whitespace around calls. Returns False to wait for more text."""
        format, pending = self._format, self._pending
        for mark in (format.closing, format.opening):
            if mark and pending.startswith(mark):
                self._skipped += self._consume(len(mark))
                if mark == format.closing and self._after_call:
                    self._in_text, self._skipped = True, ""
                return True
            if mark.startswith(pending) and not final:
                return False
        if pending[0].isspace() or pending[0] in format.around:
            self._skipped += self._consume(1)
            return True
        index = self._arguments_index(final) if format.named else 0
        if index is None:
            return False
        if pending[index : index + 1] == "{":
            name = pending[:index].strip().removesuffix(format.separator) or self._named
            self._skipped += self._consume(index)
            self._call, self._begun, self._emitted = JsonCall(name), False, 0
            return True
        self._reject_call(output, "" if self._after_call else self._skipped)
        return True

    def _arguments_index(self, final: bool) -> int | None:
        """Return the index of the arguments after a name; 0 if there is no name, None if that is not decided
        yet."""
        match = _NAME.match(self._pending)
        if match is None:
            return 0
        index, separator = match.end(), self._format.separator
        if self._pending.startswith(separator, index):
            index += len(separator)
        elif separator.startswith(self._pending[index:]) and not final:
            return None
        index += len(self._pending[index:]) - len(self._pending[index:].lstrip())
        if index == len(self._pending):
            return 0 if final else None
        return index

    def _read_call(self, output: ParsedCalls, call: JsonCall) -> None:
        """Parse the rest of a call, and emit what is new of it."""
        self._consume(call.feed(self._pending))
        if not self._begun and (call.broken or call.done or call.name is not None):
            if call.name not in self._tools:
                self._reject_call(output, self._skipped + call.text)
                return
            self._begun, self._skipped, self._whitespace = True, "", ""
            self.calls += 1
            if self._counts:
                output.calls.append(CallDelta(self.calls - 1, "", _new_id(self._format), call.name))
        if self._begun:
            arguments = call.arguments if call.arguments or not call.done else "{}"
            if len(arguments) > self._emitted and self._counts:
                output.calls.append(CallDelta(self.calls - 1, arguments[self._emitted :]))
            self._emitted = len(arguments)
        if call.done or call.broken:
            self._call, self._after_call = None, True

    @property
    def _counts(self) -> bool:
        return self._parallel or self.calls == 1

    def _reject_call(self, output: ParsedCalls, text: str) -> None:
        """Treat `text` as content: it was not a call, and what follows is text too."""
        self._call, self._in_text, self._skipped = None, True, ""
        self._emit(output, text)

    def _consume(self, count: int) -> str:
        taken, self._pending = self._pending[:count], self._pending[count:]
        return taken

    def _emit(self, output: ParsedCalls, text: str) -> None:
        """Emit text; trailing whitespace only once something follows it. Forced calls have no text."""
        if self._format.forced:
            return
        whole = self._whitespace + text
        stripped = whole.rstrip()
        self._whitespace = whole[len(stripped) :]
        output.content += stripped


def merged(deltas: Sequence[CallDelta]) -> list[CallDelta]:
    """Return `deltas` with at most one for each call: clients merge the events of a stream by a call's index,
    and may read only the first entry of an index in an event."""
    calls: dict[int, CallDelta] = {}
    for delta in deltas:
        first = calls.get(delta.index)
        calls[delta.index] = replace(first, arguments=first.arguments + delta.arguments) if first else delta
    return list(calls.values())


def overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of `mark`."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)


def _new_id(format: Format) -> str:
    return format.id_prefix + "".join(secrets.choice(_LETTERS) for _ in range(format.id_length))
