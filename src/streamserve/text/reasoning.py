"""Separate a model's reasoning, `<think>…</think>`, from its answer, incrementally."""

from dataclasses import dataclass

from streamserve.text.tools.parser import overlap

OPENING, CLOSING = "<think>", "</think>"


@dataclass(frozen=True)
class ReasoningFormat:
    """A model's reasoning format.

    `always`: the reply begins with reasoning, whether or not the prompt opened it (DeepSeek R1); otherwise
    reasoning has its opening tag, in the prompt or in the reply (Qwen 3).
    """

    always: bool


def find_reasoning_format(name: str, template: str | None) -> ReasoningFormat | None:
    """Return the reasoning format `name`; for "auto" the one that the template uses.

    None: all text is answer.
    """
    if name == "none" or (name == "auto" and CLOSING not in (template or "")):
        return None
    return ReasoningFormat(always=name == "deepseek_r1")


@dataclass(frozen=True)
class ParsedReasoning:
    """The output of one parsed piece of text."""

    reasoning: str = ""
    content: str = ""


class ReasoningParser:
    """Parses one message after `prompt`.

    Whitespace around the reasoning belongs to neither part. The result does not depend on how the text is
    split into pieces.
    """

    def __init__(self, thinking: ReasoningFormat, prompt: str) -> None:
        end = prompt.rstrip()
        opened = end.endswith(OPENING) or thinking.always
        self._in_thought = opened and not end.endswith(CLOSING)
        self._undecided = not opened and not end.endswith(CLOSING)
        self._may_open = self._in_thought
        self._held = ""
        self._begun = False
        self._started = False

    @property
    def open(self) -> bool:
        """Whether the model is reasoning, before anything is parsed."""
        return self._in_thought

    @property
    def undecided(self) -> bool:
        """Whether the model may begin with reasoning or with the answer, before anything is parsed."""
        return self._undecided

    def feed(self, text: str) -> ParsedReasoning:
        """Parse the next piece."""
        return self._read(text, final=False)

    def finish(self) -> ParsedReasoning:
        """Return what was held back, at the end of the text."""
        return self._read("", final=True)

    def _read(self, text: str, final: bool) -> ParsedReasoning:
        self._held += text
        if (self._undecided or self._may_open) and not self._decide(final):
            return ParsedReasoning()
        reasoning = self._read_thought(final) if self._in_thought else ""
        if self._in_thought:
            return ParsedReasoning(reasoning)
        content, self._held = self._held, ""
        if not self._started:  # whitespace after the reasoning
            content = content.lstrip()
            self._started = bool(content)
        return ParsedReasoning(reasoning, content)

    def _decide(self, final: bool) -> bool:
        """Determine whether the text begins with an opening tag. Returns False while that is not decided."""
        begin = self._held.lstrip()
        if begin.startswith(OPENING):
            self._held, self._in_thought = begin.removeprefix(OPENING), True
        elif OPENING.startswith(begin) and not final:
            return False
        elif self._undecided:
            self._started = True  # all is answer, including leading whitespace
        self._undecided = self._may_open = False
        return True

    def _read_thought(self, final: bool) -> str:
        """Return the next piece of the reasoning, without whitespace at its beginning and end."""
        position = self._held.find(CLOSING)
        if position >= 0:
            piece, self._held = self._held[:position].rstrip(), self._held[position + len(CLOSING) :]
            self._in_thought = False
        elif final:
            piece, self._held = self._held.rstrip(), ""
        else:
            certain = self._held[: len(self._held) - overlap(self._held, CLOSING)].rstrip()
            piece, self._held = certain, self._held[len(certain) :]
        if not self._begun:
            piece = piece.lstrip()
            self._begun = bool(piece)
        return piece
