"""A client that uses prompt streams over WebSocket."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.api.serving import Served


@contextmanager
def socket(server: Served, **headers: str) -> Iterator[ClientConnection]:
    url = server.url.replace("http", "ws", 1) + "/v1/streams/ws"
    with connect(url, additional_headers=headers, max_size=None) as websocket:
        yield websocket


def send(websocket: ClientConnection, method: str, **fields: Any) -> None:
    websocket.send(json.dumps({"method": method, **fields}))


def call(websocket: ClientConnection, method: str, **fields: Any) -> dict[str, Any]:
    send(websocket, method, **fields)
    return dict(json.loads(websocket.recv(timeout=30)))
