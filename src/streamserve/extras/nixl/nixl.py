"""KV transfer through NIXL, NVIDIA's transfer library: over UCX between processes of one or more machines.

    decode worker   NixlMemory: its KV pool, registered; a thread answers UCX (wire-up, tcp)
                      ▲ WRITE of whole blocks, by index into descriptors that are prepared once per peer
    prefill worker  NixlTransport: a separate thread starts writes and polls them while steps run

A write cannot be cancelled: NIXL carries it out even if its handle is released in flight. So a push has ended
only when NIXL reports its end or its receiver is dead, however long that takes. Whether a receiver on another
machine is alive is not known here.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from streamserve.contracts.transport import Landed, TransferError
from streamserve.extras.nixl.nixl_memory import POLL_SECONDS, make_agent
from streamserve.protocol.transfers import CacheAddress
from streamserve.system.machine import identity
from streamserve.transfer.pools import LAYER_SECONDS, Pools, check_fits

logger = logging.getLogger(__name__)

SUSPECT_SECONDS = 1.0
"""Age of a push, in seconds, from which its receiver is checked for being alive: NIXL does not always notice
its death."""
CLOSE_SECONDS = 1.0
"""Seconds that `close` waits for pushes in progress."""


def _blocks(base: int, widths: Sequence[int], num_blocks: int) -> npt.NDArray[np.uint64]:
    """Return NIXL's descriptors (address, bytes, device) of the blocks in contiguous rows, [rows *
    num_blocks, 3].

    `widths` has the bytes of one block in each row.
    """
    each = np.repeat(np.array(widths, np.uint64), num_blocks)
    descriptors = np.zeros((len(each), 3), np.uint64)
    descriptors[:, 0] = base + np.concatenate(([0], np.cumsum(each)[:-1]))
    descriptors[:, 1] = each
    return descriptors


@dataclass
class _Peer:
    """A pool that can be written: its NIXL name and its prepared descriptors. `failed`: a write to it has
    failed."""

    name: str
    blocks: Any
    failed: bool = False


@dataclass
class _NixlPush:
    """A push of blocks.

    Writes have been started for the first `rows` rows of the pools. `writes` are in flight (NIXL's handles
    and start times); completed writes took `seconds` together. `since`: the step that fills the blocks, if
    they are not complete yet. With a rate limit the push does not end before `earliest`.
    """

    job: int
    to: CacheAddress
    sources: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]
    since: int | None
    started: float
    earliest: float = 0.0
    rows: int = 0
    sent: int = 0
    writes: list[tuple[Any, float]] = field(default_factory=list)
    seconds: float = 0.0
    error: str = ""


class NixlTransport:
    """Writes blocks of `pools` into the pools at other addresses, on one machine or between `machines`.

    `bytes_per_second` limits the rate, to simulate a network between two machines on one machine.
    """

    def __init__(
        self,
        pools: Pools,
        fingerprint: str,
        bytes_per_second: float | None = None,
        machines: bool = False,
    ) -> None:
        """Create the NIXL agent and start the thread. Raises TransferError if NIXL cannot be used here."""
        self._pools = pools
        self._widths = [row.shape[1] for row in pools.rows]
        self._fingerprint = fingerprint
        self._bytes_per_second = bytes_per_second
        self._agent = make_agent(machines)
        for pool in pools.pools:
            self._agent.register_memory(pool.view(-1))
        own = [_blocks(row.data_ptr(), row.shape[1:], pools.num_blocks) for row in pools.rows]
        self._own = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", np.concatenate(own), "DRAM")
        self._agent_lock = threading.Lock()  # an agent serves one thread at a time
        self._peers: dict[CacheAddress, _Peer] = {}
        self._pushed = 0
        self._wire_free = 0.0
        self._queue: queue.SimpleQueue[_NixlPush] = queue.SimpleQueue()
        self._in_flight: list[_NixlPush] = []
        self._landed: deque[Landed] = deque()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._work, name="kv-transport", daemon=True)
        self._thread.start()

    def check(self, to: CacheAddress) -> None:
        """Raise TransferError if blocks cannot be written to this cache."""
        check_fits(to, self._fingerprint, self._pools.block_bytes)
        peer = self._peers.get(to)
        if peer is None or peer.failed:
            with self._agent_lock:
                self._remove_dead_peers()
                if to not in self._peers:
                    self._peers[to] = self._add_peer(to)

    def push(
        self,
        to: CacheAddress,
        copies: Sequence[tuple[int, int]],
        upcoming: bool = False,
        reservation: str = "",
    ) -> int:
        self._pushed += 1
        sources, targets = np.array(copies, np.int32).T
        since = self._pools.before_step() if upcoming else None
        self._queue.put(_NixlPush(self._pushed, to, sources, targets, since, time.monotonic()))
        return self._pushed

    def landed(self) -> list[Landed]:
        return [self._landed.popleft() for _ in range(len(self._landed))]

    def close(self) -> None:
        """Wait up to CLOSE_SECONDS for pushes in progress."""
        self._closed.set()
        self._thread.join()

    def _work(self) -> None:
        """Start requested pushes and poll the pushes in flight, until closed."""
        deadline = float("inf")
        while time.monotonic() < deadline:
            if self._closed.is_set():
                idle = self._queue.empty() and not self._in_flight
                deadline = 0.0 if idle else min(deadline, time.monotonic() + CLOSE_SECONDS)
            unwritten = any(push.rows < len(self._widths) for push in self._in_flight)
            wait = LAYER_SECONDS if unwritten else POLL_SECONDS if self._in_flight else 20 * POLL_SECONDS
            with contextlib.suppress(queue.Empty):
                self._in_flight.append(self._queue.get(timeout=wait))
            with self._agent_lock:
                for push in self._in_flight:
                    self._start(push)
                self._in_flight = [push for push in self._in_flight if not self._has_ended(push)]

    def _start(self, push: _NixlPush) -> None:
        """Start writing the rows that have become ready."""
        ready = self._pools.ready(push.since)
        if push.error or ready == push.rows:
            return
        now = time.monotonic()
        sent = len(push.sources) * sum(self._widths[push.rows : ready])
        wire = sent / self._bytes_per_second if self._bytes_per_second else 0.0
        self._wire_free = max(self._wire_free, now) + wire
        try:
            self._check_range(push.sources, self._pools.num_blocks)
            self._check_range(push.targets, push.to.num_blocks)
            if push.to not in self._peers:
                raise TransferError(f"the worker at {push.to.path} is gone")
            handle = self._agent.make_prepped_xfer(
                "WRITE",
                self._own,
                _in_rows(push.sources, push.rows, ready, self._pools.num_blocks),
                self._peers[push.to].blocks,
                _in_rows(push.targets, push.rows, ready, push.to.num_blocks),
            )
            self._agent.transfer(handle)
        except Exception as error:  # NIXL's errors have no common base class; this write was not started
            self._fail(push, str(error))
            return
        push.writes.append((handle, now))
        push.rows, push.sent, push.earliest = ready, push.sent + sent, self._wire_free

    def _has_ended(self, push: _NixlPush) -> bool:
        """Return whether a push has ended; if so, add its result to the landed pushes."""
        now = time.monotonic()
        if now < push.earliest and not push.error:
            return False
        in_flight = [write for write in push.writes if self._is_in_flight(push, write[0], now)]
        push.seconds += sum(now - write[1] for write in push.writes if write not in in_flight)
        push.writes = in_flight
        if push.writes or (push.rows < len(self._widths) and not push.error):
            return False
        self._landed.append(Landed(push.job, 0 if push.error else push.sent, push.error, push.seconds))
        return True

    def _is_in_flight(self, push: _NixlPush, handle: Any, now: float) -> bool:
        """Return whether a write may still be in flight. A failed write sets its push's error."""
        try:
            state, error = self._agent.check_xfer_state(handle), "NIXL could not write"
        except Exception as failure:  # the receiver has gone
            state, error = "ERR", str(failure)
        if state == "PROC":
            if now < push.started + SUSPECT_SECONDS or _alive(push.to):
                return True
            error = f"the worker at {push.to.path} is gone"
        elif state == "DONE":
            handle.release()
            return False
        self._fail(push, error)
        return False

    def _fail(self, push: _NixlPush, error: str) -> None:
        push.error = push.error or error
        if push.to in self._peers:
            self._peers[push.to].failed = True

    def _check_range(self, blocks: npt.NDArray[np.int32], count: int) -> None:
        """Raise TransferError for a block beyond its row: its index would address a block of the next row."""
        if len(blocks) and not 0 <= int(blocks.min()) <= int(blocks.max()) < count:
            raise TransferError(f"block numbers must be below {count}, but are {blocks.tolist()}")

    def _add_peer(self, to: CacheAddress) -> _Peer:
        """Add a pool's agent and prepare descriptors of its blocks."""
        _check_memory(to)
        try:
            name = self._agent.add_remote_agent(to.agent)
            name = name.decode() if isinstance(name, bytes) else name
            blocks = _blocks(to.base, self._widths, to.num_blocks)
            return _Peer(name, self._agent.prep_xfer_dlist(name, blocks, "DRAM"))
        except Exception as error:  # forged metadata, or memory that the metadata does not cover
            raise TransferError(f"the cache at {to.path} cannot be written: {error}") from error

    def _remove_dead_peers(self) -> None:
        """Release the descriptors of workers that have ended, or to which a write has failed."""
        # A push in flight still uses its descriptors.
        busy = {push.to for push in self._in_flight}
        gone = [to for to, peer in self._peers.items() if peer.failed or not _alive(to)]
        for address in [to for to in gone if to not in busy]:
            peer = self._peers.pop(address)
            peer.blocks.release()
            try:
                self._agent.remove_remote_agent(peer.name)
            except Exception as error:  # NIXL has already removed it
                logger.debug("removed peer %s: %s", peer.name, error)


def _in_rows(blocks: npt.NDArray[np.int32], first: int, last: int, num_blocks: int) -> npt.NDArray[np.int32]:
    """Return the descriptor indices of `blocks` in rows `first` to `last` (exclusive), flat."""
    rows = np.arange(first, last, dtype=np.int32)[:, None]
    return (rows * num_blocks + blocks).ravel().astype(np.int32)


def _check_memory(to: CacheAddress) -> None:
    """Raise TransferError if the memory at this address is known to be gone or replaced.

    Memory on another machine cannot be checked.
    """
    if to.host != identity():
        return
    try:
        status = os.stat(to.path)
    except OSError as error:
        raise TransferError(f"the cache at {to.path} cannot be opened: {error.strerror}") from error
    if (status.st_ino, status.st_size) != (to.inode, to.size):
        raise TransferError(f"{to.path} now belongs to other memory: the worker was restarted")


def _alive(to: CacheAddress) -> bool:
    try:
        _check_memory(to)
    except TransferError:
        return False
    return True
