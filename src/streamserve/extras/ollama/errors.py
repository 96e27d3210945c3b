"""Errors in Ollama's format: {"error": "…"}."""

import msgspec

from streamserve.api.http.error_format import ErrorFormat
from streamserve.protocol.errors import RequestError


class OllamaError(msgspec.Struct, frozen=True):
    """An error as a response body, or as the last line of a stream."""

    error: str


def ollama_body(error: RequestError, request_id: str) -> bytes:
    """Encode `error` as JSON."""
    return msgspec.json.encode(OllamaError(error.message))


OLLAMA_FORMAT = ErrorFormat("/api", ollama_body, {}, id_header="x-request-id")
