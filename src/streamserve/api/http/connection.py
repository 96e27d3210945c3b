"""One HTTP connection: uvicorn's class, with limits on how long a client may take to send and to read."""

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from streamserve.api.http.auth import PUBLIC_PATHS
from streamserve.api.http.connection_limits import Connections, address
from streamserve.api.http.received import ReceivedData
from streamserve.api.http.slices import Slices
from streamserve.api.http.timer import Timer
from streamserve.api.http.transport import OpenTransport, is_closed_by_peer, send_error
from streamserve.protocol.errors import RequestError

_log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 << 10
"""Maximum size of the request line and headers together."""

SLICE = 2048
"""Number of bytes of request lines and headers that are parsed at a time; most requests are smaller."""

BODY_SLICE = 32 << 10
"""Number of bytes of bodies that are parsed at a time: a body costs less per byte than headers."""

MAX_PIPELINED = 8
"""Maximum number of pipelined requests pending on one connection. Reading pauses at this limit."""

CLOSED_SECONDS = 1.0
"""Seconds between checks whether a client has closed its connection while pipelined requests wait: then the
connection is not read."""


@dataclass(frozen=True)
class Timeouts:
    """Timeouts in seconds. `read`: a client has this long to send a complete request. `write`: it may leave
    its reply unread for this long."""

    read: float = 60.0
    write: float = 30.0


class HttpConnection(HttpToolsProtocol):
    """Closes connections whose client sends too slowly, sends too large a header, or does not read.

    Unread replies fill the transport's buffer (64 KiB). Then the sender blocks, so no more memory is used,
    and the write timeout runs until the buffer has free space. The end of a connection cancels its
    request.
    """

    def __init__(self, timeouts: Timeouts, connections: Connections, slices: Slices, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._timeouts = timeouts
        self._connections = connections
        self._slices = slices
        self._received = ReceivedData(slices)
        self._read_timer = Timer(timeouts.read)
        self._write_timer = Timer(timeouts.write)
        self._closed_timer = Timer(CLOSED_SECONDS)
        self._entered = False
        self._refusal: RequestError | None = None
        self._address = ""
        self._header_bytes = 0
        self._in_headers = True
        self._started: RequestResponseCycle | None = None
        """The latest request that was started. `cycle` may be a later request, which waits for its end."""

    def enter(self, client: tuple[str, int] | None) -> bool:
        """Count the connection of `client`; return whether it is within the limits. To be called before a TLS
        handshake; without one, `connection_made` calls it."""
        self._address = address(client)
        self._refusal = self._connections.enter(self._address)
        self._entered = self._refusal is None
        return self._entered

    def leave(self) -> None:
        """Remove the connection from the count; idempotent."""
        if self._entered:
            self._entered = False
            self._connections.leave(self._address)

    # Callbacks of the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, or refuse it with an error."""
        super().connection_made(OpenTransport(transport))  # type: ignore[arg-type]
        if not self._entered and self._refusal is None:
            self.enter(self.client)
        if self._refusal is not None:
            send_error(self.transport, self._refusal)
            return
        self._read_timer.start(self._read_timed_out)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the resources of the connection."""
        self._read_timer.stop()
        self._write_timer.stop()
        self._closed_timer.stop()
        self._received.clear()
        self.leave()
        if self._started is not None and not self._started.response_complete:
            self._started.disconnected = True  # the base class only informs the request that arrived last
            self._started.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse `data`. Large data is parsed in slices: it may contain thousands of pipelined requests."""
        if not self._entered:
            return
        if not self._received.size and len(data) <= SLICE and self._may_parse():
            self._feed(data)
            return
        self._received.add(data)
        self.transport.pause_reading()
        self._continue()

    def pause_writing(self) -> None:
        """Start the write timeout: the transport's buffer is full."""
        super().pause_writing()
        self._write_timer.stop()
        self._write_timer.start(self._write_timed_out)

    def resume_writing(self) -> None:
        """Stop the write timeout: the client reads."""
        self._write_timer.stop()
        super().resume_writing()

    # Callbacks of the parser and of the requests

    def on_message_begin(self) -> None:
        """Start the read timeout of the next request."""
        super().on_message_begin()
        self._in_headers, self._header_bytes = True, 0
        self._read_timer.start(self._read_timed_out)

    def on_headers_complete(self) -> None:
        """Start the request, or let it wait for the end of the previous one."""
        self._in_headers = False
        super().on_headers_complete()
        if self.pipeline:
            self._closed_timer.start(self._check_closed)

    def on_message_complete(self) -> None:
        """Stop the read timeout: the request is complete."""
        self._read_timer.stop()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the next request, and parse data that was waiting for a free pipeline slot."""
        super().on_response_complete()
        self._continue()

    def handle_websocket_upgrade(self) -> None:
        """Hand the connection to the WebSocket protocol, which has separate timeouts.

        Refused while an earlier request is open: this class could no longer see its client's disconnect, nor
        limit its reply.
        """
        if self._started is not None and not self._started.response_complete:
            self._refuse(400, "a WebSocket may be opened after the reply to the previous request")
            return
        self._read_timer.stop()
        self._entered = False  # SocketProtocol counts the end of the connection
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        """Reply to invalid HTTP with an error in the common format."""
        self._refuse(400, "this is not a valid HTTP request")

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Start requests a few at a time, but health checks immediately."""
        self._started = cycle
        start = partial(super()._start_asgi_task, cycle, app)
        if cycle.scope["path"] in PUBLIC_PATHS:
            start()
        else:
            self._slices.start(start)

    # Parsing within limits

    def _may_parse(self) -> bool:
        return len(self.pipeline) < MAX_PIPELINED

    def _continue(self) -> None:
        if self._may_parse():
            self._received.schedule(self._parse_next)

    def _parse_next(self) -> bool:
        """Parse one slice of the received data; return whether more may be parsed."""
        if self.transport.is_closing():
            self._received.clear()
        if self._received.size:
            self._feed(self._received.pop(SLICE if self._in_headers else BODY_SLICE))
            if not self._received.size and not self.flow.read_paused and not self.transport.is_closing():
                self.transport.resume_reading()
        return self._may_parse()

    def _feed(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_headers and not self.transport.is_closing():
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES:
                self._refuse(431, f"the request's headers are larger than {MAX_HEADER_BYTES} bytes")

    def _refuse(self, status: int, message: str) -> None:
        """Send an error and close. The error is left out if a reply to this request, or to the previous
        request, has begun."""
        cycle = self.cycle
        if cycle is None or (cycle.response_complete if self._in_headers else not cycle.response_started):
            send_error(self.transport, RequestError(message, status=status))
        self.transport.close()

    def _read_timed_out(self) -> None:
        if self.pipeline:  # an earlier request is pending, and reading is paused meanwhile
            self._read_timer.start(self._read_timed_out)
        elif not self.transport.is_closing():
            seconds = self._timeouts.read
            self._refuse(408, f"the request took longer than {seconds:g} seconds to arrive (read_timeout)")

    def _check_closed(self) -> None:
        if not self.pipeline:
            return
        if is_closed_by_peer(self.transport):
            self.transport.abort()
        else:
            self._closed_timer.start(self._check_closed)

    def _write_timed_out(self) -> None:
        _log.info("dropped a client that left its reply unread for %g seconds", self._timeouts.write)
        self.transport.abort()
