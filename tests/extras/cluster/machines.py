"""A head and agents on machines (namespaces), as separate processes."""

import json
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import psutil

from tests.extras.cluster.fakes import key_file
from tests.extras.cluster.namespaces import Namespaces, namespaces
from tests.processes import FORK_SERVER, running_below, words, workers_below

PORT = 7800
Process = subprocess.Popen[str]


class Machines(ABC):
    """Machines that run workers for a head, each with a process that starts workers."""

    def __init__(self, net: Namespaces, stack: ExitStack) -> None:
        self.net = net
        self.agents: dict[int, Process] = {}
        self._stack = stack

    @abstractmethod
    def settings(self, lease: float) -> dict[str, object]:
        """Return the settings of the head for which the machines run workers."""

    @abstractmethod
    def join(self, number: int) -> None:
        """Start an agent on a machine, which offers to run workers."""

    def kill(self, number: int) -> None:
        """Kill all processes of a machine, without a message to the head."""
        self.agents[number].kill()
        self.agents[number].wait()

    def agent(self, number: int) -> psutil.Process:
        """Return the process of a machine's agent, which has a fork server for its workers."""
        (fork_server,) = running_below(self.agents[number].pid, FORK_SERVER)
        parent = fork_server.parent()
        assert parent
        return parent

    def workers(self, number: int) -> list[psutil.Process]:
        """Return the worker processes on a machine."""
        return workers_below(self.agents[number].pid)

    def machine_of(self, worker: str) -> int:
        """Return the number of the machine that runs a worker."""
        for number in self.agents:
            names = [words(process)[-1].partition("/")[0] for process in self.workers(number)]
            if worker in names:
                return number
        raise AssertionError(f"no machine runs {worker}")

    def _run(self, command: Sequence[str], stdout: IO[str] | int = subprocess.PIPE) -> Process:
        """Run a command until the machines are removed."""
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, text=True)

        def end() -> None:
            process.kill()
            process.wait()

        self._stack.callback(end)
        return process


class JoiningMachines(Machines):
    """Agents on machines that join a head on machine `head`; 254 is this machine."""

    def __init__(self, net: Namespaces, folder: Path, stack: ExitStack, head: int) -> None:
        super().__init__(net, stack)
        self.key = key_file(folder)
        self._head = head

    def settings(self, lease: float) -> dict[str, object]:
        """Return the settings of a head that the agents can join."""
        return {
            "launcher": "join", "listen": self.endpoint, "join_key": str(self.key), "join_lease": lease,
            "threads": 1,
        }  # fmt: skip

    @property
    def endpoint(self) -> str:
        return f"tcp://{self.net.address(self._head)}:{PORT}"

    def head(self, checkpoint: Path, lease: float, **settings: object) -> Process:
        """Start a head as described in tests/extras/cluster/head.py."""
        given = json.dumps(self.settings(lease) | settings)
        return self._program(self._head, "tests.extras.cluster.head", str(checkpoint), given)

    def join(self, number: int, *arguments: str) -> None:
        own = ("--join", self.endpoint, "--key", str(self.key), "--name", f"machine-{number}")
        self.agents[number] = self._program(number, "streamserve", "worker", *own, *arguments)

    def _program(self, number: int, module: str, *arguments: str) -> Process:
        return self._run(self.net.command(number, sys.executable, "-m", module, *arguments))


@contextmanager
def machines(count: int, folder: Path, head: int = 1) -> Iterator[JoiningMachines]:
    with namespaces(count) as net, ExitStack() as stack:
        yield JoiningMachines(net, folder, stack, head)
