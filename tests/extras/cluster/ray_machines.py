"""A Ray node on each machine (namespace), with its own address, processes, /dev/shm and Ray folder.

the machine of the head    ray start --head (no processors), then the head
others                     ray start, two processors: Ray places workers there
"""

import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

import psutil

from tests.extras.cluster.machines import Machines, Process
from tests.extras.cluster.namespaces import Namespaces, namespaces

RAY_PORT, HTTP_PORT = 6379, 8000
SECONDS = 120.0
HERE = 254
"""The number that stands for this machine."""
START = (
    sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats",
    "--include-log-monitor=false", f"--object-store-memory={80 << 20}",
)  # fmt: skip


def why_no_ray() -> str:
    """Return why Ray cannot be used here; empty if it can."""
    return "" if find_spec("ray") else "needs Ray: pip install 'streamserve[ray]'"


class RayMachines(Machines):
    """Ray nodes on machines. Ray's head is on machine `head`. Each node has `slots` workers with one
    thread."""

    def __init__(self, net: Namespaces, stack: ExitStack, head: int, slots: int) -> None:
        super().__init__(net, stack)
        self._head = head
        self._slots = slots
        # Ray's sockets are in this folder: paths in pytest's folders are too long for sockets.
        self._folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray"))

    @property
    def address(self) -> str:
        """Return the address of Ray's head."""
        return f"{self.net.address(self._head)}:{RAY_PORT}"

    def settings(self, lease: float) -> dict[str, object]:
        return {"launcher": "ray", "ray_address": self.address, "join_lease": lease, "threads": 1}

    def join(self, number: int) -> None:
        node = self._node(number, f"--address={self.address}", f"--num-cpus={self._slots}")
        self.agents[number] = self._run(self.net.command(number, *node, "--block"), subprocess.DEVNULL)

    def start_here(self) -> None:
        """Start Ray's head on this machine."""
        log = Path(self._folder, "head.log")
        with log.open("w", encoding="utf-8") as output:
            process = self._run([*self._head_node(), "--block"], output)
        self._stack.callback(_end_all, process)
        _until_logged(process, log, "Ray runtime started")

    def serve(self, checkpoint: Path, *flags: str) -> str:
        """Serve a model on the machine of Ray's head, once machines have joined; return the server's URL."""
        log = Path(self._folder, "server.log")
        server = (
            sys.executable, "-m", "streamserve", "serve", str(checkpoint), "--launcher", "ray",
            "--ray-address", self.address, "--host", self.net.address(self._head), "--port", str(HTTP_PORT),
            "--threads", "1", "--no-profile", *flags,
        )  # fmt: skip
        both = f'{shlex.join(self._head_node())} && exec "$@"'
        with log.open("w", encoding="utf-8") as output:
            process = self._run(self.net.command(self._head, "sh", "-c", both, "sh", *server), output)
        _until_logged(process, log, "Ray runtime started")
        for number in range(1, self.net.count + 1):
            if number != self._head:
                self.join(number)
        return _until_logged(process, log, r"ready .* at (http://\S+)")[1]

    def _head_node(self) -> list[str]:
        options = ("--head", f"--port={RAY_PORT}", "--num-cpus=0", "--include-dashboard=false")
        return self._node(self._head, *options)

    def _node(self, number: int, *options: str) -> list[str]:
        own = (f"--node-ip-address={self.net.address(number)}", f"--temp-dir={self._folder}/{number}")
        return [*START, *own, *options]


def _end_all(process: Process) -> None:
    """End a process and all processes that it has started."""
    below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    _, remaining = psutil.wait_procs(below, timeout=10)
    for child in remaining:
        child.kill()


def _until_logged(process: Process, log: Path, pattern: str) -> "re.Match[str]":
    """Wait until a process has logged a line that matches, and return the match."""
    deadline = time.monotonic() + SECONDS
    while (match := re.search(pattern, log.read_text(encoding="utf-8", errors="replace"))) is None:
        assert process.poll() is None, (
            f"it has ended: {log.read_text(encoding='utf-8', errors='replace')[-2000:]}"
        )
        assert time.monotonic() < deadline, (
            f"not in time: {log.read_text(encoding='utf-8', errors='replace')[-2000:]}"
        )
        time.sleep(0.05)
    return match


@contextmanager
def ray_machines(count: int, head: int = 1, slots: int = 2) -> Iterator[RayMachines]:
    """Yield machines with Ray. Raises AssertionError if Ray's head cannot start on this machine; on another
    machine, `serve` starts it."""
    with namespaces(count) as net, ExitStack() as stack:
        made = RayMachines(net, stack, head, slots)
        if head == HERE:
            made.start_here()
        yield made
