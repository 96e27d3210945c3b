"""Parse replies in the harmony format of gpt-oss incrementally: messages in channels.

<|channel|>analysis<|message|>…<|end|>
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{…}<|call|>

`analysis` is reasoning; `final`, and `commentary` without a recipient, are content. A message to a function
of the request is a call. All other text is content, returned unchanged.
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
from streamserve.text.tools.formats import FORMATS
from streamserve.text.tools.parser import new_id, overlap

MessagePart = list[ReplyEvent]
"""The events of one parsed piece of text."""

_MESSAGE = "<|message|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_BEGINS = ("<|start|>", "<|channel|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]+)")
_MAX_HEADER = 512


class HarmonyParser:
    """Parses one reply. `tools` are the functions that may be called. If not `parallel`, only one call is
    returned."""

    def __init__(self, tools: Mapping[str, Any], parallel: bool = True) -> None:
        self._tools = tools
        self._parallel = parallel
        self._calls = 0
        self._held = ""
        self._kind = ""  # of the present message: reasoning, content or call; empty while its header is read
        self._arguments = ""
        self._written: set[str] = set()
        self._separator = ""

    def read(self, text: str, final: bool) -> MessagePart:
        """Parse the next piece. If it is the `final` one, also return text that was held back."""
        self._held += text
        part = MessagePart()
        going = True
        while going and self._held:
            going = self._read_body(part, final) if self._kind else self._read_header(part, final)
        if final and self._kind == "call":
            self._end_message(part)
        return part

    def _read_header(self, part: MessagePart, final: bool) -> bool:
        """Read up to the body of a message. Return False if more text is needed."""
        begin = self._held.lstrip()
        marks = (*_BEGINS, "to=", *_ENDS)
        end = next((mark for mark in _ENDS if begin.startswith(mark)), None)
        if end is not None:
            self._held = begin.removeprefix(end)
            return True
        if not begin.startswith(marks):
            if any(mark.startswith(begin) for mark in marks) and not final:
                return False
            self._begin("content")
            return True
        header, mark, body = self._held.partition(_MESSAGE)
        if mark and len(header) <= _MAX_HEADER:
            self._held = body
            self._begin_message(part, header)
        elif (too_long := len(self._held) > _MAX_HEADER + len(_MESSAGE)) or final:
            # If a header is too long, the text after the limit is read as its body, whether it has arrived
            # yet or not.
            cut = _MAX_HEADER if too_long else len(self._held)
            certain, self._held = self._held[:cut], self._held[cut:]
            self._begin("content")
            self._write(part, certain)
        else:
            return False
        return True

    def _begin_message(self, part: MessagePart, header: str) -> None:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        name = recipient[1].removeprefix("functions.") if recipient else ""
        if recipient and recipient[1].startswith("functions.") and name in self._tools:
            self._begin("call")
            self._calls += 1
            if self._counts:
                part.append(CallBegin(self._calls - 1, new_id(FORMATS["harmony"]), name))
        elif recipient or (channel and channel[1] not in ("analysis", "commentary", "final")):
            self._begin("content")
            self._write(part, header.lstrip() + _MESSAGE)
        else:
            self._begin("reasoning" if channel and channel[1] == "analysis" else "content")

    def _begin(self, kind: str) -> None:
        self._kind, self._arguments = kind, ""
        self._separator = "\n" if kind in self._written else ""

    def _read_body(self, part: MessagePart, final: bool) -> bool:
        """Read up to the end of a message. Return False if more text is needed."""
        found = [(self._held.find(mark), mark) for mark in (*_ENDS, *_BEGINS) if mark in self._held]
        if not found:
            held = 0 if final else max(overlap(self._held, mark) for mark in (*_ENDS, *_BEGINS))
            certain, self._held = self._held[: len(self._held) - held], self._held[len(self._held) - held :]
            self._write(part, certain)
            return False
        index, mark = min(found)
        self._write(part, self._held[:index])
        self._held = self._held[index + (len(mark) if mark in _ENDS else 0) :]
        called = self._kind == "call"
        self._end_message(part)
        if called and self._counts:
            part.append(CallEnd(self._calls - 1))
        return True

    def _end_message(self, part: MessagePart) -> None:
        if self._kind == "call" and not self._arguments:
            self._write(part, "{}")
        self._kind = ""

    def _write(self, part: MessagePart, text: str) -> None:
        if not text:
            return
        if self._kind == "call":
            self._arguments += text
            if self._counts:
                part.append(CallArguments(self._calls - 1, text))
            return
        text, self._separator = self._separator + text, ""
        self._written.add(self._kind)
        part.append(ReasoningDelta(text) if self._kind == "reasoning" else TextDelta(text))

    @property
    def _counts(self) -> bool:
        return self._parallel or self._calls == 1
