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

from streamserve.api.http.auth import PUBLIC_PATHS
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

    def __init__(self, timeouts: Timeouts, connections: Connections, slices: Slices, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._timeouts = timeouts
        self._connections = connections
        self._slices = slices
        self._entered = False
        self._received: deque[bytes] = deque()
        self._parsing = False
        self._header_bytes = 0
        self._in_headers = True
        self._read_timer: TimerHandle | None = None
        self._write_timer: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(OpenTransport(transport))  # type: ignore[arg-type]
        error = self._connections.enter(self._address)
        if error:
            self._send(error)
            return
        self._entered = True
        self._start_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_read_timer()
        self._stop_write_timer()
        self._received.clear()
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
        if not self._received and len(data) <= SLICE and len(self.pipeline) < MAX_PIPELINED:
            self._feed(data)
            return
        self._received.append(data)
        self.transport.pause_reading()
        self._continue()

    def on_response_complete(self) -> None:
        """Start the next request, and resume parsing what was waiting for a free pipeline slot."""
        super().on_response_complete()
        self._continue()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Start requests a few at a time, but health checks immediately."""
        if cycle.scope["path"] in PUBLIC_PATHS:
            super()._start_asgi_task(cycle, app)
        else:
            self._slices.start(partial(self._begin, cycle, app))

    def _begin(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        super()._start_asgi_task(cycle, app)

    def _continue(self) -> None:
        if self._received and not self._parsing and len(self.pipeline) < MAX_PIPELINED:
            self._parsing = True
            self._slices.add(self._parse_next)

    def _parse_next(self) -> bool:
        """Parse one slice of the received data; return whether to continue at once."""
        if self.transport.is_closing():
            self._received.clear()
        elif self._received:
            self._parse_slice()
        self._parsing = bool(self._received) and len(self.pipeline) < MAX_PIPELINED
        return self._parsing

    def _parse_slice(self) -> None:
        data = self._received[0]
        size = SLICE if self._in_headers else BODY_SLICE
        if len(data) > size:
            self._received[0] = data[size:]
        else:
            self._received.popleft()
        self._feed(data[:size])
        if not self._received and not self.flow.read_paused and not self.transport.is_closing():
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
        if self._read_timer is None:
            self._start_read_timer()

    def on_headers_complete(self) -> None:
        self._in_headers = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._stop_read_timer()
        super().on_message_complete()

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection to the WebSocket protocol, which has separate timeouts."""
        self._stop_read_timer()
        self._entered = False  # SocketProtocol counts the end of the connection
        super().handle_websocket_upgrade()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_write_timer()
        self._write_timer = self.loop.call_later(self._timeouts.write, self._write_timed_out)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def _start_read_timer(self) -> None:
        self._read_timer = self.loop.call_later(self._timeouts.read, self._read_timed_out)

    def _read_timed_out(self) -> None:
        self._read_timer = None
        if self.pipeline:  # an earlier request is pending, and reading is paused meanwhile
            self._start_read_timer()
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

    def _write_timed_out(self) -> None:
        _log.info("dropped a client that left its reply unread for %g seconds", self._timeouts.write)
        self.transport.abort()

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
