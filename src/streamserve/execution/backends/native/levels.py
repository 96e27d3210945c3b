"""The instruction set levels that kernels are compiled for, and the choice of a level for a processor.

STREAMSERVE_KERNEL_PATH can lower the detected level (system/instructions.py), never raise it.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from streamserve.protocol.config import KernelPath
from streamserve.protocol.errors import CheckpointError
from streamserve.system.instructions import KERNEL_PATH_VARIABLE, kernel_bound

_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"})
_V3_VNNI = _V3 | {"avx_vnni"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = _V4 | {"avx512_vnni"}
_BF16 = _VNNI | {"avx512_bf16"}
_AMX = _BF16 | {"amx_tile", "amx_int8", "amx_bf16"}


@dataclass(frozen=True)
class Level:
    """The instructions that one library is compiled for: `base` is a level of x86-64 for `-march`,
    `extensions` are names for `-m`. Processors with all flags `needed` in /proc/cpuinfo can run it. `path` is
    the best path of its kernels."""

    name: str
    path: KernelPath
    base: str
    extensions: tuple[str, ...]
    needed: frozenset[str]


LEVELS = (
    Level("baseline", "portable", "x86-64", (), frozenset()),
    Level("avx2", "avx2", "x86-64-v3", (), _V3),
    Level("avx2-vnni", "avx2", "x86-64-v3", ("avxvnni",), _V3_VNNI),
    Level("avx512", "avx512", "x86-64-v4", (), _V4),
    Level("avx512-vnni", "avx512", "x86-64-v4", ("avx512vnni",), _VNNI),
    Level("avx512-bf16", "avx512_bf16", "x86-64-v4", ("avx512vnni", "avx512bf16"), _BF16),
    Level("amx", "amx", "x86-64-v4", ("avx512vnni", "avx512bf16", "amx-tile", "amx-int8", "amx-bf16"), _AMX),
)
"""All levels, in an order in which the last one that a processor can run is the best. (`avx512` does not need
the VNNI of 256 bits, which is for processors without AVX-512.)"""


def runnable(flags: Collection[str]) -> list[Level]:
    """Return the levels that a processor with `flags` can run."""
    return [level for level in LEVELS if level.needed <= set(flags)]


def best_level(flags: Collection[str], bound: KernelPath = "auto") -> Level:
    """Return the last level that a processor with `flags` can run. With a `bound`, return the first level of
    that path: the level of the least processors that have the path.

    Raises CheckpointError if the processor lacks the path.
    """
    levels = runnable(flags)
    if bound == "auto":
        return levels[-1]
    for level in levels:
        if level.path == bound:
            return level
    available = ", ".join(dict.fromkeys(level.path for level in levels))
    raise CheckpointError(
        f"{KERNEL_PATH_VARIABLE} = {bound} is not available on this processor: use auto, {available}"
    )


def detected_level(bound: KernelPath | None = None) -> Level:
    """Return the level of this processor, at most the level of `bound` (default: the process's bound). Raises
    CheckpointError as `best_level` does."""
    return best_level(processor_flags(), kernel_bound() if bound is None else bound)


def lesser_level(bound: KernelPath | None = None) -> Level | None:
    """Return the level that the bound lowers this processor to; None if it does not lower it."""
    level = detected_level(bound)
    return None if level == best_level(processor_flags()) else level


def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return Linux's names of the instruction sets that processor and kernel support; empty if they are not
    known."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":")[2].split() for line in lines if line.startswith("flags"))
    return frozenset(next(found, []))
