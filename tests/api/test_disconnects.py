"""Many concurrent clients, some of which disconnect: the others get their replies, and nothing leaks."""

import asyncio
import random
import time
from collections.abc import Callable

import httpx

from tests.api.serving import Served
from tests.conftest import Scale


async def test_disconnected_clients_leave_nothing(
    server: Served, scale: Scale, record: Callable[..., None]
) -> None:
    total = scale.pick(60, 400)
    rng = random.Random(scale.seed)
    aborted = server.metric("requests_total", finish_reason="abort")

    async def whole(client: httpx.AsyncClient, body: dict) -> str:
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == body["max_tokens"] * body["n"]
        return "whole"

    async def streamed(client: httpx.AsyncClient, body: dict, leave_after: int | None) -> str:
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
            assert reply.status_code == 200
            seen, last = 0, ""
            async for line in reply.aiter_lines():
                last = line or last
                seen += bool(line)
                if leave_after is not None and seen > leave_after:
                    return "left"
            assert last == "data: [DONE]"
            return "streamed"

    async def impatient(client: httpx.AsyncClient, body: dict, max_wait: float) -> str:
        try:
            await client.post("/v1/completions", json=body | {"max_tokens": 2000}, timeout=max_wait)
        except httpx.TimeoutException:
            return "left"
        return "whole"

    async def run_request(client: httpx.AsyncClient, number: int) -> str:
        body = {
            "model": "tiny",
            "prompt": [5] * rng.randint(1, 80),
            "n": rng.choice((1, 1, 3)),
            "seed": number,
            "max_tokens": rng.randint(1, 40),
            "temperature": rng.choice((0.0, 1.0)),
        }
        async with limit:
            if number % 4 == 0:
                return await streamed(client, body, rng.randrange(body["max_tokens"]))
            if number % 8 == 1:
                return await impatient(client, body, 0.02 + rng.random() * 0.1)
            return await (streamed(client, body, None) if number % 2 else whole(client, body))

    limit = asyncio.Semaphore(100)
    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
        outcomes = await asyncio.gather(*(run_request(client, number) for number in range(total)))
    assert outcomes.count("left") > total // 4
    assert outcomes.count("whole") + outcomes.count("streamed") > total // 2
    deadline = time.monotonic() + 20
    runtime = server.llm._runtime
    # The metrics are the worker's last report. It may be older than a client that has just disconnected, and
    # even older than all of these requests: then it says that nothing runs, and counts no abort yet.
    while (
        runtime._clients
        or runtime.fleet.requests
        or server.metric("kv_cache_usage_perc")
        or server.metric("num_requests_running")
        or server.metric("requests_total", finish_reason="abort") <= aborted
    ):
        assert time.monotonic() < deadline, "resources are still held, or no abort was counted"
        await asyncio.sleep(0.05)
    record(requests=total, **{name: outcomes.count(name) for name in sorted(set(outcomes))})
