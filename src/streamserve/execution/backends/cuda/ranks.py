"""A tensor-parallel model as one worker: the leader (rank 0) is the worker's process; the other ranks are
child processes that repeat the leader's passes and copies on their shards.

    leader   Forward ── standard input ──▶ children      then computes its part of the pass, which is added
             Sample, Copy, Move, Swap, Logits            to the children's in the sums over ranks
    death    the leader ends when a child ends; a child ends when its standard input is closed
"""

import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from streamserve.contracts.plan import Span
from streamserve.execution.backends.cuda.collectives import Ranks
from streamserve.execution.backends.cuda.graphs import Graphs
from streamserve.execution.backends.cuda.passes import Nodes
from streamserve.execution.backends.cuda.runner import Fetch, Runner
from streamserve.execution.backends.cuda.swap import Copies, DeviceHostPool, Swapping
from streamserve.execution.compute.kv_cache import KVCache
from streamserve.execution.model.layout import Ints, Layout, lay_out
from streamserve.protocol.config import ModelConfig

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 1 << 30
Pairs = list[tuple[int, int]]


class RankStart(msgspec.Struct, frozen=True):
    """The model that a child loads: rank number `rank`, with pools of the leader's sizes."""

    config: ModelConfig
    rank: int
    store: str
    device: str
    blocks: int
    swap_blocks: int
    max_model_len: int


class ForwardCall(msgspec.Struct, frozen=True, tag=True):
    """Run Runner.forward on the layout of these spans."""

    spans: list[Span]
    sources: dict[int, int]


class Sample(msgspec.Struct, frozen=True, tag=True):
    """Run Runner.sample on these nodes. `arrays`: the bytes of each array of Nodes, by name."""

    arrays: dict[str, bytes]
    depth: int


class Logits(msgspec.Struct, frozen=True, tag=True):
    """Run Runner.logits on `rows` hidden states, which the leader broadcasts."""

    rows: int


class Copy(msgspec.Struct, frozen=True, tag=True):
    """Run Runner.copy_blocks."""

    copies: Pairs


class Move(msgspec.Struct, frozen=True, tag=True):
    """Run Runner.move_slots."""

    sources: list[int]
    destinations: list[int]


class Swap(msgspec.Struct, frozen=True, tag=True):
    """Run DeviceHostPool.begin."""

    out: Pairs
    back: Pairs


Message = ForwardCall | Sample | Logits | Copy | Move | Swap
NODE_ARRAYS = tuple(field.name for field in fields(Nodes) if field.name != "depth")


def write(stream: IO[bytes], message: msgspec.Struct) -> None:
    """Write a message: four bytes of length (little endian), then msgpack."""
    content = msgspec.msgpack.encode(message)
    stream.write(len(content).to_bytes(4, "little") + content)
    stream.flush()


def read(stream: IO[bytes], kind: Any) -> Any:
    """Return the next message, of type `kind`; None at the end of the stream. Raises ValueError for a message
    that is too long."""
    size = int.from_bytes(stream.read(4), "little")
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return msgspec.msgpack.decode(stream.read(size), type=kind) if size else None


class Children:
    """The processes of all ranks except the leader's. If a child ends, this process ends too."""

    def __init__(self, start: RankStart, degree: int) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closing = False
        for rank in range(1, degree):
            process = subprocess.Popen(
                [sys.executable, "-m", "streamserve.execution.loading.rank"], stdin=subprocess.PIPE
            )
            self._processes.append(process)
            write(self._input(process), msgspec.structs.replace(start, rank=rank))
            threading.Thread(target=self._watch, args=(process, rank), daemon=True).start()

    @property
    def process_ids(self) -> list[int]:
        """The children's process ids, in order of rank."""
        return [process.pid for process in self._processes]

    def send(self, message: Message) -> None:
        for process in self._processes:
            write(self._input(process), message)

    def close(self) -> None:
        """Close the children's inputs, which ends them, and wait for them to end."""
        self._closing = True
        for process in self._processes:
            self._input(process).close()
        for process in self._processes:
            process.wait()

    def kill(self) -> None:
        """Kill all children: while they load, they would wait for a leader that has failed."""
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
    """The leader's Runner: it sends each task that changes the device's state to the children, too."""

    def __init__(self, runner: Runner, ranks: Ranks, children: Children) -> None:
        self._runner = runner
        self._ranks = ranks
        self._children = children

    @property
    def cache(self) -> KVCache:
        return self._runner.cache

    @property
    def graphs(self) -> Graphs:
        return self._runner.graphs

    @property
    def waits(self) -> int:
        return self._runner.waits

    @waits.setter
    def waits(self, count: int) -> None:
        self._runner.waits = count

    def forward(self, layout: Layout, sources: Mapping[int, int] | None = None) -> Tensor:
        """Run Runner.forward on all ranks."""
        spans = [msgspec.structs.replace(part.span, tree=_plain(part.span)) for part in layout.parts]
        self._children.send(ForwardCall(spans, dict(sources or {})))
        return self._runner.forward(layout, sources)

    def sample(self, nodes: Nodes) -> Tensor:
        """Run Runner.sample on all ranks."""
        arrays = {name: getattr(nodes, name).tobytes() for name in NODE_ARRAYS}
        self._children.send(Sample(arrays, nodes.depth))
        return self._runner.sample(nodes)

    def fetch(self, rows: Tensor | None) -> Fetch:
        """Run Runner.fetch on the leader: the results of all ranks are equal."""
        return self._runner.fetch(rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """Run Runner.logits on all ranks, for the leader's `hidden`."""
        self._children.send(Logits(len(hidden)))
        shared = hidden.contiguous()
        self._ranks.share(shared)
        return self._runner.logits(shared)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Run Runner.copy_blocks on all ranks."""
        if copies:
            self._children.send(Copy(list(copies)))
            self._runner.copy_blocks(copies)

    def move_slots(self, sources: Ints, destinations: Ints) -> None:
        """Run Runner.move_slots on all ranks."""
        if len(sources):
            self._children.send(Move(sources.tolist(), destinations.tolist()))
            self._runner.move_slots(sources, destinations)

    def close(self) -> None:
        """End the children."""
        self._children.close()


class LeadingHostPool(DeviceHostPool):
    """The leader's host pool: it sends its copies to the children, by `send`."""

    def __init__(self, caches: Sequence[KVCache], num_blocks: int, send: Callable[[Message], None]) -> None:
        super().__init__(caches, num_blocks)
        self._send = send

    def begin(self, copies_out: Copies, copies_in: Copies) -> Swapping | None:
        """Run DeviceHostPool.begin on all ranks."""
        if copies_out or copies_in:
            self._send(Swap(list(copies_out), list(copies_in)))
        return super().begin(copies_out, copies_in)


def _plain(span: Span) -> Any:
    """Return a span's tree without its draws, which only the leader needs."""
    return None if span.tree is None else replace(span.tree, draws={})


def follow(stream: IO[bytes], runner: Runner, ranks: Ranks, host: DeviceHostPool | None) -> None:
    """Obey the leader's messages until it closes the `stream`."""
    while (message := read(stream, Message)) is not None:
        with torch.inference_mode():
            obey(message, runner, ranks, host)


def obey(message: Message, runner: Runner, ranks: Ranks, host: DeviceHostPool | None) -> None:
    """Do the work that one message of the leader asks for."""
    match message:
        case ForwardCall():
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
