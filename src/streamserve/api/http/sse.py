"""Server-sent events: one `data:` line per event, and `[DONE]` last. Errors are sent as events, too."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from streamserve.api.http.disconnect import while_connected
from streamserve.api.http.errors import as_request_error, error_body, error_response

DONE = b"[DONE]"
"""The data of the last event, also after an error."""

Emit = Callable[[msgspec.Struct], Awaitable[None]]
"""Sends one event."""


class EventStream(Response):
    """A response whose events are sent by `produce`.

    The response starts with the first event: an error before that is an ordinary error response. `produce` is
    cancelled when the client disconnects. If `named`, each event's `type` is sent as its event name, and
    there is no `[DONE]`: the last event marks the end.
    """

    media_type = "text/event-stream"

    def __init__(self, produce: Callable[[Emit], Awaitable[None]], named: bool = False) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._produce = produce
        self._named = named

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = _Events(send, self.status_code, self.raw_headers)
        try:
            await while_connected(receive, self._run(events))
        except ClientDisconnect:
            return
        except Exception as error:
            request_error = as_request_error(error)
            if not events.started:
                await error_response(request_error, scope)(scope, receive, send)
                return
            await events.send(error_body(request_error))
            if not self._named:
                await events.send(DONE)
        await events.end()

    async def _run(self, events: "_Events") -> None:
        encoder = msgspec.json.Encoder()

        async def emit(event: msgspec.Struct) -> None:
            await events.send(encoder.encode(event), event.type if self._named else "")  # type: ignore[attr-defined]

        await self._produce(emit)
        if not self._named:
            await events.send(DONE)


class _Events:
    """Writes events to the connection. The lock keeps events whole that several tasks send."""

    def __init__(self, send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = False
        self._send = send
        self._start = {"type": "http.response.start", "status": status, "headers": headers}
        self._lock = asyncio.Lock()

    async def send(self, data: bytes, name: str = "") -> None:
        async with self._lock:
            if not self.started:
                await self._send(self._start)
                self.started = True
            body = (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
