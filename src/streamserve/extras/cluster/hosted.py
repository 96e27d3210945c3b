"""The workers that an agent hosts: for its head, or kept for the next one.

started ──▶ running for a head ── lease about to end ──▶ kept ── a head needs this kind ──▶ running
                                                          └── too long, no space ──▶ ended
"""

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

from msgspec.structs import replace

from streamserve.extras.cluster.placement import role_of
from streamserve.fleet.events import WorkerLost
from streamserve.fleet.launcher import Launched
from streamserve.protocol.config import ModelConfig, WorkerConfig

Files = tuple[tuple[str, int, int, int], ...]
"""Name, size, modification time and inode of each file."""


class LeasedWorker(Launched, Protocol):
    """A started worker that runs until the end of a lease."""

    def extend(self, until: float) -> None:
        """Tell the worker until when, on this machine's clock, it may run."""


class State(Enum):
    """The state of a hosted worker.

    * JOINS: it was told to serve the head that adopts it, and has not answered yet.
    * SERVES: it serves the present head.
    * LEAVES: it was told to leave its head, and has not answered yet.
    * LEFT: it has left its head.
    """

    JOINS = auto()
    SERVES = auto()
    LEAVES = auto()
    LEFT = auto()


@dataclass(eq=False)
class Hosted:
    """A worker in one of the slots of this machine.

    - `peer`: its name on the control socket.
    - `config`: its configuration, with the name that it has or last had at a head.
    - `files`: the model's files when it was started.
    - `ending`: the task that waits for its end.
    - `kept_until`: when it ends unless a head adopts it; 0: it has a head.
    - `closed`: the time until which no request gets the KV blocks that workers of its earlier head could
      still write.
    """

    process: LeasedWorker
    config: WorkerConfig
    slot: int
    peer: str
    files: Files
    ending: asyncio.Task[WorkerLost]
    state: State = State.SERVES
    kept_until: float = 0.0
    closed: float = 0.0
    left: asyncio.Event = field(default_factory=asyncio.Event)
    served: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the worker's first message to a head that adopted it."""

    @property
    def of_head(self) -> bool:
        """Whether the worker serves the present head."""
        return self.state in (State.JOINS, State.SERVES)

    @property
    def writes(self) -> bool:
        """Whether the worker may write KV into the memory of other workers."""
        return self.config.role != "unified"

    @property
    def name(self) -> str:
        """The worker's NAME/INCARNATION at its present or latest head."""
        return self.config.worker

    @property
    def worker(self) -> str:
        """The worker's NAME at its present or latest head."""
        return self.name.rpartition("/")[0]


def fits(hosted: Hosted, config: WorkerConfig, files: Files) -> bool:
    """Return whether a kept worker can serve a head with this configuration. The configurations must be
    equal, except for values that differ between workers of a head (name, keys, clock, logs), and the model's
    files must be unchanged."""
    return hosted.files == files and _comparable(hosted.config) == _comparable(config)


def _comparable(config: WorkerConfig) -> WorkerConfig:
    network: Any = config.kv_network
    return replace(
        config,
        worker="",
        peer="",
        expected="",
        host_number=0,
        clock_offset=0.0,
        log_level="info",
        log_format="text",
        kv_network=network and replace(network, public=b"", secret=b""),
    )


def files_of(model: ModelConfig) -> Files:
    """Return the files from which a model and its draft model are loaded."""
    return tuple(entry for path in (model.path, model.draft) for entry in _entries(path))


def _entries(path: str) -> Iterator[tuple[str, int, int, int]]:
    if os.path.isdir(path):
        paths = sorted(os.path.join(path, name) for name in os.listdir(path))
    else:
        paths = [path] if os.path.exists(path) else []
    for name in paths:
        status = os.stat(name)
        yield name, status.st_size, status.st_mtime_ns, status.st_ino


def nearest(kept: Sequence[Hosted], config: WorkerConfig) -> list[Hosted]:
    """Return the kept workers in the order in which they are considered for a configuration: first workers
    with the same name, then with the same role, then the rest. Equal workers stay in their order."""
    worker = config.worker.rpartition("/")[0]
    return sorted(kept, key=lambda hosted: (hosted.worker != worker, role_of(hosted.worker) != config.role))
