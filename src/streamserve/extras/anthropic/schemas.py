"""POST /v1/messages: the request, the reply and the stream events, as Anthropic defines them."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from streamserve.api.openai.schemas import Model, SamplingFields, about, output_limit
from streamserve.protocol.sampling import MAX_STOP_LENGTH, MAX_STOP_STRINGS

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]

Messages = Annotated[
    list[dict[str, Any]],
    about(
        "the conversation: objects with role and content; a last message of the assistant is continued",
        minItems=1,
        examples=[[{"role": "user", "content": "Say hello."}]],
    ),
]
System = Annotated[str | list[dict[str, Any]] | None, about("the system message: a text, or text blocks")]
ToolList = Annotated[list[dict[str, Any]], about("tools that the model may call: name, input_schema")]
ToolChoice = Annotated[
    dict[str, Any] | None,
    about("type: auto, any, tool (with its name) or none; disable_parallel_tool_use"),
]
Thinking = Annotated[
    dict[str, Any] | None,
    about("type: enabled, adaptive or disabled, if the model's chat template supports it"),
]
OutputConfig = Annotated[
    dict[str, Any] | None, about("format: a json_schema that the output must match; effort")
]


class MessagesRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages. Sampling fields of the other routes are obeyed, too."""

    max_tokens: Annotated[
        int,
        output_limit(
            "maximum number of output tokens; the output also ends at the end of the context", minimum=0
        ),
    ]
    messages: Messages
    system: System = None
    tools: ToolList = msgspec.field(default_factory=list)
    tool_choice: ToolChoice = None
    thinking: Thinking = None
    output_config: OutputConfig = None
    stop_sequences: Annotated[
        list[str],
        about(
            f"texts that end the output, at most {MAX_STOP_STRINGS} of up to {MAX_STOP_LENGTH} characters",
            maxItems=MAX_STOP_STRINGS,
        ),
    ] = msgspec.field(default_factory=list)
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, about("further variables for the model's chat template")
    ] = None
    metadata: Annotated[dict[str, Any] | None, about("without effect: named in the Warning header")] = None


class CountTokensRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens: the fields of a message that determine its prompt."""

    model: Model = None
    messages: Messages
    system: System = None
    tools: ToolList = msgspec.field(default_factory=list)
    tool_choice: ToolChoice = None
    thinking: Thinking = None
    output_config: OutputConfig = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, about("further variables for the model's chat template")
    ] = None


class CountTokensReply(msgspec.Struct, frozen=True):
    """The number of the prompt's tokens."""

    input_tokens: int


class TextBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Text of the model's message."""

    text: str = ""


class ThinkingBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """The model's reasoning. It is not signed: the signature is empty."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """A tool call. Arguments that are not a JSON object are under the key `invalid_json`, as text."""

    id: str
    name: str
    input: dict[str, Any] = {}


Block = TextBlock | ThinkingBlock | ToolUseBlock


class ThinkingTokens(msgspec.Struct, frozen=True):
    """The number of output tokens that are reasoning."""

    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts. The prompt has `input_tokens` tokens, and `cache_read_input_tokens` more that were found
    in the cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    output_tokens_details: ThinkingTokens | UnsetType = UNSET


class MessageReply(msgspec.Struct, frozen=True, kw_only=True):
    """The model's message."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[Block] = []
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class EventDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The change that an event makes: to a block if it has a `type`, otherwise to the message."""

    type: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: StopReason | UnsetType = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessageEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream: `type` determines which of the other fields it has."""

    type: str
    message: MessageReply | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: Block | UnsetType = UNSET
    delta: EventDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET
