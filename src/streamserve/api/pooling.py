"""Runs prompts whose results are vectors, for embeddings and scores."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from streamserve.api.context import AppContext
from streamserve.api.generation import GenerationTask, generate, new_id
from streamserve.api.generator import Item
from streamserve.api.http.limits import MAX_CHOICES
from streamserve.api.prompt import EncodedPrompt
from streamserve.contracts.embedding import EmbeddingConfig
from streamserve.protocol.errors import RequestError, context_overflow
from streamserve.protocol.messages import Pooled
from streamserve.protocol.request_options import RequestOptions
from streamserve.protocol.sampling import SamplingParams

NUMBER_BYTES = 64
"""Bytes of one number of an embedding until the reply is sent: a float in a list, and its JSON."""
LARGE_REPLY = 1 << 15
"""A reply with more numbers takes several milliseconds to encode."""


class PoolingUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a request. All are prompt tokens."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


@dataclass(frozen=True)
class Vectors:
    """The vectors of a request's prompts: float32 numbers, little-endian."""

    id: str
    vectors: list[bytes]
    usage: PoolingUsage


async def pool(
    context: AppContext,
    kind: str,
    prompts: Sequence[EncodedPrompt],
    params: SamplingParams,
    options: RequestOptions,
) -> Vectors:
    """Return the vectors of `prompts`, for a reply whose id begins with `kind`. Raises RequestError as
    `generate` does."""
    name = new_id(kind)
    tasks = [
        GenerationTask(number, f"{name}-{number}", prompt, params, options)
        for number, prompt in enumerate(prompts)
    ]
    vectors = [b""] * len(tasks)

    async def handle(task: GenerationTask, item: Item) -> None:
        if isinstance(item, Pooled):
            vectors[task.number] = item.vector

    await generate(context, tasks, handle)
    tokens = sum(len(prompt.ids) for prompt in prompts)
    return Vectors(name, vectors, PoolingUsage(prompt_tokens=tokens, total_tokens=tokens))


def check_count(context: AppContext, count: int, field: str) -> None:
    """Raise RequestError unless a request may have `count` prompts."""
    limit = min(context.settings.max_requests, MAX_CHOICES)
    if not 1 <= count <= limit:
        raise RequestError(f"{field} has {count} entries: 1 to {limit} are allowed", field=field)


def check_lengths(prompts: Sequence[EncodedPrompt], limit: int, field: str) -> None:
    """Raise RequestError if a prompt has more tokens than `limit`, the longest text that the model takes."""
    longest = max(len(prompt.ids) for prompt in prompts)
    if longest > limit:
        raise context_overflow(longest, limit, limit, field)


def checked_truncation(truncate_to: int, least: int, limit: int) -> int:
    """Return the number of tokens of a truncated prompt. Raises RequestError if it is not between `least` and
    `limit`, the longest text that the model takes; -1 stands for `limit`."""
    count = limit if truncate_to == -1 else truncate_to
    if not least <= count <= limit:
        raise RequestError(
            f"truncate_prompt_tokens must be -1 or between {least} and the {limit} tokens that the model "
            f"takes, got {count}",
            field="truncate_prompt_tokens",
        )
    return count


def truncated(
    context: AppContext, prompts: list[EncodedPrompt], truncate_to: int | None, limit: int, special: bool
) -> list[EncodedPrompt]:
    """Return prompts of at most `truncate_to` tokens: the first tokens of a text are left out, but not the
    `special` tokens that the tokenizer adds. Raises RequestError as `checked_truncation` does."""
    if truncate_to is None:
        return prompts
    before, after = context.llm.tokenizer.added_special_tokens if special else ([], [])
    count = checked_truncation(truncate_to, len(before) + len(after) + 1, limit)
    return [
        prompt
        if len(prompt.ids) <= count
        else EncodedPrompt(before + prompt.ids[len(before) + len(prompt.ids) - count :])
        for prompt in prompts
    ]


def longest_text(context: AppContext, config: EmbeddingConfig) -> int:
    """Return the length in tokens of the longest text that the model embeds."""
    return min(config.max_tokens or context.llm.model.max_model_len, context.llm.model.max_model_len)


def embedding_config(context: AppContext) -> EmbeddingConfig:
    """Return the model's embedding settings. Raises RequestError if its task is not to embed."""
    config = context.llm.embedding
    if config is None:
        raise RequestError(
            f"the task of this server's model is {context.llm.task}, not embed: start a server with an "
            "embedding model, or with --task embed",
            field="model",
        )
    return config
