"""What a server does with the KV that it evicts under prompt streams, live: recompute or swap.

The trace of replaced prompts (arriving_traces) is sent over HTTP at 0.4 of the measured capacity, as it is
and with slower chunks, so that more prompts are open at once. The server's cache must be too small for them:

    streamserve serve embedded --draft none --num-blocks 300 --max-model-len 4096 --swap-space 0.2
    python -m benchmarks.papers.streaming_evictions http://127.0.0.1:8000
"""

import argparse
import asyncio
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from benchmarks.options import parse
from benchmarks.papers.arriving_replay import capacity, live
from benchmarks.papers.arriving_traces import TRACES
from benchmarks.report import table, write
from streamserve.protocol.reports import EvictionReport

LOAD = 0.4
"""Share of the capacity at which queries arrive. The tokens that edits invalidate are computed in
addition."""


async def evictions(url: str) -> dict[str, float]:
    """Return a server's totals of evictions."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        text = (await http.get("/metrics")).text
    found = re.findall(r"^streamserve:eviction_(\w+)_total\S* (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found if name in EvictionReport.__struct_fields__}


async def measure(url: str, kind: str, count: int, scale: float, delay: float) -> dict[str, Any]:
    """Replay a trace whose chunks arrive `delay` times slower; return the server's evictions meanwhile."""
    queries = TRACES[kind](count, 0, scale)
    words = statistics.fmean(query.tokens for query in queries)
    rate = LOAD * await capacity(url, round(words)) / words
    before = await evictions(url)
    done = await live(queries, rate, url, delay=delay)
    after = await evictions(url)
    return {
        "requests": len(queries),
        "words": round(words),
        "rate": round(rate, 3),
        "p50": statistics.median(done.ttft),
        "p99": sorted(done.ttft)[int(0.99 * (len(done.ttft) - 1))],
        **{name: round(value - before.get(name, 0.0), 6) for name, value in after.items()},
    }


async def run(url: str, kind: str, count: int, scale: float, delays: Sequence[float]) -> Mapping[str, Any]:
    """Measure a trace at each of these delays."""
    await capacity(url, 100, 2)  # warm up
    return {f"{kind} ×{delay:g}": await measure(url, kind, count, scale, delay) for delay in delays}


def main() -> None:
    """Measure a server, and print and write its evictions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--trace", choices=TRACES, default="update")
    parser.add_argument("--queries", type=int, default=60)
    parser.add_argument("--scale", type=float, default=0.05, help="factor for the published number of tokens")
    parser.add_argument("--delays", type=float, nargs="+", default=(1.0, 4.0))
    args = parse(parser, queries=2, scale=0.01, delays=(1.0,))
    results = asyncio.run(run(args.url, args.trace, args.queries, args.scale, args.delays))
    write("streaming-live-evictions", vars(args), results, ["embedded"])
    columns = ["p50", "p99", "swaps", "recomputes", "swap_predicted", "recompute_predicted"]
    rows = [[name, *(f"{one[key]:.4g}" for key in columns)] for name, one in results.items()]
    table("evictions", ["", *columns], rows)


if __name__ == "__main__":
    main()
