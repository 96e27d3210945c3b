"""Parse replies in the harmony format of gpt-oss incrementally: messages in channels.

<|channel|>analysis<|message|>…<|end|>
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>

`analysis` is reasoning; `final`, and `commentary` without a recipient, are content. A message to a function
of the request is a call. A message to another recipient is content, with its header. All other text is
content. Marks may be missing or repeated: a header ends where the text is no longer part of one, and a body
ends at the next header.
"""

import re
from collections.abc import Mapping
from typing import Any

from streamserve.text.reply_events import (
    CallArguments,
    CallBegin,
    CallEnd,
    ReasoningDelta,
    ReplyEvent,
    TextDelta,
)
from streamserve.text.tools.calls import tool_called
from streamserve.text.tools.formats import FORMATS
from streamserve.text.tools.literals import LiteralReader
from streamserve.text.tools.parser import new_id
from streamserve.text.tools.values import begins, overlap

MessagePart = list[ReplyEvent]
"""The events of one parsed piece of text."""

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_BEGINS = ("<|start|>", "<|channel|>")
_CONSTRAIN = "<|constrain|>"
_MARKS = (*_ENDS, *_BEGINS, _MESSAGE, _CONSTRAIN)
_WORDS = ("assistant", "analysis", "commentary", "final", "json", "code")
_NAMES = r"assistant|analysis|commentary|final|json|code|\w{1,64}(?!\w)"
_HEADER = re.compile(
    rf"(?:<\|(?:start|channel|constrain)\|>\s{{0,8}}(?:{_NAMES})?"
    rf"|to=[^\s<{{]{{1,256}}|(?:{'|'.join(_WORDS)})(?=\s*<\|| to=)|\s)*"
)
_CHANNEL = re.compile(r"\b(?:analysis|commentary|final)\b")
_RECIPIENT = re.compile(r"to=([^\s<{]+)")
_BLANKS_AT_END = re.compile(r"\s+(?=<|$)")
_AFTER_ARGUMENTS = " \t\r\n)]}"
_MAX_HEADER = 512


class HarmonyParser:
    """Parses one reply. `tools` are the functions that may be called. If not `parallel`, only the first call
    is returned."""

    def __init__(self, tools: Mapping[str, Any], parallel: bool = True) -> None:
        self._tools = tools
        self._parallel = parallel
        self._calls = 0
        self._held = ""
        # Of the present message: reasoning, content, call, or rest (text after a call's arguments). Empty
        # while its header is read.
        self._kind = ""
        self._begun = False
        self._arguments = LiteralReader()
        self._emitted = 0
        self._written: set[str] = set()
        self._separator = ""

    def read(self, text: str, final: bool, cut: bool = False) -> MessagePart:
        """Parse the next piece. If it is the `final` one, also return text that was held back, and complete
        the arguments of a last call, unless the reply was `cut` short."""
        self._held += text
        part = MessagePart()
        going = True
        while going and self._held:
            going = self._read_body(part, final and not cut) if self._kind else self._read_header(part, final)
        if final and self._kind == "call" and not cut:
            self._arguments.feed("", final=True)
            self._emit_arguments(part)
        return part

    def _read_header(self, part: MessagePart, final: bool) -> bool:
        """Read up to the body of a message. Return False if more text is needed."""
        held = self._held
        end = next((mark for mark in _ENDS if held.lstrip().startswith(mark)), None)
        if end is not None:
            self._held = held.lstrip().removeprefix(end)
            return True
        found = _HEADER.match(held, 0, _MAX_HEADER)
        size = found.end() if found else 0
        if not final and size < _MAX_HEADER and self._may_continue(size):
            return False
        header, message = held[:size], held.startswith(_MESSAGE, size)
        if not message and "<|" not in header and not held.startswith("{", size):
            self._begin("content")  # text without a header
        elif message or size < len(held):
            self._held = held[size:].removeprefix(_MESSAGE)
            self._begin_message(part, header, _MESSAGE if message else "")
        else:
            self._held = ""
        return True

    def _may_continue(self, size: int) -> bool:
        """Return whether more text decides if a header is longer than `size` characters."""
        rest = _BLANKS_AT_END.sub("", self._held[size:])
        words = [word + after for word in _WORDS for after in ("<|", " to=")]
        return rest == "to=" or begins(rest, 0, (*_MARKS, "to=", *words), False) is None

    def _begin_message(self, part: MessagePart, header: str, message: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = tool_called(recipient[1], self._tools) if recipient else None
        if name is not None:
            self._begin("call")
            self._calls += 1
            if self._counts:
                part.append(CallBegin(self._calls - 1, new_id(FORMATS["harmony"]), name))
        elif recipient:
            self._begin("content")
            self._write(part, header.lstrip() + message)
        else:
            self._begin("reasoning" if channel and channel[0] == "analysis" else "content")

    def _begin(self, kind: str) -> None:
        self._kind, self._begun = kind, False
        self._arguments, self._emitted = LiteralReader(lenient="always", marks=_MARKS), 0
        self._separator = "\n" if kind in self._written else ""

    def _read_body(self, part: MessagePart, final: bool) -> bool:
        """Read up to the end of a message. Return False if more text is needed."""
        if not self._begun and self._kind == "call":
            again = begins(self._held, 0, (_MESSAGE, _CONSTRAIN), final)
            if again:
                self._held = self._held[self._held.index("|>") + 2 :]
            self._begun = again is False
            return again is not None
        return self._read_arguments(part, final) if self._kind == "call" else self._read_text(part, final)

    def _read_arguments(self, part: MessagePart, final: bool) -> bool:
        """Read arguments up to their end. What follows is content, except brackets."""
        count = self._arguments.feed(self._held, final)
        self._held = self._held[count:]
        self._emit_arguments(part)
        if self._arguments.done:
            if self._counts:
                part.append(CallEnd(self._calls - 1))
            self._begin("content")
            self._kind = "rest"
        return count > 0 or self._arguments.done

    def _read_text(self, part: MessagePart, final: bool) -> bool:
        """Read reasoning or content up to its end."""
        if self._kind == "rest":
            self._held = self._held.lstrip(_AFTER_ARGUMENTS)
            if self._held and begins(self._held, 0, _MARKS, final) is False:
                self._begin("content")
        found = [(self._held.find(mark), mark) for mark in _MARKS if mark in self._held]
        if not found:
            held = 0 if final else max(overlap(self._held, mark) for mark in _MARKS)
            certain, self._held = self._held[: len(self._held) - held], self._held[len(self._held) - held :]
            self._write(part, certain)
            return False
        index, mark = min(found)
        self._write(part, self._held[:index])
        self._held = self._held[index + (0 if mark in _BEGINS else len(mark)) :]
        if mark in (*_ENDS, *_BEGINS):
            self._kind = ""
        return True

    def _emit_arguments(self, part: MessagePart) -> None:
        """Emit the new part of the arguments. Arguments that are null become an empty object."""
        written = self._arguments.output
        written = "{}" if self._arguments.done and written == "null" else written
        if len(written) > self._emitted and self._counts:
            part.append(CallArguments(self._calls - 1, written[self._emitted :]))
        self._emitted = len(written)

    def _write(self, part: MessagePart, text: str) -> None:
        if not text:
            return
        text, self._separator = self._separator + text, ""
        self._written.add(self._kind)
        part.append(ReasoningDelta(text) if self._kind == "reasoning" else TextDelta(text))

    @property
    def _counts(self) -> bool:
        return self._parallel or self._calls == 1
