"""Prompts of scripts, in the forms that vLLM takes: a text, token ids, or a mapping with one of them."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NotRequired, TypedDict, cast

from streamserve.protocol.errors import RequestError


class TextPrompt(TypedDict):
    """A text. Only prompts with the same `cache_salt` share cached prefixes."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Token ids, and optionally the text that they are from."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt


@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter as vLLM names it. An adapter that is not loaded yet is loaded from the folder
    `lora_path`. `lora_int_id` has no effect: adapters are known by their names."""

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt's text, token ids, or both; the ids are then those of the text."""

    text: str | None
    ids: list[int] | None
    cache_salt: str = ""


_NOT_SERVED = {
    "multi_modal_data": "only text is served",
    "multi_modal_uuids": "only text is served",
    "mm_processor_kwargs": "only text is served",
    "prompt_embeds": "a prompt must consist of tokens: give prompt_token_ids",
    "encoder_prompt": "there are no encoders: give prompt",
    "decoder_prompt": "there are no encoders: give prompt",
}


def read_prompt(prompt: Prompt) -> ReadPrompt:
    """Return the parts of a prompt; token ids may be of any integer type.

    Raises TypeError for another type, RequestError for an entry that is not served.
    """
    if isinstance(prompt, str):
        return ReadPrompt(prompt, None)
    if isinstance(prompt, Mapping):
        return _read_mapping(cast(Mapping[str, Any], prompt))
    return ReadPrompt(None, _token_ids(prompt))


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list. Token ids may be any Integral type, such as numpy's."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    is_list = isinstance(prompts, Sequence) or hasattr(prompts, "__array__")
    if not is_list or isinstance(prompts, bytes | bytearray):
        raise TypeError(
            "prompts must be a string, token ids, a mapping with prompt or prompt_token_ids, or a list of "
            f"them, not {prompts!r:.80}"
        )
    if len(prompts) and isinstance(prompts[0], Integral):
        return [cast(Sequence[int], prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _read_mapping(prompt: Mapping[str, Any]) -> ReadPrompt:
    given = {name: value for name, value in prompt.items() if value is not None}
    for name in given:
        if name not in ("prompt", "prompt_token_ids", "cache_salt"):
            reason = _NOT_SERVED.get(name, "a prompt has prompt, prompt_token_ids and cache_salt")
            raise RequestError(f"{name}: {reason}", field=name)
    text, ids = given.get("prompt"), given.get("prompt_token_ids")
    if text is None and ids is None:
        raise RequestError("a prompt needs prompt or prompt_token_ids", field="prompt")
    if not isinstance(text, str | None):
        raise TypeError(f"a prompt's text must be a string, not {type(text).__name__}")
    return ReadPrompt(text, None if ids is None else _token_ids(ids), given.get("cache_salt", ""))


def _token_ids(prompt: Any) -> list[int]:
    try:
        if isinstance(prompt, bytes | bytearray):  # its elements are integers, too
            raise TypeError
        return [operator.index(token) for token in prompt]
    except TypeError:
        raise TypeError(f"a prompt must be a text or token ids, not {type(prompt).__name__}") from None
