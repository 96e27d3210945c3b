"""KV transfer over TCP to workers on other machines, and through shared memory to workers on this machine.

    engine ── push ──▶ NetworkTransport ── same machine ──▶ SharedMemoryTransport
                                        └─ other machine ─▶ a thread: Writes, at most WINDOW bytes in flight

A push that makes no progress for STALL_SECONDS has failed: its connection is closed. Its receiver refuses
data that arrives after the reservation is released.
"""

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch
import zmq

from streamserve.contracts.transport import Landed, TransferError
from streamserve.protocol.kv_network import (
    MAX_FRAME_BYTES,
    MAX_ROWS,
    MAX_WRITE_BYTES,
    KVNetwork,
    Write,
    decode_written,
    encode,
)
from streamserve.protocol.transfers import CacheAddress
from streamserve.system.machine import identity
from streamserve.transfer.network_memory import HEARTBEAT_MILLISECONDS, QUEUED, SILENCE_MILLISECONDS
from streamserve.transfer.pools import LAYER_SECONDS, Pools, check_fits
from streamserve.transfer.shared_memory import SharedMemoryTransport

logger = logging.getLogger(__name__)

STALL_SECONDS = 3.0
WINDOW_BYTES = 8 << 20
POLL_SECONDS = 0.001
IDLE_SECONDS = 0.02
CLOSE_SECONDS = 1.0
MAX_NUMBER = 1 << 30


@dataclass
class _BlockRange:
    """Rows `first` to `last` (exclusive) of blocks `start` to `stop` of a push."""

    first: int
    last: int
    start: int
    stop: int


@dataclass
class _NetworkPush:
    """A push of blocks.

    Rows below `rows` are ready and were cut into parts; `parts` are not sent yet. `in_flight` maps the
    numbers of unanswered Writes to their bytes. The push made its last progress at `moved_at`.
    """

    job: int
    to: CacheAddress
    reservation: str
    sources: torch.Tensor
    targets: list[int]
    since: int | None
    moved_at: float
    rows: int = 0
    parts: deque[_BlockRange] = field(default_factory=deque)
    in_flight: dict[int, int] = field(default_factory=dict)
    sent: int = 0
    began: float = 0.0
    error: str = ""


class NetworkTransport:
    """Writes blocks of `pools` into the pools at other addresses.

    `bytes_per_second` limits the rate, to simulate a slower network.
    """

    def __init__(
        self, pools: Pools, fingerprint: str, network: KVNetwork, bytes_per_second: float | None = None
    ) -> None:
        self._pools = pools
        self._fingerprint = fingerprint
        self._network = network
        self._bytes_per_second = bytes_per_second
        self._host = identity()
        self._shared = SharedMemoryTransport(pools, fingerprint, bytes_per_second)
        self._local: set[CacheAddress] = set()
        self._jobs = itertools.count()
        self._shared_jobs: dict[int, int] = {}
        self._queue: queue.SimpleQueue[_NetworkPush] = queue.SimpleQueue()
        self._landed: deque[Landed] = deque()
        self._closed = threading.Event()
        self._aborted = threading.Event()
        self._sender = threading.Thread(target=self._run, name="kv-send", daemon=True)
        self._sender.start()

    def check(self, to: CacheAddress) -> None:
        """Raise TransferError if blocks cannot be written to this cache."""
        check_fits(to, self._fingerprint, self._pools.block_bytes)
        if to.host == self._host and not self._network.always:
            with contextlib.suppress(TransferError):  # another user's memory, or other namespaces: over TCP
                self._shared.check(to)
                self._local.add(to)
                return
        self._local.discard(to)
        if not to.endpoint.startswith("tcp://"):
            raise TransferError(f"the cache at {to.path} is on another machine, which gave no address")

    def push(
        self,
        to: CacheAddress,
        copies: Sequence[tuple[int, int]],
        upcoming: bool = False,
        reservation: str = "",
    ) -> int:
        job = next(self._jobs)
        if to in self._local:
            self._shared_jobs[self._shared.push(to, copies, upcoming)] = job
            return job
        since = self._pools.before_step() if upcoming else None
        sources, targets = zip(*copies, strict=True)
        now = time.monotonic()
        self._queue.put(
            _NetworkPush(job, to, reservation, torch.tensor(sources), list(targets), since, now, began=now)
        )
        return job

    def landed(self) -> list[Landed]:
        local = [replace(landed, job=self._shared_jobs.pop(landed.job)) for landed in self._shared.landed()]
        return local + [self._landed.popleft() for _ in range(len(self._landed))]

    def close(self) -> None:
        """Wait up to CLOSE_SECONDS for pushes in progress, then end the connections."""
        self._shared.close()
        self._closed.set()
        self._sender.join()

    def abort(self) -> None:
        """Send nothing more. Data in flight may still arrive; its receiver checks the reservation."""
        self._aborted.set()
        self._shared.abort()
        self._sender.join()

    def _run(self) -> None:
        with _Connections(self._network) as connections:
            pushes: list[_NetworkPush] = []
            numbers = itertools.cycle(range(1, MAX_NUMBER))
            deadline = float("inf")
            wire_free = 0.0
            while time.monotonic() < deadline and not self._aborted.is_set():
                if self._closed.is_set():
                    deadline = min(deadline, time.monotonic() + CLOSE_SECONDS if pushes else 0.0)
                waits = any(push.rows < len(self._pools.rows) for push in pushes)
                busy = LAYER_SECONDS if waits else POLL_SECONDS
                with contextlib.suppress(queue.Empty):
                    pushes.append(self._queue.get(timeout=busy if pushes else IDLE_SECONDS))
                for push in pushes:
                    self._cut(push)
                wire_free = self._send(pushes, connections, numbers, wire_free)
                self._acknowledged(pushes, connections)
                pushes = [push for push in pushes if not self._over(push, connections)]

    def _cut(self, push: _NetworkPush) -> None:
        """Cut the rows that have become ready into parts."""
        ready = self._pools.ready(push.since)
        if ready == push.rows:
            return
        push.moved_at = time.monotonic()
        push.parts.extend(_parts(self._pools, push.rows, ready, len(push.targets)))
        push.rows = ready

    def _send(
        self,
        pushes: list[_NetworkPush],
        connections: "_Connections",
        numbers: Iterator[int],
        wire_free: float,
    ) -> float:
        """Send parts while the window allows it; return when the simulated wire will be free again."""
        in_flight = sum(sum(push.in_flight.values()) for push in pushes)
        for push in pushes:
            while push.parts and not push.error and in_flight < WINDOW_BYTES:
                now = time.monotonic()
                if now < wire_free:
                    # The simulated wire delays this push: that is not a stall.
                    push.moved_at = now
                    return wire_free
                number, part = next(numbers), push.parts[0]
                size = self._send_part(push, part, connections, number)
                if not size:
                    break  # not connected yet
                push.parts.popleft()
                push.in_flight[number] = size
                in_flight += size
                if self._bytes_per_second:
                    wire_free = max(wire_free, now) + size / self._bytes_per_second
        return wire_free

    def _send_part(
        self, push: _NetworkPush, part: _BlockRange, connections: "_Connections", number: int
    ) -> int:
        """Send a part; return its size in bytes, or 0 if it cannot be sent now."""
        write = Write(
            push.to.incarnation, push.reservation, number, part.first, push.targets[part.start : part.stop]
        )
        try:
            sources = push.sources[part.start : part.stop]
            rows: list[Any] = [self._pools.read(row, sources) for row in range(part.first, part.last)]
            frames = [row.view(torch.uint8).numpy() for row in rows]
        except (IndexError, RuntimeError) as error:  # blocks that the pool does not have
            push.error = str(error)
            return 0
        if connections.send(push.to.endpoint, [encode(write), *(memoryview(f).cast("B") for f in frames)]):
            return sum(frame.nbytes for frame in frames)
        return 0

    def _acknowledged(self, pushes: list[_NetworkPush], connections: "_Connections") -> None:
        for data in connections.received():
            try:
                written = decode_written(data)
            except msgspec.DecodeError:
                continue
            for push in pushes:
                size = push.in_flight.pop(written.number, None)
                if size is not None:
                    push.sent += size
                    push.moved_at = time.monotonic()
                    push.error = push.error or written.error

    def _over(self, push: _NetworkPush, connections: "_Connections") -> bool:
        """Return whether a push has ended; if so, add its result to the landed pushes."""
        now = time.monotonic()
        # A push whose next rows are not computed yet is not stalled.
        waits_for_step = not push.parts and not push.in_flight and push.rows < len(self._pools.rows)
        if not push.error and not waits_for_step and now - push.moved_at > STALL_SECONDS:
            push.error = f"the worker at {push.to.endpoint} has not answered for {STALL_SECONDS:g} s"
            connections.drop(push.to.endpoint)
        done = push.rows == len(self._pools.rows) and not push.parts and not push.in_flight
        if not done and not push.error:
            return False
        sent = 0 if push.error else push.sent
        self._landed.append(Landed(push.job, sent, push.error, now - push.began))
        return True


class _Connections:
    """The sockets to other workers, by endpoint. Only one thread may use them."""

    def __init__(self, network: KVNetwork) -> None:
        self._network = network
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}

    def __enter__(self) -> "_Connections":
        return self

    def __exit__(self, *exc: object) -> None:
        for endpoint in list(self._sockets):
            self.drop(endpoint)
        self._context.term()

    def send(self, endpoint: str, frames: Sequence[bytes | memoryview]) -> bool:
        """Send a message; return False if it cannot be sent now."""
        socket = self._sockets.get(endpoint) or self._connect(endpoint)
        try:
            socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        return True

    def received(self) -> Iterator[bytes]:
        """Yield the messages that have arrived."""
        for socket in self._sockets.values():
            with contextlib.suppress(zmq.Again):
                while True:
                    yield socket.recv(zmq.NOBLOCK)

    def drop(self, endpoint: str) -> None:
        """Close a connection and discard its unsent messages."""
        socket = self._sockets.pop(endpoint, None)
        if socket is not None:
            socket.close(linger=0)

    def _connect(self, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        # IMMEDIATE: queue nothing before the connection is made, so that an unsent part stays in its push.
        for option, value in {
            zmq.LINGER: 0,
            zmq.IMMEDIATE: 1,
            zmq.SNDHWM: QUEUED,
            zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
            zmq.CONNECT_TIMEOUT: 1000,
            zmq.RECONNECT_IVL: 100,
            zmq.RECONNECT_IVL_MAX: 500,
            zmq.HEARTBEAT_IVL: HEARTBEAT_MILLISECONDS,
            zmq.HEARTBEAT_TIMEOUT: SILENCE_MILLISECONDS,
            zmq.IPV6: int("[" in endpoint),
        }.items():
            socket.setsockopt(option, value)
        # All workers of a fleet have one key pair, which proves to both sides that the other belongs to it.
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._network.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._network.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._network.secret)
        socket.connect(endpoint)
        self._sockets[endpoint] = socket
        return socket


def _parts(pools: Pools, first: int, last: int, blocks: int) -> Iterator[_BlockRange]:
    """Cut rows `first` to `last` of a number of blocks into parts of at most MAX_WRITE_BYTES and MAX_ROWS
    rows."""
    row = first
    while row < last:
        width = pools.rows[row].shape[1]
        if blocks * width > MAX_WRITE_BYTES:
            step = max(1, MAX_WRITE_BYTES // width)
            for start in range(0, blocks, step):
                yield _BlockRange(row, row + 1, start, min(start + step, blocks))
            row += 1
            continue
        end, size = row, 0
        while end < min(last, row + MAX_ROWS) and size + blocks * pools.rows[end].shape[1] <= MAX_WRITE_BYTES:
            size += blocks * pools.rows[end].shape[1]
            end += 1
        yield _BlockRange(row, end, 0, blocks)
        row = end
