"""Separates a model's reasoning, such as `<think>…</think>`, from its answer, incrementally.

qwen3, deepseek_r1  <think>…</think>
granite             Here is my thought process: … Here is my response: …        (Granite 3.2)
granite3_3          <think>…</think><response>…</response>                      (Granite 3.3)
mistral             [THINK]…[/THINK]                                            (Magistral and later)
harmony             <|channel|>analysis<|message|>…<|end|>                      (gpt-oss: harmony.py)
"""

from dataclasses import dataclass

from streamserve.text.tools.values import overlap


@dataclass(frozen=True)
class ReasoningFormat:
    """A model's reasoning format.

    `openings` and `closings` are the tags that may come before and after the reasoning; a grammar uses the
    first opening and the first closing. `always`: the reply begins with reasoning even if there is no opening
    tag (DeepSeek R1); otherwise reasoning has its opening tag, in the prompt or in the reply (Qwen 3).
    `answer`: tags that may be around the answer after the reasoning. `channels`: messages are in channels,
    see harmony.py.
    """

    always: bool = False
    openings: tuple[str, ...] = ("<think>",)
    closings: tuple[str, ...] = ("</think>",)
    answer: tuple[str, str] = ("", "")
    channels: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """All tags, which the parser needs to see even if they are special tokens."""
        return tuple(mark for mark in (*self.openings, *self.closings, *self.answer) if mark)


REASONING_FORMATS = {
    "qwen3": ReasoningFormat(),
    "deepseek_r1": ReasoningFormat(always=True),
    "granite": ReasoningFormat(
        openings=("Here is my thought process:", "Here's my thought process:"),
        closings=("Here is my response:", "Here's my response:"),
    ),
    "granite3_3": ReasoningFormat(answer=("<response>", "</response>")),
    "mistral": ReasoningFormat(openings=("[THINK]",), closings=("[/THINK]",)),
    "harmony": ReasoningFormat(openings=("<|channel|>",), closings=("<|message|>",), channels=True),
}

_SIGNS = (
    (("<|channel|>", "<|message|>"), "harmony"),
    (("[THINK]",), "mistral"),
    (("<response>", "</think>"), "granite3_3"),
    (("Here is my thought process:",), "granite"),
    (("</think>",), "qwen3"),
    (("<think>",), "qwen3"),
)
"""Strings in a chat template, and the format that they show: the first format whose strings are all there."""


def find_reasoning_format(name: str, template: str | None) -> ReasoningFormat | None:
    """Return the reasoning format `name`; for "auto" the format that `template` uses.

    None for "none", and if no format is detected: then the whole text is the answer.
    """
    if name != "auto":
        return REASONING_FORMATS.get(name)
    found = (format for signs, format in _SIGNS if all(sign in (template or "") for sign in signs))
    return REASONING_FORMATS.get(next(found, ""))


@dataclass(frozen=True)
class ParsedReasoning:
    """The output of one parsed piece of text."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """Separates the reasoning and the answer of one message after `prompt`.

    Whitespace around the reasoning belongs to neither part. The result does not depend on how the text is
    split into pieces.
    """

    def __init__(self, thinking: ReasoningFormat, prompt: str) -> None:
        end = prompt.rstrip()
        opened = end.endswith(thinking.openings) or thinking.always
        closed = end.endswith(thinking.closings)
        self._format = thinking
        self._in_thought = opened and not closed
        self._undecided = not opened and not closed
        # Also after an empty reasoning in the prompt: a model may reason although the template disabled it.
        self._may_open = opened or closed
        self._held = ""
        self._begun = False
        self._answer = _AnswerText(*thinking.answer, started=False)

    @property
    def open(self) -> bool:
        """Whether the message begins within the reasoning. Valid only before the first piece is parsed."""
        return self._in_thought

    @property
    def undecided(self) -> bool:
        """Whether the message may begin with reasoning or with the answer. Valid only before the first
        piece."""
        return self._undecided

    def feed(self, text: str) -> ParsedReasoning:
        """Parse the next piece."""
        return self._read(text, final=False)

    def finish(self) -> ParsedReasoning:
        """Return the text that was held back. Call this at the end of the message."""
        return self._read("", final=True)

    def _read(self, text: str, final: bool) -> ParsedReasoning:
        self._held += text
        if (self._undecided or self._may_open) and not self._decide(final):
            return ParsedReasoning()
        reasoning = self._read_thought(final) if self._in_thought else ""
        if self._in_thought:
            return ParsedReasoning(reasoning)
        content, self._held = self._held, ""
        return ParsedReasoning(reasoning, self._answer.read(content, final))

    def _decide(self, final: bool) -> bool:
        """Determine whether the text begins with an opening tag. Returns False if that depends on more
        text."""
        begin = self._held.lstrip()
        opening = next((mark for mark in self._format.openings if begin.startswith(mark)), None)
        if opening is not None:
            self._held, self._in_thought = begin.removeprefix(opening), True
        elif any(mark.startswith(begin) for mark in self._format.openings) and not final:
            return False
        elif self._undecided:
            # The whole text is the answer, including leading whitespace.
            self._answer = _AnswerText("", "", started=True)
        self._undecided = self._may_open = False
        return True

    def _read_thought(self, final: bool) -> str:
        """Return the next piece of the reasoning, without whitespace at its beginning and end."""
        found = [(self._held.find(mark), mark) for mark in self._format.closings if mark in self._held]
        if found:
            position, mark = min(found)
            piece, self._held = self._held[:position].rstrip(), self._held[position + len(mark) :]
            self._in_thought = False
        elif final:
            piece, self._held = self._held.rstrip(), ""
        else:
            possible = max(overlap(self._held, mark) for mark in self._format.closings)
            certain = self._held[: len(self._held) - possible].rstrip()
            piece, self._held = certain, self._held[len(certain) :]
        if not self._begun:
            piece = piece.lstrip()
            self._begun = bool(piece)
        return piece


class _AnswerText:
    """Removes the tags around the answer, and whitespace at its beginning.

    The tag `closing` is removed only after the tag `opening`; whitespace around both tags is removed too.
    """

    def __init__(self, opening: str, closing: str, started: bool) -> None:
        self._opening = opening
        self._closing = closing
        self._started = started
        self._tagged = False
        self._held = ""

    def read(self, text: str, final: bool) -> str:
        """Return the part of the answer that is certain after the next piece, `text`."""
        text, self._held = self._held + text, ""
        if not self._started:
            text = text.lstrip()
            if self._opening and not self._tagged and text.startswith(self._opening):
                self._tagged, text = True, text.removeprefix(self._opening).lstrip()
            elif self._opening and not self._tagged and self._opening.startswith(text) and not final:
                self._held = text
                return ""
            self._started = bool(text)
        return self._before_closing(text, final) if self._tagged else text

    def _before_closing(self, text: str, final: bool) -> str:
        before, mark, after = text.partition(self._closing)
        if mark:
            self._tagged = False
            return before.rstrip() + after
        certain = text[: len(text) - (0 if final else overlap(text, self._closing))]
        certain = certain if final else certain.rstrip()
        self._held = text[len(certain) :]
        return certain
