"""KV transfer between processes of one host: the receiving pool is shared memory, to which senders write.

    decode worker   memfd ── mmap ── its KV pool [layer][block][bytes]
                      ▲ opened as /proc/PID/fd/N, checked by its inode
    prefill worker  mmap ◀── copies of whole blocks, layer by layer, by a separate thread while steps run

The memory has no name in a file system: it is freed when its last user ends, in whatever way.
"""

import itertools
import mmap
import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from streamserve.contracts.transport import Landed, TransferError
from streamserve.protocol.transfers import CacheAddress
from streamserve.transfer.pools import LAYER_SECONDS, Pools, check_fits


class SharedMemory:
    """Memory that other processes of this user can open while this process lives; `size` bytes once
    allocated."""

    def __init__(self) -> None:
        self.size = 0
        self._handle = -1

    def allocate(self, size: int) -> Tensor:
        """Allocate the memory, once, and return it as bytes. Pages are committed when they are first
        written."""
        self.size = size
        self._handle = os.memfd_create("streamserve-kv", os.MFD_CLOEXEC)
        os.ftruncate(self._handle, size)
        return torch.frombuffer(mmap.mmap(self._handle, size), dtype=torch.uint8)

    def address(self, num_blocks: int, fingerprint: str) -> CacheAddress:
        """Return the address at which other workers can write a pool of `num_blocks` blocks in this
        memory."""
        path = f"/proc/{os.getpid()}/fd/{self._handle}"
        inode = os.fstat(self._handle).st_ino
        return CacheAddress(path, self.size, num_blocks, fingerprint, inode)

    def close(self) -> None:
        """Do nothing: senders write to the memory without this process."""


class SharedMemoryTransport:
    """Writes blocks of `pools` into the pools at other addresses, in the order of the pushes.

    `bytes_per_second` limits the rate, to simulate on one machine a network between two.
    """

    def __init__(self, pools: Pools, fingerprint: str, bytes_per_second: float | None = None) -> None:
        self._pools = pools
        self._fingerprint = fingerprint
        self._bytes_per_second = bytes_per_second
        self._opened: dict[CacheAddress, list[Tensor]] = {}
        self._jobs = itertools.count()
        self._landed: deque[Landed] = deque()
        self._closed = self._aborted = False
        self._thread = ThreadPoolExecutor(1, "kv-transport")

    def check(self, to: CacheAddress) -> None:
        """Raise TransferError if blocks cannot be written to this cache, else map it."""
        check_fits(to, self._fingerprint, self._pools.block_bytes)
        if to not in self._opened:
            self._unmap_dead_peers()
            self._opened[to] = self._open(to)

    def push(
        self,
        to: CacheAddress,
        copies: Sequence[tuple[int, int]],
        upcoming: bool = False,
        reservation: str = "",
    ) -> int:
        job = next(self._jobs)
        target = self._opened.get(to)
        if target is None:  # unmapped since it was checked
            self._landed.append(Landed(job, 0, f"the worker at {to.path} is gone"))
        else:
            since = self._pools.before_step() if upcoming else None
            self._thread.submit(self._copy, job, target, list(copies), since)
        return job

    def landed(self) -> list[Landed]:
        return [self._landed.popleft() for _ in range(len(self._landed))]

    def close(self) -> None:
        """Wait for copies in progress, but not for steps, and release all memory."""
        self._closed = True
        self._thread.shutdown()
        self._opened.clear()

    def abort(self) -> None:
        """End copies in progress after their present row, start no others, and release all memory.

        Nothing is written after this.
        """
        self._aborted = True
        self._thread.shutdown(cancel_futures=True)
        self._opened.clear()

    def _copy(self, job: int, target: list[Tensor], copies: list[tuple[int, int]], since: int | None) -> None:
        """Copy rows as they become ready, until all are copied."""
        sources, destinations = torch.tensor(copies).T
        done = sent = 0
        seconds = 0.0
        while done < len(target):
            ready = self._pools.ready(since)
            if ready == done:
                if self._closed or self._aborted:
                    self._landed.append(Landed(job, 0, "this worker is shutting down"))
                    return
                time.sleep(LAYER_SECONDS)
                continue
            started, before = time.monotonic(), sent
            try:
                for row in range(done, ready):
                    if self._aborted:
                        return
                    target[row].index_copy_(0, destinations, self._pools.read(row, sources))
                    sent += len(copies) * target[row].shape[1]
            except (IndexError, RuntimeError) as error:  # blocks that the pool does not have
                self._landed.append(Landed(job, 0, str(error)))
                return
            done = ready
            if self._bytes_per_second:
                wire = (sent - before) / self._bytes_per_second
                time.sleep(max(0.0, started + wire - time.monotonic()))
            seconds += time.monotonic() - started
        self._landed.append(Landed(job, sent, seconds=seconds))

    def _open(self, to: CacheAddress) -> list[Tensor]:
        try:
            handle = os.open(to.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise TransferError(f"the cache at {to.path} cannot be opened: {error.strerror}") from error
        try:
            # The descriptor of that number may have been reused, or the process id: check before mapping.
            status = os.fstat(handle)
            if (status.st_ino, status.st_size) != (to.inode, to.size):
                raise TransferError(f"{to.path} now belongs to other memory: the worker was restarted")
            shared = mmap.mmap(handle, to.size)
        finally:
            os.close(handle)
        return self._pools.of(torch.frombuffer(shared, dtype=torch.uint8), to.num_blocks)

    def _unmap_dead_peers(self) -> None:
        """Release the memory of workers that have ended."""
        for address in list(self._opened):
            if not os.path.exists(address.path):  # a path below /proc/PID, which ends with the process
                del self._opened[address]
