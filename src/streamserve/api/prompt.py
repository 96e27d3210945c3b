"""An encoded prompt: token ids for the engine, and the text that routes repeat in replies."""

from collections.abc import Iterator
from dataclasses import dataclass

from streamserve.text.detokenize import detokenizer
from streamserve.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class EncodedPrompt:
    """Token ids, and the text they were encoded from, if any."""

    ids: list[int]
    text: str | None = None

    def echo(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> str:
        """Return the prompt as text."""
        return tokenizer.decode(self.ids, skip_special_tokens) if self.text is None else self.text

    def truncated(self, truncate_to: int | None) -> "EncodedPrompt":
        """Return the last `truncate_to` tokens, without text. If `truncate_to` is None, or the prompt is no
        longer than that, return the prompt itself."""
        return (
            self
            if truncate_to is None or len(self.ids) <= truncate_to
            else EncodedPrompt(self.ids[-truncate_to:])
        )

    def offsets(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> Iterator[int]:
        """Yield for each token the number of characters of `echo` before it."""
        reader = detokenizer(tokenizer, skip_special_tokens and self.text is None)
        length = 0
        for position, token in enumerate(self.ids):
            yield length
            if position > 0 or not self._is_added(tokenizer):
                length += len(reader.feed(token))

    def _is_added(self, tokenizer: Tokenizer) -> bool:
        """Return whether the first token was added by the tokenizer, and is not in the text."""
        if self.text is None or self.ids[0] != tokenizer.bos_token_id:
            return False
        return not self.text.startswith(tokenizer.special_tokens["bos_token"])
