"""The receiving side of KV over TCP: a thread that writes arriving blocks into this worker's pool.

writer ══ Write, CURVE ══▶ ROUTER ── BlockGate: is the reservation open, are the blocks its? ──▶ the pool

Only holders of the fleet's key pass the handshake. The memory is also shared memory, for writers on this
machine.
"""

import contextlib
import logging
import secrets
import threading

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import zmq
from msgspec.structs import replace
from torch import Tensor
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from streamserve.contracts.transport import TransferError
from streamserve.protocol.kv_network import (
    MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    MAX_ROWS,
    KVNetwork,
    Write,
    Written,
    decode_write,
    encode,
)
from streamserve.protocol.transfers import CacheAddress
from streamserve.system.machine import identity
from streamserve.transfer.gate import BlockGate
from streamserve.transfer.pools import Pools
from streamserve.transfer.shared_memory import SharedMemory

logger = logging.getLogger(__name__)

POLL_MILLISECONDS = 50
QUEUED = 64
HANDSHAKE_MILLISECONDS = 5000
HEARTBEAT_MILLISECONDS = 1000
SILENCE_MILLISECONDS = 3000
Row = npt.NDArray[np.uint8]


class NetworkMemory:
    """Memory that workers of this machine, and of others over TCP, can write; `size` bytes once allocated."""

    def __init__(self, network: KVNetwork) -> None:
        self.gate = BlockGate()
        self._network = network
        self._shared = SharedMemory()
        self._rows: list[Row] = []
        self._incarnation = secrets.token_hex(16)
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._endpoint = ""

    @property
    def size(self) -> int:
        return self._shared.size

    def allocate(self, size: int) -> Tensor:
        """Allocate the memory, once, and return it as bytes."""
        return self._shared.allocate(size)

    def serve(self, pools: Pools) -> None:
        """Accept writes to these pools, which are in this memory.

        Raises TransferError if the address cannot be used.
        """
        self._rows = [row.view(torch.uint8).numpy() for row in pools.rows]
        self._listen()

    def reopen(self, network: KVNetwork) -> None:
        """Accept writes to the same pools again after `close`, with the keys of another fleet.

        `address` changes, and writes to the previous address are refused. Raises TransferError as `serve`
        does.
        """
        self._network = network
        self._incarnation = secrets.token_hex(16)
        self._closed = threading.Event()
        self._listen()

    def _listen(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        authenticator = ThreadAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback("*", self)
        socket = _listening(context, self._network)
        try:
            socket.bind(f"tcp://{_bracketed(self._network.address)}:*")
        except zmq.ZMQError as error:
            authenticator.stop()
            socket.close()
            context.term()
            raise TransferError(
                f"KV cannot be received at {self._network.address}: {error}: give an address of this machine "
                "with --address"
            ) from error
        self._endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        arguments = (context, socket, authenticator)
        self._thread = threading.Thread(target=self._receive, args=arguments, name="kv-receive", daemon=True)
        self._thread.start()

    def address(self, num_blocks: int, fingerprint: str) -> CacheAddress:
        """Return the address at which other workers can write a pool of `num_blocks` blocks in this
        memory."""
        address = self._shared.address(num_blocks, fingerprint)
        return replace(address, host=identity(), endpoint=self._endpoint, incarnation=self._incarnation)

    def close(self) -> None:
        """Accept no further writes."""
        self._closed.set()
        if self._thread:
            self._thread.join()

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a client with this public key (in Z85) may connect; called by the authenticator."""
        return z85.decode(key) == self._network.public

    def _receive(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        socket: zmq.Socket[bytes],
        authenticator: ThreadAuthenticator,
    ) -> None:
        while not self._closed.is_set():
            if not socket.poll(POLL_MILLISECONDS):
                continue
            peer, *frames = socket.recv_multipart(copy=False)
            try:
                written = self._write(frames)
            except Exception:  # only this message has failed: its sender gets no answer and gives up
                logger.exception("failed to receive KV")
                continue
            with contextlib.suppress(zmq.ZMQError):
                socket.send_multipart([peer.bytes, encode(written)], zmq.NOBLOCK)
        authenticator.stop()
        socket.close()
        context.term()

    def _write(self, frames: list[zmq.Frame]) -> Written:
        """Write the rows of one message, if its reservation allows it; return the answer."""
        if not frames or len(frames[0]) > MAX_HEADER_BYTES or not 1 < len(frames) <= MAX_ROWS + 1:
            return Written(0, "a write must have a header and some rows")
        try:
            write = decode_write(frames[0].bytes)
        except msgspec.DecodeError as error:
            return Written(0, f"unreadable: {error}"[:200])
        rows = self._rows[write.first : write.first + len(frames) - 1]
        if write.incarnation != self._incarnation:
            self.gate.refused += 1
            return Written(write.number, "the worker was restarted")
        sizes = [len(write.blocks) * row.shape[1] for row in rows]
        if sizes != [len(frame) for frame in frames[1:]]:
            return Written(write.number, "the rows have different sizes")
        refusal = self.gate.write(
            write.reservation,
            write.blocks,
            lambda: _copy(rows, write, [frame.buffer for frame in frames[1:]]),
        )
        return Written(write.number, refusal)


def _copy(rows: list[Row], write: Write, data: list[memoryview]) -> None:
    blocks = np.array(write.blocks, np.int64)
    for row, part in zip(rows, data, strict=True):
        row[blocks] = np.frombuffer(part, np.uint8).reshape(len(blocks), row.shape[1])


def _listening(context: zmq.Context[zmq.Socket[bytes]], network: KVNetwork) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.ROUTER)
    for option, value in {
        zmq.LINGER: 0,
        zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
        zmq.RCVHWM: QUEUED,
        zmq.SNDHWM: QUEUED * MAX_ROWS,
        zmq.HANDSHAKE_IVL: HANDSHAKE_MILLISECONDS,
        zmq.HEARTBEAT_IVL: HEARTBEAT_MILLISECONDS,
        zmq.HEARTBEAT_TIMEOUT: SILENCE_MILLISECONDS,
        zmq.IPV6: int(":" in network.address),
        zmq.CURVE_SERVER: 1,
    }.items():
        socket.setsockopt(option, value)
    socket.setsockopt(zmq.CURVE_SECRETKEY, network.secret)
    return socket


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
