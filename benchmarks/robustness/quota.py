"""Speed within a CPU quota and on one processor, with the chosen number of threads and with others.

Each case is a process in a separate control group (version 1 or 2; it needs root). The quota pays for half
of the processors; a thread for each processor, as many engines start them, is stopped by it in each period.

    python -m benchmarks.robustness.quota --model FOLDER --rounds 5
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.options import parse, pick
from benchmarks.report import table, write

PERIOD = 100_000
"""Microseconds of a quota's period, the default of Linux."""
WORK = {
    "one stream, tokens/s": (1, 16, 32),
    "8 streams, tokens/s": (8, 16, 16),
    "prefill, tokens/s": (1, 512, 1),
}
"""Concurrent requests, tokens of each prompt, and tokens of each output, by kind of work."""


@dataclass(frozen=True)
class Case:
    """A limit: a quota as a share of the processors, or the first processors only; and `threads` (0:
    chosen)."""

    quota: float = 1.0
    processors: int = 0
    threads: int = 0


CASES = {
    "all processors": Case(),
    "half as quota": Case(quota=0.5),
    "half as quota, a thread for each processor": Case(quota=0.5, threads=os.cpu_count() or 1),
    "one processor": Case(processors=1),
    "one processor, a thread for each processor": Case(processors=1, threads=os.cpu_count() or 1),
}


@contextmanager
def control_group(quota: float) -> Iterator[Path]:
    """Make a control group with `quota` of the processors' time; yield its list of processes."""
    version_2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    group = Path("/sys/fs/cgroup") / ("" if version_2 else "cpu") / f"streamserve-quota-{os.getpid()}"
    group.mkdir()
    try:
        microseconds = int(quota * PERIOD * (os.cpu_count() or 1))
        if version_2:
            (group / "cpu.max").write_text(f"{microseconds} {PERIOD}")
        else:
            (group / "cpu.cfs_quota_us").write_text(str(microseconds))
        yield group / "cgroup.procs"
    finally:
        for _ in range(100):  # its last process may still be ending
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def measure_here(model: str, threads: int) -> dict[str, float]:
    """Return the threads of a worker in this process's control group, and the speed of each kind of work."""
    from streamserve import LLM, SamplingParams
    from streamserve.system.processors import usable_processors

    figures: dict[str, float] = {"threads": threads or usable_processors().threads}
    with LLM(model, draft="none", threads=threads, num_blocks=2000, profile=False) as llm:
        for name, (requests, length, outputs) in {"warm-up": (8, 16, 4), **WORK}.items():
            prompts = [[300 + (31 * i + 7 * j) % 2000 for j in range(length)] for i in range(requests)]
            params = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            tokens = requests * (outputs if outputs > 1 else length)
            figures[name] = tokens / (time.perf_counter() - started)
    del figures["warm-up"]
    return figures


def measure(model: str, case: Case) -> dict[str, float]:
    """Return the result of `measure_here` in a process with the limits of the case."""
    module = "benchmarks.robustness.quota"
    command = [sys.executable, "-m", module, "--model", model, "--here", str(case.threads)]
    with control_group(case.quota) as processes:

        def limit() -> None:
            processes.write_text(str(os.getpid()))
            if case.processors:
                os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: case.processors])

        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, preexec_fn=limit)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    """Measure all cases in interleaved rounds, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a checkpoint, or embedded")
    parser.add_argument("--name", default="345 M", help="the model's name in the result file")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--here", type=int, metavar="THREADS", help=argparse.SUPPRESS)
    args = parse(parser, rounds=1)
    if args.here is not None:
        print(json.dumps(measure_here(args.model, args.here)))
        return
    cases = pick(CASES, dict(list(CASES.items())[:2]))
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for _ in range(args.rounds):
        for name, case in cases.items():
            rounds[name].append(measure(args.model, case))
    figures = {
        name: {what: statistics.median(one[what] for one in runs) for what in ("threads", *WORK)}
        for name, runs in rounds.items()
    }
    rows = [[name, *(f"{value:.1f}" for value in one.values())] for name, one in figures.items()]
    table("limits", ["limit", "threads", *WORK], rows)
    print(write("quota", {"work": WORK, "rounds": args.rounds, "period_us": PERIOD}, figures, (args.name,)))


if __name__ == "__main__":
    main()
