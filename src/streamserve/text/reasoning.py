"""What a model thinks before it answers: `<think>…</think>`, apart from the answer, as it comes."""

from dataclasses import dataclass

from streamserve.text.tools.reader import overlap

OPENING, CLOSING = "<think>", "</think>"
NAMES = ("auto", "none", "deepseek_r1", "qwen3")


@dataclass(frozen=True)
class Thinking:
    """How a model thinks. `always`: it begins at once, whether or not the prompt opened the thought
    (DeepSeek R1); otherwise a thought has its opening, in the prompt or in the reply (Qwen 3)."""

    always: bool


def find_thinking(name: str, template: str | None) -> Thinking | None:
    """What `name` says; with "auto" what the template shows. None: the model's text is all answer."""
    if name == "none" or (name == "auto" and CLOSING not in (template or "")):
        return None
    return Thinking(always=name == "deepseek_r1")


@dataclass(frozen=True)
class Thought:
    """What a piece of text brought."""

    reasoning: str = ""
    content: str = ""


class ThoughtReader:
    """Reads one message behind `prompt`. Blanks around the thought belong to neither part. The result does
    not depend on how the text is cut into pieces."""

    def __init__(self, thinking: Thinking, prompt: str) -> None:
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
        """Whether the model is thinking, before anything is read."""
        return self._in_thought

    @property
    def undecided(self) -> bool:
        """Whether the model may begin to think or to answer, before anything is read."""
        return self._undecided

    def feed(self, text: str) -> Thought:
        """Read on."""
        return self._read(text, final=False)

    def finish(self) -> Thought:
        """What was held back, at the end of the text."""
        return self._read("", final=True)

    def _read(self, text: str, final: bool) -> Thought:
        self._held += text
        if (self._undecided or self._may_open) and not self._decide(final):
            return Thought()
        reasoning = self._read_thought(final) if self._in_thought else ""
        if self._in_thought:
            return Thought(reasoning)
        content, self._held = self._held, ""
        if not self._started:  # blanks behind the thought
            content = content.lstrip()
            self._started = bool(content)
        return Thought(reasoning, content)

    def _decide(self, final: bool) -> bool:
        """Whether the text begins with an opening. Returns False if that isn't clear yet."""
        begin = self._held.lstrip()
        if begin.startswith(OPENING):
            self._held, self._in_thought = begin.removeprefix(OPENING), True
        elif OPENING.startswith(begin) and not final:
            return False
        elif self._undecided:
            self._started = True  # all is answer, its first blanks included
        self._undecided = self._may_open = False
        return True

    def _read_thought(self, final: bool) -> str:
        """The next piece of the thought, without the blanks at its beginning and end."""
        place = self._held.find(CLOSING)
        if place >= 0:
            piece, self._held = self._held[:place].rstrip(), self._held[place + len(CLOSING) :]
            self._in_thought = False
        elif final:
            piece, self._held = self._held.rstrip(), ""
        else:
            kept = self._held[: len(self._held) - overlap(self._held, CLOSING)].rstrip()
            piece, self._held = kept, self._held[len(kept) :]
        if not self._begun:
            piece = piece.lstrip()
            self._begun = bool(piece)
        return piece
