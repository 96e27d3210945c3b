"""A head and agents on machines (namespaces), as processes of their own."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from tests.cluster.fakes import key_file
from tests.cluster.namespaces import Namespaces, namespaces

PORT = 7800
Process = subprocess.Popen[str]


class Machines:
    """Agents on machines, that join a head on machine `head`; 254 is this one."""

    def __init__(self, net: Namespaces, folder: Path, stack: ExitStack, head: int) -> None:
        self.net = net
        self.key = key_file(folder)
        self.agents: dict[int, Process] = {}
        self._stack = stack
        self._head = head

    def settings(self, lease: float) -> dict[str, object]:
        """Return the settings of a head that they can join."""
        return {
            "launcher": "join", "listen": self.endpoint, "join_key": str(self.key), "join_lease": lease,
            "threads": 1,
        }  # fmt: skip

    @property
    def endpoint(self) -> str:
        return f"tcp://{self.net.address(self._head)}:{PORT}"

    def head(self, checkpoint: Path, lease: float, **settings: object) -> Process:
        """Start a head, as in tests/cluster/head.py."""
        given = json.dumps(self.settings(lease) | settings)
        return self._run(self._head, "tests.cluster.head", str(checkpoint), given)

    def join(self, number: int, *arguments: str) -> None:
        own = ("--join", self.endpoint, "--key", str(self.key), "--name", f"machine-{number}")
        self.agents[number] = self._run(number, "streamserve", "worker", *own, *arguments)

    def kill(self, number: int) -> None:
        """End a machine's agent and all that it has started, without a word."""
        self.agents[number].kill()
        self.agents[number].wait()

    def workers(self, number: int) -> list[psutil.Process]:
        """The processes of workers on a machine."""
        below = psutil.Process(self.agents[number].pid).children(recursive=True)
        return [process for process in below if "streamserve.workers" in process.cmdline()]

    def _run(self, number: int, module: str, *arguments: str) -> Process:
        process = subprocess.Popen(
            self.net.command(number, sys.executable, "-m", module, *arguments),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

        def end() -> None:
            process.kill()
            process.wait()

        self._stack.callback(end)
        return process


@contextmanager
def machines(count: int, folder: Path, head: int = 1) -> Iterator[Machines]:
    with namespaces(count) as net, ExitStack() as stack:
        yield Machines(net, folder, stack, head)
