"""POST /v1/responses: the request, the reply and the stream events, as OpenAI defines them."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from streamserve.api.openai.schemas import SamplingFields, about, output_limit
from streamserve.protocol.sampling import MAX_LOGPROBS

LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that requests log-probabilities."""

ENCRYPTED_REASONING = "reasoning.encrypted_content"

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class ResponseRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses. `input` is the whole conversation, or the continuation of a stored response."""

    input: Annotated[
        str | list[dict[str, Any]],
        about(
            "the user's text, or items: messages, function calls and their outputs, reasoning",
            minItems=1,
            examples=["Say hello.", [{"role": "user", "content": "Say hello."}]],
        ),
    ]
    instructions: Annotated[str | None, about("the system message, before all input")] = None
    max_output_tokens: Annotated[
        int | None,
        output_limit(
            "maximum number of tokens of the output; limited to what the prompt leaves of the context",
            minimum=1,
        ),
    ] = None
    include: Annotated[
        list[str],
        about(
            f"additional parts of the output: {LOGPROBS}",
            items={"enum": [LOGPROBS, ENCRYPTED_REASONING]},
        ),
    ] = msgspec.field(default_factory=list)
    top_logprobs: Annotated[
        int | None,
        about(f"alternatives for each token; needs {LOGPROBS} included", minimum=0, maximum=MAX_LOGPROBS),
    ] = None
    text: Annotated[dict[str, Any] | None, about("format: text, json_object or json_schema")] = None
    tools: Annotated[
        list[dict[str, Any]],
        about("tools that may be called: functions, custom tools, and namespaces of both"),
    ] = msgspec.field(default_factory=list)
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        about("none, auto, required, a function or a custom tool by name, or some of the tools"),
    ] = None
    parallel_tool_calls: Annotated[bool, about("whether several functions may be called in one response")] = (
        True
    )
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, about("further variables for the model's chat template")
    ] = None
    reasoning: Annotated[
        dict[str, Any] | None,
        about("effort: how much to reason, if the model's chat template supports it; none: no reasoning"),
    ] = None
    store: Annotated[
        bool | None, about("false: do not keep the response for previous_response_id and GET")
    ] = None
    previous_response_id: Annotated[
        str | None, about("id of a stored response, whose input and output come before this input")
    ] = None


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the most likely tokens."""

    token: str
    logprob: float
    bytes: list[int]


class TextLogprob(msgspec.Struct, frozen=True):
    """A token and the most likely alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """Text of the model's message."""

    text: str = ""
    annotations: list[dict[str, Any]] = []
    logprobs: list[TextLogprob] = []


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Text of the model's reasoning."""

    text: str = ""


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """The model's message."""

    id: str
    status: Status
    role: str = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """The model's reasoning."""

    id: str
    status: Status
    summary: list[str] = []
    content: list[ReasoningText] = []


class CallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A function call of the model. `arguments` is JSON."""

    id: str
    status: Status
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str = ""


class CustomCallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool. `input` is text."""

    id: str
    status: Status
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    input: str = ""


Item = MessageItem | ReasoningItem | CallItem | CustomCallItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    """The number of prompt tokens that were in the cache. Cache writes are not charged."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """The number of output tokens that are reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a request."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    slo_met: bool | UnsetType = UNSET
    ttft_ms: float | UnsetType | None = UNSET
    tpot_ms: float | UnsetType | None = UNSET


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why a response ended early."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(msgspec.Struct, frozen=True):
    """Why a response failed while it was streamed."""

    code: str
    message: str


class ResponseReply(msgspec.Struct, frozen=True, kw_only=True):
    """The response in its current state, with the fields of the request. Some fields are always null: they
    are present for clients that read them unconditionally."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[Item] = []
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int | None
    text: dict[str, Any]
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    metadata: dict[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    truncation: Literal["disabled"] = "disabled"
    reasoning: dict[str, Any]
    store: bool = False
    background: bool = False
    previous_response_id: str | None
    max_tool_calls: None = None
    prompt: None = None
    service_tier: None = None


class DeletedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response that is no longer stored."""

    id: str
    object: str = "response"
    deleted: bool = True


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream: `type` determines which of the other fields it has."""

    type: str
    sequence_number: int
    response: ResponseReply | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: Item | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[TextLogprob] | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
