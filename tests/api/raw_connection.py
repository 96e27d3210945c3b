"""A plain TCP connection to a server, and the head of a request."""

import socket

import httpx

from tests.api.serving import Served

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


def connected(server: Served) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", httpx.URL(server.url).port or 0))
    client.settimeout(60)
    return client
