"""HTTP load: streaming completions, from a client that takes little time on the shared cores."""

import asyncio
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

from benchmarks.engines.peers.engine import EngineError, Process


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_ready(server: Process, port: int, first: str, limit: float = 300.0) -> float:
    """Return the seconds until the server has answered `first` with a token. Raises EngineError if it never
    does."""
    started = time.perf_counter()
    while time.perf_counter() - started < limit:
        if server.popen.poll() is not None:
            raise EngineError(f"the server ended: {server.last_words()}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5):
                measure(port, [first], 1)
                return time.perf_counter() - started
        except (urllib.error.URLError, OSError, EngineError):
            time.sleep(0.05)
    raise EngineError(f"the server was not ready in {limit:.0f} s: {server.last_words()}")


def measure(port: int, prompts: Sequence[str], max_tokens: int) -> float:
    """Return the seconds until all prompts, sent at once, are answered. Raises EngineError on any failure."""

    async def all_at_once() -> None:
        await asyncio.gather(*(_complete(port, prompt, max_tokens) for prompt in prompts))

    started = time.perf_counter()
    asyncio.run(all_at_once())
    return time.perf_counter() - started


async def _complete(port: int, prompt: str, max_tokens: int) -> None:
    body = {
        "model": "model",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    try:
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data)
        )
        writer.write(data)
        reply = await reader.read(-1)
    finally:
        writer.close()
    check(reply, max_tokens)


def check(reply: bytes, max_tokens: int) -> None:
    """Raise EngineError unless the server-sent events in `reply` contain `max_tokens` tokens: by the reported
    usage, or where a server reports none, by the number of events, one a token."""
    events = [line[6:] for line in reply.splitlines() if line.startswith(b"data: {")]
    if b" 200 " not in reply[:20] or not events:
        raise EngineError(reply[-300:].decode(errors="replace"))
    usage = json.loads(events[-1]).get("usage") if b'"usage"' in events[-1] else None
    tokens = usage["completion_tokens"] if usage else len(events)
    if tokens < max_tokens or (usage and tokens != max_tokens):
        raise EngineError(f"{tokens} tokens came out where {max_tokens} were asked for")
