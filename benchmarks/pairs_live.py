"""Stream pairs on this machine: how much of the KV transfer shows, what a burst of long prompts does to
others, and what the next turn of a chat costs.

Transfer: prompts one after another on one pair; the time from a prompt's end until its KV has landed, as a
share of its prefill; through shared memory, through NIXL where it is installed, and sent only when the whole
prompt is computed (one chunk: a blocking copy); and on a wire so slow that moving a prompt takes half as long
as computing it. Burst: a few streams decode while long prompts come in at once; the time between their tokens
while these are being computed, on one worker (for several chunk sizes) and on a pair with the same cores, in
interleaved rounds. Chat: the time to the first token of a second turn, on one worker, on a pair, and on a
pair whose decode worker leaves it to the prefill worker.

    python -m benchmarks.pairs_live --model embedded --rounds 5
"""

import argparse
import asyncio
import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import numpy as np

from benchmarks.report import RESULTS, table, write
from streamserve.async_llm import AsyncLLM
from streamserve.protocol.messages import TransferReport
from streamserve.protocol.nixl import nixl_package
from streamserve.protocol.sampling import SamplingParams
from streamserve.settings import resolve
from streamserve.text.output import Delta

CHUNKS = (16, 32, 64, 128, 512)
STREAMS, BURST = 4, 6
ANSWER, QUESTION = 200, 24
"""Tokens of a chat's first answer, and of its second turn."""


@asynccontextmanager
async def serving(model: str, **given: object) -> AsyncGenerator[AsyncLLM, None]:
    """The model served, once all its workers are ready."""
    llm = AsyncLLM(resolve(model, {"draft": "none", "log_level": "warning", **given}))
    await llm.start()
    try:
        for _ in range(1200):
            if all(worker.ready for worker in llm.routing().workers):
                break
            await asyncio.sleep(0.05)
        yield llm
    finally:
        await llm.close()


def prompt(rng: random.Random, length: int) -> list[int]:
    """Random tokens."""
    return [rng.randrange(300, 3000) for _ in range(length)]


async def times(
    llm: AsyncLLM, tokens: list[int], count: int, name: str, into: list[float] | None = None
) -> list[float]:
    """When the request was sent, and when each of its `count` tokens came."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    seen = [] if into is None else into
    seen.append(time.monotonic())
    async with aclosing(llm.submit(tokens, params, request_id=name)) as news:
        async for item in news:
            if isinstance(item, Delta):
                seen += [time.monotonic()] * len(item.tokens)
    return seen


async def sent(llm: AsyncLLM, handed_over: int) -> TransferReport:
    """The report once so many prompts have been handed over."""
    while True:
        report = llm.report()
        if report and report.transfer and report.transfer.handed_over >= handed_over:
            return report.transfer
        await asyncio.sleep(0.05)


async def transfer(model: str, lengths: list[int], **given: object) -> dict[str, float]:
    """Of prompts one after another: seconds to the first token, seconds exposed, bytes."""
    rng = random.Random(1)
    async with serving(model, pairs=1, **{"max_chunk": 128, **given}) as llm:
        await times(llm, prompt(rng, 64), 3, "warm")
        before = await sent(llm, 1)
        first = []
        for number, length in enumerate(lengths):
            seen = await times(llm, prompt(rng, length), 3, f"r{number}")
            first.append(seen[1] - seen[0])
        report = await sent(llm, len(lengths) + 1)
    exposed = report.exposed_seconds - before.exposed_seconds
    return {
        "prefill_seconds": sum(first),
        "exposed_seconds": exposed,
        "bytes": float(report.sent_bytes - before.sent_bytes),
        "exposed_share": exposed / sum(first),
    }


async def transfers(model: str, lengths: list[int]) -> dict[str, dict[str, float]]:
    """Every way that the KV can take."""
    ways: dict[str, dict[str, object]] = {"shared memory": {}}
    if nixl_package() is not None:
        ways["NIXL"] = {"kv_transport": "nixl"}
    whole = {"max_chunk": 2048, "max_num_batched_tokens": 2048}
    ways["all at the end"] = whole
    found = {name: await transfer(model, lengths, **given) for name, given in ways.items()}
    plain = found["shared memory"]
    wire = {"kv_bytes_per_second": plain["bytes"] / (plain["prefill_seconds"] / 2)}
    found["a wire that takes half of prefill"] = await transfer(model, lengths, **wire)
    found["the same, all at the end"] = await transfer(model, lengths, **wire, **whole)
    return found


async def burst(llm: AsyncLLM, name: str, length: int) -> dict[str, float]:
    """Gaps between the tokens of streams that decode while long prompts are computed, and their TTFT."""
    rng = random.Random(name)
    seen: list[list[float]] = [[] for _ in range(STREAMS)]
    streams = [
        asyncio.create_task(times(llm, prompt(rng, 16), 6000, f"{name}-s{number}", into))
        for number, into in enumerate(seen)
    ]
    while min(map(len, seen)) < 20:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    began = time.monotonic()
    long = [asyncio.create_task(times(llm, prompt(rng, length), 2, f"{name}-p{n}")) for n in range(BURST)]
    first = [found[1] - found[0] for found in await asyncio.gather(*long)]
    assert not any(stream.done() for stream in streams), "the streams ended before the burst did"
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    gaps = np.concatenate([_gaps(one, began, began + max(first)) for one in seen])
    return {
        "itl_p50": float(np.median(gaps)),
        "itl_p99": float(np.percentile(gaps, 99)),
        "ttft_p50": float(np.median(first)),
    }


def _gaps(seen: list[float], began: float, ended: float) -> np.ndarray:
    """Seconds between tokens that came in this time, and from the last before it."""
    at = np.array(seen[1:])
    first = max(int(np.searchsorted(at, began)) - 1, 0)
    return np.diff(at[first : int(np.searchsorted(at, ended))])


async def chats(model: str, rounds: int) -> dict[str, float]:
    """Medians of the time to the first token of a second turn."""
    setups: dict[str, dict[str, object]] = {
        "one worker": {},
        "a pair": {"pairs": 1},
        "a pair, computed by the prefill worker": {"pairs": 1, "continue_tokens": 0},
    }
    found: dict[str, list[float]] = {name: [] for name in setups}
    for name, given in setups.items():
        rng = random.Random(2)
        async with serving(model, **given) as llm:
            await times(llm, prompt(rng, 600), 8, "warm")
            for number in range(3 * rounds):
                text = prompt(rng, 600)
                text += await answer(llm, text, f"a{number}")
                seen = await times(llm, text + prompt(rng, QUESTION), 3, f"b{number}")
                found[name].append(seen[1] - seen[0])
    return {name: float(np.median(seen)) for name, seen in found.items()}


async def answer(llm: AsyncLLM, tokens: list[int], name: str) -> list[int]:
    """The first turn's answer."""
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    given: list[int] = []
    async with aclosing(llm.submit(tokens, params, request_id=name)) as news:
        async for item in news:
            if isinstance(item, Delta):
                given += item.tokens
    return given


async def bursts(model: str, rounds: int, length: int) -> dict[str, dict[str, float]]:
    """Medians over interleaved rounds, of one worker with each chunk size and of a pair."""
    found: dict[str, list[dict[str, float]]] = {}
    setups: dict[str, dict[str, Any]] = {f"one worker, chunks of {c}": {"max_chunk": c} for c in CHUNKS}
    setups["a pair"] = {"pairs": 1, "max_chunk": 256}
    for number in range(rounds):
        for name, given in setups.items():
            async with serving(model, **given) as llm:
                await times(llm, prompt(random.Random(0), 64), 8, "warm")
                found.setdefault(name, []).append(await burst(llm, f"{number}", length))
    return {
        name: {key: float(np.median([one[key] for one in seen])) for key in seen[0]}
        for name, seen in found.items()
    }


def same_ttft(found: dict[str, dict[str, float]]) -> dict[str, Any]:
    """One worker at the chunk size whose median TTFT is nearest to the pair's, and the pair beside it."""
    pair = found["a pair"]
    others = {name: one for name, one in found.items() if name != "a pair"}
    name = min(others, key=lambda n: abs(np.log(others[n]["ttft_p50"] / pair["ttft_p50"])))
    return {
        "one worker": name,
        "ttft_ratio": pair["ttft_p50"] / others[name]["ttft_p50"],
        "itl_p99_ratio": pair["itl_p99"] / others[name]["itl_p99"],
    }


def plot(figures: dict[str, Any]) -> None:
    """Left the shares of prefill that transfer shows, right what a burst does."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    canvas, (left, right) = plt.subplots(1, 2, figsize=(12, 4))
    ways = figures["transfer"]
    left.barh(list(ways), [100 * one["exposed_share"] for one in ways.values()])
    left.set(xlabel="KV transfer that shows, % of prefill")
    for name, one in figures["burst"].items():
        right.scatter(1e3 * one["ttft_p50"], 1e3 * one["itl_p99"], label=name)
    right.set(xlabel="median TTFT of the burst, ms", ylabel="p99 between tokens of the others, ms")
    right.set(xscale="log", yscale="log")
    right.legend(fontsize=7)
    canvas.tight_layout()
    canvas.savefig(RESULTS / "pairs_live.png", dpi=110)


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=12, help="prompts of the transfer part")
    parser.add_argument("--length", type=int, default=1400, help="tokens of a burst's prompts")
    args = parser.parse_args()
    rng = random.Random(0)
    lengths = [rng.randint(512, 1500) for _ in range(args.prompts)]
    figures: dict[str, Any] = {}
    figures["transfer"] = asyncio.run(transfers(args.model, lengths))
    each = 1e3 / len(lengths)
    rows = [
        [name, f"{f['prefill_seconds'] * each:.0f}", f"{f['exposed_seconds'] * each:.1f}",
         f"{f['exposed_share']:.1%}"]
        for name, f in figures["transfer"].items()
    ]  # fmt: skip
    table("KV transfer, per prompt", ["wire", "prefill, ms", "exposed, ms", "share"], rows)
    write("pairs_live", vars(args), figures)
    figures["burst"] = asyncio.run(bursts(args.model, args.rounds, args.length))
    rows = [
        [name, *(f"{f[key] * 1e3:.1f}" for key in ("itl_p50", "itl_p99", "ttft_p50"))]
        for name, f in figures["burst"].items()
    ]
    table("A burst of long prompts", ["", "ITL p50, ms", "ITL p99, ms", "TTFT p50, ms"], rows)
    figures["same_ttft"] = same_ttft(figures["burst"])
    print(figures["same_ttft"])
    print(write("pairs_live", vars(args), figures))
    plot(figures)
    figures["chat"] = asyncio.run(chats(args.model, args.rounds))
    rows = [[name, f"{1e3 * ttft:.1f}"] for name, ttft in figures["chat"].items()]
    table("TTFT of a second turn", ["", "ms"], rows)
    write("pairs_live", vars(args), figures)


if __name__ == "__main__":
    main()
