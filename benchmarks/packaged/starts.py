"""How long workers take to start: forked from a process with all imports done, or as new processes.

    python -m benchmarks.packaged.starts --rounds 7

Each round runs a script with `fork_workers` and one without, in alternating order, with the packaged model.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from statistics import median
from typing import Any

from benchmarks.options import parse

POLL = 0.001


def measure(fork: bool) -> dict[str, float]:
    """Return the seconds of each start in this process, counted from the start of the process."""
    started = time.time() - _age()
    import psutil

    from streamserve import LLM, SamplingParams

    def open_model(**settings: Any) -> LLM:
        common = {"profile": False, "log_level": "error", "num_blocks": 500, "draft": "none"}
        return LLM("embedded", fork_workers=fork, **common, **settings)

    def answer(llm: LLM) -> None:
        llm.generate(["What is 12 + 7?"], SamplingParams(max_tokens=1), use_tqdm=False)

    seconds = {}
    with open_model() as llm:
        answer(llm)
        seconds["first token of a script"] = time.time() - started
        fleet = llm._llm._runtime.fleet
        os.kill(llm._llm.process_id(), signal.SIGKILL)
        killed = time.monotonic()
        _wait(lambda: fleet.incidents().deaths == 1)
        _wait(lambda: fleet.health()[0])
        seconds["restart of a killed worker"] = time.monotonic() - killed
        began = time.monotonic()
        with open_model() as second:
            answer(second)
            seconds["a second model, to its first token"] = time.monotonic() - began
    began = time.monotonic()
    with open_model(workers=4, threads=1) as llm:
        workers = llm._llm._runtime.fleet.workers.values()
        _wait(lambda: all(worker.ready for worker in workers))
        seconds["--workers 4, all ready"] = time.monotonic() - began
        pss = (psutil.Process(llm._llm.process_id(name)).memory_full_info().pss for name in _names(llm))
        seconds["memory of 4 workers, MB"] = sum(pss) / 1e6
    return seconds


def _names(llm: Any) -> list[str]:
    return list(llm._llm._runtime.fleet.workers)


def _age() -> float:
    """Return the seconds since this process was started."""
    import psutil

    return time.time() - psutil.Process().create_time()


def _wait(condition: Any) -> None:
    while not condition():
        time.sleep(POLL)


def run(fork: bool) -> dict[str, float]:
    """Return the results measured in a new process."""
    command = [sys.executable, "-m", "benchmarks.packaged.starts", "--measure", "fork" if fork else "start"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result: dict[str, float] = json.loads(printed)
    return result


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.packaged.starts", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--measure", choices=("fork", "start"), help=argparse.SUPPRESS)
    args = parse(parser, rounds=1)
    if args.measure:
        print(json.dumps(measure(args.measure == "fork")))
        return
    # not at the top: it imports torch, which a measured script must not have loaded
    from benchmarks.report import table, write

    rounds = []
    for number in range(args.rounds):
        both = {fork: run(fork) for fork in ((True, False) if number % 2 else (False, True))}
        rounds.append({"forked": both[True], "started": both[False]})
        print(f"round {number + 1} of {args.rounds}: {rounds[-1]}", file=sys.stderr)
    figures = {
        name: {
            "started": median(one["started"][name] for one in rounds),
            "forked": median(one["forked"][name] for one in rounds),
            "ratio": median(one["started"][name] / one["forked"][name] for one in rounds),
        }
        for name in rounds[0]["forked"]
    }
    rows = [[name, *(f"{value:.2f}" for value in one.values())] for name, one in figures.items()]
    table("Seconds", ["", "started", "forked", "ratio"], rows)
    write("starts", {"rounds": args.rounds}, {"median": figures, "rounds": rounds}, ["embedded"])


if __name__ == "__main__":
    main()
