"""Stream pairs on this machine: the exposed time of KV transfer, the effect of a burst of long prompts on
other requests, the cost of a chat's next turn, and every router on two pairs.

Transfer: prompts run one after another on one pair. The time from a prompt's end until its KV has arrived is
given as a share of its prefill time: through shared memory, through NIXL where it is installed, and as a
blocking copy (one chunk, sent when the whole prompt is computed); also on a wire so slow that moving a prompt
takes half the time of computing it. Burst: a few streams decode while prompts (short, long, mixed) come in at
once; the time between their tokens while these are being computed, on one worker that decodes first and fills
its steps with prompts (order `chunked`, for several chunk sizes) or schedules by latency targets, and on a
pair with the same cores, in interleaved rounds. Chat: the time to the first token of a second turn: on one
worker; on a pair to which the answer has returned; and on a pair whose decode worker computes the new tokens.
Routers: the traces of papers/pairs.py on two pairs, each worker on half a core.

    python -m benchmarks.papers.pairs_live --model embedded --rounds 5

The result file keeps its results for parts that are not run.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import numpy as np

from benchmarks.options import parse, pick, results_folder
from benchmarks.papers.pairs import TRACES, WorkloadRequest, trace
from benchmarks.report import table, write
from streamserve.baselines.routers import ROUTERS
from streamserve.llm.async_llm import AsyncLLM
from streamserve.protocol.reports import TransferReport
from streamserve.protocol.sampling import NO_SLO, SamplingParams, Slo
from streamserve.settings.resolve import resolve
from streamserve.system.nixl import nixl_package
from streamserve.text.output import ChoiceDelta

CHUNKS = (64, 128, 256, 512)
STREAMS = 4
WARM = 3
LIVE_TARGETS = (0.5, 0.03)
"""Target seconds to the first token and for each further token, for the routers' attainment."""
BURSTS = {"long": [1400] * 6, "short": [64] * 24, "mixed": [1400, 64, 64, 64] * 4}
"""Lengths of the prompts of a burst, in tokens."""
ANSWER, QUESTION = 200, 24
"""Tokens of a chat's first answer, and of its second turn's question."""


@asynccontextmanager
async def serving(model: str, **options: object) -> AsyncGenerator[AsyncLLM, None]:
    """Serve the model; yields once all its workers are ready."""
    llm = AsyncLLM(resolve(model, {"draft": "none", "log_level": "warning", **options}))
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
    """Return random tokens."""
    return [rng.randrange(300, 3000) for _ in range(length)]


async def times(
    llm: AsyncLLM,
    tokens: list[int],
    count: int,
    name: str,
    into: list[float] | None = None,
    slo: Slo = NO_SLO,
) -> list[float]:
    """Return when the request was sent, and when each of its `count` tokens arrived."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, slo=slo)
    seen = [] if into is None else into
    seen.append(time.monotonic())
    async with aclosing(llm.submit(tokens, params, request_id=name)) as updates:
        async for item in updates:
            if isinstance(item, ChoiceDelta):
                seen += [time.monotonic()] * len(item.tokens)
    return seen


async def sent(llm: AsyncLLM, handed_over: int) -> TransferReport:
    """Return the worker's report once it has handed over `handed_over` prompts."""
    while True:
        report = llm.report()
        if report and report.transfer and report.transfer.handed_over >= handed_over:
            return report.transfer
        await asyncio.sleep(0.05)


async def transfer(model: str, lengths: list[int], **options: object) -> dict[str, float]:
    """Return for prompts sent one after another: seconds to the first token, exposed seconds, and bytes."""
    rng = random.Random(1)
    async with serving(model, pairs=1, **{"max_chunk": 128, **options}) as llm:
        for number in range(WARM):  # the first touch of memory is slow
            await times(llm, prompt(rng, 1500), 3, f"warm{number}")
        before = await sent(llm, WARM)
        first = []
        for number, length in enumerate(lengths):
            seen = await times(llm, prompt(rng, length), 3, f"r{number}")
            first.append(seen[1] - seen[0])
        report = await sent(llm, len(lengths) + WARM)
    exposed = report.exposed_seconds - before.exposed_seconds
    return {
        "prefill_seconds": sum(first),
        "exposed_seconds": exposed,
        "bytes": float(report.sent_bytes - before.sent_bytes),
        "exposed_share": exposed / sum(first),
        "wire_seconds": report.wire_seconds - before.wire_seconds,
    }


async def transfers(model: str, lengths: list[int]) -> dict[str, dict[str, float]]:
    """Measure every KV transport."""
    ways: dict[str, dict[str, object]] = {"shared memory": {}}
    if nixl_package() is not None:
        ways["NIXL"] = {"kv_transport": "nixl"}
    whole = {"max_chunk": 2048, "max_num_batched_tokens": 2048}
    ways["all at the end"] = whole
    measured = {name: await transfer(model, lengths, **options) for name, options in ways.items()}
    wire = half_of(measured["shared memory"])
    slow = await transfer(model, lengths, kv_bytes_per_second=wire)
    wire = half_of(slow)  # Prefill may take a different time on such a wire.
    name = "a wire that takes half of prefill"
    measured[name] = await transfer(model, lengths, kv_bytes_per_second=wire)
    measured[name]["wire_share"] = measured[name]["bytes"] / wire / measured[name]["prefill_seconds"]
    measured["the same, all at the end"] = await transfer(model, lengths, kv_bytes_per_second=wire, **whole)
    return measured


def half_of(measured: dict[str, float]) -> float:
    """Return the bytes a second at which the transfer takes half of the prefill time."""
    return measured["bytes"] / (measured["prefill_seconds"] / 2)


async def burst(llm: AsyncLLM, name: str, lengths: list[int]) -> dict[str, float]:
    """Return the gaps between tokens of decoding streams while a burst of prompts is computed, and the
    prompts' TTFT."""
    rng = random.Random(name)
    seen: list[list[float]] = [[] for _ in range(STREAMS)]
    streams = [
        asyncio.create_task(times(llm, prompt(rng, 16), 6000, f"{name}-s{number}", into))
        for number, into in enumerate(seen)
    ]
    while min(map(len, seen)) < 20:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    began = time.monotonic()
    trace_requests = [
        asyncio.create_task(times(llm, prompt(rng, length), 2, f"{name}-p{n}"))
        for n, length in enumerate(lengths)
    ]
    first = [measured[1] - measured[0] for measured in await asyncio.gather(*trace_requests)]
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
    """Return the seconds between tokens of this interval, the first gap counted from the last token before
    it."""
    at = np.array(seen[1:])
    first = max(int(np.searchsorted(at, began)) - 1, 0)
    return np.diff(at[first : int(np.searchsorted(at, ended))])


async def chats(model: str, rounds: int) -> dict[str, float]:
    """Return the medians of the time to the first token of a second turn."""
    setups: dict[str, tuple[float, dict[str, object]]] = {
        "one worker": (0.2, {}),
        "a pair, the answer returned": (0.2, {"pairs": 1}),
        "a pair, at once": (0.0, {"pairs": 1}),
    }
    measured: dict[str, list[float]] = {name: [] for name in setups}
    for name, (pause, options) in setups.items():
        rng = random.Random(2)
        async with serving(model, **options) as llm:
            await times(llm, prompt(rng, 600), 8, "warm")
            for number in range(3 * rounds):
                text = prompt(rng, 600)
                text += await answer(llm, text, f"a{number}")
                await asyncio.sleep(pause)
                seen = await times(llm, text + prompt(rng, QUESTION), 3, f"b{number}")
                measured[name].append(seen[1] - seen[0])
    return {name: float(np.median(seen)) for name, seen in measured.items()}


async def answer(llm: AsyncLLM, tokens: list[int], name: str) -> list[int]:
    """Return the answer of the chat's first turn."""
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    options: list[int] = []
    async with aclosing(llm.submit(tokens, params, request_id=name)) as updates:
        async for item in updates:
            if isinstance(item, ChoiceDelta):
                options += item.tokens
    return options


async def bursts(model: str, rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return for each kind of burst medians over interleaved rounds, of one worker and of a pair."""
    kinds = pick(BURSTS, {"long": [600] * 2})
    measured: dict[str, dict[str, list[dict[str, float]]]] = {kind: {} for kind in kinds}
    setups: dict[str, dict[str, Any]] = {
        f"one worker, chunks of {c}": {"order": "chunked", "max_chunk": c} for c in pick(CHUNKS, CHUNKS[-1:])
    }
    setups["one worker, by targets"] = {"max_chunk": 512}
    setups["a pair"] = {"pairs": 1, "max_chunk": 256}
    for number in range(rounds):
        for name, options in setups.items():
            async with serving(model, num_blocks=2000, **options) as llm:
                for warm in range(2):
                    await times(llm, prompt(random.Random(warm), 1400), 8, f"warm{warm}")
                for kind, lengths in kinds.items():
                    one = await burst(llm, f"{kind}{number}", lengths)
                    measured[kind].setdefault(name, []).append(one)
    return {
        kind: {
            name: {key: float(np.median([one[key] for one in seen])) for key in seen[0]}
            for name, seen in of_kind.items()
        }
        for kind, of_kind in measured.items()
    }


def same_ttft(measured: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Compare the pair with one worker at the chunk size whose median TTFT is nearest to the pair's."""
    pair = measured["a pair"]
    others = {name: one for name, one in measured.items() if "chunks" in name}
    name = min(others, key=lambda n: abs(np.log(others[n]["ttft_p50"] / pair["ttft_p50"])))
    return {
        "one worker": name,
        "ttft_ratio": pair["ttft_p50"] / others[name]["ttft_p50"],
        "itl_p99_ratio": pair["itl_p99"] / others[name]["itl_p99"],
    }


async def routed(model: str, router: str, kind: str, requests: int, rate: float) -> dict[str, float]:
    """Serve a trace of benchmarks/papers/pairs.py on two pairs with the given router."""
    trace_requests = trace(kind, requests, rate, 0)
    ttft, tpot = LIVE_TARGETS
    slo = Slo(ttft_ms=1e3 * ttft, tpot_ms=1e3 * tpot)
    async with serving(model, pairs=2, router=router, threads=1, num_blocks=2000) as llm:
        for number in range(4):
            await times(llm, prompt(random.Random(number), 600), 8, f"warm{number}")
        began = time.monotonic()

        async def one(number: int, request: WorkloadRequest) -> list[float]:
            await asyncio.sleep(max(0.0, began + request.at - trace_requests[0].at - time.monotonic()))
            tokens = [300 + token for token in request.prompt[:1400]]
            return await times(llm, tokens, request.output, f"r{number}", slo=slo)

        seen = await asyncio.gather(*(one(number, request) for number, request in enumerate(trace_requests)))
    first = [times[1] - times[0] for times in seen]
    each = [(times[-1] - times[1]) / max(len(times) - 2, 1) for times in seen]
    return {
        "ttft_p95": float(np.percentile(first, 95)),
        "tokens_per_second": sum(len(times) - 1 for times in seen) / (max(t[-1] for t in seen) - began),
        "attainment": float(np.mean([a <= ttft and b <= tpot for a, b in zip(first, each, strict=True)])),
    }


def plot(figures: dict[str, Any]) -> None:
    """Plot on the left the shares of prefill that transfer exposes, on the right the effect of a burst."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    canvas, (left, right) = plt.subplots(1, 2, figsize=(12, 4))
    ways = figures["transfer"]
    left.barh(list(ways), [100 * one["exposed_share"] for one in ways.values()])
    left.set(xlabel="KV transfer that shows, % of prefill")
    for name, one in figures["burst"]["long"].items():
        right.scatter(1e3 * one["ttft_p50"], 1e3 * one["itl_p99"], label=name)
    right.set(xlabel="median TTFT of the burst, ms", ylabel="p99 between tokens of the others, ms")
    right.set(xscale="log", yscale="log")
    right.legend(fontsize=7)
    canvas.tight_layout()
    canvas.savefig(results_folder() / "pairs_live.png", dpi=110)


def transfer_part(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Measure the exposed time of KV transfer."""
    rng = random.Random(0)
    lengths = [rng.randint(512, 1500) for _ in range(args.prompts)]
    figures["transfer"] = asyncio.run(transfers(args.model, lengths))
    each = 1e3 / len(lengths)
    rows = [
        [name, f"{f['prefill_seconds'] * each:.0f}", f"{f['exposed_seconds'] * each:.1f}",
         f"{f['exposed_share']:.1%}"]
        for name, f in figures["transfer"].items()
    ]  # fmt: skip
    table("KV transfer, per prompt", ["wire", "prefill, ms", "exposed, ms", "share"], rows)


def burst_part(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Measure the effect of bursts of prompts on decoding streams."""
    figures["burst"] = asyncio.run(bursts(args.model, args.rounds))
    for kind, measured in figures["burst"].items():
        rows = [
            [name, *(f"{f[key] * 1e3:.1f}" for key in ("itl_p50", "itl_p99", "ttft_p50"))]
            for name, f in measured.items()
        ]
        table(f"A burst of {kind} prompts", ["", "ITL p50, ms", "ITL p99, ms", "TTFT p50, ms"], rows)
    figures["same_ttft"] = {kind: same_ttft(measured) for kind, measured in figures["burst"].items()}
    print(figures["same_ttft"])


def chat_part(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Measure the second turn of a chat."""
    figures["chat"] = asyncio.run(chats(args.model, args.rounds))
    rows = [[name, f"{1e3 * ttft:.1f}"] for name, ttft in figures["chat"].items()]
    table("TTFT of a second turn", ["", "ms"], rows)


def routers_part(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Measure every router on every trace."""
    figures["routers"] = {}
    for kind in pick(TRACES, TRACES[:1]):
        measured = {
            name: asyncio.run(routed(args.model, name, kind, args.requests, args.rate))
            for name in pick(list(ROUTERS), list(ROUTERS)[:1])
        }
        figures["routers"][kind] = measured
        rows = [
            [name, f"{1e3 * f['ttft_p95']:.0f}", f"{f['tokens_per_second']:.0f}", f"{f['attainment']:.0%}"]
            for name, f in measured.items()
        ]
        table(f"{kind}, 2 pairs", ["router", "p95 TTFT, ms", "tokens/s", "attainment"], rows)


PARTS = {"transfer": transfer_part, "burst": burst_part, "chat": chat_part, "routers": routers_part}


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=12, help="number of prompts in the transfer part")
    parser.add_argument(
        "--requests", type=int, default=40, help="number of requests in a trace of the routers part"
    )
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second in the routers part")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    args = parse(parser, rounds=1, prompts=1, requests=4)
    path = results_folder() / "pairs_live.json"
    figures: dict[str, Any] = json.loads(path.read_text())["figures"] if path.exists() else {}
    for name in args.parts:
        PARTS[name](args, figures)
        write("pairs_live", vars(args), figures, [args.model])
    if "transfer" in figures and "long" in figures.get("burst", {}):
        plot(figures)


if __name__ == "__main__":
    main()
