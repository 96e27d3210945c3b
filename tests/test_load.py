"""Many streaming clients are served up to the limit; further ones are refused at once, without an effect on
accepted requests."""

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
from tests.processes import workers_below
from tests.serving import serving

FLAGS = ("--threads", "1", "--num-blocks", "4096", "--log-level", "warning")


@dataclass
class ClientStats:
    """Measurements of clients: seconds to first tokens and to refusals, and Retry-After values."""

    first_tokens: list[float] = field(default_factory=list)
    refusals: list[float] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)

    def p99(self) -> float:
        return statistics.quantiles(self.first_tokens, n=100, method="inclusive")[98]


def body(number: int, tokens: int) -> dict[str, object]:
    prompt = [5 + (number * 7 + index) % 50 for index in range(32)]
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True, "seed": number}


async def send_request(client: httpx.AsyncClient, request: dict[str, object], stats: ClientStats) -> bool:
    """Send one request and read its reply; return whether it was accepted. Raises if the reply is
    incomplete."""
    started = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=request) as reply:
        if reply.status_code == 429:
            await reply.aread()
            stats.refusals.append(time.perf_counter() - started)
            stats.waits.append(int(reply.headers["Retry-After"]))
            return False
        assert reply.status_code == 200, await reply.aread()
        finish, last, first = None, "", 0.0
        async for line in reply.aiter_lines():
            if not line:
                continue
            first = first or time.perf_counter() - started
            if line != "data: [DONE]":
                finish = json.loads(line.removeprefix("data: "))["choices"][0]["finish_reason"] or finish
            last = line
        assert (finish, last) == ("length", "data: [DONE]")
        stats.first_tokens.append(first)
    return True


def connections(url: str, count: int) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=count, max_keepalive_connections=count)
    return httpx.AsyncClient(base_url=url, timeout=300, limits=limits)


async def test_all_of_many_streaming_clients_are_served_in_bounded_memory(
    tmp_path: Path, scale: Scale, record: Callable[..., None]
) -> None:
    """All of many streaming clients are served in bounded memory: they connect at the same time and there are
    far fewer sequence slots, so most of them wait, and none is lost."""
    clients, tokens = scale.pick(40, 500), scale.pick(20, 100)
    with serving(str(make_checkpoint(tmp_path)), *FLAGS) as served:
        api_process = psutil.Process(served.process.pid)
        processes = [api_process, *workers_below(api_process.pid)]
        before = [process.memory_info().rss for process in processes]
        peak = list(before)
        stats = ClientStats()

        async def sample_memory() -> None:
            while True:
                peak[:] = [max(p, q.memory_info().rss) for p, q in zip(peak, processes, strict=True)]
                await asyncio.sleep(0.05)

        sampler = asyncio.ensure_future(sample_memory())
        started = time.monotonic()
        async with connections(served.url, clients) as client:
            answers = await asyncio.gather(
                *(send_request(client, body(n, tokens), stats) for n in range(clients))
            )
        sampler.cancel()
        seconds = time.monotonic() - started
        assert all(answers)
        growth = [(after - then) / 1e6 for after, then in zip(peak, before, strict=True)]
        assert growth[0] < 100  # MB; 500 clients have 0.2 MB each
        record(
            clients=clients,
            tokens_each=tokens,
            tokens_per_second=round(clients * tokens / seconds, 1),
            p99_first_token_seconds=round(stats.p99(), 3),
            front_grew_mb=round(growth[0], 1),
            worker_grew_mb=round(growth[1], 1),
        )


async def test_at_twice_the_capacity_the_excess_is_refused_without_an_effect_on_the_others(
    tmp_path: Path, scale: Scale, record: Callable[..., None]
) -> None:
    """At twice the capacity, the excess is refused without an effect on the others. As many clients as slots
    send request after request; then twice that number, with retries after Retry-After. Rounds of both
    alternate. The model is large enough that the engine is the bottleneck, not the client."""
    slots, rounds, seconds = 8, scale.pick(1, 5), scale.pick(2, 3)
    flags = ("--max-num-seqs", str(slots), "--max-requests", str(slots), "--backend", "reference", *FLAGS)
    model = make_checkpoint(tmp_path, hidden_size=256, intermediate_size=1024, num_hidden_layers=4)
    at_capacity, at_twice = ClientStats(), ClientStats()
    ratios = []

    async def run_client(client: httpx.AsyncClient, number: int, until: float, stats: ClientStats) -> None:
        while time.monotonic() < until:
            if not await send_request(client, body(number, 48), stats):
                await asyncio.sleep(stats.waits[-1])

    async def run_clients(client: httpx.AsyncClient, count: int, seconds: float) -> ClientStats:
        stats, until = ClientStats(), time.monotonic() + seconds
        await asyncio.gather(*(run_client(client, number, until, stats) for number in range(count)))
        return stats

    with serving(str(model), *flags) as served:
        async with connections(served.url, 2 * slots) as client:
            await run_clients(client, slots, 0.5)
            for _ in range(rounds):
                capacity_round = await run_clients(client, slots, seconds)
                twice_round = await run_clients(client, 2 * slots, seconds)
                ratios.append(twice_round.p99() / capacity_round.p99())
                for total, round_stats in ((at_capacity, capacity_round), (at_twice, twice_round)):
                    total.first_tokens += round_stats.first_tokens
                    total.refusals += round_stats.refusals
    assert len(at_twice.refusals) >= slots  # Each excess client was refused at least once.
    # Here and below, the short rounds of a small run vary with other load on the machine.
    assert len(at_twice.first_tokens) >= (len(at_capacity.first_tokens) / 2 if scale.full else slots)
    refused = statistics.median(at_twice.refusals)
    assert refused < (1.0 if scale.full else 10.0)
    ratio = statistics.median(ratios)
    assert ratio <= 1.5 or not scale.full
    record(
        places=slots,
        served_at_capacity=len(at_capacity.first_tokens),
        served_at_twice=len(at_twice.first_tokens),
        refused_at_twice=len(at_twice.refusals),
        refused_after_seconds_median=round(refused, 4),
        refused_after_seconds_max=round(max(at_twice.refusals), 4),
        p99_first_token_seconds_at_capacity=round(at_capacity.p99(), 4),
        p99_first_token_seconds_at_twice=round(at_twice.p99(), 4),
        p99_ratio=round(ratio, 3),
        p99_ratios=[round(value, 3) for value in sorted(ratios)],
    )
