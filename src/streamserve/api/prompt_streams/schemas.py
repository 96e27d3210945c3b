"""Requests and replies of the prompt stream routes."""

from typing import Annotated, Any, Literal

import msgspec

from streamserve.api.openai.schemas import GenerationRequest, StreamOptions, about, output_limit
from streamserve.protocol.sampling import MAX_LOGPROBS
from streamserve.text.prompt_chunks import MAX_OPERATIONS, ChunkOperation

DEFAULT_TEMPLATE = "{context}{query}"


class StreamRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/streams: how to answer a prompt that will arrive in chunks. With `messages` it is a chat, and
    the last message is the template. The other fields are fields of completions or of chats."""

    query: Annotated[str, about("the question about the context; computed last")] = ""
    template: Annotated[
        str | None,
        about(f"the prompt's text, with {{context}} and {{query}}; by default {DEFAULT_TEMPLATE!r}"),
    ] = None
    messages: Annotated[
        list[dict[str, Any]] | None,
        about(
            "the conversation: objects with role and content; the last message must have the role user, "
            "and is the template",
            minItems=1,
        ),
    ] = None
    answer_early: Annotated[
        bool,
        about(
            "generate answers before the prompt is finished, to be read at /answer; an edit withdraws the "
            "answer"
        ),
    ] = False
    expected_tokens: Annotated[
        int,
        about(
            "expected number of tokens of the finished prompt, for the router",
            minimum=0,
            maximum=2**31,
        ),
    ] = 0
    logprobs: Annotated[
        bool | int | None,
        about(
            "log-probabilities: true with messages, otherwise the number of alternatives",
            maximum=MAX_LOGPROBS,
        ),
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        about("let the tokenizer add its first token; by default true for texts, and false for messages"),
    ] = None
    max_completion_tokens: Annotated[
        int | None, output_limit("with messages: newer name of max_tokens", minimum=0)
    ] = None
    top_logprobs: Annotated[
        int | None, about("with messages: number of alternatives per token", minimum=0, maximum=MAX_LOGPROBS)
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, about("with messages: further variables for the model's chat template")
    ] = None
    tools: Annotated[
        list[dict[str, Any]] | None, about("with messages: functions that the model may call")
    ] = None
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        about("with messages: none, auto, required, one function that must be called, or some of the tools"),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, about("with messages: if false, the model makes at most one call")
    ] = None
    include_reasoning: Annotated[bool, about("with messages: if false, omit the model's reasoning")] = True


ONLY_OF_CHATS = (
    "max_completion_tokens",
    "top_logprobs",
    "chat_template_kwargs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "include_reasoning",
)


class EditRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """PATCH /v1/streams/{id}: all operations are applied in order. If one of them is invalid, none is
    applied."""

    version: Annotated[int, about("the version that the edit applies to", minimum=0)]
    operations: Annotated[
        list[ChunkOperation],
        about(
            "append, insert (before a chunk), replace or remove",
            minItems=1,
            maxItems=MAX_OPERATIONS,
            examples=[[{"op": "append", "text": "A document."}]],
        ),
    ]


class FinishRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/streams/{id}/finish: the prompt is complete. A null field keeps its value from the stream's
    creation."""

    version: Annotated[int | None, about("the version to answer; by default the current one")] = None
    stream: Annotated[bool | None, about("server-sent events as the text is generated")] = None
    stream_options: StreamOptions | None = None


class StreamReply(msgspec.Struct, frozen=True, kw_only=True):
    """A new stream."""

    id: str
    object: Literal["prompt_stream"] = "prompt_stream"
    version: int = 0


class EditReply(msgspec.Struct, frozen=True, kw_only=True):
    """The new version, and the id of the chunk that each operation added, changed or removed."""

    id: str
    version: int
    chunks: list[str]


class AnswerRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/streams/{id}/answer: the early answer as a stream of events."""

    stream_options: StreamOptions | None = None


class WithdrawnReply(msgspec.Struct, frozen=True, kw_only=True):
    """All events of the early answer so far are void: the context has changed and is now at `version`. The
    answer starts again with another id."""

    id: str
    version: int
    object: Literal["prompt_stream.withdrawn"] = "prompt_stream.withdrawn"


class ChunkState(msgspec.Struct, frozen=True):
    """A chunk, and the length of its text."""

    id: str
    characters: int


class StreamState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a stream. `tokens` is the length of the whole prompt, including template and query. The first
    `computed` of them have KV in the model's cache."""

    id: str
    object: Literal["prompt_stream"] = "prompt_stream"
    created: int
    model: str
    status: Literal["open", "answering"]
    version: int
    chunks: list[ChunkState]
    tokens: int
    computed: int


class DeletedReply(msgspec.Struct, frozen=True, kw_only=True):
    """The stream is deleted."""

    id: str
    deleted: bool = True
