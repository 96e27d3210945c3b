"""A prompt's text in which texts of special tokens that clients wrote stay ordinary text.

A template joins its marks with the texts of messages, so `<|im_end|>` in a message looks like a mark of the
template. Therefore each text of a special token in a message is replaced by a placeholder before the template
is rendered. Afterwards the placeholders in the prompt are replaced by the texts again, so that the positions
of these texts are known.
"""

import re
import secrets
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamserve.text.special_text import Span

FindSpans = Callable[[str], Sequence[Span]]
"""Returns the parts of a text that the tokenizer encodes as special tokens."""


@dataclass(frozen=True)
class PromptText:
    """A text, and its parts in which special tokens are not recognized, in order."""

    text: str
    literal: tuple[Span, ...] = ()

    def parts(self, find: FindSpans) -> Iterator[tuple[str, bool]]:
        """Yield the text in parts, each with whether it is ordinary: encoded without special tokens.

        Literal parts are ordinary. So is the text from a literal part to the next special token: a tokenizer
        may put a space before a text that it encodes alone, and here it must not.
        """
        specials = [start for start, _ in find(self.text)]
        position = 0
        for number, (start, end) in enumerate((*self.literal, (len(self.text), len(self.text)))):
            if number:
                following = bisect_left(specials, position)
                special = specials[following] if following < len(specials) else start
                yield self.text[position : min(special, start)], True
                position = min(special, start)
            yield self.text[position:start], False
            yield self.text[start:end], True
            position = end

    def between(self, start: int, end: int) -> "PromptText":
        """Return a part of the prompt, which no literal part crosses."""
        inside = self.literal[bisect_left(self.literal, (start,)) : bisect_left(self.literal, (end,))]
        return PromptText(self.text[start:end], tuple((a - start, b - start) for a, b in inside))


def joined(*parts: PromptText | str) -> PromptText:
    """Concatenate texts and prompts."""
    texts, literal, length = [], [], 0
    for part in parts:
        prompt = PromptText(part) if isinstance(part, str) else part
        literal += [(start + length, end + length) for start, end in prompt.literal]
        texts.append(prompt.text)
        length += len(prompt.text)
    return PromptText("".join(texts), tuple(literal))


class Placeholders:
    """Replaces texts of special tokens by placeholders, and back."""

    def __init__(self, find: FindSpans) -> None:
        self._find = find
        self._numbers: dict[str, int] = {}  # equal texts have one placeholder: templates compare them
        self._nonce = f"{secrets.randbelow(10**16):016}"  # digits: templates change the case of letters

    def hide_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return the messages with placeholders in all fields, except in messages of the assistant."""
        return [self._hide_message(message) for message in messages]

    def hide(self, value: Any) -> Any:
        """Return a value of JSON with placeholders in its texts and names."""
        if isinstance(value, str):
            return self._hide_text(value)
        if isinstance(value, Mapping):
            return {self.hide(name): self.hide(each) for name, each in value.items()}
        return [self.hide(each) for each in value] if isinstance(value, list | tuple) else value

    def restore(self, text: str) -> PromptText:
        """Return a rendered text with the texts that its placeholders stand for."""
        if not self._numbers:
            return PromptText(text)
        texts = list(self._numbers)
        pieces = re.split(rf"{self._nonce}x(\d+)x", text, flags=re.IGNORECASE)
        parts: list[PromptText | str] = []
        for number, piece in enumerate(pieces):
            if number % 2:
                hidden = texts[int(piece)]
                parts.append(PromptText(hidden, ((0, len(hidden)),)))
            else:
                parts.append(piece)
        return joined(*parts)

    def _hide_message(self, message: Any) -> Any:
        if not isinstance(message, Mapping) or message.get("role") == "assistant":
            return message
        content = message.get("content")
        if isinstance(content, list | tuple) and len(content) > 1 and self._formed_by_joining(content):
            text = "".join(part["text"] for part in content)
            message = {**message, "content": [{"type": "text", "text": text}]}
        return {name: value if name == "role" else self.hide(value) for name, value in message.items()}

    def _formed_by_joining(self, parts: Sequence[Any]) -> bool:
        """Return whether a special token's text begins in one part of a content and ends in another, also if
        the template strips the parts."""
        given = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
        texts = [text for text in given if isinstance(text, str)]
        if len(texts) < len(given):
            return False
        count = sum(len(self._find(text)) for text in texts)
        return any(
            len(self._find("".join(each))) != count for each in (texts, [text.strip() for text in texts])
        )

    def _hide_text(self, text: str) -> str:
        pieces, position = [], 0
        for start, end in self._find(text):
            number = self._numbers.setdefault(text[start:end], len(self._numbers))
            pieces += [text[position:start], f"{self._nonce}x{number}x"]
            position = end
        return "".join([*pieces, text[position:]])
