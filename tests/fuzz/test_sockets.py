"""Bytes that no client library would send, over plain sockets: each connection gets a 4xx or is closed, and
the server continues."""

import json
import random
import socket
import time
from collections.abc import Callable
from itertools import product

import httpx

from tests.api.serving import Served
from tests.conftest import Scale
from tests.fuzz.conftest import READ_SECONDS, answers, nothing_left
from tests.fuzz.invalid_http import INVALID_HTTP, POST, VALUES

ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")
TIMEOUT = 20.0
"""Seconds after which a server that sends nothing counts as hanging."""


def connect(server: Served) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0))
    client.settimeout(TIMEOUT)
    return client


def request(route: str, body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST %s HTTP/1.1" % route.encode(), b"Host: localhost", *headers]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"Connection: close", b"", body])


def statuses(reply: bytes) -> list[int]:
    """Return the statuses of the responses in `reply`. A mangled request may have several."""
    return [int(line[9:12]) for line in reply.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]


def exchange(server: Served, data: bytes, *, half_close: bool = False) -> bytes:
    """Send `data` and read until the server closes. Fails if it neither answers nor closes in time."""
    reply = b""
    with connect(server) as client:
        try:
            client.sendall(data)
            if half_close:
                client.shutdown(socket.SHUT_WR)
            while piece := client.recv(65536):
                reply += piece
        except TimeoutError:
            raise
        except OSError:  # The server closed the connection while the client was sending.
            pass
    return reply


def test_invalid_or_excessive_json(server: Served) -> None:
    """Invalid or excessive JSON is refused: as the whole body, as a field's value, and as a field's name, on
    every route with a body."""
    with nothing_left(server):
        for (name, bad), route in product(VALUES.items(), ROUTES):
            bodies = (bad, b'{"prompt": %s}' % bad, b'{"seed": %s, "prompt": "a"}' % bad, b"{%s: 1}" % bad)
            for body in bodies:
                (status,) = statuses(exchange(server, request(route, body)))
                # the route has no such field
                ignored = route == "/tokenize" and b"seed" in body and status == 200
                # It is read as 0.0, which is an integer.
                zero = name == "a small number beyond floats" and b"seed" in body and status == 200
                assert status == 400 or ignored or zero, (name, route, body[:80], status)


def test_random_bytes(server: Served, scale: Scale, record: Callable[..., None]) -> None:
    """Random bytes are refused: as whole requests, as bodies, and as good requests with some bytes
    changed."""
    source = random.Random(scale.seed)
    good = request("/v1/completions", json.dumps({"prompt": "hi", "max_tokens": 2}).encode())
    seen: dict[int, int] = {}
    count = scale.pick(30, 1000)
    with nothing_left(server):
        for number in range(count):
            noise = source.randbytes(source.choice([1, 10, 1000, 100_000]))
            if number % 3 == 0:
                data = noise
            elif number % 3 == 1:
                data = request(source.choice(ROUTES), noise)
            else:
                mangled = bytearray(good)
                for _ in range(source.randint(1, 5)):
                    mangled[source.randrange(len(mangled))] = source.randrange(256)
                data = bytes(mangled)
            for status in statuses(exchange(server, data, half_close=True)) or [0]:
                assert status == 0 or 200 <= status < 500, (data[:300], status)
                seen[status] = seen.get(status, 0) + 1
    assert seen[400] > count / 3
    record(requests=count, **{f"status_{status or 'closed'}": times for status, times in seen.items()})


def test_invalid_http(server: Served) -> None:
    with nothing_left(server):
        for data in INVALID_HTTP:
            for status in statuses(exchange(server, data, half_close=True)):
                assert 400 <= status < 500, (data[:80], status)


def test_a_client_that_has_sent_all_and_closed_its_half(server: Served) -> None:
    """A client that has sent everything and closed its half is answered, or its connection is closed. HTTP
    allows both; the connection never stays open."""
    with nothing_left(server):
        for stream in (False, True):
            body = json.dumps({"prompt": "hi", "max_tokens": 3, "stream": stream}).encode()
            reply = exchange(server, request("/v1/completions", body), half_close=True)
            assert set(statuses(reply)) <= {200}


def test_a_truncated_request(server: Served) -> None:
    """A truncated request gets no successful answer. It is half-closed at any byte of the request line, the
    headers and the body."""
    body = json.dumps({"prompt": "hi" * 20, "max_tokens": 3}).encode()
    whole = request("/v1/completions", body)
    with nothing_left(server):
        for length in range(1, len(whole)):
            reply = exchange(server, whole[:length], half_close=True)
            assert all(400 <= status < 500 for status in statuses(reply)), length


def test_slow_senders_are_dropped_and_delay_no_others(server: Served, scale: Scale) -> None:
    """Slow senders are dropped and delay no other client: many stop in the middle of a header, and a good
    client is served meanwhile."""
    with nothing_left(server):
        slow = [connect(server) for _ in range(scale.pick(50, 400))]
        for number, client in enumerate(slow):
            client.sendall(POST[: 1 + number % (len(POST) - 1)])
        sent = time.monotonic()
        answers(server)
        answered = time.monotonic()
        for client in slow:
            assert statuses(client.recv(65536)) == [408]
            client.close()
        assert answered < time.monotonic() - READ_SECONDS / 4  # The good client did not wait for their end.
        assert answered - sent < TIMEOUT


def test_clients_that_disconnect_at_any_time(server: Served, scale: Scale) -> None:
    """Clients may disconnect at any time, by a reset after part of the request or of the reply; none of their
    requests continues."""
    source = random.Random(scale.seed)
    body = json.dumps({"prompt": "hi", "max_tokens": 100, "ignore_eos": True, "stream": True}).encode()
    data = request("/v1/completions", body)
    with nothing_left(server):
        for _ in range(scale.pick(40, 1000)):
            client = connect(server)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            client.sendall(data[: source.choice([1, 50, len(data) - 1, len(data), len(data)])])
            time.sleep(source.choice([0, 0.001, 0.02]))
            client.close()
