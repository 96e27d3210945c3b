"""Prompts in the forms OpenAI takes them, as token ids."""

from collections.abc import Iterator
from dataclasses import dataclass

from streamserve.api.generator import Generator
from streamserve.api.http.memory import TOKEN_BYTES, Charge
from streamserve.api.http.side_thread import SideThread
from streamserve.protocol.errors import RequestError
from streamserve.text.detokenize import detokenizer
from streamserve.text.tokenizer import Tokenizer

_THREAD_ABOVE = 8192
"""Characters that take about a millisecond to tokenize; longer texts must not hold up other requests."""

_ENCODING_BYTES = 32
"""What a character takes in the tokenizer's memory while its text is encoded."""


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the text they were made from, if there was one."""

    ids: list[int]
    text: str | None = None

    def echo(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> str:
        """The prompt as text."""
        return tokenizer.decode(self.ids, skip_special_tokens) if self.text is None else self.text

    def truncated(self, keep: int | None) -> "Prompt":
        """The last `keep` tokens, which stand for themselves; all of it if that is None or enough."""
        return self if keep is None or len(self.ids) <= keep else Prompt(self.ids[-keep:])

    def offsets(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> Iterator[int]:
        """How many characters of `echo` come before each token."""
        reader = detokenizer(tokenizer, skip_special_tokens and self.text is None)
        length = 0
        for position, token in enumerate(self.ids):
            yield length
            if position > 0 or not self._is_added(tokenizer):
                length += len(reader.feed(token))

    def _is_added(self, tokenizer: Tokenizer) -> bool:
        """Whether the first token is the tokenizer's, and not in the text."""
        if self.text is None or self.ids[0] != tokenizer.bos_token_id:
            return False
        return not self.text.startswith(tokenizer.special_tokens["bos_token"])


def kept_tokens(llm: Generator, asked: int | None, max_tokens: int | None) -> int | None:
    """How many of a prompt's last tokens `truncate_prompt_tokens` leaves; None: all. -1 asks for what the
    context holds beside `max_tokens` of output. Raises RequestError for what makes no sense."""
    context = llm.model.max_model_len
    if asked is None:
        return None
    if asked == -1:
        return max(1, context - (1 if max_tokens is None else max_tokens))
    if not 1 <= asked <= context:
        raise RequestError(
            f"truncate_prompt_tokens must be -1 or between 1 and the context of {context}, got {asked}",
            field="truncate_prompt_tokens",
        )
    return asked


@dataclass(frozen=True)
class Encoder:
    """Makes prompts of texts for one request, whose `charge` has the tokens; `side` encodes what is large."""

    llm: Generator
    side: SideThread
    charge: Charge

    async def encode(
        self, texts: list[str], add_special_tokens: bool, field: str, keep: int | None = None
    ) -> list[Prompt]:
        """Tokenize `texts`; of each only the last `keep` tokens stay, if that is said. Raises RequestError if
        one has more characters than tokens of the model's context can have."""
        context, tokenizer = self.llm.model.max_model_len, self.llm.tokenizer
        longest = max(map(len, texts))
        if longest > context * tokenizer.longest_token:
            raise RequestError(
                f"{field} has {longest} characters, far more than a context of {context} tokens holds",
                field=field,
            )
        large = sum(map(len, texts)) > _THREAD_ABOVE
        prompts = []
        for text in texts:
            if large:
                prompt = Prompt(await self._encode_apart(text, add_special_tokens), text)
            else:
                prompt = Prompt(tokenizer.encode(text, add_special_tokens), text)
            prompt = prompt.truncated(keep)
            self.charge.add(TOKEN_BYTES * len(prompt.ids))
            prompts.append(prompt)
        return prompts

    async def _encode_apart(self, text: str, add_special_tokens: bool) -> list[int]:
        size = _ENCODING_BYTES * len(text)
        self.charge.add(size)
        try:
            encode = self.llm.tokenizer.encode_apart
            return (await self.side.run(lambda: encode([text], add_special_tokens)))[0]
        finally:
            self.charge.give(size)


async def completion_prompts(
    encoder: Encoder,
    given: str | list[str | int | list[int]],
    add_special_tokens: bool,
    limit: int,
    keep: int | None = None,
) -> list[Prompt]:
    """The prompts of a completion request: one, or as many as its list holds."""
    if isinstance(given, str):
        return await encoder.encode([given], add_special_tokens, "prompt", keep)
    kinds = {type(item) for item in given}
    if kinds == {int}:
        return [_from_ids(encoder.llm, given, keep)]  # type: ignore[arg-type]
    if len(kinds) != 1:
        raise RequestError("prompt must be all texts, all token ids or all lists of them", field="prompt")
    if len(given) > limit:
        raise RequestError(f"prompt holds {len(given)} prompts; at most {limit} are taken", field="prompt")
    if kinds == {str}:
        return await encoder.encode(given, add_special_tokens, "prompt", keep)  # type: ignore[arg-type]
    return [_from_ids(encoder.llm, ids, keep) for ids in given]  # type: ignore[arg-type]


def _from_ids(llm: Generator, ids: list[int], keep: int | None) -> Prompt:
    size, context = llm.model.vocab_size, llm.model.max_model_len
    if not ids:
        raise RequestError("prompt holds an empty list", field="prompt")
    if keep is None and len(ids) > context:
        raise RequestError(
            f"the prompt has {len(ids)} tokens, but the model's context holds {context}", field="prompt"
        )
    if min(ids) < 0 or max(ids) >= size:
        wrong = next(token for token in ids if not 0 <= token < size)
        raise RequestError(f"prompt has token {wrong}, but the vocabulary has {size} tokens", field="prompt")
    return Prompt(ids).truncated(keep)
