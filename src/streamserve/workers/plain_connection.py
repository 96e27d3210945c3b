"""A TCP connection of a draft service or its target without keys, with bounded buffers in both directions."""

import socket
from collections import deque

from streamserve.protocol.drafting import MAX_REPLY_BYTES
from streamserve.workers.zmtp import FrameReader

HANDSHAKE_SECONDS = 5.0
"""Time after which a connection that has not finished its handshake is closed."""
CHUNK_BYTES = 1 << 16
"""Maximum number of bytes read from a connection at once."""
MAX_UNSENT = 64
"""Maximum number of unsent messages; further messages are dropped."""
MAX_UNSENT_BYTES = 4 * MAX_REPLY_BYTES
"""Maximum number of unsent bytes; further messages are dropped."""


class PlainConnection:
    """A non-blocking connection. `reader` holds received bytes; bytes to send are queued."""

    def __init__(self, stream: socket.socket, reader: FrameReader) -> None:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = stream
        self.reader = reader
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0

    def read(self) -> bool:
        """Receive a chunk; return whether the connection is still open."""
        try:
            data = self.socket.recv(CHUNK_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.reader.feed(data)
        return bool(data)

    def queue(self, data: bytes) -> bool:
        """Queue bytes to send. Return False if the queue is full, because the peer does not read."""
        if len(self._unsent) >= MAX_UNSENT or self._unsent_bytes + len(data) > MAX_UNSENT_BYTES:
            return False
        self._unsent.append(data)
        self._unsent_bytes += len(data)
        return True

    def flush(self) -> bool:
        """Send as many queued bytes as the socket accepts now; return whether some are left. Raises
        OSError."""
        if self.reader.answer:
            if self._unsent_bytes < CHUNK_BYTES:  # a peer that does not read needs no more PONGs
                self.queue(bytes(self.reader.answer))
            self.reader.answer.clear()
        while self._unsent:
            try:
                sent = self.socket.send(self._unsent[0])
            except BlockingIOError:
                return True
            data = self._unsent.popleft()
            self._unsent_bytes -= sent
            if sent < len(data):
                self._unsent.appendleft(data[sent:])
        return False
