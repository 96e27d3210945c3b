"""The workers that an agent hosts: for its head, or kept for the next one.

started ──▶ running for a head ── lease about to end ──▶ kept ── a head wants the same ──▶ running
                                                          └── too long, no space ──▶ ended
"""

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

from msgspec.structs import replace

from streamserve.cluster.placement import role_of
from streamserve.fleet.events import WorkerLost
from streamserve.fleet.launcher import Launched
from streamserve.protocol.config import ModelConfig, WorkerConfig

Files = tuple[tuple[str, int, int, int], ...]
"""Names, sizes, modification times and inodes."""


class LeasedWorker(Launched, Protocol):
    """A started worker that runs until the end of a lease."""

    def extend(self, until: float) -> None:
        """Tell it until when it may run, on this machine's clock."""
        ...


class State(Enum):
    """What a hosted worker does: it was told to serve a head that adopts it, serves, was told to leave, or
    has left."""

    JOINS = auto()
    SERVES = auto()
    LEAVES = auto()
    LEFT = auto()


@dataclass(eq=False)
class Hosted:
    """A worker's `process` on this machine, in one of its slots, with the name `peer` on the control socket.
    It was started from `files`; its `config` has its present or last name. Without a next head it ends at
    `kept_until` (0: it has one); blocks that others could write stay `closed` until that time. `ending` waits
    for its end."""

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
    """Set by its first message to a head that has adopted it."""

    @property
    def of_head(self) -> bool:
        """Whether it is a worker of the present head."""
        return self.state in (State.JOINS, State.SERVES)

    @property
    def writes(self) -> bool:
        """Whether it may write KV into the memory of other workers."""
        return self.config.role != "unified"

    @property
    def name(self) -> str:
        """NAME/INCARNATION at its present or last head."""
        return self.config.worker

    @property
    def worker(self) -> str:
        """NAME at its present or last head."""
        return self.name.rpartition("/")[0]


def fits(hosted: Hosted, config: WorkerConfig, files: Files) -> bool:
    """Return whether a kept worker can serve a head by this configuration. It must be the same, apart from
    what a head gives each worker: its name, keys, clock and logs; and the model's files must not have
    changed."""
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
    """Return the files that a model, and a draft model, are loaded from."""
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
    """Return the kept workers in the order in which they are considered for a configuration: of the same
    name, of the same role, and the rest; among equals the first one that was kept."""
    worker = config.worker.rpartition("/")[0]
    return sorted(kept, key=lambda hosted: (hosted.worker != worker, role_of(hosted.worker) != config.role))
