"""Inputs as large as a server permits, or larger, which benchmarks/robustness/hostile.py sends.

Each is a function of a `Target` that sends one round and returns the statuses received. WebSockets return
their close code; `closed` is a connection that ended without a reply.
"""

import json
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MB = 1 << 20
Statuses = Counter[str]


@dataclass(frozen=True)
class Target:
    """The server's address, and the number of tokens of its context."""

    host: str
    port: int
    context: int

    def connect(self) -> socket.socket:
        client = socket.create_connection((self.host, self.port), timeout=120)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return client

    def post(self, route: str, body: bytes, method: str = "POST") -> tuple[str, bytes]:
        """Return status and body of one request on a new connection."""
        head = f"{method} {route} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        with closing(self.connect()) as client:
            with suppress(BrokenPipeError, ConnectionResetError):
                client.sendall(head.encode() + body)
            reply = everything(client)
        status = reply[9:12].decode() or "closed"
        return status, reply.partition(b"\r\n\r\n")[2]

    def send(self, route: str, body: Any) -> str:
        return self.post(route, body if isinstance(body, bytes) else json.dumps(body).encode())[0]


def everything(client: socket.socket, seconds: float = 120.0) -> bytes:
    """Return all bytes received within `seconds`, or until the server closes."""
    received, end = bytearray(), time.monotonic() + seconds
    try:
        while time.monotonic() < end and (piece := client.recv(1 << 20)):
            received += piece
    except (ConnectionResetError, TimeoutError):
        pass
    return bytes(received)


def at_once(works: list[Callable[[], str]]) -> Statuses:
    """Run all functions in threads; return how often each result occurred."""
    statuses: Statuses = Counter()

    def run(work: Callable[[], str]) -> None:
        try:
            status = work()
        except OSError as error:
            status = type(error).__name__
        statuses[status] += 1

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


def same(count: int, target: Target, route: str, body: Any) -> Statuses:
    """Send the same request `count` times at once."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return at_once([lambda: target.send(route, data)] * count)


def objects(target: Target) -> Statuses:
    """8 bodies of 7 MB of empty objects, and one of 29 MB."""
    bodies = [b'{"messages": [' + b"{}," * (size * MB // 3) + b"{}]}" for size in (7, 29)]
    return same(8, target, CHATS, bodies[0]) + same(1, target, CHATS, bodies[1])


def objects_at_the_limit(target: Target) -> Statuses:
    """Send 8 bodies that have the maximum accepted number of objects and values."""
    body = b'{"messages": [' + b"{}," * 60_000 + b'{}], "logit_bias": {' + b'"1":1,' * 60_000 + b'"1":1}}'
    return same(8, target, CHATS, body)


def text(target: Target) -> Statuses:
    """8 bodies of 7 MB of text, one character of which takes four bytes."""
    return same(8, target, COMPLETIONS, {"prompt": "a" * (7 * MB) + "😀"})


def escapes(target: Target) -> Statuses:
    """Send 8 bodies with the maximum accepted number of escapes."""
    return same(8, target, COMPLETIONS, {"prompt": "\n" * ((4 << 20) - 100)})


def many_prompts(target: Target) -> Statuses:
    """1,024 prompts, each with 16,384 allowed tokens."""
    body = {"prompt": ["hello"] * 1024, "allowed_token_ids": [5] * 16384, "max_tokens": 1}
    return same(2, target, COMPLETIONS, body)


def logprobs(target: Target) -> Statuses:
    """Ask for 64 alternatives for each token of 16 prompts of 2,000 tokens (or the context): more than is
    accepted."""
    length = min(2000, target.context - 2)
    body = {"prompt": [[5] * length] * 16, "prompt_logprobs": 64, "max_tokens": 1}
    return same(1, target, COMPLETIONS, body)


def logprobs_at_the_limit(target: Target) -> Statuses:
    """Ask for the maximum number of log-probabilities in one reply, four times at once."""
    length = min(2000, target.context - 2)
    prompts = (1 << 20) // (65 * length)
    body = {"prompt": [[5] * length] * prompts, "prompt_logprobs": 64, "max_tokens": 1}
    return same(4, target, COMPLETIONS, body)


def grammars(target: Target) -> Statuses:
    """Grammars of 4 MB, comments of 520 kB, and blank lines."""
    forms = ['root ::= "' + "a" * (4 * MB) + '"', "# a\n" * 130_000 + 'root ::= "a"', "\n" * 520_000]
    return at_once([_form_sender(target, {"guided_grammar": form}) for form in forms])


def grammars_at_the_limit(target: Target) -> Statuses:
    """Grammars of just below 64 KB: comments, blanks, brackets, rules that depend on each other."""
    chain = "\n".join(f"a{number} ::= {'b ' * 80} a{number + 1}" for number in range(150))
    forms = [
        "# a\n" * 16_000 + 'root ::= "a"',
        " " * 65_000 + 'root ::= "a"',
        'root ::= "' + "a" * 65_000,
        "root ::= " + "[" * 400 + "a" * 60_000,
        f'root ::= "a"\n{chain}\na150 ::= "b"\nb ::= "x"',
        "root ::= " + '"a"* ' * 12_000,
    ]
    return at_once([_form_sender(target, {"guided_grammar": form}) for form in forms])


def schemas(target: Target) -> Statuses:
    """JSON schemas: deep, wide, as text, and slow to compile."""
    deep = '{"items":' * 5_000 + "{}" + "}" * 5_000
    wide = {"anyOf": [{}] * 60_000}
    slow = {"type": "object", "properties": {f"v{n}": {"type": "integer"} for n in range(1500)}}
    forms: list[dict[str, Any]] = [
        {"guided_json": deep},
        {"guided_json": wide},
        {"guided_json": json.dumps({"anyOf": [{}] * 20_000})},
        {"guided_json": slow | {"additionalProperties": False}},
        {"guided_json": "[" * 60_000},
        {"guided_json": json.dumps(wide) * 40},
    ]
    return at_once([_form_sender(target, form) for form in forms])


def _form_sender(target: Target, form: dict[str, Any]) -> Callable[[], str]:
    body = json.dumps({"prompt": "hi", "max_tokens": 1, **form}).encode()
    return lambda: target.send(COMPLETIONS, body)


def messages(target: Target) -> Statuses:
    """Chats of 200,000 messages."""
    return same(4, target, CHATS, {"messages": [{"role": "user", "content": "a"}] * 200_000})


def messages_at_the_limit(target: Target) -> Statuses:
    """Send chats with one message for each token of the context."""
    return same(4, target, CHATS, {"messages": [{"role": "user", "content": "a"}] * target.context})


def tools(target: Target) -> Statuses:
    """Chats of 200,000 and of 60,000 tools."""
    tool = {"type": "function", "function": {"name": "f"}}
    bodies = [
        {"messages": [{"role": "user", "content": "a"}], "tools": [tool] * n} for n in (200_000, 30_000)
    ]
    return at_once([lambda body=body: target.send(CHATS, body) for body in bodies])  # type: ignore[misc]


def arguments(target: Target) -> Statuses:
    """Calls whose arguments, JSON nested in JSON, hold millions of objects."""
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a":[' + "{}," * 2 * MB + "{}]}"}}
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    return same(4, target, CHATS, {"messages": chat})


def edits(target: Target) -> Statuses:
    """1,024 operations that name one of 16,384 chunks each, four times at once."""
    names = []
    statuses: Statuses = Counter()
    try:
        for _ in range(4):
            name = json.loads(target.post("/v1/streams", b"{}")[1])["id"]
            names.append(name)
            for version in range(16):
                operations = [{"op": "append", "text": ""}] * 1024
                _edit(target, name, version, operations)
        operations = [{"op": "replace", "chunk": f"chunk-{16384 - n}", "text": "é"} for n in range(1024)]
        statuses = at_once([lambda name=name: _edit(target, name, 16, operations) for name in names])  # type: ignore[misc]
    finally:
        for name in names:
            target.post(f"/v1/streams/{name}", b"", "DELETE")
    return statuses


def _edit(target: Target, name: str, version: int, operations: list[dict[str, Any]]) -> str:
    body = json.dumps({"version": version, "operations": operations}).encode()
    return target.post(f"/v1/streams/{name}", body, "PATCH")[0]


def pipelined(target: Target) -> Statuses:
    """60 connections that send thousands of requests at once, and data that is not HTTP."""

    def send(data: bytes) -> str:
        with closing(target.connect()) as client:
            client.settimeout(5)
            client.sendall(data)
            return everything(client)[9:12].decode() or "closed"

    whole = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n" * 4000
    return at_once([lambda: send(whole)] * 60 + [lambda: send(b"\x00\xff" * 100)] * 60)


def idle(target: Target) -> Statuses:
    """3,000 connections that send nothing for two seconds."""
    clients: list[socket.socket] = []
    statuses: Statuses = Counter()
    try:
        for _ in range(3000):
            clients.append(target.connect())
        threading.Event().wait(2.0)
        for client in clients:
            client.setblocking(False)
            try:
                statuses[client.recv(12)[9:12].decode() or "closed"] += 1
            except BlockingIOError:
                statuses["open"] += 1
    except OSError as error:
        statuses[type(error).__name__] += 1
    finally:
        for client in clients:
            client.close()
    return statuses


def websocket(target: Target) -> socket.socket:
    """Open a WebSocket."""
    client = target.connect()
    client.sendall(
        b"GET /v1/streams/ws HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    client.recv(4096)
    return client


def frame(data: bytes, opcode: int = 1, final: bool = True, length: int | None = None) -> bytes:
    """Return a client's frame, masked with zeros; `length` may declare more than `data`."""
    size = len(data) if length is None else length
    head = bytes([(0x80 if final else 0) | opcode])
    if size < 126:
        head += bytes([0x80 | size])
    elif size < 1 << 16:
        head += bytes([0x80 | 126]) + struct.pack("!H", size)
    else:
        head += bytes([0x80 | 127]) + struct.pack("!Q", size)
    return head + b"\0\0\0\0" + data


def code(client: socket.socket) -> str:
    """Return the close code, or the status of the last reply."""
    client.settimeout(3)
    received = everything(client, 3.0)
    position = received.rfind(b"\x88")
    if position >= 0 and len(received) >= position + 4:
        return f"ws {int.from_bytes(received[position + 2 : position + 4])}"
    return "replied" if received else "closed"


def _sent(target: Target, pieces: Iterator[bytes]) -> str:
    with closing(websocket(target)) as client:
        client.settimeout(5)
        with suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            for piece in pieces:
                client.sendall(piece)
        return code(client)


def unfinished(target: Target) -> Statuses:
    """60 WebSockets with 6 of 7 MB of a message, which does not end."""
    data = frame(b"a" * (6 * MB), length=7 * MB)
    return at_once([lambda: _sent(target, iter([data]))] * 60)


def large_message(target: Target) -> Statuses:
    """7 MB of empty objects in one message, on four WebSockets."""
    data = frame(b'{"method": "create", "body": {"a": [' + b"{}," * (7 * MB // 3) + b"{}]}}")
    return at_once([lambda: _sent(target, iter([data]))] * 4)


def tiny_frames(target: Target) -> Statuses:
    """Pings, empty messages and one-byte fragments, half a megabyte of each on four WebSockets."""
    kinds = [frame(b"", 9), frame(b"x"), frame(b"x", 0, final=False)]
    streams = [(frame(b"x", 1, final=False) if kind == kinds[2] else b"") + kind * 80_000 for kind in kinds]
    return at_once([lambda data=data: _sent(target, iter([data])) for data in streams] * 4)  # type: ignore[misc]


INPUTS: dict[str, Callable[[Target], Statuses]] = {
    made.__name__: made
    for made in (
        objects,
        objects_at_the_limit,
        text,
        escapes,
        many_prompts,
        logprobs,
        logprobs_at_the_limit,
        grammars,
        grammars_at_the_limit,
        schemas,
        messages,
        messages_at_the_limit,
        tools,
        arguments,
        edits,
        pipelined,
        idle,
        unfinished,
        large_message,
        tiny_frames,
    )
}
"""The inputs by name. They are not random: each is always the worst case."""
