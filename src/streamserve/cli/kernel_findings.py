"""Findings of `streamserve doctor` about the CPU kernels: their source, their instructions, and their
speed."""

import os
from pathlib import Path

import torch

from streamserve.cli.findings import Finding, Verdict
from streamserve.execution.backends.native.abi import LibraryMismatch
from streamserve.execution.backends.native.build import (
    BuildFailed,
    NativeCacheError,
    cached_library,
    check_owner,
    find_compiler,
    kernel_folder,
)
from streamserve.execution.backends.native.levels import detected_level, lesser_level
from streamserve.execution.backends.native.library import Path as KernelPath
from streamserve.execution.backends.native.library import ThreadPool, load_library
from streamserve.execution.backends.native.packaged import packaged_library
from streamserve.execution.backends.native.paths import choose, name_of, stored_rates
from streamserve.protocol.errors import CheckpointError
from streamserve.system.instructions import KERNEL_PATH_VARIABLE


def kernel_findings() -> list[Finding]:
    """Return which kernels a server would use, with findings about the compiler that they may need."""
    try:
        if os.path.exists(kernel_folder()):
            check_owner(kernel_folder())
        packaged = packaged_library()
        library = packaged or cached_library()
    except (NativeCacheError, CheckpointError) as error:
        return [Finding(Verdict.FAIL, "kernels", str(error), "solve this problem, and run the command again")]
    except BuildFailed as error:
        return [
            Finding(
                Verdict.SLOW,
                "kernels",
                f"{error}: models run on plain PyTorch, several times slower",
                "install g++, or the wheel for x86-64 Linux, which has compiled kernels",
            )
        ]
    if library is None:
        text = f"will be compiled at the first start, in about half a minute, by {find_compiler()}"
        advice = "compile them now: python -m streamserve.execution.backends.native"
        return [Finding(Verdict.SLOW, "kernels", text, advice)]
    source = "packaged" if packaged else "compiled on this machine"
    return [_library_finding(library, source), _compiler()]


def _library_finding(library: Path, source: str) -> Finding:
    """Return which instructions a library's kernels use on this processor, and the rates that determined the
    choice."""
    try:
        loaded = load_library(library)
    except OSError as error:
        return Finding(
            Verdict.SLOW,
            "kernels",
            f"{library} cannot be loaded ({error}): models run on plain PyTorch",
            "compile kernels here: pip install --no-binary streamserve streamserve, with g++",
        )
    except LibraryMismatch as error:
        return Finding(Verdict.FAIL, "kernels", str(error), "do what it says, and run this again")
    pool = ThreadPool(loaded, 1)
    paths = [path for path in KernelPath if pool.supports(path, torch.bfloat16)]
    rates = stored_rates(library)
    if rates is None:
        best, names = max(paths), ", ".join(map(name_of, paths))
        text = f"{source}: {names}; the first start measures which is fastest"
    else:
        best = choose({path: rates.get(name_of(path), 0.0) for path in paths})
        measured = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in rates.items() if rate)
        text = f"{source}: {name_of(best)}; measured in Gop/s for a thread: {measured or 'nothing'}"
    if lesser := lesser_level():
        return Finding(
            Verdict.SLOW,
            "kernels",
            f"{text}; {KERNEL_PATH_VARIABLE} limits the kernels to level {lesser.name}",
            f"unset {KERNEL_PATH_VARIABLE}, unless you want this limit",
        )
    if best == KernelPath.PORTABLE:
        level = detected_level().name
        return Finding(
            Verdict.SLOW,
            "kernels",
            f"{text}; this processor is of level {level}, without AVX2",
            "use a processor (or a virtual machine's CPU model) with AVX2 or later",
        )
    return Finding(Verdict.OK, "kernels", text)


def _compiler() -> Finding:
    """Return which compiler is installed. If there are kernels already, none is needed."""
    try:
        return Finding(Verdict.OK, "compiler", find_compiler())
    except BuildFailed:
        return Finding(Verdict.OK, "compiler", "there is no compiler, and none is needed")
