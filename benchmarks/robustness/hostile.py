"""Effect of hostile clients on others: the latency of /health and the API process's memory under each input.

A probe in a separate process requests /health every 5 ms, on one connection, first without attack, then under
each input (hostile_inputs.py), which is sent repeatedly for some seconds; finally all inputs at once. Memory
is the peak of the API process's resident set.

    python -m benchmarks.robustness.hostile                          # all inputs, 10 s each: five minutes
    python -m benchmarks.robustness.hostile --seconds 3 --only text objects
"""

import argparse
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.options import parse, pick
from benchmarks.report import PACKAGED_PAIR, table, write
from benchmarks.robustness.hostile_inputs import INPUTS, Statuses, Target

EVERY = 0.005
"""Seconds between two requests of the probe."""
READY = "ready"
"""The line that the probe prints first, when it begins."""

STALL_MS, RSS_MB = 100.0, 600.0
"""The goals: how much the p99.9 of /health may increase over the run without attack, and the peak memory."""


@contextmanager
def server(*flags: str) -> Iterator[tuple[subprocess.Popen[str], Target]]:
    """Run a server of the packaged model, with its default limits."""
    command = [sys.executable, "-m", "streamserve", "serve", "embedded", "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        banner = ""
        while "curl" not in banner:
            line = process.stdout.readline()
            assert line, f"the server ended: {banner}"
            banner += line
        threading.Thread(target=process.stdout.read, daemon=True).start()
        url, context = re.search(r"at (http://\S+)", banner), re.search(r"(\d+) tokens of context", banner)
        assert url
        assert context
        parts = urlsplit(url[1])
        yield process, Target(parts.hostname or "", parts.port or 0, int(context[1]))
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def probe(host: str, port: int) -> None:
    """Print a line when connected; request /health until standard input ends; then print the latencies in
    milliseconds as JSON."""
    done = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), done.set()), daemon=True).start()
    latencies: list[float] = []
    question = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection((host, port), timeout=120) as client:
        print(READY, flush=True)
        while not done.is_set():
            start = time.perf_counter()
            client.sendall(question)
            reply = b""
            while not reply.endswith(b"}"):
                reply += client.recv(65536)
            assert reply.startswith(b"HTTP/1.1 200"), reply
            latencies.append(1e3 * (time.perf_counter() - start))
            time.sleep(EVERY)
    print(json.dumps(latencies))


@contextmanager
def probing(target: Target, figures: dict[str, Any]) -> Iterator[None]:
    """Store the probe's latencies during the block in `figures`."""
    module = "benchmarks.robustness.hostile"
    command = [sys.executable, "-m", module, "--probe", target.host, str(target.port)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == READY  # the probe's start-up is not part of the attack
    yield
    printed, _ = process.communicate("")
    latencies = sorted(json.loads(printed))
    figures |= {
        "probes": len(latencies),
        "p50_ms": latencies[len(latencies) // 2],
        "p99_9_ms": latencies[int(0.999 * (len(latencies) - 1))],
        "max_ms": latencies[-1],
    }


def reset_peak(process: subprocess.Popen[str]) -> None:
    """Reset the peak memory counter."""
    Path(f"/proc/{process.pid}/clear_refs").write_text("5", encoding="utf-8")


def peak_mb(process: subprocess.Popen[str]) -> float:
    """Return the peak of the resident set, in 10^6 bytes."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
    measured = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert measured
    return int(measured[1]) * 1024 / 1e6


def attacked(
    process: subprocess.Popen[str], target: Target, sends: list[Callable[[Target], Statuses]], seconds: float
) -> dict[str, Any]:
    """Return the results while the functions in `sends` run repeatedly."""
    figures: dict[str, Any] = {}
    statuses: Statuses = Counter()
    reset_peak(process)

    def repeat(send: Callable[[Target], Statuses]) -> None:
        while time.monotonic() < end:
            statuses.update(send(target))

    with probing(target, figures):
        end = time.monotonic() + seconds
        threads = [threading.Thread(target=repeat, args=(send,)) for send in sends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        time.sleep(max(0.0, end - time.monotonic()))
    return figures | {"peak_rss_mb": peak_mb(process), "statuses": dict(sorted(statuses.items()))}


def measure(names: list[str], seconds: float, together: bool) -> dict[str, dict[str, Any]]:
    """Return results by input. `nothing` has the results of the probe without an attack."""
    measured: dict[str, dict[str, Any]] = {}
    with server() as (process, target):
        measured["nothing"] = attacked(process, target, [], seconds)
        for name in names:
            measured[name] = attacked(process, target, [INPUTS[name]], seconds)
            _print_row(name, measured)
        if together:
            measured["all together"] = attacked(process, target, [INPUTS[name] for name in names], seconds)
            _print_row("all together", measured)
        assert process.poll() is None, "the server ended"
    base = measured["nothing"]["p99_9_ms"]
    for figures in measured.values():
        figures["stall_ms"] = figures["p99_9_ms"] - base
    return measured


def _print_row(name: str, measured: dict[str, dict[str, Any]]) -> None:
    one = measured[name]
    print(
        f"{name:24} p50 {one['p50_ms']:7.1f}  p99.9 {one['p99_9_ms']:7.1f}  max {one['max_ms']:7.1f} ms   "
        f"peak {one['peak_rss_mb']:5.0f} MB   {one['statuses']}",
        flush=True,
    )


def main() -> None:
    """Measure, print, and write benchmarks/results/hostile.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds for each input")
    parser.add_argument(
        "--only", nargs="*", choices=list(INPUTS), help="measure only these inputs, and write nothing"
    )
    parser.add_argument("--probe", nargs=2, help=argparse.SUPPRESS)
    arguments = parse(parser, seconds=0.2)
    if arguments.probe:
        probe(arguments.probe[0], int(arguments.probe[1]))
        return
    inputs = arguments.only or pick(list(INPUTS), list(INPUTS)[:2])
    measured = measure(inputs, arguments.seconds, together=not arguments.only)
    rows = [
        [name, *(f"{one[key]:.1f}" for key in ("p50_ms", "p99_9_ms", "max_ms", "stall_ms", "peak_rss_mb"))]
        for name, one in measured.items()
    ]
    table("hostile inputs", ["input", "p50 ms", "p99.9 ms", "max ms", "stall ms", "peak MB"], rows)
    if not arguments.only:
        settings = {"model": "embedded", "seconds": arguments.seconds, "probe_every_seconds": EVERY}
        goals = {"stall_ms": STALL_MS, "peak_rss_mb": RSS_MB}
        write("hostile", settings | {"goals": goals}, measured, PACKAGED_PAIR)


if __name__ == "__main__":
    main()
