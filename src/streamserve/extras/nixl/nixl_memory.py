"""Memory that other workers write through NIXL, and the agents of both sides.

On one machine a writer's death ends its writes. Between machines bytes may be in flight for as long as a
connection holds them, and NIXL cannot refuse a write. So the memory gets another agent after the loss of a
writer:

    Release, doubtful ──▶ Fence ──▶ a new agent and address; the old agent ends with its connections

A write in flight then fails at its writer, and its blocks are computed again.
"""

import gc
import importlib
import logging
import os
import secrets
import threading
import weakref
from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace
from torch import Tensor

from streamserve.contracts.transport import TransferError
from streamserve.protocol.transfers import CacheAddress
from streamserve.system.machine import identity
from streamserve.system.nixl import NIXL_MISSING, nixl_package
from streamserve.transfer.shared_memory import SharedMemory

logger = logging.getLogger(__name__)

VARIABLES = {"UCX_TLS": "shm,tcp,self", "UCX_NET_DEVICES": "lo"}
"""UCX settings for one machine, unless the environment sets others. Between machines UCX chooses."""
POLL_SECONDS = 0.001


def make_agent(machines: bool) -> Any:
    """Return a NIXL agent with a unique name, for one machine or between `machines`.

    The agent has no progress thread, which would take a whole core: its user must poll it. Raises
    TransferError if NIXL cannot be used here.
    """
    package = nixl_package()
    if package is None:
        raise TransferError(NIXL_MISSING)
    for name, value in () if machines else VARIABLES.items():
        os.environ.setdefault(name, value)
    try:
        nixl = importlib.import_module(package)
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it writes to standard output
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        agent = nixl.nixl_agent(f"streamserve-{secrets.token_hex(8)}", config)
    except Exception as error:  # NIXL's errors have no common base class
        raise TransferError(f"NIXL cannot start: {error}") from error
    if "UCX" not in agent.backends:
        raise TransferError("this NIXL lacks its UCX plugin: install a NIXL build with UCX")
    return agent


class NixlMemory:
    """Memory that other processes can write through NIXL; `size` bytes once allocated.

    A file descriptor also refers to it, so that other processes on this machine can see whether this process
    is alive. With `machines`, other machines may write to it: then its `gate` tracks the open reservations.
    """

    def __init__(self, machines: bool = False) -> None:
        self.gate = Fence(self) if machines else None
        self.generation = 0
        """The number of agents that this memory had before the present agent."""
        self._machines = machines
        self._shared = SharedMemory()
        self._memory: Tensor | None = None
        self._agent: Any = None
        self._lock = threading.Lock()  # an agent serves one thread at a time
        self._pool = (0, "")
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._poll_notifications, name="kv-progress", daemon=True)

    @property
    def size(self) -> int:
        return self._shared.size

    def allocate(self, size: int) -> Tensor:
        """Allocate the memory, once, and return it as bytes. Raises TransferError if NIXL cannot be used
        here."""
        self._memory = self._shared.allocate(size)
        self._agent = self._new_agent()
        self._thread.start()
        return self._memory

    def address(self, num_blocks: int, fingerprint: str) -> CacheAddress:
        """Return the address at which other workers can write a pool of `num_blocks` blocks in this
        memory."""
        assert self._memory is not None
        self._pool = num_blocks, fingerprint
        address = self._shared.address(num_blocks, fingerprint)
        with self._lock:
            metadata = self._agent.get_agent_metadata()
        return replace(address, host=identity(), base=self._memory.data_ptr(), agent=metadata)

    def renew(self) -> CacheAddress:
        """End the agent with all its connections: no write through it is carried out any more.

        Returns the address of a new agent. Raises TransferError if there is none, or the old agent does not
        end.
        """
        new = self._new_agent()  # before the old agent ends, so that the port differs
        with self._lock:
            old = weakref.ref(self._agent)
            self._agent = new
        # An agent ends when its object is freed, and reference cycles may delay that.
        gc.collect()
        if old() is not None:
            raise TransferError(
                "NIXL's agent does not end: this worker cannot refuse writes that are still in flight"
            )
        self.generation += 1
        logger.warning("a writer of KV was lost or has failed: KV is received by another NIXL agent")
        return self.address(*self._pool)

    def close(self) -> None:
        """Stop answering other workers."""
        self._closed.set()
        if self._thread.ident:
            self._thread.join()

    def _new_agent(self) -> Any:
        agent = make_agent(self._machines)
        agent.register_memory(self._memory)
        return agent

    def _poll_notifications(self) -> None:
        while not self._closed.wait(POLL_SECONDS):
            with self._lock:
                self._agent.get_new_notifs()


class Fence:
    """The open reservations of a `memory`, each with the generation of the agent that it was made for.

    NIXL does not show which blocks are written, so single writes cannot be refused.
    """

    def __init__(self, memory: NixlMemory) -> None:
        self.refused = 0
        self._memory = memory
        self._open: dict[str, int] = {}

    def open(self, reservation: str, blocks: Iterable[int]) -> None:
        self._open[reservation] = self._memory.generation

    def close(self, reservation: str, doubtful: bool = False) -> CacheAddress | None:
        """Forget a reservation.

        If it is `doubtful`, bytes for it may be in flight. If they are in flight to the present agent, end
        that agent and return the memory's new address. Bytes to an earlier agent are harmless: that agent has
        ended.
        """
        generation = self._open.pop(reservation, None)
        return self._memory.renew() if doubtful and generation == self._memory.generation else None
