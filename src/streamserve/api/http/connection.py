"""One HTTP connection: uvicorn's, with limits on how long a client may take to send and to read."""

import asyncio
import logging
from asyncio import TimerHandle
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from streamserve.api.http.auth import OPEN
from streamserve.api.http.connection_limits import Connections
from streamserve.api.http.errors import error_body, error_headers
from streamserve.api.http.slices import Slices
from streamserve.protocol.errors import RequestError

_log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 << 10
"""Maximum size of the request line and headers together."""

SLICE = 2048
"""Bytes of requests parsed at a time; most requests are smaller."""

MAX_PIPELINED = 8
"""Maximum number of pipelined requests pending on one connection; reading pauses while it is reached."""

BODY_SLICE = 32 << 10
"""The same for bodies, which cost less per byte."""


@dataclass(frozen=True)
class Timeouts:
    """Timeouts in seconds: `read` for a client to send a complete request, `write` for it to leave its reply
    unread."""

    read: float = 60.0
    write: float = 30.0


class OpenTransport:
    """A transport that ignores operations once it is closing.

    A client may reset its connection while a reply is being sent, and uvloop raises RuntimeError for a closed
    transport.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def write(self, data: bytes) -> None:
        """Send `data`, unless the transport is closing."""
        if not self._transport.is_closing():
            self._transport.write(data)

    def pause_reading(self) -> None:
        """Pause reading, unless the transport is closing."""
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Resume reading, unless the transport is closing."""
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(HttpToolsProtocol):
    """Closes connections whose client sends too slowly, sends too large a header, or does not read.

    Unread replies fill the transport's buffer (64 KiB); then the sender blocks, so that no more memory is
    used, and the write timeout runs until the buffer has free space again. The end of a connection cancels
    its request.
    """

    def __init__(self, timeouts: Timeouts, connections: Connections, slices: Slices, **rest: Any) -> None:
        super().__init__(**rest)
        self._timeouts = timeouts
        self._connections = connections
        self._slices = slices
        self._entered = False
        self._arrived: deque[bytes] = deque()
        self._taking = False
        self._header_bytes = 0
        self._in_headers = True
        self._reading: TimerHandle | None = None
        self._writing: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(OpenTransport(transport))  # type: ignore[arg-type]
        refused = self._connections.enter(self._address)
        if refused:
            self._send(refused)
            return
        self._entered = True
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_reading_clock()
        self._stop_writing_clock()
        self._arrived.clear()
        if self._entered:
            self._connections.leave(self._address)
        super().connection_lost(exc)

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def data_received(self, data: bytes) -> None:
        """Parse `data`, one slice at a time if large: it may contain thousands of pipelined requests."""
        if not self._entered:
            return
        if not self._arrived and len(data) <= SLICE and len(self.pipeline) < MAX_PIPELINED:
            self._feed(data)
            return
        self._arrived.append(data)
        self.transport.pause_reading()
        self._go_on()

    def on_response_complete(self) -> None:
        """Start the next request, and resume parsing what was waiting for a free pipeline slot."""
        super().on_response_complete()
        self._go_on()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Start requests a few at a time, but health checks immediately."""
        if cycle.scope["path"] in OPEN:
            super()._start_asgi_task(cycle, app)
        else:
            self._slices.start(partial(self._begin, cycle, app))

    def _begin(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        super()._start_asgi_task(cycle, app)

    def _go_on(self) -> None:
        if self._arrived and not self._taking and len(self.pipeline) < MAX_PIPELINED:
            self._taking = True
            self._slices.add(self._take)

    def _take(self) -> bool:
        """Parse one slice of the received data; return whether to continue at once."""
        if self.transport.is_closing():
            self._arrived.clear()
        elif self._arrived:
            self._take_slice()
        self._taking = bool(self._arrived) and len(self.pipeline) < MAX_PIPELINED
        return self._taking

    def _take_slice(self) -> None:
        data = self._arrived[0]
        size = SLICE if self._in_headers else BODY_SLICE
        if len(data) > size:
            self._arrived[0] = data[size:]
        else:
            self._arrived.popleft()
        self._feed(data[:size])
        if not self._arrived and not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _feed(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_headers and not self.transport.is_closing():
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse(431, f"the request's headers are larger than {MAX_HEADER_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers, self._header_bytes = True, 0
        if self._reading is None:
            self._expect_request()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._stop_reading_clock()
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection to the WebSocket protocol, which has separate timeouts."""
        self._stop_reading_clock()
        self._entered = False  # SocketProtocol counts the end of the connection
        super().handle_websocket_upgrade()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_writing_clock()
        self._writing = self.loop.call_later(self._timeouts.write, self._drop)

    def resume_writing(self) -> None:
        self._stop_writing_clock()
        super().resume_writing()

    def _expect_request(self) -> None:
        self._reading = self.loop.call_later(self._timeouts.read, self._too_slow)

    def _too_slow(self) -> None:
        self._reading = None
        if self.pipeline:  # an earlier request is pending, and reading is paused meanwhile
            self._expect_request()
        elif not self.transport.is_closing():
            seconds = self._timeouts.read
            self._refuse(408, f"the request took longer than {seconds:g} seconds to arrive (read_timeout)")

    def _refuse(self, status: int, message: str) -> None:
        """Send an error, unless a reply to this request or the one before has begun, and close."""
        cycle = self.cycle
        if cycle is None or (cycle.response_complete if self._in_headers else not cycle.response_started):
            self._send(RequestError(message, status=status))
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Reply to invalid HTTP with an error in the common format."""
        self._refuse(400, "this is not a valid HTTP request")

    def _send(self, error: RequestError) -> None:
        """Send `error` as a complete response, and close."""
        body = error_body(error)
        headers = {
            "content-type": "application/json",
            "connection": "close",
            "content-length": str(len(body)),
            **error_headers(error),
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[error.status] + lines.encode() + b"\r\n" + body)
        self.transport.close()

    def _drop(self) -> None:
        _log.info("dropped a client that left its reply unread for %g seconds", self._timeouts.write)
        self.transport.abort()

    def _stop_reading_clock(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _stop_writing_clock(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
