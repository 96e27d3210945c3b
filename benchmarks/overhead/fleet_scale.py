"""The fleet's decisions with many workers and open prompt streams, without processes: how long each takes,
and the memory of a stream, prompt included.

    python -m benchmarks.overhead.fleet_scale --workers 1000 --streams 100000
"""

import argparse
import random
import statistics
import time
from array import array
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import psutil

from benchmarks.options import parse
from benchmarks.report import SIMULATED, table, write
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import ClientEdit, Close, Command, FleetEvent, Open, WorkerMessage
from streamserve.fleet.fleet import Fleet
from streamserve.fleet.worker_state import unified
from streamserve.protocol.messages import (
    PROTOCOL_VERSION,
    Admitted,
    Events,
    ModelInfo,
    Ready,
    Token,
)
from streamserve.protocol.reports import Report
from streamserve.protocol.sampling import SamplingParams

PROMPT = 64
"""Tokens of a prompt when its stream is opened, and of each edit."""
EDITED = 20_000
"""Number of streams that are edited, finished and answered after all were opened."""

READY = Ready(
    version=PROTOCOL_VERSION,
    model=ModelInfo(
        architecture="none", parameters=0, vocab_size=1000, max_model_len=4096, eos_token_ids=(),
        weight_bytes=0, dtype="none", row_invariant=True, fingerprint="none", backend="none",
    ),
    num_blocks=10_000, block_size=16, max_num_seqs=256, kv_cache_bytes=0, load_seconds=0.0,
)  # fmt: skip
REPORT = Report(
    running=50, waiting=50, blocks_total=10_000, blocks_live=500, steps=1, prompt_tokens=1,
    generation_tokens=1, prefix_queries=0, prefix_hits=0, preemptions=0, copies_on_write=0, step_seconds=0.1,
)  # fmt: skip


class Measured:
    """A fleet, and the seconds of its decisions by kind of event."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.seconds: dict[str, array[float]] = defaultdict(lambda: array("d"))
        self._now = 0.0

    def handle(self, kind: str, event: FleetEvent) -> list[Command]:
        """Process an event, one millisecond of virtual time after the previous event."""
        self._now += 1e-3
        started = time.perf_counter()
        commands = self.fleet.handle(event, self._now)
        self.seconds[kind].append(time.perf_counter() - started)
        return commands


def run(workers: int, streams: int, seed: int) -> dict[str, Any]:
    """Return the measured times and memory."""
    rng = random.Random(seed)
    fleet = Fleet(
        FleetConfig(topology=unified(workers), max_requests=streams + 1, max_waiting_tokens=1 << 40)
    )
    measured = Measured(fleet)
    fleet.start(0.0)
    names = list(fleet.workers)
    for name in names:
        measured.handle("ready", WorkerMessage(name, 1, READY))
    process = psutil.Process()
    before = process.memory_info().rss
    for number in range(streams):
        prompt = [rng.randrange(1000) for _ in range(PROMPT)]
        measured.handle("open", Open(f"s{number}", prompt, SamplingParams(seed=1), open=True))
        if number % 100 == 0:
            measured.handle("report", WorkerMessage(rng.choice(names), 1, REPORT))
    memory = (process.memory_info().rss - before) / streams
    for number in rng.sample(range(streams), min(EDITED, streams)):
        name = f"s{number}"
        tokens = [rng.randrange(1000) for _ in range(PROMPT)]
        measured.handle("edit", ClientEdit(name, 1, PROMPT, tokens, finish=True))
        worker, attempt = fleet.requests[name].worker, fleet.requests[name].attempt
        for index in range(4):
            token = Token(name, attempt, 0, index, 7, finish=None)
            events = Events([Admitted(name, attempt, 0, 0), token])
            measured.handle("token", WorkerMessage(worker or "", 1, events))
        measured.handle("close", Close(name))
    return {"bytes a stream": memory, "seconds": {kind: _spread(of) for kind, of in measured.seconds.items()}}


def _spread(seconds: Iterable[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "count": len(ordered),
        "median": statistics.median(ordered),
        "p99": ordered[int(0.99 * (len(ordered) - 1))],
    }


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parse(parser, workers=4, streams=20)
    figures = run(args.workers, args.streams, args.seed)
    rows = [
        [kind, f"{of['count']:,}", f"{1e6 * of['median']:.0f}", f"{1e6 * of['p99']:.0f}"]
        for kind, of in figures["seconds"].items()
    ]
    table("Decisions of the fleet", ["event", "count", "median, µs", "p99, µs"], rows)
    print(f"{figures['bytes a stream']:.0f} bytes a stream")
    print(write("fleet_scale", vars(args), figures, SIMULATED))


if __name__ == "__main__":
    main()
