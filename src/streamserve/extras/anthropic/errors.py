"""Errors in Anthropic's format: {"type": "error", "error": {"type", "message"}, "request_id"}."""

import msgspec
from msgspec import UNSET, UnsetType

from streamserve.api.http.error_format import ErrorFormat
from streamserve.protocol.errors import RequestError

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Types of errors by status. Errors with any other status are of type invalid_request_error."""

STATUSES = {503: 529}
"""Anthropic's status of an overloaded_error: the server is loading, draining or restarting its model."""


class AnthropicErrorDetail(msgspec.Struct, frozen=True):
    """The cause of an error."""

    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """An error as a response body, or as an event of a stream."""

    type: str = "error"
    error: AnthropicErrorDetail
    request_id: str | UnsetType = UNSET


def anthropic_error(error: RequestError, request_id: str | UnsetType = UNSET) -> AnthropicErrorBody:
    """Return `error` as Anthropic's clients read it."""
    kind = _KINDS.get(error.status, "invalid_request_error")
    return AnthropicErrorBody(error=AnthropicErrorDetail(kind, error.message), request_id=request_id)


def anthropic_body(error: RequestError, request_id: str) -> bytes:
    """Encode `error` as JSON."""
    return msgspec.json.encode(anthropic_error(error, request_id))


ANTHROPIC_FORMAT = ErrorFormat("/v1/messages", anthropic_body, STATUSES, id_header="request-id")
