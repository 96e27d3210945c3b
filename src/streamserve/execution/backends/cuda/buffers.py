"""Upload a step's integer arrays to the device: one pinned buffer, one copy, views at fixed offsets.

host    staging 0 ┐  pinned; written for step n while the copies of steps n-1 and n-2 may still be read
        staging 1 ┼──copy──> device buffer: has the views of all captured graphs, at offsets that depend
        staging 2 ┘          only on the graph's shape
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Arrays = Mapping[str, NDArray[np.integer]]

STAGING_BUFFERS = 3
ALIGNMENT = 4
"""Every array starts at a multiple of this many int32, so that kernels may load 16 bytes at once."""


@dataclass(frozen=True)
class Field:
    """An int32 array of `shape`. Numbers that a step does not write are filled with `padding`. A `ragged`
    array is not padded: its kernels read only the numbers that the step wrote."""

    name: str
    shape: tuple[int, ...]
    padding: int = 0
    ragged: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class BufferFields:
    """The layout of consecutive arrays in a buffer. Only the last one may be ragged."""

    fields: tuple[Field, ...]

    @cached_property
    def offsets(self) -> dict[str, int]:
        """The start of each array, in int32."""
        offsets, end = {}, 0
        for field in self.fields:
            offsets[field.name] = end
            end += -(-field.size // ALIGNMENT) * ALIGNMENT
        return offsets

    @cached_property
    def size(self) -> int:
        """The buffer's size in int32."""
        last = self.fields[-1]
        return self.offsets[last.name] + last.size

    def write(self, buffer: NDArray[np.int32], arrays: Arrays) -> int:
        """Write `arrays` and padding to `buffer`; return the number of int32 to copy to the device. Raises
        ValueError for an array that does not fit."""
        used = 0
        for field in self.fields:
            array, start = arrays[field.name].ravel(), self.offsets[field.name]
            if array.size > field.size:
                raise ValueError(f"{field.name} has {array.size} numbers, not up to {field.size}")
            buffer[start : start + array.size] = array
            used = start + array.size
            if not field.ragged:
                buffer[used : start + field.size] = field.padding
                used = start + field.size
        return used

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Return the arrays as views of `buffer`, by name."""
        return {
            field.name: buffer[self.offsets[field.name] :][: field.size].view(field.shape)
            for field in self.fields
        }


def new_event(timed: bool = False) -> torch.cuda.Event:
    """Return a new event of the current device. Only `timed` events can measure."""
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]


def new_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a new stream of `device`."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Uploads:
    """A device buffer of `size` int32, which is filled from several pinned staging buffers in turn."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.buffer = torch.zeros(size, dtype=torch.int32, device=device)
        self._cuda = device.type == "cuda"
        self._staging = [
            torch.zeros(size, dtype=torch.int32, pin_memory=self._cuda) for _ in range(STAGING_BUFFERS)
        ]
        self._copied: list[torch.cuda.Event | None] = [None] * STAGING_BUFFERS
        self._next = 0

    def upload(self, fields: BufferFields, arrays: Arrays) -> None:
        """Copy `arrays` to the device, in the current stream. Does not wait for this copy; waits for the
        earlier copy from the same staging buffer, STAGING_BUFFERS uploads ago."""
        number, self._next = self._next, (self._next + 1) % STAGING_BUFFERS
        copied, staging = self._copied[number], self._staging[number]
        if copied is not None:
            copied.synchronize()
        used = fields.write(staging.numpy(), arrays)
        self.buffer[:used].copy_(staging[:used], non_blocking=True)
        if self._cuda:
            event = copied or new_event()
            event.record()
            self._copied[number] = event
