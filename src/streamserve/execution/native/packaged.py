"""The kernels that a wheel has compiled: one library for each level, and where their measured rates are kept.

A checkout has none, nor has a wheel for another kind of processor: kernels are then compiled on first use.
"""

import hashlib
import platform
from pathlib import Path

from streamserve.execution.native.build import kernel_folder, processor
from streamserve.execution.native.levels import Level, detected_level
from streamserve.protocol.config import KernelPath

FOLDER = Path(__file__).parent / "compiled"
"""Where a wheel has its libraries; not there in a checkout."""


def file_name(level: Level) -> str:
    """Return the name of a level's library."""
    return f"kernels-{level.name}.so"


def packaged_library(folder: Path = FOLDER, bound: KernelPath | None = None) -> Path | None:
    """Return the packaged library for this processor, with at most the instructions of `bound`, by default
    the process's; None if there is none. Raises CheckpointError if the processor lacks them."""
    if platform.machine() != "x86_64":
        return None
    path = folder / file_name(detected_level(bound))
    return path if path.is_file() else None


def rates_file(library: Path) -> Path:
    """Return where the rates measured with a library are stored: next to a compiled one; for a packaged one,
    whose folder may be shared by machines or not be writable, in the user's cache folder."""
    if library.parent != FOLDER:
        return library.with_suffix(".json")
    digest = hashlib.blake2b(library.read_bytes(), digest_size=16)
    digest.update(processor().encode())
    return kernel_folder() / "packaged" / f"{digest.hexdigest()}.json"
