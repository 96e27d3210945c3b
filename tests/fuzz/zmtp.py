"""Bytes that a hostile client may send to a ZeroMQ socket: handshakes of all versions, invalid openings."""

import socket


def _null(version: int) -> bytes:
    """Return a ZMTP 3 greeting with the NULL mechanism, READY with an identity, and one message."""
    greeting = b"\xff" + bytes(8) + b"\x7f" + bytes([3, version]) + b"NULL".ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY" + _property(b"Socket-Type", b"DEALER") + _property(b"Identity", b"me")
    return greeting + bytes([4, len(ready)]) + ready + bytes([0, 3]) + b"abc"


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def handshakes() -> dict[str, bytes]:
    """Return whole handshakes, each followed by a short message."""
    signature = b"\xff" + bytes(7) + b"\x01\x7f"
    return {
        "ZMTP 1.0": bytes.fromhex("0100020041"),
        "ZMTP 2.0": signature + b"\x01\x05" + b"\x00\x02id" + b"\x00\x01A",
        "ZMTP 3.0": _null(0),
        "ZMTP 3.1": _null(1),
    }


INVALID_OPENINGS = (
    b"",
    b"\0",
    b"\x01",
    b"\xff" * 64,
    bytes(64),
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    # An identity of the maximum length, and one longer than its length field says.
    b"\xff" + bytes(7) + b"\x01\x7f\x01\x05" + b"\x00\xff" + b"i" * 255 + b"\x00\x01A",
    b"\xff" + bytes(7) + b"\x01\x7f\x01\x05" + b"\x02" + b"\xff" * 8 + b"x",
)
"""Openings of other protocols, and openings with wrong lengths."""


BODIES = (
    b"\x00\x03abc",
    b"\x00\x00",
    # A frame that declares 2^63 bytes, and one of 2 GiB that never arrive.
    b"\x02\x7f" + b"\xff" * 7,
    b"\x02" + (1 << 31).to_bytes(8, "big") + b"x",
    # Undefined flags, and a frame that is cut in its length.
    b"\xf8\x03abc",
    b"\x02\x00\x00",
    # Commands in place of messages, unknown commands, a PING without its time, and a PING with a long
    # context.
    b"\x04\x03\x02NO",
    b"\x04\x05\x04PING",
    b"\x04\x40\x04PING" + bytes(2) + b"c" * 57,
    b"\x04\x0a\x09SUBSCRIBE",
    b"\x04\x06\x05ERROR",
    b"\x04\x06\x05READY",
    # Messages of two parts, of two thousand parts, and without a last part.
    b"\x01\x01a\x00\x01b",
    b"\x01\x01a" * 2000 + b"\x00\x01b",
    b"\x01\x01a" * 2000,
)
"""Bytes that may follow a handshake."""


def shake_hands(connection: socket.socket, minor: int = 1) -> None:
    """Do the handshake of ZMTP 3 without keys; later bytes are read as messages."""
    connection.settimeout(10.0)
    connection.sendall(handshakes()[f"ZMTP 3.{minor}"].removesuffix(b"\x00\x03abc"))
    answer = b""
    while b"READY" not in answer:
        read = connection.recv(4096)
        assert read, "the service does not finish the handshake"
        answer += read
