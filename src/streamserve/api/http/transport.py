"""A connection's transport that is safe to use while it closes, the check whether its client has closed it,
and the error that ends a connection."""

import asyncio
import select
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from streamserve.api.http.errors import error_body, error_headers
from streamserve.protocol.errors import RequestError


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


def is_closed_by_peer(transport: asyncio.Transport) -> bool:
    """Return whether the peer has closed its end of the connection, or is gone. Nothing is read, so that this
    also works while unread data comes before the end."""
    poll = select.poll()
    closed = getattr(select, "POLLRDHUP", select.POLLHUP)  # only Linux tells that one direction is closed
    poll.register(transport.get_extra_info("socket").fileno(), closed)
    return bool(poll.poll(0))


def send_error(transport: asyncio.Transport, error: RequestError) -> None:
    """Send `error` as a complete response, and close."""
    body = error_body(error)
    headers = {
        "content-type": "application/json",
        "connection": "close",
        "content-length": str(len(body)),
        **error_headers(error),
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    transport.write(STATUS_LINE[error.status] + lines.encode() + b"\r\n" + body)
    transport.close()
