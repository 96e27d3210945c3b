"""Clients that send slowly, send too much, or do not read cost the server limited time and memory."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncGenerator, Iterator

import pytest

from streamserve.api.generator import Item
from streamserve.api.http.connection import Timeouts
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.output import ChoiceDelta, Usage
from tests.api.raw_connection import HEAD, connected
from tests.api.serving import ScriptedGenerator, Served, scripted, until

READ, WRITE = 0.4, 0.4
BODY = json.dumps({"prompt": "hi"}).encode()


@pytest.fixture(scope="module")
def short_timeouts(generator: ScriptedGenerator) -> Iterator[Served]:
    with scripted(generator, timeouts=Timeouts(READ, WRITE)) as server:
        yield server


def read_all(client: socket.socket) -> bytes:
    """Return everything received until the server closes the connection."""
    got = b""
    try:
        while piece := client.recv(65536):
            got += piece
    except ConnectionResetError:
        pass
    return got


def dripped(client: socket.socket, data: bytes) -> bytes:
    """Send one byte at a time, so slowly that the message is not complete within the time limit; return the
    reply."""
    try:
        for number in range(len(data)):
            client.sendall(data[number : number + 1])
            time.sleep(0.03)
    except (BrokenPipeError, ConnectionResetError):
        pass
    return read_all(client)


@pytest.mark.parametrize(
    ("at_once", "slowly"),
    [
        (b"", HEAD),
        (b"POST /v1", b"/completions-and-more HTTP/1.1\r\nHost: localhost\r\n"),
        (HEAD, b"X-Slow: " + b"a" * 100),
        (HEAD + b"Content-Length: 1000\r\n\r\n", BODY + b" " * 50),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n{\r\n" * 20),
        (HEAD + b"Content-Length: 100\r\n\r\n", b""),
        (b"", b""),
    ],
)
def test_a_request_that_does_not_arrive_in_time(
    short_timeouts: Served, at_once: bytes, slowly: bytes
) -> None:
    with connected(short_timeouts) as client:
        client.sendall(at_once)
        reply = dripped(client, slowly)  # The connection ends, since the server closes it.
    head, _, body = reply.partition(b"\r\n\r\n")
    if reply or not slowly:  # a reset may overtake the reply while the client still sends
        assert head.startswith(b"HTTP/1.1 408 ")
        assert "read_timeout" in json.loads(body)["error"]["message"]


def test_a_second_request_is_held_to_the_same(short_timeouts: Served) -> None:
    whole = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    with connected(short_timeouts) as client:
        client.sendall(whole)
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        client.sendall(HEAD)
        assert b"HTTP/1.1 408 " in read_all(client)


def test_thinking_time_is_the_clients_own(generator: ScriptedGenerator) -> None:
    """The time limit for sending ends when the request is complete, however long its answer takes. Pipelined
    requests wait in order."""

    async def slow(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        await asyncio.sleep(3 * READ)
        yield ChoiceDelta(0, "late", (72,), finish="stop")
        yield Usage(len(prompt), 1)

    whole = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    last = whole.replace(b"Host:", b"Connection: close\r\nHost:")
    with scripted(generator.replaced(script=slow), timeouts=Timeouts(READ, WRITE)) as server:
        with connected(server) as client:
            client.sendall(whole + last)
            assert read_all(client).count(b"HTTP/1.1 200 ") == 2
        # half-closed: the client sends nothing more, and its request is complete
        with connected(server) as client:
            client.sendall(last)
            client.shutdown(socket.SHUT_WR)
            assert not read_all(client)


def test_headers_without_end(short_timeouts: Served) -> None:
    with connected(short_timeouts) as client:
        try:
            client.sendall(HEAD)
            for number in range(200):
                client.sendall(b"X-%d: " % number + b"a" * 1000 + b"\r\n")
        except (BrokenPipeError, ConnectionResetError):
            pass
        reply = read_all(client)
    assert not reply or reply.startswith(b"HTTP/1.1 431 ")
    with connected(short_timeouts) as client:
        client.sendall(HEAD + b"X-Long: " + b"a" * (66 << 10))
        assert read_all(client).startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read_is_dropped(generator: ScriptedGenerator, stream: bool) -> None:
    """When the connection's buffers are full, the server stops reading from the engine, and ends the request
    after a timeout."""
    taken, ended = [], []

    async def endless(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        try:
            while stream or len(taken) < 40:
                taken.append(1)
                yield ChoiceDelta(0, "x" * (1000 if stream else 1_000_000), (72,))
                await asyncio.sleep(0)
            yield ChoiceDelta(0, "", (), finish="stop")
            yield Usage(len(prompt), len(taken))
        finally:
            ended.append(len(taken))

    body = json.dumps({"prompt": "hi", "stream": stream}).encode()
    with (
        scripted(generator.replaced(script=endless), timeouts=Timeouts(30.0, WRITE)) as server,
        connected(server) as client,
    ):
        client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        until(lambda: bool(ended))
        if stream:
            assert ended[0] < 20_000  # tens of megabytes: more than the sockets of this machine buffer
            until(lambda: server.metric("requests_total", finish_reason="abort") == 1)
        time.sleep(2 * WRITE)
        assert len(read_all(client)) < 40_000_000  # the remaining output was discarded with the connection
        assert server.http.get("/ping").status_code == 200


WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
SMALL = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
UPGRADE = (
    b"GET /v1/streams/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


@pytest.mark.parametrize("later", [b"", WHOLE, SMALL, SMALL * 3, UPGRADE], ids=len)
def test_a_request_ends_with_its_connection_whatever_was_pipelined_after_it(
    generator: ScriptedGenerator, later: bytes
) -> None:
    begun, ended = [], []

    async def endless(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        begun.append(1)
        try:
            while True:
                yield ChoiceDelta(0, "x", (72,))
                await asyncio.sleep(0.01)
        finally:
            ended.append(1)

    with scripted(generator.replaced(script=endless)) as server:
        with connected(server) as client:
            client.sendall(WHOLE)
            until(lambda: bool(begun))
            client.sendall(later)
            if later == UPGRADE:  # refused, and the connection ends
                assert read_all(client).startswith(b"HTTP/1.1 400 ")
            else:
                time.sleep(0.1)
        until(lambda: bool(ended), 5.0)
        assert (len(begun), len(ended)) == (1, 1)


def test_a_socket_may_be_opened_after_a_reply(generator: ScriptedGenerator) -> None:
    with scripted(generator) as server, connected(server) as client:
        client.sendall(SMALL)
        reply = b""
        while not reply.endswith(b"]}"):
            reply += client.recv(65536)
        client.sendall(UPGRADE)
        assert client.recv(65536).startswith(b"HTTP/1.1 101 ")


def test_a_client_that_reads_slowly_is_served(generator: ScriptedGenerator) -> None:
    async def long(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        for _ in range(200):
            yield ChoiceDelta(0, "x" * 50_000, (72,))
        yield ChoiceDelta(0, "", (), finish="stop")
        yield Usage(len(prompt), 200)

    body = json.dumps({"prompt": "hi", "stream": True}).encode()
    with (
        scripted(generator.replaced(script=long), timeouts=Timeouts(30.0, 1.0)) as server,
        connected(server) as client,
    ):
        client.sendall(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        got = b""
        while piece := client.recv(1 << 20):
            got += piece
            time.sleep(0.1 if len(got) < 5 << 20 else 0)
        assert got.count(b"x" * 50_000) == 200
        assert b"data: [DONE]" in got
