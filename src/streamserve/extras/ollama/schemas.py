"""Requests, replies and lines of streams, as Ollama defines them."""

from datetime import datetime
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from streamserve.api.openai.replies import ChatLogprob
from streamserve.api.openai.schemas import Model, about, output_limit
from streamserve.protocol.sampling import MAX_LOGPROBS, MAX_STOP_LENGTH, MAX_STOP_STRINGS

Options = Annotated[
    dict[str, Any] | None,
    about("sampling: temperature, top_k, top_p, min_p, seed, num_predict, stop, repeat_penalty and others"),
]
KeepAlive = Annotated[
    str | float | None, about("without effect: the server's settings say when models are unloaded")
]


class OllamaOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options that are obeyed. None means not set."""

    temperature: Annotated[float | None, about("0 selects the most likely token")] = None
    top_k: Annotated[int | None, about("sample from this many most likely tokens; 0: all")] = None
    top_p: Annotated[float | None, about("nucleus sampling")] = None
    min_p: Annotated[
        float | None, about("sample from tokens whose probability is at least this share of the highest")
    ] = None
    seed: Annotated[int | None, about("the same seed gives the same text; -1: not set")] = None
    num_predict: Annotated[
        int | None, output_limit("maximum number of output tokens; 0 or less: no limit")
    ] = None
    stop: Annotated[
        str | list[str] | None,
        about(f"texts that end the output, at most {MAX_STOP_STRINGS} of {MAX_STOP_LENGTH} characters"),
    ] = None
    repeat_penalty: Annotated[
        float | None, about("divides the logits of tokens in the prompt or the output")
    ] = None
    presence_penalty: Annotated[float | None, about("subtracted from logits of generated tokens")] = None
    frequency_penalty: Annotated[float | None, about("subtracted once for each occurrence")] = None


class OllamaRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields common to /api/chat and /api/generate."""

    model: Model = None
    stream: Annotated[bool, about("send lines of JSON while the text is generated, instead of one reply")] = (
        True
    )
    format: Annotated[str | dict[str, Any] | None, about("json, or a JSON schema for the text")] = None
    options: Options = None
    think: Annotated[
        bool | str | None,
        about("whether to reason, or how much: low, medium, high; if the model's template supports it"),
    ] = None
    keep_alive: KeepAlive = None
    logprobs: Annotated[bool, about("log-probabilities of the text's tokens")] = False
    top_logprobs: Annotated[
        int | None, about("number of alternatives per token", minimum=0, maximum=MAX_LOGPROBS)
    ] = None


class OllamaChatRequest(OllamaRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /api/chat. Without messages, the model is loaded."""

    messages: Annotated[
        list[dict[str, Any]],
        about(
            "the conversation: objects with role and content; a last message of the assistant is continued",
            examples=[[{"role": "user", "content": "Say hello."}]],
        ),
    ] = []
    tools: Annotated[list[dict[str, Any]], about("functions that the model may call")] = []


class OllamaGenerateRequest(OllamaRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /api/generate. Without a prompt, the model is loaded."""

    prompt: Annotated[str, about("the message of the user; with raw, the whole prompt")] = ""
    system: Annotated[str, about("the system message")] = ""
    raw: Annotated[bool, about("use no chat template")] = False


class OllamaEmbedRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /api/embed."""

    model: Model = None
    input: Annotated[str | list[str], about("a text, or texts", examples=["Once upon a time"])]
    truncate: Annotated[bool, about("use the first tokens of a text that is too long; false: refuse it")] = (
        True
    )
    dimensions: Annotated[int | None, about("number of leading dimensions to return", minimum=1)] = None


class OllamaEmbeddingsRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /api/embeddings, the older route for one text."""

    model: Model = None
    prompt: Annotated[str, about("a text", examples=["Once upon a time"])]


class OllamaShowRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /api/show."""

    model: Model = None
    name: Annotated[str | None, about("older name of model")] = None


class OllamaFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function and its arguments. Arguments that are not a JSON object are under the key `invalid_json`,
    as text."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call, always whole."""

    id: str
    function: OllamaFunction


class OllamaMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The model's message, or the next part of it in a stream."""

    role: str = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class OllamaReply(msgspec.Struct, frozen=True, kw_only=True):
    """Fields common to replies and lines of a stream. Only the last line has the reason, the durations in
    nanoseconds, and the counts of tokens."""

    model: str
    created_at: datetime
    done: bool
    done_reason: str | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class OllamaChatReply(OllamaReply, frozen=True, kw_only=True):
    """The reply of /api/chat, or one line of its stream."""

    message: OllamaMessage


class OllamaGenerateReply(OllamaReply, frozen=True, kw_only=True):
    """The reply of /api/generate, or one line of its stream."""

    response: str
    thinking: str | UnsetType = UNSET


class OllamaEmbedReply(msgspec.Struct, frozen=True, kw_only=True):
    """The embeddings of all texts, in their order."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsReply(msgspec.Struct, frozen=True):
    """The embedding of the text."""

    embedding: list[float]


class OllamaDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is. Values that are only known of a loaded model are empty otherwise."""

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class OllamaModel(msgspec.Struct, frozen=True, kw_only=True):
    """One name of a model. `size`: the bytes of its weights; for a model that is loaded on demand, all bytes
    that it takes while it is loaded. Only loaded models have `size_vram` (bytes) and `context_length`
    (tokens)."""

    name: str
    model: str
    modified_at: datetime | UnsetType = UNSET
    size: int
    digest: str
    details: OllamaDetails
    size_vram: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET


class OllamaModels(msgspec.Struct, frozen=True):
    """Names of models."""

    models: list[OllamaModel]


class OllamaShowReply(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a model: its sampling defaults, chat template, sizes and capabilities."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, str | int]
    capabilities: list[str]
    modified_at: datetime


class OllamaVersion(msgspec.Struct, frozen=True):
    """`version`: the version of Ollama's API whose fields are known here; `server`: this server's version."""

    version: str
    server: str
