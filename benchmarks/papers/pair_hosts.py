"""The exposed time of KV transfer between machines: a pair whose halves are in two network namespaces,
encrypted and with keys, over a link that tc limits, compared with shared memory on one machine. Needs root.

    python -m benchmarks.papers.pair_hosts --model embedded
"""

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.options import parse
from benchmarks.papers.pairs_live import transfer
from benchmarks.report import table, write
from tests.extras.cluster.machines import machines
from tests.extras.cluster.namespaces import Namespaces

RATES = ("not limited", "10gbit", "1gbit")
LEASE = 10.0
PROBE_BYTES = 100_000_000
BLOCKS = 2000
"""Number of KV blocks of each worker. The default would give each worker a share of this machine's whole
memory."""


def throughput(net: Namespaces) -> float:
    """Return the bytes a second of a plain connection between the two namespaces."""
    listen = (
        "import socket; s = socket.create_server(('', 5000)); print(flush=True); c, _ = s.accept()\n"
        "while c.recv(1 << 20): pass\nc.sendall(b'x')"
    )
    call = (
        f"import socket, time; c = socket.create_connection(('{net.address(2)}', 5000))\n"
        f"t = time.perf_counter(); c.sendall(bytes({PROBE_BYTES})); c.shutdown(socket.SHUT_WR); c.recv(1)\n"
        f"print({PROBE_BYTES} / (time.perf_counter() - t))"
    )
    with subprocess.Popen(net.command(2, sys.executable, "-c", listen), stdout=subprocess.PIPE) as sink:
        assert sink.stdout is not None
        sink.stdout.readline()
        command = net.command(1, sys.executable, "-c", call)
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout)


async def between(model: str, lengths: list[int], rate: str) -> dict[str, float]:
    """Measure a pair on two machines with links of this rate."""
    with tempfile.TemporaryDirectory() as folder, machines(2, Path(folder), head=254) as made:
        for number in (1, 2):
            if rate in RATES[1:]:
                made.net.limit(number, rate)
        link = throughput(made.net)
        for number in (1, 2):
            made.join(number)
        measured = await transfer(model, lengths, num_blocks=BLOCKS, **made.settings(LEASE))
    return measured | {"link_bytes_per_second": link}


def main() -> None:
    """Measure, print, and write the results. Raises AssertionError if the transports sent different bytes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--prompts", type=int, default=12)
    args = parse(parser, prompts=1)
    rng = random.Random(0)
    lengths = [rng.randint(512, 1500) for _ in range(args.prompts)]
    figures = {"shared memory": asyncio.run(transfer(args.model, lengths, num_blocks=BLOCKS, threads=1))}
    for rate in RATES:
        figures[f"TCP, {rate}"] = asyncio.run(between(args.model, lengths, rate))
    sent = {measured["bytes"] for measured in figures.values()}
    assert len(sent) == 1, f"every transport sends the same KV, not {sent}"
    for measured in figures.values():
        measured["prompts"] = len(lengths)
    each = 1e3 / len(lengths)
    rows = [
        [name, f"{one['bytes'] / 1e6:.1f}", f"{one['prefill_seconds'] * each:.0f}",
         f"{one['exposed_seconds'] * each:.1f}", f"{one['exposed_share']:.1%}"]
        for name, one in figures.items()
    ]  # fmt: skip
    columns = ["transport", "KV, MB", "prefill, ms", "exposed, ms", "share"]
    table("KV transfer between machines, per prompt", columns, rows)
    settings = {"prompts": args.prompts, "network": "network namespaces, veth, tc tbf; CURVE", "threads": 1}
    print(write("pair_hosts", settings, figures, [args.model]))


if __name__ == "__main__":
    main()
