"""Several workers on this machine: the memory of their weights, what sharing costs and saves, and whether two
workers of one thread each give more tokens a second than one worker with two threads.

Memory: the proportional set size (PSS) of all workers of a server after they have computed, with shared and
with private weights, and the time from a worker's death until it serves again. Step: a decoding step of one
row with shared and with private weights in one process, in interleaved rounds. Throughput: prompts in one
burst, streams that decode, on one worker and on two; each round starts both servers, in alternating order.

    python -m benchmarks.overhead.workers --model FOLDER --parts memory step
    python -m benchmarks.overhead.workers --model FOLDER --parts throughput --rounds 1   # adds a round

The result file keeps its results for parts that are not run, and the rounds of throughput.
"""

import argparse
import asyncio
import json
import os
import random
import re
import resource
import signal
import statistics
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import parse, pick, results_folder
from benchmarks.report import table, write
from streamserve.contracts.plan import Span, StepPlan
from streamserve.execution.loading.load import load
from streamserve.execution.loading.loaded import Loaded
from streamserve.fleet.local_launcher import LocalLauncher
from streamserve.fleet.worker_process import start_worker
from streamserve.llm.async_llm import AsyncLLM
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.sampling import SamplingParams
from streamserve.settings.resolve import resolve
from streamserve.text.output import ChoiceDelta

SHAPES: dict[str, dict[str, int]] = {
    "one worker": {},
    "--pairs 1": {"pairs": 1},
    "--pairs 2": {"pairs": 2},
    "--workers 2": {"workers": 2},
}
CASES: dict[str, tuple[int, int, int]] = {
    "1 stream": (1, 16, 24),
    "16 streams": (16, 16, 12),
    "32 streams": (32, 16, 12),
    "8 prompts of 256": (8, 256, 1),
    "1 prompt of 512": (1, 512, 1),
}
"""Concurrent requests, tokens of each prompt, and tokens of each output, by case."""
OTHERS = "others"
"""The key of the share of the processors that other programs used in a round."""
STEP_ROUNDS = 15
MEGABYTE = 1e6


@asynccontextmanager
async def serving(model: str, private: bool = False, **options: object) -> AsyncGenerator[AsyncLLM, None]:
    """Serve the model; yields once all its workers are ready. With `private`, every worker has its own copy
    of the weights."""
    settings = {"draft": "none", "log_level": "error", "profile": False, "num_blocks": 1000, **options}
    llm = AsyncLLM(resolve(model, settings))
    if private:
        llm._runtime._make_launcher = partial(LocalLauncher, launch=start_worker)
    await llm.start()
    try:
        await all_ready(llm)
        yield llm
    finally:
        await llm.close()


async def all_ready(llm: AsyncLLM, ready: bool = True) -> None:
    """Wait until all workers are ready; with `ready=False`, until at least one is not."""
    for _ in range(100_000):
        if all(worker.ready for worker in llm.routing().workers) == ready:
            return
        await asyncio.sleep(0.002)
    raise TimeoutError("the workers are not ready")


async def burst(llm: AsyncLLM, requests: int, length: int, outputs: int) -> float:
    """Return the tokens a second of concurrent requests: output tokens, or prompt tokens if every output is
    one token."""
    rng = random.Random(time.monotonic_ns())
    params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)

    async def one(number: int) -> int:
        prompt, tokens = [rng.randrange(300, 3000) for _ in range(length)], 0
        async with aclosing(
            llm.submit(prompt, params, request_id=f"{time.monotonic_ns()}-{number}")
        ) as items:
            async for item in items:
                tokens += len(item.tokens) if isinstance(item, ChoiceDelta) else 0
        return tokens if outputs > 1 else length

    started = time.monotonic()
    done = await asyncio.gather(*(one(number) for number in range(requests)))
    return sum(done) / (time.monotonic() - started)


def pss(process: int) -> float:
    """Return a process's memory in bytes; shared memory is divided among the processes that map it."""
    text = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="utf-8")
    found = re.search(r"^Pss: +(\d+)", text, re.MULTILINE)
    assert found
    return int(found[1]) * 1024


async def memory_of(model: str, private: bool, options: dict[str, int]) -> dict[str, float]:
    """Return the memory of a server's workers, and the seconds of a start and of a restart."""
    started = time.monotonic()
    async with serving(model, private, **options) as llm:
        seconds = time.monotonic() - started
        names = [worker.name for worker in llm.routing().workers]
        for _ in range(2):
            await burst(llm, 8, 64, 8)
        total = sum(pss(llm.process_id(name)) for name in names)
        ready = llm.ready
        os.kill(llm.process_id(names[-1]), signal.SIGKILL)
        killed = time.monotonic()
        await all_ready(llm, ready=False)
        await all_ready(llm)
        return {
            "pss_mb": total / MEGABYTE,
            "workers": len(names),
            "weights_mb": ready.model.weight_bytes / MEGABYTE,
            "kv_mb": ready.kv_cache_bytes * len(names) / MEGABYTE,
            "start_s": seconds,
            "restart_s": time.monotonic() - killed,
        }


def memory_part(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Measure the memory of each server shape with private and with shared weights."""
    figures["memory"] = {}
    for name, options in pick(SHAPES, dict(list(SHAPES.items())[:2])).items():
        figures["memory"][name] = {
            kind: asyncio.run(memory_of(args.model, kind == "private", options))
            for kind in ("private", "shared")
        }
    rows = [
        [
            name,
            *(f"{one[kind][key]:.1f}" for kind in ("private", "shared") for key in ("pss_mb", "restart_s")),
        ]
        for name, one in figures["memory"].items()
    ]
    table("memory", ["server", "private, MB", "restart, s", "shared, MB", "restart, s"], rows)


def step_part(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Compare a decoding step's time with shared and with private weights."""
    config = ModelConfig(path=args.model, draft="none", num_blocks=100, profile=False)
    files = tuple(os.memfd_create("weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) for _ in range(2))
    seconds: dict[str, float] = {}
    loaded: dict[str, Loaded] = {}
    for name, shared in (("private", ()), ("written", files), ("mapped", files)):
        started = time.perf_counter()
        loaded[name] = load(config, weights=shared)
        seconds[name] = time.perf_counter() - started
    times: dict[str, list[float]] = {name: [] for name in ("private", "mapped")}
    for number in range(pick(STEP_ROUNDS, 1) + 1):
        for name, taken in times.items():
            span = Span(0, 16 + number, [5], list(range(3)))
            started = time.perf_counter()
            loaded[name].executor.run(StepPlan(number, [], [], [], [span]))
            taken.append(time.perf_counter() - started)
    for taken in times.values():
        del taken[0]  # the first step touches the KV cache
    ratios = [mapped / private for private, mapped in zip(times["private"], times["mapped"], strict=True)]
    figures["step"] = {
        "load_s": seconds,
        "private_ms": statistics.median(times["private"]) * 1000,
        "shared_ms": statistics.median(times["mapped"]) * 1000,
        "ratio": statistics.median(ratios),
        "threads": torch.get_num_threads()
        if loaded["private"].pool is None
        else loaded["private"].pool.threads,
    }
    print(json.dumps(figures["step"], indent=1))


async def throughput_of(model: str, options: dict[str, int]) -> dict[str, float]:
    """Return the tokens a second of each case, and the share of the processors that other programs used."""
    before = busy_seconds(), own_seconds(), time.monotonic()
    async with serving(model, **options) as llm:
        await burst(llm, 4, 16, 2)
        rates = {name: await burst(llm, *case) for name, case in CASES.items()}
    busy, own, now = busy_seconds(), own_seconds(), time.monotonic()
    processors = (now - before[2]) * (os.cpu_count() or 1)
    return {**rates, OTHERS: (busy - before[0] - (own - before[1])) / processors}


def busy_seconds() -> float:
    """Return the processor time that the machine has used so far."""
    numbers = list(map(int, Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:]))
    return (sum(numbers[:8]) - numbers[3] - numbers[4]) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Return the processor time of this process and of its ended workers."""
    used = [resource.getrusage(which) for which in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def throughput_part(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Measure throughput with one worker and with two workers, in alternating order."""
    rounds = figures.setdefault("throughput", [])
    for _ in range(args.rounds):
        names = ["one worker", "--workers 2"]
        order = names if len(rounds) % 2 == 0 else names[::-1]
        rounds.append({name: asyncio.run(throughput_of(args.model, SHAPES[name])) for name in order})
    rows = []
    for case in CASES:
        one, two = ([run[name][case] for run in rounds] for name in ("one worker", "--workers 2"))
        ratio = statistics.median(b / a for a, b in zip(one, two, strict=True))
        rows.append([case, f"{statistics.median(one):.1f}", f"{statistics.median(two):.1f}", f"{ratio:.2f}"])
    table(f"tokens/s, {len(rounds)} rounds", ["case", "one worker", "--workers 2", "ratio"], rows)


PARTS = {"memory": memory_part, "step": step_part, "throughput": throughput_part}


def main() -> None:
    """Measure the parts and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a checkpoint")
    parser.add_argument("--name", default="345 M", help="the model's name in the result file")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the throughput measurement")
    args = parse(parser, rounds=1)
    path = results_folder() / "workers.json"
    figures: dict[str, Any] = json.loads(path.read_text())["figures"] if path.exists() else {}
    for part in args.parts:
        PARTS[part](args, figures)
    print(write("workers", {"cases": CASES, "step_rounds": STEP_ROUNDS}, figures, (args.name,)))


if __name__ == "__main__":
    main()
