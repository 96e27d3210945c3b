"""Responses that are sent while they are produced: server-sent events, with one `data:` line per event and
`[DONE]` last, and the base of other formats. Errors are sent in the format, too."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from streamserve.api.http.disconnect import while_connected
from streamserve.api.http.errors import as_request_error, error_body, error_response
from streamserve.protocol.errors import RequestError

DONE = b"[DONE]"
"""The data of the last event, also after an error."""

Emit = Callable[[msgspec.Struct], Awaitable[None]]
"""Sends one event, or one part of another format."""


class ProducedResponse(Response):
    """A response whose parts are sent by `produce`. Several tasks may send parts.

    The response starts with the first part: an error before that is an ordinary error response. `produce` is
    cancelled when the client disconnects. `ending` is sent after the last part, also after an error.
    """

    ending = b""

    def __init__(self, produce: Callable[[Emit], Awaitable[None]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._produce = produce
        self._started = False
        self._lock = asyncio.Lock()

    def encode(self, part: msgspec.Struct) -> bytes:
        """Return the bytes of a part."""
        raise NotImplementedError

    def encode_error(self, error: RequestError) -> bytes:
        """Return the bytes that tell the client about an error after the first part."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def emit(part: msgspec.Struct) -> None:
            await self._send(send, self.encode(part))

        async def run() -> None:
            await self._produce(emit)
            if self.ending:
                await self._send(send, self.ending)

        try:
            await while_connected(receive, run())
        except ClientDisconnect:
            return
        except Exception as error:
            failure = as_request_error(error)
            if not self._started:
                await error_response(failure, scope)(scope, receive, send)
                return
            await self._send(send, self.encode_error(failure) + self.ending)
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, data: bytes, more: bool = True) -> None:
        async with self._lock:
            if not self._started:
                start = {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
                await send(start)
                self._started = True
            await send({"type": "http.response.body", "body": data, "more_body": more})


class EventStream(ProducedResponse):
    """A response of events. If `named`, each event's `type` is sent as its event name, and there is no
    `[DONE]`: the last event marks the end."""

    media_type = "text/event-stream"

    def __init__(self, produce: Callable[[Emit], Awaitable[None]], named: bool = False) -> None:
        super().__init__(produce)
        self._named = named
        self._encoder = msgspec.json.Encoder()
        self.ending = b"" if named else _event(DONE)

    def encode(self, part: msgspec.Struct) -> bytes:
        return _event(self._encoder.encode(part), part.type if self._named else "")  # type: ignore[attr-defined]

    def encode_error(self, error: RequestError) -> bytes:
        return _event(error_body(error))


def _event(data: bytes, name: str = "") -> bytes:
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"
