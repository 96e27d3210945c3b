"""The compiled kernels in a wheel: one library for each level, and the files of their measured rates.

A checkout, or a wheel for another kind of processor, has no libraries: kernels are then compiled on first
use.
"""

import hashlib
import platform
from pathlib import Path

from streamserve.execution.backends.native.build import kernel_folder, processor
from streamserve.execution.backends.native.levels import Level, detected_level
from streamserve.protocol.config import KernelPath

FOLDER = Path(__file__).parent / "compiled"
"""The folder of a wheel's libraries; a checkout does not have it."""


def file_name(level: Level) -> str:
    """Return the file name of a level's library."""
    return f"kernels-{level.name}.so"


def packaged_library(folder: Path = FOLDER, bound: KernelPath | None = None) -> Path | None:
    """Return the packaged library for this processor, with at most the instructions of `bound` (default: the
    process's bound); None if there is none. Raises CheckpointError if the processor lacks the
    instructions."""
    if platform.machine() != "x86_64":
        return None
    path = folder / file_name(detected_level(bound))
    return path if path.is_file() else None


def rates_file(library: Path) -> Path:
    """Return the path of the rates measured with a library. The file is next to a compiled library. For a
    packaged library it is in the user's cache folder, because the package's folder may be shared by machines,
    or not writable."""
    if library.parent != FOLDER:
        return library.with_suffix(".json")
    digest = hashlib.blake2b(library.read_bytes(), digest_size=16)
    digest.update(processor().encode())
    return kernel_folder() / "packaged" / f"{digest.hexdigest()}.json"
