"""Python bindings of the compiled kernels: functions, enums, paths, and the thread pool that runs them."""

import ctypes
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_size_t, c_uint64, c_void_p
from enum import IntEnum
from pathlib import Path as FilePath

import torch

from streamserve.execution.backends.native import abi
from streamserve.execution.backends.native.build import BuildFailed, build, flags_up_to
from streamserve.execution.backends.native.packaged import packaged_library
from streamserve.execution.backends.native.structures import (
    CHUNK,
    LORA_MAPS,
    MAX_QUERY_GROUP,
    PANEL,
    CacheLayerStruct,
    CacheStruct,
    DrawStruct,
    ExpertsStruct,
    GatingStruct,
    LayerStruct,
    LinearStruct,
    LoraStruct,
    LowRankColumnsStruct,
    LowRankStruct,
    ModelStruct,
    ScoringStruct,
    SpanStruct,
    StepStruct,
)
from streamserve.execution.compute.sampling import NOT_FINITE
from streamserve.execution.formats.quantization import LEVEL_INPUTS
from streamserve.protocol.config import KernelPath
from streamserve.system.instructions import kernel_bound

log = logging.getLogger(__name__)

_LARGE_PAGE = 2 << 20
TYPES = {torch.float32: 0, torch.bfloat16: 1}
SOURCES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtypes that weights can be packed from, with the values of cpp/pack.h."""


BLOCKS = {
    "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13,
    "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23, "MXFP4": 39,
}  # fmt: skip
"""Types of GGUF's blocks, with the values of cpp/blocks.h."""


class PackResult(IntEnum):
    """The result of packing blocks, with the values of cpp/pack.h. NOT_HELD: the scales do not fit into the
    requested type."""

    PACKED = 0
    NOT_FINITE = 1
    NOT_HELD = 2


class Path(IntEnum):
    """The instruction sets of the kernels, with the values of cpp/common.h."""

    PORTABLE = 0
    AVX2 = 1
    AVX512 = 2
    AVX512_BF16 = 3
    AMX = 4


class Numbers(IntEnum):
    """The kind of a weight's numbers, with the values of cpp/common.h."""

    PLAIN = 0
    INTEGERS = 1
    E4M3 = 2


class ScaleType(IntEnum):
    """The type of the scales of integers, with the values of cpp/common.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    E8M0 = 3
    LEVELS = 4


class Activation(IntEnum):
    """The activation of an MLP's gates, with the values of cpp/common.h."""

    SILU = 0
    GELU = 1
    CLAMPED_SILU = 2


_STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "Linear": LinearStruct, "Span": SpanStruct, "CacheLayer": CacheLayerStruct, "Scoring": ScoringStruct,
    "Gating": GatingStruct, "Experts": ExpertsStruct, "Layer": LayerStruct, "Model": ModelStruct,
    "LowRankColumns": LowRankColumnsStruct, "LowRank": LowRankStruct, "Lora": LoraStruct, "Step": StepStruct,
    "Cache": CacheStruct, "Draw": DrawStruct,
}  # fmt: skip
"""The structures that Python makes, by their names in cpp/."""

_VALUES: dict[str, dict[str, int]] = {
    "constants": {
        "PANEL": PANEL, "CHUNK": CHUNK, "LEVEL_K": LEVEL_INPUTS, "LORA_MAPS": LORA_MAPS,
        "MAX_QUERIES": MAX_QUERY_GROUP, "NOT_FINITE": NOT_FINITE,
    },
    "Type": {"F32": TYPES[torch.float32], "BF16": TYPES[torch.bfloat16]},
    "Source": {
        "FROM_F32": SOURCES[torch.float32], "FROM_BF16": SOURCES[torch.bfloat16],
        "FROM_F16": SOURCES[torch.float16],
    },
    "BlockType": BLOCKS,
    "PackResult": dict(PackResult.__members__),
    "Path": dict(Path.__members__),
    "Numbers": dict(Numbers.__members__),
    "ScaleType": {
        "SCALE_F32": ScaleType.FLOAT32, "SCALE_BF16": ScaleType.BFLOAT16, "SCALE_F16": ScaleType.FLOAT16,
        "SCALE_E8M0": ScaleType.E8M0, "SCALE_LEVELS": ScaleType.LEVELS,
    },
    "Activation": dict(Activation.__members__),
}  # fmt: skip
"""The values of enums and constants that Python has too, by their names in cpp/."""

_SIGNATURES: abi.Signatures = {
    "ss_path_supported": (c_int, [c_int, c_int]),
    "ss_multiply_registers": (c_double, [c_void_p, c_int, c_int, c_int]),
    "ss_pool_new": (c_void_p, [c_int, c_void_p, POINTER(c_int32)]),
    "ss_pool_delete": (None, [c_void_p]),
    "ss_pack": (c_int, [c_void_p, POINTER(LinearStruct), c_void_p, c_int, c_void_p]),
    "ss_quantize": (
        c_int,
        [c_void_p, POINTER(LinearStruct), c_void_p, c_int, c_int, c_void_p, c_void_p, c_void_p],
    ),
    "ss_pack_integers": (None, [c_void_p, POINTER(LinearStruct), c_void_p, c_void_p]),
    "ss_pack_blocks": (
        c_int,
        [c_void_p, POINTER(LinearStruct), c_void_p, c_void_p, c_void_p, c_void_p, c_void_p],
    ),
    "ss_unpack_floats": (c_int, [c_void_p, c_void_p, c_void_p, c_int, c_int, c_int, c_void_p]),
    "ss_rows": (None, [c_void_p, POINTER(LinearStruct), c_void_p, c_int, c_void_p]),
    "ss_linear": (
        None,
        [c_void_p, POINTER(LinearStruct), c_void_p, c_size_t, c_int, c_void_p, c_int, c_float, c_float],
    ),
    "ss_layers": (
        None,
        [c_void_p, POINTER(ModelStruct), POINTER(StepStruct), POINTER(CacheStruct), c_void_p, c_int, c_int],
    ),
    "ss_norm": (None, [c_void_p, c_void_p, c_void_p, c_int, c_int, c_float, c_int, c_int, c_int, c_void_p]),
    "ss_attend": (
        None,
        [
            c_void_p,
            POINTER(StepStruct),
            POINTER(CacheLayerStruct),
            c_void_p,
            c_int,
            c_int,
            c_float,
            c_float,
            c_void_p,
            c_int,
            c_void_p,
        ],
    ),
    "ss_sample": (None, [c_void_p, c_void_p, c_int, c_char_p, c_int, c_void_p]),
    "ss_select_draft_tokens": (None, [c_void_p, c_void_p, c_int, c_char_p, c_int, c_int, c_void_p, c_void_p]),
    "ss_large_pages": (None, [c_void_p, c_size_t]),
    "ss_read": (c_uint64, [c_void_p, c_void_p, c_size_t]),
}


def load_library(path: FilePath) -> ctypes.CDLL:
    """Return the library at `path`, loaded, with the types of its functions set. Calls release the GIL.

    Raises LibraryMismatch if its structures, enums or functions differ from Python's.
    """
    library = ctypes.CDLL(str(path))
    abi.check(library, path, _SIGNATURES, _STRUCTURES, _VALUES)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def kernels() -> ctypes.CDLL | None:
    """Return the kernels for this processor. STREAMSERVE_KERNEL_PATH bounds the instructions that they use.
    Raises and returns None as `kernels_up_to` does."""
    return kernels_up_to(kernel_bound())


@functools.cache
def kernels_up_to(bound: KernelPath) -> ctypes.CDLL | None:
    """Return the kernels for this processor that use no instructions beyond `bound`, from the wheel or
    compiled. Returns None, after one log message, if they are not available.

    Raises NativeCacheError if other users can write the cache folder, CheckpointError if the processor lacks
    the instructions, LibraryMismatch if the library does not fit the Python files.
    """
    try:
        return load_library(packaged_library(bound=bound) or build(flags=flags_up_to(bound)))
    except (BuildFailed, OSError) as error:
        log.warning("native kernels are unavailable: using the slower PyTorch backend (%s)", error)
        return None


class ThreadPool:
    """A thread pool that runs kernels on `threads` threads, of which the caller is one. Only one call may run
    at a time. `path`: the best path to use; default: the best one for each type. `cpus`: processors to pin
    the other threads to. Raises OSError if the system refuses a thread."""

    def __init__(
        self,
        library: ctypes.CDLL,
        threads: int,
        path: Path | None = None,
        cpus: Sequence[int] | None = None,
    ) -> None:
        self.library = library
        self.threads = threads
        self._path = path
        self._paths: dict[torch.dtype, Path] = {}
        self._allocate: Callable[[int], torch.Tensor] | None = None
        pins = (c_int32 * len(cpus))(*cpus) if cpus else None
        error = c_int32()
        self.handle: int = library.ss_pool_new(threads, pins, ctypes.byref(error))
        if not self.handle:
            reason = os.strerror(error.value)
            raise OSError(error.value, f"the system refuses {threads} threads for the kernels: {reason}")
        weakref.finalize(self, library.ss_pool_delete, self.handle)

    def memory(self, size: int) -> torch.Tensor:
        """Return `size` page-aligned bytes, on large pages if available. Aligned tiles never straddle cache
        lines."""
        if self._allocate:
            return self._allocate(size)
        page = 4096 if size < _LARGE_PAGE else _LARGE_PAGE
        memory = torch.empty(size + page, dtype=torch.uint8)
        offset = -memory.data_ptr() % page
        aligned = memory[offset : offset + size]
        self.large_pages(aligned)
        return aligned

    @contextmanager
    def allocating(self, allocate: Callable[[int], torch.Tensor]) -> Iterator[None]:
        """In the `with` body, let `memory` take its memory from `allocate`, which must return page-aligned
        memory."""
        self._allocate = allocate
        try:
            yield
        finally:
            self._allocate = None

    def large_pages(self, memory: torch.Tensor) -> None:
        """Request large pages for `memory`, which must not have been written yet."""
        begin = -(-memory.data_ptr() // 4096) * 4096
        size = memory.data_ptr() + memory.nbytes - begin
        if size >= _LARGE_PAGE:
            self.library.ss_large_pages(begin, size)

    def path(self, dtype: torch.dtype) -> Path:
        """Return the instruction set for numbers of `dtype`: the best one that is supported, but not beyond
        the `path` that the pool was created with."""
        if dtype not in self._paths:
            limit = Path.AMX if self._path is None else self._path
            self._paths[dtype] = max(path for path in Path if self.supports(path, dtype) and path <= limit)
        return self._paths[dtype]

    def supports(self, path: Path, dtype: torch.dtype) -> bool:
        """Return whether this processor and this build support the instruction set `path` for `dtype`."""
        return bool(self.library.ss_path_supported(path, TYPES[dtype]))
