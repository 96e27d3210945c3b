"""The context's length as a limit of requests: of their prompts, and of the tokens that they may generate."""

import msgspec

from streamserve.api.generator import Generator
from streamserve.api.http.ignored_fields import IgnoredFields
from streamserve.protocol.errors import RequestError, context_overflow
from streamserve.protocol.sampling import SamplingParams


def within_context(
    llm: Generator,
    params: SamplingParams,
    length: int,
    field: str,
    limit_name: str | None,
    ignored: IgnoredFields,
) -> SamplingParams:
    """Return `params` with a `max_tokens` that fits in the context after a prompt of `length` tokens.

    Clients send a fixed number that suits large contexts. A larger number than fits is lowered, and
    `limit_name`, the request's field for it, is added to the warning; None: the request does not set it.
    Raises RequestError about `field`, the prompt's, if no token is left; if fields are strict, also about
    `limit_name`.
    """
    context = llm.model.max_model_len
    maximum = context - (params.max_tokens != 0)
    if length > maximum:
        raise context_overflow(length, maximum, context, field)
    left = context - length
    if params.max_tokens is None or params.max_tokens <= left:
        return params
    if params.min_tokens > left:
        raise RequestError(
            f"min_tokens is {params.min_tokens}, but after a prompt of {length} tokens only {left} tokens "
            f"are left of the model's context of {context}",
            field="min_tokens",
        )
    if limit_name is not None:
        ignored.limit(
            limit_name, left, f"what a prompt of {length} tokens leaves of the context of {context}"
        )
    return msgspec.structs.replace(params, max_tokens=left)
