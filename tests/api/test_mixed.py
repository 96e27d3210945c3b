"""Many clients at once, some of whom hang up: the others get their answers, and nothing is left."""

import asyncio
import random
import time
from collections.abc import Callable

import httpx

from tests.api.serving import Served
from tests.conftest import Scale


async def test_clients_that_hang_up_leave_nothing(
    server: Served, scale: Scale, record: Callable[..., None]
) -> None:
    total = scale.pick(60, 1000)
    rng = random.Random(scale.seed)
    aborted = server.metric("requests_total", finish_reason="abort")

    async def whole(client: httpx.AsyncClient, body: dict) -> str:
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == body["max_tokens"] * body["n"]
        return "whole"

    async def streamed(client: httpx.AsyncClient, body: dict, leave: int | None) -> str:
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
            assert reply.status_code == 200
            seen, last = 0, ""
            async for line in reply.aiter_lines():
                last = line or last
                seen += bool(line)
                if leave is not None and seen > leave:
                    return "left"
            assert last == "data: [DONE]"
            return "streamed"

    async def impatient(client: httpx.AsyncClient, body: dict, patience: float) -> str:
        try:
            await client.post("/v1/completions", json=body | {"max_tokens": 2000}, timeout=patience)
        except httpx.TimeoutException:
            return "left"
        return "whole"

    async def one(client: httpx.AsyncClient, number: int) -> str:
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
        outcomes = await asyncio.gather(*(one(client, number) for number in range(total)))
    assert outcomes.count("left") > total // 4
    assert outcomes.count("whole") + outcomes.count("streamed") > total // 2
    deadline = time.monotonic() + 20
    runtime = server.llm._runtime
    # The metrics are the worker's last report, which may be older than a client that has just hung up.
    while (
        runtime._clients
        or runtime.fleet.requests
        or server.metric("kv_cache_usage_perc")
        or server.metric("num_requests_running")
    ):
        assert time.monotonic() < deadline, "something is still held"
        await asyncio.sleep(0.05)
    assert server.metric("requests_total", finish_reason="abort") > aborted
    record(requests=total, **{name: outcomes.count(name) for name in sorted(set(outcomes))})
