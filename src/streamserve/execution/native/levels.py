"""The sets of instructions that a wheel's kernels are compiled for, and the one for a processor."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_V3 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"})
_V3_VNNI = _V3 | {"avx_vnni"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI = _V4 | {"avx512_vnni"}
_BF16 = _VNNI | {"avx512_bf16"}
_AMX = _BF16 | {"amx_tile", "amx_int8", "amx_bf16"}


@dataclass(frozen=True)
class Level:
    """What one library is compiled for: `base`, a level of x86-64 as `-march` names it, and `extensions`, as
    `-m` names them. `needed` are the flags in /proc/cpuinfo of processors that can run it."""

    name: str
    base: str
    extensions: tuple[str, ...]
    needed: frozenset[str]


LEVELS = (
    Level("baseline", "x86-64", (), frozenset()),
    Level("avx2", "x86-64-v3", (), _V3),
    Level("avx2-vnni", "x86-64-v3", ("avxvnni",), _V3_VNNI),
    Level("avx512", "x86-64-v4", (), _V4),
    Level("avx512-vnni", "x86-64-v4", ("avx512vnni",), _VNNI),
    Level("avx512-bf16", "x86-64-v4", ("avx512vnni", "avx512bf16"), _BF16),
    Level("amx", "x86-64-v4", ("avx512vnni", "avx512bf16", "amx-tile", "amx-int8", "amx-bf16"), _AMX),
)
"""All levels. None needs less than an earlier one, so that the last one that a processor can run is the best:
`avx512` leaves out the VNNI of 256 bits, which is for processors without AVX-512."""


def runnable(flags: Collection[str]) -> list[Level]:
    """Return the levels that a processor with `flags` can run."""
    return [level for level in LEVELS if level.needed <= set(flags)]


def best_level(flags: Collection[str]) -> Level:
    """Return the last level that a processor with `flags` can run."""
    return runnable(flags)[-1]


def processor_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the instruction sets that processor and kernel support, as Linux names them; none where it does
    not say."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    found = (line.partition(":")[2].split() for line in lines if line.startswith("flags"))
    return frozenset(next(found, []))
