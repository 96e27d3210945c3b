"""Connections are counted, in all and by address, below what the process can open."""

import logging
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from streamserve.api.http.connection_limits import ConnectionLimits, Connections
from streamserve.protocol import throttle
from tests.api.serving import ScriptedGenerator, Served, scripted, until


def test_limits_stay_below_the_descriptors() -> None:
    limits = ConnectionLimits(4096, 2048)
    assert limits.within(1 << 20) == limits
    assert limits.within(1024) == ConnectionLimits(928, 928)
    assert limits.within(256) == ConnectionLimits(160, 160)
    assert limits.within(64) == ConnectionLimits(32, 32)


def test_each_address_has_its_share() -> None:
    connections = Connections(ConnectionLimits(3, 2))
    assert [connections.enter("a"), connections.enter("a")] == [None, None]
    mine = connections.enter("a")
    assert mine is not None
    assert (mine.status, mine.retry_after) == (429, 5.0)
    assert connections.enter("b") is None
    all_of_them = connections.enter("c")
    assert all_of_them is not None
    assert all_of_them.status == 503
    connections.leave("a")
    assert connections.enter("c") is None
    for address in "abc":
        connections.leave(address)
    assert (connections.open, connections.enter("a")) == (0, None)


@pytest.fixture
def narrow(generator: ScriptedGenerator) -> Iterator[Served]:
    with scripted(generator, limits=ConnectionLimits(20, 8)) as server:
        yield server


def test_one_connection_too_many_is_told_to_retry(narrow: Served, caplog: pytest.LogCaptureFixture) -> None:
    address = ("127.0.0.1", httpx.URL(narrow.url).port or 0)
    assert narrow.http.get("/health").status_code == 200  # one connection, which stays open
    clients = [socket.create_connection(address, timeout=30) for _ in range(7)]
    time.sleep(throttle.SECONDS)  # another test's server may have let such a line through just now
    with caplog.at_level(logging.WARNING):
        for _ in range(30):
            with socket.create_connection(address, timeout=30) as client:
                reply = b""
                while piece := client.recv(65536):
                    reply += piece
                assert reply.startswith(b"HTTP/1.1 429 ")
                assert b"Retry-After: 5\r\n" in reply
                assert b'"type":"rate_limit_error"' in reply
    lines = [record for record in caplog.records if "connection was refused" in record.getMessage()]
    assert 1 <= len(lines) < 30
    assert narrow.http.get("/health").status_code == 200
    for client in clients:
        client.close()

    def is_served() -> bool:
        try:
            return httpx.get(f"{narrow.url}/health").status_code == 200
        except httpx.HTTPError:
            return False

    until(is_served)


def test_invalid_http_is_logged_once_a_second(narrow: Served, caplog: pytest.LogCaptureFixture) -> None:
    address = ("127.0.0.1", httpx.URL(narrow.url).port or 0)
    time.sleep(throttle.SECONDS)
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            with socket.create_connection(address, timeout=30) as client:
                client.sendall(b"\x00\xff\r\n\r\n")
                reply = b""
                while piece := client.recv(65536):
                    reply += piece
                assert reply.startswith(b"HTTP/1.1 400 ")
                assert b'"type":"invalid_request_error"' in reply
    lines = [record for record in caplog.records if "Invalid HTTP" in record.getMessage()]
    assert 1 <= len(lines) < 50


def test_pipelined_requests_are_all_answered(narrow: Served) -> None:
    """Only a few are pending at a time; the rest is not read yet."""
    address = ("127.0.0.1", httpx.URL(narrow.url).port or 0)
    count = 400
    last = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    body = b'{"prompt": "hi"}'
    post = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    with socket.create_connection(address, timeout=60) as client:
        client.sendall(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n" * count + post * 50 + last)
        reply = b""
        while piece := client.recv(1 << 20):
            reply += piece
    assert reply.count(b"HTTP/1.1 200 ") == count + 51
    assert reply.count(b'"text_completion"') == 50
    assert reply.rstrip().endswith(b"}")
