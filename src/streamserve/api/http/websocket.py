"""One WebSocket connection: uvicorn's class, within the memory account, with a timeout for incomplete
messages.

network ─▶ arrived ── a slice at a time ──▶ incomplete frame ─▶ fragments ─▶ queue ─▶ the application

All data on this path is charged. If a message stays incomplete, the connection is closed after the read
timeout.
"""

from typing import Any, cast

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.protocol import State

from streamserve.api.http.connection_limits import Connections, address
from streamserve.api.http.memory import MemoryAccount
from streamserve.api.http.received import ReceivedData
from streamserve.api.http.slices import Slices
from streamserve.api.http.timer import Timer
from streamserve.protocol.errors import RequestError

SLICE = 4096
"""Bytes parsed at a time: at most some hundred frames."""

_FRAGMENT_BYTES = 100
"""Memory overhead of a message fragment, in bytes."""

_FRAME_COPIES = 2
"""Copies of a frame in memory: it is copied when it is complete, before the original is freed."""

_REASON_BYTES = 123
"""Maximum length of a close frame's reason, in bytes."""


class SocketProtocol(WebSocketsSansIOProtocol):
    """A WebSocket whose unread and incomplete messages are charged to `memory`. A message must be complete
    within `read_seconds`.

    All messages, including text messages, reach the application as bytes: they are JSON.
    """

    def __init__(
        self,
        memory: MemoryAccount,
        read_seconds: float,
        connections: Connections,
        slices: Slices,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._charge = memory.charge()
        self._read_seconds = read_seconds
        self._connections = connections
        self._received = ReceivedData(slices)
        self._timer = Timer(read_seconds)
        self._fragment_bytes = 0
        self._queued_bytes = 0

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything charged to the connection."""
        self._connections.leave(address(self.client))
        self._timer.stop()
        self._received.clear()
        self._charge.close()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Queue `data` until its slice is parsed."""
        if self.conn.state is State.CONNECTING:
            super().data_received(data)
            return
        self._received.add(data)
        self.transport.pause_reading()
        if self._update_charge():
            self._continue()

    def handle_cont(self, event: Frame) -> None:
        """Count a fragment before it is stored."""
        self._fragment_bytes += len(event.data) + _FRAGMENT_BYTES
        super().handle_cont(event)

    def handle_text(self, event: Frame) -> None:
        """Count the first fragment of a message."""
        self._fragment_bytes = len(event.data) + _FRAGMENT_BYTES
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        """Count the first fragment of a binary message."""
        self._fragment_bytes = len(event.data) + _FRAGMENT_BYTES
        super().handle_bytes(event)

    def send_receive_event_to_app(self) -> None:
        """Queue a complete message. Later data is parsed only after the application has read it."""
        data = self.frames[0] if len(self.frames) == 1 else b"".join(self.frames)
        self.frames = []
        self._fragment_bytes = 0
        if not self.close_sent:
            self._queued_bytes += len(data)
            self.queue.put_nowait({"type": "websocket.receive", "bytes": data})

    async def receive(self) -> ASGIReceiveEvent:
        """Return the next event for the application."""
        message = await self.queue.get()
        data = cast(dict[str, Any], message).get("bytes")
        if data:
            self._queued_bytes -= len(data)
            self._update_charge()
        self._continue()
        return message

    async def send(self, message: ASGISendEvent) -> None:
        """Send an event of the application. After a close, read on until the client's close frame.

        Raises ClientDisconnected if `_fail` has closed the connection, which the application has not seen
        yet.
        """
        if self.close_sent and message["type"] == "websocket.send":
            raise ClientDisconnected
        await super().send(message)
        if self.close_sent:
            self._continue()

    def _may_parse(self) -> bool:
        """Return whether data may be parsed: the application has read all messages, or has closed."""
        return not self.transport.is_closing() and (self.close_sent or not self._queued_bytes)

    def _continue(self) -> None:
        """Parse as far as allowed; resume reading when no data is left."""
        if self._may_parse():
            self._received.schedule(self._parse_next)
        if not self._received.size and not self.transport.is_closing():
            self.transport.resume_reading()

    def _parse_next(self) -> bool:
        """Parse one slice; return whether more may be parsed."""
        if self._received.size:
            super().data_received(self._received.pop(SLICE))
        if self._update_charge():
            self._update_timer()
        self._continue()
        return self._may_parse()

    def _update_charge(self) -> bool:
        """Charge the data held now. Return False, and close the connection, if there is no memory for it."""
        unfinished = _FRAME_COPIES * len(self.conn.reader.buffer)
        charged = self._received.size + unfinished + self._fragment_bytes + self._queued_bytes
        try:
            self._charge.set(charged)
        except RequestError as error:
            code = CloseCode.MESSAGE_TOO_BIG if error.status == 413 else CloseCode.TRY_AGAIN_LATER
            self._fail(code, error.message)
            return False
        return True

    def _fail(self, code: CloseCode, reason: str) -> None:
        """Close the connection with a reason, and discard what the client sent."""
        self._timer.stop()
        self._received.clear()
        if self.transport.is_closing():
            return
        self.conn.fail(code, reason[:_REASON_BYTES])
        self.conn.reader.buffer.clear()
        self.frames = []
        self._fragment_bytes = 0
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.queue.put_nowait({"type": "websocket.disconnect", "code": int(code), "reason": reason})
        self.transport.close()

    def _update_timer(self) -> None:
        """Run the read timeout while a message or a frame is incomplete."""
        if self.conn.reader.buffer or self.frames:
            self._timer.start(self._read_timed_out)
        else:
            self._timer.stop()

    def _read_timed_out(self) -> None:
        if self._received.size or self._queued_bytes:  # the application is slow, not the client
            self._update_timer()
        else:
            seconds = f"{self._read_seconds:g}"
            self._fail(
                CloseCode.POLICY_VIOLATION,
                f"the message took longer than {seconds} seconds to arrive (read_timeout)",
            )
