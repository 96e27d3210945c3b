"""Parses a model's text incrementally into content and tool calls, in the order in which they are written.

The result does not depend on how the text is split into pieces: text that may be the beginning of a call is
held back until it is decided. Text that turns out not to be a call, or that calls an unknown tool, is
ordinary text.
"""

import secrets
import string
from collections.abc import Mapping

from streamserve.text.reply_events import CallArguments, CallBegin, CallEnd, ReplyEvent, TextDelta
from streamserve.text.tools.calls import CallParser, Schema, begin_call, find_head
from streamserve.text.tools.formats import Format

ParsedCalls = list[ReplyEvent]
"""The content and calls of one parsed piece of text."""

_LETTERS = string.ascii_letters + string.digits


class ToolCallParser:
    """Parses one message.

    `tools` maps the names of the available tools to the schemas of their arguments; if `parallel` is false,
    only the first call counts. With `named`, the text is only the arguments of that tool.

    The parser is in one of three states: in text; in the gap before, between or after calls; or in a call.
    Text skipped in a gap becomes content if no call follows.
    """

    def __init__(
        self,
        format: Format,
        tools: Mapping[str, Schema],
        parallel: bool = True,
        named: str | None = None,
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
        self._opened = False
        self._after_call = False
        self._call: CallParser | None = None
        self._begun = False
        self._emitted = 0

    def feed(self, text: str) -> ParsedCalls:
        """Parse the next piece."""
        return self._read(text, final=False)

    def finish(self) -> ParsedCalls:
        """Return the text that was held back. Call this at the end of the message."""
        output = self._read("", final=True)
        if self._call is not None:
            self._call.finish()
            self._emit_call(output, self._call)
        if self._call is not None and not self._begun:
            self._reject(output, self._skipped + self._call.text)
        elif self._call is None and not self._after_call:
            self._emit(output, self._skipped)
        if not self.calls and self._whitespace:
            output.append(TextDelta(self._whitespace))
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
        pending, format = self._pending, self._format
        marks = (*format.openings, *format.heads)
        found = [(pending.find(mark), mark) for mark in marks if mark in pending]
        if found:
            index, mark = min(found)
            self._emit(output, self._consume(index))
            self._skipped = "" if mark in format.heads else self._consume(len(mark))
            self._in_text, self._opened = False, True
            return True
        held = 0 if final else max((overlap(pending, mark) for mark in marks), default=0)
        self._emit(output, self._consume(len(pending) - held))
        return False

    def _read_gap(self, output: ParsedCalls, final: bool) -> bool:
        """Skip the markers and whitespace around calls. Returns False to wait for more text."""
        format, pending = self._format, self._pending
        for mark in sorted((*format.closings, *format.openings), key=len, reverse=True):
            if pending.startswith(mark):
                self._skipped += self._consume(len(mark))
                self._opened = True
                if mark in format.closings and self._after_call:
                    self._in_text, self._after_call, self._skipped = True, False, ""
                return True
            if mark.startswith(pending) and not final:
                return False
        self._opened |= pending[0] in format.bare
        if pending[0].isspace() or (self._opened and pending[0] in format.around):
            self._skipped += self._consume(1)
            return True
        head = find_head(pending, format.syntaxes, final) if self._opened else None
        if head == "undecided":
            return False
        if head is None or (head.name is not None and head.name not in self._tools):
            self._reject(output, ("" if self._after_call else self._skipped) + self._consume(1))
            return True
        self._call, self._begun, self._emitted = begin_call(head, self._tools, self._named), False, 0
        self._skipped += self._consume(head.length)
        return True

    def _read_call(self, output: ParsedCalls, call: CallParser) -> None:
        """Parse the rest of a call, and emit the new part of it."""
        self._consume(call.feed(self._pending))
        self._emit_call(output, call)
        if self._call is None:
            return
        if (call.broken or call.done) and self._counts:
            output.append(CallEnd(self.calls - 1))
        if call.broken:
            self._reject(output, call.rest)
        elif call.done:
            self._call, self._after_call = None, True

    def _emit_call(self, output: ParsedCalls, call: CallParser) -> None:
        """Emit the new part of a call, once its name is known.

        Text that calls an unknown tool or no tool is rejected.
        """
        if not self._begun and (call.broken or call.done or call.name is not None):
            if call.name is None or call.name not in self._tools:
                self._reject(output, self._skipped + call.text)
                return
            self._begun, self._skipped, self._whitespace = True, "", ""
            self.calls += 1
            if self._counts:
                output.append(CallBegin(self.calls - 1, new_id(self._format), call.name))
        if self._begun:
            arguments = call.arguments if call.arguments or not call.done else "{}"
            if len(arguments) > self._emitted and self._counts:
                output.append(CallArguments(self.calls - 1, arguments[self._emitted :]))
            self._emitted = len(arguments)

    @property
    def _counts(self) -> bool:
        return self._parallel or self.calls == 1

    def _reject(self, output: ParsedCalls, text: str) -> None:
        """Emit `text` as content, because it was not a call. The text after it is content, too."""
        self._call, self._skipped = None, ""
        self._in_text, self._after_call, self._opened = True, False, False
        self._emit(output, text)

    def _consume(self, count: int) -> str:
        taken, self._pending = self._pending[:count], self._pending[count:]
        return taken

    def _emit(self, output: ParsedCalls, text: str) -> None:
        """Emit text, but hold back trailing whitespace until other text follows. Forced calls have no
        text."""
        if self._format.forced:
            return
        whole = self._whitespace + text
        stripped = whole.rstrip()
        self._whitespace = whole[len(stripped) :]
        if stripped:
            output.append(TextDelta(stripped))


def overlap(text: str, mark: str) -> int:
    """Return the number of characters at the end of `text` that may be the beginning of `mark`."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)


def new_id(format: Format) -> str:
    """Return a random id of a call."""
    return format.id_prefix + "".join(secrets.choice(_LETTERS) for _ in range(format.id_length))
