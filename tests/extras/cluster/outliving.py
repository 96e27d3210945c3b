"""A machine whose workers outlive the head, and the heads that it joins."""

import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.checkpoints import make_checkpoint
from tests.command_server import Command
from tests.extras.cluster.fakes import key_file
from tests.processes import words, workers_below
from tests.serving import Served, serving

LEASE = 4.0


def make_target(folder: Path) -> Path:
    """Write the model that machines serve to `folder`; return it."""
    return make_checkpoint(folder, vocab_size=320, max_position_embeddings=1024)


@dataclass
class Machine:
    """An agent on this machine, and the settings of the heads that it joins."""

    checkpoint: Path
    key: Path
    port: int
    agent: Command

    def workers(self) -> dict[int, str]:
        """The names of running workers, by process id."""
        return {process.pid: words(process)[-1] for process in workers_below(self.agent.pid)}

    @contextmanager
    def head(self, *arguments: str, port: int = 0) -> Iterator[Served]:
        endpoint = f"tcp://127.0.0.1:{port or self.port}"
        given = (
            "--launcher", "join", "--listen", endpoint, "--join-key", str(self.key),
            "--join-lease", str(LEASE), "--threads", "1", "--no-profile", "--num-blocks", "400",
        )  # fmt: skip
        with serving(str(self.checkpoint), *given, *arguments) as served:
            yield served


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def machine(
    checkpoint: Path, folder: Path, keep: float = 60.0, slots: int = 2, joins: int = 0
) -> Iterator[Machine]:
    key, port = key_file(folder), free_port()
    agent = Command(
        [
            "worker", "--join", f"tcp://127.0.0.1:{joins or port}",
            "--key", str(key), "--workers", str(slots), "--keep-workers", str(keep),
        ],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield Machine(checkpoint, key, port, agent)
    finally:
        agent.terminate()
        agent.wait(30)


def until(condition: Callable[[], bool], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def metric(served: Served, name: str) -> float:
    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"streamserve:{name}"))
