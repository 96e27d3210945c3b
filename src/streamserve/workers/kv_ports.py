"""How a worker exchanges KV with other workers: by memory that receives, and a transport that sends.

    one head ── leave ──▶ nothing is received or written ── join ──▶ the next head, with its keys

The pools stay, and so does the prefix cache.
"""

from dataclasses import dataclass

from streamserve.contracts.transport import TransferError
from streamserve.execution.backends.cuda.landing import KVLanding
from streamserve.extras.nixl.nixl import NixlTransport
from streamserve.extras.nixl.nixl_memory import Fence, NixlMemory
from streamserve.protocol.config import WorkerConfig
from streamserve.protocol.transfers import CacheAddress
from streamserve.transfer.gate import BlockGate
from streamserve.transfer.network import NetworkTransport
from streamserve.transfer.network_memory import NetworkMemory
from streamserve.transfer.pools import Pools
from streamserve.transfer.shared_memory import SharedMemory, SharedMemoryTransport

Memory = SharedMemory | NixlMemory | NetworkMemory
Transport = SharedMemoryTransport | NixlTransport | NetworkTransport


@dataclass
class KVPorts:
    """A worker's memory and transport for KV.

    The `memory` holds the worker's `pools`; other workers write into it at the address `cache`. The
    `transport` writes into the pools of other workers. Address and transport are None for a worker that
    exchanges no KV.
    """

    memory: Memory
    pools: Pools
    fingerprint: str
    landing: KVLanding | None
    transport: Transport | None = None
    cache: CacheAddress | None = None

    @property
    def can_leave(self) -> bool:
        """Whether the worker can join another head later."""
        return not isinstance(self.memory, NixlMemory)

    @property
    def gate(self) -> BlockGate | Fence | None:
        """The gate that refuses late writes over the network; None if KV does not come over a network."""
        return None if isinstance(self.memory, SharedMemory) else self.memory.gate

    def open(self, config: WorkerConfig, sends: bool) -> None:
        """Prepare to receive KV if there is memory for it, and with `sends` to send KV. Raises
        TransferError."""
        memory = self.memory
        if sends:
            self.transport = transport_of(config, self.pools, self.fingerprint, self.landing)
        if isinstance(memory, NetworkMemory) and memory.size:
            memory.serve(Pools(self.landing.pools) if self.landing else self.pools)
        self.cache = memory.address(self.pools.num_blocks, self.fingerprint) if memory.size else None

    def join(self, config: WorkerConfig) -> None:
        """Prepare to send and receive KV in another fleet, after `leave`. Raises TransferError."""
        memory = self.memory
        if self.transport:
            self.transport = transport_of(config, self.pools, self.fingerprint, self.landing)
        if isinstance(memory, NetworkMemory) and memory.size and config.kv_network:
            memory.reopen(config.kv_network)
        self.cache = memory.address(self.pools.num_blocks, self.fingerprint) if memory.size else None

    def leave(self) -> None:
        """Stop writing to other workers' memory, and accept nothing over the network."""
        if self.transport and not isinstance(self.transport, NixlTransport):
            self.transport.abort()
        self.memory.close()

    def close(self) -> None:
        """Send nothing more, after waiting a moment for pushes in progress."""
        if self.transport:
            self.transport.close()


def memory_of(config: WorkerConfig) -> Memory:
    """Return the memory that receives KV, not yet allocated."""
    if config.kv_network:
        return NetworkMemory(config.kv_network)
    return NixlMemory(config.leased) if config.kv_transport == "nixl" else SharedMemory()


def transport_of(
    config: WorkerConfig, pools: Pools, fingerprint: str, landing: KVLanding | None
) -> Transport:
    """Return the transport that sends KV. Raises TransferError if it cannot be used here."""
    limit = config.kv_bytes_per_second
    if landing and config.kv_transport == "nixl":
        raise TransferError("--kv-transport nixl does not send from a GPU's memory yet: use auto")
    if config.kv_network:
        return NetworkTransport(pools, fingerprint, config.kv_network, limit)
    if config.kv_transport == "nixl":
        return NixlTransport(pools, fingerprint, limit, machines=config.leased)
    return SharedMemoryTransport(pools, fingerprint, limit)
