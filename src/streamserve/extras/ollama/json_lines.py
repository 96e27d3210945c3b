"""Streams of JSON lines. An error is the last line."""

from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from streamserve.api.http.disconnect import while_connected
from streamserve.api.http.errors import as_request_error, error_response
from streamserve.extras.ollama.errors import OllamaError

LINES = "application/x-ndjson"

Emit = Callable[[msgspec.Struct], Awaitable[None]]
"""Sends one line."""


class JsonLines(Response):
    """A response whose lines are sent by `produce`.

    The response starts with the first line: an error before that is an ordinary error response. `produce` is
    cancelled when the client disconnects.
    """

    media_type = LINES

    def __init__(self, produce: Callable[[Emit], Awaitable[None]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._produce = produce
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def emit(line: msgspec.Struct) -> None:
            await self._send(send, msgspec.json.encode(line) + b"\n")

        async def run() -> None:
            await self._produce(emit)

        try:
            await while_connected(receive, run())
        except ClientDisconnect:
            return
        except Exception as error:
            failure = as_request_error(error)
            if not self._started:
                await error_response(failure, scope)(scope, receive, send)
                return
            await emit(OllamaError(failure.message))
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, data: bytes, more: bool = True) -> None:
        if not self._started:
            self._started = True
            start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            await send(start)
        await send({"type": "http.response.body", "body": data, "more_body": more})
