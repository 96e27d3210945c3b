"""Request schemas of OpenAI's API with vLLM's extensions."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from streamserve.api.http.body import LARGEST
from streamserve.protocol.sampling import (
    MAX_ALLOWED_TOKENS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    Slo,
    SpeculationLimits,
)


def about(text: str, **schema: Any) -> Meta:
    """Return the description of a field for the OpenAPI document.

    It does not validate: values are checked where they are used, with messages that name the field and the
    limit.
    """
    return Meta(description=text, extra_json_schema=schema or None)


LONGEST_OUTPUT = 2**31
"""The maximum of limits of an output's length, in tokens. It is beyond every context."""


def output_limit(text: str, **schema: Any) -> Meta:
    """Return the description of a field that limits an output's length. Larger integers than
    `LONGEST_OUTPUT`, without any bound, count as this number."""
    return Meta(description=text, extra_json_schema=schema, extra={LARGEST: LONGEST_OUTPUT})


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""Values of reasoning_effort."""

Model = Annotated[str | None, about("one of the names in /v1/models; by default the first name")]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Additional events and values of a stream."""

    include_usage: Annotated[bool, about("a final event with the usage")] = False
    continuous_usage_stats: Annotated[bool, about("with include_usage: the current usage in every event")] = (
        False
    )
    include_obfuscation: Annotated[bool, about("without effect")] = False


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields common to all generating routes. None means not set."""

    model: Model = None
    stream: Annotated[
        bool, about("send the text as server-sent events while it is generated, instead of one reply")
    ] = False
    temperature: Annotated[
        float | None,
        about("0 selects the most likely token (greedy); otherwise at least 0.001", minimum=0, maximum=100),
    ] = None
    top_p: Annotated[
        float | None,
        about(
            "sample from the most likely tokens whose probabilities sum to this (nucleus sampling)",
            exclusiveMinimum=0,
            maximum=1,
        ),
    ] = None
    top_k: Annotated[
        int | None, about("sample from this many most likely tokens; 0 or -1: all", minimum=-1, maximum=2**31)
    ] = None
    min_p: Annotated[
        float | None,
        about(
            "sample from tokens whose probability is at least this share of the highest", minimum=0, maximum=1
        ),
    ] = None
    presence_penalty: Annotated[
        float | None, about("subtracted from the logits of tokens generated so far", minimum=-2, maximum=2)
    ] = None
    frequency_penalty: Annotated[
        float | None,
        about("subtracted once for each occurrence of a token generated so far", minimum=-2, maximum=2),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        about("divides the logits of tokens in the prompt or the output; 1: none", minimum=0.01, maximum=100),
    ] = None
    logit_bias: Annotated[
        dict[str, float] | None,
        about(
            "maps a token id to the value added to its logit",
            maxProperties=MAX_LOGIT_BIAS,
            propertyNames={"pattern": "^[0-9]{1,19}$"},
            additionalProperties={"type": "number", "minimum": -100, "maximum": 100},
        ),
    ] = None
    allowed_token_ids: Annotated[
        list[int] | None, about("only these tokens may be generated", minItems=1, maxItems=MAX_ALLOWED_TOKENS)
    ] = None
    seed: Annotated[
        int | None,
        about(
            "the same seed gives the same text, whatever other requests are served",
            minimum=-(2**63),
            maximum=2**64 - 1,
        ),
    ] = None
    min_tokens: Annotated[int | None, about("minimum number of output tokens", minimum=0, maximum=2**31)] = (
        None
    )
    stop: Annotated[
        str | list[str] | None,
        about(
            f"texts that end the output, at most {MAX_STOP_STRINGS} of up to {MAX_STOP_LENGTH} characters",
            minLength=1,
            maxLength=MAX_STOP_LENGTH,
            maxItems=MAX_STOP_STRINGS,
        ),
    ] = None
    stop_token_ids: Annotated[
        list[int] | None, about("tokens that end the output", maxItems=MAX_STOP_TOKENS)
    ] = None
    ignore_eos: Annotated[bool | None, about("continue after an end-of-text token")] = None
    skip_special_tokens: Annotated[bool | None, about("leave special tokens out of the text")] = None
    include_stop_str_in_output: Annotated[
        bool | None, about("include the stop string that ended the output")
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        about(
            "retain only this many of the prompt's last tokens; -1: the tokens that fit in the context "
            "in addition to max_tokens",
            minimum=-1,
            maximum=2**31,
        ),
    ] = None
    speculation: Annotated[
        SpeculationLimits | None,
        about("limits on speculative decoding: enabled, max_depth, max_nodes; the text does not change"),
    ] = None
    slo: Annotated[
        Slo | None,
        about(
            "latency targets in milliseconds: tpot_ms for the mean time per output token after the first, "
            "ttft_ms for the first; also as headers x-slo-tpot-ms and x-slo-ttft-ms",
        ),
    ] = None
    priority: Annotated[
        int, about("requests with a lower value are served first", minimum=-(2**63), maximum=2**63 - 1)
    ] = 0
    cache_salt: Annotated[
        str | None, about("only requests with the same salt share cached prompts", minLength=1)
    ] = None
    user: Annotated[str | None, about("for the caller's own records, like the three fields after it")] = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None


class GenerationRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields common to completions and chats."""

    stream_options: StreamOptions | None = None
    n: Annotated[int | None, about("number of outputs", minimum=1, maximum=MAX_CHOICES)] = None
    max_tokens: Annotated[
        int | None,
        output_limit(
            "maximum number of tokens of one output; limited to what the prompt leaves of the context",
            minimum=0,
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        about(
            "log-probabilities of the prompt's tokens, with this many alternatives; not in streams",
            minimum=0,
            maximum=MAX_LOGPROBS,
        ),
    ] = None
    return_token_ids: Annotated[bool, about("return token ids in addition to the text")] = False
    return_tokens_as_token_ids: Annotated[
        bool, about('in log-probabilities, write tokens as "token_id:123"')
    ] = False
    response_format: Annotated[
        dict[str, Any] | None,
        about('the format of the output: {"type": "text", "json_object" or "json_schema", …}'),
    ] = None
    structured_outputs: Annotated[
        dict[str, Any] | None,
        about("vLLM's field for the format: json, json_object, regex, choice or grammar"),
    ] = None
    guided_json: Annotated[
        dict[str, Any] | str | bool | None, about("a JSON schema that the output must match")
    ] = None
    guided_regex: Annotated[str | None, about("a regular expression that the output must match")] = None
    guided_choice: Annotated[list[str] | None, about("texts, one of which is the output")] = None
    guided_grammar: Annotated[
        str | None, about("a grammar in Lark, or as llama.cpp writes it, that the output must follow")
    ] = None
    bad_words: Annotated[
        list[str],
        about("texts that the output must not contain; not with another output format, nor with tools"),
    ] = []


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. `prompt` is a text, a list of texts, token ids, or a list of lists of token
    ids."""

    prompt: Annotated[
        str | list[str | int | list[int]],
        about(
            "a text, a list of texts, token ids, or a list of lists of token ids",
            examples=["Once upon a time"],
        ),
    ]
    echo: Annotated[bool, about("begin the text with the prompt")] = False
    logprobs: Annotated[
        int | None,
        about("log-probabilities, with this many alternatives per token", minimum=0, maximum=MAX_LOGPROBS),
    ] = None
    best_of: Annotated[int | None, about("must equal n, if set", minimum=1, maximum=MAX_CHOICES)] = None
    add_special_tokens: Annotated[bool, about("let the tokenizer add its first token")] = True


class ChatRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions. The chat template includes special tokens, so by default none are added."""

    messages: Annotated[
        list[dict[str, Any]],
        about(
            "the conversation: objects with role and content",
            minItems=1,
            examples=[[{"role": "user", "content": "Say hello."}]],
        ),
    ]
    max_completion_tokens: Annotated[int | None, output_limit("newer name of max_tokens", minimum=0)] = None
    logprobs: Annotated[bool, about("log-probabilities of the tokens")] = False
    top_logprobs: Annotated[
        int | None, about("number of alternatives per token", minimum=0, maximum=MAX_LOGPROBS)
    ] = None
    add_special_tokens: Annotated[bool, about("let the tokenizer add its first token to the template's")] = (
        False
    )
    add_generation_prompt: Annotated[bool, about("open the assistant's message")] = True
    continue_final_message: Annotated[
        bool, about("continue the last message; requires add_generation_prompt false")
    ] = False
    chat_template: Annotated[
        str | None,
        about(
            "a chat template in Jinja in place of the model's own; refused unless the server has "
            "trust_request_chat_template"
        ),
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, about("further variables for the model's chat template")
    ] = None
    tools: Annotated[list[dict[str, Any]], about("functions and custom tools that the model may call")] = []
    tool_choice: Annotated[
        str | dict[str, Any] | None,
        about("none, auto, required, one tool that must be called, or some of the tools"),
    ] = None
    parallel_tool_calls: Annotated[bool | None, about("if false, the model makes at most one call")] = None
    include_reasoning: Annotated[bool, about("if false, omit the model's reasoning")] = True
    reasoning_effort: Annotated[
        Effort | None,
        about("how much to reason, if the model's chat template supports it; none: no reasoning"),
    ] = None
    enable_thinking: Annotated[
        bool | None, about("whether to reason, if the model's chat template supports it")
    ] = None
