"""Many streaming clients: all are served while there is room; beyond it the excess is refused at once, and
those who were accepted do not notice."""

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.serving import serving

FLAGS = ("--threads", "1", "--num-blocks", "4096", "--log-level", "warning")


@dataclass
class Seen:
    """What clients saw: seconds to the first tokens, to refusals, and the waits they were told."""

    first_tokens: list[float] = field(default_factory=list)
    refusals: list[float] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)

    def p99(self) -> float:
        return statistics.quantiles(self.first_tokens, n=100, method="inclusive")[98]


def body(number: int, tokens: int) -> dict[str, object]:
    prompt = [5 + (number * 7 + place) % 50 for place in range(32)]
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True, "seed": number}


async def ask(client: httpx.AsyncClient, request: dict[str, object], seen: Seen) -> bool:
    """One request to its end; whether it was accepted. Raises if its answer is not whole."""
    asked = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=request) as reply:
        if reply.status_code == 429:
            await reply.aread()
            seen.refusals.append(time.perf_counter() - asked)
            seen.waits.append(int(reply.headers["Retry-After"]))
            return False
        assert reply.status_code == 200, await reply.aread()
        finish, last, first = None, "", 0.0
        async for line in reply.aiter_lines():
            if not line:
                continue
            first = first or time.perf_counter() - asked
            if line != "data: [DONE]":
                finish = json.loads(line.removeprefix("data: "))["choices"][0]["finish_reason"] or finish
            last = line
        assert (finish, last) == ("length", "data: [DONE]")
        seen.first_tokens.append(first)
    return True


def connections(url: str, count: int) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=count, max_keepalive_connections=count)
    return httpx.AsyncClient(base_url=url, timeout=300, limits=limits)


async def test_all_of_many_streaming_clients_are_served_in_bounded_memory(
    tmp_path: Path, scale: Scale, record: Callable[..., None]
) -> None:
    """All at the same time, with far fewer places in a step: most of them wait, none is lost."""
    clients, tokens = scale.pick(60, 500), scale.pick(20, 100)
    with serving(str(make_checkpoint(tmp_path)), *FLAGS) as served:
        front = psutil.Process(served.process.pid)
        processes = [front, *front.children()]
        before = [process.memory_info().rss for process in processes]
        peak = list(before)
        seen = Seen()

        async def watch() -> None:
            while True:
                peak[:] = [max(p, q.memory_info().rss) for p, q in zip(peak, processes, strict=True)]
                await asyncio.sleep(0.05)

        watching = asyncio.ensure_future(watch())
        started = time.monotonic()
        async with connections(served.url, clients) as client:
            answers = await asyncio.gather(*(ask(client, body(n, tokens), seen) for n in range(clients)))
        watching.cancel()
        seconds = time.monotonic() - started
        assert all(answers)
        grown = [(after - then) / 1e6 for after, then in zip(peak, before, strict=True)]
        assert grown[0] < 100  # MB: 500 clients have 0.2 MB each
        record(
            clients=clients,
            tokens_each=tokens,
            tokens_per_second=round(clients * tokens / seconds, 1),
            p99_first_token_seconds=round(seen.p99(), 3),
            front_grew_mb=round(grown[0], 1),
            worker_grew_mb=round(grown[1], 1),
        )


async def test_at_twice_the_capacity_the_excess_is_refused_and_the_others_do_not_notice(
    tmp_path: Path, scale: Scale, record: Callable[..., None]
) -> None:
    """As many clients as there are places, each asking again when it has its answer; then twice as many, who
    come back when they are told to. Rounds of both alternate. The model is large enough for the engine, not
    the client here, to be what is short."""
    places, rounds, seconds = 8, scale.pick(2, 5), scale.pick(2, 3)
    flags = ("--max-num-seqs", str(places), "--max-requests", str(places), "--backend", "reference", *FLAGS)
    model = make_checkpoint(tmp_path, hidden_size=256, intermediate_size=1024, num_hidden_layers=4)
    calm, crowded = Seen(), Seen()
    ratios = []

    async def customer(client: httpx.AsyncClient, number: int, until: float, seen: Seen) -> None:
        while time.monotonic() < until:
            if not await ask(client, body(number, 48), seen):
                await asyncio.sleep(seen.waits[-1])

    async def rush(client: httpx.AsyncClient, count: int, seconds: float) -> Seen:
        seen, until = Seen(), time.monotonic() + seconds
        await asyncio.gather(*(customer(client, number, until, seen) for number in range(count)))
        return seen

    with serving(str(model), *flags) as served:
        async with connections(served.url, 2 * places) as client:
            await rush(client, places, 0.5)
            for _ in range(rounds):
                one = await rush(client, places, seconds)
                other = await rush(client, 2 * places, seconds)
                ratios.append(other.p99() / one.p99())
                for whole, part in ((calm, one), (crowded, other)):
                    whole.first_tokens += part.first_tokens
                    whole.refusals += part.refusals
    assert len(crowded.refusals) > places
    assert len(crowded.first_tokens) > len(calm.first_tokens) / 2
    refused = statistics.median(crowded.refusals)
    assert refused < (1.0 if scale.full else 10.0)
    ratio = statistics.median(ratios)
    assert ratio <= 1.5 or not scale.full  # short rounds beside other work say little
    record(
        places=places,
        served_at_capacity=len(calm.first_tokens),
        served_at_twice=len(crowded.first_tokens),
        refused_at_twice=len(crowded.refusals),
        refused_after_seconds_median=round(refused, 4),
        refused_after_seconds_max=round(max(crowded.refusals), 4),
        p99_first_token_seconds_at_capacity=round(calm.p99(), 4),
        p99_first_token_seconds_at_twice=round(crowded.p99(), 4),
        p99_ratio=round(ratio, 3),
        p99_ratios=[round(one, 3) for one in sorted(ratios)],
    )
