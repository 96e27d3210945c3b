"""Relay the bytes between an agent and the server unchanged, and read them as HTTP afterwards."""

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

_RESULT = re.compile(
    rb'"role":\s*"tool"|"type":\s*"(?:tool_result|function_call_output|custom_tool_call_output)"'
)
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:\s*chunked", re.IGNORECASE)


@dataclass(frozen=True)
class Request:
    """A request as it was sent: the method and the path, and the body."""

    line: str
    body: bytes


@dataclass
class Connection:
    """The bytes of one connection so far."""

    sent: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)


@dataclass
class Relay:
    """All connections that an agent has made, in order."""

    port: int
    connections: list[Connection] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def received(self) -> bytes:
        """Return all bytes that the server sent."""
        return b"".join(bytes(connection.received) for connection in self.connections)

    def exchanges(self) -> list[tuple[Request, int]]:
        """Return the requests with the status of their reply, 0 for one that has none."""
        result: list[tuple[Request, int]] = []
        for connection in self.connections:
            statuses = [
                int(status)
                for status in re.findall(rb"HTTP/1\.1 (\d{3}) [A-Z]", bytes(connection.received))
                if status != b"100"
            ]
            sent = list(requests(bytes(connection.sent)))
            result += zip(sent, statuses + [0] * (len(sent) - len(statuses)), strict=False)
        return result

    def tool_results(self) -> int:
        """Return the largest number of tool results that one request had."""
        return max((len(_RESULT.findall(request.body)) for request, _ in self.exchanges()), default=0)


def requests(sent: bytes) -> Iterator[Request]:
    """Read the requests of one connection; a body that is not complete ends with the bytes."""
    while sent:
        head, _, rest = sent.partition(b"\r\n\r\n")
        line = head.split(b"\r\n", 1)[0].decode("latin-1").rpartition(" ")[0]
        if _CHUNKED.search(head):
            body, sent = _chunks(rest)
        else:
            length = _LENGTH.search(head)
            size = int(length[1]) if length else 0
            body, sent = rest[:size], rest[size:]
        yield Request(line, body)


def _chunks(rest: bytes) -> tuple[bytes, bytes]:
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        count = int(size.split(b";")[0] or b"0", 16)
        body, rest = body + rest[:count], rest[count + 2 :]
        if not count:
            break
    return body, rest


@contextmanager
def open_relay(target: int) -> Iterator[Relay]:
    """Listen on a free port, and forward each connection to the port `target` of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        result = Relay(listener.getsockname()[1])
        opened: list[socket.socket] = []
        threading.Thread(target=_accept, args=(listener, target, result, opened), daemon=True).start()
        try:
            yield result
        finally:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            for end in opened:
                end.close()


def _accept(listener: socket.socket, target: int, result: Relay, opened: list[socket.socket]) -> None:
    while True:
        try:
            client, _ = listener.accept()
        except OSError:
            return
        server = socket.create_connection(("127.0.0.1", target))
        opened += client, server
        connection = Connection()
        result.connections.append(connection)
        for ends in ((client, server, connection.sent), (server, client, connection.received)):
            threading.Thread(target=_pump, args=ends, daemon=True).start()


def _pump(source: socket.socket, target: socket.socket, copy: bytearray) -> None:
    """Forward bytes until the source has ended. If the target has closed, close the source too."""
    try:
        while piece := source.recv(65536):
            copy += piece
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()  # resets the connection if the sender has more to send
