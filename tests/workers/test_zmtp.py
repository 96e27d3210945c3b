"""The wire protocol of ZeroMQ is read correctly by a draft service without keys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.workers.zmtp import COMMAND, GREETING, FrameReader, ProtocolError, frame, ready
from tests.fuzz.zmtp import INVALID_OPENINGS, handshakes

HANDSHAKE = handshakes()["ZMTP 3.1"].removesuffix(b"\x00\x03abc")


def read(data: bytes, cuts: list[int], max_bytes: int = 1000) -> tuple[list[bytes], bytes]:
    """Return the messages in `data`, which is fed in parts, and the bytes to reply."""
    reader, messages, start = FrameReader(max_bytes), [], 0
    for end in [*sorted(cuts), len(data)]:
        reader.feed(data[start:end])
        start = end
        messages += reader.messages()
    assert not reader.held
    return messages, bytes(reader.answer)


@given(
    bodies=st.lists(st.binary(max_size=600), max_size=5),
    cuts=st.lists(st.integers(0, 2000), max_size=8),
    pings=st.lists(st.binary(max_size=16), max_size=3),
)
def test_messages_are_the_same_however_the_bytes_are_cut(
    bodies: list[bytes], cuts: list[int], pings: list[bytes]
) -> None:
    commands = b"".join(frame(b"\x04PING\0\0" + context, COMMAND) for context in pings)
    data = HANDSHAKE + commands + b"".join(map(frame, bodies))
    messages, answer = read(data, [min(cut, len(data)) for cut in cuts])
    assert messages == bodies
    pongs = b"".join(frame(b"\x04PONG" + context, COMMAND) for context in pings)
    assert answer == GREETING + ready(b"ROUTER") + pongs


@given(data=st.binary(max_size=200), greeted=st.booleans())
def test_any_bytes_are_messages_or_an_error_of_the_protocol(data: bytes, greeted: bool) -> None:
    reader = FrameReader(1000)
    reader.feed((HANDSHAKE if greeted else b"") + data)
    try:
        messages = list(reader.messages())
    except ProtocolError:
        return
    assert sum(map(len, messages)) + reader.held <= len(data)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"\x01\x00", "more than one part"),
        (b"\x03" + (5).to_bytes(8, "big"), "more than one part"),
        (b"\x08\x00", "unknown flags"),
        (b"\x02" + (1001).to_bytes(8, "big"), "too large"),
        (b"\x06" + (600).to_bytes(8, "big"), "too large"),
        (frame(b"\x04PING", COMMAND), "PING"),
        (frame(b"\x04PING\0\0" + bytes(17), COMMAND), "PING"),
    ],
)
def test_violations_after_the_handshake_are_errors_before_their_body_arrives(data: bytes, error: str) -> None:
    with pytest.raises(ProtocolError, match=error):
        read(HANDSHAKE + data, [])


@pytest.mark.parametrize("opening", [each for each in INVALID_OPENINGS if each])
def test_other_protocols_are_errors(opening: bytes) -> None:
    with pytest.raises(ProtocolError):
        read(opening, [])


@pytest.mark.parametrize("socket_type", [b"SUB", b"PUSH", b"ROUTERS", b""])
def test_only_sockets_that_may_talk_to_a_router_are_admitted(socket_type: bytes) -> None:
    with pytest.raises(ProtocolError, match="no socket of a type that fits"):
        read(GREETING + ready(socket_type), [])


def test_a_message_before_the_handshake_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="before the handshake"):
        read(GREETING + frame(b"x"), [])


def test_a_client_with_keys_is_told_that_there_are_none() -> None:
    curve = bytearray(GREETING)
    curve[12:32] = b"CURVE".ljust(20, b"\0")
    with pytest.raises(ProtocolError, match="has none"):
        read(bytes(curve), [])
