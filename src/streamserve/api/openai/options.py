"""Converts a request's fields and headers to RequestOptions."""

from starlette.requests import HTTPConnection

from streamserve.api.context import AppContext
from streamserve.api.http.auth import caller_of
from streamserve.api.model_table import adapter_named
from streamserve.api.openai.repeats import key_of
from streamserve.api.openai.schemas import SamplingFields
from streamserve.protocol.request_options import RequestOptions


def options_of(
    context: AppContext, request: HTTPConnection, body: SamplingFields, model: str
) -> RequestOptions:
    """Return the options of a request for the served name `model`."""
    return RequestOptions(
        priority=body.priority,
        cache_salt=context.cache_salt(caller_of(request), body.cache_salt),
        adapter=adapter_named(context.llm, model),
        idempotency_key=key_of(request),
    )
