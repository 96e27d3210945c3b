"""Launchers start, stop and watch the workers of a fleet, and carry messages to and from them.

    FleetDriver ── start(config) ─▶ Launcher ── Launched: watch, stop, kill, beat ─▶ one started worker
                ◀─ send, receive ─▶

`local_launcher` starts child processes on this machine, `extras/cluster/launcher.py` workers on other
machines. Only the fleet decides what the loss of a worker means.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from streamserve.fleet.events import Heartbeat, WorkerLost
from streamserve.fleet.process_state import ProcessState
from streamserve.protocol.config import WorkerConfig


@dataclass(frozen=True)
class MachineState:
    """A machine with `slots` for workers (None: not limited) that runs `workers`. It joined at `joined_at`
    and was last heard at `heard_at`. Names of machines are unique."""

    name: str
    slots: int | None
    workers: tuple[str, ...]
    joined_at: float
    heard_at: float


class Launched(Protocol):
    """A started worker."""

    @property
    def pid(self) -> int:
        """The id of the worker's process, on the worker's machine."""

    def beat(self) -> Heartbeat | None:
        """Return the worker's last sign of life; None if there is none, or if the worker has ended."""

    async def watch(self, worker: str, incarnation: int) -> WorkerLost:
        """Wait for the worker's end; return what it was doing then."""

    async def dead(self) -> None:
        """Wait until a lost worker that was not seen to end certainly writes no more KV."""

    def kill(self) -> None:
        """Kill the worker at once, unless it has ended."""

    async def stop(self, grace: float = 0.0) -> None:
        """Wait `grace` seconds for a worker that is exiting, then tell it to exit, and wait for its end."""


Launch = Callable[[WorkerConfig], Awaitable[Launched]]
"""Starts a worker. Raises OSError if that is not possible now."""


class Launcher(Protocol):
    """Starts workers, and exchanges messages with the present ones."""

    @property
    def endpoint(self) -> str:
        """The address to which a worker connects, for its configuration."""

    async def start(self, config: WorkerConfig) -> Launched:
        """Start a worker. Raises OSError if that is not possible now."""

    async def send(self, worker: str, data: bytes) -> None:
        """Send a message to a worker. A message to a worker that is gone is dropped: its loss is reported
        separately."""

    async def receive(self) -> tuple[str, int, bytes]:
        """Return the next message of a present worker, with its name and incarnation."""

    def machines(self) -> Sequence[MachineState]:
        """Return the machines that can run workers now."""

    def waiting(self) -> Sequence[str]:
        """Return the names of workers whose start waits for a machine."""

    async def close(self) -> None:
        """Free all resources, after the workers have been stopped."""


MakeLauncher = Callable[[Mapping[str, ProcessState[Any]]], Launcher]
"""Makes the launcher of these workers. Called in a running event loop."""
