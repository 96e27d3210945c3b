"""Streams of JSON lines. An error is the last line."""

import msgspec

from streamserve.api.http.sse import ProducedResponse
from streamserve.extras.ollama.errors import OllamaError
from streamserve.protocol.errors import RequestError

LINES = "application/x-ndjson"


class JsonLines(ProducedResponse):
    """A response of lines."""

    media_type = LINES

    def encode(self, part: msgspec.Struct) -> bytes:
        return msgspec.json.encode(part) + b"\n"

    def encode_error(self, error: RequestError) -> bytes:
        return self.encode(OllamaError(error.message))
