"""ZMTP 3, the wire protocol of ZeroMQ, without keys (RFC 37, NULL mechanism).

DEALER ── greeting, READY ──▶ ROUTER        64 bytes, then a command with the socket's type
       ◀── greeting, READY ──
       ◀───── frames ──────▶                flags (1 byte), length (1 or 8 bytes), body

libzmq holds all parts of a message until the last one arrives, and no option limits their number. This reader
accepts messages of one part: the first frame that announces another one is an error, before anything is held.
"""

from collections.abc import Iterator

MORE, LONG, COMMAND = 1, 2, 4
"""Flags of a frame: other parts follow, the length has 8 bytes, the body is a command."""
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
GREETING = SIGNATURE + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
"""Signature, version 3.1, mechanism, as-server (0) and padding."""
VERSION, MECHANISM = slice(10, 11), slice(12, 32)
MAX_COMMAND_BYTES = 512
"""Maximum size of a command in bytes. libzmq's READY has at most 300: a type, and an identity of up to 255
bytes."""
MAX_COMMANDS = 256
"""Maximum number of commands in the bytes that one `feed` adds. libzmq sends a PING at most every few
milliseconds."""
MAX_CONTEXT_BYTES = 16
"""Maximum size in bytes of a PING's context, which PONG returns."""
PEERS = {b"ROUTER": (b"DEALER", b"REQ", b"ROUTER"), b"DEALER": (b"ROUTER",)}
"""The socket types that each socket type may talk to here. A DEALER must not talk to a DEALER: it may be
itself, as TCP can connect a socket to itself while nothing listens at a port."""


class ProtocolError(Exception):
    """The peer violates the protocol; the text says how, and quotes nothing that was received."""


def frame(body: bytes, flags: int = 0) -> bytes:
    """Return the bytes of a frame."""
    if len(body) < 256:
        return bytes((flags, len(body))) + body
    return bytes((flags | LONG,)) + len(body).to_bytes(8, "big") + body


def ready(socket_type: bytes) -> bytes:
    """Return the bytes of a READY command."""
    name = b"Socket-Type"
    return frame(
        b"\x05READY" + bytes((len(name),)) + name + len(socket_type).to_bytes(4, "big") + socket_type, COMMAND
    )


class FrameReader:
    """Reads what one peer sends. `answer` collects the bytes to send to it: greeting, READY and PONGs.

    Args:
        max_bytes: size of the largest message; a longer one is an error as soon as its length arrives.
        own: this end's socket type.
    """

    def __init__(self, max_bytes: int, own: bytes = b"ROUTER") -> None:
        self.answer = bytearray(GREETING + ready(own))
        self.shaken = False
        """Whether the handshake is complete."""
        self._max_bytes = max_bytes
        self._peers = PEERS[own]
        self._held = bytearray()
        self._greeted = False
        self._commands = 0
        """Commands since the last `feed`."""

    @property
    def held(self) -> int:
        """Received bytes that are not processed yet."""
        return len(self._held)

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._held += data
        self._commands = 0

    def messages(self) -> Iterator[bytes]:
        """Yield the complete messages. Raises ProtocolError, after which the connection must be closed."""
        if not self._greeted and not self._greet():
            return
        while (found := self._next_frame()) is not None:
            flags, body = found
            if flags & COMMAND:
                self._obey(body)
            elif not self.shaken:
                raise ProtocolError("a message before the handshake")
            else:
                yield body

    def _greet(self) -> bool:
        """Check the greeting as far as it has arrived; return whether it is complete."""
        held = self._held
        if held[:1] not in (b"", SIGNATURE[:1]) or held[9:10] not in (b"", SIGNATURE[9:]):
            raise ProtocolError("not ZMTP 3")
        if held[VERSION] and held[VERSION][0] < 3:
            raise ProtocolError("ZMTP versions before 3 are not supported")
        if len(held) < len(GREETING):
            return False
        if held[MECHANISM] != GREETING[MECHANISM]:
            raise ProtocolError("one end has keys, the other has none")
        del held[: len(GREETING)]
        self._greeted = True
        return True

    def _next_frame(self) -> tuple[int, bytes] | None:
        """Take a complete frame out of the received bytes, if there is one."""
        held = self._held
        if not held:
            return None
        flags = held[0]
        if flags & ~(LONG | COMMAND):
            raise ProtocolError("a message has more than one part" if flags & MORE else "unknown flags")
        start = 9 if flags & LONG else 2
        if len(held) < start:
            return None
        size = int.from_bytes(held[1:start], "big")
        if size > (MAX_COMMAND_BYTES if flags & COMMAND else self._max_bytes):
            raise ProtocolError("a frame is too large")
        if len(held) < start + size:
            return None
        body = bytes(held[start : start + size])
        del held[: start + size]
        return flags, body

    def _obey(self, body: bytes) -> None:
        """Process a command. Unknown ones are ignored, as ZMTP demands."""
        self._commands += 1
        if not body or not 0 < body[0] < len(body) + 1 or self._commands > MAX_COMMANDS:
            raise ProtocolError("too many commands, or one without a name")
        name, rest = body[1 : 1 + body[0]], body[1 + body[0] :]
        if not self.shaken:
            if name != b"READY" or _properties(rest).get(b"socket-type") not in self._peers:
                raise ProtocolError("the peer is no socket of a type that fits")
            self.shaken = True
        elif name == b"PING":
            if not 2 <= len(rest) <= 2 + MAX_CONTEXT_BYTES:  # a time to live of 2 bytes comes first
                raise ProtocolError("an invalid PING")
            self.answer += frame(b"\x04PONG" + rest[2:], COMMAND)


def _properties(data: bytes) -> dict[bytes, bytes]:
    """Parse the properties of READY, by lower-case name. Raises ProtocolError."""
    properties = {}
    while data:
        name, data = data[1 : 1 + data[0]], data[1 + data[0] :]
        size = int.from_bytes(data[:4], "big")
        if len(data) < 4 + size:
            raise ProtocolError("properties that are cut off")
        properties[name.lower()], data = data[4 : 4 + size], data[4 + size :]
    return properties
