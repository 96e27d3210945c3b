"""The family `soak`: a long run of a pair with a draft, prompt streams and cancellations. A trial is one
round of requests. The memory of each process is sampled after each round; the campaign reports its growth."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil

from tests.campaigns.outcome import HANG, UNEXPECTED_5XX, WRONG_TEXT, Outcome, TrialFailure
from tests.campaigns.real_server import RealServer, ServerCampaign
from tests.campaigns.settings import FOLDER, models
from tests.campaigns.slopes import Growth

REQUESTS = 100
CONCURRENCY = 24
KINDS = ("whole", "streamed", "cancelled", "edited")
FLAGS = ("--pairs", "1", "--threads", "1", "--num-blocks", "300", "--max-requests", "200")


class Soak(ServerCampaign):
    """Rounds of REQUESTS requests. Each text is compared with the first text of the same request."""

    def __init__(self, server: RealServer) -> None:
        super().__init__(server)
        self._began = time.monotonic()
        self._growth: dict[str, Growth] = {}
        self._texts: dict[tuple[int, int], str] = {}
        self._rounds = self._tracebacks = 0

    def trial(self, seed: int) -> Outcome:
        rng = random.Random(f"soak-{seed}")
        try:
            self.ready()
            counts = asyncio.run(self._round(rng))
            self._sample()
            self.server.probe()
            self.server.check()
        except TrialFailure as failure:
            self._tracebacks += failure.kind == "traceback"
            self.failed()
            return Outcome(verdict="failed", kind=failure.kind, detail=failure.detail)
        return Outcome(verdict="passed", counts=dict(counts))

    def figures(self) -> dict[str, Any]:
        growth = {name: sampled.figures() for name, sampled in self._growth.items()}
        return {"rounds": self._rounds, "tracebacks": self._tracebacks, "memory": growth}

    def failed(self) -> None:
        super().failed()
        self._growth.clear()  # other processes from here on

    def _sample(self) -> None:
        self._rounds += 1
        minute = (time.monotonic() - self._began) / 60
        for number, process in enumerate(self.server.processes()):
            name = f"worker-{number - 1}" if number else "api"
            try:
                self._growth.setdefault(name, Growth()).add(minute, process)
            except psutil.NoSuchProcess:
                continue

    async def _round(self, rng: random.Random) -> Counter[str]:
        counts: Counter[str] = Counter()
        limit = asyncio.Semaphore(CONCURRENCY)
        async with httpx.AsyncClient(base_url=self.server.url, timeout=120) as client:

            async def run_one(number: int, kind: str, leave: float) -> None:
                async with limit:
                    counts[await self._ask(client, number, kind, leave)] += 1

            draws = [(rng.randrange(400), rng.choice(KINDS), rng.random() * 0.2) for _ in range(REQUESTS)]
            try:
                async with asyncio.TaskGroup() as group:
                    for draw in draws:
                        group.create_task(run_one(*draw))
            except BaseExceptionGroup as errors:
                first = errors.exceptions[0]
                raise (
                    TrialFailure(HANG, repr(first)) if isinstance(first, httpx.HTTPError) else first
                ) from None
        return counts

    async def _ask(self, client: httpx.AsyncClient, number: int, kind: str, leave: float) -> str:
        source = random.Random(number)
        prompt = [source.randrange(5, 300) for _ in range(source.randint(1, 150))]
        body = {"prompt": prompt, "max_tokens": source.choice((1, 8, 40)), "seed": number, "ignore_eos": True}
        body |= {"temperature": source.choice((0.0, 0.0, 1.0)), "n": source.choice((1, 1, 2))}
        if kind == "cancelled":
            return await self._cancelled(client, body, leave)
        if kind == "edited":
            return await self._edited(client, source, number)
        if kind == "streamed":
            async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
                text = "".join([line async for line in reply.aiter_lines()])
            _check(reply.status_code, text)
            return kind if "[DONE]" in text else "unfinished"
        reply = await client.post("/v1/completions", json=body)
        _check(reply.status_code, reply.text)
        for choice in reply.json()["choices"]:
            self._same((number, choice["index"]), choice["text"])
        return kind

    async def _cancelled(self, client: httpx.AsyncClient, body: dict[str, Any], leave: float) -> str:
        try:
            async with asyncio.timeout(leave):
                await client.post("/v1/completions", json=body | {"max_tokens": 300})
        except TimeoutError:
            return "cancelled"
        return "whole"

    async def _edited(self, client: httpx.AsyncClient, source: random.Random, number: int) -> str:
        body_fields = {"query": "and what then?", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        created = await client.post("/v1/streams", json=body_fields)
        _check(created.status_code, created.text)
        name, version = created.json()["id"], 0
        for _ in range(source.randint(1, 5)):
            text = "the lazy dog and a fox " * source.randint(1, 4)
            operation = {"op": "append", "text": text}
            if version and source.random() < 0.3:
                operation = {"op": "replace", "index": 0, "text": text}
            edited = await client.patch(
                f"/v1/streams/{name}", json={"version": version, "operations": [operation]}
            )
            _check(edited.status_code, edited.text)
            version = edited.json()["version"]
        if source.random() < 0.2:
            _check((await client.delete(f"/v1/streams/{name}")).status_code, "delete")
            return "deleted"
        reply = await client.post(f"/v1/streams/{name}/finish", json={})
        _check(reply.status_code, reply.text)
        self._same((number, -1), reply.json()["choices"][0]["text"])
        return "edited"

    def _same(self, key: tuple[int, int], text: str) -> None:
        if self._texts.setdefault(key, text) != text:
            raise TrialFailure(WRONG_TEXT, f"{key}: {text!r} is not {self._texts[key]!r}")


def _check(status: int, text: str) -> None:
    if status != 200:
        raise TrialFailure(UNEXPECTED_5XX if status >= 500 else "refused request", f"{status}: {text[:300]}")


@contextmanager
def open_campaign() -> Iterator[Soak]:
    """Set the family up; the server starts with the first trial."""
    model = models(FOLDER)["llama"]
    draft = ("--draft", model.environment.drafts[0], "--speculation-policy", "fixed:3")
    campaign = Soak(RealServer(model.path, *FLAGS, *draft))
    try:
        yield campaign
    finally:
        campaign.close()
