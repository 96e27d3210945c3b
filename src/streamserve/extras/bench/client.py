"""One request over HTTP, timed as a client sees it."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from streamserve.extras.bench.errors import BenchError
from streamserve.extras.bench.events import DONE, Event, EventSplitter, parse_event
from streamserve.extras.bench.options import Endpoint
from streamserve.extras.bench.statistics import Outcome
from streamserve.extras.bench.workloads import WorkloadPrompt

ROUTES: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}

_MAX_ERROR_CHARACTERS = 300
"""Maximum number of characters stored of an error."""


@dataclass(frozen=True)
class Target:
    """The server, and the fields common to all requests. `api_key` is only sent in the header."""

    base_url: str
    model: str
    endpoint: Endpoint = "completions"
    temperature: float | None = 0.0
    ignore_eos: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """The URL of requests. A base URL that ends in /v1 works too."""
        return self.base_url.rstrip("/").removesuffix("/v1") + ROUTES[self.endpoint]

    def body(self, prompt: WorkloadPrompt) -> bytes:
        """Return the request body for `prompt`. Raises BenchError if the endpoint does not accept this kind
        of prompt."""
        body: dict[str, Any] = {"model": self.model, "stream": True}
        body["stream_options"] = {"include_usage": True}
        content, is_chat = prompt.content, self.endpoint == "chat"
        messages = isinstance(content, tuple) and isinstance(content[0], dict)
        if messages != is_chat and not (is_chat and isinstance(content, str)):
            kind = "messages" if messages else "token ids"
            raise BenchError(f"{kind} cannot be sent to --endpoint {self.endpoint}: use the other endpoint")
        if is_chat:
            body["messages"] = content if messages else [{"role": "user", "content": content}]
        else:
            body["prompt"] = content
        body["max_completion_tokens" if is_chat else "max_tokens"] = prompt.output_tokens
        if self.temperature is not None:
            body["temperature"] = self.temperature
        if self.ignore_eos:
            body["ignore_eos"] = True
        return json.dumps(body | dict(self.extra_body)).encode()


def open_session(api_key: str | None) -> aiohttp.ClientSession:
    """Open a session with unlimited connections that are kept alive between requests, and no timeout for
    replies."""
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
        headers=headers,
    )


async def first_model(session: aiohttp.ClientSession, base_url: str) -> str:
    """Return the name of the first model that the server lists.

    Raises BenchError if the server lists none, or cannot be reached.
    """
    url = base_url.rstrip("/").removesuffix("/v1") + "/v1/models"
    try:
        async with session.get(url) as reply:
            text = await reply.text()
            if reply.status != 200:
                raise BenchError(f"{url} replied with status {reply.status}: {text[:_MAX_ERROR_CHARACTERS]}")
            return str(json.loads(text)["data"][0]["id"])
    except (aiohttp.ClientError, OSError) as error:
        raise BenchError(f"cannot reach a server at {base_url}: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise BenchError(f"{url} lists no model: give its name with --model") from error


class _ReplyRecorder:
    """Records the events of one reply with their times."""

    def __init__(self) -> None:
        self.sent_at = time.perf_counter()
        self.times: list[float] = []
        self.usage_event: Event | None = None
        self.error: str | None = None

    def add(self, data: bytes, now: float) -> None:
        event = parse_event(data)
        if event.error is not None:
            self.error = json.dumps(event.error)[:_MAX_ERROR_CHARACTERS]
        if event.has_text:
            self.times.append(now - self.sent_at)
        if event.usage is not None:
            self.usage_event = event

    def outcome(self, started: float) -> Outcome:
        latency = time.perf_counter() - self.sent_at
        usage = self.usage_event.usage if self.usage_event else None
        reported = usage.completion_tokens if usage else None
        return Outcome(
            sent=self.sent_at - started,
            latency=latency,
            token_times=tuple(self.times),
            prompt_tokens=usage.prompt_tokens if usage else None,
            output_tokens=len(self.times) if reported is None else reported,
            counted=reported is None,
            error=self.error,
        )


async def send(session: aiohttp.ClientSession, url: str, body: bytes, started: float) -> Outcome:
    """Send a request and read its events.

    `started` is the benchmark's start by time.perf_counter. A failure becomes the outcome's error.
    """
    recorder, splitter, ended = _ReplyRecorder(), EventSplitter(), False
    try:
        async with session.post(url, data=body) as reply:
            if reply.status != 200:
                recorder.error = f"{reply.status}: {(await reply.text())[:_MAX_ERROR_CHARACTERS]}"
                return recorder.outcome(started)
            async for chunk in reply.content.iter_any():
                now = time.perf_counter()
                for data in splitter.feed(chunk):
                    if data == DONE:
                        ended = True
                    else:
                        recorder.add(data, now)
        if not ended and recorder.error is None:
            recorder.error = "the reply is incomplete: it has no [DONE] at its end"
    except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
        recorder.error = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARACTERS]
    return recorder.outcome(started)
