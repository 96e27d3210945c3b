"""The family `http`: after arbitrary bytes from clients the server runs, has sent no unexpected 5xx, and
still serves a valid request.

The routes come from the server's OpenAPI description, so new ones are included.
"""

import json
import random
import re
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from tests.campaigns.mutate import mutated, mutated_bytes, value
from tests.campaigns.outcome import UNEXPECTED_5XX, Outcome, TrialFailure
from tests.campaigns.real_server import RealServer, ServerCampaign, health_latency
from tests.campaigns.settings import FOLDER, models
from tests.fuzz.invalid_http import INVALID_HTTP, VALUES

EXCHANGES = 40
LEAVE_SECONDS = 1.5
"""Seconds after which a client without a complete reply disconnects."""
FLAGS = ("--threads", "1", "--num-blocks", "400", "--read-timeout", "5", "--grammar-timeout", "5")
EXPECTED_ERRORS = {501, 503, 504}
"""Allowed server errors. A 503 must have Retry-After."""

EXTRA: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": "hi", "max_tokens": 4, "n": 2, "stream": True, "stop": ["x"], "logprobs": 2, "echo": True,
        "temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 3, "logit_bias": {"7": 1.5}, "min_tokens": 1,
        "stream_options": {"include_usage": True}, "guided_choice": ["a", "b"], "prompt_logprobs": 1,
        "slo": {"tpot_ms": 100.0}, "priority": 1, "user": "x",
    },
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 4,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "tool_choice": "auto", "logprobs": True, "top_logprobs": 2, "stream": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
        "chat_template_kwargs": {"a": 1},
    },
    "/v1/responses": {"input": "hi", "max_output_tokens": 4, "instructions": "be short", "stream": True},
    "/v1/streams": {"query": "what?", "max_tokens": 4, "template": "{context}{query}"},
    "/tokenize": {"prompt": "hi there"},
    "/detokenize": {"tokens": [5, 6, 7]},
}  # fmt: skip
"""Bodies with more fields than the description's examples have."""


@dataclass(frozen=True)
class Route:
    """A route of the description, with bodies that it accepts."""

    method: str
    path: str
    bodies: tuple[Any, ...]


def routes(url: str) -> list[Route]:
    """Return every route of a server, and some that do not exist."""
    description = httpx.get(f"{url}/openapi.json", timeout=60).json()
    result = [Route("GET", path, ()) for path in ("/", "/docs", "/metrics", "/nothing", "/v1/streams/ws")]
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            examples = [content["example"]] if "example" in content else []
            examples += [EXTRA[path]] if path in EXTRA and content else []
            result.append(Route(method.upper(), path, tuple(examples or ([{}] if content else []))))
    return result


class HttpCampaign(ServerCampaign):
    """Trials of EXCHANGES connections each."""

    def __init__(self, server: RealServer, exchanges: int = EXCHANGES) -> None:
        super().__init__(server)
        self._exchanges = exchanges
        self._routes: list[Route] = []

    def trial(self, seed: int) -> Outcome:
        rng = random.Random(f"http-{seed}")
        self.ready()
        self._routes = self._routes or routes(self.server.url)
        counts: Counter[str] = Counter()
        sent = b""
        try:
            with health_latency(self.server) as longest:
                for _ in range(self._exchanges):
                    sent, half_close = hostile(rng, self._routes)
                    reply = exchange(self.server, sent, half_close, rng)
                    counts["exchanges"] += 1
                    counts.update(check_statuses(reply))
            self.server.probe()
            self.server.check()
        except TrialFailure as failure:
            self.failed()
            detail = f"{failure.detail}\nlast sent: {sent[:400]!r}"
            return Outcome(verdict="failed", kind=failure.kind, detail=detail)
        worst = {
            "health_ms": round(longest() * 1000, 1),
            "api_peak_mb": round(self.server.peak_megabytes(), 1),
        }
        return Outcome(verdict="passed", counts=dict(counts), worst=worst)

    def figures(self) -> dict[str, Any]:
        return {}


def hostile(rng: random.Random, known_routes: list[Route]) -> tuple[bytes, bool]:
    """Return the bytes that a connection sends, and whether the client then shuts down sending."""
    match rng.randrange(12):
        case 0:
            return rng.randbytes(rng.choice((1, 20, 3000))), True
        case 1:
            return rng.choice(INVALID_HTTP), True
        case 2:
            return mutated_bytes(rng, _valid(rng, rng.choice(known_routes))), True
        case 3:
            parts = [_valid(rng, rng.choice(known_routes), close=False) for _ in range(rng.randint(2, 8))]
            return b"".join(parts), True
        case 4:
            whole = _valid(rng, rng.choice(known_routes))
            return whole[: rng.randrange(len(whole))], True
        case 5:
            raw = rng.choice(list(VALUES.values()))[:60_000]
            return _message(
                rng, rng.choice(known_routes), b'{"prompt": %s, "messages": %s}' % (raw, raw)
            ), False
        case _:
            return _message(rng, rng.choice(known_routes), None), False


def _valid(rng: random.Random, route: Route, close: bool = True) -> bytes:
    body = json.dumps(rng.choice(route.bodies)).encode() if route.bodies else b""
    return _head(rng, route, body, close)


def _message(rng: random.Random, route: Route, raw: bytes | None) -> bytes:
    """Return a well-formed request whose body, headers or path are invalid for the route."""
    body = raw or b""
    if raw is None and route.bodies:
        body = json.dumps(mutated(rng, rng.choice(route.bodies))).encode()
    return _head(rng, route, body, close=True)


def _head(rng: random.Random, route: Route, body: bytes, close: bool) -> bytes:
    path = re.sub(r"\{[^}]*\}", lambda _: rng.choice(("x", "a" * 300, "%00", "..", "req-1")), route.path)
    lines = [f"{route.method} {path} HTTP/1.1".encode(), b"Host: localhost"]
    if rng.random() < 0.2:
        odd = json.dumps(value(rng, 0))[:200].encode()
        names = (b"X-Request-Id", b"Authorization", b"Origin", b"Content-Type", b"Idempotency-Key", b"Accept",
                 b"X-SLO-TPOT-MS", b"Expect", b"Upgrade", b"Content-Encoding")  # fmt: skip
        lines.append(rng.choice(names) + b": " + odd)
    if body or route.method != "GET":
        lines.append(b"Content-Length: %d" % len(body))
    lines += [b"Connection: close"] if close else []
    return b"\r\n".join([*lines, b"", body])


def exchange(server: RealServer, data: bytes, half_close: bool, rng: random.Random) -> bytes:
    """Send, and read until the server closes or the client times out; sometimes the client disconnects at
    once."""
    reply = b""
    with server.connect(LEAVE_SECONDS) as client:
        try:
            client.sendall(data)
            if rng.random() < 0.1:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                return b""
            if half_close:
                client.shutdown(socket.SHUT_WR)
            while len(reply) < 4 << 20 and (piece := client.recv(65536)):
                reply += piece
        except OSError:
            pass
    return reply


def check_statuses(reply: bytes) -> Counter[str]:
    """Count the statuses of a reply. Raises TrialFailure for an unexpected server error."""
    counts: Counter[str] = Counter()
    for part in re.split(rb"(?=HTTP/1\.1 \d{3})", reply)[1:]:
        status = int(part[9:12])
        counts[f"status_{status}"] += 1
        head = part.partition(b"\r\n\r\n")[0].lower()
        if status >= 500 and (
            status not in EXPECTED_ERRORS or (status == 503 and b"retry-after" not in head)
        ):
            raise TrialFailure(UNEXPECTED_5XX, part[:600].decode(errors="replace"))
    return counts


@contextmanager
def open_campaign() -> Iterator[HttpCampaign]:
    """Set the family up; the server starts with the first trial."""
    campaign = HttpCampaign(RealServer(models(FOLDER)["llama"].path, *FLAGS))
    try:
        yield campaign
    finally:
        campaign.close()
