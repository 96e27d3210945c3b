"""Loaded adapters and the adapters of a step, as both the kernels and plain torch read them."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from streamserve.execution.model.lora.weights import AdapterWeights


@dataclass(frozen=True)
class PackedAdapter:
    """An adapter as the kernels read it: `maps` [layers × KINDS], structures of the kernels, point into
    `memory`. `rank` is the largest sum of the ranks of a map's modules."""

    maps: "ctypes.Array[Any]"
    memory: Tensor
    rank: int


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter of a loaded model: `packed` for the kernels, or its `weights` for plain torch."""

    nbytes: int
    packed: PackedAdapter | None = None
    weights: AdapterWeights | None = None


@dataclass(frozen=True)
class StepAdapters:
    """The adapters that rows of a step have: `adapter_of` [rows] is an index of `adapters`, -1 for the base
    model alone. `runs` are the rows (first, last exclusive, index) of each span with an adapter."""

    adapters: Sequence[LoadedAdapter]
    adapter_of: NDArray[np.int32]
    runs: Sequence[tuple[int, int, int]]
