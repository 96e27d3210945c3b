"""Connections are limited in total and by address, below the number of files that the process can open."""

import asyncio
import logging
import resource
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from streamserve.api.http.connection_limits import ConnectionLimits, Connections
from streamserve.api.http.descriptors import Descriptors, client_descriptors
from streamserve.protocol.errors import RequestError
from streamserve.system import throttle
from tests.api.serving import ScriptedGenerator, Served, scripted, until


def test_limits_stay_below_the_descriptors() -> None:
    limits = ConnectionLimits(4096, 2048)
    assert limits.within(1 << 20) == limits
    assert limits.within(928) == ConnectionLimits(928, 928)
    assert limits.within(32) == ConnectionLimits(32, 32)


def test_a_reserve_stays_for_the_server_and_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, workers, left in [(1024, 0, 928), (256, 4, 128), (1024, 8, 864), (64, 64, 32)]:
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert client_descriptors(workers).limit == left


def test_files_and_connections_share_the_descriptors() -> None:
    descriptors = Descriptors(2)
    connections = Connections(ConnectionLimits(20, 20), descriptors)
    assert connections.enter("a") is None
    with descriptors.file():
        refused = connections.enter("a")
        assert refused is not None
        assert (refused.status, refused.retry_after) == (503, 5.0)
        with pytest.raises(RequestError) as error, descriptors.file():
            pass
        assert (error.value.status, error.value.retry_after) == (503, 5.0)
    assert connections.enter("a") is None
    for _ in range(2):
        connections.leave("a")
    assert descriptors.held == 0


async def test_files_of_a_batch_wait_for_descriptors() -> None:
    descriptors = Descriptors(3)
    assert descriptors.acquire()

    async def work() -> int:
        async with descriptors.files(3):
            return descriptors.held

    waiting = asyncio.create_task(work())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    descriptors.give()
    assert await waiting == 3
    assert descriptors.held == 0


def test_each_address_has_its_share() -> None:
    connections = Connections(ConnectionLimits(3, 2), Descriptors(100))
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
    assert narrow.http.get("/health").status_code == 200  # one connection that stays open
    clients = [socket.create_connection(address, timeout=30) for _ in range(7)]
    time.sleep(throttle.SECONDS)  # another test's server may have logged such a line just before
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
    """Only a few pipelined requests are pending at a time; the server does not read the others yet."""
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
