"""The family `websocket`: arbitrary frames and calls on the prompt-stream socket do not crash the server."""

import json
import os
import random
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.campaigns.http import EXPECTED_ERRORS, FLAGS
from tests.campaigns.mutate import mutated, mutated_bytes, value
from tests.campaigns.outcome import UNEXPECTED_5XX, Outcome, TrialFailure
from tests.campaigns.real_server import RealServer, ServerCampaign, health_latency
from tests.campaigns.settings import FOLDER, models

CONVERSATIONS = 6
WAIT_SECONDS = 1.0
"""Maximum wait of a client for a reply."""
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
HANDSHAKE = (
    b"GET /v1/streams/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: %s\r\n\r\n"
)

CREATE = {
    "request": "a", "method": "create", "idempotency_key": "k",
    "body": {"query": "what is it?", "max_tokens": 4, "answer_early": False, "seed": 3, "stop": ["zz"]},
}  # fmt: skip
CHAT = {
    "request": "a", "method": "create",
    "body": {"messages": [{"role": "user", "content": "{context}{query}"}], "query": "q", "max_tokens": 4},
}  # fmt: skip


class Conversation:
    """A client's socket without a library, so that it can send invalid frames."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._connection.settimeout(WAIT_SECONDS)
        self._buffer = b""

    def handshake(self, data: bytes) -> bool:
        """Send a request to upgrade; returns whether the server accepted."""
        self._connection.sendall(data)
        while b"\r\n\r\n" not in self._buffer:
            self._buffer += self._read()
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        return b" 101 " in head.partition(b"\r\n")[0]

    def send(self, data: bytes) -> None:
        self._connection.sendall(data)

    def reply(self) -> dict[str, Any] | None:
        """Return the next message; None if the server closed or sent none in time."""
        try:
            while True:
                frame = self._frame()
                if frame is None:
                    return None
                opcode, payload = frame
                if opcode == CLOSE:
                    return None
                if opcode == TEXT:
                    message: dict[str, Any] = json.loads(payload)
                    return message
        except (OSError, ConnectionError):
            return None

    def _frame(self) -> tuple[int, bytes] | None:
        head = self._read_exactly(2)
        size = head[1] & 127
        if size >= 126:
            size = int.from_bytes(self._read_exactly(2 if size == 126 else 8), "big")
        return head[0] & 15, self._read_exactly(size)

    def _read_exactly(self, count: int) -> bytes:
        while len(self._buffer) < count:
            self._buffer += self._read()
        data, self._buffer = self._buffer[:count], self._buffer[count:]
        return data

    def _read(self) -> bytes:
        data = self._connection.recv(65536)
        if not data:
            raise ConnectionError("closed")
        return data


def frame(payload: bytes, opcode: int = TEXT, *, last: bool = True, masked: bool = True) -> bytes:
    """Return a client's frame."""
    head = bytes([(128 if last else 0) | opcode])
    flag = 128 if masked else 0
    if len(payload) < 126:
        head += bytes([flag | len(payload)])
    else:
        wide = len(payload) > 65535
        head += bytes([flag | (127 if wide else 126)]) + len(payload).to_bytes(8 if wide else 2, "big")
    if not masked:
        return head + payload
    mask = os.urandom(4)
    return head + mask + bytes(byte ^ mask[index % 4] for index, byte in enumerate(payload))


class WebSocketCampaign(ServerCampaign):
    """Trials of CONVERSATIONS sockets each."""

    def trial(self, seed: int) -> Outcome:
        rng = random.Random(f"websocket-{seed}")
        self.ready()
        counts: Counter[str] = Counter()
        try:
            with health_latency(self.server) as longest:
                for _ in range(CONVERSATIONS):
                    with self.server.connect() as connection:
                        try:
                            run_conversation(rng, Conversation(connection), counts)
                        except OSError:
                            counts["closed"] += 1
            self.server.probe()
            self.server.check()
        except TrialFailure as failure:
            self.failed()
            return Outcome(verdict="failed", kind=failure.kind, detail=failure.detail)
        worst = {
            "health_ms": round(longest() * 1000, 1),
            "api_peak_mb": round(self.server.peak_megabytes(), 1),
        }
        return Outcome(verdict="passed", counts=dict(counts), worst=worst)

    def figures(self) -> dict[str, Any]:
        return {}


def run_conversation(rng: random.Random, client: Conversation, counts: Counter[str]) -> None:
    """Upgrade, create streams, then send malformed calls among valid ones; disconnect at any point."""
    handshake = HANDSHAKE % b"dGhlIHNhbXBsZSBub25jZQ=="
    if not client.handshake(mutated_bytes(rng, handshake) + b"\r\n\r\n" if rng.random() < 0.1 else handshake):
        counts["not_upgraded"] += 1
        return
    streams, versions = ["none"], {"none": 0}
    for _ in range(rng.randint(1, 14)):
        counts["messages"] += 1
        if rng.random() < 0.25:
            client.send(malformed(rng))
            continue
        call = valid(rng, streams, versions)
        if rng.random() < 0.4:
            call = mutated(rng, call)
        client.send(framed(rng, json.dumps(call).encode()))
        if rng.random() < 0.8:
            read_reply(client, streams, versions, counts)


def valid(rng: random.Random, streams: list[str], versions: dict[str, int]) -> dict[str, Any]:
    """Return a valid call, sometimes to a stream that has ended or for another version."""
    name = rng.choice(streams)
    version = versions[name] + rng.choice((0, 0, 0, 0, -1, 1, 5))
    match rng.randrange(8):
        case 0 | 1:
            return rng.choice((CREATE, CHAT)) | {
                "idempotency_key": rng.choice((None, "k", str(rng.random())))
            }
        case 2:
            return {"request": "f", "method": "finish", "id": name, "body": {"stream": rng.random() < 0.5}}
        case 3:
            return {"request": "x", "method": rng.choice(("get", "delete", "answer")), "id": name}
        case _:
            operations = [_operation(rng) for _ in range(rng.choice((1, 1, 3, 60)))]
            body = {"version": version, "operations": operations}
            return {"request": "e", "method": "edit", "id": name, "body": body}


def _operation(rng: random.Random) -> dict[str, Any]:
    chunk = rng.choice(("c0", "c1", "c2", "0", "1", "nothing"))
    text = rng.choice(("A document. ", "", "é" * 50, "word " * rng.choice((1, 20, 120))))
    return rng.choice(
        [
            {"op": "append", "text": text},
            {"op": "append", "text": text},
            {"op": "insert", "chunk": chunk, "text": text},
            {"op": "insert", "index": rng.choice((0, 1, 99)), "text": text},
            {"op": "replace", "chunk": chunk, "text": text},
            {"op": "remove", "chunk": chunk},
        ]
    )


def framed(rng: random.Random, payload: bytes) -> bytes:
    """Return a message in one frame, or in fragments with others between them."""
    if rng.random() < 0.7 or len(payload) < 2:
        return frame(payload, rng.choice((TEXT, TEXT, BINARY)))
    split = rng.randrange(1, len(payload))
    between = frame(b"ping", PING) if rng.random() < 0.5 else b""
    return frame(payload[:split], TEXT, last=False) + between + frame(payload[split:], 0)


def malformed(rng: random.Random) -> bytes:
    """Return malformed frames, or frames without a valid call."""
    match rng.randrange(10):
        case 0:
            return rng.randbytes(rng.choice((1, 3, 200)))
        case 1:
            return frame(b"hello", masked=False)
        case 2:
            return frame(b"x", rng.choice((3, 7, 11, 15)))
        case 3:
            return bytes([129, 255]) + struct.pack(">Q", rng.choice((2**63, 2**40, 1 << 26))) + b"abcd" * 9
        case 4:
            return frame(b"p" * 200, PING) + frame(b"", CLOSE)
        case 5:
            return frame(b"\xff\xfe\x80")
        case 6:
            return b"".join(frame(b"x", PING) for _ in range(200))
        case 7:
            return frame(b'{"request":', last=False)
        case 8:
            return frame(b"[" * 5000 + b"]" * 5000)
        case _:
            return frame(json.dumps(value(rng)).encode())


def read_reply(
    client: Conversation, streams: list[str], versions: dict[str, int], counts: Counter[str]
) -> None:
    """Read a reply and remember its stream. Raises TrialFailure for an unexpected server error."""
    message = client.reply()
    if message is None:
        return
    status, body = message.get("status", 200), message.get("body") or {}
    counts[f"status_{status}"] += 1
    if status >= 500 and status not in EXPECTED_ERRORS:
        raise TrialFailure(UNEXPECTED_5XX, json.dumps(message)[:600])
    if status == 200 and "id" in body and "version" in body:
        streams.append(body["id"])
        versions[body["id"]] = body["version"]
    elif status == 200 and "version" in body:
        versions[streams[-1]] = body["version"]


@contextmanager
def open_campaign() -> Iterator[WebSocketCampaign]:
    """Set the family up; the server starts with the first trial."""
    campaign = WebSocketCampaign(RealServer(models(FOLDER)["llama"].path, *FLAGS, "--stream-ttl", "20"))
    try:
        yield campaign
    finally:
        campaign.close()
