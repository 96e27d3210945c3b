"""WebSockets are limited by the memory account: unfinished messages, fragments and tiny frames. Reading has a
timeout."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from benchmarks.robustness.hostile_inputs import frame
from streamserve.api.http.connection import Timeouts
from streamserve.api.settings import ApiSettings
from tests.api.serving import ScriptedGenerator, Served, scripted, until

MB = 1 << 20
READ = 1.0
SETTINGS = ApiSettings(max_memory_bytes=8 * MB)


@pytest.fixture(scope="module")
def small(generator: ScriptedGenerator) -> Iterator[Served]:
    with scripted(generator, SETTINGS, Timeouts(READ, 30.0)) as server:
        yield server


@contextmanager
def websocket(server: Served) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0), timeout=30) as client:
        client.sendall(
            b"GET /v1/streams/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        assert client.recv(4096).startswith(b"HTTP/1.1 101 ")
        yield client


def closed(client: socket.socket) -> tuple[int, str]:
    """Return the code and the reason with which the server closes the connection."""
    got = b""
    try:
        while piece := client.recv(65536):
            got += piece
    except ConnectionResetError:
        pass
    place = got.rfind(b"\x88")
    assert place >= 0, got[-200:]
    return int.from_bytes(got[place + 2 : place + 4]), got[place + 4 :].decode()


def charged_bytes(server: Served) -> float:
    return server.metric("memory_held_bytes")


def test_an_unfinished_message_is_charged_and_released(small: Served) -> None:
    assert charged_bytes(small) == 0
    with websocket(small) as client:
        client.sendall(frame(b"a" * MB, length=2 * MB))
        until(lambda: charged_bytes(small) >= MB)
    until(lambda: charged_bytes(small) == 0)


def test_messages_that_there_is_no_memory_for_are_closed(small: Served) -> None:
    with websocket(small) as one, websocket(small) as other:
        one.sendall(frame(b"a" * (2 * MB), length=3 * MB))
        until(lambda: charged_bytes(small) >= 4 * MB)  # the parser will copy it
        other.sendall(frame(b"a" * (2 * MB), length=3 * MB))
        code, reason = closed(other)
        assert (code, "max_memory_bytes" in reason or "limit of all" in reason) == (1013, True)
    until(lambda: charged_bytes(small) == 0)


@pytest.mark.parametrize(
    "sent",
    [
        frame(b"a" * 100, length=1000),
        frame(b"a" * 100, final=False),
        frame(b"a" * 100, final=False) + frame(b"b", 0, final=False) + frame(b"", 9),
        frame(b"abc")[:3],
    ],
)
def test_a_message_that_does_not_end_is_closed(small: Served, sent: bytes) -> None:
    with websocket(small) as client:
        client.sendall(sent)
        code, reason = closed(client)
    assert code == 1008
    assert "read_timeout" in reason


def test_an_idle_socket_stays_open(small: Served) -> None:
    with websocket(small) as client:
        time.sleep(1.5 * READ)
        client.sendall(frame(b'{"method": "get", "id": "none"}'))
        assert b'"status":404' in client.recv(65536)


def test_fragments_of_one_byte_are_charged_for_what_they_take(small: Served) -> None:
    with websocket(small) as client:
        pieces = frame(b"a", final=False) + frame(b"a", 0, final=False) * 30_000
        client.sendall(pieces)
        until(lambda: charged_bytes(small) > 100 * 20_000)
    until(lambda: charged_bytes(small) == 0)


def test_many_small_messages_are_answered_in_order_without_blocking_others(small: Served) -> None:
    messages = [frame(b'{"method": "get", "id": "x", "request": "%d"}' % number) for number in range(3000)]
    got = b""
    with websocket(small) as client:
        sender = threading.Thread(target=client.sendall, args=(b"".join(messages),))
        sender.start()
        health_checks = 0
        while got.count(b'"status":404') < 3000:
            got += client.recv(1 << 20)
            health_checks += small.http.get("/health").status_code == 200
        sender.join()
    assert health_checks > 1
    positions = [got.index(b'"request":"%d"' % number) for number in range(0, 3000, 500)]
    assert positions == sorted(positions)
    until(lambda: charged_bytes(small) == 0)
