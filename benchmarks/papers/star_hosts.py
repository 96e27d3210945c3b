"""A draft service and its targets on separate hosts: network namespaces, with a wire between them that delays
every packet (wire.py). Connections are encrypted and authenticated, as the service requires beyond loopback.
Targets are paced as in star.py, with the verification time that it measured. Needs root.

    python -m benchmarks.papers.star_hosts
"""

import argparse
import json
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from benchmarks.options import RESULTS, parse
from benchmarks.papers import wire
from benchmarks.papers.star_rig import DEPTH, Service, Targets, inflate, make_job, measure, show
from benchmarks.report import PACKAGED_PAIR, table, write
from streamserve.protocol.curve import KeyPair, write_key_pair

TARGET_HOSTS = 2
KEYED_PORT = 7700


def key_pair() -> KeyPair:
    """Return a new key pair."""
    public, secret = (z85.decode(half) for half in zmq.curve_keypair())
    return KeyPair(public, secret)


def keys(folder: Path) -> tuple[str, str, str]:
    """Write key files; return the service's key, the list of authorized clients, and the clients' key."""
    service, clients, target = folder / "service.key", folder / "clients", folder / "target.key"
    own = key_pair()
    write_key_pair(service, key_pair())
    write_key_pair(target, own)
    clients.write_text(f"{own.public.hex()} host\n")
    return str(service), str(clients), str(target)


class FarService(Service):
    """A service on host 0, whose metrics are read through the wire from host 1."""

    def __init__(self, model: Path, *flags: str) -> None:
        host = wire.address(0)
        super().__init__(
            model, *flags, "--max-batch", "1", "--no-admission", listen=f"tcp://{host}:{KEYED_PORT}",
            prefix=wire.enter(0), host=host,
        )  # fmt: skip

    def read(self, url: str) -> str:
        return wire.fetch(1, url)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds of each measurement")
    parser.add_argument("--counts", type=int, nargs="*", default=[1, 5, 8], help="numbers of targets")
    parser.add_argument(
        "--delays", type=float, nargs="*", default=[0.0, 0.002, 0.005], help="one-way delays in s"
    )
    parser.add_argument("--hidden", type=int, default=512, help="hidden size of the inflated draft")
    parser.add_argument("--layers", type=int, default=2, help="layers of the inflated draft")
    parser.add_argument("--outputs", type=int, default=600, help="number of tokens recorded of each text")
    parser.add_argument("--out", default="star_hosts", help="name of the results")
    arguments = parse(parser, seconds=1.5, counts=[1], delays=[0.0], outputs=40)
    verify = json.loads((RESULTS / "star.json").read_text())["settings"]["verify_seconds"]
    measured: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = inflate("embedded-draft", folder / "draft", arguments.hidden, arguments.layers)
        own, clients, key = keys(folder)
        job = make_job(model, arguments.seconds, arguments.outputs) | {"verify": verify, "key": key}
        for delay in arguments.delays:
            with wire.hosts(1 + TARGET_HOSTS, delay):
                trip = wire.round_trip(1, 0)
                print(f"delay {delay * 1e3:.0f} ms each way, a byte there and back {trip * 1e3:.2f} ms")
                prefixes = [wire.enter(1 + host) for host in range(TARGET_HOSTS)]
                targets = Targets(max(arguments.counts), prefixes)
                for count in arguments.counts:
                    with closing(FarService(model, "--key", own, "--clients", clients)) as service:
                        one = measure(targets, service, count, job)
                    show(f"+{delay * 1e3:.0f} ms", one)
                    measured.append({"delay_each_way": delay, "round_trip": trip, **one})
                targets.close()
    settings = {
        "targets": f"paced, {verify * 1e3:.1f} ms, on {TARGET_HOSTS} hosts; the service on another",
        "network": "network namespaces; TUN devices and a process that holds packets; CURVE",
        "draft": f"packaged draft inflated to {arguments.hidden} x {arguments.layers}, 1 thread",
        "depth": DEPTH, "seconds": arguments.seconds,
    }  # fmt: skip
    rows = [
        [f"{one['delay_each_way'] * 1e3:.0f}", str(one["targets"]), f"{one['tokens_per_second']:.0f}",
         f"{one['t_c'] * 1e3:.2f}", f"{one['Z'] / one['S']:.2f}",
         f"{one['T_idle_per_round'] * 1e3:.2f} / {one['predicted_idle_per_round'] * 1e3:.2f}",
         f"{one['load']:.1%} / {one['predicted_load']:.1%}"]
        for one in measured
    ]  # fmt: skip
    columns = "delay ms", "N", "tokens/s", "t_c ms", "Z/S", "T_idle a round / predicted", "load / predicted"
    table("hosts", columns, rows)
    print(write(arguments.out, settings, measured, PACKAGED_PAIR))


if __name__ == "__main__":
    main()
