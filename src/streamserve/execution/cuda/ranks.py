"""A tensor-parallel model as one worker: the leader (rank 0) is the worker's process, the others are children
that do what it does.

    leader   Forward ── standard input ──▶ children      then its own part of the pass, which meets theirs in
             Sample, Copy, Move, Swap, Logits            the sums over ranks
    death    a child that ends takes the leader with it, and children end with their standard input
"""

import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from streamserve.contracts.plan import Span
from streamserve.execution.cuda.collectives import Ranks
from streamserve.execution.cuda.passes import Nodes
from streamserve.execution.cuda.runner import Fetch, Runner
from streamserve.execution.cuda.swap import Copies, DeviceHostPool, Swapping
from streamserve.execution.kv_cache import KVCache
from streamserve.execution.layout import Ints, Layout, lay_out
from streamserve.protocol.config import ModelConfig

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 1 << 30
Pairs = list[tuple[int, int]]


class Start(msgspec.Struct, frozen=True):
    """What a child loads: rank number `rank` of the model, with the pools that the leader has."""

    config: ModelConfig
    rank: int
    store: str
    device: str
    blocks: int
    swap_blocks: int
    max_model_len: int


class Forward(msgspec.Struct, frozen=True, tag=True):
    """Runner.forward of a layout of these spans."""

    spans: list[Span]
    sources: dict[int, int]


class Sample(msgspec.Struct, frozen=True, tag=True):
    """Runner.sample of these nodes: their arrays' bytes by name."""

    arrays: dict[str, bytes]
    depth: int


class Logits(msgspec.Struct, frozen=True, tag=True):
    """Runner.logits of so many rows, which the leader shares."""

    rows: int


class Copy(msgspec.Struct, frozen=True, tag=True):
    """Runner.copy_blocks."""

    copies: Pairs


class Move(msgspec.Struct, frozen=True, tag=True):
    """Runner.move_slots."""

    sources: list[int]
    destinations: list[int]


class Swap(msgspec.Struct, frozen=True, tag=True):
    """DeviceHostPool.begin."""

    out: Pairs
    back: Pairs


Message = Forward | Sample | Logits | Copy | Move | Swap
NODE_ARRAYS = ("rows", "tokens", "parents", "slots", "firsts", "draws")


def write(stream: IO[bytes], message: msgspec.Struct) -> None:
    """Write a message: four bytes of length (little endian), then msgpack."""
    content = msgspec.msgpack.encode(message)
    stream.write(len(content).to_bytes(4, "little") + content)
    stream.flush()


def read(stream: IO[bytes], kind: Any) -> Any:
    """Return the next message of this type; None at the end. Raises ValueError for one that is too long."""
    size = int.from_bytes(stream.read(4), "little")
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return msgspec.msgpack.decode(stream.read(size), type=kind) if size else None


class Children:
    """The processes of all ranks but the leader's. If one ends, this process ends."""

    def __init__(self, start: Start, degree: int) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closing = False
        for rank in range(1, degree):
            process = subprocess.Popen(
                [sys.executable, "-m", "streamserve.execution.cuda.rank"], stdin=subprocess.PIPE
            )
            self._processes.append(process)
            write(self._input(process), msgspec.structs.replace(start, rank=rank))
            threading.Thread(target=self._watch, args=(process, rank), daemon=True).start()

    @property
    def process_ids(self) -> list[int]:
        """The children's process ids, in order of rank."""
        return [process.pid for process in self._processes]

    def send(self, message: Message) -> None:
        """Send a message to all."""
        for process in self._processes:
            write(self._input(process), message)

    def close(self) -> None:
        """End all."""
        self._closing = True
        for process in self._processes:
            self._input(process).close()
        for process in self._processes:
            process.wait()

    def kill(self) -> None:
        """End all at once: without the leader they would wait for it."""
        self._closing = True
        for process in self._processes:
            process.kill()
            process.wait()

    @staticmethod
    def _input(process: "subprocess.Popen[bytes]") -> IO[bytes]:
        assert process.stdin is not None
        return process.stdin

    def _watch(self, process: "subprocess.Popen[bytes]", rank: int) -> None:
        status = process.wait()
        if not self._closing:
            log.critical("rank %d of the model ended with status %d: this worker ends, too", rank, status)
            os._exit(1)


class LeadingRunner:
    """The leader's Runner: what it is asked to do, the children are too."""

    def __init__(self, runner: Runner, ranks: Ranks, children: Children) -> None:
        self._runner = runner
        self._ranks = ranks
        self._children = children

    @property
    def cache(self) -> KVCache:
        return self._runner.cache

    @property
    def graphs(self) -> Any:
        return self._runner.graphs

    @property
    def waits(self) -> int:
        return self._runner.waits

    @waits.setter
    def waits(self, count: int) -> None:
        self._runner.waits = count

    def forward(self, layout: Layout, sources: Mapping[int, int] | None = None) -> Tensor:
        """As Runner.forward."""
        spans = [msgspec.structs.replace(part.span, tree=_plain(part.span)) for part in layout.parts]
        self._children.send(Forward(spans, dict(sources or {})))
        return self._runner.forward(layout, sources)

    def sample(self, nodes: Nodes) -> Tensor:
        """As Runner.sample."""
        arrays = {name: getattr(nodes, name).tobytes() for name in NODE_ARRAYS}
        self._children.send(Sample(arrays, nodes.depth))
        return self._runner.sample(nodes)

    def fetch(self, rows: Tensor | None) -> Fetch:
        """As Runner.fetch: the leader alone reads results."""
        return self._runner.fetch(rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """As Runner.logits."""
        self._children.send(Logits(len(hidden)))
        shared = hidden.contiguous()
        self._ranks.share(shared)
        return self._runner.logits(shared)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """As Runner.copy_blocks."""
        if copies:
            self._children.send(Copy(list(copies)))
            self._runner.copy_blocks(copies)

    def move_slots(self, sources: Ints, destinations: Ints) -> None:
        """As Runner.move_slots."""
        if len(sources):
            self._children.send(Move(sources.tolist(), destinations.tolist()))
            self._runner.move_slots(sources, destinations)

    def close(self) -> None:
        """End the children."""
        self._children.close()


class LeadingHostPool(DeviceHostPool):
    """The leader's host pool, which tells the children of its copies by `send`."""

    def __init__(self, caches: Sequence[KVCache], num_blocks: int, send: Callable[[Message], None]) -> None:
        super().__init__(caches, num_blocks)
        self._send = send

    def begin(self, copies_out: Copies, copies_in: Copies) -> Swapping | None:
        """As DeviceHostPool.begin."""
        if copies_out or copies_in:
            self._send(Swap(list(copies_out), list(copies_in)))
        return super().begin(copies_out, copies_in)


def _plain(span: Span) -> Any:
    """Return a span's tree without what only the leader needs."""
    return None if span.tree is None else replace(span.tree, draws={})


def follow(stream: IO[bytes], runner: Runner, ranks: Ranks, host: DeviceHostPool | None) -> None:
    """Do what the leader does until it closes the `stream`."""
    while (message := read(stream, Message)) is not None:
        with torch.inference_mode():
            obey(message, runner, ranks, host)


def obey(message: Message, runner: Runner, ranks: Ranks, host: DeviceHostPool | None) -> None:
    """Do what one message says."""
    match message:
        case Forward():
            runner.forward(lay_out(message.spans, runner.cache.block_size), message.sources)
        case Sample():
            arrays = {name: np.frombuffer(message.arrays[name], np.int32) for name in NODE_ARRAYS}
            arrays["draws"] = arrays["draws"].reshape(len(arrays["rows"]), -1)
            runner.sample(Nodes(**arrays, depth=message.depth))
        case Logits():
            model = runner.model
            hidden = torch.empty(message.rows, model.spec.hidden_size, dtype=model.dtype, device=model.device)
            ranks.share(hidden)
            runner.logits(hidden)
        case Copy():
            runner.copy_blocks(message.copies)
        case Move():
            runner.move_slots(np.array(message.sources), np.array(message.destinations))
        case Swap():
            assert host is not None
            host.begin(message.out, message.back)


def new_store() -> Path:
    """Return the path of a file by which ranks meet, in a new folder that only this user can read."""
    return Path(tempfile.mkdtemp(prefix="streamserve-ranks-")) / "store"
