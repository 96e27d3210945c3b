"""Stream pairs on this machine: how much of the KV transfer shows, and what a burst of long prompts does to
others.

Transfer: prompts one after another on one pair; the time from a prompt's end until its KV has landed, as a
share of its time to the first token, on the wire as it is and on one so slow that moving a prompt takes half
as long as computing it. Burst: a few streams decode while long prompts come in at once; the time between
their tokens, on one worker (for several chunk sizes) and on a pair with the same cores, in interleaved
rounds.

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

from benchmarks.report import table, write
from streamserve.async_llm import AsyncLLM
from streamserve.protocol.messages import TransferReport
from streamserve.protocol.sampling import SamplingParams
from streamserve.settings import resolve
from streamserve.text.output import Delta

CHUNKS = (64, 128, 256, 512)
STREAMS, BURST = 4, 6


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


async def times(llm: AsyncLLM, tokens: list[int], count: int, name: str) -> list[float]:
    """When the request was sent, and when each of its `count` tokens came."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    seen = [time.monotonic()]
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


async def transfer(model: str, lengths: list[int], wire: float | None) -> dict[str, float]:
    """Of prompts one after another: seconds to the first token, seconds exposed, bytes."""
    rng = random.Random(1)
    async with serving(model, pairs=1, kv_bytes_per_second=wire, max_chunk=128) as llm:
        first = []
        for number, length in enumerate(lengths):
            seen = await times(llm, prompt(rng, length), 3, f"r{number}")
            first.append(seen[1] - seen[0])
        report = await sent(llm, len(lengths))
    return {
        "prefill_seconds": sum(first),
        "exposed_seconds": report.exposed_seconds,
        "bytes": float(report.sent_bytes),
        "exposed_share": report.exposed_seconds / sum(first),
    }


async def burst(llm: AsyncLLM, name: str, length: int) -> dict[str, float]:
    """Gaps between the tokens of streams that decode while long prompts come, and those prompts' TTFT."""
    rng = random.Random(name)
    streams = [
        asyncio.create_task(times(llm, prompt(rng, 16), 120, f"{name}-s{number}"))
        for number in range(STREAMS)
    ]
    await asyncio.sleep(0.3)
    long = [asyncio.create_task(times(llm, prompt(rng, length), 2, f"{name}-p{n}")) for n in range(BURST)]
    first = [seen[1] - seen[0] for seen in await asyncio.gather(*long)]
    gaps = np.concatenate([np.diff(seen[1:]) for seen in await asyncio.gather(*streams)])
    return {
        "itl_p50": float(np.median(gaps)),
        "itl_p99": float(np.percentile(gaps, 99)),
        "ttft_p50": float(np.median(first)),
    }


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
    plain = asyncio.run(transfer(args.model, lengths, None))
    wire = plain["bytes"] / (plain["prefill_seconds"] / 2)
    slow = asyncio.run(transfer(args.model, lengths, wire))
    each = 1e3 / len(lengths)
    rows = [
        [name, f"{f['prefill_seconds'] * each:.0f}", f"{f['exposed_seconds'] * each:.1f}",
         f"{f['exposed_share']:.1%}"]
        for name, f in (("shared memory", plain), ("a wire that takes half of prefill", slow))
    ]  # fmt: skip
    table("KV transfer, per prompt", ["wire", "prefill, ms", "exposed, ms", "share"], rows)
    found = asyncio.run(bursts(args.model, args.rounds, args.length))
    rows = [
        [name, *(f"{f[key] * 1e3:.1f}" for key in ("itl_p50", "itl_p99", "ttft_p50"))]
        for name, f in found.items()
    ]
    table("A burst of long prompts", ["", "ITL p50, ms", "ITL p99, ms", "TTFT p50, ms"], rows)
    print(write("pairs_live", vars(args), {"transfer": {"plain": plain, "slow": slow}, "burst": found}))


if __name__ == "__main__":
    main()
