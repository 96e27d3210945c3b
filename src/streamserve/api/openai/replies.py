"""Responses and stream events in OpenAI's formats. vLLM's fields are included if they are requested."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from streamserve.text.latency import SloOutcome, combined
from streamserve.text.output import Usage

PromptLogprobTable = list[dict[int, "RankedLogprob"] | None]


class CachedTokens(msgspec.Struct, frozen=True):
    """The number of prompt tokens that were in the cache."""

    cached_tokens: int


class Predictions(msgspec.Struct, frozen=True):
    """The numbers of accepted and of rejected draft tokens (OpenAI's field names)."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageReply(msgspec.Struct, frozen=True):
    """Token counts of a request. With latency targets, also whether they were met, and the measured
    values."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: Predictions
    slo_met: bool | UnsetType = UNSET
    ttft_ms: float | UnsetType | None = UNSET
    tpot_ms: float | UnsetType | None = UNSET


def usage_reply(parts: Sequence[Usage]) -> UsageReply:
    """Return the usage of a request with several prompts."""
    prompt = sum(part.prompt_tokens for part in parts)
    completion = sum(part.completion_tokens for part in parts)
    cached = sum(part.cached_tokens for part in parts)
    drafted = sum(part.drafted_tokens for part in parts)
    accepted = sum(part.accepted_tokens for part in parts)
    predictions = Predictions(accepted, drafted - accepted)
    reply = UsageReply(prompt, completion, prompt + completion, CachedTokens(cached), predictions)
    return msgspec.structs.replace(reply, **slo_fields([part.slo for part in parts if part.slo]))


def slo_fields(outcomes: list[SloOutcome]) -> dict[str, Any]:
    """Return the fields of a usage that concern latency targets; none if there were no targets."""
    outcome = combined(outcomes)
    if outcome is None:
        return {}
    times = {"ttft_ms": outcome.ttft_ms, "tpot_ms": outcome.tpot_ms}
    return {"slo_met": outcome.met} | {name: ms and round(ms, 3) for name, ms in times.items()}


class RankedLogprob(msgspec.Struct, frozen=True):
    """vLLM's entry of prompt_logprobs."""

    logprob: float
    rank: int
    decoded_token: str


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Four lists of equal length, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A text, or the next delta of it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobTable | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of /v1/completions, or one event of its stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    service_tier: None = None
    choices: list[CompletionChoice]
    usage: UsageReply | UnsetType | None = UNSET


class ChatTopLogprob(msgspec.Struct, frozen=True):
    """One of the most likely tokens."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    """A token and the most likely alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a message's tokens."""

    content: list[ChatLogprob]
    refusal: None = None


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """A function call. Its arguments are JSON text, or the next delta of it in a stream."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class Custom(msgspec.Struct, frozen=True, kw_only=True):
    """A call of a custom tool. Its input is text. A stream sends the whole input in one event."""

    name: str
    input: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call, or the next delta of call number `index`. The first delta has id, type and name. A call
    of a custom tool has no function."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: Function | UnsetType = UNSET
    custom: Custom | UnsetType = UNSET


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The model's message, its tool calls, and its reasoning (under both names in use). Some fields are
    always null: they are present for clients that read them unconditionally."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The next delta of the message. The first delta has the role."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice: complete in `message`, or as a delta in `delta`. If `token_ids` is not requested, it is
    left out of a delta, and null in a complete choice."""

    index: int
    message: ChatMessage | UnsetType = UNSET
    delta: ChatDelta | UnsetType = UNSET
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType | None = UNSET


class ChatReply(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of /v1/chat/completions, or one event of its stream. If the last three fields are not
    requested, they are left out of events, and null in a complete reply. The first event of each choice has
    the prompt's token ids."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageReply | UnsetType | None = UNSET
    service_tier: UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobTable | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
