"""Real clients use the API, streams and WebSockets over HTTPS. Clients that do not speak TLS cost nothing."""

import json
import socket
import ssl
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
import trustme
from websockets.sync.client import connect

from streamserve.api.http.connection import Timeouts
from streamserve.api.http.connection_limits import ConnectionLimits
from streamserve.api.http.tls_listener import REFUSED_AT_ONCE
from streamserve.system.tls import tls_context
from tests.api.serving import TLS, ScriptedGenerator, Served, scripted, until


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TLS:
    folder, authority = tmp_path_factory.mktemp("tls"), trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    certificate.cert_chain_pems[0].write_to_path(folder / "chain.pem")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    client = ssl.create_default_context()
    authority.configure_trust(client)
    return TLS(tls_context(str(folder / "chain.pem"), str(folder / "key.pem")), client)


@pytest.fixture(scope="module")
def secure(generator: ScriptedGenerator, tls: TLS) -> Iterator[Served]:
    with scripted(generator, tls=tls) as server:
        yield server


def test_requests_and_streams(secure: Served) -> None:
    assert secure.url.startswith("https://")
    reply = secure.client.completions.create(model="scripted", prompt="hi")
    assert reply.choices[0].text == "hello"
    parts = list(secure.client.completions.create(model="scripted", prompt="hi", stream=True))
    assert "".join(part.choices[0].text for part in parts if part.choices) == "hello"


def test_a_large_body(secure: Served) -> None:
    text = "a" * 1_000_000
    reply = secure.post("/v1/completions", model="scripted", prompt="hi", user=text)
    assert reply.status_code == 200


def test_a_prompt_stream_over_a_websocket(secure: Served, tls: TLS) -> None:
    url = secure.url.replace("https", "wss") + "/v1/streams/ws"
    with connect(url, ssl=tls.client) as stream:
        stream.send(json.dumps({"type": "open", "model": "scripted", "prompt": "a"}))
        assert json.loads(stream.recv(timeout=20))


def test_a_client_that_does_not_trust_the_certificate_refuses_it(secure: Served) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{secure.url}/health")


def test_an_old_version_of_tls_is_refused(secure: Served, tls: TLS) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.set_ciphers("DEFAULT:@SECLEVEL=0")
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    host, port = "127.0.0.1", int(secure.url.rpartition(":")[2])
    with socket.create_connection((host, port), timeout=20) as plain, pytest.raises((ssl.SSLError, OSError)):
        old.wrap_socket(plain)


def closed(client: socket.socket) -> bool:
    """Return whether the server has closed a connection."""
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_connections_without_a_handshake_count(generator: ScriptedGenerator, tls: TLS) -> None:
    limit, more = 4, 10
    with scripted(generator, limits=ConnectionLimits(limit, limit), tls=tls) as server:
        with ExitStack() as stack:
            address = "127.0.0.1", int(server.url.rpartition(":")[2])
            clients = [
                stack.enter_context(socket.create_connection(address, timeout=20))
                for _ in range(limit + REFUSED_AT_ONCE + more)
            ]
            until(lambda: sum(map(closed, clients)) >= more)
            time.sleep(0.05)
            assert sum(map(closed, clients)) == more
        until(lambda: answers(server))


def answers(server: Served) -> bool:
    """Return whether a new connection is within the limits."""
    try:
        return server.http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def test_a_handshake_that_does_not_begin_ends(generator: ScriptedGenerator, tls: TLS) -> None:
    with (
        scripted(generator, timeouts=Timeouts(0.2, 1.0), limits=ConnectionLimits(1, 1), tls=tls) as server,
        socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20) as client,
    ):
        until(lambda: closed(client))
        assert answers(server)


def test_a_connection_too_many_is_told_so_after_its_handshake(generator: ScriptedGenerator, tls: TLS) -> None:
    with scripted(generator, limits=ConnectionLimits(1, 1), tls=tls) as server:
        assert server.http.get("/health").status_code == 200  # this connection stays open
        refused = httpx.get(f"{server.url}/health", verify=tls.client)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        server.http.close()
        until(lambda: httpx.get(f"{server.url}/health", verify=tls.client).status_code == 200)


def test_plain_http_gets_no_reply_and_the_server_continues(secure: Served) -> None:
    port = int(secure.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        received = b""
        try:
            while part := plain.recv(4096):
                received += part
        except ConnectionResetError:
            pass
    assert b"HTTP/1.1" not in received
    assert secure.http.get("/health").status_code == 200
