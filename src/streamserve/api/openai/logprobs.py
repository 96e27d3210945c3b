"""Log-probabilities in three formats: OpenAI's for completions, OpenAI's for chats, and vLLM's for
prompts."""

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from streamserve.api.openai.replies import (
    ChatLogprob,
    ChatLogprobs,
    ChatTopLogprob,
    CompletionLogprobs,
    PromptLogprobTable,
    RankedLogprob,
)
from streamserve.api.prompt import EncodedPrompt
from streamserve.protocol.messages import PromptLogprob
from streamserve.text.output import TokenLogprob, TopToken
from streamserve.text.tokenizer import Tokenizer

_ENCODER = msgspec.json.Encoder()
_MIN_LOGPROB = -9999.0
"""Replaces -inf, the log-probability of a masked token, which JSON cannot represent."""


def chat_logprobs(
    entries: Iterable[TokenLogprob], as_ids: bool = False, packed: bool = False
) -> ChatLogprobs:
    """Build the log-probabilities of a message's tokens.

    With `as_ids`, tokens are written as token_id:123; with `packed`, each entry is encoded as JSON at once.
    """
    pack: Callable[[ChatLogprob], Any] = _as_json if packed else lambda entry: entry
    return ChatLogprobs([pack(_chat_logprob(entry, as_ids)) for entry in entries])


def _chat_logprob(entry: TokenLogprob, as_ids: bool) -> ChatLogprob:
    return ChatLogprob(
        _name(entry, as_ids),
        _finite(entry.logprob),
        list(entry.bytes),
        [ChatTopLogprob(_name(top, as_ids), _finite(top.logprob), list(top.bytes)) for top in entry.top],
    )


def completion_logprobs(
    entries: Iterable[TokenLogprob], shift: int = 0, as_ids: bool = False, packed: bool = False
) -> CompletionLogprobs:
    """Build the log-probabilities of a completion's tokens.

    The text begins `shift` characters into the choice's text. With `packed`, alternatives are encoded as JSON
    at once.
    """
    table = CompletionLogprobs([], [], [], [])
    for entry in entries:
        tops = [(_name(top, as_ids), top.logprob) for top in entry.top]
        _append(table, _name(entry, as_ids), entry.logprob, tops, shift + entry.offset, packed)
    return table


def echo_logprobs(
    tokenizer: Tokenizer,
    prompt: EncodedPrompt,
    entries: Iterable[PromptLogprob],
    skip: bool,
    count: int,
    as_ids: bool = False,
    packed: bool = False,
) -> CompletionLogprobs:
    """Build the log-probabilities of an echoed prompt's tokens, with `count` alternatives each.

    The first token has none. With `packed`, alternatives are encoded as JSON at once.
    """
    offsets = list(prompt.offsets(tokenizer, skip))
    name = _id if as_ids else tokenizer.token_text
    table = CompletionLogprobs([name(prompt.ids[0])], [None], [None], offsets[:1])
    for entry, offset in zip(entries, offsets[1:], strict=False):
        tops = [(name(top.token), top.logprob) for top in entry.top[:count]]
        _append(table, name(entry.token), entry.logprob, tops, offset, packed)
    return table


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Concatenate two tables."""
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def prompt_logprobs(tokenizer: Tokenizer, entries: Iterable[PromptLogprob], count: int) -> PromptLogprobTable:
    """Build vLLM's prompt_logprobs: a table by token id for each prompt token, with `count` alternatives."""
    table: PromptLogprobTable = [None]
    for entry in entries:
        ranked = [(top.token, top.logprob, rank) for rank, top in enumerate(entry.top[:count], start=1)]
        table.append(
            _as_json(
                {
                    token: RankedLogprob(_finite(logprob), rank, tokenizer.token_text(token))
                    for token, logprob, rank in [*ranked, (entry.token, entry.logprob, entry.rank)]
                }
            )
        )
    return table


def _append(
    table: CompletionLogprobs,
    token: str,
    logprob: float,
    tops: list[tuple[str, float]],
    offset: int,
    packed: bool,
) -> None:
    """Append a token to `table`.

    The token is always among its alternatives. Of two tokens with equal text, the more likely one is
    retained.
    """
    likely: dict[str, float] = {}
    for text, value in [*tops, (token, logprob)]:
        likely.setdefault(text, _finite(value))
    table.tokens.append(token)
    table.token_logprobs.append(_finite(logprob))
    table.top_logprobs.append(_as_json(likely) if packed else likely)
    table.text_offset.append(offset)


def _name(entry: TokenLogprob | TopToken, as_ids: bool) -> str:
    return _id(entry.token) if as_ids else entry.bytes.decode("utf-8", errors="backslashreplace")


def _id(token: int) -> str:
    return f"token_id:{token}"


def _finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)


def _as_json(entry: Any) -> Any:
    """Encode `entry` as JSON: it takes a third of the memory, and is not scanned by the garbage collector."""
    return msgspec.Raw(_ENCODER.encode(entry))
