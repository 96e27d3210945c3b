"""Parses a model's text incrementally into content and tool calls, in the order in which they are written.

The result does not depend on how the text is split into pieces: text that may be the beginning of a call is
held back until it is decided. Text that turns out not to be a call, or that calls an unknown tool, is
ordinary text. Text that turns out to be a call stays one: its arguments are JSON, even if marks are missing,
and the marks around calls do not become content.
"""

import re
import secrets
import string
from collections.abc import Mapping

from streamserve.text.reply_events import CallArguments, CallBegin, CallEnd, ReplyEvent, TextDelta
from streamserve.text.tools.calls import (
    CallParser,
    Schema,
    begin_call,
    find_head,
    tool_called,
    unopened_heads,
)
from streamserve.text.tools.formats import Format
from streamserve.text.tools.values import begins, overlap

ParsedCalls = list[ReplyEvent]
"""The content and calls of one parsed piece of text."""

_LETTERS = string.ascii_letters + string.digits
_INDENT = re.compile(r"[ \t]*")
_BRACKETS = ")]}"
_BEFORE, _AFTER_CALL, _CLOSED = "before", "after a call", "closed"
"""Whether a gap is before any call, after a call, or after a call and its closing mark."""


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
        self._gap = _BEFORE
        self._call: CallParser | None = None
        self._begun = False
        self._emitted = 0
        known = format.bare or format.heads  # calls without an opening are known to the format
        self._unopened = () if known else unopened_heads(format.syntaxes, tools, bool(format.strays))
        self._unproven = False
        self._last = "\n"  # the last character before the pending text

    def feed(self, text: str) -> ParsedCalls:
        """Parse the next piece."""
        return self._read(text, final=False)

    def finish(self, cut: bool = False) -> ParsedCalls:
        """Return the text that was held back. Call this at the end of the message.

        The arguments of a last call are completed, unless the message was `cut` in it.
        """
        output = self._read("", final=True, cut=cut)
        if self._call is not None and not self._begun:
            self._reject(output, self._skipped + self._call.text + self._consume(len(self._pending)))
        elif self._call is None and self._gap != _AFTER_CALL:
            self._emit(output, self._without_marks(self._skipped))
        if not self.calls and self._whitespace:
            output.append(TextDelta(self._whitespace))
        self._skipped = self._whitespace = self._pending = ""
        return output

    def _read(self, text: str, final: bool, cut: bool = False) -> ParsedCalls:
        self._pending += text
        output = ParsedCalls()
        going = True
        while going and (self._pending or (final and self._call is not None)):
            if self._call is not None:
                going = not cut and self._read_call(output, self._call, final)
            elif self._in_text:
                going = self._read_text(output, final)
            else:
                going = self._read_gap(output, final)
        return output

    def _read_text(self, output: ParsedCalls, final: bool) -> bool:
        """Emit text up to the next opening. Returns False to wait for more text."""
        pending, format = self._pending, self._format
        marks = (*format.openings, *format.heads, *(format.strays if self.calls else ()))
        found = [(pending.find(mark), -len(mark), mark) for mark in marks if mark in pending]
        index, _, mark = min(found, default=(len(pending), 0, ""))
        unopened = self._find_unopened(pending[:index])
        if unopened is not None:
            index, mark = unopened, ""
        elif not found and not final:
            index -= max((overlap(pending, mark) for mark in marks), default=0)
            index = min(index, self._possibly_unopened(pending))
        self._emit(output, self._consume(index))
        if mark in format.strays:
            self._consume(len(mark))
        elif mark or unopened is not None:
            self._skipped = "" if mark in format.heads else self._consume(len(mark))
            self._in_text, self._opened, self._unproven = False, True, unopened is not None
        return bool(mark) or unopened is not None

    def _find_unopened(self, text: str) -> int | None:
        """Return the index of a call of a tool without its opening, at the beginning of a line of the pending
        text."""
        start = 0
        while self._unopened and start <= len(text):
            indented = _INDENT.match(text, start)
            after = indented.end() if indented else start
            if (start or self._last == "\n") and text.startswith(self._unopened, after):
                return after
            start = text.find("\n", start) + 1 or len(text) + 1
        return None

    def _possibly_unopened(self, text: str) -> int:
        """Return the index from which the text may be the beginning of a call without its opening; the
        length of the text if it cannot be."""
        start = text.rfind("\n") + 1
        line = text[start:].lstrip(" \t")
        possible = (start or self._last == "\n") and any(head.startswith(line) for head in self._unopened)
        return start if possible else len(text)

    def _read_gap(self, output: ParsedCalls, final: bool) -> bool:
        """Skip the markers and whitespace around calls. Returns False to wait for more text."""
        format, pending = self._format, self._pending
        for mark in sorted((*format.closings, *format.openings), key=len, reverse=True):
            if pending.startswith(mark):
                if self._gap == _CLOSED and self._skipped and mark not in (*format.strays, *format.openings):
                    self._reject(output, self._skipped + self._consume(len(mark)))
                else:
                    self._skip_mark(mark)
                return True
            if mark.startswith(pending) and not final:
                return False
        self._opened |= pending[0] in format.bare
        around = self._opened and pending[0] in format.around
        if pending[0].isspace() or around or (self._gap == _AFTER_CALL and pending[0] in _BRACKETS):
            self._skipped += self._consume(1)
            return True
        head = find_head(pending, format.syntaxes, self._tools, final) if self._opened else None
        if head == "undecided":
            return False
        if head is None or (head.name is not None and tool_called(head.name, self._tools) is None):
            before = "" if self._gap == _AFTER_CALL else self._skipped
            self._reject(output, self._without_marks(before) + self._consume(1))
            return True
        self._call = begin_call(head, self._tools, self._named, format.around_calls)
        self._begun, self._emitted = False, 0
        self._skipped += self._consume(head.length)
        return True

    def _skip_mark(self, mark: str) -> None:
        """Skip a mark in a gap. After the closing mark of a call, text is content if it is not a call."""
        self._opened = True
        closes = mark in self._format.closings and self._gap != _BEFORE
        self._skipped = "" if closes or self._gap == _AFTER_CALL else self._skipped
        skipped = self._consume(len(mark))
        if closes:
            self._gap = _CLOSED
        else:
            self._skipped += skipped
            self._gap = _BEFORE

    def _without_marks(self, text: str) -> str:
        """Return skipped text as content: in a message with calls, without the marks around calls."""
        for mark in self._format.around_calls if self.calls else ():
            text = text.replace(mark, "")
        return text

    def _read_call(self, output: ParsedCalls, call: CallParser, final: bool) -> bool:
        """Parse the rest of a call, and emit the new part of it. Returns False to wait for more text."""
        count = call.feed(self._pending, final)
        self._consume(count)
        if self._unproven and not call.broken and not self._proven(call, final):
            if self._unproven:
                return count > 0
            self._reject(output, self._skipped + call.text)
            return True
        self._emit_call(output, call)
        if self._call is not None and call.done:
            self._call, self._gap = None, _AFTER_CALL
            if self._counts:
                output.append(CallEnd(self.calls - 1))
        return count > 0 or self._call is None

    def _proven(self, call: CallParser, final: bool) -> bool:
        """Return whether text without the opening of a call is a call: its closing mark, or the separator
        after its name, shows that. Sets `_unproven` to whether more text decides."""
        after = self._pending.lstrip(_BRACKETS + " \t\r\n")
        closed = begins(after, 0, self._format.strays, final) if call.done else None
        separated = bool(self._format.separator) and self._format.separator in self._skipped
        self._unproven = closed is None and not separated
        return closed is True or separated

    def _emit_call(self, output: ParsedCalls, call: CallParser) -> None:
        """Emit the new part of a call, once its name is known.

        Text that calls an unknown tool or no tool is rejected.
        """
        if not self._begun and (call.broken or call.done or call.name is not None):
            name = None if call.broken else tool_called(call.name, self._tools)
            if name is None:
                self._reject(output, self._without_marks(self._skipped) + call.text)
                return
            self._begun, self._skipped, self._whitespace = True, "", ""
            self.calls += 1
            if self._counts:
                output.append(CallBegin(self.calls - 1, new_id(self._format), name))
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
        self._call, self._skipped, self._unproven = None, "", False
        self._in_text, self._gap, self._opened = True, _BEFORE, False
        self._emit(output, text)

    def _consume(self, count: int) -> str:
        taken, self._pending = self._pending[:count], self._pending[count:]
        self._last = taken[-1:] or self._last
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


def new_id(format: Format) -> str:
    """Return a random id of a call."""
    return format.id_prefix + "".join(secrets.choice(_LETTERS) for _ in range(format.id_length))
