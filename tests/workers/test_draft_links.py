"""Links of a target to draft services work with peers that follow ZeroMQ's protocol, and survive peers that
break it."""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator
from itertools import islice

import pytest
import zmq

from streamserve.protocol.curve import parse_endpoint
from streamserve.protocol.drafting import MAX_REPLY_BYTES
from streamserve.workers.draft_links import PlainLink
from streamserve.workers.zmtp import COMMAND, GREETING, ProtocolError, frame, ready


@pytest.fixture
def impostor() -> Iterator[socket.socket]:
    """A process that has taken a service's address and sends anything from there."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(10.0)
        yield listening


def link_to(port: int) -> PlainLink:
    return PlainLink(parse_endpoint(f"tcp://127.0.0.1:{port}"))


def bind(service: zmq.Socket[bytes], port: int) -> None:
    """Bind a port, 0 for a free one. libzmq frees the address of a closed socket a moment later."""
    deadline = time.monotonic() + 10
    while True:
        try:
            service.bind(f"tcp://127.0.0.1:{port or '*'}")
            return
        except zmq.ZMQError:
            assert time.monotonic() < deadline, "the address stays in use"
        time.sleep(0.02)


def accepted(impostor: socket.socket, link: PlainLink) -> socket.socket:
    """Accept the link's next connection."""
    impostor.settimeout(0.05)
    deadline = time.monotonic() + 10
    while True:
        assert nothing_received(link)
        with contextlib.suppress(TimeoutError):
            return impostor.accept()[0]
        assert time.monotonic() < deadline, "it does not connect"


def nothing_received(link: PlainLink) -> bool:
    """Let the link work; return whether it received no message. The link may drop the peer."""
    try:
        return not list(link.receive())
    except ProtocolError:
        return True


def closed(link: PlainLink, connection: socket.socket, data: bytes) -> int:
    """Send `data` repeatedly until the link closes the connection; return the number of bytes sent."""
    connection.setblocking(False)
    sent = 0
    while True:
        try:
            sent += connection.send(data[sent % len(data) :])
        except BlockingIOError:
            pass
        except ConnectionError:
            return sent
        assert nothing_received(link)
        assert sent < 64 << 20, "the connection was not closed"


@pytest.mark.parametrize(
    "data",
    [
        b"\x01\x00" * 4096,
        b"\x02" + (MAX_REPLY_BYTES + 1).to_bytes(8, "big") + bytes(4096),
        b"HTTP/1.1 200 OK\r\n\r\n",
        frame(b"\x04PING\0\0", COMMAND) * 1000,
        b"\x04\x00" * 1000,
    ],
    ids=["endless parts", "a message that is too large", "another protocol", "many PINGs", "empty commands"],
)
def test_a_peer_that_breaks_the_protocol_is_left_and_tried_again(
    impostor: socket.socket, data: bytes
) -> None:
    link = link_to(impostor.getsockname()[1])
    for _ in range(2):
        with accepted(impostor, link) as connection:
            connection.sendall(b"" if data.startswith(b"HTTP") else GREETING + ready(b"ROUTER"))
            assert closed(link, connection, data) < 16 << 20
            assert not link.send(b"x"), "the link is not connected"
    link.close()


def test_messages_arrive_at_a_socket_of_libzmq_and_back_also_after_a_restart() -> None:
    with zmq.Context() as context:
        port, link = 0, None
        for number in range(2):
            with context.socket(zmq.ROUTER) as service:
                service.setsockopt(zmq.LINGER, 0)
                bind(service, port)
                port = int(service.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
                link = link or link_to(port)
                deadline = time.monotonic() + 10
                while not service.poll(20):
                    list(link.receive())  # notices that the earlier service has gone
                    link.send(b"%d" % number)
                    assert time.monotonic() < deadline
                peer, data = service.recv_multipart()
                assert data == b"%d" % number
                large = bytes(range(256)) * (MAX_REPLY_BYTES // 256)
                service.send_multipart([peer, large])
                received: list[bytes] = []
                while not received:
                    received += link.receive()
                    assert time.monotonic() < deadline
                assert received == [large]
        link.close()


def test_a_service_that_does_not_read_makes_sending_fail(impostor: socket.socket) -> None:
    link = link_to(impostor.getsockname()[1])
    with accepted(impostor, link) as connection:
        connection.sendall(GREETING + ready(b"ROUTER"))
        while not link.send(b"x"):
            list(link.receive())
        assert frame(b"x") in connection.recv(4096)
        assert any(not link.send(bytes(1 << 20)) for _ in range(100))
    link.close()


def test_messages_that_were_read_but_not_taken_are_pending(impostor: socket.socket) -> None:
    """Messages that were read but not taken are pending: the socket is not readable for them, so the next
    poll must not wait."""
    link = link_to(impostor.getsockname()[1])
    with accepted(impostor, link) as connection:
        connection.sendall(GREETING + ready(b"ROUTER"))
        while not link.send(b"x"):
            assert nothing_received(link)
        connection.sendall(frame(b"a") * 100)
        deadline = time.monotonic() + 10
        while not (first := list(islice(link.receive(), 1))):
            assert time.monotonic() < deadline
        assert link.pending
        rest: list[bytes | memoryview] = []
        while len(rest) < 99:
            rest += link.receive()
            assert time.monotonic() < deadline
        assert [*first, *rest] == [b"a"] * 100
        assert not link.pending

        # More chunks than a single call reads, of messages that end in the middle of a chunk.
        many = frame(b"b" * 1000) * 4000
        sender = threading.Thread(target=connection.sendall, args=(many,))
        sender.start()
        received = 0
        while received < 4000:
            if not link.pending:
                select.select([link.pollable], [], [], 5.0)
            received += sum(1 for _ in link.receive())
            assert time.monotonic() < deadline
        sender.join()
    link.close()
