"""What starts, stops and watches the workers of a fleet, and carries messages to and from them.

    FleetDriver ── start(config) ─▶ Launcher ── Launched: watch, stop, kill, beat ─▶ one started worker
                ◀─ send, receive ─▶

`local_launcher` starts child processes of this one, `cluster/launcher.py` workers on other machines. The
fleet alone judges what a loss means.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from streamserve.fleet.events import Heartbeat, WorkerLost
from streamserve.fleet.process_state import ProcessState
from streamserve.protocol.config import WorkerConfig


@dataclass(frozen=True)
class MachineState:
    """A machine with `slots` for workers (None: not limited), and the names of the `workers` that it runs. It
    has been there since `joined_at`, and was last heard at `heard_at`. No two have the same `name`."""

    name: str
    slots: int | None
    workers: tuple[str, ...]
    joined_at: float
    heard_at: float


class Launched(Protocol):
    """A started worker."""

    @property
    def pid(self) -> int:
        """The id of its process, on its own machine."""
        ...

    def beat(self) -> Heartbeat | None:
        """Return its last sign of life; None if there is none, or once it has ended."""
        ...

    async def watch(self, worker: str, incarnation: int) -> WorkerLost:
        """Wait for its end; return what it was doing then."""
        ...

    async def dead(self) -> None:
        """Wait until it is certain that it writes no more: for one that was lost, but not seen to end."""
        ...

    def kill(self) -> None:
        """End it at once, unless it has ended."""
        ...

    async def stop(self, grace: float = 0.0) -> None:
        """Wait `grace` seconds for a worker that is exiting, tell it to exit, and wait for its end."""
        ...


Launch = Callable[[WorkerConfig], Awaitable[Launched]]
"""Starts a worker. Raises OSError if that is not possible now."""


class Launcher(Protocol):
    """Starts workers somewhere, and exchanges messages with the present ones."""

    @property
    def endpoint(self) -> str:
        """Where a worker connects to, for its configuration."""
        ...

    async def start(self, config: WorkerConfig) -> Launched:
        """Start a worker. Raises OSError if that is not possible now."""
        ...

    async def send(self, worker: str, data: bytes) -> None:
        """Send a message to a worker. One that is gone cannot be reached; its loss is reported separately."""
        ...

    async def receive(self) -> tuple[str, int, bytes]:
        """Return the next message of a present worker, with its name and incarnation."""
        ...

    def machines(self) -> Sequence[MachineState]:
        """Return the machines that can run workers now."""
        ...

    def waiting(self) -> Sequence[str]:
        """Return the names of workers whose start waits for a machine."""
        ...

    async def close(self) -> None:
        """Free all resources, after the workers have been stopped."""
        ...


MakeLauncher = Callable[[Mapping[str, ProcessState[Any]]], Launcher]
"""Makes the launcher of these workers, in a running event loop."""
