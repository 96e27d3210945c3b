"""Converts prompts from OpenAI's formats to token ids."""

from collections.abc import Sequence
from dataclasses import dataclass

from streamserve.api.generator import Generator
from streamserve.api.http.memory import TOKEN_BYTES, Charge
from streamserve.api.http.side_thread import SideThread
from streamserve.api.prompt import EncodedPrompt
from streamserve.protocol.errors import RequestError, context_overflow
from streamserve.text.prompt_text import PromptText

_THREAD_ABOVE = 8192
"""Texts with more characters in all take over a millisecond to tokenize: this is done in the side thread."""

_LITERAL_CHARACTERS = 32
"""A literal part takes as long to tokenize as this number of characters."""

_ENCODING_BYTES = 32
"""The tokenizer's peak memory per character while a text is encoded, in bytes."""


def truncation_limit(llm: Generator, requested: int | None, max_tokens: int | None) -> int | None:
    """Return how many of a prompt's last tokens `truncate_prompt_tokens` retains; None: all.

    -1 retains the tokens that fit in the context in addition to `max_tokens` of output. Raises RequestError
    for an invalid value.
    """
    max_model_len = llm.model.max_model_len
    if requested is None:
        return None
    if requested == -1:
        limit = max_model_len - (1 if max_tokens is None else max_tokens)
        if limit < 1:
            raise RequestError(
                "truncate_prompt_tokens -1 retains the tokens that fit in the context in addition to "
                f"max_tokens of output, but {max_tokens} leaves none of the context of {max_model_len}: "
                "lower it",
                field="truncate_prompt_tokens",
            )
        return limit
    if not 1 <= requested <= max_model_len:
        raise RequestError(
            f"truncate_prompt_tokens must be -1 or between 1 and the context of {max_model_len}, "
            f"got {requested}",
            field="truncate_prompt_tokens",
        )
    return requested


@dataclass(frozen=True)
class Encoder:
    """Encodes the prompts of one request, and charges their tokens to `charge`. Large texts are encoded in
    `side_thread`. `field` is the name of the request's field, for error messages."""

    llm: Generator
    side_thread: SideThread
    charge: Charge
    field: str = "prompt"

    async def encode(
        self,
        texts: Sequence[str | PromptText],
        add_special_tokens: bool,
        field: str,
        truncate_to: int | None = None,
    ) -> list[EncodedPrompt]:
        """Tokenize `texts`. Special tokens in a `str` are recognized. If `truncate_to` is given,
        retain only the last tokens of each.

        Raises RequestError if a text has more characters than a full context of the longest tokens.
        """
        max_model_len, tokenizer = self.llm.model.max_model_len, self.llm.tokenizer
        prompt_texts = [PromptText(text) if isinstance(text, str) else text for text in texts]
        longest = max(len(each.text) for each in prompt_texts)
        if longest > max_model_len * tokenizer.longest_token:
            tokens = -(-longest // tokenizer.longest_token)
            raise context_overflow(tokens, max_model_len, max_model_len, field, at_least=True)
        size = sum(len(each.text) + _LITERAL_CHARACTERS * len(each.literal) for each in prompt_texts)
        prompts = []
        for each in prompt_texts:
            if size > _THREAD_ABOVE:
                ids = await self._encode_in_thread(each, add_special_tokens)
            else:
                ids = tokenizer.encode_prompt(each, add_special_tokens)
            prompt = EncodedPrompt(ids, each.text)
            prompt = prompt.truncated(truncate_to)
            self.charge.add(TOKEN_BYTES * len(prompt.ids))
            prompts.append(prompt)
        return prompts

    async def _encode_in_thread(self, prompt: PromptText, add_special_tokens: bool) -> list[int]:
        size = _ENCODING_BYTES * len(prompt.text)
        self.charge.add(size)
        try:
            encode = self.llm.tokenizer.encode_prompt_without_gil
            return await self.side_thread.run(lambda: encode(prompt, add_special_tokens))
        finally:
            self.charge.release(size)


async def completion_prompts(
    encoder: Encoder,
    prompt: str | list[str | int | list[int]],
    add_special_tokens: bool,
    limit: int,
    truncate_to: int | None = None,
) -> list[EncodedPrompt]:
    """Return the prompts of a completion request: a single prompt, or one for each entry of its list.

    Raises RequestError if the list mixes types, has too many prompts, or if a prompt does not fit.
    """
    field = encoder.field
    if isinstance(prompt, str):
        return await encoder.encode([prompt], add_special_tokens, field, truncate_to)
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [_from_ids(encoder.llm, prompt, truncate_to, field)]  # type: ignore[arg-type]
    if len(kinds) != 1:
        raise RequestError(f"{field} must be all texts, all token ids or all lists of them", field=field)
    if len(prompt) > limit:
        raise RequestError(f"{field} holds {len(prompt)} prompts; at most {limit} are allowed", field=field)
    if kinds == {str}:
        return await encoder.encode(prompt, add_special_tokens, field, truncate_to)  # type: ignore[arg-type]
    return [_from_ids(encoder.llm, ids, truncate_to, field) for ids in prompt]  # type: ignore[arg-type]


def _from_ids(llm: Generator, ids: list[int], truncate_to: int | None, field: str) -> EncodedPrompt:
    size, max_model_len = llm.model.vocab_size, llm.model.max_model_len
    if not ids:
        raise RequestError(f"{field} holds an empty list", field=field)
    if truncate_to is None and len(ids) > max_model_len:
        raise context_overflow(len(ids), max_model_len, max_model_len, field)
    if min(ids) < 0 or max(ids) >= size:
        wrong = next(token for token in ids if not 0 <= token < size)
        raise RequestError(f"{field} has token {wrong}, but the vocabulary has {size} tokens", field=field)
    return EncodedPrompt(ids).truncated(truncate_to)
