"""Converts a request's sampling fields to SamplingParams. Defaults are the operator's, then OpenAI's."""

from collections.abc import Mapping
from typing import Any

import msgspec

from streamserve.api.openai.schemas import ChatRequest, CompletionRequest, GenerationRequest, SamplingFields
from streamserve.protocol.errors import RequestError
from streamserve.protocol.field_errors import InvalidField
from streamserve.protocol.sampling import SamplingParams, check_biases, check_sampling

_CONVERTED = ("stop", "stop_token_ids", "seed", "logit_bias", "allowed_token_ids")
_SAME = tuple(
    name
    for name in SamplingParams.__struct_fields__
    if name in SamplingFields.__struct_fields__ and name not in _CONVERTED
)
"""Fields that a request and SamplingParams have in common, in the same form."""

_CHAT_NAMES = {"logprobs": "top_logprobs", "max_tokens": "max_completion_tokens"}


def completion_sampling(
    request: CompletionRequest, defaults: Mapping[str, Any], vocab_size: int
) -> SamplingParams:
    """Convert a completion's fields. Raises RequestError naming the first field that is out of range."""
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise RequestError("best_of is not supported, unless it equals n", field="best_of")
    values = _common(request) | _generation(request)
    if request.max_tokens is not None:
        values["max_tokens"] = request.max_tokens
    values["logprobs"] = request.logprobs
    if request.echo and request.logprobs is not None:
        values["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    return _checked(values, defaults, vocab_size, {})


def chat_sampling(request: ChatRequest, defaults: Mapping[str, Any], vocab_size: int) -> SamplingParams:
    """Convert a chat's fields.

    Raises RequestError naming the first field that is out of range or contradicts another.
    """
    values = _common(request) | _generation(request)
    limits = {request.max_tokens, request.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise RequestError("max_tokens and max_completion_tokens differ", field="max_completion_tokens")
    values["max_tokens"] = limits.pop() if limits else None
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs set to true", field="top_logprobs")
    values["logprobs"] = (request.top_logprobs or 0) if request.logprobs else None
    named = _CHAT_NAMES if request.max_tokens is None else {"logprobs": "top_logprobs"}
    return _checked(values, defaults, vocab_size, named)


def _generation(request: GenerationRequest) -> dict[str, Any]:
    if request.stream and request.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs is not supported in a stream", field="prompt_logprobs")
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream set to true", field="stream_options")
    return _set_values(request, ("n", "prompt_logprobs"))


def _set_values(request: SamplingFields, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(request, name)) is not None}


def _common(request: SamplingFields) -> dict[str, Any]:
    if request.cache_salt == "":
        raise RequestError("cache_salt must not be empty: leave it out to share prompts", field="cache_salt")
    values = _set_values(request, _SAME)
    if request.stop is not None:
        values["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    if request.stop_token_ids is not None:
        values["stop_token_ids"] = tuple(request.stop_token_ids)
    if request.seed is not None:
        values["seed"] = request.seed & (2**64 - 1)
    if request.logit_bias is not None:
        values["logit_bias"] = _biases(request.logit_bias)
    if request.allowed_token_ids is not None:
        if not request.allowed_token_ids:
            raise RequestError("allowed_token_ids must hold at least one token", field="allowed_token_ids")
        values["allowed_token_ids"] = tuple(request.allowed_token_ids)
    return values


def _biases(requested: Mapping[str, float]) -> dict[int, float]:
    try:
        check_biases(len(requested))
    except InvalidField as error:
        raise RequestError(str(error), field=error.field) from error
    return {_token_id(name): bias for name, bias in requested.items()}


def _token_id(name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) < 20):
        raise RequestError(f"logit_bias: {name!r} is not a token id", field="logit_bias")
    return int(name)


def _checked(
    values: dict[str, Any], defaults: Mapping[str, Any], vocab_size: int, named: Mapping[str, str]
) -> SamplingParams:
    """Apply `values` over `defaults` and validate.

    `named` maps names of SamplingParams to the request's names, if they differ.
    """
    try:
        params = msgspec.structs.replace(SamplingParams(**defaults), **values)
        check_sampling(params, vocab_size)
    except InvalidField as error:
        name = named.get(error.field, error.field)
        raise RequestError(error.message(name), field=name) from error
    return params
